"""What a step is to do, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from quire.cache.manager import Move
from quire.request import Request, Task, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GENERATE = Task.GENERATE  # asked of each request in each step: a name is found sooner than an enum's member
INVALID_TOKEN = -1  # what the sampler returns for a row without a finite logit


class PlanItem(NamedTuple):
    """One request's part of a step: `num_new` tokens from its token `start` on, and guesses at what comes after them.

    In a step that is planned ahead the last of these tokens may be one that the step before has yet to draw.
    """

    request: Request
    start: int
    num_new: int
    guesses: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        """Tokens to compute."""
        return self.num_new + len(self.guesses)

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the request's last, so that the next one is drawn."""
        return self.start + self.num_new >= len(self.request.tokens) and self.request.task is GENERATE

    @property
    def embeds(self) -> bool:
        """Whether the last of these tokens is the last one of a prompt that is embedded."""
        return self.request.task is Task.EMBED and self.start + self.num_new == len(self.request.tokens)


@dataclass
class Plan:
    """A step: who computes how much, and what moves in memory before, in the order of these fields."""

    items: list[PlanItem] = field(default_factory=list)
    swap_out: list[Move] = field(default_factory=list)  # from the device to the host
    swap_in: list[Move] = field(default_factory=list)  # from the host to the device
    copies: list[Move] = field(default_factory=list)  # each after the one before it
    preempted: list[Request] = field(default_factory=list)  # what they had is forgotten, or among swap_out
    resumed: list[Request] = field(default_factory=list)  # came back from the host
    failed: list[tuple[Request, Exception]] = field(default_factory=list)  # could not be planned
    num_tokens: int = 0  # to compute, of all items

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for a runner to do."""
        return not (self.items or self.swap_out or self.swap_in or self.copies)

    def add(self, request: Request, num_new: int) -> None:
        """Plan the request's next tokens."""
        self.items.append(PlanItem(request, request.cache.num_computed, num_new))
        self.num_tokens += num_new


@dataclass
class StepOutput:
    """What the runner found, by request id."""

    tokens: dict[str, int]  # the token drawn for each request that samples; INVALID_TOKEN where no logit was finite
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)  # of these tokens, where asked for
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    tokens_after_guesses: dict[str, list[int]] = field(default_factory=dict)  # a token each, if all were right
    logprobs_after_guesses: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of these
    # [H], of each prompt that was embedded; None where a number of it is not finite.
    hidden_states: dict[str, NDArray[np.float32] | None] = field(default_factory=dict)
    # By an item's place in the plan: its first row whose K or V is not finite. The row's block is not to be shared.
    nonfinite_rows: dict[int, int] = field(default_factory=dict)

    def is_broken(self, item: PlanItem) -> bool:
        """Whether what an item that draws nothing was to bring is no number."""
        if item.embeds:
            return self.hidden_states[item.request.id] is None
        is_loglikelihood = item.request.task is Task.LOGLIKELIHOOD
        return is_loglikelihood and any(isnan(found.logprob) for found in self.prompt_logprobs.get(item.request.id, ()))


Launched: TypeAlias = Callable[[], StepOutput]  # of a step that was launched: waits for what it found, or raises
