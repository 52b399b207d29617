"""LLM.beam_search: transformers' beams, on shared blocks, whatever the cache does meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.engine.plan import Plan
from quire.errors import RequestError
from tests.marks import spread
from tests.models.checkpoints import save

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 2, 33, 8, 71, 20], [4, 4, 4], [5, 9, 2, 33, 8, 71, 20, 3, 17, 60, 61, 62, 63, 64, 65, 66, 67]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, save(directory, "Llama", eos_token_id=7)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """With windows: a beam frees blocks that others may still share."""
    directory = tmp_path_factory.mktemp("gemma")
    return directory, save(directory, "Gemma2", eos_token_id=7, sliding_window=6, query_pre_attn_scalar=16)


@torch.no_grad()
def of_transformers(model: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        do_sample=False,
        early_stopping=False,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        eos_token_id=None if params.ignore_eos else 7,
    )
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        generated = row[len(prompt) :]
        if 7 in generated and not params.ignore_eos:
            generated = generated[: generated.index(7) + 1]
        found.append(([*prompt, *generated], score))
    return found


def check(llm: LLM, model: Any, params: BeamSearchParams) -> None:
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = of_transformers(model, prompt, params)
        assert output.error is None
        assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in expected]
        for sequence, (tokens, score) in zip(output.sequences, expected, strict=True):
            assert sequence.score == pytest.approx(score, abs=2e-4)
            assert sequence.finish_reason == ("stop" if tokens[-1] == 7 and not params.ignore_eos else "length")
            length = len(tokens) - len(prompt)
            assert sequence.cum_logprob == pytest.approx(sequence.score * length**params.length_penalty)
    llm.engine.scheduler.audit()
    assert not llm.engine.has_work
    manager = llm.engine.scheduler.manager
    assert all(pool.num_used == 0 for pool in (*manager.pools, *manager.host_pools))


@pytest.mark.parametrize(("kind", "width", "penalty"), spread(3, ["llama", "gemma"], [2, 3, 6], [0.0, 1.0, 2.0]))
def test_equal_to_transformers(kind: str, width: int, penalty: float, request: pytest.FixtureRequest) -> None:
    directory, model = request.getfixturevalue(kind)
    llm = LLM(str(directory), num_blocks=200, block_size=4)
    check(llm, model, BeamSearchParams(beam_width=width, max_tokens=14, length_penalty=penalty))


@pytest.mark.parametrize(
    ("kind", "preemption", "caching", "budget"),
    spread(3, ["llama", "gemma"], ["recompute", "swap"], [True, False], [16, 64]),
)
def test_equal_while_blocks_run_out(
    kind: str, preemption: str, caching: bool, budget: int, request: pytest.FixtureRequest
) -> None:
    """Searches push one another out of a small pool and come back, again and again."""
    directory, model = request.getfixturevalue(kind)
    llm = LLM(
        str(directory),
        num_blocks=21 if kind == "llama" else 32,  # what one search may need
        block_size=4,
        preemption=preemption,
        swap_space="1MiB" if preemption == "swap" else None,
        enable_prefix_caching=caching,
        max_num_batched_tokens=budget,
    )
    check(llm, model, BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True))
    assert llm.engine.scheduler.num_preemptions > 0


def test_beams_share_what_they_have_in_common(llama: tuple[Path, Any]) -> None:
    llm = LLM(str(llama[0]), num_blocks=200, block_size=4)
    used: list[int] = []
    llm.engine.listen(lambda _: used.append(llm.engine.scheduler.manager.pools[0].num_used))
    prompt = list(range(10, 50))
    llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    assert max(used) <= 10 + 4 * 2  # the prompt once, and for each beam what it generated: not 4 * 12


def test_the_smallest_pool_that_can_hold_the_search_does(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    params = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)
    prompt = PROMPTS[2][:16]
    llm = LLM(str(directory), num_blocks=4 + 3 * 2, block_size=4)
    [output] = llm.beam_search([prompt], params)
    assert [s.tokens for s in output.sequences] == [tokens for tokens, _ in of_transformers(model, prompt, params)]
    llm = LLM(str(directory), num_blocks=4 + 3 * 2 - 1, block_size=4)
    with pytest.raises(
        RequestError,
        match=r"for each of 3 beams need 10 KV blocks .* the cache has 9; .* or lower beam_width",
    ):
        llm.beam_search([prompt], params)


def test_more_beams_than_seats_are_refused(llama: tuple[Path, Any]) -> None:
    llm = LLM(str(llama[0]), num_blocks=50, max_num_seqs=3)
    with pytest.raises(RequestError, match="has 4 beams; with max_num_seqs=3 beam_width may be at most 3"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=4))
    assert not llm.engine.has_work


def test_searches_take_their_seats_together(llama: tuple[Path, Any]) -> None:
    """Four searches of four beams on eight seats are two pairs, one after the other, and no crowd that takes turns."""
    llm = LLM(str(llama[0]), num_blocks=300, block_size=4, max_num_seqs=8)
    running: list[int] = []
    plan = llm.engine.scheduler.plan

    def watched() -> Plan:
        found = plan()
        running.append(len(found.items))
        return found

    llm.engine.scheduler.plan = watched  # type: ignore[method-assign]
    llm.beam_search([[i, i, i] for i in range(1, 5)], BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))
    assert len(running) <= 2 * 20 + 4
    assert running.count(8) >= 2 * 20 - 6


def test_a_prompt_as_long_as_the_model_serves_is_refused(llama: tuple[Path, Any]) -> None:
    llm = LLM(str(llama[0]), num_blocks=50, max_model_len=17)
    with pytest.raises(RequestError, match="prompt of 17 tokens; with max_model_len=17 a prompt may have at most 16"):
        llm.beam_search([PROMPTS[2]], BeamSearchParams(beam_width=2))
    [output] = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=100, ignore_eos=True))
    assert [len(sequence.tokens) for sequence in output.sequences] == [17, 17]


def test_a_failed_step_is_told_and_leaves_nothing_behind(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(llama[0]), num_blocks=200, block_size=4)
    real, calls = llm.engine.runner.run, []

    def broken(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("injected")
        return real(batch)

    monkeypatch.setattr(llm.engine.runner, "run", broken)
    [output] = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True))
    assert output.error == "RuntimeError: injected"
    assert not llm.engine.has_work
    llm.engine.scheduler.audit()
    assert llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2))[0].outputs[0].error is None


def test_texts_come_with_a_tokenizer() -> None:
    llm = LLM(num_blocks=100)
    [output] = llm.beam_search("def main(", BeamSearchParams(beam_width=2, max_tokens=5))
    assert output.prompt == "def main("
    assert all((sequence.text or "").startswith("def main(") for sequence in output.sequences)
