"""Committer: applies the results of a step to the requests, and ends those that are done."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from quire.cache.scores import MOST_TOP
from quire.engine.decode_rows import DecodeRows
from quire.engine.failure_messages import cannot_draw, difference, no_number
from quire.engine.inflight_prefixes import unforked
from quire.engine.plan import GENERATE, INVALID_TOKEN, DecodeStep, Plan, PlanItem, StepOutput
from quire.engine.scheduler_state import SchedulerState
from quire.engine.step_events import Drawn, StepEvents
from quire.request import Event, FinishReason, Request, TokenLogprobs


class Committer:
    """Applies the results of steps to a scheduler's requests."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def commit(self, plan: Plan, output: StepOutput) -> StepEvents:
        """Apply the results of a step. End the requests that are done, marked to end, or could not be planned.

        Results for a request that has since ended, or was marked to end, are dropped.
        """
        self._state.num_planned += plan.num_tokens
        if self._state.pace is not None:
            self._state.pace.observe(plan.num_tokens, self._state.clock() - self._state.manager.now)
        if self._state.speculation is not None:
            self._state.speculation.observe(plan, self._state.clock() - self._state.manager.now)
        if self._state.prefetch is not None:
            self._state.prefetch.end_step(plan.num_tokens, self._state.clock() - self._state.manager.now)
        try:
            return self._events(plan, output)
        except BaseException:
            if self._state.rows is not None:
                for request in self._state.running:  # some have their token, and others do not
                    self._state.rows.note(request)
            raise

    def _events(self, plan: Plan, output: StepOutput) -> StepEvents:
        rows, events = self._state.rows, StepEvents()
        events.add(self._end_all(plan.failed))
        if plan.decode is not None and rows is not None:
            events.add(self._commit_rows(plan.decode, rows, output))
        for i, item in enumerate(plan.rest, plan.num_decoding):
            if item.request.finish_reason is None:
                events.add(self._commit_request(i, item, output))
                if rows is not None and item.request.finish_reason is None:
                    rows.note(item.request)
        if self._state.marked:
            events.add(self._end_marked())
        return events

    def _commit_rows(self, step: DecodeStep, rows: DecodeRows, output: StepOutput) -> Drawn:
        """Apply the results for requests that merely decode.

        Those that end, or have more to report than a token, are `odd`: they are committed one by one. Requests that
        just continue come last, so that an exception loses no token of theirs.
        """
        tokens = output.decoded
        if tokens is None:
            tokens = np.array([output.tokens[name] for name in step.ids], np.int64)
        rows.committed(step, tokens)
        values, odd = tokens.tolist(), dict.fromkeys(step.end(tokens).nonzero()[0].tolist())
        odd.update((row, None) for row in output.nonfinite_rows if row < len(values))
        if output.logprobs:
            odd.update((row, None) for row, name in enumerate(step.ids) if name in output.logprobs)
        if step.is_ahead or self._state.marked:
            odd.update((row, None) for row, one in enumerate(step.requests) if one.finish_reason is not None)
        found: dict[int, list[Event]] = {}
        for row in odd:
            request = step.requests[row]
            found[row] = []
            if request.finish_reason is None:
                output.tokens[request.id] = values[row]
                found[row] = self._commit_request(row, PlanItem(request, int(step.starts[row]), 1), output)
                rows.look_later(request)
        full = [row for row in (step.starts + 1 >= step.dues).nonzero()[0].tolist() if row not in odd]
        for row in full:
            request = step.requests[row]
            request.tokens.append(values[row])
            self._state.manager.advance(request, 1)
            rows.look_later(request)
        done = odd.keys() | full
        for row, (append, cache, token) in enumerate(zip(step.appends, step.caches, values, strict=True)):
            if row not in done:
                append(token)
                cache.num_computed += 1
        return Drawn(step.ids, values, found)

    def _commit_request(self, index: int, item: PlanItem, output: StepOutput) -> list[Event]:
        """Apply the results for one request. index: of its item in the plan."""
        request = item.request
        if index in output.nonfinite_rows:
            self._state.manager.mark_nonfinite(request, request.cache.num_computed + output.nonfinite_rows[index])
        event = self._commit_item(item, output)
        events = [] if event is None else [event]
        if event is not None and item.drafts:
            events += self._commit_drafts(item, event, output)
        self._state.manager.forget_uncomputed(request)
        return events

    def fail(self, plan: Plan, error: BaseException) -> list[Event]:
        """End the requests of a step that raised; the others continue."""
        events = self._end_all([*plan.failed, *((item.request, error) for item in plan.items)])
        for request in (*plan.preempted, *plan.resumed):  # their blocks may not have moved
            owns_blocks = request.cache.block_ids or request.cache.host_block_ids
            if self._state.requests.get(request.id) is request and owns_blocks:
                self._state.leave(request)
                self._state.waiting.add(request)
        return events + self._end_marked()

    def _commit_item(self, item: PlanItem, output: StepOutput) -> Event | None:
        request, start, num_new, *_ = item
        is_last = start + num_new == len(request.tokens)
        token = output.tokens[request.id] if is_last and request.task is GENERATE else None
        prompt_logprobs = self._prompt_logprobs(request, output.prompt_logprobs.get(request.id, ()))
        if token == INVALID_TOKEN or (token is None and output.is_broken(item)):  # its results must not be shared
            return self._end_without_number(request, prompt_logprobs)
        if token is not None and request.group is not None and request.num_generated == 0:
            self._fork_siblings(request)
        self._state.manager.advance(request, num_new)
        if token is None:
            if is_last:  # the request is complete
                event = Event(request.id, prompt_logprobs=prompt_logprobs, finish_reason=FinishReason.LENGTH)
                return self._end(event._replace(hidden_state=output.hidden_states.get(request.id)))
            return Event(request.id, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        logprobs = output.logprobs.get(request.id)
        if request.driven:
            return Event(request.id, None, logprobs, prompt_logprobs)
        return self._append(request, token, logprobs, prompt_logprobs)

    def _prompt_logprobs(self, request: Request, computed: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs to report: those that were stored with cached blocks, then those of this step."""
        cache, wanted = request.cache, request.sampling.prompt_logprobs or 0
        found, cache.found = cache.found, ()
        request.schedule.num_prompt_logprobs += len(found)
        self._state.manager.record(request, computed)
        request.schedule.num_prompt_logprobs += len(computed)
        if wanted < MOST_TOP:
            computed = tuple(TokenLogprobs(one.token, one.logprob, one.rank, ()) for one in computed)
        return found + computed

    def _commit_drafts(self, item: PlanItem, event: Event, output: StepOutput) -> list[Event]:
        """Return the events of the tokens drawn after accepted draft tokens. event: of the token before them."""
        request, events = item.request, [event]
        logprobs = output.logprobs_after_drafts.get(request.id, [None] * len(item.drafts))
        for draft, token, logprob in zip(item.drafts, output.tokens_after_drafts[request.id], logprobs, strict=True):
            if events[-1].token != draft or events[-1].finish_reason is not None:
                break
            self._state.manager.advance(request, 1)  # the draft token, which was computed
            if token == INVALID_TOKEN:
                events.append(self._end_without_number(request))
                break
            events.append(self._append(request, token, logprob))
        if self._state.speculation is not None:
            self._state.speculation.judge(item, len(events) - 1)
        return events[1:]

    def _append(
        self, request: Request, token: int, logprobs: TokenLogprobs | None, of_prompt: tuple[TokenLogprobs, ...] = ()
    ) -> Event:
        """Append the drawn token to a request, and end the request if that was its last one.

        If its caller already has a token for this position, that one is appended instead.
        """
        drawn = None
        if request.to_check:
            drawn, token = token, request.to_check.pop(0)
        request.tokens.append(token)
        event = Event(request.id, token, logprobs, of_prompt, drawn=drawn)
        if drawn is not None and drawn != token and request.is_strict:
            return self._end(event._replace(finish_reason=FinishReason.ERROR, error=difference(request, drawn)))
        try:
            reason = self._reason_to_end(request, token)
        except Exception as error:  # raised by its guide
            return self._end_failed(request, error, of_prompt)
        if reason is None:
            return event
        stop_token = token if reason is FinishReason.STOP and token in request.sampling.stop_tokens else None
        return self._end(event._replace(finish_reason=reason, stop_token=stop_token))

    def _fork_siblings(self, request: Request) -> None:
        """Fork the siblings from the prompt's blocks, as far as slots allow.

        Each of them computes the last row again.
        """
        slots = self._state.max_num_seqs - len(self._state.running)
        for sibling in list(islice(unforked(request, self._state.waiting), slots)) if slots else ():
            self._state.waiting.remove(sibling)
            self._state.manager.fork(request, sibling)
            self._state.running.add(sibling)

    def _reason_to_end(self, request: Request, token: int) -> FinishReason | None:
        if token in request.ending_tokens:  # the sampler never draws one before min_tokens
            return FinishReason.STOP
        if request.guide is not None:
            request.guide.accept(token)
            if request.guide.done:  # reported after this token, which still belongs to the output
                self._state.finish(request.id, FinishReason.STOP)
                return None
        if len(request.tokens) >= self._state.longest(request):
            return FinishReason.LENGTH
        if request.guide is not None:
            request.schedule.allowed = request.guide.allowed()
        return None

    def _end_without_number(self, request: Request, of_prompt: tuple[TokenLogprobs, ...] = ()) -> Event:
        error = cannot_draw(request)
        if error is not None:
            return self._end_failed(request, error, of_prompt)
        ended = Event(request.id, None, None, of_prompt, FinishReason.ERROR, error=no_number(request))
        return self._end(ended)

    def _end_all(self, failed: Iterable[tuple[Request, BaseException]]) -> list[Event]:
        """End those of these requests that have not ended."""
        return [self._end_failed(request, error) for request, error in failed if request.finish_reason is None]

    def _end_failed(self, request: Request, error: BaseException, of_prompt: tuple[TokenLogprobs, ...] = ()) -> Event:
        """End a request with an error. of_prompt: the logprobs of the prompt positions that its last step computed."""
        message = f"{type(error).__name__}: {error}"
        return self._end(Event(request.id, None, None, of_prompt, FinishReason.ERROR, error=message))

    def _end_marked(self) -> list[Event]:
        marked, self._state.marked = self._state.marked, []
        return [
            self._end(Event(request.id, finish_reason=request.finish_reason))
            for request in marked
            if self._state.requests.get(request.id) is request
        ]

    def _end(self, event: Event) -> Event:
        """Remove the event's request and free its blocks."""
        request = self._state.requests.pop(event.request_id)
        request.finish_reason = event.finish_reason
        self._state.leave(request)
        return event
