"""Biases, allowed tokens and bad words: against plain definitions, and on a model."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import LLM, ops
from quire.engine import sampler
from quire.engine.constraints import constraints_of
from quire.engine.flatten import sampling_rows
from quire.engine.sampler import sample
from quire.errors import RequestError
from quire.frontend.requests import bad_sequences, truncated
from quire.frontend.tokenizer import Tokenizer
from quire.request import Request, SamplingParams, StructuredOutputsParams

V = 50
OPS = ops.load()
PROMPT = "import os\n\n\ndef main(path):\n    for name in sorted(os.listdir(path)):\n"


def request(tokens: list[int], num_prompt: int, bad: list[list[int]], seed: int = 0, **sampling: Any) -> Request:
    made = Request("r", array("i", tokens), num_prompt, SamplingParams(**sampling), seed=seed)
    made.constraints = constraints_of(made.sampling, bad, V)
    return made


def forbidden(asked: Request, bad: list[list[int]]) -> set[int]:
    """Tokens that must not come next, as the definitions say."""
    generated = asked.tokens[asked.num_prompt :].tolist()
    allowed = asked.sampling.allowed_token_ids
    found = set() if allowed is None else set(range(V)) - set(allowed)
    for *before, last in bad:
        if not before or generated[-len(before) :] == before:
            found.add(last)
    return found


def changed(row: torch.Tensor, asked: Request, bad: list[list[int]]) -> torch.Tensor:
    """The logits that are drawn from, in float64, one token after the other."""
    p, found = asked.sampling, row.double().clone()
    generated = asked.tokens[asked.num_prompt :].tolist()
    for token in range(V):
        found[token] += (p.logit_bias or {}).get(token, 0.0)
        if token in asked.tokens:
            found[token] *= 1 / p.repetition_penalty if found[token] > 0 else p.repetition_penalty
        found[token] -= p.frequency_penalty * generated.count(token) + p.presence_penalty * (token in generated)
        if token in forbidden(asked, bad):
            found[token] = -torch.inf
    return found


def anything(rng: random.Random, seed: int) -> tuple[Request, list[list[int]]]:
    """A request with any of the constraints, or none, and its bad sequences, of which its tokens have a few."""
    tokens = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 1.0]), "top_k": rng.choice([0, 5])}
    if rng.random() < 0.4:
        params["logit_bias"] = {t: rng.uniform(-100, 100) for t in rng.sample(range(V), rng.randint(0, 8))}
    if rng.random() < 0.4:
        params["allowed_token_ids"] = rng.sample(range(V), rng.randint(9, 30))
    if rng.random() < 0.3:
        params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": -0.2}
    bad = [[rng.randrange(4) for _ in range(rng.randint(1, 4))] for _ in range(rng.choice([0, 3, 8]))]
    return request(tokens, rng.randint(1, len(tokens)), bad, seed, **params), bad


@pytest.mark.slow
@pytest.mark.parametrize("draw", [sampler._draw_looking, sampler._draw_blindly], ids=["cpu", "gpu"])
def test_rows_follow_the_definitions_alone_and_together(draw: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_draw_looking", draw)
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    made = [anything(rng, seed) for seed in range(90)]
    asked = [one for one, _ in made]
    rows = torch.randn(90, V, generator=generator) * 3
    drawn = sample(rows.clone(), batch := sampling_rows(asked), OPS).tolist()
    assert sum(one.constraints is not None and one.looks_back for one in asked) > 10
    for i, (token, (one, bad)) in enumerate(zip(drawn, made, strict=True)):
        assert token not in forbidden(one, bad)
        if one.sampling.temperature == 0:
            assert token == changed(rows[i], one, bad).argmax().item()
        assert sample(rows[i : i + 1].clone(), sampling_rows([one]), OPS).item() == token
    cut = [sample(rows[a:b].clone(), batch.part(a, b), OPS).tolist() for a, b in ((0, 7), (7, 8), (8, 70), (70, 999))]
    assert [token for part in cut for token in part] == drawn


def test_a_guide_and_allowed_tokens_leave_what_both_allow() -> None:
    """Also where one of them has fewer words than the other."""
    both = request([1], 1, [], temperature=0.0, allowed_token_ids=[3, 40, 45])
    guided = torch.zeros(32, dtype=torch.uint8)
    guided[[3, 5]] = 1
    both.schedule.allowed = ops_mask(guided)
    row = torch.arange(V).float()
    assert sample(row[None].clone(), sampling_rows([both]), OPS).item() == 3
    both.schedule.allowed = ops_mask(torch.ones(64, dtype=torch.uint8))
    assert sample(row[None].clone(), sampling_rows([both]), OPS).item() == 45


def ops_mask(bits: torch.Tensor) -> Any:
    import numpy as np

    return np.packbits(bits.numpy(), bitorder="little").view(np.int32)


def test_the_same_bias_on_all_tokens_changes_nothing() -> None:
    """Whole numbers, so that no addition rounds."""
    rows = torch.randint(-20, 20, (30, V)).float()
    for bias in (-100, 100):
        biased = [request([1], 1, [], seed, logit_bias=dict.fromkeys(range(V), bias)) for seed in range(30)]
        plain = [request([1], 1, [], seed) for seed in range(30)]
        assert torch.equal(sample(rows.clone(), sampling_rows(biased), OPS), sample(rows, sampling_rows(plain), OPS))


# ------------------------------------------------------------------------------------------------ on a model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=512, num_speculative_tokens=0)


def test_words_are_forbidden_with_a_space_and_without() -> None:
    tokenizer = LLM(num_blocks=64).tokenizer
    assert isinstance(tokenizer, Tokenizer)
    words = ["import", " return", "self.assertEqual"]
    found = {tokenizer.decode(tokens) for tokens in bad_sequences(words, tokenizer)}
    assert found == {lead + word.strip() for word in words for lead in ("", " ")}
    with pytest.raises(RequestError, match="no tokenizer"):
        bad_sequences(["a"], None)


@pytest.mark.slow
def test_no_bad_word_and_only_what_is_allowed_comes_whatever_else_happens(llm: LLM) -> None:
    """The same bits with guesses, with preemptions, and in any company."""
    assert llm.tokenizer is not None
    some = list(range(0, 2000, 3))
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))[0].outputs[0]
    words = sorted({plain.text[i : i + 6].strip() for i in range(0, len(plain.text), 7)} - {""})
    asked: list[dict[str, Any]] = [
        {"bad_words": words},
        {"bad_words": words, "allowed_token_ids": some, "temperature": 0.8},
        {"logit_bias": dict.fromkeys(plain.token_ids, -100)},
        {"logit_bias": {some[7]: 100.0}},
        {"logit_bias": {some[8]: 3.0}, "temperature": 1.0, "presence_penalty": 0.5, "n": 3},
        {},
    ]
    params = [
        SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "seed": 5, "logprobs": 2, "ignore_eos": True} | one)
        for one in asked
    ]
    alone = [llm.generate(PROMPT, one)[0].outputs for one in params]
    for other in ({}, {"num_blocks": 8, "max_model_len": 96, "max_num_seqs": 8}):
        with LLM(**{"num_blocks": 512} | other) as second:
            together = second.generate([PROMPT] * len(params), params)
            assert [output.outputs for output in together] == alone
            if other:
                assert second.engine.scheduler.num_preemptions > 0
    bad = bad_sequences(words, llm.tokenizer)
    assert max(map(len, bad)) > 1
    for samples in alone[:2]:
        for sample_ in samples:
            at = range(len(sample_.token_ids))
            assert not any(tuple(sample_.token_ids[i : i + len(one)]) == one for i in at for one in bad)
    assert set(alone[1][0].token_ids) <= set(some)
    assert not set(alone[2][0].token_ids) & set(plain.token_ids)
    assert alone[3][0].token_ids == [some[7]] * 24
    # Logprobs are of the raw logits.
    [raw], [biased] = alone[5][0].logprobs[:1], alone[3][0].logprobs[:1]  # type: ignore[index]
    assert [one for one in biased.items() if one[0] != some[7]] == [one for one in raw.items() if one[0] != some[7]]


def test_what_leaves_no_token_ends_its_own_request(llm: LLM) -> None:
    assert llm.tokenizer is not None
    [token] = llm.tokenizer.encode("import", add_special_tokens=False)
    params = SamplingParams(allowed_token_ids=[token], bad_words=["import"])
    ended, other = llm.generate([PROMPT] * 2, [params, SamplingParams(max_tokens=2)])
    assert ended.outputs[0].error is not None
    assert "no token that allowed_token_ids and bad_words leave" in ended.outputs[0].error
    assert other.outputs[0].finish_reason == "length"


def test_tokens_beyond_the_vocabulary_are_named(llm: LLM) -> None:
    for params, message in (
        ({"logit_bias": {3: 1.0, 2048: 1.0}}, "logit_bias has the token 2048; token ids of this model lie in 0..2047"),
        ({"allowed_token_ids": [1, 10**6]}, r"allowed_token_ids\[1\] is 1000000"),
    ):
        with pytest.raises(RequestError, match=message) as raised:
            llm.generate(PROMPT, SamplingParams(**params))
        assert raised.value.field == next(iter(params))


def test_the_end_of_a_prompt_is_kept(llm: LLM) -> None:
    tokens = list(range(10))
    assert [truncated(tokens, count, 4, 8) for count in (None, 3, 99, -1)] == [tokens, [7, 8, 9], tokens, [6, 7, 8, 9]]
    assert truncated(tokens, -1, 100, 8) == [9]
    assert truncated(tokens, -1, None, 8) == tokens[3:]
    [output] = llm.generate({"prompt_token_ids": tokens}, SamplingParams(max_tokens=1, truncate_prompt_tokens=2))
    assert output.prompt_token_ids == [8, 9]


def test_without_text(llm: LLM) -> None:
    [whole], [bare] = (
        llm.generate(PROMPT, SamplingParams(seed=1, ignore_eos=True, detokenize=detokenize))[0].outputs
        for detokenize in (True, False)
    )
    assert bare.token_ids == whole.token_ids
    assert (bare.text, bool(whole.text)) == ("", True)


@pytest.mark.slow
def test_structure_offline(llm: LLM) -> None:
    """Each kind, with other prompts in the same call; the same bits as alone."""
    asked = [
        StructuredOutputsParams(choice=["yes", 'n"o\n']),
        StructuredOutputsParams(regex="[0-9]{3}"),
        StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}),
        StructuredOutputsParams(json='{"type": "boolean"}'),
        StructuredOutputsParams(json={}),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(grammar='start: "a" "b"'),
    ]
    params = [SamplingParams(max_tokens=12, n=2, seed=3, structured_outputs=one) for one in asked]
    found = [[one.text for one in output.outputs] for output in llm.generate(["x = "] * len(params), params)]
    assert found == [[one.text for one in llm.generate("x = ", one)[0].outputs] for one in params]
    assert set(found[0]) <= {"yes", 'n"o\n'}
    assert all(text.isdigit() and len(text) == 3 for text in found[1])
    assert all(text.startswith("{") and "null" in text for text in found[2])
    assert set(found[3]) <= {"true", "false"}
    assert all(text.startswith("{") for text in found[5])
    assert found[6] == ["ab", "ab"]
    with pytest.raises(RequestError, match=r"it is in GBNF .* Lark's notation is wanted"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(grammar='root ::= "a"')))
    with pytest.raises(RequestError, match="regex cannot be followed"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2048, 4])
def test_a_prompt_is_reported_whole_before_a_token_that_cannot_be_drawn(budget: int) -> None:
    """Whether the step that draws computes all of the prompt or its last piece."""
    with LLM(max_num_batched_tokens=budget, max_model_len=64, num_blocks=16) as llm:
        [token] = llm.get_tokenizer().encode("a", add_special_tokens=False)
        prompt, params = "import os, sys, re, json, time", SamplingParams(max_tokens=1, prompt_logprobs=0)
        [free] = llm.generate(prompt, params, use_tqdm=False)
        bound = replace(params, allowed_token_ids=[token], bad_words=["a"])
        [found] = llm.generate(prompt, bound, use_tqdm=False)
    assert found.outputs[0].finish_reason == "error"
    assert found.outputs[0].error is not None
    assert "no token that allowed_token_ids and bad_words leave" in found.outputs[0].error
    assert found.prompt_logprobs == free.prompt_logprobs
