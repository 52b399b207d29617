"""Scheduler: distributes each step's tokens among the requests, and preempts requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice, pairwise

from quire.cache.audit import audit
from quire.cache.manager import BlockManager, Move
from quire.cache.usage import CacheUsage, cache_usage, state_usage
from quire.engine.admission_backoff import Shortage
from quire.engine.decisions import (
    Hold,
    fits,
    free_seats,
    may_pass,
    needs_token,
    num_new_tokens,
    seats_wanted,
    share_budget,
    who_gives_way,
)
from quire.engine.failure_messages import cannot_draw, difference, no_number
from quire.engine.inflight_prefixes import ComingBlocks, unforked
from quire.engine.limits import check_size
from quire.engine.plan import GENERATE, INVALID_TOKEN, Plan, PlanItem, StepOutput
from quire.engine.policy import BLIND_TO_PRIORITY, Order, first_come_first_served
from quire.engine.prefetch import NAP, Prefetch
from quire.engine.prefill_budget import PrefillBudget
from quire.engine.queue import SORT_KEY, RankedList, WaitingQueue
from quire.engine.speculation import PromptLookup
from quire.errors import BadValue, OutOfBlocks, RequestError
from quire.request import Event, FinishReason, Request, TokenLogprobs

log = logging.getLogger("quire")


class Scheduler:
    """Continuous batching by one rule: num_computed catches up with len(tokens), within a token budget per step.

    A prompt, a chunk of one, a single decoded token, the rest after a prefix hit and the recomputation of a preempted
    request are all the same subtraction. A request waits, runs (it owns blocks), or is swapped out (it owns blocks on
    the host). Running requests share the budget first. Requests are admitted in the order of their ranks. When blocks
    run out, the last running ones are preempted, and preempted requests resume first: no request can take a block from
    the first of all, so all of them end.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        order: Order = first_come_first_served,
        lookup: PromptLookup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.order = order
        self.lookup = lookup  # if set, proposes draft tokens where that is worthwhile
        self.clock = clock
        self.pace: PrefillBudget | None = None  # if set, steps in which sequences decode are shorter
        self.prefetch: Prefetch | None = None  # if set, requests may wait for blocks from other sources
        self.running = RankedList()
        self.swapped = RankedList()
        self.waiting = WaitingQueue()
        self.requests: dict[str, Request] = {}  # all of these, by id
        self.num_preemptions = 0
        self.num_planned = 0  # tokens computed in all committed steps
        self._budget = max_num_batched_tokens  # of the last planned step
        self._marked: list[Request] = []  # to be ended by the next commit
        self._num_added = self._num_plans = 0
        self._shortage = Shortage()

    @property
    def is_ending(self) -> bool:
        """True if the next commit ends requests, whatever its step computes for them."""
        return bool(self._marked)

    @property
    def has_work(self) -> bool:
        """True if any request has not ended."""
        return bool(self.requests)

    def usage(self) -> CacheUsage:
        """Return the current usage of the blocks of attention."""
        return cache_usage(self.manager, self.running)

    def state_usage(self) -> tuple[CacheUsage, CacheUsage]:
        """Return the current usage of the states, and of the rows of pieces in progress."""
        return state_usage(self.manager, self.running)

    def audit(self) -> None:
        """Verify the lists of requests and the cache's bookkeeping. Raises BadValue for an inconsistency."""
        listed = [*self.running, *self.swapped, *self.waiting]
        if sorted(r.schedule.ordinal for r in listed) != sorted(r.schedule.ordinal for r in self.requests.values()):
            raise BadValue(f"{len(self.requests)} requests are {len(listed)} times in the scheduler's lists")
        for name, one in (("running", self.running), ("swapped", self.swapped)):
            if any(a.schedule.sort_key >= b.schedule.sort_key for a, b in pairwise(one)):
                raise BadValue(f"the {name} requests are not in the order of their ranks")
        for r in listed:
            if bool(r.cache.block_ids) != (r in self.running) or bool(r.cache.host_block_ids) != (r in self.swapped):
                raise BadValue(f"request {r.id} has blocks elsewhere than the scheduler believes")
        if self.waiting and self.waiting.first() is not min(self.waiting, key=SORT_KEY):
            raise BadValue("the first of the waiting requests is not known as such")
        audit(self.manager, list(self.requests.values()))

    def check(self, request: Request) -> None:
        """Raise RequestError, with the numbers, if the request could never run here."""
        if request.priority and self.order in BLIND_TO_PRIORITY:
            message = f"request {request.id} has priority {request.priority}"
            raise RequestError(f"{message}; only scheduling_policy='priority' uses it", "priority")
        check_size(request, self.longest(request), self.manager, self.max_model_len, self.max_num_seqs)

    def longest(self, request: Request) -> int:
        """Return the number of tokens, prompt included, at which the request ends at the latest."""
        asked = request.sampling.max_tokens if request.task is GENERATE else 0
        return self.max_model_len if asked is None else min(self.max_model_len, request.num_prompt + asked)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and queues nothing, if it could never run or its id is taken.

        Siblings must be added one after the other.
        """
        if not request.is_checked:
            self.check(request)
        if request.guide is not None:
            try:
                request.schedule.allowed = request.guide.allowed()
            except Exception as error:
                raise RequestError(f"request {request.id}: its grammar allows no first token: {error}") from error
        self._register(request)
        self.waiting.add(request)

    def _register(self, request: Request) -> None:
        if request.id in self.requests:
            raise RequestError(f"request id {request.id!r} is taken by a request that has not ended")
        request.schedule.ordinal = self._num_added
        self._num_added += 1
        first = request.group.members[0] if request.group else request
        request.schedule.sort_key = (self.order(request), request.schedule.ordinal, request.schedule.ordinal)
        if first is not request:  # siblings are adjacent
            request.schedule.sort_key = (*first.schedule.sort_key[:2], request.schedule.ordinal)
        self.requests[request.id] = request

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Mark a request to be ended by the next commit; an unknown or ended one is left alone."""
        request = self.requests.get(request_id)
        if request is not None and request.finish_reason is None:
            request.finish_reason = reason
            self._marked.append(request)

    # --------------------------------------------------------------------------- requests whose tokens a driver chooses

    def extend(self, request: Request, token: int) -> None:
        """Append the next token to a driven request."""
        request.tokens.append(token)

    def fork(self, parent: Request, child: Request) -> None:
        """Make the child, a new request or a sibling that drops its own state, continue from the parent.

        The child already has the parent's tokens. It inherits everything that determines the parent's numbers, such as
        its adapter. If the parent was preempted and its tokens are not all in the cache, the child is recomputed too.
        """
        child.inherit(parent)
        if child.id not in self.requests:
            self._register(child)
        seated = bool(child.cache.block_ids)
        self._leave(child)
        self.manager.forget_tokens(child)
        if parent.cache.block_ids and parent.num_missing == 0 and (seated or len(self.running) < self.max_num_seqs):
            self.manager.fork(parent, child)
            self.running.add(child)
        else:
            self.waiting.add(child)

    # ------------------------------------------------------------------------------------------------- a step

    def plan(self) -> Plan:
        """Plan the next step: running requests first, then preempted ones, then new ones."""
        plan = Plan()
        self._num_plans += 1
        self.manager.now = self.clock()
        if self.prefetch is not None:
            self.prefetch.begin_step()
        lacking = self._keep_running(plan)
        if not plan.preempted:  # blocks freed for one request are not given to another in the same step
            self._bring_back(plan, lacking)
            self._admit(plan, lacking)
        if self.prefetch is not None:
            self.prefetch.planned(plan)
            if plan.is_empty and not (plan.failed or self._marked) and self.prefetch.is_waiting:
                self.prefetch.arrivals.wait(NAP)
                return plan
        if self.running and plan.is_empty and not (plan.preempted or plan.failed or self._marked):
            # No request can advance: siblings that wait for one another own the blocks that the next one in the queue
            # needs. They are put in the queue after it; if swapped to the host, they would resume before it.
            self._preempt(self.running.last_unit(), None, plan)
        self._keep_states(plan)
        return plan

    def _keep_states(self, plan: Plan) -> None:
        """Make the step store states for later reuse, now that all of its requests have their blocks."""
        if self.manager.state_groups:
            for item in plan.items:
                try:
                    self.manager.keep_states(item.request, item.start, item.start + item.num_new)
                except Exception:  # nothing was allocated
                    log.exception("request %s stores no states for reuse", item.request.id)

    def _keep_running(self, plan: Plan) -> list[int]:
        """Plan the running requests. Return the blocks of each group that they will still need for their tokens.

        Every request that needs a single token gets it before a long prompt takes the rest of the budget.
        """
        singles = sum([len(request.tokens) - request.cache.num_computed == 1 for request in self.running])
        all_decode = singles == len(self.running) and not self.swapped
        budget = self._budget = self._step_budget(singles)
        lacking = [0] * len(self.manager.groups)
        at = 0
        while at < len(self.running) and budget > 0:  # the list may lose its tail meanwhile
            request = self.running[at]
            at += 1
            missing = len(request.tokens) - request.cache.num_computed
            num_new = num_new_tokens(missing, budget, singles)
            singles -= missing == 1
            if missing == 0 or request.finish_reason is not None:
                continue
            if num_new <= 0:
                lacking = [a + b for a, b in zip(lacking, self.manager.lacking(request), strict=True)]
                continue
            try:
                has_room = self._make_room(request, request.cache.num_computed + num_new, plan)
            except Exception as error:
                plan.failed.append((request, error))
                continue
            if has_room:
                plan.items.append(PlanItem(request, request.cache.num_computed, num_new))
                budget -= num_new
                if num_new < missing:
                    lacking = [a + b for a, b in zip(lacking, self.manager.lacking(request), strict=True)]
        plan.num_tokens = self._budget - budget
        nobody_comes = not self.waiting or len(self.running) >= self.max_num_seqs
        if self.lookup is not None and all_decode and nobody_comes and not plan.preempted:
            self.lookup.add_to(plan, self.manager, self.longest, budget)
        return lacking

    def _step_budget(self, num_decoding: int) -> int:
        """Return the token budget of a step in which `num_decoding` sequences decode."""
        if self.pace is None or num_decoding == 0:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, self.pace.most(num_decoding))

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Grow a running request, preempting the last ones while blocks are short.

        Return False if it was itself preempted.
        """
        while not self.manager.grow(request, num_tokens, plan.copies):
            unit = who_gives_way(request, self.running)
            self._preempt(unit, self._swap_out(unit), plan)
            if request in unit:
                return False
        return True

    def _swap_out(self, unit: list[Request]) -> list[Move] | None:
        try:
            return self.manager.swap_out(unit)
        except Exception:
            log.exception("swapping out failed; %s will be computed again", ", ".join(request.id for request in unit))
            return None

    def _preempt(self, unit: list[Request], moves: list[Move] | None, plan: Plan) -> None:
        """Stop these requests. Swap their blocks out to the host or, without moves, free them to be recomputed."""
        for request in unit:
            self.running.take_out(request)
            if moves is None:
                self._restart(request)
            else:
                self.swapped.add(request)
        plan.swap_out += moves or []
        plan.preempted += unit
        self.num_preemptions += len(unit)

    def _restart(self, request: Request) -> None:
        self.manager.release(request)
        self.waiting.add(request)

    def _bring_back(self, plan: Plan, lacking: list[int]) -> None:
        """Swap requests in, in the order of their ranks.

        Siblings are swapped in together, and only if there are blocks for all of their tokens in addition to those that
        the running requests lack.
        """
        while self.swapped and plan.num_tokens < self._budget:
            unit = self.swapped.first_unit()
            needed = [a + b for a, b in zip(self.manager.needed_to_swap_in(unit), lacking, strict=True)]
            if len(self.running) + len(unit) > self.max_num_seqs or not self.manager.has_free(needed):
                if self.running:
                    return
                for request in unit:  # together they do not fit even alone: restart them one by one
                    self.swapped.take_out(request)
                    self._restart(request)
                continue
            try:
                plan.swap_in += self.manager.swap_in(unit)
            except Exception as error:
                plan.failed.append((unit[0], error))
                return
            plan.resumed += unit
            for request in unit:
                self.swapped.take_out(request)
                self.running.add(request)
            for request in unit:
                if request.num_missing and request.finish_reason is None:
                    self._start(request, self._budget - plan.num_tokens, plan, lacking)

    def _admit(self, plan: Plan, lacking: list[int]) -> None:
        """Plan waiting requests in order, until the budget, the slots or the blocks are used up.

        While others are swapped out, only requests that precede them and were admitted before may enter.

        A request is admitted only if there are blocks for all of its tokens, in addition to those that the running
        requests still need and those promised to earlier waiting ones. With blocks for a first chunk alone it would
        soon be preempted again and its work lost. A request whose next block is being computed by another request waits
        for it, and those after it may pass.
        """
        if not self.waiting:
            return
        coming = ComingBlocks(self.manager, self.running)
        seats = free_seats(self.running, self.max_num_seqs)
        passed: list[Request] = []
        try:
            while (request := self.waiting.first()) is not None and plan.num_tokens < self._budget:
                wanted = seats_wanted(request, self.running)
                if len(self.running) >= self.max_num_seqs or wanted > seats - len(passed):
                    break
                if not may_pass(request, self.swapped):
                    break
                self.waiting.pop()
                try:
                    if (
                        request.finish_reason is not None
                        or self._awaits_another(request, coming)
                        or self._awaits_blocks(request, plan, lacking)
                    ):
                        passed.append(request)
                        if self.prefetch is not None:
                            lacking = [a + b for a, b in zip(lacking, self.prefetch.promised(request), strict=True)]
                    elif self._seat(request, plan, lacking):
                        seats -= wanted
                        coming.add(request)
                    else:
                        passed.append(request)
                        break
                except Exception as error:
                    plan.failed.append((request, error))
                    if not request.cache.block_ids:
                        passed.append(request)
        finally:
            for request in passed:
                self.waiting.add(request)

    def _awaits_blocks(self, request: Request, plan: Plan, lacking: list[int]) -> bool:
        """Return whether to admit a waiting request later, with blocks that are being read from another source."""
        if self.prefetch is None:
            return False
        spare = self._spare(lacking)
        if plan.items and self._shortage.lasts(request, spare, self._num_plans):
            return False
        return self.prefetch.awaits(request, spare)

    def _spare(self, lacking: list[int]) -> list[int]:
        """Return the free blocks of each group minus those that running requests still lack."""
        return [pool.num_free - count for pool, count in zip(self.manager.pools, lacking, strict=True)]

    def _seat(self, request: Request, plan: Plan, lacking: list[int]) -> bool:
        """Start a waiting request, if there are blocks for it and for its siblings' first tokens."""
        spare = self._spare(lacking)
        if plan.items and self._shortage.lasts(request, spare, self._num_plans):  # matching its blocks again costs time
            return False
        match = self.manager.lookup.match(request)
        seats = self.max_num_seqs - len(self.running) - 1
        forks = sum(1 for _ in islice(unforked(request, self.waiting), seats))
        needed = [count + forks for count in self.manager.needed(request, match)]
        if not fits(needed, spare) and (forks == 0 or self.running or plan.items or any(lacking)):
            self._shortage.note(request, spare, self._num_plans)
            return False
        self.manager.admit(request, match)
        self.running.add(request)
        if self.prefetch is not None:
            self.prefetch.admitted(request)
        lacking[:] = [a + forks for a in lacking]
        self._start(request, self._budget - plan.num_tokens, plan, lacking)
        return True

    def hold(self) -> Hold | None:
        """Return the reason why the first waiting request is not in the last planned step, or None if none waits."""
        first = self.waiting.first()
        if first is None:
            return Hold.SWAPPED if self.swapped else None
        if len(self.running) >= self.max_num_seqs:
            return Hold.SEATS
        if not may_pass(first, self.swapped):
            return Hold.SWAPPED
        return Hold.BLOCKS if self._shortage.is_of(first) else Hold.BUDGET

    def _start(self, request: Request, budget: int, plan: Plan, lacking: list[int]) -> None:
        """Plan the first tokens of a request that just got its blocks; without a budget, only add to `lacking`."""
        num_new = min(request.num_missing, budget)
        try:
            if num_new and not self.manager.grow(request, request.cache.num_computed + num_new, plan.copies):
                raise OutOfBlocks(f"request {request.id} was admitted with too few free blocks")
        except Exception as error:
            plan.failed.append((request, error))
            return
        if num_new:
            plan.add(request, num_new)
        if num_new < request.num_missing:
            lacking[:] = [a + b for a, b in zip(lacking, self.manager.lacking(request), strict=True)]

    def _awaits_another(self, request: Request, coming: ComingBlocks) -> bool:
        """Return whether a running request is computing blocks that the waiting one could then share."""
        if coming.help(request):
            return True
        if request.num_generated > 0 or request.driven:
            return False
        return any(s.num_generated == 0 for s in self.running.siblings_of(request))  # it will be forked from that one

    # ------------------------------------------------------------------------------------------- a step planned ahead

    def plan_ahead(self, before: Plan) -> Plan | None:
        """Plan the step after one that is being computed. Return None if that one must be committed first.

        The plan equals the one that `plan` would make after that commit, if every request that may continue does: the
        running ones continue, a token that is still to be drawn counts as present, and no request is admitted or
        preempted. If a request turns out to have ended, this plan's commit skips it.
        """
        if before.failed or before.resumed or self.swapped:  # if it fails, those it resumes lose their blocks
            return None
        computing = {item.request: item for item in before.items}
        going: list[tuple[Request, int, int]] = []  # a request, its first token to compute, number of tokens
        some_end = bool(self._marked)
        for request in self.running:
            item = computing.get(request)
            if request.finish_reason is not None:
                continue
            if request.driven or request.to_check or (item is not None and item.drafts):
                return None
            draws = item is not None and item.samples
            start = request.cache.num_computed if item is None else item.start + item.num_new
            missing = len(request.tokens) + draws - start
            if missing == 0 or (draws and start + missing >= self.longest(request)):
                some_end = True
            elif draws and needs_token(request):
                return None
            else:
                going.append((request, start, missing))
        items = share_budget(going, self._budget)
        if not items or (self.lookup is not None and self.lookup.most(len(items)) > 0):
            return None
        if self.waiting and (some_end or self._may_come(items)):
            return None
        most = sum(self.manager.most_taken(item.request, item.start + item.num_new) for item in items)
        if not self.manager.has_free([most] * len(self.manager.pools)):
            return None
        plan = Plan()
        self._num_plans += 1
        self.manager.now = self.clock()
        for item in items:
            try:
                if not self.manager.grow(item.request, item.start + item.num_new, plan.copies):
                    raise OutOfBlocks(f"request {item.request.id} was planned ahead with too few free blocks")
            except Exception as error:
                plan.failed.append((item.request, error))
            else:
                plan.items.append(item)
                plan.num_tokens += item.num_new
        self._keep_states(plan)
        return plan if plan.items else None

    def _may_come(self, items: list[PlanItem]) -> bool:
        """Return whether a waiting request may be admitted together with these items of the next plan."""
        first = self.waiting.first()
        if first is None or len(self.running) >= self.max_num_seqs:
            return False
        if sum(item.num_new for item in items) >= self._budget:
            return False
        if self.manager.frees_early:  # the blocks that the step before frees are not known
            return True
        return not self._shortage.lasts(first, [pool.num_free for pool in self.manager.pools], self._num_plans + 1)

    # ---------------------------------------------------------------------------------------------- its results

    def commit(self, plan: Plan, output: StepOutput) -> list[Event]:
        """Apply the results of a step. End the requests that are done, marked to end, or could not be planned.

        Results for a request that has since ended, or was marked to end, are dropped.
        """
        self.num_planned += plan.num_tokens
        if self.pace is not None:
            self.pace.observe(plan.num_tokens, self.clock() - self.manager.now)
        if self.prefetch is not None:
            self.prefetch.end_step(plan.num_tokens, self.clock() - self.manager.now)
        events = [self._end_failed(request, error) for request, error in plan.failed if self._goes_on(request)]
        for i, item in enumerate(plan.items):
            request = item.request
            if request.finish_reason is not None:  # `_goes_on`, inlined: runs for every request in every step
                continue
            if i in output.nonfinite_rows:
                self.manager.mark_nonfinite(request, request.cache.num_computed + output.nonfinite_rows[i])
            event = self._commit_item(item, output)
            if event is not None:
                events.append(event)
                if item.drafts:
                    events += self._commit_drafts(item, event, output)
            self.manager.forget_uncomputed(request)
        return events + self._end_marked() if self._marked else events

    def fail(self, plan: Plan, error: BaseException) -> list[Event]:
        """End the requests of a step that raised; the others continue."""
        events = [self._end_failed(request, why) for request, why in plan.failed if self._goes_on(request)]
        events += [self._end_failed(item.request, error) for item in plan.items if self._goes_on(item.request)]
        for request in (*plan.preempted, *plan.resumed):  # their blocks may not have moved
            if self.requests.get(request.id) is request and (request.cache.block_ids or request.cache.host_block_ids):
                self._leave(request)
                self.waiting.add(request)
        return events + self._end_marked()

    def is_needed(self, plan: Plan) -> bool:
        """Return whether any request of a step continues, so that its commit uses the step's results."""
        return any(self._goes_on(item.request) for item in plan.items)

    def _goes_on(self, request: Request) -> bool:
        """Return whether the planned request has neither ended nor been marked to end."""
        return request.finish_reason is None

    def _commit_item(self, item: PlanItem, output: StepOutput) -> Event | None:
        request, start, num_new, _ = item
        is_last = start + num_new == len(request.tokens)
        token = output.tokens[request.id] if is_last and request.task is GENERATE else None
        prompt_logprobs = output.prompt_logprobs.get(request.id, ())
        if token == INVALID_TOKEN or (token is None and output.is_broken(item)):  # its results must not be shared
            return self._end_without_number(request, prompt_logprobs)
        if token is not None and request.group is not None and request.num_generated == 0:
            self._fork_siblings(request)
        self.manager.advance(request, num_new)
        request.schedule.num_prompt_logprobs += len(prompt_logprobs)
        if token is None:
            if is_last:  # the request is complete
                event = Event(request.id, prompt_logprobs=prompt_logprobs, finish_reason=FinishReason.LENGTH)
                return self._end(event._replace(hidden_state=output.hidden_states.get(request.id)))
            return Event(request.id, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        logprobs = output.logprobs.get(request.id)
        if request.driven:
            return Event(request.id, None, logprobs, prompt_logprobs)
        return self._append(request, token, logprobs, prompt_logprobs)

    def _commit_drafts(self, item: PlanItem, event: Event, output: StepOutput) -> list[Event]:
        """Return the events of the tokens drawn after accepted draft tokens. event: of the token before them."""
        request, events = item.request, [event]
        logprobs = output.logprobs_after_drafts.get(request.id, [None] * len(item.drafts))
        for draft, token, logprob in zip(item.drafts, output.tokens_after_drafts[request.id], logprobs, strict=True):
            if events[-1].token != draft or events[-1].finish_reason is not None:
                break
            self.manager.advance(request, 1)  # the draft token, which was computed
            if token == INVALID_TOKEN:
                events.append(self._end_without_number(request))
                break
            events.append(self._append(request, token, logprob))
        if self.lookup is not None:
            self.lookup.count(len(item.drafts), len(events) - 1)
            self.lookup.judge(request, len(events) - 1)
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
        seats = self.max_num_seqs - len(self.running)
        for sibling in list(islice(unforked(request, self.waiting), seats)) if seats else ():
            self.waiting.remove(sibling)
            self.manager.fork(request, sibling)
            self.running.add(sibling)

    def _reason_to_end(self, request: Request, token: int) -> FinishReason | None:
        if token in request.ending_tokens:  # the sampler never draws one before min_tokens
            return FinishReason.STOP
        if request.guide is not None:
            request.guide.accept(token)
            if request.guide.done:  # reported after this token, which still belongs to the output
                self.finish(request.id, FinishReason.STOP)
                return None
        if len(request.tokens) >= self.longest(request):
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

    def _end_failed(self, request: Request, error: BaseException, of_prompt: tuple[TokenLogprobs, ...] = ()) -> Event:
        """End a request with an error. of_prompt: the logprobs of the prompt positions that its last step computed."""
        message = f"{type(error).__name__}: {error}"
        return self._end(Event(request.id, None, None, of_prompt, FinishReason.ERROR, error=message))

    def _end_marked(self) -> list[Event]:
        marked, self._marked = self._marked, []
        return [
            self._end(Event(request.id, finish_reason=request.finish_reason))
            for request in marked
            if self.requests.get(request.id) is request
        ]

    def _end(self, event: Event) -> Event:
        """Remove the event's request and free its blocks."""
        request = self.requests.pop(event.request_id)
        request.finish_reason = event.finish_reason
        self._leave(request)
        return event

    def _leave(self, request: Request) -> None:
        """Remove the request from its list, and free all of its blocks."""
        if request.cache.block_ids:
            self.running.take_out(request)
        elif request.cache.host_block_ids:
            self.swapped.take_out(request)
        else:
            self.waiting.remove(request)
        self.manager.release(request)
