"""What rank 0 sends the others comes as it was."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import pytest
import torch

from quire.cache.groups import StatePools
from quire.engine.plan_codec import Pools, pack, pack_batch, unpack
from quire.models.batch import (
    Batch,
    DrawnRows,
    EmbedRows,
    GroupMoves,
    GroupTables,
    Pairs,
    PromptRows,
    RecurrentTables,
    SamplingRows,
)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
    if type(found) is not type(wanted):
        return False
    if is_dataclass(wanted):
        return all(same(getattr(found, one.name), getattr(wanted, one.name)) for one in fields(wanted))
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


@pytest.mark.parametrize("count", [0, 1, 3, 300])
def test_a_batch(count: int) -> None:
    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(-9, 2**20, shape).to(dtype)

    ids = [f"\u2028 {i} '" for i in range(count)]
    moves = GroupMoves(Pairs([1, 2], [3, 4]), Pairs([], []), [Pairs([5], [6]), Pairs([7], [8])])
    batch = Batch(
        token_ids=numbers(count),
        drawn=DrawnRows(numbers(0), []),
        positions=numbers(2 * count)[::2],  # strided
        query_starts=numbers(count + 1, dtype=torch.int32),
        context_lens=numbers(count, dtype=torch.int32),
        moves=(moves, moves),
        groups=(GroupTables(numbers(count), numbers(count, 5, dtype=torch.int32)),) * 2,
        recurrent=(RecurrentTables(numbers(count, 2, dtype=torch.int32), numbers(count, 2, dtype=torch.int32)),),
        logit_rows=numbers(count),
        logit_ids=ids,
        sampling=cast(SamplingRows, "of rank 0"),
        prompt=PromptRows(numbers(count), numbers(count), numbers(count), ids),
        embed=EmbedRows(numbers(1), ["e"], [1]),
    )
    assert same(unpack(pack_batch(batch)), replace(batch, sampling=cast(SamplingRows, None), logit_ids=[]))


def test_pools() -> None:
    pools = Pools(7, 3, StatePools(1, 2, 3))
    assert same(unpack(pack(pools)), pools)
