"""One decoder for all families: they differ in their configuration and the names of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.cache.storage import KVCache
from quire.errors import ModelError
from quire.models.batch import Batch
from quire.models.decoder_config import DecoderConfig
from quire.models.image_turns import ImageTurns
from quire.models.layers import position_tables, write_program
from quire.models.lora.slots import LoraLimits, Loras, LoraTables
from quire.models.model import Head, WeightBytes
from quire.models.pooling import Dense, Pooler
from quire.models.pooling_config import PoolingConfig
from quire.models.quantisation.stacking import Weight, matrix, tensor
from quire.models.sharding import Shard, ShardWeights
from quire.ops import Backend
from quire.ops.collectives import Communicator, SharedEmbedding, SharedHead
from quire.ops.program import Plan
from quire.ops.weights.linear import Embedding, Linear


class Decoder:
    """A decoder that computes logits from token ids and a paged KV cache."""

    origin = "own decoder"
    pooler: Pooler
    quantisation: str | None = None  # set, like weight_bytes, after the weights are loaded
    weight_bytes = WeightBytes()
    rows_are_batch_invariant = True
    loras: Loras | None = None  # set after the weights are loaded
    draft_head: Head | None = None  # set after the weights are loaded
    image_turns: ImageTurns  # of a config with image_axes

    @property
    def capturable(self) -> bool:
        """True without experts, whose routing is read on the host, and without a pooled result."""
        return not self.config.experts and self.config.causal

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        backend: Backend,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        reproducible: bool = False,
        lora: LoraLimits | None = None,
        exchange: Communicator | None = None,
        most_tokens: int = 2**14,
    ) -> None:
        """Take the weights of `weight_shapes`: norms in fp32, the others of one dtype, all on one device.

        Linears and the embedding may be quantised; then this dtype is that of their inputs.

        reproducible: compute batch-invariantly; on a CPU this is always so.
        lora: limits of LoRA adapters, for which tables are allocated; None: no adapters.
        exchange: the communication of the tensor-parallel group; this rank computes its part. None: the whole model.
        most_tokens: tokens of a step, all of which may be rows of images.
        """
        self.whole, self.exchange = config, exchange
        shard = None
        if exchange is not None:
            shard = Shard(config, exchange)
            weights, config = ShardWeights(weights, shard), shard.config
        self.config = config
        self.backend = backend
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        embedding = matrix(weights["embedding"])  # [V, H]
        self.dtype, self.device = embedding.dtype, embedding.device
        linears = backend.linears(str(self.device), reproducible)
        self.embedding: Embedding
        self.lm_head: Linear
        if not config.has_head:
            self.embedding, self.lm_head = linears.embedding(embedding), _no_head
        elif config.tied_embeddings:
            self.embedding, self.lm_head = linears.tied(embedding)
        else:
            self.embedding = linears.embedding(embedding)
            bias = tensor(weights["lm_head.bias"]) if config.head_bias else None
            self.lm_head = linears.head(matrix(weights["lm_head"]), bias)
        del embedding  # else it would stay in memory next to its packed form until all layers are read
        if shard is not None:
            vocabulary = shard.columns(config.vocab_size)
            self.embedding = SharedEmbedding(self.embedding, vocabulary)
            self.lm_head = SharedHead(self.lm_head, vocabulary)
        self.positions: Tensor | None = None  # [max_position_embeddings, H]
        if config.learned_positions:
            self.positions = tensor(weights["positions"])[config.first_position :]
        self.token_types = tensor(weights["token_types"]) if config.token_types else None  # [types, H]
        self.embedding_scale = config.embedding_scale
        if config.embedding_scale is not None and config.rounds_embedding_scale:
            self.embedding_scale = self._rounded(config.embedding_scale)
        self.per_layer_embedding: Embedding | None = None  # [V, L * size]
        if config.per_layer is not None:
            self.per_layer_embedding = linears.embedding(matrix(weights["per_layer_embedding"]))
            if shard is not None:
                rows = shard.columns(config.per_layer.vocab_size)
                self.per_layer_embedding = SharedEmbedding(self.per_layer_embedding, rows)
            self.per_layer_scale = self._rounded(config.per_layer.size**0.5)
        tables = position_tables(config, max_model_len, self.device)
        if config.image_axes:
            self.image_turns = ImageTurns(config.image_axes, max_model_len, most_tokens)
            tables = self.image_turns.extended(tables)
        slopes = None if config.alibi_slopes is None else torch.tensor(config.alibi_slopes, device=self.device)
        self.lora_tables = None if lora is None else LoraTables(linears, self.dtype, lora)
        program = write_program(
            config, weights, linears, tables, slopes, self.dtype, self.device, self.lora_tables, shard, max_model_len
        )
        self.layers = backend.compile(program)
        dense = [Dense.of(one, weights, f"classifier.{i}", linears) for i, one in enumerate(config.classifier)]
        mode = config.classifier_pooling if dense else "last"
        self.pooler = Pooler(PoolingConfig(mode=mode, normalized=not dense), dense)  # loading adds a checkpoint's files

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[Plan], rows: Tensor | None = None) -> Tensor:
        """Return hidden states after the final norm: [T, H]. Write the batch's K and V to the cache.

        The inputs of the layers in `config.seen` follow them, [T, H] each.

        plans: one per cache group, updated for this batch.
        rows: int64 [R], ascending. If given, the result is these rows, [R, H]: the others end with the last attention.
        """
        positions = batch.positions.to(self.device)
        embedded = self.embed(batch.token_ids.to(self.device), positions)
        if self.config.deep_layers:
            embedded = torch.nn.functional.pad(embedded, (0, self.config.deep_layers * self.config.hidden_size))
        if batch.given is not None:
            given = batch.given.values.to(self.device, embedded.dtype)
            embedded[batch.given.rows.to(self.device), : given.shape[1]] = given
        turns = positions if batch.turns is None else batch.turns.to(self.device)
        if batch.given is not None and batch.given.axes is not None:
            turns = self.image_turns.applied(turns, batch.given)
        if self.config.seen:
            embedded = torch.nn.functional.pad(embedded, (0, len(self.config.seen) * self.config.hidden_size))
        own = plans if self.draft_head is None else self.draft_head.without_own(plans)
        return self.layers(embedded, turns, cache, own, rows, batch.lora_slots)

    def logits(
        self,
        hidden: Tensor,  # [R, H]
    ) -> Tensor:
        """Return logits over the vocabulary: fp32 [R, V]. Raises ModelError without an output projection."""
        logits = self.lm_head(hidden).float()
        if self.config.logit_scale is not None:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def embeds_plainly(self) -> bool:
        """True if the input of the first layer begins with a row of the embedding and nothing else."""
        return self.token_types is None and self.embedding_scale is None and self.positions is None

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first layer: [T, H], with per-layer embeddings after it."""
        embedded = self.embed_by(self.embedding, token_ids, positions)
        if self.per_layer_embedding is not None:
            embedded = torch.cat([embedded, self.per_layer_embedding(token_ids) * self.per_layer_scale], 1)
        return embedded

    def embed_by(self, embedding: Embedding, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first layer, [T, H], with that table in place of the model's."""
        if self.token_types is None:
            embedded = embedding(token_ids)
        else:
            types = token_ids // self.config.vocab_size
            embedded = embedding(token_ids - types * self.config.vocab_size) + self.token_types[types]
        if self.embedding_scale is not None:
            embedded = embedded * self.embedding_scale
        return embedded if self.positions is None else embedded + self.positions[positions]

    def _rounded(self, factor: float) -> float:
        return float(torch.tensor(factor, dtype=self.dtype))


def _no_head(x: Tensor) -> Tensor:  # noqa: ARG001  # the interface of a linear
    raise ModelError("this model has no output projection, so it writes no token")
