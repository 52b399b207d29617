"""Runner: a Batch in, a StepOutput out. The only place where the model, the cache and the sampler meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.batch import Batch
from quire.cache.storage import KVCache
from quire.engine.plan import StepOutput
from quire.engine.sampler import sample, token_logprobs
from quire.ops import AttentionPlan, AttentionSpec, Ops
from quire.request import TokenLogprobs

MAX_LOGIT_ROWS = 256  # rows of V numbers held at a time: 128 MiB for a vocabulary of 128k


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[AttentionPlan]) -> Tensor:
        """Hidden states: [T, H]. Writes the batch's K and V to the cache."""

    def logits(
        self,
        hidden: Tensor,  # [R, H]
    ) -> Tensor:
        """Logits over the vocabulary: fp32 [R, V]."""


class Runner:
    """Runs a model eagerly, with one attention plan a cache group that every step updates."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        ops: Ops,
        specs: Sequence[AttentionSpec],  # one a cache group
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.ops = ops
        self.plans = tuple(ops.make_plan(spec, max_tokens, max_seqs, max_blocks) for spec in specs)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Move blocks, compute the batch's tokens, draw the next ones, and gather the logprobs that were asked for."""
        for g, group in enumerate(batch.groups):
            self.cache.swap_out(g, *group.swap_out)
            self.cache.swap_in(g, *group.swap_in)
            for copied in group.copies:
                for kv in self.cache.layers(g):
                    self.ops.copy_blocks(kv, copied.src, copied.dst)
        if len(batch.token_ids) == 0:
            return StepOutput({})
        for plan, group in zip(self.plans, batch.groups, strict=True):
            plan.update(batch.query_starts, batch.context_lens, group.block_tables, group.slots)
        hidden = self.model.forward(batch, self.cache, self.plans)
        output = StepOutput({}, {}, {})
        for start in range(0, len(batch.logit_rows), MAX_LOGIT_ROWS):
            self._sample(batch, hidden, start, start + MAX_LOGIT_ROWS, output)
        self._report_prompt(batch, hidden, output)
        return output

    def _sample(
        self,
        batch: Batch,
        hidden: Tensor,  # [T, H]
        start: int,
        stop: int,
        output: StepOutput,
    ) -> None:
        """Draw tokens for the logit rows start:stop."""
        logits = self.model.logits(hidden[batch.logit_rows[start:stop].to(hidden.device)])
        rows = batch.sampling.part(start, stop, logits.device)
        reported = (rows.num_logprobs >= 0).nonzero().flatten()
        raw = logits[reported]  # a copy: sampling changes the logits
        tokens = sample(logits, rows, self.ops)
        ids = batch.logit_ids[start:stop]
        output.tokens.update(zip(ids, tokens.tolist(), strict=True))
        if len(reported):
            found = token_logprobs(raw, tokens[reported].clamp(min=0), rows.num_logprobs[reported], self.ops)
            output.logprobs.update(zip((ids[i] for i in reported.tolist()), found, strict=True))

    def _report_prompt(
        self,
        batch: Batch,
        hidden: Tensor,  # [T, H]
        output: StepOutput,
    ) -> None:
        """Gather the logprobs of prompt tokens."""
        prompt, found = batch.prompt, defaultdict[str, list[TokenLogprobs]](list)
        for start in range(0, len(prompt.rows), MAX_LOGIT_ROWS):
            part = slice(start, start + MAX_LOGIT_ROWS)
            logits = self.model.logits(hidden[prompt.rows[part].to(hidden.device)])
            tokens, counts = prompt.tokens[part].to(logits.device), prompt.num_logprobs[part]
            for request_id, logprobs in zip(
                prompt.request_ids[part], token_logprobs(logits, tokens, counts, self.ops), strict=True
            ):
                found[request_id].append(logprobs)
        output.prompt_logprobs.update((request_id, tuple(logprobs)) for request_id, logprobs in found.items())
