"""Logprobs of prompts that come from the prefix cache are, bit for bit, those that are computed."""

from __future__ import annotations

import random
from array import array
from functools import partial
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.engine.runner import Runner
from quire.models import EMBEDDED
from quire.ops import native
from quire.request import Miss, Request, Task, TokenLogprobs
from tests.engine.runs import whole
from tests.engine.test_cache_bits import SHAPES, built, model
from tests.engine.test_disk import forget, with_disk
from tests.fleet.test_blocks import known_at, listening, sender, with_peers

assert model  # the fixture
pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")
Found = dict[str, list[TokenLogprobs]]


def asked(count: int = 24, salt: str = "") -> list[Request]:
    """Prompts with stems in common: some for 2 logprobs, 1, the chosen one or none, whole or from a position on."""
    rng = random.Random(3)
    stems = [[rng.randrange(500) for _ in range(48)] for _ in range(2)]
    found = []
    for i in range(count):
        tokens = array(
            "i", rng.choice(stems)[: rng.randint(8, 48)] + [rng.randrange(500) for _ in range(rng.choice((0, 9)))]
        )
        params = SamplingParams(
            temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=(1, 0, None, 1, 0, 2)[i % 6]
        )
        request = Request(f"r{i}", tokens, len(tokens), params, cache_salt=salt)
        if i % 4 == 1 and params.prompt_logprobs is not None:
            request.task, request.first_prompt_logprob = Task.LOGLIKELIHOOD, 5
        found.append(request)
    return found


def reported(engine: Engine, requests: list[Request]) -> Found:
    """What is reported of each prompt, in the order of its tokens."""
    events = whole(engine, requests)
    engine.scheduler.audit()
    return {name: [one for event in those for one in event.prompt_logprobs] for name, those in events.items()}


def computed(directory: Path | torch.dtype, kv_dtype: str, count: int = 24) -> Found:
    """The same of each request alone, without a prefix cache."""
    engine = built(directory, num_blocks=200, block_size=4, enable_prefix_caching=False, kv_cache_dtype=kv_dtype)
    return {name: found for request in asked(count) for name, found in reported(engine, [request]).items()}


KINDS = ("embedded", "gemma2, windows, fp32", "qwen3 next, bf16")


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in SHAPES if name in KINDS], indirect=True)
def test_the_same_bits(model: tuple[Path | torch.dtype, str]) -> None:
    """Cold, warm, in chunks, and preempted, in any order of requests that need them and others."""
    wanted = computed(*model)
    for own in (
        {"num_blocks": 400, "max_num_batched_tokens": 11},
        {"num_blocks": 24},
        {"num_blocks": 24, "preemption": "swap", "swap_space": "8MiB"},
    ):
        engine = built(model[0], block_size=4, kv_cache_dtype=model[1], **own)
        for turn in range(2):
            requests = asked()
            random.Random(turn).shuffle(requests)
            found = reported(engine, requests)
            assert found == wanted
            for request in requests:  # each position once
                first = request.first_prompt_logprob
                expected = request.num_prompt - 1 - first if request.sampling.prompt_logprobs is not None else 0
                assert len(found[request.id]) == expected
        served = [one for one in asked() if one.sampling.prompt_logprobs in (0, 1)]
        cached = sum(one.cache.prefix_report.num_cached for one in requests if one.sampling.prompt_logprobs in (0, 1))
        if own["num_blocks"] == 400 and not engine.scheduler.manager.state_groups:
            assert cached == sum(one.num_prompt // 4 * 4 for one in served)
        more = [one.cache.prefix_report for one in requests if one.sampling.prompt_logprobs == 2]
        assert own["num_blocks"] == 24 or {one.miss for one in more} <= {Miss.PROMPT_LOGPROBS, Miss.SHORT}
        assert {one.num_cached for one in more} <= {0, 4}


def test_they_are_found_on_a_disk(tmp_path: Path) -> None:
    """Also if the disk had the blocks first without them; under another salt they are not."""
    wanted = computed(EMBEDDED, "auto", 6)
    engine = built(EMBEDDED, num_blocks=200, block_size=4)
    tier = with_disk(engine, tmp_path / "disk", 400)
    plain = asked(6)
    for one in plain:
        one.sampling, one.task = SamplingParams(temperature=0.0, max_tokens=1), Task.GENERATE
    reported(engine, plain)
    assert tier.flush(20)
    written = tier.counts.blocks
    for turn in range(3):
        requests = asked(6)
        assert reported(engine, requests) == wanted
        ask = requests[0]  # for one logprob of each position
        assert ask.cache.prefix_report.num_cached == (0 if turn == 0 else ask.num_prompt // 4 * 4)
        assert tier.flush(20)
        assert len(engine.scheduler.manager.scores) > 0
        forget(engine)
        assert len(engine.scheduler.manager.scores) == 0
    assert tier.counts.blocks > written  # with the logprobs
    others = asked(6, salt="tenant")
    assert reported(engine, others) == wanted
    assert others[0].cache.prefix_report.num_cached == 0
    tier.close()


def test_they_are_found_at_a_peer() -> None:
    wanted = computed(EMBEDDED, "auto", 6)
    holder = built(EMBEDDED, num_blocks=200, block_size=4)
    reported(holder, asked(6))
    with listening(sender(holder).answer) as url:
        engine = built(EMBEDDED, num_blocks=200, block_size=4)
        source = with_peers(engine)
        requests = known_at(url, holder, asked(6))
        assert reported(engine, requests) == wanted
        assert source.counts.hits > 0
        ask = requests[0]
        assert ask.cache.prefix_report.num_cached == ask.num_prompt // 4 * 4
        source.close(20)


def test_a_scored_prompt_computes_one_row() -> None:
    """What is seen through LLM: the rows that the second call computes, and scores that do not depend on the first."""
    with LLM(num_blocks=200, block_size=16) as llm:
        assert isinstance(llm.engine.runner, Runner)
        prompt, params = {"prompt_token_ids": list(range(100, 420))}, SamplingParams(max_tokens=1, prompt_logprobs=1)
        rows: list[int] = []
        execute = llm.engine.runner.launch
        llm.engine.runner.launch = lambda batch: rows.append(len(batch.prompt.rows)) or execute(batch)
        ask = partial(llm.generate, prompt, use_tqdm=False)
        [first], [again], [chosen] = ask(params), ask(params), ask(SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert (first.num_cached_tokens, again.num_cached_tokens, chosen.num_cached_tokens) == (0, 320, 320)
        assert sum(rows) == 319
        assert first.prompt_logprobs == again.prompt_logprobs
        tokens = first.prompt_token_ids[1:]
        for both, one, token in zip(first.prompt_logprobs[1:], chosen.prompt_logprobs[1:], tokens, strict=True):
            assert one == {token: both[token]}
