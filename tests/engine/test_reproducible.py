"""The same request gets the same bits, whatever runs beside it and however it is cut into steps.

What is compared are tokens and logprobs as they come out, without any tolerance. Six requests are watched: short and
long ones, greedy and sampled; one of them is longer than a split of the keys (1,024 tokens).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import ops
from quire.engine.engine import Engine
from quire.ops import native
from quire.request import Request, SamplingParams
from tests.engine.runs import whole
from tests.marks import of_long_runs
from tests.models.checkpoints import engine, save

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")]

VOCABULARY = 1_003
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, groups of 3": (
        "Llama",
        {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "head_dim": 64, "num_hidden_layers": 2,
         "max_position_embeddings": 1_536},
    ),
    "gpt2": ("GPT2", {"n_embd": 160, "n_layer": 2, "n_head": 4, "n_positions": 1_536}),
    "gemma2, windows and softcaps": (
        "Gemma2",
        {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 24, "sliding_window": 50,
         "max_position_embeddings": 1_536, "query_pre_attn_scalar": 24},
    ),
    "mixtral": (
        "Mixtral",
        {"hidden_size": 128, "intermediate_size": 200, "num_attention_heads": 4, "head_dim": 32,
         "num_hidden_layers": 2, "max_position_embeddings": 1_536},
    ),
    "bloom, alibi": ("Bloom", {"hidden_size": 80, "n_layer": 2, "n_head": 5}),
    "gpt_neox, branches in parallel": (
        "GPTNeoX",
        {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1_536},
    ),
    "olmo2, no norms of inputs": ("Olmo2", {"num_hidden_layers": 2, "max_position_embeddings": 1_536}),
}  # fmt: skip
Bits = list[tuple[int, float, tuple[tuple[int, float], ...]]]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def watched() -> list[Request]:
    rng = random.Random(1)
    sampling = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.01},
        {"temperature": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.8},
    )
    requests = []
    for i, (length, options) in enumerate(zip((1, 16, 33, 100, 257, 1_060), sampling, strict=True)):
        params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=1, seed=i, **options)
        tokens = array("i", [rng.randrange(VOCABULARY) for _ in range(length)])
        requests.append(Request(f"watched {i}", tokens, length, params))
    return requests


def others(count: int) -> list[Request]:
    rng = random.Random(2)
    requests = []
    for i in range(count):
        length = rng.randint(1, 60)
        params = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True)
        tokens = array("i", [rng.randrange(VOCABULARY) for _ in range(length)])
        requests.append(Request(f"other {i}", tokens, length, params))
    return requests


def bits(engine: Engine, requests: list[Request]) -> dict[str, Bits]:
    """Tokens and logprobs, the prompts' too, of the watched requests."""
    found: dict[str, Bits] = {}
    for name, events in whole(engine, requests).items():
        if name.startswith("watched"):
            shown = (one for event in events for one in (*event.prompt_logprobs, event.logprobs) if one is not None)
            found[name] = [(one.token, one.logprob, one.top) for one in shown]
    return found


def alone(directory: Path, dtype: str) -> dict[str, Bits]:
    found: dict[str, Bits] = {}
    lone = engine(directory, dtype=dtype, num_blocks=200, enable_prefix_caching=False)
    for request in watched():
        found |= bits(lone, [request])
    return found


def shuffled(requests: list[Request]) -> list[Request]:
    random.Random(3).shuffle(requests)
    return requests


USUAL = (("llama, groups of 3", "bfloat16"),)  # of others `tests.engine.differential` has shorter requests


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [one if one in USUAL else of_long_runs(*one) for one in product(SHAPES, ("bfloat16", "float32"))],
)
def test_the_bits_of_a_request(tmp_path: Path, shape: str, dtype: str, long: bool) -> None:
    assert ops.load().name == "cpu"
    kind, changes = SHAPES[shape]
    save(tmp_path, kind, vocab_size=VOCABULARY, **changes)
    torch.set_num_threads(1)
    expected = alone(tmp_path, dtype)
    assert all(len(found) >= 8 for found in expected.values())

    def run(count: int = 0, threads: int = 1, **options: Any) -> int:
        torch.set_num_threads(threads)
        served = engine(tmp_path, dtype=dtype, **({"num_blocks": 700} | options))
        found = bits(served, shuffled(watched() + others(count)))
        for name, one in expected.items():
            differing = [i for i, (a, b) in enumerate(zip(one, found[name], strict=True)) if a != b]
            assert not differing, f"{name} with {options}, {threads} threads: entries {differing} differ"
        return served.scheduler.num_preemptions

    assert run(count=12, num_blocks=76, max_num_batched_tokens=100) > 0
    run(count=10, threads=2, max_num_batched_tokens=300)
    if long:
        run(count=58)
        run(max_num_batched_tokens=7)
        run(count=10, max_num_batched_tokens=33)
        run(count=10, block_size=64, num_blocks=200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_requests_with_a_common_prompt(tmp_path: Path, dtype: str) -> None:
    """Twelve requests that begin with the same 600 tokens: the engine reads their blocks once, and it does not show."""
    kind, changes = SHAPES["llama, groups of 3"]
    save(tmp_path, kind, vocab_size=VOCABULARY, **changes)
    rng = random.Random(5)
    prompt = [rng.randrange(VOCABULARY) for _ in range(600)]
    tails = [[rng.randrange(VOCABULARY) for _ in range(1 + 3 * i)] for i in range(12)]

    def requests() -> list[Request]:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3)
        return [Request(f"watched {i}", array("i", prompt + x), 600 + len(x), params) for i, x in enumerate(tails)]

    expected: dict[str, Bits] = {}
    for request in requests():
        lone = engine(tmp_path, dtype=dtype, num_blocks=60, enable_prefix_caching=False)
        expected |= bits(lone, [request])
        assert lone.runner.plans[0].num_phases == 1
    together = engine(tmp_path, dtype=dtype, num_blocks=100)
    found = bits(together, requests())
    assert together.runner.plans[0].num_phases == 2, "the last step read nothing once for all"
    assert found == expected


@pytest.mark.skipif(torch.get_num_threads() < 16, reason="needs 16 threads; the test above runs with 1 and 2")
def test_the_bits_with_16_threads(tmp_path: Path) -> None:
    kind, changes = SHAPES["llama, groups of 3"]
    save(tmp_path, kind, vocab_size=VOCABULARY, **changes)
    torch.set_num_threads(1)
    expected = alone(tmp_path, "bfloat16")
    torch.set_num_threads(16)
    assert bits(engine(tmp_path, dtype="bfloat16", num_blocks=700), watched() + others(40)) == expected
