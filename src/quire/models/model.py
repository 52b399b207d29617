"""The interface between the engine and a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from quire.cache import storage
from quire.cache.groups import AnyGroup, CacheGroup, Heads, StateSizes
from quire.cache.storage import KVCache
from quire.models.batch import Batch
from quire.models.lora.slots import Loras
from quire.models.pooling import Pooler
from quire.ops.collectives import Communicator
from quire.ops.program import Plan

T = TypeVar("T")


class ModelShape(Protocol):
    """The sizes that determine memory use and attention plans."""

    @property
    def vocab_size(self) -> int:
        """The vocabulary size V."""

    @property
    def num_token_ids(self) -> int:
        """The number of token ids: V, or more if an id also has the token's type."""

    @property
    def hidden_size(self) -> int:
        """The hidden size H."""

    @property
    def causal(self) -> bool:
        """False for an encoder: a row attends to all tokens of its text, which are computed in one step."""

    @property
    def has_head(self) -> bool:
        """False without an output projection: the model writes no tokens."""

    @property
    def groups(self) -> tuple[AnyGroup, ...]:
        """The cache groups: attention layers by window and heads, then layers that keep a recurrent state."""

    @property
    def layer_width(self) -> int:
        """The most numbers that a layer computes per row, in addition to the residual, its norm and a branch."""


def cache_groups(layers: Sequence[tuple[Heads, int | None] | None]) -> tuple[CacheGroup, ...]:
    """Group layers by heads and window, in order of first appearance. None is a layer that stores no KV cache."""
    return tuple(
        CacheGroup(tuple(i for i, layer in enumerate(layers) if layer == kind), kind[1], kind[0])
        for kind in dict.fromkeys(layers)
        if kind is not None
    )


def state_groups(layers: Sequence[StateSizes | None]) -> tuple[AnyGroup, ...]:
    """Return two groups per kind of recurrent layer, in order of first appearance. None is any other layer."""
    kinds = [kind for kind in dict.fromkeys(layers) if kind is not None]
    pairs = (storage.state_groups(tuple(i for i, own in enumerate(layers) if own == kind), kind) for kind in kinds)
    return tuple(group for pair in pairs for group in pair)


def attention_width(heads: Heads) -> int:
    """Return the numbers per row of an attention layer: q, k, v, the attention output, and a copy in rows."""
    return (3 * heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim


def state_width(sizes: StateSizes) -> int:
    """Return the numbers per row of a recurrent layer: projection, convolution, gates, output, and its norm."""
    return 3 * sizes.width + 4 * sizes.num_heads * (sizes.dim_v + 1)


def mlp_width(size: int) -> int:
    """Return the numbers per row of an MLP: gate and up, the activation, and a copy in fp32 or in transit."""
    return 5 * size


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of a model's weights, by how a step reads them. Integers of 4 bits count as half a byte."""

    layers: int = 0  # read whole in every step: linears, norms and biases
    experts: int = 0  # a step reads the experts that its rows are routed to
    head: int = 0  # read if a row samples a token: the output projection, which may be tied to the embedding
    looked_up: int = 0  # single rows are read: embeddings that are not tied to the output projection

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.layers + self.experts + self.head + self.looked_up


class Head(Protocol):
    """Layers that predict draft tokens from a model's hidden states."""

    @property
    def groups(self) -> tuple[AnyGroup, ...]:
        """The cache groups of the model's layers, or of this rank's part of them, and then of these."""

    @property
    def whole_groups(self) -> tuple[AnyGroup, ...]:
        """The cache groups of the whole model's layers and then of these."""

    @property
    def plans(self) -> Sequence[int]:
        """The cache groups, by index, that these layers belong to."""

    def forward(
        self,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
        before: Tensor,  # [T, H], the hidden state of the model, or of the head, at the token before each
        cache: KVCache,
        plans: Sequence[Plan],  # one per cache group of model and head, updated for these tokens
        rows: Tensor | None = None,  # int64 [R], ascending
    ) -> Tensor:
        """Return the hidden states after the final norm, [T, H] or [R, H], and write the K and V of all rows."""

    def split(
        self,
        found: Tensor,  # [T, width], as the model returns it
    ) -> tuple[Tensor, Tensor]:
        """Return the model's hidden states after the final norm, and those that `forward` takes as `before`."""

    def drafts(
        self,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]; changed
        before: Tensor,  # [T, W], see `forward`
        cache: KVCache,
        plans: Sequence[Plan],  # updated for these rows, with blocks for those of the draft tokens
        rows: Tensor,  # int64 [R], the last rows of the first R sequences
        counts: Tensor,  # int64 [R], descending, 1 or more: draft tokens of each of these
    ) -> Tensor | None:
        """Compute the rows and return draft tokens, int64 [counts[0], R], undefined after a sequence's count.

        None, and nothing is computed, if the backend has no call for all of them.
        """

    def choose(
        self,
        hidden: Tensor,  # [R, H], as `forward` returns them
    ) -> Tensor:
        """Return the most likely next token of each row: int64 [R]."""

    def without_own(self, of_groups: Sequence[T]) -> tuple[T, ...]:
        """Return the items of the model's own cache groups, given those of model and head."""


class Model(Protocol):
    """A model that computes logits from token ids and a paged KV cache."""

    @property
    def config(self) -> ModelShape:
        """The sizes of this model, or of this rank's part."""

    @property
    def origin(self) -> str:
        """The implementation that runs the model, and the reason for the choice."""

    @property
    def quantisation(self) -> str | None:
        """The format of quantised weights, such as "awq int4, groups of 128, zeros" or "int4 at load"; else None."""

    @property
    def weight_bytes(self) -> WeightBytes:
        """Bytes of the loaded weights."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights that are not quantised, of the inputs of those that are, and of the cache."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end generation."""

    @property
    def rows_are_batch_invariant(self) -> bool:
        """True if the model's code outside attention is batch-invariant: a row's bits do not depend on other rows."""

    @property
    def capturable(self) -> bool:
        """True if a step only launches kernels, so that a CUDA graph can capture it."""

    @property
    def whole(self) -> ModelShape:
        """The sizes of the whole model. They differ from `config` if this is a rank's part."""

    @property
    def pooler(self) -> Pooler:
        """Computes the vectors of prompts that are embedded or classified."""

    @property
    def exchange(self) -> Communicator | None:
        """The communication of the tensor-parallel group if this is one rank's part; None: the whole model."""

    @property
    def draft_head(self) -> Head | None:
        """The layers that predict draft tokens; None: the model has none, or they are not loaded."""

    @property
    def loras(self) -> Loras | None:
        """The LoRA adapters; None: the model has no slots for any."""

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[Plan], rows: Tensor | None = None) -> Tensor:
        """Return hidden states after the final norm: [T, H]. Write the batch's K and V to the cache.

        plans: one per cache group, updated for this batch.
        rows: int64 [R], ascending. If given, only these rows are returned, [R, H].
        """

    def logits(
        self,
        hidden: Tensor,  # [R, H]
    ) -> Tensor:
        """Return logits over the vocabulary: fp32 [R, V]."""
