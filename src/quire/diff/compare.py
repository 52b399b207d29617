"""Compares two traces: the first operator, row and element that differ, the growth through the layers, the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from quire.diff.trace import About, Output, Trace
from quire.errors import ConfigError

# Rounding errors that two correct implementations of an operator may differ by, relative to the element and to the
# root mean square of its row: of the dtype (for the rounding of results) and of fp32 (for sums in another order).
DTYPE_ERRORS, SUM_ERRORS = 8, 512
FP32_UNIT = 2.0**-24


@dataclass(frozen=True)
class Element:
    """An element that differs, in both runs."""

    operator: str
    output: str
    layer: int | None
    prompt: int
    row: int
    element: int | None  # column; None: it is not among those that the trace has
    a: float | None = None
    b: float | None = None
    absolute: float | None = None
    relative: float | None = None  # to the value of A; None also for a value of 0
    ulps: float | None = None  # distances between neighbouring numbers of the coarser dtype


@dataclass(frozen=True)
class Growth:
    """The difference after a layer, over all rows."""

    name: str  # embedding, a layer, final_norm or logits
    rows: int  # that differ
    relative: float  # root mean square of the differences, relative to that of A's values
    absolute: float  # the largest


@dataclass(frozen=True)
class OwnError:
    """The largest error of an operator of one run for the inputs of the other: errors before it do not count."""

    operator: str
    prompt: int
    row: int
    element: int
    excess: float  # beyond the expected value, in multiples of the allowance: above 1 it is out of line
    relative: float  # the operator's difference from the other run, as in Growth; that of the prompt with the largest


@dataclass(frozen=True)
class Flip:
    """A row of a prompt, or a position of its continuation, for which the runs choose different tokens."""

    prompt: int
    row: int
    a: int | None
    b: int | None


@dataclass
class Report:
    """The comparison of two runs."""

    a: str
    b: str
    granularity: str  # operators or layers
    prompts: int
    rows: int
    compared: int  # outputs: one for each operator's result and row
    differing: int
    first: Element | None
    growth: list[Growth]
    flips: list[Flip]  # of the most probable next token of each row
    greedy: list[Flip]  # the first one of each continuation
    own: list[OwnError] = field(default_factory=list)  # by operator, in order; empty without a replay
    replayed: str = ""  # the replay, or the reason why it is missing
    sampled: int = 0  # prompts whose outputs are not whole

    @property
    def named(self) -> OwnError | None:
        """The first operator whose own error is out of line."""
        return next((one for one in self.own if one.excess > 1), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain data. Numbers that are not finite are None."""
        found = asdict(self) | {"named": None if self.named is None else self.named.operator}
        return {name: _finite(value) for name, value in found.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


def check_structure(a: About, b: About) -> None:
    """Raise ConfigError if two runs have outputs of other operators or other widths."""
    pairs = zip_longest(a.widths.items(), b.widths.items(), fillvalue=("nothing", 0))
    for (name, width), (other, other_width) in pairs:
        if (name, width) != (other, other_width):
            raise ConfigError(
                f"{a.model} and {b.model} cannot be compared: where A has {name} of width {width}, B has {other} of "
                f"width {other_width}; give two runs of models with the same layers"
            )


def _check_prompts(a: Trace, b: Trace) -> None:
    for index, (one, two) in enumerate(zip_longest(a.prompts, b.prompts)):
        if one is None or two is None or one.tokens != two.tokens:
            counts = [0 if run is None else len(run.tokens) for run in (one, two)]
            raise ConfigError(
                f"the traces cannot be compared: prompt {index} has {counts[0]} tokens in A, and {counts[1]} or other "
                "ones in B; save both with the same --prompts"
            )


def compare(a: Trace, b: Trace) -> Report:
    """Compare two traces: their operators, or their layers if one of them has only these.

    Raises ConfigError if they have other operators or other prompts.
    """
    if a.about.granularity != b.about.granularity:
        a, b = a.by_layer(), b.by_layer()
    check_structure(a.about, b.about)
    _check_prompts(a, b)
    rows = sum(len(prompt.tokens) for prompt in a.prompts)
    differing = sum(int(differs.sum()) for name in a.about.widths for _, _, differs in _each(a, b, name))
    return Report(
        a=f"{a.about.model}, {a.about.settings}",
        b=f"{b.about.model}, {b.about.settings}",
        granularity=a.about.granularity,
        prompts=len(a.prompts),
        rows=rows,
        compared=rows * len(a.about.widths),
        differing=differing,
        first=_first(a, b),
        growth=[_growth(a, b, name, end) for name, end in a.about.ends.items()],
        flips=[
            Flip(index, row, chosen, other)
            for index, (one, two) in enumerate(zip(a.prompts, b.prompts, strict=True))
            for row, (chosen, other) in enumerate(zip(one.best, two.best, strict=True))
            if chosen != other
        ],
        greedy=[flip for index in range(len(a.prompts)) for flip in _continued(a, b, index)],
        sampled=sum(not (one.is_whole and two.is_whole) for one, two in zip(a.prompts, b.prompts, strict=True)),
    )


def _each(a: Trace, b: Trace, name: str) -> Iterator[tuple[Output, Output, Tensor]]:
    """Yield an output of both runs for each prompt, and the rows that differ: bool [T]."""
    for one, two in zip(a.prompts, b.prompts, strict=True):
        x, y = one.outputs[name], two.outputs[name]
        if x.digests is not None or y.digests is not None:
            x, y = x.reduced(), y.reduced()
        if x.digests is not None and y.digests is not None:
            yield x, y, x.digests != y.digests
        else:
            yield x, y, _unequal(x.values, y.values).any(1)


def _unequal(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() != y.float()) & ~(x.isnan() & y.isnan())


def _first(a: Trace, b: Trace) -> Element | None:
    for name, operator in a.about.operators.items():
        for prompt, (x, y, differs) in enumerate(_each(a, b, name)):
            if not differs.any():
                continue
            row = int(differs.nonzero()[0])
            parts = operator.split(".")
            layer = int(parts[1]) if parts[0] == "layers" else None
            columns = _unequal(x.values[row], y.values[row]).nonzero().flatten()
            if not len(columns):
                return Element(operator, name, layer, prompt, row, None)
            column = int(columns[0])
            one, two = float(x.values[row, column]), float(y.values[row, column])
            absolute = abs(one - two)
            exponent = math.frexp(max(abs(one), abs(two)))[1] - 1 if math.isfinite(one) and math.isfinite(two) else 0
            ulps = absolute / (2 * max(a.about.unit, b.about.unit) * 2.0**exponent)
            column = column if x.columns is None else int(x.columns[column])
            relative = absolute / abs(one) if one else None
            return Element(operator, name, layer, prompt, row, column, one, two, absolute, relative, ulps)
    return None


def _growth(a: Trace, b: Trace, name: str, end: str) -> Growth:
    rows, squares, of_a, largest = 0, 0.0, 0.0, 0.0
    for x, y, differs in _each(a, b, end):
        error = (x.values.double() - y.values.double()).abs()
        rows += int(differs.sum())
        squares += float(error.square().sum())
        of_a += float(x.values.double().square().sum())
        largest = max(largest, float(error.max()))
    return Growth(name, rows, _ratio(squares, of_a), largest)


def _ratio(squares: float, of_a: float) -> float:
    return 0.0 if squares == 0 else math.sqrt(squares / of_a) if of_a else math.inf


def _continued(a: Trace, b: Trace, prompt: int) -> list[Flip]:
    pairs = zip_longest(a.prompts[prompt].greedy, b.prompts[prompt].greedy)
    return [Flip(prompt, at, one, two) for at, (one, two) in enumerate(pairs) if one != two][:1]


def own_errors(
    operators: Mapping[str, str],  # of each output, see About
    prompt: int,
    replayed: Mapping[str, Tensor],  # its outputs for the other run's inputs
    expected: Mapping[str, Tensor],  # the same, computed correctly
    given: Mapping[str, Tensor],  # the other run's outputs
    unit: float,
) -> list[OwnError]:
    """Return the largest error of each operator for one prompt, in order.

    An element may differ from the expected value by DTYPE_ERRORS rounding errors of the dtype and SUM_ERRORS of fp32,
    relative to the sum of its size and the root mean square of its row.
    """
    found = []
    for output, operator in operators.items():
        excess = _excess(replayed[output].float(), expected[output].float(), unit)
        row, column = divmod(int(excess.argmax()), excess.shape[1])
        other = given[output].float()
        relative = _ratio(float((replayed[output].float() - other).square().sum()), float(other.square().sum()))
        found.append(OwnError(operator, prompt, row, column, float(excess[row, column]), relative))
    return largest_errors(found)


def largest_errors(errors: Iterable[OwnError]) -> list[OwnError]:
    """Return the largest error of each operator, in the order in which the operators come first."""
    found: dict[str, OwnError] = {}
    for error in errors:
        known = found.get(error.operator, error)
        largest = max(known, error, key=lambda one: one.excess)
        found[error.operator] = replace(largest, relative=max(known.relative, error.relative))
    return list(found.values())


def _excess(got: Tensor, expected: Tensor, unit: float) -> Tensor:
    """Return the error of each element in multiples of its allowance; infinity where only one is a number."""
    scale = expected.abs() + expected.square().mean(1, keepdim=True).sqrt()
    allowed = (DTYPE_ERRORS * unit + SUM_ERRORS * FP32_UNIT) * scale
    error = torch.where(_unequal(got, expected), (got - expected).abs(), 0.0)
    return torch.where(error == 0, 0.0, error / allowed).nan_to_num(math.inf, math.inf)
