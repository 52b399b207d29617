"""Requests that draw nothing: embeddings and scores among requests that generate.

Hidden states and logprobs are those of transformers' eager model. `tests.engine.differential` compares their bits with
those of each request alone. Slots that no request owns hold NaN.
"""

from __future__ import annotations

import math
import random
from array import array
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.graphs import GraphRunner
from quire.engine.runner import Runner
from quire.errors import RequestError
from quire.frontend.embedding import embedding_request
from quire.frontend.loglikelihood import loglikelihood_request
from quire.ops import native
from quire.request import FinishReason, Request, SamplingParams, Task
from tests.engine.fakes import fake_engine, run
from tests.engine.runs import poison, whole
from tests.engine.test_graphs import Twin
from tests.marks import of_long_runs
from tests.models.checkpoints import engine, save

pytestmark = pytest.mark.slow

VOCABULARY = 97
SHAPES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama, fp32": ("Llama", torch.float32, {}),
    "llama, bf16": ("Llama", torch.bfloat16, {}),
    "gpt2, fp32": ("GPT2", torch.float32, {}),
    "gemma2, windows, fp32": ("Gemma2", torch.float32, {"sliding_window": 9, "query_pre_attn_scalar": 24}),
}
Found = dict[str, list[Any]]


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    kind, dtype, changes = SHAPES[request.param]
    directory = tmp_path_factory.mktemp("model")
    return directory, save(directory, kind, dtype, vocab_size=VOCABULARY, **changes)


def asked(count: int = 18) -> list[Request]:
    """Requests of every task, the same ones every time; their prompts have stems in common."""
    rng = random.Random(4)
    stems = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(2)]
    requests = []
    for i in range(count):
        tokens = rng.choice(stems)[: rng.choice([1, 8, 19, 40])] + [
            rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))
        ]
        if i % 3 == 0:
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
            requests.append(Request(f"{i}-0", array("i", tokens), len(tokens), params))
        elif i % 3 == 1:
            requests.append(embedding_request(f"{i}", None, tokens)[0])
        else:
            cut = rng.randint(1, len(tokens) - 1)
            requests.append(loglikelihood_request(f"{i}", tokens[:cut], tokens[cut:])[0])
    return requests


def results(served: Engine, requests: list[Request]) -> Found:
    """What each request was told, as lists of numbers."""
    found: Found = {}
    for name, events in whole(served, requests, poison).items():
        shown = (one for event in events for one in (*event.prompt_logprobs, event.logprobs) if one)
        states = [event.hidden_state.tolist() for event in events if event.hidden_state is not None]
        found[name] = [(one.token, one.logprob, one.rank) for one in shown] + states
        assert events[-1].finish_reason is FinishReason.LENGTH
    return found


@cache
def alone(directory: Path) -> Found:
    """Each request by itself, in one piece."""
    served = engine(directory, block_size=4, num_blocks=200, enable_prefix_caching=False)
    return {name: shown for request in asked() for name, shown in results(served, [request]).items()}


@torch.no_grad()
def test_what_is_told_is_what_transformers_computes(model: tuple[Path, Any]) -> None:
    directory, theirs = model
    found, is_exact = alone(directory), theirs.dtype is torch.float32
    theirs, close = deepcopy(theirs).float(), {"atol": 1e-4 if is_exact else 0.15, "rtol": 1e-4 if is_exact else 0.05}
    for request in asked():
        outputs = theirs(torch.tensor([request.tokens.tolist()]), output_hidden_states=True)
        shown = found[request.id]
        if request.task is Task.EMBED:
            [state] = shown
            torch.testing.assert_close(torch.tensor(state), outputs.hidden_states[-1][0, -1], **close)
        elif request.task is Task.LOGLIKELIHOOD:
            logprobs = outputs.logits[0].log_softmax(-1)
            scored = list(range(len(request.tokens) - len(shown), len(request.tokens)))
            assert [token for token, _, _ in shown] == [request.tokens[i] for i in scored]
            expected = torch.stack([logprobs[i - 1, request.tokens[i]] for i in scored])
            torch.testing.assert_close(torch.tensor([logprob for _, logprob, _ in shown]), expected, **close)
            if is_exact:
                ranks = [int((logprobs[i - 1] > logprobs[i - 1, request.tokens[i]]).sum()) + 1 for i in scored]
                assert [rank for _, _, rank in shown] == ranks


@pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")
@pytest.mark.parametrize(
    "model", ["llama, fp32", of_long_runs("llama, bf16"), of_long_runs("gpt2, fp32"), "gemma2, windows, fp32"],
    indirect=True,
)  # fmt: skip
def test_beside_guessed_tokens_and_in_graphs(model: tuple[Path, Any]) -> None:
    directory, _ = model
    guessing = engine(directory, block_size=4, num_blocks=400, num_speculative_tokens=3, max_num_seqs=4)
    assert results(guessing, asked()) == alone(directory)
    eager = engine(directory, block_size=4, num_blocks=400)
    twin = Twin()
    assert isinstance(eager.runner, Runner)
    eager.runner = GraphRunner(eager.runner, eager.runner.plans[0].max_seqs, eager.runner.plans[0].max_blocks, twin)
    more = [*asked(), embedding_request("one", None, [5])[0], loglikelihood_request("two", [5], [6])[0]]
    found = results(eager, [embedding_request("one", None, [5])[0]])  # a prompt of one token is replayed
    assert twin.replays.total() == 1
    assert alone(directory).items() <= results(eager, more).items()
    assert results(engine(directory), [embedding_request("one", None, [5])[0]]) == found


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
    assert report.cache.prefix_report.num_cached == 28  # the blocks before the row that tells of the first token


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
