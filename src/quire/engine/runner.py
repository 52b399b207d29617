"""Runner: a Batch in, a StepOutput out. The only place where the model, the cache and the sampler meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.batch import Batch
from quire.cache.storage import KVCache
from quire.engine.plan import StepOutput
from quire.engine.sampler import sample, token_logprobs
from quire.engine.transfer import send
from quire.models.model import Model
from quire.ops import AttentionPlan, AttentionSpec, Backend
from quire.request import TokenLogprobs

MAX_LOGIT_ROWS = 256  # rows of V numbers held at a time: 128 MiB for a vocabulary of 128k


class Runner:
    """Runs a model eagerly, with one attention plan a cache group that every step updates.

    On a GPU the host queues a whole step and waits once, for the tokens that were drawn and the logprobs asked for.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        backend: Backend,
        specs: Sequence[AttentionSpec],  # one a cache group
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.specs = tuple(specs)
        self.device = torch.device(specs[0].device)
        self.plans = self.make_plans(max_tokens, max_seqs, max_blocks)

    def make_plans(self, max_tokens: int, max_seqs: int, max_blocks: int) -> tuple[AttentionPlan, ...]:
        """An attention plan of that size for each cache group."""
        return tuple(self.backend.make_plan(spec, max_tokens, max_seqs, max_blocks) for spec in self.specs)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Move blocks, compute the batch's tokens, draw the next ones, and gather the logprobs that were asked for."""
        with device_context(self.device):
            self.move(batch)
            return self.compute(batch) if len(batch.token_ids) else StepOutput({})

    def is_lost(self) -> bool:
        """Whether the device fails for good: after an illegal address, say, so does every further call of CUDA."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except Exception:
                return True
        return False

    def move(self, batch: Batch) -> None:
        """Swap out, swap in, copy."""
        for g, group in enumerate(batch.groups):
            self.cache.swap_out(g, *group.swap_out)
            self.cache.swap_in(g, *group.swap_in)
            for copied in group.copies:
                for kv in self.cache.layers(g):
                    self.backend.copy_blocks(kv, copied.src, copied.dst)

    def compute(self, batch: Batch) -> StepOutput:
        """What `run` does when blocks have moved."""
        self.update(batch)
        kept = _rows_to_keep(batch)
        token_ids, positions, rows = send([batch.token_ids, batch.positions, kept], self.device)
        there = replace(batch, token_ids=token_ids, positions=positions)
        if len(kept) == len(batch.token_ids):
            return self.finish(batch, self.model.forward(there, self.cache, self.plans), self.plans)
        return self.finish(batch, self.model.forward(there, self.cache, self.plans, rows), self.plans, kept)

    def update(self, batch: Batch) -> None:
        """Give each cache group's plan the batch's metadata."""
        update(self.plans, batch)

    def finish(
        self,
        batch: Batch,
        hidden: Tensor,  # [T, H]; or those that were kept
        plans: Sequence[AttentionPlan],  # that the step was computed with
        kept: Tensor | None = None,  # int64, host, ascending: the rows that `hidden` has; None: all
    ) -> StepOutput:
        """Draw a token for each logit row, and gather the logprobs and hidden states that were asked for."""
        output = StepOutput({}, {}, {})
        if len(batch.logit_rows):
            self._sample(batch, _rows(hidden, batch.logit_rows, kept), output)
        if len(batch.prompt.rows):
            self._report_prompt(batch, _rows(hidden, batch.prompt.rows, kept), output)
        if len(batch.embed.rows):
            found = _rows(hidden, batch.embed.rows, kept).float().cpu().numpy()
            finite = np.isfinite(found).all(1).tolist()
            for request_id, state, is_finite in zip(batch.embed.request_ids, found, finite, strict=True):
                output.hidden_states[request_id] = state.copy() if is_finite else None  # what lies beside it is freed
        output.nonfinite_rows = _nonfinite_rows(batch, plans)
        return output

    def _sample(
        self,
        batch: Batch,
        hidden: Tensor,  # [R, H]
        output: StepOutput,
    ) -> None:
        drawn: list[Tensor] = []  # read when all are queued; logprobs, part by part
        logprobs: dict[int, TokenLogprobs] = {}  # by row
        for start in range(0, len(hidden), MAX_LOGIT_ROWS):
            logits = self.model.logits(hidden[start : start + MAX_LOGIT_ROWS])
            rows = batch.sampling.part(start, start + MAX_LOGIT_ROWS)
            reported = (rows.num_logprobs >= 0).nonzero().flatten()
            [there] = send([reported], logits.device) if len(reported) else [reported]
            raw = logits[there] if len(reported) else None  # a copy: sampling changes the logits
            drawn.append(sample(logits, rows, self.backend))
            if raw is not None:
                found = token_logprobs(raw, drawn[-1][there].clamp(min=0), rows.num_logprobs[reported], self.backend)
                logprobs.update(zip((reported + start).tolist(), found, strict=True))
        for row, (request_id, token) in enumerate(zip(batch.logit_ids, torch.cat(drawn).tolist(), strict=True)):
            if request_id not in output.tokens:
                output.tokens[request_id] = token
                if row in logprobs:
                    output.logprobs[request_id] = logprobs[row]
            else:  # after a guess
                output.tokens_after_guesses.setdefault(request_id, []).append(token)
                if row in logprobs:
                    output.logprobs_after_guesses.setdefault(request_id, []).append(logprobs[row])

    def _report_prompt(
        self,
        batch: Batch,
        hidden: Tensor,  # [P, H]
        output: StepOutput,
    ) -> None:
        """Gather the logprobs of prompt tokens."""
        prompt, found = batch.prompt, defaultdict[str, list[TokenLogprobs]](list)
        for start in range(0, len(prompt.rows), MAX_LOGIT_ROWS):
            part = slice(start, start + MAX_LOGIT_ROWS)
            [tokens] = send([prompt.tokens[part]], hidden.device)
            logits = self.model.logits(hidden[part])
            for request_id, logprobs in zip(
                prompt.request_ids[part],
                token_logprobs(logits, tokens, prompt.num_logprobs[part], self.backend),
                strict=True,
            ):
                found[request_id].append(logprobs)
        output.prompt_logprobs.update((request_id, tuple(logprobs)) for request_id, logprobs in found.items())


def update(plans: Sequence[AttentionPlan], batch: Batch) -> None:
    """Give each cache group's plan the batch's metadata."""
    for plan, group in zip(plans, batch.groups, strict=True):
        plan.update(batch.query_starts, batch.context_lens, group.block_tables, group.slots)


def _nonfinite_rows(batch: Batch, plans: Sequence[AttentionPlan]) -> dict[int, int]:
    """By sequence, its first row whose K or V is not finite in any layer. Waits for the device."""
    count = len(batch.token_ids)  # a plan of a graph has padding after them
    flags = [plan.nonfinite[:count] for plan in plans]
    found = flags[0] if len(flags) == 1 else torch.stack(flags).amax(0)
    marked = found.cpu().numpy()
    if not marked.any():
        return {}
    rows = torch.from_numpy(np.flatnonzero(marked))
    sequences = torch.searchsorted(batch.query_starts, rows, right=True) - 1
    first: dict[int, int] = {}
    for row, s in zip(rows.tolist(), sequences.tolist(), strict=True):
        first.setdefault(s, row - int(batch.query_starts[s]))
    return first


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Within it, kernels and streams are those of that GPU; nothing changes for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _rows_to_keep(batch: Batch) -> Tensor:
    """The rows that anything is asked of: int64, ascending.

    Of a step that asks for nothing, a piece of a long prompt, the last one: operators take no less.
    """
    asked = [rows for rows in (batch.logit_rows, batch.prompt.rows, batch.embed.rows) if len(rows)]
    if not asked:
        return torch.tensor([len(batch.token_ids) - 1])
    return asked[0] if len(asked) == 1 else torch.cat(asked).sort().values


def _rows(
    hidden: Tensor,  # [T, H]; or those that were kept
    rows: Tensor,  # int64 [R], host, ascending
    kept: Tensor | None,  # int64, host, ascending
) -> Tensor:
    """Those rows: [R, H]."""
    if len(rows) == len(hidden):
        return hidden
    if kept is not None:
        rows = torch.searchsorted(kept, rows)
    [there] = send([rows], hidden.device)
    return hidden[there]
