"""What the engine needs of a model, whoever wrote its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.batch import Batch
from quire.cache import storage
from quire.cache.groups import AnyGroup, CacheGroup, Heads, StateSizes
from quire.cache.storage import KVCache
from quire.models.lora.slots import Loras
from quire.ops.exchange import Exchange
from quire.ops.program import Plan


class ModelShape(Protocol):
    """The sizes that decide about memory and about the attention plans."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def groups(self) -> tuple[AnyGroup, ...]:
        """The layers with memory of their own: attention by window and heads, then those that keep a state."""

    @property
    def layer_width(self) -> int:
        """Numbers that a layer computes of a row at most, besides the residual, its norm and a branch."""


def cache_groups(layers: Sequence[tuple[Heads, int | None] | None]) -> tuple[CacheGroup, ...]:
    """The layers by heads and window, in order of first appearance; None: a layer without memory of its own."""
    return tuple(
        CacheGroup(tuple(i for i, layer in enumerate(layers) if layer == kind), kind[1], kind[0])
        for kind in dict.fromkeys(layers)
        if kind is not None
    )


def state_groups(layers: Sequence[StateSizes | None]) -> tuple[AnyGroup, ...]:
    """Two groups for each kind of layers that keep a state, in order of first appearance; None: any other layer."""
    kinds = [kind for kind in dict.fromkeys(layers) if kind is not None]
    pairs = (storage.state_groups(tuple(i for i, own in enumerate(layers) if own == kind), kind) for kind in kinds)
    return tuple(group for pair in pairs for group in pair)


def attention_width(heads: Heads) -> int:
    """Numbers of a row: q, k and v, what is attended, and a copy in rows."""
    return (3 * heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim


def state_width(sizes: StateSizes) -> int:
    """Numbers of a row: what is projected and convolved, gates, what is recalled, and that normalised."""
    return 3 * sizes.width + 4 * sizes.num_heads * (sizes.dim_v + 1)


def mlp_width(size: int) -> int:
    """Numbers of a row: gate and up, the activation, and that in fp32 or on the way."""
    return 5 * size


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of a model's weights, by what a step reads of them. Integers of 4 bits count as half a byte."""

    layers: int = 0  # every step, all of them: linears, norms and biases
    experts: int = 0  # those of experts that a row goes through
    head: int = 0  # where a row draws a token: the output projection, which may be the embedding
    looked_up: int = 0  # single rows: embeddings that are no output projection

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.experts + self.head + self.looked_up


class Model(Protocol):
    """Token ids to logits through a paged cache."""

    @property
    def config(self) -> ModelShape:
        """Its sizes."""

    @property
    def origin(self) -> str:
        """Who computes it, and why."""

    @property
    def quantisation(self) -> str | None:
        """The format of the weights, as in "awq int4, groups of 128, zeros" or "int4 at load"; None: not quantised."""

    @property
    def weight_bytes(self) -> WeightBytes:
        """Bytes of the weights as they were loaded."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that are not quantised, of what is multiplied with the others, and of the cache."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text."""

    @property
    def rows_keep_bits(self) -> bool:
        """Whether what the model adds to attention gives a row the same bits whatever stands beside it."""

    @property
    def capturable(self) -> bool:
        """Whether a step is kernels alone, so that a CUDA graph can repeat it."""

    @property
    def whole(self) -> ModelShape:
        """The sizes of the whole model: its own, unless it is a rank's part."""

    @property
    def exchange(self) -> Exchange | None:
        """Of the tensor-parallel group of which this is one rank's part; None: it is the whole model."""

    @property
    def loras(self) -> Loras | None:
        """Its adapters; None: it can have none."""

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[Plan], rows: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm: [T, H]. Writes the batch's K and V to the cache.

        plans: one a cache group, updated for this batch.
        rows: int64 [R], ascending. If given, the result is these rows, [R, H].
        """

    def logits(
        self,
        hidden: Tensor,  # [R, H]
    ) -> Tensor:
        """Logits over the vocabulary: fp32 [R, V]."""
