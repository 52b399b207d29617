"""ModelDrafter: draft tokens from a second, smaller model with the same vocabulary (Leviathan et al. 2023)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.cache.manager import BlockManager
from quire.engine.flatten import Buffers, flatten
from quire.engine.plan import INVALID_TOKEN, Plan, PlanItem, StepOutput
from quire.engine.runner import Runner
from quire.engine.speculation import NOTHING, Acceptance, Asked, Draft, Room
from quire.request import Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class Shadow:
    """A request in the draft model's cache."""

    own: Request  # its tokens are those of the request when it was last asked for
    drafted: array[int] = field(default_factory=lambda: array("i"))  # tokens computed after these


@dataclass(eq=False)
class Chosen:
    """A request to draft tokens for."""

    index: int  # among those that were asked for
    own: Request
    count: int  # draft tokens
    shadow: Shadow
    tokens: array[int] = field(default_factory=lambda: array("i"))  # draft tokens so far


class ModelDrafter:
    """Runs a draft model, for all drafting requests at once, with separate blocks and a separate prefix index.

    It first computes the tokens of a request that it does not have yet: when it first drafts for it, all that no other
    request has computed here; later those that it has not drafted rightly. At most one step's budget of tokens is
    computed at a time, and a request with more to compute gets no draft tokens meanwhile. If blocks are short, the
    requests that it has not drafted for lately lose theirs.
    """

    name = "model"

    def __init__(self, runner: Runner, manager: BlockManager, buffers: Buffers, vocab_size: int) -> None:
        """runner, manager, buffers: of the draft model. vocab_size: of the model."""
        self.runner, self.manager, self._buffers = runner, manager, buffers
        self._vocab_size = min(vocab_size, runner.model.config.vocab_size)
        self._shadows: dict[Request, Shadow] = {}  # the one with the oldest draft first
        self._acceptance = Acceptance(0.0)
        self.num_computed = 0  # rows

    def propose(self, asked: Sequence[Asked], _: Room) -> list[Draft]:
        """Return draft tokens of each request."""
        self._release(*[one for one in self._shadows if one.finish_reason is not None])
        plan, chosen = Plan(), list[Chosen]()
        drafts: list[Draft] = [NOTHING] * len(asked)
        try:
            for i, (request, most) in enumerate(asked):
                count = min(most, self._acceptance.cheap(request))
                shadow = self._caught_up(request, count, plan, {one for one, _ in asked}) if count else None
                if shadow is not None:
                    chosen.append(Chosen(i, shadow.own, count, shadow))
            self._begin(chosen, plan)
            while active := [one for one in chosen if 0 < len(one.tokens) < one.count]:
                self._continue(active)
        except BaseException:
            self._release(*self._shadows)
            raise
        for one in chosen:
            drafts[one.index] = one.tokens
            one.shadow.drafted = one.tokens[:-1]
            del one.own.tokens[len(one.own.tokens) - len(one.shadow.drafted) :]
        return drafts

    def judge(self, request: Request, num_drafts: int, num_right: int) -> None:
        """Record the numbers of a request's last draft tokens, and of those that were accepted."""
        self._acceptance.judge(request, num_drafts, num_right)

    def reset(self) -> None:
        """Drop all blocks: tokens are computed again when they are drafted for."""
        self._release(*self._shadows)
        self.manager.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the memory of the blocks until `wake_up`. The draft model's weights stay."""
        self.reset()
        self.runner.cache.free()

    def wake_up(self) -> None:
        """Allocate the memory of the blocks."""
        self.runner.cache.allocate()

    def _begin(self, chosen: Sequence[Chosen], plan: Plan) -> None:
        """Compute the tokens that requests lack, and draw the first draft token of those that then have all."""
        left, begun = len(self._buffers.token_ids), []
        for one in sorted(chosen, key=lambda one: one.own.num_missing):
            num_new = min(one.own.num_missing, left)
            if num_new:
                plan.add(one.own, num_new)
                begun.append(one)
                left -= num_new
        if begun:
            output = self._run(plan)
            for i, (one, item) in enumerate(zip(begun, plan.rest, strict=True)):
                if i in output.nonfinite_rows:
                    self.manager.mark_nonfinite(one.own, item.start + output.nonfinite_rows[i])
                self.manager.advance(one.own, item.num_new)
            self._add(begun, output)

    def _continue(self, active: Sequence[Chosen]) -> None:
        """Compute the last draft token of each request, and draw the next one."""
        plan = Plan()
        for one in active:
            one.own.tokens.append(one.tokens[-1])
            plan.rest.append(PlanItem(one.own, len(one.own.tokens) - 1, 1))
            plan.num_tokens += 1
        self._add(active, self._run(plan))

    def _run(self, plan: Plan) -> StepOutput:
        self.num_computed += plan.num_tokens
        return self.runner.run(flatten(plan, self._buffers))

    def _add(self, chosen: Sequence[Chosen], output: StepOutput) -> None:
        """Add the drawn tokens. A token that the model does not have ends a draft."""
        for one in chosen:
            token = output.tokens.get(one.own.id, INVALID_TOKEN)
            if 0 <= token < self._vocab_size:
                one.tokens.append(token)
            else:
                one.count = len(one.tokens)

    # ------------------------------------------------------------------------------------------------- its cache

    def _caught_up(self, request: Request, count: int, plan: Plan, asked: set[Request]) -> Shadow | None:
        """Return the request's shadow, with its current tokens and with blocks for them and for `count` draft tokens.

        None if blocks are short, or the draft model cannot compute it.
        """
        shadow = self._shadows.pop(request, None)
        if shadow is None:
            own = Request(request.id, array("i"), request.num_prompt, GREEDY, cache_salt=request.cache_salt)
            # Its place in the order is part of the salt without a prefix cache. The guide's mask is of one token alone.
            own.schedule = replace(request.schedule, allowed=None)
            shadow = Shadow(own)
        own, new = shadow.own, request.tokens[len(shadow.own.tokens) :]
        self._shadows[request] = shadow
        right = 0
        while right < min(len(shadow.drafted), len(new) - 1) and shadow.drafted[right] == new[right]:
            right += 1
        shadow.drafted = array("i")
        own.tokens.extend(new)
        too_long = len(own.tokens) + count > self.runner.model.max_model_len
        is_known = min(new, default=0) >= 0 and max(new, default=0) < self._vocab_size  # image rows are negative
        if too_long or not is_known or not self._grown(own, right, count, plan, asked):
            self._release(request)
            return None
        return shadow

    def _grown(self, own: Request, right: int, count: int, plan: Plan, asked: set[Request]) -> bool:
        """Give a shadow blocks, evicting others. right: of its new tokens, those that are computed."""
        if own.cache.block_ids:
            self.manager.advance(own, right)
        else:
            match = self.manager.lookup.match(own)
            while not self.manager.has_free(self.manager.needed(own, match)):
                if not self._evict(asked):
                    return False
                match = self.manager.lookup.match(own)
            self.manager.admit(own, match)
        while not self.manager.grow(own, len(own.tokens) + count - 1, plan.copies):
            if not self._evict(asked):
                return False
        return True

    def _evict(self, asked: set[Request]) -> bool:
        """Free the blocks of the request whose last draft is the oldest, of those that are not asked for now."""
        oldest = next((one for one in self._shadows if one not in asked), None)
        if oldest is not None:
            self._release(oldest)
        return oldest is not None

    def _release(self, *requests: Request) -> None:
        for request in requests:
            self.manager.release(self._shadows.pop(request).own)
