"""The step-time model, fitted to steps that were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.cost import StepWork
from quire.errors import BadValue
from quire.simulate.device import EXPONENTS, StepFit

Numbers = NDArray[np.float64]
GUESSED = (0.3, 0.5, 0.7, 0.9)  # of the steps, in which multiplying is taken to be the shorter part at first
STAIRS = 64  # rows, from which on steps take what the sum says: a dozen more or less is little of them
TURNS = 4  # in which the factors of rows and the rest are found, each with the other
LEAST_SHARE = 1e-3  # or a part that a round finds to be nothing could not come back
ROUNDS = 20  # of a fit with an exponent: each knows better which of reading and multiplying takes longer
SMALL = 1e-12  # of the largest gradient
ALL_BUT_ATTENTION = [0, 1, 2, 3, 4, 6]  # of the columns of a fit
LEAST_FACTOR = 0.1  # of the rows of steps
NOTHING = StepFit(step=0.0, sequence=0.0, token=0.0, drawn=0.0, weight_byte=0.0, cache_byte=0.0, linear_flop=0.0,
                  attention_flop=0.0)  # fmt: skip


def nonnegative_least_squares(a: Numbers, b: Numbers) -> Numbers:
    """The x >= 0 for which |a x - b| is smallest.

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
    """The fit whose relative errors are smallest, of all exponents, with the factors of the rows that steps had.

    Raises BadValue for fewer than 10 steps.
    """
    if len(works) != len(seconds) or len(works) < 10:
        raise BadValue(f"{len(works)} steps and {len(seconds)} times; a fit needs 10 of both, or more")
    fits = (_fit(works, seconds, replace(NOTHING, exponent=exponent)) for exponent in EXPONENTS)
    best = min(fits, key=lambda one: _error(one, works, seconds))
    for _ in range(TURNS):
        best = _fit(works, seconds, replace(best, rows=_factors(best, works, seconds)))
    return replace(best, rows=_factors(best, works, seconds))


def _factors(fit: StepFit, works: Sequence[StepWork], seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """What a fit leaves of all but attention, for each number of rows below STAIRS.

    That by which the relative errors of the steps that have it are smallest.
    """
    left: dict[int, list[tuple[float, float]]] = {STAIRS: [(1.0, 1.0)]}
    for work, took in zip(works, seconds, strict=True):
        if work.num_tokens < STAIRS:
            rest, attention = _parts(fit, work)
            left.setdefault(work.num_tokens, []).append((max(took - attention, 0.0) / took, rest / took))
    found = []
    for rows, those in sorted(left.items()):
        factor = sum(a * b for a, b in those) / max(SMALL, sum(b * b for _, b in those))
        found.append((float(rows), max(LEAST_FACTOR, factor)))
    return tuple(found)


def predicted(fit: StepFit, work: StepWork) -> float:
    """Seconds of a step by that fit."""
    rest, attention = _parts(fit, work)
    return rest * fit.factor(work.num_tokens) + attention


def _parts(fit: StepFit, work: StepWork) -> tuple[float, float]:
    """Seconds of all but attention, without the factor, and of attention."""
    p = fit.exponent
    own = fit.step + fit.sequence * work.num_sequences + fit.token * work.num_tokens + fit.drawn * work.num_drawn
    linears = (fit.weight_byte * work.weight_bytes) ** p + (fit.linear_flop * work.linear_flops) ** p
    attention = (fit.cache_byte * work.cache_bytes) ** p + (fit.attention_flop * work.attention_flops) ** p
    return float(own + linears ** (1.0 / p)), float(attention ** (1.0 / p))


def residuals(fit: StepFit, works: Sequence[StepWork], seconds: Sequence[float]) -> dict[str, Any]:
    """Relative errors of a fit: of how many steps, their median, 90th percentile and largest, without signs.

    A step that alone has its number of rows is predicted with the factors of the others: its own one leaves no error.
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
    return replace(fit, rows=tuple(one for one in fit.rows if one[0] != rows or rows >= STAIRS))


def _error(fit: StepFit, works: Sequence[StepWork], seconds: Sequence[float]) -> float:
    return sum((predicted(fit, work) / took - 1) ** 2 for work, took in zip(works, seconds, strict=True))


def _fit(works: Sequence[StepWork], seconds: Sequence[float], before: StepFit) -> StepFit:
    """With the exponent p and the factors of a fit before.

    (r^p + m^p)^(1/p) is u r + v m, u = (r / both)^(p - 1) and v likewise: with u and v of the fit before, for linears
    and for attention, a round is linear. Which of r and m is longer for which steps is guessed first, in several ways.
    """
    took, exponent = np.array(seconds), before.exponent
    factors = np.array([[before.factor(work.num_tokens)] for work in works])
    table = np.array([tuple(work)[:7] for work in works], float)
    rows, drawn, sequences = table[:, 0], table[:, 1], table[:, 2]
    columns = np.column_stack([np.ones(len(works)), sequences, rows, drawn, table[:, 3:7]])
    best: tuple[float, StepFit] | None = None
    for weights in _guesses(columns, exponent):
        for _ in range(1 if exponent == 1 else ROUNDS):
            scaled = columns.copy()
            scaled[:, 4:8] *= weights
            scaled[:, ALL_BUT_ATTENTION] *= factors
            x = nonnegative_least_squares(scaled / took[:, None], np.ones(len(works)))
            fit = replace(
                before, step=float(x[0]), sequence=float(x[1]), token=float(x[2]), drawn=float(x[3]),
                weight_byte=float(x[4]), cache_byte=float(x[5]), linear_flop=float(x[6]), attention_flop=float(x[7]),
            )  # fmt: skip
            error = _error(fit, works, seconds)
            if best is None or error < best[0]:
                best = error, fit
            weights = 0.5 * weights + 0.5 * _shares(columns[:, 4:8] * x[4:8], exponent)
    if best is None:
        raise BadValue("no round was made")
    return best[1]


def _guesses(columns: Numbers, exponent: int) -> Iterator[Numbers]:
    """Shares with which a fit may begin: for linears and for attention, some steps take as long in reading as in
    multiplying, those with fewer operations for a byte longer in reading.
    """
    if exponent == 1:
        yield np.ones((len(columns), 4))
        return
    ratios = columns[:, 6:8] / np.maximum(columns[:, 4:6], 1.0)
    for linears in np.quantile(ratios[:, 0], GUESSED):
        for attention in np.quantile(ratios[:, 1], GUESSED):
            multiplying = ratios / np.maximum([linears, attention], 1e-300)
            yield _shares(np.column_stack([np.ones_like(ratios), multiplying]), exponent)


def _shares(parts: Numbers, exponent: int) -> Numbers:
    """The u and v. parts: read for linears and for attention, then multiplied for both."""
    reading, multiplying = parts[:, :2], parts[:, 2:]
    both = np.maximum((reading**exponent + multiplying**exponent) ** (1 / exponent), 1e-300)
    both = np.column_stack([both, both])
    return np.maximum((parts / both) ** (exponent - 1), LEAST_SHARE)
