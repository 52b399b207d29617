"""Runners of a tensor-parallel group: rank 0 leads, the others follow it step by step.

Scheduler, sampler and text processing run on rank 0 only. It sends each step's batch to the others. All ranks move
blocks and compute their shards of the model, synchronized by its collectives. An exception in the middle of a step
would leave ranks waiting for one another, so it ends the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from quire.cache.storage import KVCache
from quire.engine.graphs import GraphRunner
from quire.engine.plan import Launched, StepOutput
from quire.engine.plan_codec import pack_batch, unpack
from quire.engine.runner import MAX_LOGIT_ROWS, Reader, Runner
from quire.models.batch import Batch
from quire.models.model import Model
from quire.ops import AttentionSpec, Backend
from quire.ops.collectives import Communicator
from quire.ops.program import Plan
from quire.ops.recurrent.records import RecurrentSpec

END = b""  # sent instead of a step


class _RankRunner(Runner):
    """The code that all ranks share."""

    in_group = True

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
        self.exchange = cast(Communicator, model.exchange)

    def nonfinite(self, plans: Sequence[Plan], count: int) -> Tensor:
        """Return a mask of the rows for which any rank has written a K or V that is not finite."""
        own = super().nonfinite(plans, count)
        return self.exchange.gather(own).amax(0)


class LeadingRunner(_RankRunner):
    """The runner of rank 0."""

    def launch(self, batch: Batch) -> Launched:
        """Launch a step on all ranks, see `Runner.launch`."""
        try:
            return super().launch(batch)
        except BaseException:
            self.abandon()
            raise

    def move(self, batch: Batch) -> None:
        """Send the batch to the other ranks, then see `Runner.move`: it is the first part of every step."""
        head, theirs = self.model.draft_head, batch
        if head is not None:  # which this rank has alone
            groups, moves = head.without_own(batch.groups), head.without_own(batch.moves)
            theirs = replace(batch, groups=groups, moves=moves)
        self.exchange.send(pack_batch(theirs))
        super().move(batch)

    def finish(self, batch: Batch, hidden: Tensor, plans: Sequence[Plan], kept: Tensor | None = None) -> Launched:
        """See `Runner.finish`. On a GPU the loss of a rank is known only when the step has ended."""
        launched = super().finish(batch, hidden, plans, kept)

        def found() -> StepOutput:
            output = launched()
            if self.exchange.lost is not None:
                raise self.exchange.loss()
            return output

        return found

    def abandon(self) -> None:
        """End the group."""
        self.exchange.lose(0)

    def is_lost(self) -> bool:
        """Return whether the group can no longer compute anything."""
        return self.exchange.lost is not None or super().is_lost()

    def end(self) -> None:
        """Make the other ranks end normally."""
        end(self.exchange)


def end(exchange: Communicator) -> None:
    """Make the other ranks end normally. Only rank 0 may call this."""
    if exchange.lost is None:
        exchange.send(END)


class FollowingRunner(_RankRunner):
    """The runner of any other rank. It computes the logits of its shard of the vocabulary, and draws no token."""

    graphs: GraphRunner | None = None  # that replays this runner's steps, if rank 0 has one

    def follow(self) -> None:
        """Compute the steps of rank 0 until it ends."""
        runner = self if self.graphs is None else self.graphs
        while message := self.exchange.receive():
            runner.run(unpack(message))

    def _sample(self, _: Batch, hidden: Tensor) -> Reader:
        return self._logits(hidden)

    def _report_prompt(self, _: Batch, hidden: Tensor) -> Reader:
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Reader:
        for start in range(0, len(hidden), MAX_LOGIT_ROWS):
            self.model.logits(hidden[start : start + MAX_LOGIT_ROWS])
        return _nothing


def _nothing(output: StepOutput) -> None:
    """Report nothing, since rank 0 reports."""
