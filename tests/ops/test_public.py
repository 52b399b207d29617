"""The public interface: load, paged_prefill and paged_decode, on the examples that the seeds of this project give."""

from __future__ import annotations

import importlib
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from quire.ops import registry
from tests.marks import spread
from tests.ops import dense
from tests.ops.cases import Case, Step, half_dtype
from tests.ops.conftest import checked_once
from tests.ops.small_caches import check, random_cache, random_rows, tables_of

PREFILL_STARTS = [0, 10, 30, 45, 70]  # four sequences of 10, 20, 15 and 25 query rows


# ------------------------------------------------------------------------------------------- the seeds' examples


@pytest.mark.parametrize(  # 8 KV heads: grouped queries; 1: one for all
    ("history", "num_kv_heads", "alibi", "int_dtype"),
    spread(2, [0, 19], [8, 1], [False, True], [torch.int64, torch.int32]),
)
def test_paged_prefill_of_the_seed(backend, device, history, num_kv_heads, alibi, int_dtype):
    """cum_seq_lens_q [0, 10, 30, 45, 70], 32 heads of 128 in fp16, blocks of 16, scale 1/sqrt(128)."""
    dtype, lens = half_dtype(backend), [n + history for n in (10, 20, 15, 25)]
    tables, num_blocks = tables_of(lens, 16, 8)
    shape = (num_blocks, num_kv_heads, 16, 128)
    k_cache, v_cache = (random_cache(shape, tables, lens, dtype, device, seed) for seed in (1, 2))
    q = random_rows((70, 32, 128), dtype, device)
    slopes = (2.0 ** -(torch.arange(32) / 4 + 1)).to(device) if alibi else None
    metadata = [torch.tensor(x, dtype=int_dtype, device=device) for x in (tables, lens, PREFILL_STARTS)]
    scale = 1 / math.sqrt(128)
    out = ops.paged_prefill(q, k_cache, v_cache, *metadata, slopes, scale, backend=backend.name)
    check(out, q, k_cache, v_cache, tables, lens, PREFILL_STARTS, scale=scale, alibi_slopes=slopes)


@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64])
def test_paged_decode_of_the_seed(backend, device, num_kv_heads, alibi, int_dtype):
    """block_table [[2, -1, -1, -1], [0, 1, -1, -1], [3, 5, 6, -1]], cache_seqlens [30, 32, 70], blocks of 32."""
    tables, lens = [[2, -1, -1, -1], [0, 1, -1, -1], [3, 5, 6, -1]], [30, 32, 70]
    shape = (8, num_kv_heads, 32, 40)
    k_cache, v_cache = (random_cache(shape, tables, lens, torch.float32, device, seed) for seed in (1, 2))
    q = random_rows((3, 8, 40), torch.float32, device)
    slopes = torch.linspace(-0.5, 1, 8, device=device) if alibi else None
    metadata = [torch.tensor(x, dtype=int_dtype, device=device) for x in (tables, lens)]
    out = ops.paged_decode(q, k_cache, v_cache, *metadata, slopes, backend=backend.name)
    check(out, q, k_cache, v_cache, tables, lens, [0, 1, 2, 3], alibi_slopes=slopes)


def test_they_equal_a_plan_and_attention(backend, device):
    step = Step(Case(query_lens=(4, 1, 9), context_lens=(20, 33, 9), alibi=True, scale=0.2), device)
    direct, _ = step.attend(backend, step.write(backend))
    metadata = (step.block_tables, step.context_lens)
    whole = ops.paged_prefill(
        step.q, step.kv.k, step.kv.v, *metadata, step.query_starts, step.alibi_slopes, 0.2, backend=backend.name
    )
    assert torch.equal(whole, direct)
    last = step.query_starts[1:].long() - 1
    decoded = ops.paged_decode(
        step.q[last.to(device)], step.kv.k, step.kv.v, *metadata, step.alibi_slopes, 0.2, backend=backend.name
    )
    dense.check_close("decode", decoded, direct[last.to(device)], 1e-5)


# ---------------------------------------------------------------------------------------------- in plain Python


def online_attention(q: list[float], keys: list[list[float]], values: list[list[float]], scale: float) -> list[float]:
    """One row's attention, key by key, in the arithmetic that every textbook gives (Milakov & Gimelshein 2018)."""
    top, total, mix = -math.inf, 0.0, [0.0] * len(values[0])
    for key, value in zip(keys, values, strict=True):
        score = scale * sum(a * b for a, b in zip(q, key, strict=True))
        new_top = max(top, score)
        correction, weight = math.exp(top - new_top), math.exp(score - new_top)
        total = total * correction + weight
        mix = [m * correction + weight * x for m, x in zip(mix, value, strict=True)]
        top = new_top
    return [m / total for m in mix]


def test_a_plain_loop_gives_the_same(backend, device):
    tables, lens = [[3, 1], [0, -1]], [7, 2]
    caches = [random_cache((4, 2, 4, 3), tables, lens, torch.float32, device, seed) for seed in (1, 2)]
    q = random_rows((2, 4, 3), torch.float32, device)
    out = ops.paged_decode(q, *caches, torch.tensor(tables), torch.tensor(lens), backend=backend.name)
    for s in range(2):
        k, v = (dense.gather(cache, tables[s], lens[s]) for cache in caches)
        for head in range(4):
            kv_head = head // 2
            want = online_attention(q[s, head].tolist(), k[:, kv_head].tolist(), v[:, kv_head].tolist(), 3**-0.5)
            dense.check_close("out", out[s, head], torch.tensor(want, dtype=torch.float64), 1e-5)


# -------------------------------------------------------------------------------------------------- refusals


def good_call(device: str) -> dict[str, Tensor]:
    return {
        "q": torch.zeros(3, 4, 8, device=device),
        "k_cache": torch.zeros(5, 2, 4, 8, device=device),
        "v_cache": torch.zeros(5, 2, 4, 8, device=device),
        "block_tables": torch.tensor([[0, 1], [2, 3]]),
        "seq_lens": torch.tensor([5, 8]),
        "cum_seq_lens_q": torch.tensor([0, 1, 3]),
    }


@checked_once
@pytest.mark.parametrize(
    ("name", "value", "error", "fragments"),
    [
        ("q", torch.zeros(3, 4), BadShape, ["q", "(3, 4)", "3 dimensions"]),
        ("q", torch.zeros(4, 4, 8), BadShape, ["q", "(4, 4, 8)", "(3, 4, 8)"]),
        ("q", torch.zeros(3, 3, 8), BadValue, ["num_heads", "3", "2"]),
        ("q", torch.zeros(3, 4, 9), BadShape, ["k_cache has shape", "8", "9"]),
        ("k_cache", torch.zeros(5, 2, 8), BadShape, ["k_cache", "(5, 2, 8)", "4 dimensions"]),
        ("v_cache", torch.zeros(5), BadShape, ["v_cache", "(5,)", "4 dimensions"]),
        ("v_cache", torch.zeros(4, 2, 4, 8), BadShape, ["v", "(4, 2, 4, 8)", "(5, 2, 4, 8)"]),
        ("k_cache", torch.zeros(5, 2, 4, 8).double(), BadDtype, ["k_cache", "float64", "float32"]),
        ("v_cache", torch.zeros(5, 2, 4, 8).half(), BadDtype, ["v_cache", "float16", "float32"]),
        ("block_tables", torch.tensor([[0, 1], [2, 5]]), BadValue, ["block_tables[1, 1]", "5", "0..4"]),
        ("seq_lens", torch.tensor([5, 9]), BadValue, ["seq_lens[1]", "9", "sequence 1"]),
        ("cum_seq_lens_q", torch.tensor([0, 3]), BadShape, ["cum_seq_lens_q has 2", "S + 1"]),
        ("seq_lens", [5, 8], BadDtype, ["seq_lens is a list"]),
        ("block_tables", torch.tensor([[0.5, 1], [2, 3]]), BadDtype, ["block_tables has dtype torch.float32"]),
    ],
)
def test_paged_prefill_refuses(backend, device, name, value, error, fragments):
    call = good_call(device)
    ops.paged_prefill(**call, backend=backend.name)
    call[name] = value.to(device) if name in ("q", "k_cache", "v_cache") else value
    with pytest.raises(error) as raised:
        ops.paged_prefill(**call, backend=backend.name)
    assert all(fragment in str(raised.value) for fragment in fragments), raised.value


@checked_once
def test_paged_decode_wants_one_row_a_sequence(backend, device):
    call = good_call(device)
    del call["cum_seq_lens_q"]
    call["context_lens"] = call.pop("seq_lens")
    with pytest.raises(BadShape, match="q has 3 rows and context_lens 2 entries"):
        ops.paged_decode(**call, backend=backend.name)


# ------------------------------------------------------------------------------------------------------ load


def test_load_names_what_exists():
    with pytest.raises(Unsupported) as raised:
        ops.load("nope")
    assert all(name in str(raised.value) for name in ("'nope'", "auto", *ops.BACKENDS))


def test_auto_takes_the_first_backend_that_can(monkeypatch):
    never = types.SimpleNamespace(unavailable=lambda device: f"no {device} unit")
    first, second = (types.SimpleNamespace(unavailable=lambda device: None) for _ in range(2))
    for name, backend in (("never", never), ("first", first), ("second", second)):
        monkeypatch.setitem(sys.modules, f"quire_{name}", types.SimpleNamespace(BACKEND=backend))
    monkeypatch.setattr(registry, "BACKENDS", {name: f"quire_{name}" for name in ("never", "first", "second")})
    assert ops.load("auto") is first
    assert ops.load("second") is second
    assert ops.unavailable("never", "cpu") == "no cpu unit"
    with pytest.raises(Unsupported, match="there is no attention backend 'nope'"):
        ops.unavailable("nope")
    with pytest.raises(Unsupported, match="never: no cpu unit"):
        ops.load("never")
    monkeypatch.setattr(registry, "BACKENDS", {"never": "quire_never"})
    with pytest.raises(Unsupported, match="never: no cuda unit"):
        ops.load("auto", "cuda")


def test_a_backend_is_known_by_its_name(backend):
    assert importlib.import_module(ops.BACKENDS[backend.name]).BACKEND is backend


OPERATORS_ALONE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in set(sys.argv[1:]):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from quire import ops
print(ops.load("reference").name)
"""


@pytest.mark.slow
def test_the_operators_need_torch_and_numpy_alone():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    listed = project[project.index("dependencies = [") : project.index("[project.optional-dependencies]")]
    packages = {name.replace("-", "_") for name in re.findall(r'^    "([\w-]+)', listed, re.MULTILINE)}
    others = packages - {"torch", "numpy", "typing_extensions"} | {"yaml", "triton"}
    assert {"transformers", "fastapi", "typer", "tokenizers"} < others
    command = [sys.executable, "-c", OPERATORS_ALONE, *others]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "reference\n", done.stderr[-2000:]
