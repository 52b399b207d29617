"""One decoder for all families: what differs between them is configuration and the names of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.batch import Batch
from quire.cache.storage import KVCache
from quire.models.decoder_config import DecoderConfig
from quire.models.layers import write_program
from quire.models.model import WeightBytes
from quire.models.quantisation.stacking import Weight, matrix, tensor
from quire.models.rope import rope_tables
from quire.ops import AttentionPlan, Backend
from quire.ops.linear import Embedding, PlainEmbedding


class Decoder:
    """Token ids to logits through a paged cache."""

    origin = "own decoder"
    quantisation: str | None = None  # set, with the next one, when the weights were loaded
    weight_bytes = WeightBytes()
    rows_keep_bits = True

    @property
    def capturable(self) -> bool:
        """Experts ask the host who chose whom."""
        return not self.config.experts

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        backend: Backend,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        reproducible: bool = False,
    ) -> None:
        """Take the weights of `weight_shapes` as they are: norms in fp32, the others of one dtype, on one device.

        Linears, and a tied embedding, may be quantised; then this dtype is that of their inputs.

        reproducible: a row's bits do not depend on the others; on a CPU they never do.
        """
        self.config = config
        self.backend = backend
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        embedding = matrix(weights["embedding"])  # [V, H]
        self.dtype, self.device = embedding.dtype, embedding.device
        linears = backend.linears(str(self.device), reproducible)
        self.embedding: Embedding
        if config.tied_embeddings:
            self.embedding, self.lm_head = linears.tied(embedding)
        else:
            self.embedding = PlainEmbedding(tensor(embedding), self.dtype)
            self.lm_head = linears.head(matrix(weights["lm_head"]))
        del embedding  # else it would be held beside its packed form until all layers are read
        self.positions: Tensor | None = None  # [max_position_embeddings, H]
        if config.learned_positions:
            self.positions = tensor(weights["positions"])
        self.embedding_scale = config.embedding_scale
        if config.embedding_scale is not None and config.rounds_embedding_scale:
            self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        ropes = [(layer.mixer.rope, layer.mixer.head_dim) for layer in config.layers]
        tables = rope_tables(ropes, config.max_position_embeddings, max_model_len, self.device)
        slopes = None if config.alibi_slopes is None else torch.tensor(config.alibi_slopes, device=self.device)
        self.layers = backend.compile(write_program(config, weights, linears, tables, slopes, self.dtype))

    def forward(
        self, batch: Batch, cache: KVCache, plans: Sequence[AttentionPlan], rows: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm: [T, H]. Writes the batch's K and V to the cache.

        plans: one a cache group, updated for this batch.
        rows: int64 [R], ascending. If given, the result is these rows, [R, H]: the others end with the last attention.
        """
        positions = batch.positions.to(self.device)
        return self.layers(self._embed(batch.token_ids.to(self.device), positions), positions, cache, plans, rows)

    def logits(
        self,
        hidden: Tensor,  # [R, H]
    ) -> Tensor:
        """Logits over the vocabulary: fp32 [R, V]."""
        logits = self.lm_head(hidden).float()
        if self.config.logit_scale is not None:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        embedded = self.embedding(token_ids)
        if self.embedding_scale is not None:
            embedded = embedded * self.embedding_scale
        if self.positions is not None:
            embedded = embedded + self.positions[positions]
        return embedded
