"""A model's layers as a list of operators on named buffers, written once and executed by any backend.

A buffer has one row a token: [T, width]. An operator reads and writes places, ranges of a buffer's columns; what it
writes it fills from the first column on, but for operators that change numbers where they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from quire.errors import BadValue
from quire.ops.activation import Activation
from quire.ops.exchange import Columns
from quire.ops.experts import ExpertLayer
from quire.ops.linear import HeadsLinear, JoinedLinear, Linear
from quire.ops.lora import LoraTable
from quire.ops.plan import AttentionPlan
from quire.ops.recurrent import RecurrentCache, RecurrentPlan
from quire.ops.spec import PagedKV


@dataclass(frozen=True)
class Place:
    """Columns of a buffer."""

    buffer: str
    first: int
    size: int


def _heads_of(place: Place, size: int, count: int) -> list[Place]:
    return [Place(place.buffer, place.first + i * size, size) for i in range(count)]


class BaseOperator:
    """One operator of a program. It fills the whole buffer `out`, or changes it where it stands."""

    kind: ClassVar[str]
    changes_out: ClassVar[bool] = False

    @property
    def fills(self) -> list[Place]:
        """What it fills, whatever was there before."""
        return [] if self.changes_out else [place for name, place in self._places() if name == "out"]

    @property
    def reads(self) -> list[Place]:
        """What it reads or changes."""
        return [place for name, place in self._places() if name != "out" or self.changes_out]

    def _places(self) -> Iterator[tuple[str, Place]]:
        for name, value in vars(self).items():
            for place in value if isinstance(value, tuple) else (value,):
                if isinstance(place, Place):
                    yield name, place


@dataclass(frozen=True, eq=False)
class Project(BaseOperator):
    """out = x @ weight.T + bias."""

    kind = "linear"
    x: Place
    linear: Linear
    out: Place

    @property
    def parts(self) -> list[Project]:
        """The same as one projection for each weight, which fills its own columns of `out`."""
        if isinstance(self.linear, HeadsLinear):
            count, sizes = len(self.linear.parts), (self.linear.in_size, self.linear.out_size)
            heads = [_heads_of(place, size, count) for place, size in zip((self.x, self.out), sizes, strict=True)]
            return [
                Project(x, linear, out) for x, linear, out in zip(heads[0], self.linear.parts, heads[1], strict=True)
            ]
        if not isinstance(self.linear, JoinedLinear):
            return [self]
        ends = accumulate(self.linear.sizes, initial=self.out.first)
        places = [Place(self.out.buffer, first, size) for first, size in zip(ends, self.linear.sizes, strict=False)]
        return [Project(self.x, linear, place) for linear, place in zip(self.linear.parts, places, strict=True)]


@dataclass(frozen=True, eq=False)
class Normalize(BaseOperator):
    """out = the norm of x, or of the residual once x was added to it: RMSNorm, or with a bias LayerNorm.

    Where out is x, that is changed where it stands.
    """

    kind = "norm"
    x: Place
    out: Place
    weight: Tensor  # [size / heads]
    bias: Tensor | None  # [size / heads]
    eps: float
    residual: Place | None = None
    heads: int = 1  # rows of each token

    @property
    def fills(self) -> list[Place]:
        """What it fills, whatever was there before."""
        return [] if self.out == self.x else [self.out]


@dataclass(frozen=True, eq=False)
class Rotate(BaseOperator):
    """RoPE of q and k where they stand."""

    kind = "rope"
    q: Place
    k: Place
    cos: Tensor  # fp32 [P, D_rot / 2]
    sin: Tensor  # fp32 [P, D_rot / 2]
    head_dim: int


@dataclass(frozen=True)
class Write(BaseOperator):
    """Store K and V in the layer's cache. V may be the first columns of K, where the cache is a latent one."""

    kind = "write"
    k: Place
    v: Place
    layer: int
    group: int  # cache group, whose plan has the slots
    head_dim: int


@dataclass(frozen=True, eq=False)
class Attend(BaseOperator):
    """out = attention of q to what the layer's cache holds."""

    kind = "attention"
    q: Place
    out: Place
    layer: int
    group: int  # cache group
    head_dim: int
    scale: float | None
    alibi_slopes: Tensor | None  # fp32 [Hq]
    softcap: float | None
    sinks: Tensor | None = None  # fp32 [Hq]
    chunk: int | None = None


@dataclass(frozen=True)
class Activate(BaseOperator):
    """out = the activation of x."""

    kind = "activation"
    x: Place
    out: Place
    activation: Activation


@dataclass(frozen=True)
class Multiply(BaseOperator):
    """out *= x."""

    kind = "multiply"
    changes_out = True
    x: Place
    out: Place


@dataclass(frozen=True)
class Add(BaseOperator):
    """out += x."""

    kind = "add"
    changes_out = True
    x: Place
    out: Place


@dataclass(frozen=True)
class Copy(BaseOperator):
    """out = x."""

    kind = "copy"
    x: Place
    out: Place


@dataclass(frozen=True)
class Scale(BaseOperator):
    """x *= factor."""

    kind = "scale"
    x: Place
    factor: float


@dataclass(frozen=True)
class Keep(BaseOperator):
    """Go on with the rows that the caller wants, in these whole buffers; the other rows end here."""

    kind = "keep"
    buffers: tuple[Place, ...]  # three at most


@dataclass(frozen=True, eq=False)
class MixExperts(BaseOperator):
    """out = what each row's experts compute of x, weighted by the router."""

    kind = "experts"
    x: Place
    layer: ExpertLayer
    out: Place
    seen: Place | None = None  # what the router sees; None: x


@dataclass(frozen=True)
class Gate(BaseOperator):
    """out *= sigmoid(x), which has as many numbers, or one for all of a row."""

    kind = "gate"
    changes_out = True
    x: Place
    out: Place


@dataclass(frozen=True, eq=False)
class GatedNormalize(BaseOperator):
    """out = RMSNorm of each head of x, times silu(gate): in which order says `first`."""

    kind = "gated_norm"
    x: Place
    gate: Place
    out: Place
    weight: Tensor  # fp32 [size]
    eps: float
    heads: int
    first: Literal["norm", "gate"]


@dataclass(frozen=True, eq=False)
class Convolve(BaseOperator):
    """out = the causal convolution of each channel of x."""

    kind = "convolution"
    x: Place
    out: Place
    weight: Tensor  # fp32 [W, K]
    bias: Tensor | None  # fp32 [W]
    activation: Literal["silu"] | None
    layer: int
    group: int  # state kind, whose plan has the records


@dataclass(frozen=True, eq=False)
class GatedDelta(BaseOperator):
    """out = what the gated delta rule recalls for the queries of qkv."""

    kind = "gated_delta"
    qkv: Place
    gates: Place  # b, then a
    out: Place
    decay_rate: Tensor  # fp32 [Hv]
    dt_bias: Tensor  # fp32 [Hv]
    layer: int
    group: int  # state kind


@dataclass(frozen=True, eq=False)
class StateSpace(BaseOperator):
    """out = what Mamba-2's state recalls, with the skip."""

    kind = "state_space"
    xbc: Place
    dt: Place
    out: Place
    decay_rate: Tensor  # fp32 [Hv]
    skip: Tensor  # fp32 [Hv]
    dt_bias: Tensor  # fp32 [Hv]
    dt_limits: tuple[float, float]
    layer: int
    group: int  # state kind


@dataclass(frozen=True, eq=False)
class AddLora(BaseOperator):
    """out += what each row's adapter makes of x; rows without one stay as they are."""

    kind = "lora"
    changes_out = True
    x: Place
    table: LoraTable
    out: Place


@dataclass(frozen=True, eq=False)
class Gather(BaseOperator):
    """out = the columns of all ranks of a tensor-parallel group, of which x is this rank's."""

    kind = "gather"
    x: Place
    out: Place
    columns: Columns


Operator: TypeAlias = (
    Project
    | Normalize
    | Rotate
    | Write
    | Attend
    | Activate
    | Multiply
    | Add
    | Copy
    | Scale
    | Keep
    | MixExperts
    | Gate
    | GatedNormalize
    | Convolve
    | GatedDelta
    | StateSpace
    | AddLora
    | Gather
)
Plan: TypeAlias = AttentionPlan | RecurrentPlan


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
            self._check_whole(place)
        for operator in self.operators:
            for place in operator.reads:
                if not 0 <= place.first <= place.first + place.size <= self.buffers[place.buffer]:
                    raise BadValue(f"{place} lies beyond its buffer, whose width is {self.buffers[place.buffer]}")
            for place in operator.fills:
                self._check_whole(place)

    def _check_whole(self, place: Place) -> None:
        if place != self.whole(place.buffer):
            raise BadValue(f"{place} is not the whole buffer, whose width is {self.buffers[place.buffer]}")

    def last_uses(self) -> list[set[str]]:
        """For each operator the buffers that no operator reads after it."""
        needed, found = {self.output.buffer}, []
        for operator in reversed(self.operators):
            read = {place.buffer for place in operator.reads}
            filled = {place.buffer for place in operator.fills}
            found.append((read | filled) - needed)
            needed = (needed - filled) | read
        return found[::-1]

    def whole(self, buffer: str) -> Place:
        """All columns of the buffer."""
        return Place(buffer, 0, self.buffers[buffer])

    @property
    def kinds(self) -> list[str]:
        """The operators' names, in order."""
        return [operator.kind for operator in self.operators]

    @property
    def linears(self) -> Iterable[Linear]:
        """All linears, those of experts and the parts of joined ones too."""
        for operator in self.operators:
            if isinstance(operator, Project):
                yield from (part.linear for part in operator.parts)
            elif isinstance(operator, MixExperts):
                yield from (operator.layer.router, *operator.layer.mlp_in, *operator.layer.mlp_out)

    @property
    def columns(self) -> Iterable[Columns]:
        """All that the ranks of a group gather."""
        for operator in self.operators:
            if isinstance(operator, Gather):
                yield operator.columns
            elif isinstance(operator, MixExperts) and operator.layer.inner is not None:
                yield operator.layer.inner


class LayerCaches(Protocol):
    """The cache of each layer."""

    def layer(self, index: int) -> PagedKV | RecurrentCache:
        """The layer's K and V, or its records, the same object at each call.

        On a GPU, who uses them asks for them in every step.
        """


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
        plans: Sequence[Plan],  # one a cache group or state kind, updated for these tokens, with slots
        rows: Tensor | None = None,  # int64 [R], ascending: what `Keep` keeps; None: all
        lora_slots: Tensor | None = None,  # int32 [T], host: each row's adapter, -1: none; None: no row has one
    ) -> Tensor:
        """The output: [T, width], or [R, width]."""
