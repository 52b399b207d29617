"""Fit of the step-time model to measured steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.cost import StepWork
from quire.errors import BadValue
from quire.simulate.device import EXPONENTS, StepFit, power_sum

Numbers = NDArray[np.float64]
GUESSED = (0.3, 0.5, 0.7, 0.9)  # initial shares of the steps in which multiplying is assumed to be the shorter part
LEAST_SHARE = 1e-3  # positive, so that a part that is 0 in one round can return in the next
ROUNDS = 20  # of a fit with an exponent; each round knows better whether reading or multiplying takes longer
SMALL = 1e-12  # relative size of a gradient that counts as 0
PULL = 0.1  # weight, relative to errors, of the difference between the first part and its formula
SHORTEST = 1e-9  # seconds, lower bound of a first part
LEAST_FACTOR = 0.1


def nonnegative_least_squares(a: Numbers, b: Numbers) -> Numbers:
    """Return the x >= 0 that minimises |a x - b|.

    a: [rows, columns]. b: [rows]. Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.
    """
    columns = a.shape[1]
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x, free = np.zeros(columns), np.zeros(columns, bool)
    for _ in range(10 * columns):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if not gradient[best] > SMALL * float(np.linalg.norm(b)):
            break
        free[best] = True
        while True:
            found = np.zeros(columns)
            found[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (found[free] > 0).all():
                break
            low = free & (found <= 0)
            step = float(np.min(x[low] / np.maximum(x[low] - found[low], 1e-300)))
            x = x + step * (found - x)
            free &= x > 1e-15 * max(1.0, float(np.abs(x).max()))
            if not free.any():
                break
        x = np.where(free, found, 0.0) if free.any() else np.zeros(columns)
    return np.asarray(x / scale)


def fit_steps(works: Sequence[StepWork], seconds: Sequence[float]) -> StepFit:
    """Return the fit with the smallest relative errors, over all exponents.

    Raises BadValue for fewer than 10 steps.
    """
    if len(works) != len(seconds) or len(works) < 10:
        raise BadValue(f"{len(works)} steps and {len(seconds)} times; a fit needs 10 of both, or more")
    fits = [_fit(works, seconds, exponent) for exponent in EXPONENTS]
    return min(fits, key=lambda one: _error(one, works, seconds))


def predicted(fit: StepFit, work: StepWork) -> float:
    """Return the seconds of a step by a fit."""
    own = fit.sequence * work.num_sequences + fit.drawn * work.num_drawn
    within = work.attention_flops - work.context_flops
    attention = fit.cache_byte * work.cache_bytes + fit.attention_flop * within + fit.context_flop * work.context_flops
    return float(_of_rows(fit, work) * fit.factor(work.num_tokens) + own + attention)


def _of_rows(fit: StepFit, work: StepWork) -> float:
    """Return the seconds of a step's first part, without the factor."""
    linears = power_sum(fit.exponent, fit.weight_byte * work.weight_bytes, fit.linear_flop * work.linear_flops)
    return fit.step + fit.token * work.num_tokens + linears


def residuals(fit: StepFit, works: Sequence[StepWork], seconds: Sequence[float]) -> dict[str, Any]:
    """Return the number of steps, and the median, 90th percentile and maximum of a fit's absolute relative errors.

    If only one step has a number of rows, it is predicted without its own factor, which would leave no error.
    """
    alike = Counter(work.num_tokens for work in works)
    errors = np.abs(
        [
            predicted(fit if alike[work.num_tokens] > 1 else _without_factor(fit, work.num_tokens), work) / took - 1
            for work, took in zip(works, seconds, strict=True)
        ]
    )
    p50, p90 = np.percentile(errors, [50, 90])
    return {"steps": len(works), "p50": float(p50), "p90": float(p90), "max": float(errors.max())}


def _without_factor(fit: StepFit, rows: int) -> StepFit:
    return replace(fit, rows=tuple(one for one in fit.rows if one[0] != rows))


def _error(fit: StepFit, works: Sequence[StepWork], seconds: Sequence[float]) -> float:
    return sum((predicted(fit, work) / took - 1) ** 2 for work, took in zip(works, seconds, strict=True))


def _pull(fit: StepFit, works: Sequence[StepWork], seconds: Sequence[float]) -> float:
    """Return the penalty for factors other than 1, as a part of the error of a fit."""
    parts = zip((_of_rows(fit, work) * (1 - fit.factor(work.num_tokens)) for work in works), seconds, strict=True)
    return PULL**2 * sum((part / took) ** 2 for part, took in parts)


def _fit(works: Sequence[StepWork], seconds: Sequence[float], exponent: int) -> StepFit:
    """Return the fit with the exponent p.

    (r^p + m^p)^(1/p) is u r + v m, with u = (r / both)^(p - 1) and v likewise. With u and v of the previous round, a
    round is linear. Several assumptions about the steps in which r is longer than m serve as starting points. The time
    of the first part is found separately for each number of rows, and pulled slightly towards the formula, which
    determines the time of reading weights.
    """
    took = np.array(seconds)[:, None]
    parts = [(*work[:6], work.attention_flops - work.context_flops, work.context_flops) for work in works]
    table = np.array(parts, float)
    rows = table[:, 0]
    # If all steps read the same weights, a fixed part cannot be distinguished from reading them, so it is left out.
    fixed = np.full(len(works), float(np.ptp(table[:, 3]) > 0))
    of_rows = np.column_stack([fixed, rows, table[:, 3], table[:, 5]])  # the last two are of linears
    rest = table[:, [2, 1, 4, 6, 7]]
    counts = sorted(set(map(int, rows)))
    of_counts, wanted = (rows[:, None] == counts).astype(float), np.repeat([1.0, 0.0], len(works))
    best: tuple[float, StepFit] | None = None
    for shares in _drafts(of_rows[:, 2:], exponent):
        for _ in range(1 if exponent == 1 else ROUNDS):
            linear = of_rows * np.column_stack([np.ones((len(works), 2)), shares])
            a = np.column_stack([0.0 * linear, rest, of_counts])
            pulled = PULL * np.column_stack([linear, 0.0 * rest, -of_counts])
            x = nonnegative_least_squares(np.vstack([a, pulled]) / np.vstack([took, took]), wanted)
            fit = StepFit(
                step=float(x[0]), token=float(x[1]), weight_byte=float(x[2]), linear_flop=float(x[3]),
                sequence=float(x[4]), drawn=float(x[5]), cache_byte=float(x[6]), attention_flop=float(x[7]),
                context_flop=float(x[8]), exponent=exponent,
            )  # fmt: skip
            fit = replace(fit, rows=_factors(fit, works, dict(zip(counts, x[9:], strict=True))))
            error = _error(fit, works, seconds) + _pull(fit, works, seconds)
            if best is None or error < best[0]:
                best = error, fit
            shares = 0.5 * shares + 0.5 * _shares(of_rows[:, 2:] * x[2:4], exponent)
    if best is None:
        raise BadValue("no round was made")
    return best[1]


def _factors(fit: StepFit, works: Sequence[StepWork], took: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    """Return the numbers of rows, ascending, each with the ratio of the measured first part to the formula."""
    says: dict[int, list[float]] = {}
    for work in works:
        says.setdefault(work.num_tokens, []).append(max(SHORTEST, _of_rows(fit, work)))
    return tuple(
        (float(rows), max(LEAST_FACTOR, seconds / fmean(says[rows]))) for rows, seconds in sorted(took.items())
    )


def _drafts(columns: Numbers, exponent: int) -> Iterator[Numbers]:
    """Yield starting shares for a fit. Each assumes a number of operations per byte at which reading and multiplying
    take equally long; steps below it take longer in reading.

    columns: bytes and operations of linears.
    """
    if exponent == 1:
        yield np.ones((len(columns), 2))
        return
    ratios = columns[:, 1] / np.maximum(columns[:, 0], 1.0)
    for usual in np.quantile(ratios, GUESSED):
        yield _shares(np.column_stack([np.ones_like(ratios), ratios / max(usual, 1e-300)]), exponent)


def _shares(parts: Numbers, exponent: int) -> Numbers:
    """Return u and v for the given times of reading and multiplying."""
    both = np.maximum((parts**exponent).sum(axis=1, keepdims=True) ** (1 / exponent), 1e-300)
    return np.asarray(np.maximum((parts / both) ** (exponent - 1), LEAST_SHARE))
