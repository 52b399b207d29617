"""A value that is not finite stays in its own request: others get the bits that they would get alone.

Random models have a token, POISON, whose embedding is not finite, or makes a key overflow later. It is planted at every
position of a prompt, in steps of several sizes, with and without windows. What others share with that prompt is
compared without any tolerance, and no block in the prefix cache may hold a value that is not finite.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.ops import native
from quire.request import Event, Request, SampleGroup, SamplingParams
from tests.engine.runs import drain
from tests.marks import of_long_runs
from tests.models.checkpoints import engine, save

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")]

BLOCK = 4
POISON = 7
STEM = [11 + i % 37 for i in range(26)]
KEY = 0.0  # instead of a value: the embedding is finite, and only a key of the last layer overflows
PLAIN = {"tie_word_embeddings": False, "vocab_size": 60, "num_hidden_layers": 2}
SHAPES: dict[str, tuple[str, torch.dtype, float, dict[str, Any]]] = {
    "fp16, embedding overflows": ("Llama", torch.float16, float("inf"), {}),
    "fp16, a key overflows above": ("Llama", torch.float16, KEY, {}),
    "bf16, NaN": ("Llama", torch.bfloat16, float("nan"), {}),
    "fp32, windows": ("Mistral", torch.float32, float("inf"), {"sliding_window": 7}),
    "bf16, windows in every other layer": (
        "Gemma2",
        torch.bfloat16,
        float("-inf"),
        {"sliding_window": 9, "hidden_size": 48, "num_attention_heads": 4, "head_dim": 12, "query_pre_attn_scalar": 12},
    ),
    "bf16, experts": ("Qwen3Moe", torch.bfloat16, float("nan"), {"num_experts": 6, "num_experts_per_tok": 2}),
}
Outcome = list[Event]


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, dtype, value, changes = SHAPES[request.param]
    directory = tmp_path_factory.mktemp("model")
    made = save(directory, kind, dtype, **PLAIN, **changes)
    embedding = made.get_input_embeddings().weight.data
    if value == KEY:
        direction = torch.nn.functional.normalize(embedding[POISON].float(), dim=0)
        embedding[POISON] = 1000 * direction
        made.model.layers[1].self_attn.k_proj.weight.data[0] += 12_000 * direction
    else:
        embedding[POISON] = value
    made.save_pretrained(directory)
    return directory


def asked(name: str, tokens: list[int]) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2)
    return Request(name, array("i", tokens), len(tokens), params)


def outcomes(engine: Engine, *requests: Request) -> list[Outcome]:
    """What each of them got: its tokens and logprobs, or its error."""
    found = [[event._replace(request_id="") for event in events] for events in drain(engine, requests).values()]
    check_published_blocks(engine)
    return found


def check_published_blocks(engine: Engine) -> None:
    for g, index in enumerate(engine.scheduler.manager.indexes):
        blocks = list(index.by_block)
        for kv in engine.runner.cache.layers(g):
            assert kv.k[blocks].isfinite().all()
            assert kv.v[blocks].isfinite().all()


def poisoned(position: int) -> list[int]:
    return [*STEM[:position], POISON, *STEM[position:], *range(20, 29)]


@pytest.mark.parametrize("chunk", [of_long_runs(BLOCK), 7, of_long_runs(512)])
def test_it_hurts_no_other_request(model: Path, chunk: int, long: bool) -> None:
    lone = engine(model, num_blocks=200, block_size=BLOCK, enable_prefix_caching=False)
    served = engine(model, num_blocks=200, block_size=BLOCK, max_num_batched_tokens=chunk)
    clean = [*STEM, 40, 41, 42]
    [want] = outcomes(lone, asked("clean", clean))
    assert [event.error for event in want] == [None] * 2
    cached, positions = 0, range(0, len(STEM) + 1, 1 if long else 3)  # at each place of a block, and of a chunk of 7
    for position in positions:
        tokens = poisoned(position)
        [own] = outcomes(lone, asked("poisoned", tokens))
        first = outcomes(served, asked("poisoned", tokens), asked("clean", clean))
        assert first == [own, want], f"with the poison at {position}"
        again = asked("clean", clean)
        assert outcomes(served, again) == [want], f"after one with the poison at {position}"
        assert outcomes(served, asked("poisoned", tokens)) == [own], f"the poisoned one again, at {position}"
        cached += again.num_prompt and (again.cache.prefix_report.num_cached if again.cache.prefix_report else 0)
        served.reset_prefix_cache()
    assert cached > (len(positions) - 1) * 16  # what the clean request had computed was shared


def test_what_comes_before_it_is_shared(model: Path) -> None:
    served = engine(model, num_blocks=200, block_size=BLOCK, max_num_batched_tokens=16)
    outcomes(served, asked("poisoned", poisoned(10)))
    later = asked("clean", STEM)
    outcomes(served, later)
    assert later.cache.prefix_report is not None
    assert later.cache.prefix_report.num_cached == 8  # two of the blocks before the poison; the third one holds it


def test_a_sample_that_forked_from_it_publishes_nothing_either(tmp_path: Path) -> None:
    """With windows a request can outlive what overflowed in it, and so can those that share its blocks."""
    made = save(tmp_path, "Mistral", torch.float32, sliding_window=5, **PLAIN)
    made.get_input_embeddings().weight.data[POISON] = float("inf")
    made.save_pretrained(tmp_path)
    served = engine(tmp_path, num_blocks=200, block_size=BLOCK)
    tokens = [3, POISON, *range(20, 48)]
    [alone] = outcomes(served, asked("alone", tokens))
    assert alone[-1].error is None  # it ended as it should
    assert not any(index.by_block for index in served.scheduler.manager.indexes)
    samples = [asked("first", tokens), asked("second", tokens)]
    samples[0].group = samples[1].group = SampleGroup(samples)
    assert outcomes(served, *samples) == [alone, alone]
    assert not any(index.by_block for index in served.scheduler.manager.indexes)


def test_nobody_waits_for_blocks_that_will_not_be_shared(model: Path) -> None:
    """As an equal prompt otherwise waits for the first one, until that has computed them all."""
    for token, computed in ((POISON, 10), (STEM[0], 0)):
        served = engine(model, num_blocks=200, block_size=BLOCK, max_num_batched_tokens=20)
        first, second = (asked(name, [token, *STEM, 55, 56, 57]) for name in ("first", "second"))
        served.add(first)
        served.add(second)
        served.step()
        assert first.cache.nonfinite_at == (0 if token == POISON else None)
        served.step()
        assert second.cache.num_computed == computed
