"""Which part of a model a rank of a tensor-parallel group has.

A rank has some of the heads of each attention layer, of the channels of each MLP, of the hidden numbers that a layer's
output projections make, and of the vocabulary: always some of the outputs of a linear, and all of its inputs. What it
computes the others get, see `quire.ops.exchange`. What is small or cannot be parted, every rank computes by itself:
norms, routers, states, and attention that normalises all heads together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.models.decoder_config import AttentionConfig, DecoderConfig, LatentConfig, LayerConfig
from quire.models.quantisation.stacking import StackedWeight, Weight
from quire.models.state_config import StateConfig
from quire.ops.exchange import MOST_RANKS, Columns, Exchange, own_share, shares
from quire.ops.linear import LinearWeight

TABLES = ("embedding", "per_layer_embedding")
Mixer: TypeAlias = AttentionConfig | LatentConfig | StateConfig


def check_shards(config: DecoderConfig, size: int) -> None:
    """Raise ConfigError where a model cannot be computed by so many ranks."""
    given = f"tensor_parallel_size is {size}"
    if size > MOST_RANKS:
        raise ConfigError(f"{given}; it must be {MOST_RANKS} at most")
    for index, layer in enumerate(config.layers):
        heads = heads_of(layer.mixer)
        if heads is None:
            continue
        count, kv_count = heads
        if count < size:
            raise ConfigError(f"{given}; layer {index} has {count} query heads, and each rank needs one")
        if kv_count < size and size % kv_count:
            raise ConfigError(f"{given}; it must be up to {kv_count}, the KV heads of layer {index}, or a multiple")


def heads_of(mixer: Mixer) -> tuple[int, int] | None:
    """Query heads, and KV heads that go with them, of which a rank has some. None: it has them all."""
    if isinstance(mixer, LatentConfig):
        return mixer.num_heads, mixer.num_heads  # a row of the cache is for all of them
    if isinstance(mixer, AttentionConfig) and mixer.qk_norm != "all heads":
        return mixer.num_heads, mixer.num_kv_heads
    return None


@dataclass(frozen=True)
class Shard:
    """A rank's part of a model."""

    whole: DecoderConfig
    exchange: Exchange

    @property
    def config(self) -> DecoderConfig:
        """The model with this rank's heads alone."""
        slopes = self.whole.alibi_slopes
        if slopes is not None:
            own = self.q_heads(len(slopes), len(slopes), self.exchange.rank)
            slopes = tuple(slopes[i] for i in own)
        return replace(self.whole, layers=tuple(map(self._layer, self.whole.layers)), alibi_slopes=slopes)

    def _layer(self, layer: LayerConfig) -> LayerConfig:
        mixer, heads = layer.mixer, heads_of(layer.mixer)
        if heads is None or isinstance(mixer, StateConfig):
            return layer
        count = len(self.q_heads(*heads, self.exchange.rank))
        if isinstance(mixer, LatentConfig):
            return replace(layer, mixer=replace(mixer, num_heads=count))
        kv_count = len(self.kv_heads(heads[1], self.exchange.rank))
        return replace(layer, mixer=replace(mixer, num_heads=count, num_kv_heads=kv_count))

    def share(self, count: int) -> range:
        """Which of so many things this rank has."""
        return own_share(count, self.exchange.rank, self.exchange.size)

    def columns(self, count: int) -> Columns:
        """So many columns, of which each rank has some."""
        return Columns(self.exchange, shares(count, self.exchange.size))

    def kv_heads(self, count: int, rank: int) -> range:
        """Which KV heads a rank has. Where there are fewer than ranks, several have the same one."""
        size = self.exchange.size
        return own_share(count, rank, size) if count >= size else range(first := rank * count // size, first + 1)

    def q_heads(self, count: int, kv_count: int, rank: int) -> range:
        """Which query heads a rank has: those of its KV heads, or its share of those of the one that it has."""
        kv, each = self.kv_heads(kv_count, rank), count // kv_count
        ranks = self.exchange.size // kv_count  # that have the same KV head
        if ranks <= 1:
            return _wide(kv, each)
        return _moved(own_share(each, rank % ranks, ranks), kv.start * each)

    def mixed(self, index: int) -> Columns | None:
        """What that layer's mixer gives to its output projection. None: each rank has all of it."""
        mixer = self.whole.layers[index].mixer
        heads = heads_of(mixer)
        if heads is None or isinstance(mixer, StateConfig):
            return None
        dim = mixer.v_dim if isinstance(mixer, LatentConfig) else mixer.head_dim
        return Columns(
            self.exchange, tuple(dim * len(self.q_heads(*heads, rank)) for rank in range(self.exchange.size))
        )


class ShardWeights(Mapping[str, Weight]):
    """The rows of a model's weights that a rank has."""

    def __init__(self, weights: Mapping[str, Weight], shard: Shard) -> None:
        self._weights, self._shard = weights, shard

    def __getitem__(self, name: str) -> Weight:
        """The rank's rows of the weight of that name. Raises GroupLost where another rank has died meanwhile."""
        if self._shard.exchange.lost is not None:
            raise self._shard.exchange.loss()
        weight, rows = self._weights[name], self._rows(name)
        if rows is None:
            return weight
        own = rows_of(weight, [part for part in rows if part])
        # Tables are looked up in where they lie: without this, all of them would stay in memory.
        return own.clone() if isinstance(own, Tensor) and name in TABLES else own

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def _rows(self, name: str) -> list[range] | None:
        """Ranges of rows, ascending; None: all."""
        whole, share = self._shard.whole, self._shard.share
        if name in ("embedding", "lm_head", "lm_head.bias"):
            return [share(whole.vocab_size)]
        if name == "per_layer_embedding":
            return [share(whole.weights[name].shape[0])]
        path = name.split(".")
        if path[0] != "layers" or path[-1] not in ("weight", "bias", "sinks"):
            return None
        mixer, part = whole.layers[int(path[1])].mixer, path[-1] if path[-1] == "sinks" else path[-2]
        weight = f"{name.removesuffix('.bias')}.weight" if path[-1] == "bias" else name
        if part in ("output", "state_in", "state_out", "mlp_out"):
            return [share(whole.weights[weight].shape[0])]
        if part == "mlp_in":
            return _of_each(whole.weights[weight].parts, share)
        heads = heads_of(mixer)
        if part == "qkv" and heads is None:
            return [share(whole.weights[weight].shape[0])]
        if isinstance(mixer, AttentionConfig) and heads is not None:
            return self._attention_rows(part, mixer)
        if isinstance(mixer, LatentConfig):
            if part == "qkv" and mixer.q_rank is None:
                q, *others = whole.weights[weight].parts
                return [_wide(share(mixer.num_heads), q // mixer.num_heads), range(q, q + sum(others))]
            if part in ("q", "kv"):
                return [_wide(share(mixer.num_heads), whole.weights[weight].shape[0] // mixer.num_heads)]
        return None

    def _attention_rows(self, part: str, mixer: AttentionConfig) -> list[range] | None:
        shard, D = self._shard, mixer.head_dim
        q = shard.q_heads(mixer.num_heads, mixer.num_kv_heads, shard.exchange.rank)
        if part == "sinks":
            return [q]
        if part != "qkv":
            return None
        kv = shard.kv_heads(mixer.num_kv_heads, shard.exchange.rank)
        parts = [(q, mixer.q_size), *([(q, mixer.q_size)] if mixer.gated else [])]
        parts += [(kv, mixer.kv_size)] * (len(mixer.projected) - 1)
        firsts = accumulate((size for _, size in parts), initial=0)
        return [_moved(_wide(heads, D), first) for (heads, _), first in zip(parts, firsts, strict=False)]


def _wide(items: range, width: int) -> range:
    return range(items.start * width, items.stop * width)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)


def _of_each(parts: tuple[int, ...], share: Callable[[int], range]) -> list[range]:
    return [_moved(share(size), first) for size, first in zip(parts, accumulate(parts, initial=0), strict=False)]


def rows_of(
    weight: Weight,  # [out, in]
    ranges: list[range],  # ascending, none of them empty
) -> Weight:
    """These rows of a weight."""
    if isinstance(weight, Tensor) and len(ranges) == 1:
        return weight[ranges[0].start : ranges[0].stop]
    rows = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
    if not isinstance(weight, StackedWeight):
        return weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)
    found: list[LinearWeight] = []
    first = 0
    for part in weight.parts:
        size = len(part) if isinstance(part, Tensor) else part.out_size
        own = rows[(rows >= first) & (rows < first + size)] - first
        if len(own):
            found.append(part[own] if isinstance(part, Tensor) else part.rows(own))
        first += size
    return found[0] if len(found) == 1 else StackedWeight(tuple(found))
