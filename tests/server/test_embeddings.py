"""/v1/embeddings: the vectors of the offline interface in OpenAI's shape, for its client too, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import TypeAdapter

from quire import LLM
from quire.server.api import embeddings as embeddings_module
from quire.server.protocol.embeddings import Embeddings
from tests.server.fuzz import LONGEST_MESSAGE
from tests.server.serving import Serving, serving
from tests.server.test_robust import until

PATH, MODEL = "/v1/embeddings", "quire-embedded"
TEXTS = ["import os\n", "class Stack:\n    def push(self, value):\n", "x", "é🎉 " * 20]


@pytest.fixture(scope="module")
def offline() -> dict[str, list[float]]:
    llm = LLM(num_blocks=256)
    return {text: output.outputs.embedding for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True)}


ANSWER = TypeAdapter(Embeddings)  # which is encoded in parts


def vectors(server: Serving, **body: Any) -> list[Any]:
    answer = server.post(PATH, **body)
    assert answer.status == 200, answer.body
    shown = ANSWER.validate_python(answer.json())["data"]
    assert [one["index"] for one in shown] == list(range(len(shown)))
    return [one["embedding"] for one in shown]


def test_vectors_are_those_of_the_offline_face(server: Serving, offline: dict[str, list[float]]) -> None:
    assert vectors(server, input=TEXTS, model=MODEL, user="me") == list(offline.values())
    for text in TEXTS:
        tokens = server.post("/tokenize", prompt=text).json()["tokens"]
        for form in (text, [text], tokens, [tokens]):
            assert vectors(server, input=form) == [offline[text]]
    plain = server.post("/tokenize", prompt=TEXTS[0], add_special_tokens=False).json()["tokens"]
    assert vectors(server, input=plain) == vectors(server, input=TEXTS[0], add_special_tokens=False)


def test_base64_is_the_same_numbers(server: Serving, offline: dict[str, list[float]]) -> None:
    for text, shown in zip(TEXTS, vectors(server, input=TEXTS, encoding_format="base64"), strict=True):
        assert np.frombuffer(base64.b64decode(shown), "<f4").tolist() == offline[text]


def test_dimensions_are_the_first_numbers_normalised(server: Serving, offline: dict[str, list[float]]) -> None:
    for count in (1, 7, 256):
        for text, shown in zip(TEXTS, vectors(server, input=TEXTS, dimensions=count), strict=True):
            first = np.array(offline[text][:count])
            assert shown == pytest.approx((first / np.linalg.norm(first)).tolist(), abs=1e-6)


def test_usage_tells_of_the_prompts_and_of_the_cache() -> None:
    with serving() as server:
        text = "import collections\nimport functools\n" * 8
        shown = [server.post(PATH, input=[text, "a"]).json()["usage"] for _ in range(2)]
        count = sum(len(server.post("/tokenize", prompt=prompt).json()["tokens"]) for prompt in (text, "a"))
        for usage, cached in zip(shown, (0, (count - 2) // 16 * 16), strict=True):
            assert usage == {
                "prompt_tokens": count,
                "completion_tokens": 0,
                "total_tokens": count,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
        salted = server.post(PATH, input=[text], cache_salt="mine").json()["usage"]
        assert salted["prompt_tokens_details"] == {"cached_tokens": 0}
        until(server.is_idle)


@pytest.mark.slow
def test_conversations_and_what_is_left_of_long_inputs(speaking: Serving) -> None:
    """As vLLM has the former, as others have the latter, and as Ollama has both."""
    asked = {"messages": [{"role": "user", "content": "a queue"}], "chat_template_kwargs": {"mood": "glad"}}
    for added in (False, True):
        tokens = speaking.post("/tokenize", **asked, add_generation_prompt=added).json()["tokens"]
        assert vectors(speaking, **asked, **{"add_generation_prompt": True} if added else {}) == vectors(
            speaking, input=tokens
        )
    long = list(np.random.default_rng(5).integers(5, 2000, 1500).tolist())
    first, last = vectors(speaking, input=[long[:1024], long[-1024:]])
    assert vectors(speaking, input=long, truncate="END") == [first]
    assert vectors(speaking, input=long, truncate="START") == vectors(speaking, input=long, truncate_prompt_tokens=-1)
    assert vectors(speaking, input=long, truncate="START") == [last]
    assert vectors(speaking, input=long, truncate="END", truncate_prompt_tokens=9) == vectors(speaking, input=long[-9:])
    text = " ".join(f"word{i}" for i in range(999))
    found = speaking.post("/api/embed", model=f"{MODEL}:latest", input=["a", text], keep_alive=5, options={}).json()
    assert found["prompt_eval_count"] == 2 + 1024
    assert found["embeddings"] == vectors(speaking, input=["a", text], truncate="END")
    assert len(speaking.post("/api/embed", input="a", dimensions=3).json()["embeddings"][0]) == 3
    assert speaking.post("/api/embed", model=MODEL).json()["embeddings"] == []
    for body, words in (
        ({"input": text, "truncate": False}, "up to 1024"),
        ({"input": "a", "model": "m"}, "there is no model 'm'"),
        ({"input": "a", "dimensions": 999}, "dimensions is 999"),
    ):
        assert words in speaking.post("/api/embed", **body).json()["error"]


def test_the_openai_package(server: Serving, offline: dict[str, list[float]]) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for options in ({}, {"encoding_format": "float"}):  # without it the package asks for base64
        answer = client.embeddings.create(model=MODEL, input=TEXTS, **options)
        assert [one.embedding for one in answer.data] == [pytest.approx(v) for v in offline.values()]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
        assert answer.model == MODEL
    assert len(client.embeddings.create(model=MODEL, input="a", dimensions=8).data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError, match="dimensions") as caught:
        client.embeddings.create(model=MODEL, input="a", dimensions=257)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


@pytest.mark.slow
def test_many_clients_beside_others_who_generate(server: Serving, offline: dict[str, list[float]]) -> None:
    def one(i: int) -> Any:
        text = TEXTS[i % len(TEXTS)]
        if i % 3 == 0:
            assert server.post("/v1/completions", prompt=text, max_tokens=20, ignore_eos=True).status == 200
            return None
        return vectors(server, input=text) == [offline[text]]

    with ThreadPoolExecutor(8) as pool:
        assert False not in list(pool.map(one, range(40)))
    until(server.is_idle)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "input cannot be read; it must be a text, a list of token ids, or a list of these"),
        ({"input": [[]]}, "input", "input cannot be read"),
        ({"input": None}, "input", "input is missing; give either input or messages"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "input", "input goes without messages"),
        (
            {"messages": [{"role": "user", "content": "b" * 9000}]},
            "messages",
            "this model serves sequences of up to 1024",
        ),
        ({"input": "a", "input_type": "query"}, "input_type", "prompt_name names one of the model's own prompts"),
        ({"input": "a" * 9000, "truncate": "NONE"}, "input", "this model serves sequences of up to 1024"),
        ({"input": {"text": "a"}}, "input", "input cannot be read"),
        ({"input": ["a", 1]}, "input", "input cannot be read"),
        ({"input": ["a"] * 1025}, "input", "input cannot be read"),
        ({"input": "", "add_special_tokens": False}, "input", "input 0 has no token; each input needs at least one"),
        ({"input": [[5], [5] * 1025]}, "input", "input 1 has 1025 tokens; this model serves sequences of up to 1024"),
        ({"input": "a" * 1_000_000}, "input", "input has 1000000 characters"),
        ({"input": "\ud800"}, "input", "input cannot be read"),
        ({"input": [5, 10**6]}, "input", "token ids of this model lie in 0..2047"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "cache_salt is ''"),
        ({"input": "a", "dimensions": 257}, "dimensions", "dimensions is 257; it must be in 1..256"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format is 'int8'"),
        ({"input": "a", "priority": 1}, "priority", "only scheduling_policy='priority' uses it"),
        ({"input": "a", "inputs": "b"}, "inputs", "there is no field 'inputs'; did you mean 'input'?"),
        ({"input": "a", "dimension": 1}, "dimension", "there is no field 'dimension'"),
        ({"input": "a", "user": "u" * (2**21 + 1)}, "user", "user is"),
    ],
)
def test_what_is_refused(server: Serving, body: dict[str, Any], param: str | None, words: str) -> None:
    answer = server.post(PATH, **body)
    assert answer.status == 400, answer.body
    assert words in answer.error()["message"]
    assert answer.error()["param"] == param
    assert len(answer.error()["message"]) <= LONGEST_MESSAGE
    assert server.is_idle()


def test_more_numbers_than_one_answer_may_have(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings_module, "MAX_NUMBERS", 512)
    assert len(vectors(server, input=["a", "b"])) == 2
    answer = server.post(PATH, input=["a", "b", "c"])
    assert answer.error()["message"].startswith("input has 3 entries, whose vectors are 768 numbers; this server gives")
    assert len(vectors(server, input=["a", "b", "c"], dimensions=100)) == 3


def test_as_many_inputs_as_there_is_room_for() -> None:
    with serving(max_num_queued_reqs=4) as server:
        assert len(vectors(server, input=["a"] * 20)) == 20
        answer = server.post(PATH, input=["a"] * 21)
        assert answer.status == 400
        assert answer.error()["param"] == "input"
        assert "asks for 21 samples; this server takes 20 at a time" in answer.error()["message"]


def stuck(server: Serving) -> threading.Event:
    """The engine's next step waits for what is returned."""
    gate, runner = threading.Event(), server.service.engine_client.engine.runner
    run = runner.run

    def waiting(batch: Any) -> Any:
        gate.wait(30)
        return run(batch)

    runner.run = waiting  # type: ignore[method-assign]
    return gate


@pytest.mark.slow
def test_deadlines_and_clients_that_go() -> None:
    with serving(request_timeout=0.5) as server:
        gate = stuck(server)
        assert (server.post(PATH, input="a").status, server.post(PATH, input="b").error()["code"]) == (504, "deadline")
        gate.set()
        until(server.is_idle)
        vectors(server, input="a")
    with serving() as server, ThreadPoolExecutor(1) as pool:
        gate = stuck(server)

        async def leave() -> None:
            async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=0.3) as client:
                with pytest.raises(openai.APITimeoutError):
                    await client.embeddings.create(model=MODEL, input=["a"] * 40)

        pool.submit(asyncio.run, leave()).result()
        gate.set()
        until(server.is_idle)
        vectors(server, input="a")


def test_a_failing_step_is_an_error() -> None:
    with serving() as server:
        runner = server.service.engine_client.engine.runner
        run, runner.run = runner.run, lambda batch: 1 / 0  # type: ignore[method-assign]
        answer = server.post(PATH, input=["a", "b"])
        assert (answer.status, answer.error()["code"]) == (500, "engine_error")
        runner.run = run  # type: ignore[method-assign]
        vectors(server, input="a")
        until(server.is_idle)


@pytest.mark.slow
def test_keys_separate_and_metrics_count() -> None:
    with serving(api_key=("one", "two")) as server:
        text = "import collections\n" * 20
        assert server.post(PATH, input=text).status == 401
        cached = []
        for key in ("one", "two", "two"):
            answer = server.ask("POST", PATH, {"input": text}, {"Authorization": f"Bearer {key}"})
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            count = answer.json()["usage"]["prompt_tokens"]
        assert cached == [0, 0, count // 16 * 16]
        shown = server.ask("GET", "/metrics", None, {"Authorization": "Bearer one"}).body.decode()
        labels = 'engine="0",model_name="quire-embedded"'
        assert f"quire:prompt_tokens_total{{{labels}}} {3 * count}.0" in shown
        assert f"quire:generation_tokens_total{{{labels}}} 0.0" in shown
        assert f'quire:request_success_total{{engine="0",finished_reason="length",model_name="{MODEL}"}} 3.0' in shown
        assert f"quire:request_prefill_time_seconds_count{{{labels}}} 3.0" in shown
        assert f"quire:time_to_first_token_seconds_count{{{labels}}} 0.0" in shown
        happened = server.on_engine(lambda: server.inspector._log)
        assert happened.num_generated_tokens == 0
        assert happened.num_prompt_tokens == 3 * count - cached[-1]
        assert not happened.requests
        assert server.service.engine_client.clocks.is_empty
