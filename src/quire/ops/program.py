"""A model's layers as a list of operators on named buffers, written once and executed by any backend.

A buffer has one row per token: [T, width]. An operator reads and writes places, ranges of a buffer's columns. Its
output is a whole buffer, except for operators that work in place.
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
from quire.ops.collectives import Columns
from quire.ops.experts import ExpertLayer
from quire.ops.plan import AttentionPlan
from quire.ops.recurrent.calls import Scan, ScanRule
from quire.ops.recurrent.plan import RecurrentPlan
from quire.ops.recurrent.records import RecurrentCache
from quire.ops.relative import Relative
from quire.ops.spec import PagedKV
from quire.ops.weights.linear import HeadsLinear, JoinedLinear, Linear
from quire.ops.weights.lora import LoraTable


@dataclass(frozen=True)
class Place:
    """Columns of a buffer."""

    buffer: str
    first: int
    size: int


def _heads_of(place: Place, size: int, count: int) -> list[Place]:
    return [Place(place.buffer, place.first + i * size, size) for i in range(count)]


class BaseOperator:
    """One operator of a program. It fills the whole buffer `out`, or changes it in place."""

    kind: ClassVar[str]
    changes_out: ClassVar[bool] = False
    written: ClassVar[tuple[str, ...]] = ("out",)  # fields with places that it fills or changes

    @property
    def fills(self) -> list[Place]:
        """Places that it fills without reading them."""
        return [] if self.changes_out else [place for name, place in self._places() if name == "out"]

    @property
    def reads(self) -> list[Place]:
        """Places that it reads or changes."""
        return [place for name, place in self._places() if name != "out" or self.changes_out]

    @property
    def results(self) -> dict[str, Place]:
        """Places that it fills or changes, by the names of its fields, in the order in which they are computed."""
        found = {name: getattr(self, name, None) for name in self.written}
        return {name: place for name, place in found.items() if isinstance(place, Place) and place.size}

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
        """The equivalent projections of one weight each, which fill separate columns of `out`."""
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
    """out = the norm of x, or of the residual after x was added to it: RMSNorm, or with a bias LayerNorm.

    If out is x, it is changed in place.
    """

    kind = "norm"
    written = ("residual", "out")
    x: Place
    out: Place
    weight: Tensor  # [size / heads]
    bias: Tensor | None  # [size / heads]
    eps: float
    residual: Place | None = None
    heads: int = 1  # rows of each token

    @property
    def fills(self) -> list[Place]:
        """Places that it fills without reading them."""
        return [] if self.out == self.x else [self.out]


@dataclass(frozen=True, eq=False)
class Rotate(BaseOperator):
    """RoPE of q and k in place."""

    kind = "rope"
    written = ("q", "k")
    q: Place
    k: Place
    cos: Tensor  # fp32 [P, D_rot / 2]
    sin: Tensor  # fp32 [P, D_rot / 2]
    head_dim: int


@dataclass(frozen=True)
class Write(BaseOperator):
    """Store K and V in the layer's cache. For a latent cache V may be the first columns of K."""

    kind = "write"
    k: Place
    v: Place
    layer: int
    group: int  # cache group; its plan has the slots
    head_dim: int


@dataclass(frozen=True, eq=False)
class Attend(BaseOperator):
    """out = attention of q to the layer's cache."""

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
    selected: bool = False  # each row attends to the keys that the last `Select` chose, instead of all it sees


@dataclass(frozen=True, eq=False)
class Select(BaseOperator):
    """Store the rows' index keys, and choose the keys that each row attends to: see `quire.ops.sparse`."""

    kind = "select"
    q: Place  # heads of the size of k
    k: Place
    x: Place
    weights: Linear  # x to the fp32 weight of each head
    layer: int
    group: int  # cache group
    top_k: int


@dataclass(frozen=True, eq=False)
class AttendWithin(BaseOperator):
    """out = attention of q to the keys of its sequence in this batch, without a cache.

    The rows of a sequence attend to the keys of a window to both sides, or to all of them by relative positions.
    """

    kind = "attention"
    q: Place
    k: Place
    v: Place
    out: Place
    group: int  # whose plan has the sequences' starts
    head_dim: int
    scale: float
    rule: int | Relative  # the window, which includes the row's own key


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
    """out = x, and `appended` in the columns after it."""

    kind = "copy"
    x: Place
    out: Place
    appended: Place | None = None

    @property
    def parts(self) -> list[Copy]:
        """The equivalent copies of one place each, which fill separate columns of `out`."""
        if self.appended is None:
            return [self]
        ends = self.out.first, self.out.first + self.x.size
        places = zip((self.x, self.appended), ends, strict=True)
        return [Copy(place, Place(self.out.buffer, first, place.size)) for place, first in places]


@dataclass(frozen=True)
class Scale(BaseOperator):
    """x *= factor."""

    kind = "scale"
    written = ("x",)
    x: Place
    factor: float


@dataclass(frozen=True)
class Keep(BaseOperator):
    """Drop all rows of these whole buffers except those that the caller needs."""

    kind = "keep"
    buffers: tuple[Place, ...]  # at most three


@dataclass(frozen=True, eq=False)
class MixExperts(BaseOperator):
    """out = the results of each row's experts for x, weighted by the router."""

    kind = "experts"
    x: Place
    layer: ExpertLayer
    out: Place
    seen: Place | None = None  # the router's input; None: x


@dataclass(frozen=True)
class Gate(BaseOperator):
    """out *= sigmoid(x), where x has the width of out, or one number per row."""

    kind = "gate"
    changes_out = True
    x: Place
    out: Place


@dataclass(frozen=True, eq=False)
class GatedNormalize(BaseOperator):
    """out = RMSNorm of each head of x, multiplied by silu(gate), in the order given by `first`."""

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
    group: int  # state kind; its plan has the records


@dataclass(frozen=True, eq=False)
class GatedDelta(BaseOperator):
    """out = the gated delta rule's result for the queries of qkv."""

    kind = "gated_delta"
    qkv: Place
    gates: Place  # b, then a
    out: Place
    decay_rate: Tensor  # fp32 [Hv]
    dt_bias: Tensor  # fp32 [Hv]
    layer: int
    group: int  # state kind
    beta_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class ScanRows(BaseOperator):
    """out = the result of a recurrence whose decay differs between the elements of a state, see `Backend.scan`."""

    kind = "scan"
    x: Place
    gates: Place
    side: Place
    out: Place
    rule: ScanRule
    rate: Tensor  # fp32 [Hv], or [Hv, Dk, Dv]
    bias: Tensor  # fp32 [Hv * Dk], [Hv * Dv] or [2, Hv * Dv]
    skip: Tensor | None  # fp32 [Hv * Dv]
    layer: int
    group: int  # state kind
    beta_scale: float = 1.0
    floor: float = 0.0

    @property
    def scan(self) -> Scan:
        """The arguments of the operator."""
        return Scan(self.rule, self.rate, self.bias, self.skip, self.beta_scale, self.floor)


@dataclass(frozen=True, eq=False)
class StateSpace(BaseOperator):
    """out = the result of Mamba-2's recurrence, including the skip."""

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
    """out += the product of x with each row's adapter. Rows without one are unchanged."""

    kind = "lora"
    changes_out = True
    x: Place
    table: LoraTable
    out: Place


@dataclass(frozen=True, eq=False)
class Gather(BaseOperator):
    """out = the columns of all ranks of a tensor-parallel group, where x has those of this rank."""

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
    | Select
    | AttendWithin
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
    | ScanRows
    | AddLora
    | Gather
)
Plan: TypeAlias = AttentionPlan | RecurrentPlan


@dataclass(frozen=True, eq=False)
class Program:
    """Operators in order, and the buffers that they work on."""

    dtype: torch.dtype  # of all buffers
    input: Place  # a whole buffer, filled by the caller; it is overwritten
    output: Place  # a whole buffer, returned to the caller
    buffers: Mapping[str, int]  # widths by name, input and output among them
    operators: Sequence[Operator] = field(default_factory=list)
    names: Sequence[str] = ()  # of the operators, each different, for people; (): they have none

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
        """Return, for each operator, the buffers that no later operator reads."""
        needed, found = {self.output.buffer}, []
        for operator in reversed(self.operators):
            read = {place.buffer for place in operator.reads}
            filled = {place.buffer for place in operator.fills}
            found.append((read | filled) - needed)
            needed = (needed - filled) | read
        return found[::-1]

    def whole(self, buffer: str) -> Place:
        """Return the place of all columns of a buffer."""
        return Place(buffer, 0, self.buffers[buffer])

    @property
    def kinds(self) -> list[str]:
        """The operators' names, in order."""
        return [operator.kind for operator in self.operators]

    @property
    def linears(self) -> Iterable[Linear]:
        """All linears, including those of experts and the parts of joined ones."""
        for operator in self.operators:
            if isinstance(operator, Project):
                yield from (part.linear for part in operator.parts)
            elif isinstance(operator, MixExperts):
                yield from (operator.layer.router, *operator.layer.mlp_in, *operator.layer.mlp_out)
            elif isinstance(operator, Select):
                yield operator.weights

    @property
    def columns(self) -> Iterable[Columns]:
        """All columns that the ranks of a group gather."""
        for operator in self.operators:
            if isinstance(operator, Gather):
                yield operator.columns
            elif isinstance(operator, MixExperts) and operator.layer.inner is not None:
                yield operator.layer.inner


class LayerCaches(Protocol):
    """The cache of each layer."""

    def layer(self, index: int) -> PagedKV | RecurrentCache:
        """Return the layer's K and V, or its records: the same object in each call.

        On a GPU the caller must call this in every step.
        """


# Called with an operator's name, its start by time.perf_counter, and its duration in seconds.
Observer: TypeAlias = Callable[[str, float, float], None]


class Executor(Protocol):
    """Runs a program."""

    program: Program
    observer: Observer | None  # if set, called for each operator, either after it or at the end of the run

    def __call__(
        self,
        x: Tensor,  # [T, width], contiguous: the input; overwritten
        positions: Tensor,  # int64 [T]
        caches: LayerCaches,
        plans: Sequence[Plan],  # one per cache group or state kind, updated for these tokens, with slots
        rows: Tensor | None = None,  # int64 [R], ascending: the rows that `Keep` keeps; None: all
        lora_slots: Tensor | None = None,  # int32 [T], host: each row's adapter, -1: none; None: no row has one
    ) -> Tensor:
        """Run the program and return the output: [T, width], or [R, width]."""


class Chain(Protocol):
    """Runs a head's rows, and then chooses draft tokens, each computed from the one before it."""

    def __call__(
        self,
        x: Tensor,  # [T, 2 H], contiguous: the joined rows; overwritten
        positions: Tensor,  # int64 [T]; changed
        caches: LayerCaches,
        plans: Sequence[Plan],  # updated for these rows, with blocks for those of the draft tokens
        rows: Tensor,  # int64 [R], ascending: the last rows of the first R sequences
        counts: Tensor,  # int64 [R], descending, 1 or more: draft tokens of each of these
    ) -> Tensor:
        """Run the rows and return the draft tokens: int64 [counts[0], R], undefined after a sequence's count."""
