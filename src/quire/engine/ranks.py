"""Runners of a tensor-parallel group: rank 0 leads, the others follow it step by step.

Scheduler, sampler and text are on rank 0 alone. It sends each step's batch to the others, and all ranks move blocks and
compute their parts of the model, whose exchanges keep them together. An exception in the middle of a step leaves ranks
waiting for one another, so it ends the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from quire.batch import Batch
from quire.cache.storage import KVCache
from quire.engine.packing import pack_batch, unpack
from quire.engine.plan import Launched, StepOutput
from quire.engine.runner import MAX_LOGIT_ROWS, Reader, Runner
from quire.models.model import Model
from quire.ops import AttentionSpec, Backend
from quire.ops.exchange import Exchange
from quire.ops.program import Plan
from quire.ops.recurrent import RecurrentSpec

END = b""  # in place of a step


class _RankRunner(Runner):
    """What is the same in all ranks."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        backend: Backend,
        specs: Sequence[AttentionSpec],
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        recurrent: Sequence[RecurrentSpec] = (),
    ) -> None:
        super().__init__(model, cache, backend, specs, max_tokens, max_seqs, max_blocks, recurrent)
        self.exchange = cast(Exchange, model.exchange)

    def nonfinite(self, plans: Sequence[Plan], count: int) -> Tensor:
        """The rows of whose K or V any rank has written a number that is not finite."""
        own = super().nonfinite(plans, count)
        return self.exchange.gather(own).amax(0)


class LeadingRunner(_RankRunner):
    """Rank 0's."""

    def launch(self, batch: Batch) -> Launched:
        """As a runner alone, with the other ranks."""
        try:
            self.exchange.send(pack_batch(batch))
            return super().launch(batch)
        except BaseException:
            self.exchange.lose(0)
            raise

    def is_lost(self) -> bool:
        """Whether the group can compute nothing any more."""
        return self.exchange.lost is not None

    def end(self) -> None:
        """Let the other ranks end in order."""
        if self.exchange.lost is None:
            self.exchange.send(END)


class FollowingRunner(_RankRunner):
    """Any other rank's. It computes the logits of its part of the vocabulary, and draws nothing."""

    def follow(self) -> None:
        """Do what rank 0 does, until it ends."""
        while message := self.exchange.receive():
            self.run(unpack(message))

    def _sample(self, _: Batch, hidden: Tensor) -> Reader:
        return self._logits(hidden)

    def _report_prompt(self, _: Batch, hidden: Tensor) -> Reader:
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Reader:
        for start in range(0, len(hidden), MAX_LOGIT_ROWS):
            self.model.logits(hidden[start : start + MAX_LOGIT_ROWS])
        return _nothing


def _nothing(output: StepOutput) -> None:
    """There is nothing to report: rank 0 does that."""
