"""Requests that draw nothing: embeddings and scores among requests that generate.

tests/test_embedding.py and test_loglikelihood.py compare them with transformers, `tests.engine.differential` their bits
with those of each request alone. Slots that no request owns hold NaN.
"""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.runner import Runner
from quire.errors import RequestError
from quire.frontend.embedding import embedding_request
from quire.frontend.loglikelihood import loglikelihood_request
from quire.request import FinishReason, Request, SamplingParams
from tests.engine.fakes import fake_engine, run
from tests.engine.runs import poison, whole
from tests.engine.test_graphs import Twin, graphed
from tests.models.checkpoints import engine, save

pytestmark = pytest.mark.slow

VOCABULARY = 97
Found = dict[str, list[Any]]


def results(served: Engine, requests: list[Request]) -> Found:
    """What each request was told, as lists of numbers."""
    found: Found = {}
    for name, events in whole(served, requests, poison).items():
        shown = (one for event in events for one in (*event.prompt_logprobs, event.logprobs) if one)
        states = [event.hidden_state.tolist() for event in events if event.hidden_state is not None]
        found[name] = [(one.token, one.logprob, one.rank) for one in shown] + states
        assert events[-1].finish_reason is FinishReason.LENGTH
    return found


def test_graphs_compute_the_same(tmp_path: Path) -> None:
    """A prompt of one token is replayed."""
    save(tmp_path, vocab_size=VOCABULARY)

    def asked() -> list[Request]:
        one, scored = embedding_request("one", None, [5])[0], loglikelihood_request("two", [5], [6])[0]
        drawn = Request(
            "drawn", array("i", [3] * 9), 9, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        )
        return [drawn, one, scored, embedding_request("more", None, [4] * 30)[0]]

    twin = Twin()
    assert results(graphed(tmp_path, twin), asked()) == results(engine(tmp_path), asked())
    before = twin.replays.total()
    results(graphed(tmp_path, twin), asked()[1:2])
    assert twin.replays.total() == before + 1


def test_nothing_is_drawn_and_no_logit_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    served = engine(tmp_path, block_size=4)
    runner = served.runner
    assert isinstance(runner, Runner)
    rows: list[int] = []
    logits, forward = runner.model.logits, runner.model.forward
    monkeypatch.setattr(runner.model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    kept: list[int] = []

    def counted(*arguments: Any) -> torch.Tensor:
        hidden = forward(*arguments)
        kept.append(len(hidden))
        return hidden

    monkeypatch.setattr(runner.model, "forward", counted)
    tokens = list(range(2, 40))
    results(served, [embedding_request("e", None, tokens)[0]])
    assert (rows, kept) == ([], [1])
    results(served, [loglikelihood_request("s", tokens[:30], tokens[30:])[0]])
    assert rows == [8]
    assert kept[1:] == [8]
    report = loglikelihood_request("s", tokens[:30], tokens[30:])[0]
    results(served, [report])
    assert report.cache.prefix_report is not None
    assert report.cache.prefix_report.num_cached == 36  # every full block, with its logprobs
    assert kept[2:] == [2]  # the last cached row, whose logprob is that of the token after it, and the next one


def test_blocks_are_published_and_shared_with_requests_that_generate() -> None:
    served = fake_engine()
    tokens = list(range(30))
    served.add(embedding_request("e", None, tokens)[0])
    assert run(served) == {"e-0": ([], "length")}
    later = Request("g", array("i", tokens), 30, SamplingParams(max_tokens=1))
    served.add(later)
    run(served)
    assert later.cache.prefix_report is not None
    assert later.cache.prefix_report.num_cached == 28


def test_a_prompt_may_fill_the_longest_sequence_and_the_whole_cache() -> None:
    served = fake_engine(num_blocks=5, block_size=4, max_model_len=20)
    for make in (embedding_request, lambda name, text, tokens: loglikelihood_request(name, tokens[:3], tokens[3:])):
        served.check(make("r", None, [1] * 20)[0])
        with pytest.raises(
            RequestError, match="prompt of 21 tokens; with max_model_len=20 a prompt may have at most 20"
        ):
            served.check(make("r", None, [1] * 21)[0])
        with pytest.raises(RequestError, match="request r-0 has an empty prompt"):
            served.check(embedding_request("r", None, [])[0])
    small = fake_engine(num_blocks=4, block_size=4, max_model_len=20)
    with pytest.raises(
        RequestError, match="17 prompt tokens need 5 KV blocks of 4 tokens, and the cache has 4; give the"
    ):
        small.check(embedding_request("r", None, [1] * 17)[0])


def test_aborted_and_failing_ones_leave_nothing_behind() -> None:
    served = fake_engine(max_num_batched_tokens=4)
    for name in ("a", "b"):
        served.add(embedding_request(name, None, list(range(30)))[0])
    served.step()
    served.abort("a-0")
    served.abort("b-0")
    assert {event.finish_reason for event in served.step()} == {FinishReason.ABORT}
    served.add(embedding_request("c", None, [5] * 9)[0])
    served.runner.fail_next = True
    [event] = served.step()
    assert (event.finish_reason, event.error) == (FinishReason.ERROR, "RuntimeError: injected")
    served.scheduler.audit()
    assert not served.has_work


def test_a_state_that_is_not_finite_is_an_error_and_is_not_shared(tmp_path: Path) -> None:
    theirs = save(tmp_path)
    theirs.model.embed_tokens.weight.data[7] = math.nan
    theirs.save_pretrained(tmp_path)
    served = engine(tmp_path, block_size=4)
    bad, good = [7] * 9, [8] * 9
    for request in (
        embedding_request("bad", None, bad)[0],
        loglikelihood_request("worse", bad[:3], bad[3:])[0],
        embedding_request("good", None, good)[0],
    ):
        served.add(request)
    shown = {event.request_id: event for event in served.step()}
    assert shown["bad-0"].error == "the model gave no finite hidden state after the prompt"
    assert shown["worse-0"].error == "the model gave no finite logit within the prompt"
    assert shown["good-0"].hidden_state is not None
    assert not served.has_work
    again = embedding_request("again", None, bad)[0]
    served.add(again)
    served.step()
    assert again.cache.prefix_report is not None
    assert again.cache.prefix_report.num_cached == 0
    served.scheduler.audit()
