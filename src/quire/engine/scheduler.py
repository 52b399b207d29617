"""Scheduler: who computes how many tokens in each step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from quire.cache.manager import BlockManager, CacheUsage
from quire.errors import RequestError
from quire.request import Event, FinishReason, Request, TokenLogprobs

INVALID_TOKEN = -1  # what the sampler returns for a row without a finite logit


@dataclass(frozen=True)
class PlanItem:
    """One request's part of a step: its next `num_new` tokens."""

    request: Request
    num_new: int

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the request's last, so that the next one is drawn."""
        return self.num_new == self.request.num_missing


@dataclass
class Plan:
    """A step: who computes how much, and who had to give his blocks back for it."""

    items: list[PlanItem] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


@dataclass
class StepOutput:
    """What the runner found, by request id."""

    tokens: dict[str, int]  # the token drawn for each request that samples; INVALID_TOKEN where no logit was finite
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)  # of these tokens, where asked for
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


class Scheduler:
    """Continuous batching by one rule: num_computed chases len(tokens), under a budget of tokens a step.

    A prompt, a piece of one, a single decoded token and the recomputation of a preempted request are all the same
    subtraction. Requests are served in the order of their arrival; when blocks run out, the youngest running request
    gives all of its own back and is computed again later.
    """

    def __init__(
        self, manager: BlockManager, *, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.manager = manager
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # Both by ordinal, and every running request is older than every waiting one. Waiting ones own no blocks.
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.requests: dict[str, Request] = {}  # running and waiting, by id
        self._marked: list[Request] = []  # to be ended by the next commit
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.requests)

    def usage(self) -> CacheUsage:
        """How the cache is used at this moment."""
        return self.manager.usage(self.running)

    def audit(self) -> None:
        """Prove the books of the cache against the requests. Raises BadValue where they differ."""
        self.manager.audit(list(self.requests.values()))

    def check(self, request: Request) -> None:
        """Raise RequestError if the request could never run here, with the numbers."""
        limit = self.longest(request)
        if request.num_prompt < 1:
            raise RequestError(f"request {request.id} has an empty prompt; it needs at least one token")
        if request.num_prompt >= self.max_model_len:
            raise RequestError(
                f"request {request.id} has a prompt of {request.num_prompt} tokens; with max_model_len="
                f"{self.max_model_len} a prompt may have at most {self.max_model_len - 1}"
            )
        # The last token is drawn, but never computed: it takes no slot.
        needed = max(self.manager.most_blocks(limit - 1, limit - 1, group) for group in self.manager.groups)
        existing = self.manager.num_blocks
        if needed > existing:
            raise RequestError(
                f"request {request.id} can never fit: {request.num_prompt} prompt tokens and up to "
                f"{limit - request.num_prompt} new ones need {needed} KV blocks of {self.manager.block_size} tokens, "
                f"and the cache has {existing}; lower max_tokens or give the cache more blocks"
                + (", or lower max_num_batched_tokens" if any(g.window for g in self.manager.groups) else "")
            )

    def longest(self, request: Request) -> int:
        """Tokens, prompt included, at which the request ends at the latest."""
        asked = request.sampling.max_tokens
        return self.max_model_len if asked is None else min(self.max_model_len, request.num_prompt + asked)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, queueing nothing, if it could never run or its id is taken."""
        self.check(request)
        if request.id in self.requests:
            raise RequestError(f"request id {request.id!r} is taken by a request that has not ended")
        request.ordinal = self._num_added
        self._num_added += 1
        self.requests[request.id] = request
        self.waiting.append(request)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Mark a request to be ended by the next commit; one that is unknown or has ended is left alone."""
        request = self.requests.get(request_id)
        if request is not None and request.finish_reason is None:
            request.finish_reason = reason
            self._marked.append(request)

    # ------------------------------------------------------------------------------------------------- a step

    def plan(self) -> Plan:
        """Share out the next step: running requests first, then waiting ones, oldest first."""
        plan = Plan()
        budget = self.max_num_batched_tokens
        for request in list(self.running):
            if budget == 0:
                break
            if request.block_ids and request.finish_reason is None:  # not preempted above, nor marked to end
                budget -= self._plan_running(request, budget, plan)
        if not plan.preempted:
            self._admit(budget, plan)
        return plan

    def _plan_running(self, request: Request, budget: int, plan: Plan) -> int:
        """Plan the request's next tokens, preempting the youngest ones while blocks are short. Tokens planned."""
        num_new = min(request.num_missing, budget)
        while not self.manager.grow(request, request.num_computed + num_new):
            youngest = self.running[-1]
            self._preempt(youngest)
            plan.preempted.append(youngest)
            if youngest is request:
                return 0
        plan.items.append(PlanItem(request, num_new))
        return num_new

    def _admit(self, budget: int, plan: Plan) -> None:
        """Plan waiting requests, the oldest first, until the budget, the running list or the blocks are full.

        A request comes in only if there are blocks for all of its tokens beside what the running ones still need for
        theirs. With blocks for a first piece alone it would soon be preempted again, its work lost.
        """
        admitted = []
        needed = self.manager.missing_blocks(self.running if self.waiting else [])
        for request in self.waiting:
            if request.finish_reason is not None:
                continue
            with_it = [a + b for a, b in zip(needed, self.manager.missing_blocks([request]), strict=True)]
            if budget == 0 or len(self.running) == self.max_num_seqs or not self.manager.has_free(with_it):
                break
            num_new = min(request.num_missing, budget)
            self.manager.grow(request, num_new)
            needed = [a + b for a, b in zip(needed, self.manager.missing_blocks([request]), strict=True)]
            admitted.append(request)
            self.running.append(request)
            plan.items.append(PlanItem(request, num_new))
            budget -= num_new
        for request in admitted:
            self.waiting.remove(request)  # at the front, or near it

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.release(request)
        request.num_computed = 0
        self.waiting.appendleft(request)

    def commit(self, plan: Plan, output: StepOutput) -> list[Event]:
        """Take over what a step computed, and end the requests that are done or marked to end."""
        events = [event for item in plan.items if (event := self._commit_item(item, output)) is not None]
        return events + self._end_marked()

    def fail(self, plan: Plan, error: Exception) -> list[Event]:
        """End the requests of a step that raised; the others go on."""
        message = f"{type(error).__name__}: {error}"
        events = [
            self._end(Event(item.request.id, finish_reason=FinishReason.ERROR, error=message)) for item in plan.items
        ]
        return events + self._end_marked()

    def _commit_item(self, item: PlanItem, output: StepOutput) -> Event | None:
        request, samples = item.request, item.samples
        request.num_computed += item.num_new
        self.manager.trim(request)
        prompt_logprobs = output.prompt_logprobs.get(request.id, ())
        request.num_prompt_logprobs += len(prompt_logprobs)
        if not samples:
            return Event(request.id, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        token = output.tokens[request.id]
        if token == INVALID_TOKEN:
            error = f"the model gave no finite logit at position {len(request.tokens)}"
            return self._end(Event(request.id, finish_reason=FinishReason.ERROR, error=error))
        request.tokens.append(token)
        reason = self._reason_to_end(request, token)
        stop_token = token if reason is FinishReason.STOP and token in request.sampling.stop_tokens else None
        event = Event(request.id, token, output.logprobs.get(request.id), prompt_logprobs, reason, stop_token)
        return event if reason is None else self._end(event)

    def _reason_to_end(self, request: Request, token: int) -> FinishReason | None:
        if token in request.ending_tokens:  # the sampler never draws one before min_tokens
            return FinishReason.STOP
        return FinishReason.LENGTH if len(request.tokens) >= self.longest(request) else None

    def _end_marked(self) -> list[Event]:
        marked, self._marked = self._marked, []
        return [self._end(Event(request.id, finish_reason=request.finish_reason)) for request in marked]

    def _end(self, event: Event) -> Event:
        """Take the event's request out of the books and give its blocks back."""
        request = self.requests.pop(event.request_id)
        request.finish_reason = event.finish_reason
        self.manager.release(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        return event
