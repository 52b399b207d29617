"""LLM.embed: transformers' last hidden state, of length 1; one prompt beside others, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.frontend.embedding import normalised
from tests.models.checkpoints import save

PROMPTS = [[5], list(range(2, 50)), [*range(2, 50), 3, 3], [9] * 16, list(range(60, 30, -1))]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=256)


def vectors(llm: LLM, prompts: Any, **options: Any) -> list[list[float]]:
    outputs = llm.embed(prompts, use_tqdm=False, **options)
    assert all(output.error is None for output in outputs)
    return [output.outputs.embedding for output in outputs]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Bloom", "Gemma2"])
def test_embeddings_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs = save(tmp_path, kind)
    states = [theirs(torch.tensor([p]), output_hidden_states=True).hidden_states[-1][0, -1] for p in PROMPTS]
    for options in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 3, "block_size": 4}):
        llm = LLM(str(tmp_path), num_blocks=64, **options)
        for _ in range(2):  # then from the cache
            for found, state in zip(vectors(llm, PROMPTS), states, strict=True):
                expected = torch.nn.functional.normalize(state, dim=0)
                torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)
        for found, state in zip(vectors(llm, PROMPTS, dimensions=5), states, strict=True):
            expected = torch.nn.functional.normalize(state[:5], dim=0)
            torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def test_the_forms_of_a_prompt_are_one(llm: LLM) -> None:
    text = "def fibonacci("
    tokens = llm.tokenizer.encode(text)
    [expected] = llm.embed(text)
    assert (expected.prompt, expected.prompt_token_ids, expected.error) == (text, tokens, None)
    assert len(expected.outputs.embedding) == llm.hidden_size
    assert math.fsum(x * x for x in expected.outputs.embedding) == pytest.approx(1.0, abs=1e-6)
    assert all(x == float(np.float32(x)) for x in expected.outputs.embedding)
    forms: list[Any] = [[text], tokens, [tokens], {"prompt_token_ids": tokens}, [{"prompt": text, "cache_salt": "s"}]]
    for form in forms:
        assert vectors(llm, form) == [expected.outputs.embedding]
    assert llm.embed(tokens)[0].prompt is None
    assert llm.embed([]) == []


def test_the_prefix_cache_is_used_and_told_of(llm: LLM) -> None:
    text = "import collections\nimport functools\n" * 8
    llm.reset_prefix_cache()
    first, second = llm.embed(text), llm.embed(text)
    full = len(first[0].prompt_token_ids) // 16 * 16
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, full)
    assert first[0].outputs == second[0].outputs
    [salted] = llm.embed({"prompt": text, "cache_salt": "mine"})
    assert salted.num_cached_tokens == 0
    [generated] = llm.generate(text, SamplingParams(max_tokens=1))
    assert generated.num_cached_tokens == full


def test_the_longest_prompt(llm: LLM) -> None:
    longest = llm.engine.scheduler.max_model_len
    assert len(vectors(llm, [[5] * longest])[0]) == llm.hidden_size
    with pytest.raises(RequestError, match=f"a prompt of {longest + 1} tokens; with max_model_len={longest} a prompt"):
        llm.embed([[5] * 8, [5] * (longest + 1)])
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[]], {}, "has an empty prompt; it needs at least one token"),
        (3, {}, "prompts is a int; give a text, a list of token ids, or a list of these"),
        ([3.5], {}, "a prompt is a float; give a text or a list of token ids"),
        ([[1, -1]], {}, "prompt token 1 is -1"),
        ([[10**6]], {}, r"prompt\[0\] is 1000000; token ids of this model lie in 0..2047"),
        ({"text": "a"}, {}, "a prompt has the keys"),
        ("a", {"dimensions": 0}, "dimensions is 0; it must be in 1..256"),
        ("a", {"dimensions": 257}, "dimensions is 257; it must be in 1..256"),
        ("a", {"dimensions": 2.5}, "dimensions is 2.5"),
        ("a", {"priority": [1, 2]}, "1 prompts were given with 2 priorities"),
        ("a", {"priority": [1]}, "only scheduling_policy='priority' uses it"),
    ],
)
def test_what_is_refused(llm: LLM, prompts: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.embed(prompts, **options)
    assert not llm.engine.has_work


def test_a_failing_step_is_told_by_those_in_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "run", lambda batch: 1 / 0)
        [output] = llm.embed("a")
    assert output.error == "ZeroDivisionError: division by zero"
    assert output.outputs.embedding == []
    assert len(vectors(llm, "a")[0]) == llm.hidden_size


def test_vectors_without_a_direction_are_left_short() -> None:
    assert normalised(np.zeros(4, np.float32), None).tolist() == [0.0] * 4
    assert normalised(np.full(4, 3e38, np.float32), 2).tolist() == pytest.approx([0.5**0.5] * 2)
    assert normalised(np.full(4, 1e-30, np.float32), None).dtype == np.float32


def test_a_score_is_the_cosine_of_a_pair() -> None:
    texts = ["import os\n", "import sys\n", "class Queue:\n"]
    with LLM(num_blocks=256) as llm:
        vectors = [np.array(one.outputs.embedding, np.float64) for one in llm.embed(texts)]
        found = llm.score(texts[0], texts)
        assert [one.outputs.score for one in found] == pytest.approx([vectors[0] @ one for one in vectors], abs=1e-6)
        assert found[0].outputs.score == pytest.approx(1, abs=1e-6)
        assert [one.outputs.score for one in llm.score(texts[:2], texts[1:])] == pytest.approx(
            [vectors[0] @ vectors[1], vectors[1] @ vectors[2]], abs=1e-6
        )
        assert llm.score([], []) == []
        with pytest.raises(RequestError, match="data_1 has 2 prompts and data_2 has 3"):
            llm.score(texts[:2], texts)
