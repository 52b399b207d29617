"""The probe of bits: the same wherever the bits are, other ones where they differ, and by the right name."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.config import EngineConfig, engine_config
from quire.fingerprint.probe import _numbers, _words, probe
from quire.models import EMBEDDED, load_model
from quire.models.model import Model
from quire.ops import Backend, load, native, unavailable
from quire.ops.cpu.linear import PackedLinear
from tests.marks import of_long_runs, spread
from tests.models.checkpoints import save

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")

ALWAYS = {"linear", "attention", "norm", "rope", "activation", "sampler", "function"}
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
ISAS = [] if native.unavailable() else native.runnable(native.library_path())
CHILD = """
import json, sys, torch
from quire import LLM
from quire.fingerprint.probe import probe
torch.set_num_threads(int(sys.argv[1]))
llm = LLM(num_blocks=64, **json.loads(sys.argv[2]))
print(json.dumps(probe(llm.decoder, llm.backend, llm.config)))
"""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def model_of(directory: Path = EMBEDDED, **options: Any) -> tuple[Model, Backend, EngineConfig]:
    config, backend = engine_config(**options), load()
    return load_model(directory, config, backend), backend, config


def on(isa: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, str]:
    """What is probed on a machine whose best instruction set is that one."""
    library = native.load(isa)
    monkeypatch.setattr(native, "default", lambda: library)
    return probe(*model_of(**options))


# ---------------------------------------------------------------------------------------------------- the inputs


def test_inputs_are_splitmix64() -> None:
    mask, state, expected = 2**64 - 1, 7 << 32, []
    for i in range(1, 6):  # in Python's own integers
        z = (state + i) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        expected.append(z ^ (z >> 31))
    assert _words(7, 5).tolist() == expected


def test_numbers_are_exact_and_of_many_magnitudes() -> None:
    found = _numbers(3, (40, 50), 4.0)
    words = _words(3, 2000).tolist()
    expected = [((word >> 40) - 2**23) * 4.0 / 2 ** (23 + word % 8) for word in words]
    assert found.dtype is torch.float32
    assert found.flatten().tolist() == expected
    magnitudes = {math.frexp(x)[1] for x in expected if x}
    assert len(magnitudes) > 10
    assert -4.0 <= min(expected) < -3.5
    assert 3.5 < max(expected) < 4.0


# -------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [of_long_runs({}), {"quantization": "int4", "kv_cache_dtype": "int8"}, {"dtype": "float32"}], ids=str
)
def test_numbers_of_threads_agree(options: dict[str, Any]) -> None:
    llm = LLM(num_blocks=64, **options)
    torch.set_num_threads(1)
    expected = probe(llm.decoder, llm.backend, llm.config)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert probe(llm.decoder, llm.backend, llm.config) == expected


@pytest.mark.long
@pytest.mark.slow
def test_another_process_agrees() -> None:
    llm = LLM(num_blocks=64)
    command = [sys.executable, "-c", CHILD, "2", json.dumps({})]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout) == probe(llm.decoder, llm.backend, llm.config)


def test_nothing_is_left_of_it() -> None:
    model, backend, config = model_of()
    before = torch.random.get_rng_state()
    first = probe(model, backend, config)
    assert probe(model, backend, config) == first
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
def test_it_depends_on_no_weight(tmp_path: Path) -> None:
    """Else two trainings of one model would seem to be computed otherwise."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    for name, more in (("one", {}), ("other", {"intermediate_size": 96, "num_hidden_layers": 2})):
        save(tmp_path / name, **sizes, **more)
    assert probe(*model_of(tmp_path / "one")) == probe(*model_of(tmp_path / "other"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    spread(
        4,
        ["GPT2", "Bloom", "Gemma2", "Phi3", "Qwen3", "Mixtral", "Qwen3Moe"],
        [{}, {"dtype": "bfloat16", "quantization": "int8", "block_size": 5}],
    ),
)
def test_every_family_is_probed(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, kind)
    expected = set(ALWAYS)
    if "quantization" in options:
        expected.add("integer linear")
    if kind in ("Mixtral", "Qwen3Moe"):
        expected.add("experts")
    model = model_of(tmp_path, **options)
    torch.set_num_threads(1)
    found = probe(*model)
    assert set(found) == expected
    assert len(set(found.values())) == len(found)
    torch.set_num_threads(2)
    assert probe(*model) == found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), spread(2, ["Qwen3_5", "Bamba", "Lfm2"], ["float32", "bfloat16"]))
def test_operators_of_states_are_probed(kind: str, dtype: str, tmp_path: Path) -> None:
    expected = {
        "Qwen3_5": {"convolution", "gated delta", "gated norm"},
        "Bamba": {"convolution", "state space", "gated norm"},
        "Lfm2": {"convolution"},
    }[kind]
    save(tmp_path, kind)
    model = model_of(tmp_path, dtype=dtype)
    torch.set_num_threads(1)
    found = probe(*model)
    assert set(found) == ALWAYS | expected
    assert len(set(found.values())) == len(found)
    torch.set_num_threads(2)
    assert probe(*model) == found


@pytest.mark.slow
def test_blocks_of_any_size_hold_the_same_bits() -> None:
    found = [probe(*model_of(block_size=size)) for size in (1, 5, 16, 100, 256)]
    assert all(one == found[0] for one in found)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(unavailable("triton", DEVICE) is not None, reason="needs triton")
def test_operators_of_a_gpu_are_probed() -> None:
    """Without one they run in Triton's interpreter."""
    config, backend = engine_config(device=DEVICE, reproducible=True), load("triton", DEVICE)
    model = load_model(EMBEDDED, config, backend)
    found = probe(model, backend, config)
    assert set(found) == ALWAYS
    assert found["attention"] != probe(*model_of())["attention"]


# ------------------------------------------------------------------------------------------------------ other bits


@pytest.mark.slow
@pytest.mark.skipif(not {"avx512", "avx512_bf16", "avx2"} <= set(ISAS), reason=f"this machine runs {ISAS} only")
def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def differing(one: str, other: str, **options: Any) -> set[str]:
        a, b = (on(isa, monkeypatch, **options) for isa in (one, other))
        return {kind for kind in a if a[kind] != b[kind]}

    assert differing("avx512", "avx512_bf16", dtype="float32") == set()
    assert differing("avx512", "avx512_bf16", dtype="float16") == set()
    assert {"linear", "attention"} <= differing("avx512", "avx512_bf16", dtype="bfloat16")
    # Norms and activations sum and round otherwise there, which bf16 hides in all numbers but a few.
    expected = {"linear", "attention", "norm", "activation", "sampler"}
    assert expected == differing("avx2", "avx512_bf16", dtype="bfloat16")
    assert {"linear", "attention"} <= differing("avx512_bf16", "amx_emulated", dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_integers_have_the_same_bits_on_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = probe(*model_of(quantization="int4"))
    found = on(isa, monkeypatch, quantization="int4")
    assert found["integer linear"] == expected["integer linear"]
    assert found["function"] == expected["function"]  # torch's own, on one machine


def nudged(x: Tensor) -> Tensor:
    """Its largest number the next one of its dtype."""
    flat = x.view(-1)
    place = flat.abs().argmax()
    bits = flat.view({2: torch.int16, 4: torch.int32}[x.itemsize])
    bits[place] += 1
    return x


@pytest.mark.parametrize(
    ("kind", "operators"),
    [
        ("norm", ["_rms_norm", "_add_rms_norm", "_layer_norm"]),
        ("activation", ["_swiglu", "_gelu"]),
        ("sampler", ["_logsumexp"]),
    ],
)
def test_the_last_bit_of_one_number_is_seen(kind: str, operators: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, backend, config = model_of()
    expected = probe(model, backend, config)
    for name in operators:
        plain: Callable[..., Tensor] = getattr(type(backend), name)
        with monkeypatch.context() as patch:
            patch.setattr(type(backend), name, lambda *args, plain=plain: nudged(plain(*args)))
            found = probe(model, backend, config)
        assert {one for one in found if found[one] != expected[one]} == {kind}, name


@pytest.mark.parametrize(("kind", "operator", "place"), [("attention", "_attention", 5), ("rope", "_rope", 2)])
def test_the_last_bit_is_seen_where_operators_write(
    kind: str, operator: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """place: of the argument that is written."""
    model, backend, config = model_of()
    expected = probe(model, backend, config)
    plain: Callable[..., None] = getattr(type(backend), operator)

    def other(*args: Any) -> None:
        plain(*args)
        nudged(args[place])

    monkeypatch.setattr(type(backend), operator, other)
    found = probe(model, backend, config)
    assert {one for one in found if found[one] != expected[one]} == {kind}


@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        ("convolution", "_convolve"),
        ("gated delta", "_recur"),
        ("state space", "_recur"),
        ("gated norm", "_gated_norm"),
    ],
)
@pytest.mark.parametrize("rows", [202, 8], ids=["prompts", "a chunk and a token"])
def test_the_last_bit_of_a_state_is_seen(
    kind: str, operator: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "Bamba" if kind == "state space" else "Qwen3_5")
    model, backend, config = model_of(tmp_path)
    expected = probe(model, backend, config)
    plain: Callable[..., Tensor] = getattr(type(backend), operator)
    changed = 0

    def other(*args: Any) -> Tensor:
        nonlocal changed
        out = plain(*args)
        if len(out) == rows or kind == "gated norm":
            changed += 1
            return nudged(out)
        return out

    monkeypatch.setattr(type(backend), operator, other)
    found = probe(model, backend, config)
    assert changed
    assert {one for one in found if found[one] != expected[one]} == {kind}


@pytest.mark.slow
def test_what_is_recalled_is_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that another machine stores with another last bit: what a later step recalls of it shows that."""
    save(tmp_path, "Qwen3_5")
    model, backend, config = model_of(tmp_path)
    expected = probe(model, backend, config)
    plain: Callable[..., Tensor] = type(backend)._recur

    def other(*args: Any) -> Tensor:
        cache, plan = args[-2:]
        if plan.num_tokens == 8:  # the second step; the first record that it reads
            nudged(cache.state[int(plan.state_tables[1, 0])])
        return plain(*args)

    monkeypatch.setattr(type(backend), "_recur", other)
    found = probe(model, backend, config)
    assert {one for one in found if found[one] != expected[one]} == {"gated delta"}


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_products_are_seen_for_every_number_of_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, backend, config = model_of()
    expected = probe(model, backend, config)
    plain = PackedLinear.__call__

    def other(linear: PackedLinear, x: Tensor) -> Tensor:
        out = plain(linear, x)
        return nudged(out) if len(x) == rows else out

    monkeypatch.setattr(PackedLinear, "__call__", other)
    found = probe(model, backend, config)
    assert {one for one in found if found[one] != expected[one]} == {"linear"}


@pytest.mark.parametrize("function", ["exp", "cos", "sin", "tanh", "log", "rsqrt", "softmax"])
def test_functions_of_torch_are_seen(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, backend, config = model_of()
    expected = probe(model, backend, config)
    plain = getattr(torch, function)
    monkeypatch.setattr(torch, function, lambda x, *args: torch.nextafter(plain(x, *args), torch.zeros_like(x)))
    found = probe(model, backend, config)
    assert "function" in {one for one in found if found[one] != expected[one]} <= {"function", "sampler"}
