"""LLM.score: the sums of transformers' log_softmax; texts taken apart as lm_eval does; the prefix cache; refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.frontend.loglikelihood import encode_pair
from quire.frontend.tokenizer import Tokenizer
from quire.models import EMBEDDED
from tests.models.checkpoints import save

GENERATOR = torch.Generator().manual_seed(8)
PAIRS = [
    (torch.randint(2, 97, (n,), generator=GENERATOR).tolist(), torch.randint(2, 97, (m,), generator=GENERATOR).tolist())
    for n, m in ((1, 1), (1, 40), (16, 1), (17, 3), (40, 16), (33, 30))
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=256)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs = save(tmp_path, kind)
    prompts, continuations = [p for p, _ in PAIRS], [c for _, c in PAIRS]
    best = []  # what greedy decoding would say after each prompt
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(3):
            tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
        best.append(tokens[len(prompt) :])
    for options in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 3, "block_size": 4}):
        llm = LLM(str(tmp_path), num_blocks=64, **options)
        for _ in range(2):  # then from the cache
            found = llm.loglikelihood(prompts + prompts, continuations + best, use_tqdm=False)
            for prompt, continuation, output in zip(prompts * 2, continuations + best, found, strict=True):
                logprobs = theirs(torch.tensor([prompt + continuation])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
                expected = logprobs.gather(1, torch.tensor(continuation)[:, None]).flatten()
                torch.testing.assert_close(torch.tensor(output.token_logprobs), expected, atol=1e-4, rtol=0)
                assert output.cumulative_logprob == pytest.approx(float(expected.double().sum()), abs=1e-3)
                assert output.is_greedy == (logprobs.argmax(-1).tolist() == continuation)
                assert (output.prompt_token_ids, output.token_ids) == (prompt, continuation)
            assert all(output.is_greedy for output in found[len(prompts) :])
    assert found[2].num_cached_tokens == 16  # and its logprob is stored with the second prompt's blocks


def test_a_shared_prompt_is_computed_once(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = "def area(width, height):\n    return width * height\n" * 6
    found = llm.loglikelihood([prompt] * 8, [f"x{i} = {i}\n" for i in range(8)])
    count = len(found[0].prompt_token_ids)
    assert count > 64
    assert [output.num_cached_tokens for output in found] == [0] + [(count - 1) // 16 * 16] * 7
    [other] = llm.loglikelihood({"prompt": prompt, "cache_salt": "mine"}, "x")
    assert other.num_cached_tokens == 0


def test_logprobs_are_those_that_generate_reports(llm: LLM) -> None:
    prompt = "def f(x):\n    return"
    [said] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0))
    sample = said.outputs[0]
    [output] = llm.loglikelihood([said.prompt_token_ids], [sample.token_ids])
    assert output.is_greedy
    assert output.token_logprobs == [
        one[token].logprob for token, one in zip(sample.token_ids, sample.logprobs, strict=True)
    ]
    assert output.cumulative_logprob == pytest.approx(sample.cumulative_logprob)


# ------------------------------------------------------------------------------------------------- pairs of texts


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [
        ("import", " os\n"),
        ("import ", "os\n"),
        ("x = 1\n  ", "y"),
        ("", "import os"),
        ("  \n", "a b"),
        ("é🎉", "漢 字"),
    ],
)
def test_texts_are_taken_apart_as_lm_eval_does(prompt: str, continuation: str) -> None:
    tokenizer = Tokenizer(EMBEDDED)
    spaces = len(prompt) - len(prompt.rstrip())
    moved, kept = prompt[len(prompt) - spaces :] + continuation, prompt[: len(prompt) - spaces]
    whole, first = (tokenizer.encode(text, add_special_tokens=False) for text in (kept + moved, kept))
    before, after = encode_pair(tokenizer, prompt, continuation)
    assert before == [tokenizer.encode("")[0], *first]  # the special token that generate puts first, too
    assert after == whole[len(first) :]
    assert tokenizer.decode([*before, *after]) == prompt + continuation


def test_leading_tokens_are_those_of_the_template(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers.processors import TemplateProcessing

    fast = Fast.from_file(str(EMBEDDED / "tokenizer.json"))
    for single, leading in (("$A", []), ("<a> $A", [7]), ("<a> <b> $A <b>", [7, 8]), ("$A <b>", [])):
        fast.post_processor = TemplateProcessing(single=single, special_tokens=[("<a>", 7), ("<b>", 8)])
        fast.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer(tmp_path)
        assert tokenizer.leading_tokens == leading
        before, after = encode_pair(tokenizer, "import os", "\nimport sys")
        assert tokenizer.encode("import os\nimport sys", add_special_tokens=False) == before[len(leading) :] + after


def test_an_empty_prompt(llm: LLM, tmp_path: Path) -> None:
    [output] = llm.loglikelihood("", "import os")
    assert output.prompt_token_ids == llm.tokenizer.leading_tokens
    assert len(output.token_logprobs) == len(output.token_ids) > 0
    save(tmp_path)
    bare = LLM(str(tmp_path), num_blocks=64)
    with pytest.raises(RequestError, match="prompt 1 is empty, and no special token precedes it"):
        bare.loglikelihood([[1], []], [[2], [3]])
    with pytest.raises(RequestError, match="'a' is a text, and this model has no tokenizer; give token ids"):
        bare.loglikelihood("a", "b")


@pytest.mark.parametrize(
    ("prompts", "continuations", "words"),
    [
        ("a", "", "continuation 0 has no separate token after prompt 0"),
        ("a", "b", "it is empty or becomes one token with the prompt's end"),
        ([[5], [6]], [[5], []], "continuation 1 has no separate token after prompt 1"),
        ("a", [5], "prompt 0 is a text and its continuation token ids; give both as texts or both as token ids"),
        ([[5]], ["a"], "prompt 0 is token ids and its continuation a text"),
        (["a", "b"], ["c"], "2 prompts were given with 1 continuations; give one each"),
        ("a", {"prompt": "b"}, "a continuation is a dict; give a text or a list of token ids"),
        ("a", 5, "continuations is a int; give"),
        ([[5]], [[-1]], "continuation token 0 is -1"),
        ([[5]], [[10**6]], r"prompt\[1\] is 1000000; token ids of this model lie in"),
        ([[5] * 1000], [[5] * 25], "prompt of 1025 tokens; with max_model_len=1024 a prompt may have at most 1024"),
    ],
)
def test_what_is_refused(llm: LLM, prompts: Any, continuations: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.loglikelihood(prompts, continuations)
    assert not llm.engine.has_work


def test_a_failing_step_is_told_by_those_in_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "run", lambda batch: 1 / 0)
        [output] = llm.loglikelihood("a", "\n")
    assert output.error == "ZeroDivisionError: division by zero"
    assert (output.token_logprobs, output.is_greedy) == ([], False)
    assert math.isnan(output.cumulative_logprob)
    assert llm.loglikelihood("a", "\n")[0].error is None
