"""The backend "hopper": what it plans and launches, its algorithm by an emulation, and the compiler's result."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import ops
from quire.ops import registry
from quire.ops.spec import Scores
from quire.ops.triton import hopper, prefill
from quire.ops.triton.backend import Call
from quire.ops.triton.hopper import HopperBackend, turns_of
from tests.ops.cases import Case, Step, naming
from tests.ops.test_cascade import Tree
from tests.ops.triton_backend.emulation import Emulator

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[3]
PROMPTS = Case(
    query_lens=(70, 1, 0, 33, 9),
    context_lens=(70, 26, 18, 300, 4),  # the last one's first rows see nothing
    head_dim=64,
    block_size=16,
    group_size=4,
    dtype=torch.float16,
    return_lse=True,
    written=20,
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """The emulator, in the place of the kernel."""
    emulator = Emulator()
    monkeypatch.setattr(prefill, "prefill", emulator)
    return emulator


def check(case: Case, kernel: Emulator, launches: int = 1) -> None:
    with naming(case):
        Step(case).check(HopperBackend())
    assert len(kernel.launches) == launches, case


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 128, "group_size": 7, "layout": "NHD", "poison": "inf"},
        {"block_size": 256, "causal": False, "row_strides": "head-major", "out_strides": "padded"},
        {"block_size": 8, "group_size": 1, "sinks": True, "return_lse": False, "layout": "K in HND, V in NHD"},
        {"dtype": torch.bfloat16, "group_size": 40, "num_kv_heads": 1},
        {"block_size": 128, "head_dim": 128, "scale": 0.3, "size": 5.0},
        {"window": 40, "poison": "inf"},
        {"window": 150, "query_lens": (300, 1, 40), "context_lens": (420, 300, 700), "block_size": 32},
        {"window": 129, "query_lens": (140,), "context_lens": (900,), "block_size": 256, "head_dim": 128},
    ],
    ids=str,
)
def test_ragged_prompts_against_float64(kernel: Emulator, changes: dict[str, object]) -> None:
    """Over a cache in which what no sequence owns is NaN."""
    check(replace(PROMPTS, **changes), kernel)


def test_contexts_that_are_cut_and_blocks_that_are_shared(kernel: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of rows, written for the kernel that merges them, and rows of several sequences in an item."""
    for window in (None, 1000):
        check(replace(PROMPTS, query_lens=(20,), context_lens=(1100,), window=window), kernel)
        assert len(kernel.launches.pop()["items"]) > 1
    monkeypatch.setattr("quire.ops.triton.partition.WORTH_SHARING", 0)
    shared = replace(PROMPTS, query_lens=(1, 1, 1), context_lens=(600, 590, 560), shared_prefix=True)
    check(shared, kernel)
    assert {(count, hi) for _, _, count, _, hi, *_ in kernel.launches[0]["items"]} >= {(3, 256)}


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_reaches_no_row_that_does_not_see_it(kernel: Emulator, bad: float) -> None:
    """The kernel reports rows; a second launch, of Triton's kernel, computes them again."""
    fields = {"num_heads": 7, "num_kv_heads": 1, "head_dim": 64, "block_size": 16, "num_blocks": 3}
    spec = ops.AttentionSpec(**fields, dtype=torch.float16)
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 1, 16, 64, generator=gen).half() for _ in range(2))
    q = torch.randn(24, 7, 64, generator=gen).half()
    v[1, 0, 9] = bad  # position 25; rows are at 16 .. 39
    backend = HopperBackend()
    plan = backend.plan(spec, torch.tensor([0, 24]), torch.tensor([40]), torch.tensor([[0, 1, 2]]))
    out = backend.attention(q, ops.PagedKV(k, v), plan)
    assert [bool(row.isfinite().all()) for row in out] == [position < 25 for position in range(16, 40)]
    v[1, 0, 9] = 0.0
    assert (out - backend.attention(q, ops.PagedKV(k, v), plan))[:9].abs().max() < 4e-3
    assert len(kernel.launches) == 2


@pytest.mark.parametrize("whole", [True, False])
def test_a_plan_for_graphs_and_one_made_on_the_device(kernel: Emulator, whole: bool) -> None:
    """Their launches have items with nothing to do, which every warp passes over."""
    step, backend = Step(PROMPTS if whole else replace(PROMPTS, window=40)), HopperBackend()
    step.write(backend)
    plan = backend.make_plan(step.spec, step.num_tokens + 200, step.num_seqs, step.width)
    metadata = (step.query_starts, step.context_lens, step.block_tables)
    if whole:
        plan.update(*metadata)
        plan.covers_all = True
    else:
        plan.update_on_device(step.num_tokens, *metadata)
    step.check_result(backend, *step.attend(backend, plan))
    assert sum(item[0] < 0 for item in kernel.launches[0]["items"]) > 0


def test_cascade(kernel: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared level has many rows a group, so the kernel computes it."""
    monkeypatch.setattr(HopperBackend, "unavailable", lambda self, device: None)
    tree = Tree(
        groups=[[0] * 6, [0, 1, 2, 3, 4, 5]], lens=[[300], [9, 4, 30, 1, 17, 16]], rows=[1, 1, 2, 1, 1, 1],
        block_sizes=[32, 16], head_dim=128, group_size=4, dtype=torch.float16,
    )  # fmt: skip
    tree.check(ops.load("hopper"), "cpu")
    assert len(kernel.launches) == 1
    assert kernel.launches[0]["items"][0][2] == 7


FALLBACKS = {
    "latent": {"latent": True, "head_dim_v": 32},
    "head": {"head_dim": 80},
    "block": {"block_size": 17},
    "cache is torch.int8": {"kv_dtype": torch.int8},
    "torch.float32": {"dtype": torch.float32},
    "65 heads": {"group_size": 65, "num_kv_heads": 1},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"alibi": True},
    "chunks": {"chunk": 7},
    "scale": {"scale": -0.3},
    "16 bytes": {"layout": "padded"},
}


def test_what_the_kernel_lacks_has_a_name() -> None:
    for named, changes in FALLBACKS.items():
        step = Step(replace(PROMPTS, query_lens=(2,), context_lens=(3,), **changes))
        case = step.case
        scores = Scores(case.scale, step.alibi_slopes, case.softcap, step.sinks, case.chunk)
        call = Call(step.q, step.kv, None, scores, step.q, None, (step.q, step.q))
        reason = hopper.plan_reason(step.spec) or hopper.call_reason(call)
        assert named in str(reason), named
    assert "reproducible" in str(hopper.plan_reason(replace(Step(PROMPTS).spec, reproducible=True)))


@pytest.mark.parametrize("changes", [{"head_dim": 80}, {"softcap": 2.0, "alibi": True}], ids=str)
def test_what_the_kernel_lacks_is_computed_by_tritons(
    kernel: Emulator, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Also over a plan that was made for the kernel, whose items have more rows. The reason is told once."""
    hopper._report.cache_clear()
    with caplog.at_level(logging.WARNING, "quire"):
        check(replace(PROMPTS, **changes), kernel, launches=0)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("backend 'hopper' computes prompts with Triton's kernel: ")


def test_it_is_there_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HopperBackend()
    assert backend.unavailable("cpu") == "it serves GPUs of compute capability 9.0, not 'cpu'"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, reason in (((9, 0), None), ((10, 0), "it needs a GPU of compute capability 9.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert str(backend.unavailable("cuda")).startswith(str(reason))
        assert registry.load("auto", "cuda").name == "triton"
    monkeypatch.setattr(hopper.triton, "__version__", "3.7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert str(backend.unavailable("cuda")).endswith("there is 3.7.0")


@pytest.mark.parametrize(("work", "expected"), [(5, (5, 1)), (132, (132, 1)), (133, (132, 2))])
def test_programs_and_their_turns(work: int, expected: tuple[int, int]) -> None:
    assert turns_of(work, 132) == expected


@pytest.mark.long
def test_compiled_for_hopper() -> None:
    """No number of the loop over tiles that all rows see lies in memory; products and copies are the hardware's own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.triton_backend.compiling_prefill"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    kinds = [(one["D"], one["window"], one["GROUPS"]) for one in found]
    assert kinds == [(128, None, 2), (128, 1000, 2), (64, None, 3), (64, 1000, 3)]
    for one in found:
        assert one["shared"] <= 227 * 1024
        assert one["products"] > 0
        assert one["copies"] > 0
        assert one["spills"] <= 48, one  # registers of a thread, outside of the loops
        assert one["loops"]
        for loop in one["loops"]:  # of each warp group: the tiles that all rows see
            assert loop["LDL"] == loop["STL"] == 0, one
            assert loop["HGMMA"] == (16 if one["D"] == 128 else 12)
            assert loop["MUFU"] == 66  # an exponential each, 128 keys of 64 rows over 128 threads, and two factors
            assert loop["HMMA"] == 0
