"""Tensor parallelism: the part of a model that each rank holds.

A rank holds a share of the heads of each attention layer, of the channels of each MLP, of the outputs of each output
projection, and of the vocabulary: always a share of the outputs of a linear, and all of its inputs. The ranks gather
each other's results, see `quire.ops.collectives`. Small or indivisible parts are replicated, every rank computes all of
them: norms, routers, recurrent states, and attention that normalises all heads together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.models.decoder_config import AttentionConfig, DecoderConfig, LatentConfig, LayerConfig, Mixer
from quire.models.quantisation.stacking import StackedWeight, Weight
from quire.ops.collectives import MOST_RANKS, Columns, Communicator, own_share, shares
from quire.ops.weights.linear import LinearWeight

TABLES = ("embedding", "per_layer_embedding")


def check_shards(config: DecoderConfig, size: int) -> None:
    """Raise ConfigError if a model cannot be split between `size` ranks."""
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


def heads_of(mixer: Mixer | None) -> tuple[int, int] | None:
    """Return the numbers of query heads and KV heads that are split between ranks; None: they are replicated."""
    if isinstance(mixer, LatentConfig):
        return mixer.num_heads, mixer.num_heads  # all heads share a row of the cache, so any split will do
    if isinstance(mixer, AttentionConfig) and mixer.qk_norm != "all heads":
        return mixer.num_heads, mixer.num_kv_heads
    return None


@dataclass(frozen=True)
class Shard:
    """The part of a model that one rank holds."""

    whole: DecoderConfig
    exchange: Communicator

    @property
    def config(self) -> DecoderConfig:
        """The model's config with this rank's heads only."""
        slopes = self.whole.alibi_slopes
        if slopes is not None:
            own = self.q_heads(len(slopes), len(slopes), self.exchange.rank)
            slopes = tuple(slopes[i] for i in own)
        return replace(self.whole, layers=tuple(map(self._layer, self.whole.layers)), alibi_slopes=slopes)

    def _layer(self, layer: LayerConfig) -> LayerConfig:
        mixer, heads = layer.mixer, heads_of(layer.mixer)
        if heads is None or not isinstance(mixer, AttentionConfig | LatentConfig):
            return layer
        count = len(self.q_heads(*heads, self.exchange.rank))
        if isinstance(mixer, LatentConfig):
            return replace(layer, mixer=replace(mixer, num_heads=count))
        kv_count = len(self.kv_heads(heads[1], self.exchange.rank))
        return replace(layer, mixer=replace(mixer, num_heads=count, num_kv_heads=kv_count))

    def share(self, count: int) -> range:
        """Return this rank's share of `count` items."""
        return own_share(count, self.exchange.rank, self.exchange.size)

    def columns(self, count: int) -> Columns:
        """Return `count` columns that are split between the ranks."""
        return Columns(self.exchange, shares(count, self.exchange.size))

    def kv_heads(self, count: int, rank: int) -> range:
        """Return the KV heads of a rank. If there are fewer heads than ranks, several ranks hold the same one."""
        size = self.exchange.size
        return own_share(count, rank, size) if count >= size else range(first := rank * count // size, first + 1)

    def q_heads(self, count: int, kv_count: int, rank: int) -> range:
        """Return the query heads of a rank: those of its KV heads, or its share of those of the one that it shares."""
        kv, each = self.kv_heads(kv_count, rank), count // kv_count
        ranks = self.exchange.size // kv_count  # that hold the same KV head
        if ranks <= 1:
            return _wide(kv, each)
        return _moved(own_share(each, rank % ranks, ranks), kv.start * each)

    def mixed(self, index: int) -> Columns | None:
        """Return the split of the input of a layer's output projection. None: each rank computes all of it."""
        mixer = self.whole.layers[index].mixer
        heads = heads_of(mixer)
        if heads is None or not isinstance(mixer, AttentionConfig | LatentConfig):
            return None
        dim = mixer.v_dim if isinstance(mixer, LatentConfig) else mixer.head_dim
        return Columns(
            self.exchange, tuple(dim * len(self.q_heads(*heads, rank)) for rank in range(self.exchange.size))
        )


class ShardWeights(Mapping[str, Weight]):
    """A rank's rows of a model's weights."""

    def __init__(self, weights: Mapping[str, Weight], shard: Shard) -> None:
        self._weights, self._shard = weights, shard

    def __getitem__(self, name: str) -> Weight:
        """Return the rank's rows of a weight. Raises GroupLost if another rank has died."""
        if self._shard.exchange.lost is not None:
            raise self._shard.exchange.loss()
        weight, rows = self._weights[name], self._rows(name)
        if rows is None:
            return weight
        own = rows_of(weight, [part for part in rows if part])
        # Tables are not packed, and a view of these rows would keep the whole table in memory.
        return own.clone() if isinstance(own, Tensor) and name in TABLES else own

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def _rows(self, name: str) -> list[range] | None:
        """Return the rank's ranges of rows, ascending; None: all rows."""
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
        if part in ("mlp_in", "mlp_in_up"):
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
            if part in ("q", "kv", "gates"):
                parts = whole.weights[weight].parts
                return _of_each(parts, lambda size: _wide(share(mixer.num_heads), size // mixer.num_heads))
        return None

    def _attention_rows(self, part: str, mixer: AttentionConfig) -> list[range] | None:
        shard, D = self._shard, mixer.head_dim
        q = shard.q_heads(mixer.num_heads, mixer.num_kv_heads, shard.exchange.rank)
        if part == "sinks":
            return [q]
        if part not in ("qkv", "qkv_up"):
            return None
        kv = shard.kv_heads(mixer.num_kv_heads, shard.exchange.rank)
        parts = [(q, D, mixer.q_size), *([(q, D, mixer.q_size)] if mixer.gated else [])]
        parts += [(kv, D, mixer.kv_size)] * (len(mixer.projected) - 1 - mixer.head_gated)
        parts += [(q, 1, mixer.num_heads)] * mixer.head_gated
        firsts = accumulate((size for *_, size in parts), initial=0)
        return [_moved(_wide(heads, width), first) for (heads, width, _), first in zip(parts, firsts, strict=False)]


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
    """Return these rows of a weight."""
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
