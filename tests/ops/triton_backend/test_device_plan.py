"""A work list made on the device: the same attention, from lengths that the host does not look at."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from quire import ops
from quire.errors import BadDtype, BadShape, Unsupported
from quire.ops.triton import device_plan
from quire.ops.triton.partition import Partitioner, most_tiles
from quire.ops.triton.tiles import Tile
from tests.marks import of_long_runs, quick
from tests.ops.cases import Case, Step, naming
from tests.ops.conftest import DEVICES

pytestmark = [pytest.mark.slow, pytest.mark.triton]

DEVICE = DEVICES[-1]  # the interpreter's, or the GPU


def plan_on_device(step: Step) -> ops.AttentionPlan:
    backend = ops.load("triton", DEVICE)
    plan = backend.make_plan(step.spec, step.num_tokens, step.num_seqs, step.width)
    metadata = (x.to(DEVICE) for x in (step.query_starts, step.context_lens, step.block_tables))
    plan.update_on_device(step.num_tokens, *metadata)
    return plan


@pytest.mark.parametrize("seed", quick(range(40), 0, usual=10))
def test_random_batches(seed):
    backend = ops.load("triton", DEVICE)
    case = replace(Case.draw(10_000 + seed, backend.limits), ahead=False)  # a plan made on the device has no key_ends
    if not case.context_lens:
        return
    with naming(case):
        step = Step(case, DEVICE)
        step.write(backend)
        out, lse = step.attend(backend, plan_on_device(step))
        step.dense().check(out, lse, case.dtype)


@pytest.mark.parametrize("reproducible", [False, True])
def test_long_prompts(reproducible):
    backend = ops.load("triton", DEVICE)
    case = Case(query_lens=(1, 140, 0, 70), context_lens=(1_300, 140, 5, 300), block_size=32, written=20)
    step = Step(case, DEVICE)
    object.__setattr__(step.spec, "reproducible", reproducible)
    step.write(backend)
    out, _ = step.attend(backend, plan_on_device(step))
    step.dense().check(out, None, torch.float32)


@pytest.mark.parametrize(
    ("starts", "lens", "table"),
    [
        ([0, 3, 4, 8], [9, 21, 4], -5),
        ([0, 3, 4, 8], [9, 21, 4], 2**40),
        ([5, 90, -7, 10**6], [9, 21, 4], 0),
        ([-9, -9, -9, -9], [-(2**40), 2**40, 0], 0),
        ([9, 9, 9, 9], [2**31, 3, 3], 0),
        ([8, 4, 3, 0], [9, 21, 4], 0),
    ],
)
def test_wrong_metadata_reads_nothing_but_the_cache(starts, lens, table):
    """Wrong numbers may come out, from within the cache, and no row but the step's is written."""
    backend = ops.load("triton", DEVICE)
    spec = ops.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, num_blocks=6, dtype=torch.float32, device=DEVICE
    )
    room = torch.full((10, 2, 4, 16), torch.nan, device=DEVICE)
    room[2:8] = 1.0
    plan = backend.make_plan(spec, 8, 3, 8)
    plan.update_on_device(
        8, *(x.to(DEVICE) for x in (torch.tensor(starts), torch.tensor(lens), torch.full((3, 8), table)))
    )
    rows = torch.full((12, 4, 16), -7.0, device=DEVICE)
    rows[2:10] = 0.0
    backend.attention(torch.ones(8, 4, 16, device=DEVICE), ops.PagedKV(room[2:8], room[2:8]), plan, out=rows[2:10])
    assert ((rows[2:10] == 0) | torch.isclose(rows[2:10], torch.ones((), device=DEVICE))).all()
    assert (rows[:2] == -7).all()
    assert (rows[10:] == -7).all()


def test_the_host_looks_at_nothing():
    """A fake tensor has no values, so that a look at one raises."""
    spec = ops.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, num_blocks=6, dtype=torch.float32, window=9
    )
    with FakeTensorMode() as mode:
        starts, lens = (mode.from_tensor(torch.tensor(x)) for x in ([0, 3, 4, 8], [9, 21, 4]))
        with pytest.raises(DataDependentOutputException):
            lens[0].item()
        items = device_plan.items(spec, Tile(64, 32, 4, 2), 32, 8, starts, lens, 8)
        assert items.shape == (most_tiles(8, 3, 32), 8)
        sequences = device_plan.sequences(8, starts)
        assert device_plan.positions(sequences, starts, lens).shape == sequences.shape == (8,)


def test_a_step_that_is_too_large_and_a_plan_that_is_made_on_the_host():
    step = Step(Case(query_lens=(1, 3), context_lens=(9, 8)), DEVICE)
    plan = ops.load("triton", DEVICE).make_plan(step.spec, 3, 2, step.width)
    metadata = [x.to(DEVICE) for x in (step.query_starts, step.context_lens, step.block_tables)]
    with pytest.raises(BadShape, match=r"the step has 4 query tokens, 2 sequences .* at most 3, 2 and"):
        plan.update_on_device(4, *metadata)
    for bad, error, message in (
        ([x[:1] for x in metadata], BadShape, "query_starts has 1 entries, context_lens 1 and block_tables 1 rows"),
        ([metadata[0], metadata[1].float(), metadata[2]], BadDtype, "context_lens has dtype torch.float32"),
    ):
        with pytest.raises(error, match=message):
            plan.update_on_device(3, *bad)
    with pytest.raises(BadShape, match="the step has -1 query tokens"):
        plan.update_on_device(-1, *metadata)
    other = ops.load("reference").make_plan(step.spec, 4, 2, step.width)
    assert not other.takes_device_metadata
    with pytest.raises(Unsupported, match="made on the host"):
        other.update_on_device(4, *metadata)


def test_it_leaves_no_slots_of_an_earlier_step_and_no_row_unwritten():
    step = Step(Case(query_lens=(2, 3), context_lens=(9, 8)), DEVICE)
    backend = ops.load("triton", DEVICE)
    plan = step.write(backend)
    starts = torch.tensor([1, 2, 3], device=DEVICE)  # rows 0, 3 and 4 are nobody's
    plan.update_on_device(5, starts, step.context_lens.to(DEVICE), step.block_tables.to(DEVICE))
    assert (plan.device_slots == -1).all()
    out = torch.full((5, 6, 16), torch.nan, device=DEVICE)
    backend.attention(step.q, step.kv, plan, out=out)
    assert not out.isnan().any()


def run_descriptor(monkeypatch: pytest.MonkeyPatch, case: Case) -> tuple[Step, torch.Tensor, ops.PagedPrefill]:
    """A case run by a descriptor without host metadata: on a GPU, that is; here the interpreter stands in for one."""
    step = Step(case, DEVICE)
    backend = ops.load("triton", DEVICE)
    step.write(backend)
    out = torch.full_like(step.q, torch.nan)
    metadata = [x.to(DEVICE) for x in (step.block_tables, step.context_lens, step.query_starts)]
    given = (out, step.q, step.kv.k, step.kv.v, *metadata)
    prefill = ops.PagedPrefill.create(DEVICE, *given, backend="triton")
    monkeypatch.setattr(prefill, "_device", torch.device("cuda"))
    monkeypatch.setattr(prefill, "_check_call", lambda *args: None)
    assert prefill.workspace_size == 0
    prefill.run(*given)
    return step, out, prefill


def test_it_is_what_a_descriptor_does_without_host_metadata(monkeypatch):
    step, out, prefill = run_descriptor(monkeypatch, Case(query_lens=(2, 3), context_lens=(9, 8)))
    assert prefill._plan.num_many == most_tiles(5, 2, prefill._plan.partitioner.many_tokens) > 0
    step.dense().check(out, None, torch.float32)


@pytest.mark.parametrize(
    "query_lens",
    [
        *((1,) * num_seqs for num_seqs in (1, 9)),
        *(of_long_runs((1,) * num_seqs) for num_seqs in (8, 32, 64, 128)),
        (1,) * 300,
        (40, *(1,) * 40, 0, 0, 7, *(2,) * 9),
        (200, 1),
        (0,) * 20 + (3,),
    ],
    ids=lambda lens: f"{len(lens)} sequences, {sum(lens)} tokens",
)
def test_a_descriptor_without_host_metadata_has_room_for_every_batch(monkeypatch, query_lens):
    """Many short sequences make more tiles than few long ones, up to one a sequence."""
    context_lens = tuple(n + s % 3 * (n > 0) for s, n in enumerate(query_lens))
    case = Case(query_lens=query_lens, context_lens=context_lens, num_kv_heads=1, group_size=1, head_dim=8)
    step, out, _ = run_descriptor(monkeypatch, case)
    step.dense().check(out, None, torch.float32)


CHIPS = (("sm80", 108), ("sm90", 132), ("gfx942", 304))  # A100, H200, MI300


@pytest.mark.parametrize(("chip", "processors"), CHIPS)
def test_there_is_room_for_the_tiles_of_every_step(chip, processors):
    """Counted one by one, for the plan that a descriptor makes and for steps that are smaller than their plan."""
    rng = random.Random(0)
    for group, kv_heads, head_dim in ((4, 8, 128), (1, 32, 128), (8, 8, 128), (7, 4, 64), (1, 1, 1024), (71, 1, 64)):
        for num_seqs in (1, 2, 8, 9, 31, 64, 152, 297, 600):
            for num_tokens in (0, 1, num_seqs // 2, num_seqs, num_seqs + 1, 3 * num_seqs, 8_192):
                spec = ops.AttentionSpec(
                    num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=16,
                    num_blocks=2**20, dtype=torch.bfloat16, reproducible=rng.random() < 0.3,
                )  # fmt: skip
                partitioner = Partitioner(spec, chip, processors, num_tokens, num_seqs, 64)
                fewer = rng.randint(0, num_tokens), rng.randint(1, num_seqs)
                for tokens, seqs in ((num_tokens, num_seqs), fewer):
                    cuts = sorted(rng.randint(0, tokens) for _ in range(seqs - 1))
                    one_each = list(range(min(seqs, tokens)))
                    for starts in ([0, *cuts, tokens], [*one_each, tokens], [0, tokens]):
                        rows = (b - a for a, b in itertools.pairwise(starts))
                        tiles = sum(-(-n // partitioner.many_tokens) for n in rows)
                        launched = most_tiles(tokens, seqs, partitioner.many_tokens)
                        assert tiles <= launched <= partitioner.room.many, (spec, tokens, seqs, starts)


def test_rows_without_a_sequence_are_refused():
    step = Step(Case(query_lens=(1, 3), context_lens=(9, 8)), DEVICE)
    plan = ops.load("triton", DEVICE).make_plan(step.spec, 4, 2, step.width)
    starts, lens, tables = (x.to(DEVICE) for x in (step.query_starts, step.context_lens, step.block_tables))
    with pytest.raises(BadShape, match="the step has 4 query tokens and no sequence"):
        plan.update_on_device(4, starts[:1], lens[:0], tables[:0])
    plan.update_on_device(0, starts[:1], lens[:0], tables[:0])
    assert plan.launched == (0, 0, 0)
