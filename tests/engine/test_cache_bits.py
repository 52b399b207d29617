"""The same bits whatever the cache does: {swap, recompute, no preemption} x {prefix cache on, off} x chunks x batches.

Tokens and logprobs are compared without any tolerance with those of each request computed alone, in one piece, without
a prefix cache. Prompts have stems in common, some have two samples, and the pools of the preempting runs are too small.
"""

from __future__ import annotations

import random
from array import array
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.models import EMBEDDED
from quire.ops import native
from quire.request import Request, SampleGroup, SamplingParams
from tests.engine.runs import whole
from tests.engine.stateful import stateful_engine
from tests.marks import of_long_runs
from tests.models.checkpoints import engine, save

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")]

NEW_TOKENS = 8
VOCABULARY = 500
SHAPES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "embedded": ("", torch.bfloat16, {}),
    "llama, groups of 3, bf16": (
        "Llama",
        torch.bfloat16,
        {"vocab_size": VOCABULARY, "hidden_size": 96, "num_attention_heads": 6, "head_dim": 32},
    ),
    "gemma2, windows, fp32": (
        "Gemma2",
        torch.float32,
        {"vocab_size": VOCABULARY, "hidden_size": 48, "num_attention_heads": 4, "head_dim": 24, "sliding_window": 19,
         "query_pre_attn_scalar": 24},
    ),
    "qwen3 moe, one layer dense, bf16": (
        "Qwen3Moe",
        torch.bfloat16,
        {"vocab_size": VOCABULARY, "num_experts": 12, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
    ),
    "embedded, int8 cache": ("", torch.bfloat16, {}),
    "deepseek, int8 cache": ("DeepseekV3", torch.bfloat16, {"vocab_size": VOCABULARY}),
    "states and attention, fp32": ("stateful", torch.float32, {}),
    "states and attention, bf16": ("stateful", torch.bfloat16, {}),
    "qwen3_5, fp32": ("Qwen3_5", torch.float32, {"vocab_size": VOCABULARY}),
    "qwen3 next, bf16": ("Qwen3Next", torch.bfloat16, {"vocab_size": VOCABULARY, "mlp_only_layers": [1]}),
    "granite with states, bf16": ("GraniteMoeHybrid", torch.bfloat16, {"vocab_size": VOCABULARY}),
    "lfm2, fp32": ("Lfm2", torch.float32, {"vocab_size": VOCABULARY}),
    "glm 5, sparse, bf16": (
        "GlmMoeDsa", torch.bfloat16, {"vocab_size": VOCABULARY, "indexer_types": ["full", "shared", "full"]}
    ),
    "falcon h1, bf16": ("FalconH1", torch.bfloat16, {"vocab_size": VOCABULARY}),
    "nemotron h, fp32": ("NemotronH", torch.float32, {"vocab_size": VOCABULARY}),
    "minimax, bf16": ("MiniMax", torch.bfloat16, {"vocab_size": VOCABULARY}),
    "jamba, bf16": ("Jamba", torch.bfloat16, {"vocab_size": VOCABULARY}),
    "kimi linear, fp32": ("KimiLinear", torch.float32, {"vocab_size": VOCABULARY}),
    "recurrent gemma, bf16": (
        "RecurrentGemma",
        torch.bfloat16,
        {"vocab_size": VOCABULARY, "attention_window_size": 64},
    ),
    "olmo hybrid, bf16": ("OlmoHybrid", torch.bfloat16, {"vocab_size": VOCABULARY}),
    "lfm3, bf16": ("Lfm3", torch.bfloat16, {"vocab_size": VOCABULARY}),
    "ling 3, fp32": ("BailingHybrid", torch.float32, {"vocab_size": VOCABULARY}),
    "zamba, fp32": ("Zamba", torch.float32, {"vocab_size": VOCABULARY}),
    "zamba 2, bf16": ("Zamba2", torch.bfloat16, {"vocab_size": VOCABULARY}),
    "a.x k2, sparse, bf16": ("AXK2", torch.bfloat16, {"vocab_size": VOCABULARY}),
}  # fmt: skip
# One of each kind of cache; with --long all of them. `tests.engine.differential` has them all, too.
FEW = ("embedded", "gemma2, windows, fp32", "deepseek, int8 cache", "qwen3 next, bf16", "glm 5, sparse, bf16")
Bits = dict[str, list[tuple[int, float, tuple[tuple[int, float], ...]]]]


def asked(count: int) -> list[list[Request]]:
    """That many prompts and the samples of each, the same ones every time."""
    rng = random.Random(5)
    stems = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(3)]
    groups = []
    for i in range(64):
        tokens = rng.choice(stems)[: rng.randint(1, 40)] + [
            rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 20))
        ]
        temperature = rng.choice([0.0, 0.9])
        group = SampleGroup()
        for sample in range(1 + (i % 8 == 2)):
            params = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2, seed=i)
            request = Request(f"{i}-{sample}", array("i", tokens), len(tokens), params, sample)
            group.members.append(request)
        if len(group.members) > 1:
            for request in group.members:
                request.group = group
        groups.append(group.members)
    return groups[:count]


def elder() -> Request:
    """A request that comes before another one and grows at its cost."""
    params = SamplingParams(temperature=0.0, max_tokens=34, ignore_eos=True)
    return Request("elder", array("i", range(60)), 60, params)


def bits(engine: Engine, requests: list[Request]) -> Bits:
    logprobs = {name: [event.logprobs for event in events] for name, events in whole(engine, requests).items()}
    return {name: [(one.token, one.logprob, one.top) for one in found if one] for name, found in logprobs.items()}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path | torch.dtype, str]:
    """Its directory, or the dtype of one with states; and the dtype of its cache."""
    kind, dtype, changes = SHAPES[request.param]
    if kind == "stateful":
        return dtype, "auto"
    kv_dtype = "int8" if request.param.endswith("int8 cache") else "auto"
    if not kind:
        return EMBEDDED, kv_dtype
    directory = tmp_path_factory.mktemp("model")
    save(directory, kind, dtype, **changes)
    return directory, kv_dtype


def built(model: Path | torch.dtype, **options: Any) -> Engine:
    return engine(model, **options) if isinstance(model, Path) else stateful_engine(model, **options)


@cache
def lone(directory: Path | torch.dtype, kv_dtype: str) -> Engine:
    return built(directory, num_blocks=200, block_size=4, enable_prefix_caching=False, kv_cache_dtype=kv_dtype)


@cache
def alone(directory: Path | torch.dtype, kv_dtype: str, prompt: int) -> Bits:
    """The requests of one prompt, each alone."""
    found: Bits = {}
    for request in asked(prompt + 1)[prompt]:
        request.group = None
        found |= bits(lone(directory, kv_dtype), [request])
    return found


def expected(directory: Path | torch.dtype, kv_dtype: str, count: int) -> Bits:
    """Each request alone, of that many prompts."""
    return {name: one for i in range(count) for name, one in alone(directory, kv_dtype, i).items()}


BATCH = 12  # requests of the largest batch, without --long; with it 64 too


def combinations() -> list[Any]:
    """For the embedded model each two of the values meet; some others have one each, with a value in turn."""
    found = []
    ways = product(enumerate(SHAPES), enumerate(["none", "recompute", "swap"]), [True, False],
                   enumerate([16, 64, 2048]), [(0, 1), (1, 8), (2, BATCH), (2, 64)])  # fmt: skip
    for (s, shape), (i, preemption), caching, (j, chunk), (k, batch) in ways:
        values = (shape, preemption, caching, chunk, batch)
        usual = (i + j + k) % 3 == 0 if shape == "embedded" else ((i + j - s) % 3, (k - i - s // 3) % 3) == (0, 0)
        usual = usual and caching == (i != j) and batch <= BATCH and (shape == "embedded" or i == s % 3)
        found.append(values if usual and shape in FEW else of_long_runs(*values))
    return found


@pytest.mark.parametrize(("model", "preemption", "caching", "chunk", "batch"), combinations(), indirect=["model"])
def test_the_same_bits(
    model: tuple[Path | torch.dtype, str], preemption: str, caching: bool, chunk: int, batch: int
) -> None:
    directory, kv_dtype = model
    blocks = 2_000 if preemption == "none" else 32 if batch == 64 else 24
    served = built(
        directory,
        num_blocks=blocks,
        kv_cache_dtype=kv_dtype,
        block_size=4,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
        preemption="recompute" if preemption == "none" else preemption,
        swap_space="8MiB" if preemption == "swap" else None,
    )
    moved: list[object] = []
    served.listen(lambda event: moved.append(event) if type(event).__name__ == "BlocksSwappedIn" else None)
    groups, found = asked(3 if batch == 1 else batch), {}
    if batch == 1:
        for members in groups:
            elders = [] if preemption == "none" else [elder()]  # somebody must take their blocks
            found |= bits(served, [*elders, *members])
            found.pop("elder", None)
    else:
        found = bits(served, [request for members in groups for request in members])
    wanted = expected(*model, len(groups))
    for request_id, got in found.items():
        assert len(got) == NEW_TOKENS
        assert got == wanted[request_id], request_id
    assert (served.scheduler.num_preemptions > 0) == (preemption != "none")
    assert bool(moved) == (preemption == "swap")
    if served.scheduler.manager.state_groups:  # of 12 prompts no two have a whole piece in common; of 64 a few do
        found_some = caching and batch > BATCH and chunk == 16 and preemption == "none"
    else:  # else the elder takes everything
        found_some = caching and (batch > 1 or preemption == "none")
    if found_some:
        assert served.scheduler.manager.hits.cached_tokens > 0
