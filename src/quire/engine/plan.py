"""The plan of a step, and its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from quire.cache.manager import Move
from quire.request import CacheState, Request, Task, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GENERATE = Task.GENERATE  # read for each request in each step: a global is faster than an enum member
INVALID_TOKEN = -1  # returned by the sampler for a row without a finite logit


class PlanItem(NamedTuple):
    """One request's part of a step: `num_new` tokens from token `start` on, and draft tokens (`drafts`) after them.

    In a step that is planned ahead, the last of these tokens may still have to be drawn by the step before.
    """

    request: Request
    start: int
    num_new: int
    drafts: Sequence[int] = ()
    masks: Sequence[NDArray[np.int32]] = ()  # if it has a guide: the tokens allowed after each draft token

    @property
    def num_rows(self) -> int:
        """Number of tokens to compute."""
        return self.num_new + len(self.drafts)

    @property
    def samples(self) -> bool:
        """True if the last of these tokens is the request's last one, so that the next token is drawn."""
        return self.start + self.num_new >= len(self.request.tokens) and self.request.task is GENERATE

    @property
    def embeds(self) -> bool:
        """True if the last of these tokens is the last one of a prompt to embed."""
        return self.request.task is Task.EMBED and self.start + self.num_new == len(self.request.tokens)


class DecodeStep(NamedTuple):
    """The rows of one step. Its lists and arrays do not change any more, whatever requests join or leave."""

    requests: Sequence[Request]
    ids: list[str]
    caches: Sequence[CacheState]
    appends: Sequence[Callable[[int], None]]  # `tokens.append` of each request
    starts: NDArray[np.int64]  # [R], the position of the token that the step computes
    limits: NDArray[np.int64]  # [R], the number of tokens at which each ends
    dues: NDArray[np.int64]  # [R], the number of computed tokens at which the block manager has to look
    endings: NDArray[np.int64]  # [R, E], tokens that end each, and INVALID_TOKEN
    rows: NDArray[np.int64] | None  # [R], their rows in DecodeRows until that settles; None: all of them
    is_ahead: bool  # the step's input tokens are drawn by the step before, which is not committed yet

    def items(self) -> list[PlanItem]:
        """Return the rows as items of a plan."""
        starts = self.starts.tolist()
        return [PlanItem(request, start, 1) for request, start in zip(self.requests, starts, strict=True)]

    def end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which requests end with these tokens, or have none: bool [R]."""
        ended: NDArray[np.bool_] = (tokens[:, None] == self.endings).any(1)
        ended |= self.starts + 2 >= self.limits
        return ended


@dataclass
class Plan:
    """A step: the tokens to compute, and the blocks to move before that, in the order of these fields."""

    rest: list[PlanItem] = field(default_factory=list)  # requests that do not merely decode
    decode: DecodeStep | None = None  # the others, whose rows come first
    swap_out: list[Move] = field(default_factory=list)  # from the device to the host
    swap_in: list[Move] = field(default_factory=list)  # from the host to the device
    copies: list[Move] = field(default_factory=list)  # in this order
    preempted: list[Request] = field(default_factory=list)  # their blocks are dropped, or among swap_out
    resumed: list[Request] = field(default_factory=list)  # swapped in from the host
    failed: list[tuple[Request, Exception]] = field(default_factory=list)  # could not be planned
    num_tokens: int = 0  # to compute, over all items

    @property
    def items(self) -> list[PlanItem]:
        """The parts of all requests, in the order of their rows. Steps that merely decode are faster without it."""
        return self.rest if self.decode is None else [*self.decode.items(), *self.rest]

    @items.setter
    def items(self, items: list[PlanItem]) -> None:
        self.decode, self.rest = None, items

    @property
    def moves(self) -> bool:
        """True if any block is moved."""
        return bool(self.swap_out or self.swap_in or self.copies)

    @property
    def num_decoding(self) -> int:
        """Number of requests that merely decode."""
        return 0 if self.decode is None else len(self.decode.requests)

    @property
    def computes(self) -> bool:
        """True if any token is computed."""
        return self.decode is not None or bool(self.rest)

    @property
    def is_empty(self) -> bool:
        """True if a runner has nothing to do."""
        return not (self.computes or self.moves)

    def add(self, request: Request, num_new: int) -> None:
        """Add the request's next `num_new` tokens."""
        self.rest.append(PlanItem(request, request.cache.num_computed, num_new))
        self.num_tokens += num_new


@dataclass
class StepOutput:
    """The results of a step, by request id."""

    # The drawn token of each request that samples, except those in `decoded`; INVALID_TOKEN: no finite logit.
    tokens: dict[str, int]
    decoded: NDArray[np.int64] | None = None  # the drawn tokens of the plan's decode rows; None: they are in `tokens`
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)  # of these tokens, if requested
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    tokens_after_drafts: dict[str, list[int]] = field(default_factory=dict)  # one per draft token, if all accepted
    logprobs_after_drafts: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of these tokens
    # [H], for each embedded prompt; None if one of its numbers is not finite.
    hidden_states: dict[str, NDArray[np.float32] | None] = field(default_factory=dict)
    # By an item's index in the plan: its first row whose K or V is not finite. That row's block must not be shared.
    nonfinite_rows: dict[int, int] = field(default_factory=dict)

    def is_broken(self, item: PlanItem) -> bool:
        """Return whether an item that draws no token has a result that is not finite."""
        if item.embeds:
            return self.hidden_states[item.request.id] is None
        is_loglikelihood = item.request.task is Task.LOGLIKELIHOOD
        return is_loglikelihood and any(isnan(found.logprob) for found in self.prompt_logprobs.get(item.request.id, ()))


Launched: TypeAlias = Callable[[], StepOutput]  # of a launched step: waits for its output and returns it, or raises
