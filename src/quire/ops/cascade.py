"""Cascade attention: keys that many sequences share are read once for all of them (Juravsky et al. 2024; FlashInfer).

There are two ways to it. A plan whose block tables agree over 256 keys and more is a cascade already: the cpu and the
triton backend find that in the tables and read what is shared once where it pays; the cpu backend, and a reproducible
plan of the other, give the same bits as without. Or the levels are
given, here: each is a cache of its own, with its own block size and tables, and divides the query rows into groups; all
rows of a group see all of its keys. Attention over each level is a state, and the states merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from quire.ops import validate
from quire.ops.backend import Backend, load
from quire.ops.plan import AttentionPlan
from quire.ops.spec import PagedKV
from quire.ops.state import AttentionState


@dataclass(frozen=True, eq=False)
class CascadeLevel:
    """One level: where its keys lie, and which rows see them.

    The "sequences" of the plan are the level's groups of rows: query_starts divides the rows, context_lens and
    block_tables give the group's keys. Rows of a group follow one another, in every level in the same order.
    """

    kv: PagedKV
    plan: AttentionPlan  # causal=False, but in the last level as the attention is


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
    levels: Sequence[CascadeLevel],
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    softcap: float | None = None,
    sinks: Tensor | None = None,  # fp32 [Hq]
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each row over its group's keys in every level: out [T, Hq, Dv] (, LSE [T, Hq]).

    A row's keys are those of the first level, then those of the second, and so on: ALiBi counts positions in that
    order. Slopes [S, Hq] are those of the last level's sequences; the plans of levels whose groups join several of them
    are divided anew in each call, and read what these share once a sequence. The last level holds what is a sequence's
    own, its query rows included, and is causal as a rule; the others are seen whole. The states merge in the order of
    the levels.
    backend: must be the one that made the plans.

    Raises BadShape, BadDtype or BadStride; BadValue for levels that do not fit together, for a causal level before the
    last one, and for sinks together with an LSE; Unsupported for windows, which would reach into the levels.
    """
    _check(levels)
    slopes_of = alibi_slopes  # of each row
    by_level: Sequence[Tensor | None] = [alibi_slopes] * len(levels)
    if sinks is not None and return_lse:
        raise BadValue("sinks close a state, so its LSE could not be merged any more: ask for the LSE without sinks")
    found = load(backend, q.device.type)
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        last = levels[-1].plan
        validate.check_slopes(alibi_slopes, last.spec.num_heads, last.num_seqs, q.device)
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
    """The plan's sequence of each query row: int64 [T]."""
    rows = plan.query_starts[: plan.num_seqs + 1].diff()
    return torch.arange(plan.num_seqs).repeat_interleave(rows)


def _divided(
    levels: Sequence[CascadeLevel],
    alibi_slopes: Tensor,  # fp32 [S, Hq], of the last level's sequences
    backend: Backend,
) -> tuple[list[CascadeLevel], list[Tensor]]:
    """The levels with groups of which each has rows of one sequence only, and the slopes of each level's groups."""
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
    """How many tokens too early each level's attention placed a row, negative: fp32 [T] a level.

    A level's plan places a row by the level's own keys: the key at position i of the level has the distance i - p to a
    row at p. With all levels counted the distance is larger, by the same for all of the level's keys, so that ALiBi
    adds a constant to the row's scores there.
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
    """Levels that fit together."""
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
