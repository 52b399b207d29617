"""Recurrent mixers, which keep a state instead of keys and values: their sizes, and the shapes of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quire.cache.groups import StateSizes
from quire.errors import ModelError
from quire.ops.activation import Activation


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """The gated delta rule (Yang et al. 2024), after a short convolution."""

    num_heads: int  # Hv
    num_k_heads: int  # Hk
    dim_k: int  # Dk
    dim_v: int  # Dv
    taps: int  # K
    in_pairs: bool = False  # checkpoints store the four parts of the first projection as two tensors of two parts
    apart: bool = False  # they store queries, keys and values as three
    beta_scale: float = 1.0
    norm_eps: float | None = None  # of the result's norm; None: that of the decoder

    bias = False  # of the projections

    def __post_init__(self) -> None:
        if self.num_heads % self.num_k_heads:
            raise ModelError(f"{self.num_heads} value heads cannot share {self.num_k_heads} key heads evenly")

    @property
    def sizes(self) -> StateSizes:
        """The sizes that the cache needs."""
        return StateSizes(
            num_heads=self.num_heads,
            num_k_heads=self.num_k_heads,
            dim_k=self.dim_k,
            dim_v=self.dim_v,
            width=self.width,
            taps=self.taps,
        )

    @property
    def width(self) -> int:
        """W: queries, keys and values."""
        return 2 * self.num_k_heads * self.dim_k + self.out_size

    @property
    def out_size(self) -> int:
        """The numbers per row that are read from the state."""
        return self.num_heads * self.dim_v

    @property
    def in_rows(self) -> tuple[int, ...]:
        """The output sizes of the first projection: the convolution's input, the gate of the result, b, a."""
        if self.in_pairs:
            return (self.width + self.out_size, 2 * self.num_heads)
        if self.apart:
            return (*self.conv_parts, self.out_size, self.num_heads, self.num_heads)
        return (self.width, self.out_size, self.num_heads, self.num_heads)

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """The channels of queries, keys and values."""
        keys = self.num_k_heads * self.dim_k
        return (keys, keys, self.out_size)

    def vectors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight that is not a linear's."""
        yield "conv.weight", (self.width, self.taps)
        yield "A_log", (self.num_heads,)
        yield "dt_bias", (self.num_heads,)
        yield "gate_norm.weight", (self.dim_v,)


@dataclass(frozen=True, kw_only=True)
class StateSpaceConfig:
    """Mamba-2's state space (Dao & Gu 2024), after a short convolution."""

    num_heads: int
    num_groups: int  # heads of one group share B and C
    head_dim: int  # numbers of x that a head has
    state_dim: int  # numbers of B and of C
    taps: int  # K
    bias: bool  # of the projections
    conv_bias: bool
    dt_limits: tuple[float, float]
    norm_groups: int  # parts of the result that are normalised separately; 0: it is not normalised
    first: Literal["norm", "gate"] = "gate"  # the operation that is applied to the result first
    in_scales: tuple[float, ...] = ()  # factors of `in_parts`

    def __post_init__(self) -> None:
        for name, count in (("groups", self.num_groups), ("parts of the norm", self.norm_groups)):
            if count and self.num_heads % count:
                raise ModelError(f"{self.num_heads} heads of a state cannot form {count} {name} evenly")

    @property
    def sizes(self) -> StateSizes:
        """The sizes that the cache needs."""
        return StateSizes(
            num_heads=self.num_heads,
            num_k_heads=self.num_groups,
            dim_k=self.state_dim,
            dim_v=self.head_dim,
            width=self.width,
            taps=self.taps,
        )

    @property
    def width(self) -> int:
        """W: x, B and C."""
        return self.out_size + 2 * self.num_groups * self.state_dim

    @property
    def out_size(self) -> int:
        """The numbers per row that are read from the state."""
        return self.num_heads * self.head_dim

    @property
    def in_rows(self) -> tuple[int, ...]:
        """The output sizes of the first projection: the gate of the result, the convolution's input, dt."""
        return (self.out_size, self.width, self.num_heads)

    @property
    def in_parts(self) -> tuple[int, ...]:
        """The parts of the first projection's output: the gate, x, B, C, dt."""
        keys = self.num_groups * self.state_dim
        return (self.out_size, self.out_size, keys, keys, self.num_heads)

    def vectors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight that is not a linear's."""
        yield "conv.weight", (self.width, self.taps)
        if self.conv_bias:
            yield "conv.bias", (self.width,)
        for name in ("A_log", "D", "dt_bias"):
            yield name, (self.num_heads,)
        if self.norm_groups:
            yield "gate_norm.weight", (self.out_size,)


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig:
    """A short convolution between two gates (LFM2)."""

    width: int  # W
    taps: int  # K
    bias: bool  # of the projections
    conv_bias: bool

    @property
    def sizes(self) -> StateSizes:
        """The sizes that the cache needs."""
        return StateSizes(width=self.width, taps=self.taps)

    @property
    def out_size(self) -> int:
        """The numbers per row of the result."""
        return self.width

    @property
    def in_rows(self) -> tuple[int, ...]:
        """The output sizes of the first projection: the gate before, the gate after, the convolution's input."""
        return (self.width,) * 3

    def vectors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight that is not a linear's."""
        yield "conv.weight", (self.width, self.taps)
        if self.conv_bias:
            yield "conv.bias", (self.width,)


@dataclass(frozen=True, kw_only=True)
class LightningConfig:
    """Lightning attention (Qin et al. 2024): linear attention whose heads forget at constant rates."""

    num_heads: int
    head_dim: int
    slopes: tuple[float, ...]  # [num_heads]: a state is multiplied by e^-slope for each token
    norm_eps: float

    bias = False  # of the projections

    @property
    def sizes(self) -> StateSizes:
        """The sizes that the cache needs."""
        heads, dim = self.num_heads, self.head_dim
        return StateSizes(num_heads=heads, num_k_heads=heads, dim_k=dim, dim_v=dim)

    @property
    def out_size(self) -> int:
        """The numbers per row that are read from the state."""
        return self.num_heads * self.head_dim

    @property
    def in_rows(self) -> tuple[int, ...]:
        """The output sizes of the first projection: values, keys and queries; the gate of the result."""
        return (3 * self.out_size, self.out_size)

    def vectors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight that is not a linear's."""
        yield "gate_norm.weight", (self.out_size,)


@dataclass(frozen=True, kw_only=True)
class KeyDecayConfig:
    """Kimi delta attention: the gated delta rule with a decay for each element of the keys, after a convolution."""

    num_heads: int
    head_dim: int
    taps: int
    rank: int | None  # of the projections to the decays, and to the gate of the result; None: they have full rank
    floor: float  # the least log-decay, 0: none
    norm_eps: float

    bias = False  # of the projections

    @property
    def sizes(self) -> StateSizes:
        """The sizes that the cache needs."""
        heads, dim = self.num_heads, self.head_dim
        sizes = {"num_heads": heads, "num_k_heads": heads, "dim_k": dim, "dim_v": dim, "dim_decay": dim}
        return StateSizes(**sizes, width=3 * self.out_size, taps=self.taps)

    @property
    def out_size(self) -> int:
        """The numbers per row that are read from the state."""
        return self.num_heads * self.head_dim

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """The channels of queries, keys and values."""
        return (self.out_size,) * 3

    @property
    def in_rows(self) -> tuple[int, ...]:
        """The output sizes of the first projection: queries, keys, values; decays, gate of the result; beta."""
        return (*self.conv_parts, *(self.rank or self.out_size,) * 2, self.num_heads)

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name and sizes of each other projection before the state."""
        if self.rank is not None:
            yield "state_decay", self.out_size, self.rank
            yield "state_gate", self.out_size, self.rank

    def vectors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight that is not a linear's."""
        yield "conv.weight", (3 * self.out_size, self.taps)
        yield "A_log", (self.num_heads,)
        yield "dt_bias", (self.out_size,)
        yield "gate_norm.weight", (self.head_dim,)


@dataclass(frozen=True, kw_only=True)
class SelectiveConfig:
    """Mamba-1's selective state space (Gu & Dao 2023), after a short convolution."""

    width: int  # channels
    state_dim: int  # numbers of B and of C
    taps: int
    rank: int  # of the projection to dt
    bias: bool  # of the first and the last projection
    conv_bias: bool
    norm_eps: float | None = None  # of the norms of dt, B and C; None: they are not normalised
    norm_weights: bool = False
    parts: int = 1  # of the channels, each with separate projections to dt, B and C: blocks of the whole ones

    @property
    def head_dim(self) -> int:
        """Channels whose states are computed together."""
        return divisor(self.width // self.parts, 64)

    @property
    def sizes(self) -> StateSizes:
        """The sizes that the cache needs."""
        heads, dim = self.width // self.head_dim, self.head_dim
        sizes = {"num_heads": heads, "dim_k": self.state_dim, "dim_v": dim, "dim_decay": dim}
        return StateSizes(**sizes, num_k_heads=self.parts, width=self.width, taps=self.taps)

    @property
    def out_size(self) -> int:
        """The numbers per row that are read from the state."""
        return self.width

    @property
    def in_rows(self) -> tuple[int, ...]:
        """The output sizes of the first projection: the convolution's input, the gate of the result."""
        return (self.width, self.width)

    @property
    def x_parts(self) -> tuple[int, ...]:
        """The output sizes of the second projection: dt, before its own projection; C, B."""
        return (self.parts * self.rank, *(self.parts * self.state_dim,) * 2)

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name and sizes of each other projection before the state."""
        yield "state_x", sum(self.x_parts), self.width
        yield "state_dt", self.width, self.x_parts[0]

    def vectors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight that is not a linear's."""
        yield "conv.weight", (self.width, self.taps)
        if self.conv_bias:
            yield "conv.bias", (self.width,)
        yield "A_log", (self.width, self.state_dim)
        for name in ("D", "dt_bias"):
            yield name, (self.width,)
        if self.norm_weights:
            for name, size in zip(("dt", "C", "B"), self.x_parts, strict=True):
                yield f"{name}_norm.weight", (size,)


@dataclass(frozen=True, kw_only=True)
class LinearUnitConfig:
    """A real-gated linear recurrent unit (De et al. 2024), after a short convolution, next to a gate."""

    width: int
    num_heads: int  # of the projections to its gates
    taps: int
    activation: Activation  # of the gate of the result

    bias = True

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ModelError(f"{self.num_heads} heads cannot share {self.width} channels of a recurrent unit evenly")

    @property
    def head_dim(self) -> int:
        """Channels whose states are computed together."""
        return divisor(self.width, 64)

    @property
    def sizes(self) -> StateSizes:
        """The sizes that the cache needs."""
        heads, dim = self.width // self.head_dim, self.head_dim
        sizes = {"num_heads": heads, "num_k_heads": 1, "dim_k": 1, "dim_v": dim, "dim_decay": dim}
        return StateSizes(**sizes, width=self.width, taps=self.taps)

    @property
    def out_size(self) -> int:
        """The numbers per row of the result."""
        return self.width

    @property
    def in_rows(self) -> tuple[int, ...]:
        """The output sizes of the first projection: the convolution's input, the gate of the result."""
        return (self.width, self.width)

    def vectors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight that is not a linear's."""
        part = self.width // self.num_heads
        yield "conv.weight", (self.width, self.taps)
        yield "conv.bias", (self.width,)
        yield "A_log", (self.width,)
        for name in ("decay", "input"):
            yield f"{name}_heads", (self.num_heads, part, part)
            yield f"{name}_bias", (self.num_heads, part)


def divisor(count: int, most: int) -> int:
    """Return the largest divisor of `count` up to `most`."""
    return max(size for size in range(1, most + 1) if count % size == 0)


StateConfig = (
    GatedDeltaConfig
    | StateSpaceConfig
    | ConvolutionConfig
    | LightningConfig
    | KeyDecayConfig
    | SelectiveConfig
    | LinearUnitConfig
)
