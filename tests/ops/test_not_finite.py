"""An infinite or NaN entry of the cache reaches the rows that see it, and no other: not by a bit.

What a row does not see has the weight 0 for it, and 0 times infinity is NaN: it must not be multiplied at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from quire import ops
from tests.ops.cases import Case, Step
from tests.ops.conftest import INTERPRETED

PLANTS = (torch.nan, torch.inf, -torch.inf)


@dataclass
class Plant:
    """An entry of the cache that is not finite."""

    slot: int
    value: float
    head: int  # KV head
    dims: slice


def plants(step: Step, slots: list[int]) -> Iterator[Plant]:
    """One a slot, of every value and head in turn; every other one in a single dimension."""
    for i, slot in enumerate(slots):
        dims = slice(None) if i % 2 else slice(3, 4)
        yield Plant(slot, PLANTS[i % 3], i % step.case.num_kv_heads, dims)


def rows_that_see(step: Step, slot: int) -> Tensor:
    """Which query rows see the key in that slot: bool [T]."""
    case, found = step.case, []
    for s, (rows, n) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        position = torch.arange(n - rows, n)[:, None]
        key = (step.slots[s] == slot).nonzero().flatten()
        seen = torch.ones(rows, len(key), dtype=torch.bool)
        if case.causal:
            seen = key <= position
        if case.window is not None:
            seen &= key > position - case.window
        if case.chunk is not None:
            seen &= key >= position // case.chunk * case.chunk
        found.append(seen.any(1))
    return torch.cat(found)


def check_plants(step: Step, backend: ops.Backend, slots: list[int]) -> None:
    """Attention with each of the plants, next to attention without any."""
    size, group = step.case.block_size, step.case.group_size
    plan = step.write(backend)
    clean, clean_lse = step.attend(backend, plan)
    exact = step.device == "cpu" or step.spec.reproducible  # else a compiler may fuse operations here and not there
    for plant in plants(step, slots):
        seen = rows_that_see(step, plant.slot)
        heads = slice(plant.head * group, (plant.head + 1) * group)
        for name, cache in (("K", step.kv.k), ("V", step.kv.v)):
            entry = cache[plant.slot // size, plant.head, plant.slot % size, plant.dims]
            before = entry.clone()
            entry.fill_(plant.value)
            out, lse = step.attend(backend, plan)
            entry.copy_(before)

            hit = torch.zeros(out.shape, dtype=torch.bool)
            hit[seen, heads, plant.dims if name == "V" else slice(None)] = True
            hit_lse = hit.any(-1) if name == "K" else torch.zeros(clean_lse.shape, dtype=torch.bool)
            for what, got, want, touched in (("out", out, clean, hit), ("LSE", lse, clean_lse, hit_lse)):
                got, want = got.cpu(), want.cpu()
                same = got == want if exact else torch.isclose(got, want, rtol=1e-5, atol=1e-6)
                at = (~same & ~touched).nonzero()
                assert not len(at), f"{plant} in {name}: {what}{at[0].tolist()} does not see it\n  {step.case}"
            if name == "V":
                got = out.cpu()[hit].double()
                assert torch.equal(got, torch.full_like(got, plant.value).double()) or (
                    plant.value != plant.value and got.isnan().all()
                ), f"{plant} in V: a row that sees it has {got}\n  {step.case}"
            elif plant.value != plant.value:
                assert out.cpu()[hit].isnan().all(), f"{plant} in K: a row that sees it does not show it"


def make(case: Case, device: str, backend: ops.Backend, reproducible: bool) -> Step:
    if reproducible and not backend.limits.reproducible:
        pytest.skip("it does not serve reproducible plans")
    step = Step(replace(case, return_lse=True), device)
    step.spec = replace(step.spec, reproducible=reproducible)
    return step


SHORT = [
    Case(query_lens=(4, 1), context_lens=(7, 2), block_size=4, group_size=2, head_dim=8),
    Case(query_lens=(6, 1), context_lens=(8, 2), block_size=3, group_size=1, head_dim=8, window=3),
    Case(query_lens=(3, 2), context_lens=(5, 2), block_size=16, alibi=True, softcap=3.0, head_dim=8, head_dim_v=24),
    Case(query_lens=(2, 1), context_lens=(3, 1), block_size=1, head_dim=8, causal=False),
    Case(query_lens=(5, 1), context_lens=(8, 7), block_size=4, group_size=2, head_dim=8, chunk=3),
]


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("case", SHORT, ids=["causal", "window", "scores", "not causal", "chunks"])
def test_every_place_of_a_short_batch(backend, device, case, reproducible):
    step = make(case, device, backend, reproducible)
    slots = torch.cat(step.slots).unique().tolist()
    check_plants(step, backend, slots[::3] if backend.name in INTERPRETED else slots)


LONG = [
    (Case(query_lens=(1, 1, 3), context_lens=(300, 290, 270), shared_prefix=True), 0, (0, 100, 256, 269, 299)),
    (Case(query_lens=(37, 1), context_lens=(290, 3)), 0, (255, 256, 284)),
    (Case(query_lens=(40, 40), context_lens=(60, 40), window=33), 1, (1, 31)),
    (Case(query_lens=(40, 1), context_lens=(300, 270), window=256, chunk=256), 0, (100, 255, 256, 299)),
]


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize(("case", "sequence", "places"), LONG, ids=["shared keys", "several tiles", "window", "chunks"])
def test_places_of_longer_sequences(backend, device, case, sequence, places, reproducible, monkeypatch):
    """Where keys are divided among several that compute, and where several sequences are computed together."""
    if backend.name in ("triton", "hopper"):
        monkeypatch.setattr("quire.ops.triton.partition.WORTH_SHARING", 0)
    case = replace(case, num_kv_heads=1, group_size=2, head_dim=8, block_size=32, written=20)
    step = make(case, device, backend, reproducible)
    slots = [int(step.slots[sequence][at]) for at in places]
    check_plants(step, backend, slots[::2] if backend.name in INTERPRETED else slots)


def test_fp16_and_several_plants_at_once(backend, device):
    """A row that sees none of them has the bits that it has next to finite values."""
    case = Case(query_lens=(20, 1), context_lens=(25, 6), block_size=8, window=6, return_lse=True)
    dtype = torch.float16 if torch.float16 in backend.limits.kv_dtypes else torch.float32
    step = Step(replace(case, dtype=dtype), device)
    plan = step.write(backend)
    clean, _ = step.attend(backend, plan)
    seen = torch.zeros(21, dtype=torch.bool)
    for value, at in ((torch.inf, 3), (torch.nan, 8), (-torch.inf, 18), (torch.nan, 19), (torch.inf, 24)):
        slot = int(step.slots[0][at])
        step.kv.v[slot // 8, :, slot % 8] = value
        seen |= rows_that_see(step, slot)
    out, _ = step.attend(backend, plan)
    assert 0 < seen.sum() < 20
    assert torch.equal(out.cpu()[~seen], clean.cpu()[~seen]) or (
        device != "cpu" and torch.allclose(out.cpu()[~seen], clean.cpu()[~seen], rtol=1e-3)
    )
    assert not out.cpu()[seen].isfinite().any()
