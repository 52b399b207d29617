"""Cascade attention: keys that many sequences share are read once for all of them (Juravsky et al. 2024; FlashInfer).

There are two ways to use it. A plan whose block tables agree over 256 keys or more is a cascade already: the cpu and
triton backends detect this in the tables and read the shared blocks once where that is faster. The cpu backend, and a
batch-invariant plan of the triton backend, give the same bits as without sharing.

This module takes explicit levels instead: each has a separate cache with its own block size and tables, and divides the
query rows into groups. All rows of a group see all of its keys. Attention over each level is a state, and the states
are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from quire.ops.backend import Backend
from quire.ops.checks.attention import check_slopes
from quire.ops.plan import AttentionPlan
from quire.ops.registry import load
from quire.ops.spec import PagedKV
from quire.ops.state import AttentionState


@dataclass(frozen=True, eq=False)
class CascadeLevel:
    """One level of a cascade: its keys and the rows that see them.

    The "sequences" of the plan are the level's groups of rows: query_starts divides the rows, context_lens and
    block_tables give the group's keys. Rows of a group are contiguous, in the same order in every level.
    """

    kv: PagedKV  # the cache with the level's keys
    plan: AttentionPlan  # made with causal=False, except for the last level, which is causal if the attention is


@overload
def cascade_attention(
    q: Tensor,  # [T, Hq, D]
    levels: Sequence[CascadeLevel],
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def cascade_attention(
    q: Tensor,  # [T, Hq, D]
    levels: Sequence[CascadeLevel],
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def cascade_attention(
    q: Tensor,  # [T, Hq, D]
    levels: Sequence[CascadeLevel],  # at least one, from the most shared keys to each sequence's own
    *,
    scale: float | None = None,  # factor of q·k; None: 1 / sqrt(D)
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None,  # fp32 [Hq]: one more logit per head, without a value
    return_lse: bool = False,  # also return the LSE
    backend: str = "auto",  # the one that made the plans
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of each row over its group's keys in every level.

    A row's keys are those of the first level, then those of the second, and so on: ALiBi counts positions in that
    order. The last level has each sequence's own keys, those of its query rows included, and is usually causal; a row
    sees all keys of its groups in the other levels. The states are merged in the order of the levels.

    Slopes [S, Hq] are those of the last level's sequences. Levels whose groups join several sequences are then divided
    again in each call, and their keys are read once per sequence.

    Returns:
        out [T, Hq, Dv], and with `return_lse` the LSE, fp32 [T, Hq].

    Raises:
        BadShape, BadDtype, BadStride: naming the argument or the level.
        BadValue: for an empty list, a causal level before the last one, or sinks together with an LSE.
        Unsupported: for windows, which would cross levels.
    """
    _check(levels)
    slopes_of = alibi_slopes  # of each row
    by_level: Sequence[Tensor | None] = [alibi_slopes] * len(levels)
    if sinks is not None and return_lse:
        raise BadValue("sinks close a state, so its LSE could not be merged any more: ask for the LSE without sinks")
    found = load(backend, q.device.type)
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        last = levels[-1].plan
        check_slopes(alibi_slopes, last.spec.num_heads, last.num_seqs, q.device)
        slopes_of = alibi_slopes[_sequences(last).to(q.device)]
        levels, by_level = _divided(levels, alibi_slopes, found)
    states = []
    for level, slopes in zip(levels, by_level, strict=True):
        out, lse = found.attention(
            q, level.kv, level.plan, scale=scale, alibi_slopes=slopes, softcap=softcap, return_lse=True
        )
        states.append(AttentionState(out, lse))
    if slopes_of is not None:
        states = [
            state.shifted(slopes_of * lag[:, None].to(q.device))
            for state, lag in zip(states, _lags(levels), strict=True)
        ]
    state = states[0].merge(*states[1:], backend=backend)
    if return_lse:
        return state.out, state.lse
    return state.out if sinks is None else found.apply_sinks(state.out, state.lse, sinks)


def _sequences(plan: AttentionPlan) -> Tensor:
    """Return the plan's sequence of each query row: int64 [T]."""
    rows = plan.query_starts[: plan.num_seqs + 1].diff()
    return torch.arange(plan.num_seqs).repeat_interleave(rows)


def _divided(
    levels: Sequence[CascadeLevel],
    alibi_slopes: Tensor,  # fp32 [S, Hq], of the last level's sequences
    backend: Backend,
) -> tuple[list[CascadeLevel], list[Tensor]]:
    """Divide the groups so that each has rows of one sequence only. Return the levels and their groups' slopes."""
    last, divided, slopes = levels[-1].plan, [], []
    for level in levels[:-1]:
        plan = level.plan
        pairs = torch.stack([_sequences(plan), _sequences(last)])
        (group, sequence), rows = torch.unique_consecutive(pairs, dim=1, return_counts=True)
        starts = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
        part = backend.plan(plan.spec, starts, plan.context_lens[group], plan.block_tables[group])
        divided.append(CascadeLevel(level.kv, part))
        slopes.append(alibi_slopes[sequence.to(alibi_slopes.device)])
    return [*divided, levels[-1]], [*slopes, alibi_slopes]


def _lags(levels: Sequence[CascadeLevel]) -> list[Tensor]:
    """Return the error of each row's position in each level, in tokens: fp32 [T] per level, 0 or negative.

    A level's plan places a row relative to the level's own keys: the key at position i of the level has the distance
    i - p to a row at p. Counted over all levels the distance is larger, by the same amount for all keys of the level,
    so ALiBi adds a constant to the row's scores there.
    """
    starts, places = [], []  # of each level's first key; of the row, within the level
    end: Tensor | int = 0
    for level in levels:
        plan = level.plan
        rows = plan.query_starts[: plan.num_seqs + 1].diff()
        lens = plan.context_lens[: plan.num_seqs]
        first = (lens - rows - plan.query_starts[: plan.num_seqs]).repeat_interleave(rows)
        places.append(first + torch.arange(plan.num_tokens))
        starts.append(end)
        end = end + lens.repeat_interleave(rows)
    position = starts[-1] + places[-1]
    return [(start + place - position).float() for start, place in zip(starts, places, strict=True)]


def _check(levels: Sequence[CascadeLevel]) -> None:
    """Raise unless the levels match each other."""
    if not levels:
        raise BadValue("levels is empty; a cascade has at least one level")
    last = levels[-1].plan
    for i, level in enumerate(levels):
        spec, plan = level.plan.spec, level.plan
        if plan.num_tokens != last.num_tokens:
            raise BadShape(
                f"level {i} has {plan.num_tokens} query rows and the last one {last.num_tokens}; all divide the same"
            )
        for name in ("num_heads", "head_dim", "dim_v"):
            here, there = getattr(spec, name), getattr(last.spec, name)
            if here != there:
                raise BadShape(f"level {i} has {name} {here} and the last one {there}; they must be the same")
        if spec.dtype != last.spec.dtype:
            raise BadDtype(f"level {i} has dtype {spec.dtype} and the last one {last.spec.dtype}; they must agree")
        if spec.causal and i < len(levels) - 1:
            raise BadValue(
                f"level {i} is causal; only the last one may be, since all rows see all keys of the others: give its "
                f"spec causal=False"
            )
        if spec.window is not None:
            raise Unsupported(
                f"level {i} has a window of {spec.window}; a cascade has none: give each sequence one table over "
                f"all of its blocks, and a plan serves the window"
            )
