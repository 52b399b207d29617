"""What a reproducible plan promises, bit by bit, and what sharing changes, which is nothing but the time.

In the interpreter products are exact whatever the tile, so that these tests are about the order of all other
operations: which keys are summed together, where states are folded, and in which order. On a GPU they are about the
products too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadValue, Unsupported
from quire.ops.triton import partition, worklist
from tests.marks import of_long_runs
from tests.ops import dense
from tests.ops.conftest import DEVICES, INTERPRETED

pytestmark = pytest.mark.slow

DEVICE = DEVICES[-1]  # the interpreter's, or the GPU
B = 16
LENS = (2_600, 1_500, 90, 1_100)
COMMON = 1_056  # keys that all but the third have in common


@pytest.fixture(autouse=True)
def _few_processors(monkeypatch):
    """Fewer than a GPU has, so that some of these steps are cut and some are not."""
    monkeypatch.setattr(worklist, "processors_of", lambda device: 8)


@dataclass
class Caches:
    """Four sequences in one cache, three of them with a common beginning."""

    kv: ops.PagedKV
    spec: ops.AttentionSpec
    tables: Tensor
    q: list[Tensor]
    slopes: Tensor | None

    def attend(self, *parts: tuple[int, int, int]) -> list[tuple[Tensor, Tensor]]:
        """Out and LSE of rows start:stop of each (sequence, start, stop), all in one batch."""
        starts = torch.tensor([0, *itertools.accumulate(stop - start for _, start, stop in parts)])
        lens = torch.tensor([stop for _, _, stop in parts])
        backend = ops.load("triton", DEVICE)
        self.plan = backend.plan(self.spec, starts, lens, self.tables[[s for s, _, _ in parts]])
        q = torch.cat([self.q[s][start:stop] for s, start, stop in parts])
        out, lse = backend.attention(q, self.kv, self.plan, alibi_slopes=self.slopes, return_lse=True)
        return list(zip(out.split(starts.diff().tolist()), lse.split(starts.diff().tolist()), strict=True))

    def dense(self, s: int, start: int, stop: int) -> dense.Dense:
        """The answer for rows start:stop of a sequence."""
        k, v = (dense.gather(x.cpu(), self.tables[s].tolist(), stop) for x in (self.kv.k, self.kv.v))
        return dense.attend(
            self.q[s][start:stop], k, v, window=self.spec.window, causal=self.spec.causal, alibi_slopes=self.slopes
        )


def make(reproducible: bool, group: int = 2, kv_heads: int = 2, head_dim: int = 16, dtype=torch.float32,
         window: int | None = None, alibi: bool = True) -> Caches:  # fmt: skip
    gen = torch.Generator().manual_seed(7)
    blocks = [-(-n // B) for n in LENS]
    order, ends = torch.randperm(sum(blocks), generator=gen), list(itertools.accumulate(blocks))
    tables = torch.zeros(len(LENS), max(blocks), dtype=torch.int64)
    for s, (end, count) in enumerate(zip(ends, blocks, strict=True)):
        tables[s, :count] = order[end - count : end]
    tables[1::2, : COMMON // B] = tables[0, : COMMON // B]
    shape = (sum(blocks), kv_heads, B, head_dim)
    kv = ops.PagedKV(*(torch.randn(shape, generator=gen).to(dtype).to(DEVICE) for _ in range(2)))
    heads = kv_heads * group
    q = [torch.randn(n, heads, head_dim, generator=gen).to(dtype).to(DEVICE) for n in LENS]
    spec = ops.AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=B, num_blocks=sum(blocks), dtype=dtype,
        window=window, device=DEVICE, reproducible=reproducible,
    )  # fmt: skip
    return Caches(kv, spec, tables, q, (0.5 ** torch.arange(heads)).to(DEVICE) if alibi else None)


CASES = {
    "plain": {},
    "windowed": {"window": 1_500},
    "bf16, a tail": {"head_dim": 80, "dtype": torch.bfloat16},
    "bf16 64": {"head_dim": 64, "dtype": torch.bfloat16, "group": 7, "kv_heads": 1},
    "bf16 128": {"head_dim": 128, "dtype": torch.bfloat16, "group": 8, "kv_heads": 1, "alibi": False},
    "fp16": {"head_dim": 64, "dtype": torch.float16, "group": 4, "kv_heads": 1},
    "odd groups": {"group": 7, "kv_heads": 1, "alibi": False},
}


# In the interpreter neither the dtype nor the heads change the order of anything.
USUAL = ("windowed",) if INTERPRETED else CASES


@pytest.mark.triton(cases=0)  # the next test compares bits, too
@pytest.mark.parametrize("kind", [kind if kind in USUAL else of_long_runs(kind) for kind in CASES])
def test_a_row_has_the_same_bits_in_every_batch_and_chunk(monkeypatch, kind):
    """Positions on both sides of a chunk of 1,024 keys, where a context is cut."""
    caches = make(True, **CASES[kind])
    positions = (1_000, 1_023, 1_024, 2_047, 2_048, 2_599)
    alone = {p: caches.attend((0, p, p + 1))[0] for p in positions}
    batches = (
        [(0, 2_590, 2_600)],
        [(0, 1_000, 1_100)],
        [(2, 60, 90), (0, 1_020, 1_030), (1, 1_499, 1_500)],
        [(3, 1_099, 1_100), (0, 2_599, 2_600), (1, 1_499, 1_500), (2, 89, 90)],
        [(0, 2_040, 2_060), (2, 0, 90)],
    )
    compared = 0
    for worth in (2**40, 0):
        monkeypatch.setattr(partition, "WORTH_SHARING", worth)
        for parts in batches if worth == 0 else batches[2:]:  # a sequence alone has nobody to share with
            results = caches.attend(*parts)
            [(first, out, lse)] = [
                (start, *result) for (s, start, _), result in zip(parts, results, strict=True) if s == 0
            ]
            for p in set(positions) & set(range(first, first + len(out))):
                assert torch.equal(out[p - first], alone[p][0][0]), (worth, parts, p)
                assert torch.equal(lse[p - first], alone[p][1][0]), (worth, parts, p)
                compared += 1
    assert compared == 9 + 5
    caches.dense(0, 2_599, 2_600).check(*alone[2_599], caches.spec.dtype)


@pytest.mark.triton
@pytest.mark.parametrize("reproducible", [False, True])
def test_shared_blocks_are_read_once(monkeypatch, reproducible):
    parts = [(3, 1_099, 1_100), (0, 2_598, 2_600), (1, 1_499, 1_500), (2, 89, 90)]
    caches = make(reproducible)
    apart = caches.attend(*parts)
    assert caches.plan.num_many == (8 if reproducible else 0)  # chunks
    monkeypatch.setattr(partition, "WORTH_SHARING", 0)
    together = caches.attend(*parts)
    keys = partition.CHUNK if reproducible else partition.SPLIT * 4
    items = caches.plan.many.view(-1, partition.ITEM)[: caches.plan.num_many].tolist()
    assert sum(count == 4 and hi <= keys for _, _, count, _, hi, *_ in items) >= 1, (
        "no item has rows of three sequences"
    )
    for (s, start, stop), (out, lse), (out_apart, lse_apart) in zip(parts, together, apart, strict=True):
        caches.dense(s, start, stop).check(out, lse, caches.spec.dtype)
        if reproducible:
            assert torch.equal(out, out_apart)
            assert torch.equal(lse, lse_apart)


def test_sharing_saves_nothing_where_little_is_shared():
    caches = make(False)
    caches.attend((3, 1_099, 1_100), (0, 2_599, 2_600))
    assert caches.plan.num_many == 0


def test_an_update_changes_no_address():
    caches = make(False)
    caches.attend((0, 2_599, 2_600), (2, 80, 90))
    plan = caches.plan
    names = ("few", "many", "rows", "merges", "positions", "tables", "device_slots")
    before = [getattr(plan, name).data_ptr() for name in names]
    assert all(address % 16 == 0 for address in before), "kernels are compiled again for addresses that are not aligned"
    plan.update(torch.tensor([0, 3]), torch.tensor([40]), caches.tables[:1], torch.arange(3))
    assert [getattr(plan, name).data_ptr() for name in names] == before
    assert (plan.few.view(-1, partition.ITEM)[plan.num_few :, 0] == -1).all()
    assert plan.device_slots.tolist()[:3] == [0, 1, 2]
    assert (plan.device_slots[3:] == -1).all()


def test_a_plan_that_covers_all_gives_the_same(monkeypatch):
    """As a launch captured in a graph does: items, merges and parts that the step does not have are passed over."""
    caches = make(False)
    parts = [(0, 2_599, 2_600), (2, 80, 90)]
    [(want, _), (other, _)] = caches.attend(*parts)
    caches.plan.covers_all = True
    assert caches.plan.launched > (caches.plan.num_few, caches.plan.num_many, caches.plan.num_merges)
    q = torch.cat([caches.q[s][start:stop] for s, start, stop in parts])
    out = ops.load("triton", DEVICE).attention(q, caches.kv, caches.plan, alibi_slopes=caches.slopes)
    assert torch.equal(out, torch.cat([want, other]))


def test_who_cannot_give_the_same_bits_says_so():
    spec = make(True).spec
    for name in ("reference", "gather"):
        with pytest.raises(Unsupported, match=r"does not give the same bits in every batch.*spec\.reproducible"):
            ops.load(name, DEVICE).make_plan(spec, 1, 1, 1)
    with pytest.raises(BadValue, match=r"spec\.reproducible is 1; it must be True or False"):
        make(1)  # type: ignore[arg-type]
