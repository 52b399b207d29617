"""/v1/completions: what is answered is what the offline interface gives, in OpenAI's shape."""

from __future__ import annotations

import http.client
import json
import math
import threading
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.beam import BeamSearchParams
from quire.server.api import completions
from tests.server.serving import SMALL, Serving, serving
from tests.server.test_robust import hook, runner

PROMPT = "import os\n\n\ndef "
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**SMALL)


def complete(server: Serving, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", **{"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | body)
    assert answer.status == 200, answer.body
    return answer.json()


def stream(server: Serving, **body: Any) -> list[dict[str, Any]]:
    answer = server.post("/v1/completions", **{"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | body, stream=True)
    assert answer.status == 200, answer.body
    return answer.events()


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_a_completion(server: Serving, llm: LLM) -> None:
    [expected] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    found = complete(server)
    assert found["object"] == "text_completion"
    assert found["id"].startswith("cmpl-")
    assert found["model"] == "quire-embedded"
    [choice] = found["choices"]
    text = expected.outputs[0].text
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert found["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert found["usage"]["completion_tokens"] == 8
    assert found["usage"]["total_tokens"] == len(expected.prompt_token_ids) + 8
    assert set(found) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}


def test_a_stream_is_the_completion_in_pieces(server: Serving) -> None:
    whole = complete(server, temperature=0.8, seed=3, max_tokens=24, n=3)
    chunks = stream(server, temperature=0.8, seed=3, max_tokens=24, n=3, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        assert joined(chunks, choice["index"]) == choice["text"]
        ends = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"] and c["finish_reason"]]
        assert [end["finish_reason"] for end in ends] == [choice["finish_reason"]]
    assert len({choice["text"] for choice in whole["choices"]}) == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    cached = chunks[-1]["usage"].pop("prompt_tokens_details"), whole["usage"].pop("prompt_tokens_details")
    assert cached[0]["cached_tokens"] >= cached[1]["cached_tokens"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1


def test_usage_so_far(server: Serving) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in stream(server, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert "usage" not in stream(server)[-1]


def test_usage_so_far_comes_with_usage_only(server: Serving) -> None:
    for options in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
        assert not any("usage" in chunk for chunk in stream(server, stream_options=options))


@pytest.mark.slow
def test_several_prompts_of_all_kinds(server: Serving, llm: LLM) -> None:
    tokens = llm.tokenizer.encode("class A:\n")
    found = complete(server, prompt=[PROMPT, "x = ", tokens], n=2, temperature=0.7, seed=1)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    for i, prompt in enumerate((PROMPT, "x = ", tokens)):
        [expected] = llm.generate(prompt, SamplingParams(n=2, temperature=0.7, seed=1, max_tokens=8))
        assert [c["text"] for c in found["choices"][2 * i : 2 * i + 2]] == [o.text for o in expected.outputs]
    assert complete(server, prompt=tokens)["choices"] == complete(server, prompt=[tokens])["choices"]
    chunks = stream(server, prompt=[PROMPT, tokens])
    assert joined(chunks, 1) == complete(server, prompt=tokens)["choices"][0]["text"]


def test_echo_and_logprobs(server: Serving, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    [expected] = llm.generate(PROMPT, params)
    [choice] = complete(server, echo=True, logprobs=2, max_tokens=4)["choices"]
    assert choice["text"] == PROMPT + expected.outputs[0].text
    shown = choice["logprobs"]
    assert "".join(shown["tokens"]) == "<|endoftext|>" + choice["text"]  # the model's prompts begin with that token
    assert shown["text_offset"] == [len("".join(shown["tokens"][:i])) for i in range(len(shown["tokens"]))]
    assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
    generated = expected.outputs[0]
    ids = expected.prompt_token_ids + generated.token_ids
    found = expected.prompt_logprobs[1:] + generated.logprobs
    for token, candidates, logprob, top in zip(
        ids[1:], found, shown["token_logprobs"][1:], shown["top_logprobs"][1:], strict=True
    ):
        assert math.isclose(candidates[token].logprob, logprob, abs_tol=1e-4)
        assert 2 <= len(top) <= 3


def test_echo_without_new_tokens_scores_a_prompt(server: Serving) -> None:
    found = complete(server, echo=True, logprobs=1, max_tokens=0)
    [choice] = found["choices"]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert "".join(choice["logprobs"]["tokens"][1:]) == PROMPT
    assert found["usage"]["completion_tokens"] == 0
    whole = complete(server, echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert whole["logprobs"]["token_logprobs"][1 : len(choice["logprobs"]["tokens"])] == pytest.approx(
        choice["logprobs"]["token_logprobs"][1:], abs=1e-4
    )
    chunks = stream(server, echo=True, max_tokens=0)
    assert joined(chunks) == PROMPT


def test_a_streamed_echo_has_the_same_logprobs(server: Serving) -> None:
    whole = complete(server, echo=True, logprobs=2, max_tokens=6)["choices"][0]["logprobs"]
    pieces = [chunk["choices"][0]["logprobs"] for chunk in stream(server, echo=True, logprobs=2, max_tokens=6)]
    for name in ("tokens", "text_offset"):
        assert [entry for piece in pieces for entry in piece[name]] == whole[name]


def test_characters_of_several_tokens_are_told_as_bytes(server: Serving) -> None:
    [choice] = complete(server, prompt="# 漢字 🎉", echo=True, logprobs=0, max_tokens=0)["choices"]
    assert choice["text"] == "# 漢字 🎉"
    assert any(token.startswith("bytes:\\x") for token in choice["logprobs"]["tokens"])


def test_stop(server: Serving) -> None:
    text = complete(server, max_tokens=24)["choices"][0]["text"]
    middle = text[6:9]
    [choice] = complete(server, max_tokens=24, stop=[middle, "never there"])["choices"]
    assert choice["text"] == text[: text.index(middle)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", middle)
    assert joined(stream(server, max_tokens=24, stop=middle)) == choice["text"]


@pytest.mark.slow
def test_seed_repeats_and_may_be_negative(server: Serving, llm: LLM) -> None:
    one, two = (complete(server, temperature=1, seed=-5, max_tokens=16)["choices"] for _ in range(2))
    assert one == two
    [choice] = complete(server, temperature=1, seed=6, max_tokens=16)["choices"]
    [expected] = llm.generate(PROMPT, SamplingParams(temperature=1, seed=6, max_tokens=16), use_tqdm=False)
    assert choice["text"] == expected.outputs[0].text


def test_best_of_returns_the_best(server: Serving, llm: LLM) -> None:
    params = SamplingParams(n=6, temperature=1, seed=9, max_tokens=8, logprobs=0)
    [expected] = llm.generate(PROMPT, params)
    means = {o.text: o.cumulative_logprob / len(o.token_ids) for o in expected.outputs}
    found = complete(server, n=2, best_of=6, temperature=1, seed=9)
    best = sorted(means, key=means.__getitem__, reverse=True)[:2]
    assert [choice["text"] for choice in found["choices"]] == best
    assert found["choices"][0]["logprobs"] is None
    assert found["usage"]["completion_tokens"] == 48


def test_beam_search(server: Serving, llm: LLM) -> None:
    [expected] = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=6))
    found = complete(server, use_beam_search=True, n=3, max_tokens=6)
    assert [PROMPT + choice["text"] for choice in found["choices"]] == [s.text for s in expected.sequences]
    assert found["usage"]["completion_tokens"] == 18


def test_a_beam_search_does_not_repeat_a_prompt_that_ends_within_a_character(server: Serving, llm: LLM) -> None:
    """Its last token is the first two bytes of a quotation mark, which the model completes."""
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode("# don") + [
        token for token in range(2048) if llm.tokenizer.token_bytes(token) == b"\xe2\x80"
    ]
    [expected] = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=3))
    texts = [(sequence.text or "").removeprefix("# don") for sequence in expected.sequences]
    assert all(text.startswith("\u2019") for text in texts)
    found = complete(server, prompt=prompt, use_beam_search=True, n=2, max_tokens=3)
    assert [choice["text"] for choice in found["choices"]] == texts


def test_the_default_max_tokens_is_cut_to_what_there_is_room_for(server: Serving) -> None:
    longest = server.service.model.max_model_len
    tokens = [5] * (longest - 3)
    found = server.post("/v1/completions", prompt=tokens, temperature=0, ignore_eos=True).json()
    assert found["usage"]["completion_tokens"] == 3
    refused = server.post("/v1/completions", prompt=[5] * longest)
    assert (refused.error()["param"], refused.error()["code"]) == ("prompt", "context_length_exceeded")
    assert (
        f"this model's maximum context length is {longest} tokens" in refused.error()["message"]
    )  # as litellm looks for


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"suffix": "end"}, "suffix", "no token for the middle"),
        ({"best_of": 1, "n": 2}, "best_of", "at least n"),
        ({"best_of": 3, "stream": True}, "best_of", "stream"),
        ({"logprobs": 21}, "logprobs", "--max-logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"temperature": -0.1}, "temperature", "-0.1"),
        ({"temperature": "warm"}, "temperature", "'warm'"),
        ({"n": 129}, "n", "128"),
        ({"stop": ["a"] * 65}, "stop", "list"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": []}, "prompt", "token ids"),
        ({"prompt": [-1]}, "prompt", "token ids"),
        ({"prompt": [10**6]}, "prompt", "1000000"),
        ({"prompt": "", "add_special_tokens": False}, "prompt", "empty prompt"),
        ({"temprature": 1}, "temprature", "'temperature'"),
        ({"model": "gpt-5"}, "model", "quire-embedded"),
        ({"min_tokens": 20}, "min_tokens", "must be in 0..4"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "stop_token_ids"),
        ({"priority": 1}, "priority", "scheduling_policy"),
        ({"n": 128, "prompt": ["a"] * 99}, "n", "samples"),
        ({"best_of": 128, "prompt": ["a"] * 99}, "best_of", "samples"),
        ({"use_beam_search": True, "n": 17}, "n", "17 beams"),
        ({"use_beam_search": True, "stop": "x"}, "stop", "use_beam_search"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format", "use_beam_search"),
        ({"regex": "("}, "regex", "cannot be followed"),
        ({"grammar": "start: /(/"}, "grammar", "cannot be followed"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format",
            "cannot be followed",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing"),
        ({"length_penalty": 0.5}, "length_penalty", "use_beam_search"),
        ({"service_tier": "flex"}, "service_tier", "tier"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options", "padded"),
        ({"max_completion_tokens": 4}, "max_completion_tokens", "use max_tokens"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format", "ignore"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format", "ignore"),
        ({"min_tokens": 1, "regex": "a*"}, "min_tokens", "regex"),
        ({"min_tokens": 1, "grammar": "start: /a*/"}, "min_tokens", "grammar"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens", "response_format"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    server: Serving, body: dict[str, Any], param: str | None, words: str
) -> None:
    answer = server.post("/v1/completions", **{"prompt": PROMPT, "max_tokens": 4} | body)
    assert 400 <= answer.status < 500
    error = answer.error()
    assert error["param"] == param, error
    assert words in error["message"], error


def test_fields_that_ask_for_nothing_are_taken(server: Serving) -> None:
    neutral = {"length_penalty": 1, "metadata": {"run": 5}, "response_format": {"type": "text", "json_schema": None}}
    for tier in ("auto", "default", None):
        assert complete(server, service_tier=tier, min_tokens=1, **neutral)["choices"] == complete(server)["choices"]
    # Clients of benchmarks send it with everything; a grammar ends where it ends.
    [choice] = complete(server, regex="abc", ignore_eos=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


def test_an_answer_is_encoded_choice_by_choice(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the encoder works, no other thread does."""
    old, encoded = completions.dumps, []

    def dumps(value: Any) -> bytes:
        encoded.append(value)
        return old(value)

    monkeypatch.setattr(completions, "dumps", dumps)
    for path, given in ((COMPLETIONS, {"prompt": ["a", "b"]}), (CHAT, {"messages": MESSAGES})):
        encoded.clear()
        found = server.post(path, n=3, max_tokens=2, temperature=1, **given).json()["choices"]
        assert [value for value in encoded if "index" in value] == found
        assert not any("choices" in value for value in encoded)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.slow
def test_a_stream_that_is_cut_off_ends_in_an_error_alone(path: str) -> None:
    """And in no finish_reason, of which OpenAI's clients do not know "abort"."""
    jobs: list[Any] = []
    may_step = threading.Semaphore(5)
    with serving({}, hook, request_timeout=600.0) as server:
        worker = server.service.engine_client
        submit = worker.llm.submit
        worker.llm.submit = lambda job, *rest: (jobs.append(job), submit(job, *rest))  # type: ignore[method-assign]
        runner(server).before = lambda batch: may_step.acquire(timeout=60)
        given: dict[str, Any] = {"prompt": "x = "} if path == COMPLETIONS else {"messages": MESSAGES}
        body = given | {"n": 2, "max_tokens": 400, "ignore_eos": True, "stream": True}
        client = http.client.HTTPConnection(server.host, server.port, timeout=60)
        client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        lines = filter(bytes.strip, iter(client.getresponse().readline, b""))
        found = []
        for line in lines:
            found.append(line.removeprefix(b"data: "))
            if len(found) == 3:  # its time is up
                assert server.loop is not None
                server.loop.call_soon_threadsafe(worker._expire, jobs[0], 600.0)
            may_step.release()
        may_step.release(9)
        client.close()
        *pieces, last = map(json.loads, found[:-1])
        assert found[-1].strip() == b"[DONE]"
        assert last["error"]["code"] == "deadline"
        assert len(pieces) >= 3
        assert {choice["finish_reason"] for piece in pieces for choice in piece["choices"]} == {None}
