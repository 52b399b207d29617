"""The study of equal scores: a few of its combinations on fewer tasks, and transformers on the same ones."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from quire import LLM

STUDY = Path(__file__).parents[1] / "studies" / "same_score.py"
CHEAP = (
    "one sequence at a time",
    "17 tokens a step",
    "blocks of 32 tokens",
    "no prefix cache",
    "a warm prefix cache",
    "another order, 5 sequences",
    "without speculative decoding",
    "1 thread",
    "preemption by recomputing",
    "preemption by swapping",
    "restarted, blocks on a disk",
)


@pytest.mark.slow
def test_all_combinations_have_the_same_score_and_bits() -> None:
    """And log-likelihoods are near those of transformers."""
    study = runpy.run_path(str(STUDY))
    with LLM(num_blocks=64) as llm:
        tokenizer, path = llm.get_tokenizer(), str(llm.files.path)
        tasks = study["make_tasks"](tokenizer.encode, 3, 6)
    every = study["combinations"](None)
    assert len(every) >= 20
    usual = every["defaults"](tasks)
    for name in CHEAP:
        found = every[name](tasks)
        assert found.logprobs == usual.logprobs, name
        assert found == usual, name
        assert (found.score(tasks), found.digest()) == (usual.score(tasks), usual.digest())
    with study["transformers_model"](path) as theirs:
        row = study["padded"](theirs, tokenizer.decode, 1)(tasks)
    assert len(row.logprobs) == 12
    for logprobs, own in zip(row.logprobs, usual.logprobs[:12], strict=True):
        assert logprobs == pytest.approx(own, abs=0.2)  # both are computed in bf16
    assert sum(len(tokens) for tokens in row.tokens) == 6 * 24
    other = usual.__class__([*usual.logprobs[:-1], [0.0]], usual.tokens, usual.texts)
    *_, last = study["table"](iter([("a", usual), ("b", other)]), tasks)
    assert last.endswith("1 of 24 |")
