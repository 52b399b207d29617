"""A model's layers as a list of operators on named buffers, written once and executed by any backend.

A buffer has one row a token: [T, width]. An operator reads and writes places, ranges of a buffer's columns; what it
writes it fills from the first column on, but for operators that change numbers where they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from quire.errors import BadValue
from quire.ops.experts import ExpertLayer
from quire.ops.linear import Linear
from quire.ops.plan import AttentionPlan
from quire.ops.spec import PagedKV


@dataclass(frozen=True)
class Place:
    """Columns of a buffer."""

    buffer: str
    first: int
    size: int


@dataclass(frozen=True, eq=False)
class Project:
    """out = x @ weight.T + bias."""

    kind: ClassVar = "linear"
    x: Place
    linear: Linear
    out: Place


@dataclass(frozen=True, eq=False)
class Normalize:
    """out = the norm of x, or of the residual once x was added to it: RMSNorm, or with a bias LayerNorm."""

    kind: ClassVar = "norm"
    x: Place
    out: Place
    weight: Tensor  # [size / heads]
    bias: Tensor | None  # [size / heads]
    eps: float
    residual: Place | None = None
    heads: int = 1  # rows of each token


@dataclass(frozen=True, eq=False)
class Rotate:
    """RoPE of q and k where they stand."""

    kind: ClassVar = "rope"
    q: Place
    k: Place
    cos: Tensor  # fp32 [P, D_rot / 2]
    sin: Tensor  # fp32 [P, D_rot / 2]
    head_dim: int


@dataclass(frozen=True)
class Write:
    """Store K and V in the layer's cache."""

    kind: ClassVar = "write"
    k: Place
    v: Place
    layer: int
    group: int  # cache group, whose plan has the slots
    head_dim: int


@dataclass(frozen=True, eq=False)
class Attend:
    """out = attention of q to what the layer's cache holds."""

    kind: ClassVar = "attention"
    q: Place
    out: Place
    layer: int
    group: int  # cache group
    head_dim: int
    scale: float | None
    alibi_slopes: Tensor | None  # fp32 [Hq]
    softcap: float | None


@dataclass(frozen=True)
class Swiglu:
    """out = silu(gate) * up; x holds the gates, then the ups."""

    kind: ClassVar = "swiglu"
    x: Place
    out: Place


@dataclass(frozen=True)
class Gelu:
    """out = GELU of x."""

    kind: ClassVar = "gelu"
    x: Place
    out: Place
    approximate: Literal["none", "tanh"]


@dataclass(frozen=True)
class Multiply:
    """out *= x."""

    kind: ClassVar = "multiply"
    x: Place
    out: Place


@dataclass(frozen=True)
class Add:
    """out += x."""

    kind: ClassVar = "add"
    x: Place
    out: Place


@dataclass(frozen=True)
class Scale:
    """x *= factor."""

    kind: ClassVar = "scale"
    x: Place
    factor: float


@dataclass(frozen=True)
class Keep:
    """Go on with the rows that the caller wants, in these whole buffers; the other rows end here."""

    kind: ClassVar = "keep"
    buffers: tuple[Place, Place]


@dataclass(frozen=True, eq=False)
class MixExperts:
    """out = what each row's experts compute of x, weighted by the router."""

    kind: ClassVar = "experts"
    x: Place
    layer: ExpertLayer
    out: Place


Operator: TypeAlias = (
    Project | Normalize | Rotate | Write | Attend | Swiglu | Gelu | Multiply | Add | Scale | Keep | MixExperts
)


@dataclass(frozen=True, eq=False)
class Program:
    """Operators in order, and the buffers that they work on."""

    dtype: torch.dtype  # of all buffers
    input: Place  # a whole buffer, that the caller fills; it is overwritten
    output: Place  # a whole buffer, that the caller gets
    buffers: Mapping[str, int]  # widths by name, input and output among them
    operators: Sequence[Operator] = field(default_factory=list)

    def __post_init__(self) -> None:
        for place in (self.input, self.output):
            if place != self.whole(place.buffer):
                raise BadValue(f"{place} is not the whole buffer, whose width is {self.buffers[place.buffer]}")

    def whole(self, buffer: str) -> Place:
        """All columns of the buffer."""
        return Place(buffer, 0, self.buffers[buffer])

    @property
    def kinds(self) -> list[str]:
        """The operators' names, in order."""
        return [operator.kind for operator in self.operators]

    @property
    def linears(self) -> Iterable[Linear]:
        """All linears, those of experts too."""
        for operator in self.operators:
            if isinstance(operator, Project):
                yield operator.linear
            elif isinstance(operator, MixExperts):
                yield from (operator.layer.router, *operator.layer.mlp_in, *operator.layer.mlp_out)


class LayerCaches(Protocol):
    """The cache of each layer."""

    def layer(self, index: int) -> PagedKV:
        """The layer's K and V, the same object at each call. Who uses them asks for them in every step."""


# Of an operator's name, its start by time.perf_counter, and the seconds that it took.
Observer: TypeAlias = Callable[[str, float, float], None]


class Executor(Protocol):
    """Runs a program."""

    program: Program
    observer: Observer | None  # if set, called after each operator, or after all of them for each

    def __call__(
        self,
        x: Tensor,  # [T, width], contiguous: the input; overwritten
        positions: Tensor,  # int64 [T]
        caches: LayerCaches,
        plans: Sequence[AttentionPlan],  # one a cache group, updated for these tokens, with slots
        rows: Tensor | None = None,  # int64 [R], ascending: what `Keep` keeps; None: all
    ) -> Tensor:
        """The output: [T, width], or [R, width]."""
