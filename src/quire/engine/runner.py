"""Runner: computes a StepOutput from a Batch. The only place where the model, the cache and the sampler meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from quire.cache.storage import KVCache
from quire.engine.head_drafter import HeadDrafter
from quire.engine.plan import Launched, StepOutput
from quire.engine.sampler import sample, token_logprobs
from quire.engine.transfer import all_queued, receive, send
from quire.models.batch import Batch, GroupTables, Pairs, RecurrentTables
from quire.models.model import Head, Model
from quire.ops import AttentionPlan, AttentionSpec, Backend, PagedKV, RecurrentPlan
from quire.ops.program import Plan
from quire.ops.recurrent.records import PIECE, RecurrentCache, RecurrentSpec
from quire.request import TokenLogprobs

MAX_LOGIT_ROWS = 256  # rows of V numbers in memory at a time: 128 MiB for a vocabulary of 128k

Reader: TypeAlias = Callable[[StepOutput], None]  # writes one part of a finished step to its output


class Runner:
    """Runs a model eagerly, with a plan for each cache group of attention and of states that every step updates.

    On a GPU the host queues a whole step and waits once, for the drawn tokens and the requested logprobs. It may queue
    the next step before that: drawn tokens also stay on the device, where the next step reads them.
    """

    in_group = False  # True: other processes compute the same step, and must queue the same exchanges

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        backend: Backend,
        specs: Sequence[AttentionSpec],  # one per cache group of attention
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        recurrent: Sequence[RecurrentSpec] = (),  # one per cache group of states
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.specs = tuple(specs)
        self.device = torch.device(specs[0].device if specs else recurrent[0].device)
        max_pieces = max_tokens // PIECE + 2  # a step may begin and end within a piece
        self.plans: tuple[Plan, ...] = (
            *self.make_plans(max_tokens, max_seqs, max_blocks),
            *(backend.make_recurrent_plan(spec, max_tokens, max_seqs, max_pieces) for spec in recurrent),
        )
        self.drafter: HeadDrafter | None = None
        if model.draft_head is not None:
            self.drafter = HeadDrafter(model.draft_head, cache, self.plans, specs[0].block_size)
        self._drawn = torch.empty(0, dtype=torch.int64)  # [R], on the device: tokens of the last step that drew any
        self._drawn_ids: list[str] = []  # the request of each of its rows

    def use(self, model: Model) -> None:
        """Run this model from now on, with no block of earlier steps: the same one with other weights or memory."""
        self.model = model
        if self.drafter is not None:
            self.drafter.use(cast(Head, model.draft_head))

    def make_plans(self, max_tokens: int, max_seqs: int, max_blocks: int) -> tuple[AttentionPlan, ...]:
        """Create a plan of that size for each cache group of attention."""
        return tuple(self.backend.make_plan(spec, max_tokens, max_seqs, max_blocks) for spec in self.specs)

    def run(self, batch: Batch) -> StepOutput:
        """Move blocks, compute the batch's tokens, draw the next ones, and gather the requested logprobs."""
        return self.launch(batch)()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Queue the work of `run`. On a CPU it is finished on return."""
        with device_context(self.device):
            self.move(batch)
            return self.compute(batch) if batch.token_ids.shape[0] else lambda: StepOutput({})

    def is_lost(self) -> bool:
        """Return whether the device has failed for good, as after an illegal address: then every CUDA call fails."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except Exception:
                return True
        return False

    def abandon(self) -> None:
        """Give up a step that has failed midway. Other steps do not depend on it here."""

    def move(self, batch: Batch) -> None:
        """Swap blocks out, swap blocks in, and copy blocks."""
        if self.drafter is not None:
            self.drafter.move(batch)
        for g, group in enumerate(batch.moves):
            self.cache.swap_out(g, *group.swap_out)
            self.cache.swap_in(g, *group.swap_in)
            for copied in group.copies:
                for kept in self.cache.layers(g):
                    if isinstance(kept, PagedKV):
                        self.backend.copy_blocks(kept, copied.src, copied.dst)
                    else:
                        self._copy_rows(kept, copied)

    def _copy_rows(self, cache: RecurrentCache, pairs: Pairs) -> None:
        """Copy the rows of pieces that siblings share until one of them advances. States are never written twice."""
        src, dst = send([torch.tensor(pairs.src), torch.tensor(pairs.dst)], self.device)
        for rows in (cache.keys, cache.updates, cache.decays, cache.inputs):
            rows.index_copy_(0, dst, rows.index_select(0, src))

    def compute(self, batch: Batch) -> Launched:
        """Queue the computation of a step whose blocks have moved."""
        self.update(batch)
        kept = _rows_to_keep(batch)
        token_ids, positions, rows = send([batch.token_ids, batch.positions, kept], self.device)
        self.fill_in(batch, token_ids)
        there = batch
        if token_ids is not batch.token_ids:
            there = replace(batch, token_ids=token_ids, positions=positions)
        if self.drafter is not None:
            hidden, before = self.drafter.head.split(self.model.forward(there, self.cache, self.plans))
            launched = self.finish(batch, hidden, self.plans)
            self.drafter.follow(batch, token_ids, positions, before)  # after the plans' flags of the model were read
            return launched
        if kept.shape == batch.token_ids.shape:
            return self.finish(batch, self.model.forward(there, self.cache, self.plans), self.plans)
        return self.finish(batch, self.model.forward(there, self.cache, self.plans, rows), self.plans, kept)

    def update(self, batch: Batch) -> None:
        """Update each cache group's plan with the batch's metadata."""
        step = batch.query_starts, batch.context_lens
        every: list[GroupTables | RecurrentTables] = [*batch.groups, *batch.recurrent]
        for plan, own in zip(self.plans, every, strict=True):
            if isinstance(own, GroupTables):
                cast(AttentionPlan, plan).update_trusted(*step, own.block_tables, own.slots, own.key_ends)
            else:
                cast(RecurrentPlan, plan).update_trusted(*step, own.state_tables, own.row_tables)

    def fill_in(
        self,
        batch: Batch,
        token_ids: Tensor,  # int64 [T] or longer, on the device; changed in place
    ) -> None:
        """Fill in the tokens that the previous step draws.

        A row without a finite logit draws none. Its request ends, so its next row is not used, but that row still needs
        a valid token.
        """
        if not batch.drawn.request_ids:
            return
        if batch.drawn.request_ids == self._drawn_ids and len(self._drawn_ids) == len(batch.token_ids):
            # All requests continue, each in the same row.
            torch.clamp(self._drawn, min=0, out=token_ids[: len(self._drawn)])
            return
        row_of = {request_id: row for row, request_id in enumerate(self._drawn_ids)}
        drawn = torch.tensor([row_of[request_id] for request_id in batch.drawn.request_ids])
        rows, sources = send([batch.drawn.rows, drawn], self.device)
        token_ids.index_copy_(0, rows, self._drawn[sources].clamp(min=0))

    def finish(
        self,
        batch: Batch,
        hidden: Tensor,  # [T, H]; or only the kept rows
        plans: Sequence[Plan],  # the plans that computed the step
        kept: Tensor | None = None,  # int64, host, ascending: the rows of `hidden`; None: all
    ) -> Launched:
        """Draw a token for each logit row, and gather the requested logprobs and hidden states."""
        readers: list[Reader] = []
        flags = self.nonfinite(plans, batch.token_ids.shape[0])
        if not flags.is_cpu or flags.numpy().any():
            readers.append(_nonfinite_rows(batch, flags))
        if batch.logit_rows.shape[0]:
            readers.append(self._sample(batch, _rows(hidden, batch.logit_rows, kept)))
        if batch.prompt.rows.shape[0]:
            readers.append(self._report_prompt(batch, _rows(hidden, batch.prompt.rows, kept)))
        if batch.embed.rows.shape[0]:
            pooled = self.model.pooler(_rows(hidden, batch.embed.rows, kept), batch.embed.counts)
            readers.append(_embed(batch, pooled))
        wait = all_queued(self.device)

        def found() -> StepOutput:
            wait()
            output = StepOutput({})
            for read in readers:
                read(output)
            return output

        return found

    def nonfinite(
        self,
        plans: Sequence[Plan],  # those of a graph have padding after the rows
        count: int,  # T
    ) -> Tensor:
        """Return flags of the rows whose K or V is not finite in any layer: int32 [T], nonzero if so."""
        flags = [plan.nonfinite[:count] for plan in plans]
        return flags[0] if len(flags) == 1 else torch.stack(flags).amax(0)

    def _sample(
        self,
        batch: Batch,
        hidden: Tensor,  # [R, H]
    ) -> Reader:
        """Draw a token for each of these rows."""
        drawn: list[Tensor] = []
        logprobs: list[tuple[Tensor, Callable[[], list[TokenLogprobs]]]] = []  # of some rows
        for start in range(0, hidden.shape[0], MAX_LOGIT_ROWS):
            logits = self.model.logits(hidden[start : start + MAX_LOGIT_ROWS])
            rows = batch.sampling.part(start, start + MAX_LOGIT_ROWS)
            if not rows.reports:
                drawn.append(sample(logits, rows, self.backend))
                continue
            reported = (rows.num_logprobs >= 0).nonzero().flatten()
            [there] = send([reported], logits.device)
            raw = logits[there]  # a copy: sampling changes the logits
            drawn.append(sample(logits, rows, self.backend))
            if len(reported):
                found = token_logprobs(raw, drawn[-1][there].clamp(min=0), rows.num_logprobs[reported], self.backend)
                logprobs.append((reported + start, found))
        self._drawn = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        self._drawn_ids = batch.logit_ids
        tokens = receive(self._drawn)

        def read(output: StepOutput) -> None:
            by_row = {row: one for rows, found in logprobs for row, one in zip(rows.tolist(), found(), strict=True)}
            count = batch.num_decoding
            output.decoded = tokens[:count].numpy() if count else None
            output.logprobs.update((batch.logit_ids[row], one) for row, one in by_row.items() if row < count)
            rest = zip(batch.logit_ids[count:], tokens[count:].tolist(), strict=True)
            for row, (request_id, token) in enumerate(rest, count):
                if request_id not in output.tokens:
                    output.tokens[request_id] = token
                    if row in by_row:
                        output.logprobs[request_id] = by_row[row]
                else:  # drawn after a draft token
                    output.tokens_after_drafts.setdefault(request_id, []).append(token)
                    if row in by_row:
                        output.logprobs_after_drafts.setdefault(request_id, []).append(by_row[row])

        return read

    def _report_prompt(
        self,
        batch: Batch,
        hidden: Tensor,  # [P, H]
    ) -> Reader:
        """Gather the logprobs of prompt tokens."""
        prompt = batch.prompt
        parts: list[tuple[list[str], Callable[[], list[TokenLogprobs]]]] = []
        for start in range(0, len(prompt.rows), MAX_LOGIT_ROWS):
            part = slice(start, start + MAX_LOGIT_ROWS)
            [tokens] = send([prompt.tokens[part]], hidden.device)
            found = token_logprobs(self.model.logits(hidden[part]), tokens, prompt.num_logprobs[part], self.backend)
            parts.append((prompt.request_ids[part], found))

        def read(output: StepOutput) -> None:
            of = defaultdict[str, list[TokenLogprobs]](list)
            for request_ids, found in parts:
                for request_id, one in zip(request_ids, found(), strict=True):
                    of[request_id].append(one)
            output.prompt_logprobs.update((request_id, tuple(logprobs)) for request_id, logprobs in of.items())

        return read


def _embed(
    batch: Batch,
    pooled: Tensor,  # [E, P]
) -> Reader:
    """Report these vectors."""
    states = receive(pooled)

    def read(output: StepOutput) -> None:
        found = states.numpy()
        finite = np.isfinite(found).all(1).tolist()
        for request_id, state, is_finite in zip(batch.embed.request_ids, found, finite, strict=True):
            # A copy, so that the whole array can be freed.
            output.hidden_states[request_id] = state.copy() if is_finite else None

    return read


def _nonfinite_rows(
    batch: Batch,
    flags: Tensor,  # int32 [T], on the device
) -> Reader:
    """Report, for each sequence, its first row whose K or V is not finite in any layer."""
    found = receive(flags)
    starts = batch.query_starts.clone()  # the next step overwrites them

    def read(output: StepOutput) -> None:
        marked = found.numpy()
        if not marked.any():
            return
        rows = torch.from_numpy(np.flatnonzero(marked))
        sequences = torch.searchsorted(starts, rows, right=True) - 1
        for row, s in zip(rows.tolist(), sequences.tolist(), strict=True):
            output.nonfinite_rows.setdefault(s, row - int(starts[s]))

    return read


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes a GPU current; it does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _rows_to_keep(batch: Batch) -> Tensor:
    """Return the rows whose hidden states are needed: int64, ascending.

    If none is, as for a chunk of a long prompt, return the last row, because operators take at least one.
    """
    asked = [rows for rows in (batch.logit_rows, batch.prompt.rows, batch.embed.rows) if rows.shape[0]]
    if not asked:
        return torch.tensor([len(batch.token_ids) - 1])
    return asked[0] if len(asked) == 1 else torch.cat(asked).sort().values


def _rows(
    hidden: Tensor,  # [T, H]; or only the kept rows
    rows: Tensor,  # int64 [R], host, ascending
    kept: Tensor | None,  # int64, host, ascending
) -> Tensor:
    """Return those rows: [R, H]."""
    if rows.shape[0] == hidden.shape[0]:
        return hidden
    if kept is not None:
        rows = torch.searchsorted(kept, rows)
    [there] = send([rows], hidden.device)
    return hidden[there]
