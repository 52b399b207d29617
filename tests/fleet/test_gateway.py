"""A gateway: what it answers, and what it makes of replicas that it cannot believe."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.fleet.config import GatewayConfig
from quire.fleet.gateway import FleetServer, find_model
from quire.fleet.link import LinkLost
from quire.fleet.membership import StaticMembers
from quire.server.api import rerank
from quire.server.http.api_error import ApiError
from tests.certificates import certificate
from tests.fleet.asks import CHAT, COMPLETIONS, EMBEDDINGS, Answer, compared, take
from tests.fleet.fake_replica import END, STATE, Calls, faking, frame
from tests.fleet.gateways import (
    SECRET,
    Front,
    drain,
    fronting,
    get_the_request,
    lose,
    replica_of,
    replicas,
    say_rates,
    slow,
    slowed,
    undrain,
    until,
    value,
)
from tests.fleet.serving import gateway
from tests.marks import of_long_runs
from tests.server.serving import Answer as HttpAnswer
from tests.server.serving import Serving, serving

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica counts as hung here: on a busy machine this process may stand still for longer than that takes."""
    monkeypatch.setattr("quire.fleet.link.SILENCE", 60.0)


@pytest.fixture(scope="module")
def two() -> Iterator[list[Serving]]:
    """Two replicas, which know how fast they are: as long as one does not, it counts as fast as any other one."""
    with replicas(2) as running:
        for each in running:
            each.headers["Authorization"] = f"Bearer {SECRET}"
            assert each.post(COMPLETIONS, prompt="import os\n", max_tokens=20, ignore_eos=True).status == 200
            assert each.on_engine(replica_of(each)._state).seconds_a_step > 0
        yield running


@pytest.fixture(scope="module")
def fleet(two: list[Serving]) -> Iterator[Front]:
    """A gateway of both."""
    with fronting(*(each.url for each in two)) as running:
        yield running


def test_one_request_may_come_twice_at_a_time(two: list[Serving]) -> None:
    """As when a client goes to another gateway before the first one has noticed: the names are the same."""
    body = {"prompt": "def f(x):\n", "max_tokens": 60, "ignore_eos": True}
    search = body | {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 8}
    with fronting(two[0].url) as here, fronting(two[0].url) as there:
        for each in (body, search):
            ask = partial(Front.ask, method="POST", path=COMPLETIONS, body=each, headers={"Idempotency-Key": "k"})
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(ask, (here, there, here, there)))
            assert [answer.status for answer in found] == [200] * 4, [answer.body for answer in found]
            assert len({str(answer.json()["choices"]) for answer in found}) == 1


# ------------------------------------------------------------------------------------- streams that are continued


def put_together(*parts: bytes) -> Answer:
    """What a client has that takes each event as it comes."""
    answer = Answer(status=200)
    for event in b"".join(parts).split(b"\n\n")[:-1]:
        take(answer, event)
    return answer


CONTINUED = {
    "n": (COMPLETIONS, {"prompt": "def f(x):\n", "n": 3, "stop": ["\n\n"]}),
    "several": (COMPLETIONS, {"prompt": ["import os\n", "class A:\n", "x"], "echo": True, "logprobs": 2}),
    "characters": (COMPLETIONS, {"prompt": "x", "regex": "(🙂|漢|字){12}", "stop": "字漢🙂"}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "a list"}], "n": 2, "logprobs": True}),
    "penalties": (CHAT, {"messages": [{"role": "user", "content": "a list"}], "frequency_penalty": 1.0}),
    "constraints": (
        COMPLETIONS,
        {
            "prompt": "def f(x):\n",
            "logit_bias": {"300": 5.0, "301": 5.0, "12": -100},
            "bad_words": ["return", " x"],
            "allowed_token_ids": list(range(10, 400)),
            "min_p": 0.01,
            "truncate_prompt_tokens": 3,
            "prompt_logprobs": 1,
        },
    ),
}


@pytest.mark.parametrize("kind", CONTINUED)
def test_a_stream_goes_on_after_each_of_its_events(two: list[Serving], fleet: Front, kind: str, long: bool) -> None:
    """A cut may fall after any event. What the client has then and what it gets for the last id are the answer."""
    path, own = CONTINUED[kind]
    body = own | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 7, "seed": 3}
    whole = fleet.ask("POST", path, body).body
    expected = put_together(whole)
    assert expected.is_done
    assert expected.choices == put_together(two[0].ask("POST", path, body).body).choices  # as a plain server says it
    events = [event + b"\n\n" for event in whole.split(b"\n\n")[:-1]]
    for cut in range(1, len(events), 1 if long else max(1, len(events) // 3)):
        had = put_together(*events[:cut])
        if had.last_id is None:
            continue
        rest = fleet.ask("POST", path, body, {"Last-Event-ID": had.last_id}).body
        found = put_together(*events[:cut], rest)
        assert (found.choices, found.is_done) == (expected.choices, True), cut
        if had.usage is None:
            assert compared({"usage": found.usage}) == compared({"usage": expected.usage}), cut
        second = rest.split(b"\n\n")[:-1]
        # And when the second gateway goes, too.
        for again in range(1, len(second), 6) if long else (len(second) // 2,):
            head = [*events[:cut], *(event + b"\n\n" for event in second[:again])]
            had = put_together(*head)
            rest = fleet.ask("POST", path, body, {"Last-Event-ID": had.last_id or ""}).body
            assert put_together(*head, rest).choices == expected.choices, (cut, again)


def test_calls_and_reasoning_through_a_gateway(two: list[Serving], long: bool) -> None:
    """Replicas follow the grammars, the gateway reads the answers; a stream goes on within a call or a thought."""
    zones = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
    clock = {"type": "function", "function": {"name": "clock", "parameters": zones | {"additionalProperties": False}}}
    said = [{"role": "user", "content": "the time"}, {"role": "assistant", "content": "<think>well"}]
    body = {
        "messages": said, "continue_final_message": True, "thinking_token_budget": 5, "tools": [clock],
        "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80, "seed": 3,
    }  # fmt: skip
    own = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with fronting(*(each.url for each in two), **own) as front:
        answer = front.ask("POST", CHAT, body)
        assert answer.status == 200, answer.body
        [choice] = answer.json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")
        assert choice["finish_reason"] == "tool_calls"
        whole = front.ask("POST", CHAT, body | {"stream": True}).body
        expected = put_together(whole)
        assert expected.choices[0]["calls"][0][1:] == ["clock", call["function"]["arguments"]]
        events = [event + b"\n\n" for event in whole.split(b"\n\n")[:-1]]
        for cut in range(1, len(events), 1 if long else 12):
            if (last := put_together(*events[:cut]).last_id) is not None:
                rest = front.ask("POST", CHAT, body | {"stream": True}, {"Last-Event-ID": last}).body
                assert put_together(*events[:cut], rest).choices == expected.choices, cut
        broken = clock["function"] | {"parameters": {"properties": {"a": {"multipleOf": 0}}}}
        refused = front.ask("POST", CHAT, body | {"tools": [clock | {"function": broken}]})
        assert (refused.status, refused.error()["param"]) == (400, "tools")


# ------------------------------------------------------------------------------------------------ as a plain server


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": "x", "temprature": 1}),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usag": 1}}),
    (COMPLETIONS, {"prompt": "x", "model": "another"}),
    (COMPLETIONS, {"prompt": "a " * 2000}),
    (COMPLETIONS, {"prompt": [1, 2, 99_999]}),
    (COMPLETIONS, {"prompt": "x", "n_predict": 5}),
    (COMPLETIONS, {"prompt": "x", "n": 2, "best_of": 1}),
    (COMPLETIONS, {"prompt": "x", "regex": "(a"}),
    (COMPLETIONS, {"prompt": "x", "regex": "a", "grammar": "b"}),
    (COMPLETIONS, {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}),
    (COMPLETIONS, {"prompt": "x", "regex": "(a", "stream": True}),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [5000]}),
    (COMPLETIONS, {"prompt": "x", "logprobs": 50}),
    (COMPLETIONS, {"prompt": "x" * 60, "use_beam_search": True, "n": 100}),
    (COMPLETIONS, {"prompt": "x", "use_beam_search": True, "n": 9, "temperature": 0}),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 5, "max_tokens": 4}),
    (CHAT, {"messages": [{"role": "user", "content": "a", "contents": 0}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 2000}]}),
    (EMBEDDINGS, {"input": [99_999]}),
    (EMBEDDINGS, {"input": "x", "dimensions": 10_000}),
    ("/tokenize", {"prompt": "x", "return_token_str": True}),
    ("/detokenize", {"tokens": [99_999]}),
]


def said(answer: HttpAnswer) -> tuple[int, str]:
    """A status and a body, without the names of requests."""
    return answer.status, re.sub(r"\b(cmpl|chatcmpl|embd)-[0-9a-f]{32}[-~0-9]*", "REQUEST", answer.body.decode())


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_what_is_wrong_is_said_as_a_plain_server_says_it(
    two: list[Serving], fleet: Front, path: str, body: dict[str, Any]
) -> None:
    plain, found = two[0].ask("POST", path, body), fleet.ask("POST", path, body)
    assert said(found) == said(plain)
    assert plain.status in (400, 404)


def test_the_other_routes_answer_as_a_plain_server_does(two: list[Serving], fleet: Front) -> None:
    assert fleet.get("/health").status == fleet.get("/ready").status == 200
    mine, theirs = fleet.get("/v1/models").json(), two[0].get("/v1/models").json()
    for models in (mine, theirs):
        for model in models["data"]:
            model.pop("created")
    assert mine == theirs
    for path, body in (
        ("/tokenize", {"prompt": "für 漢字", "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"content": "für 漢字", "with_pieces": True}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        assert fleet.ask("POST", path, body).json() == two[0].ask("POST", path, body).json()
    assert fleet.get("/tokenizer_info").json() == two[0].get("/tokenizer_info").json()
    assert fleet.get("/version").json() == two[0].get("/version").json()
    body = {"prompt": "import os\n", "n_predict": 8, "temperature": 0}
    varying = {"timings": None, "tokens_cached": 0}
    answers = [one.post("/completion", **body).json() | varying for one in (fleet, two[0])]
    assert answers[0] == answers[1]
    settings = fleet.get("/props").json()
    assert settings == two[0].get("/props").json() | {"total_slots": settings["total_slots"]}
    assert settings["total_slots"] == sum(one.service.engine_client.engine.scheduler.max_num_seqs for one in two)
    assert [one["id"] for one in fleet.get("/slots").json()] == list(range(settings["total_slots"]))


def test_further_protocols_through_a_gateway(two: list[Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """They answer as a plain server does, also where a replica is lost on the way."""
    responses = {"input": "a list", "max_output_tokens": 40, "temperature": 0}
    messages = {"messages": [{"role": "user", "content": "a list"}], "max_tokens": 40, "temperature": 0}
    documents = {"query": "import os", "documents": ["import sys", "class Stack:", "x"]}
    monkeypatch.setattr(rerank, "QUESTION", "# {} | {} | {}\n")
    monkeypatch.setattr(rerank, "ANSWERS", ("def", "import"))
    with fronting(*(each.url for each in two), reranker="yes-no", ollama=True) as front, serving() as plain:
        text = plain.post("/v1/messages", **messages).json()["content"][0]["text"]
        chat = front.post("/api/chat", messages=messages["messages"], options={"num_predict": 40, "temperature": 0})
        assert "".join(json.loads(line)["message"]["content"] for line in chat.body.splitlines()) == text
        assert front.post("/v1/messages", **messages).json()["content"][0]["text"] == text
        refused = front.post("/api/pull", model="someone/tiny")
        assert (refused.status, "a server of one model allows it" in refused.json()["error"]) == (403, True)
        scores = [one["score"] for one in plain.post("/v1/score", text_1="a", text_2=["b", "c"]).json()["data"]]
        with fronting(two[0].url) as by_vectors:
            found = by_vectors.post("/v1/score", text_1="a", text_2=["b", "c"]).json()["data"]
            assert [one["score"] for one in found] == scores
        results = front.post("/v1/rerank", **documents).json()["results"]
        with serving(reranker="yes-no") as other:
            assert other.post("/v1/rerank", **documents).json()["results"] == results
        for each in two:
            slow(each, 0.02)
        try:
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(front.post, "/v1/responses", stream=True, **responses)
                lose(until_one_serves(two))
                body = asked.result(60).body
        finally:
            for each in two:
                slow(each, 0.0)
        last = json.loads(body.split(b"\n\n")[-2].partition(b"data: ")[2])
        assert (last["type"], last["response"]["output"][0]["content"][0]["text"]) == ("response.incomplete", text)
        assert b"id: " not in body  # such a stream is not continued by a client


def until_one_serves(servers: list[Serving]) -> Serving:
    """The replica that has begun to generate."""

    def serving_one() -> Serving | None:
        return next((each for each in servers if each.service.engine_client.num_samples), None)

    until(lambda: serving_one() is not None)
    found = serving_one()
    assert found is not None
    return found


def test_tenants_share_no_blocks(two: list[Serving]) -> None:
    """Nor does a client without a key get an answer."""
    with fronting(*(each.url for each in two), api_key=("one", "another")) as fleet:

        def cached(key: str) -> int:
            body = {"prompt": "tenants have secrets\n" * 10, "max_tokens": 1}
            answer = fleet.ask("POST", COMPLETIONS, body, {"Authorization": f"Bearer {key}"})
            assert answer.status == 200, answer.body
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached("one"), cached("another")] == [0, 0]
        until(lambda: cached("one") > 30)
        until(lambda: cached("another") > 30)
        assert fleet.ask("POST", COMPLETIONS, {"prompt": "x"}, {"Authorization": "Bearer other"}).status == 401
        assert fleet.ask("POST", COMPLETIONS, {"prompt": "x"}).status == 401


def test_a_replica_keeps_what_a_client_of_the_gateway_asks_to_keep(two: list[Serving], fleet: Front) -> None:
    def kept() -> list[tuple[str, bool]]:
        managers = [one.service.engine_client.engine.scheduler.manager for one in two]
        return [
            (owner.key, until - manager.now > 80_000)
            for manager in managers
            for owner, _, until in manager.retained[0].owners()
        ]

    body = {"messages": [{"role": "user", "content": "keep this\n" * 20}], "max_tokens": 1, "prompt_cache_key": "mine"}
    assert fleet.post("/v1/chat/completions", **body, prompt_cache_retention="24h").status == 200
    until(lambda: kept() == [("mine", True)])


def test_equal_prompts_at_once_cost_one_prefill() -> None:
    """Which replica holds a prompt is known when it is sent there, before it is computed."""
    prompt = "".join(f"x{i} = {i * i}\n" for i in range(40))
    options = {"num_blocks": 512, "max_num_seqs": 40}
    with serving(options, fleet_secret=SECRET) as one, serving(options, fleet_secret=SECRET) as other:
        for each in (one, other):
            say_rates(each, 1e-2)
            each.service.engine_client.engine.scheduler.prefetch.sources.clear()  # nor from the other one
        with fronting(one.url, other.url) as fleet:
            num_prompt = fleet.post("/tokenize", prompt=prompt).json()["count"]
            with ThreadPoolExecutor(32) as pool:
                bodies = [{"prompt": prompt, "max_tokens": 4, "seed": seed} for seed in range(32)]
                found = list(pool.map(lambda body: fleet.ask("POST", COMPLETIONS, body), bodies))
            assert {answer.status for answer in found} == {200}
            computed, cached = (sum(each) for each in zip(counted(one), counted(other), strict=True))
        assert computed + cached == 32 * num_prompt
        # One prefill; and of each other request what stands after its last full block.
        assert computed == num_prompt + 31 * (num_prompt % 16)


def counted(replica: Serving) -> tuple[int, int]:
    """Prompt tokens that a replica has computed, and that it found in its cache."""
    total = value(replica, "quire:prompt_tokens_total")
    cached = value(replica, "quire:prompt_tokens_cached_total")
    return int(total - cached), int(cached)


def test_a_replica_that_looks_stuck_for_a_beat_keeps_its_sessions(
    two: list[Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped within a step: the step goes on with the process."""
    stuck, gone = [True, False, True, True], list[bool]()

    def check_health() -> None:
        gone.append(session._gone)
        if stuck and stuck.pop(0):
            raise ApiError("the engine is stuck")

    with fronting(two[0].url) as fleet:
        *_, session = replica_of(two[0])._sessions.values()  # the last one that began
        monkeypatch.setattr(two[0].service.engine_client, "check_health", check_health)
        until(lambda: value(fleet, "quire:fleet_lost_total", replica=two[0].url) == 1)
    assert (gone[:4], session._gone) == ([False] * 4, True)


def named_in(answer: HttpAnswer) -> set[str]:
    """The systems that the chunks of a stream name."""
    lines = [line[6:] for line in answer.body.splitlines() if line.startswith(b"data: {")]
    return {json.loads(line)["system_fingerprint"] for line in lines}


@pytest.mark.parametrize("own", [{}, {"n": 2, "use_beam_search": True}], ids=["drawn", "beams"])
def test_equal_replicas_have_one_system_fingerprint(two: list[Serving], fleet: Front, own: dict[str, Any]) -> None:
    """With other options that no bit depends on a plain server has it, too."""
    body = {"prompt": "import os\n", "max_tokens": 3, **own}
    right = f"fp_{replica_of(two[0]).fingerprint.digest[:10]}"
    with serving() as plain:
        for server in (*two, fleet, plain):
            assert server.post(COMPLETIONS, **body).json()["system_fingerprint"] == right
    assert named_in(fleet.post(COMPLETIONS, stream=True, **body)) == {right}
    assert fleet.post("/v1/embeddings", input="a").json()["system_fingerprint"] == right


def test_a_gateway_names_the_system_of_the_replica_that_answers(two: list[Serving]) -> None:
    """One that computes other bits of the same model is asked, and named."""

    def called(call: dict[str, Any]) -> list[Any] | tuple[int, Any]:
        if "beam_width" in call:
            return 200, {"failure": None, "found": [[[7, 8], -1.0, -0.5, "length", []]]}
        return [frame(call, sample, 0, [7], 0, "x", None, ["stop", None, None]) for sample in (0, 1)]

    with faking(two[0], called, torch="another") as fake, fronting(two[0].url, fake.url) as fleet:
        assert fleet.gateway.fleet.roster.model.digest == replica_of(two[0]).fingerprint.digest
        right = f"fp_{fake.hello['fingerprint']['digest'][:10]}"
        for own in ({}, {"use_beam_search": True}):
            found = fleet.post(COMPLETIONS, prompt="a", n=2, max_tokens=20, **own)
            assert (found.status, found.json()["system_fingerprint"]) == (200, right)
        assert named_in(fleet.post(COMPLETIONS, prompt="a", n=2, max_tokens=20, stream=True)) == {right}
        assert len(fake.calls) == 3


# ------------------------------------------------------------------------------------- replicas that are not believed

BODY: dict[str, Any] = {"prompt": "def f(x):\n", "max_tokens": 20, "seed": 5, "ignore_eos": True}


def text_of(answer: HttpAnswer) -> str:
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["text"])


LIES: dict[str, Calls] = {
    "tokens are missing": lambda call: [frame(call, 0, 3, [7], 0, "x")],
    "characters are missing": lambda call: [frame(call, 0, 0, [7], 3, "x")],
    "a position is negative": lambda call: [frame(call, 0, -1, [7], 0, "x")],
    "a frame is none": lambda call: [{"frames": [{}]}],
    "an end is none": lambda call: [frame(call, 0, 0, [], 0, "", None, ["done", None, None])],
    "logprobs are missing": lambda call: [frame(call, 0, 0, [7], 0, "x")],
    "what is rare is a number": lambda call: [frame(call, 0, 0, [7], 0, "x", None, None, 5)],
    "a count is a text": lambda call: [frame(call, 0, 0, [7], 0, "x", None, None, {"cached": "a"})],
    "a block event is a number": lambda call: [{"event": 0, "events": [5]}],
    "a snapshot has lists": lambda call: [{"event": 0, "snapshot": [[1]]}],
    "frames are a number": lambda call: [{"frames": 5}],
    "a status is none": lambda call: [{"failed": [[call["flow"], 7, {"error": "text"}]]}],
    "a status is of no error": lambda call: [{"failed": [[call["flow"], 204, {}]]}],
    "a status that there is not": lambda call: [{"failed": [[call["flow"], 599, {}]]}],
    "a line is no object": lambda call: [b"[]\n"],
    "a line is no JSON": lambda call: [b"{]\n"],
    "a block event is missing": lambda call: [{"event": 7, "events": [["+", 1]]}],
    "a block event comes again": lambda call: [{"event": 0, "events": [["+", 1]]}, {"event": 0, "events": [["+", 1]]}],
}


@pytest.mark.parametrize("lies", [[*LIES][i::3] for i in range(3)], ids=lambda lies: lies[0])
def test_who_contradicts_himself_is_left_and_another_goes_on(two: list[Serving], lies: list[str]) -> None:
    """All of them are asked before the one that does not lie, which is slower."""
    body = BODY | {"logprobs": 1}
    expected = two[0].ask("POST", COMPLETIONS, body).json()["choices"]
    with ExitStack() as stack:
        fakes = [stack.enter_context(faking(two[0], LIES[lie])) for lie in lies]
        fleet = stack.enter_context(fronting(*(fake.url for fake in fakes), two[0].url))
        found = fleet.ask("POST", COMPLETIONS, body)
        assert found.status == 200, found.body
        assert found.json()["choices"] == expected
        for lie, fake in zip(lies, fakes, strict=True):
            assert fake.calls, f"it was not asked: {lie}"
            assert value(fleet, "quire:fleet_contradictions_total", replica=fake.url) >= 1, lie
        assert value(fleet, "quire:fleet_resume_mismatch_total") == 0


FOUND = {"failure": None, "found": [[[7, 8], -1.0, -0.5, "length"]]}
SEARCH_LIES: dict[str, tuple[int, Any]] = {
    "nothing": (200, {}),
    "no failure": (200, {"found": []}),
    "no object": (200, [FOUND]),
    "a failure that is a number": (200, FOUND | {"failure": 5}),
    "found is an object": (200, FOUND | {"found": {}}),
    "more than were asked for": (200, FOUND | {"found": FOUND["found"] * 3}),
    "a hypothesis is a number": (200, FOUND | {"found": [7]}),
    "a hypothesis lacks its score": (200, FOUND | {"found": [[[7], -1.0, "length"]]}),
    "tokens are texts": (200, FOUND | {"found": [[["a"], -1.0, -0.5, "length"]]}),
    "tokens are negative": (200, FOUND | {"found": [[[-7], -1.0, -0.5, "length"]]}),
    "more tokens than were asked for": (200, FOUND | {"found": [[[7] * 9, -1.0, -0.5, "length"]]}),
    "a logprob is a text": (200, FOUND | {"found": [[[7], "x", -0.5, "length"]]}),
    "an end that there is not": (200, FOUND | {"found": [[[7], -1.0, -0.5, ["stop"]]]}),
    "a status that there is not": (299, FOUND),
    "a status of nothing": (204, None),
    "an error that there is not": (599, {"error": {"message": "no"}}),
}


def test_a_search_goes_elsewhere_where_its_answer_cannot_be(two: list[Serving]) -> None:
    body = BODY | {"use_beam_search": True, "n": 2, "seed": None, "max_tokens": 8}
    expected = two[0].ask("POST", COMPLETIONS, body).json()["choices"]
    lies = iter(SEARCH_LIES.values())
    with faking(two[0], lambda call: next(lies)) as fake, fronting(fake.url, two[0].url) as fleet:
        for count, lie in enumerate(SEARCH_LIES, 1):
            until(lambda: value(fleet, "quire:fleet_replica_up", replica=fake.url) == 1)
            found = fleet.ask("POST", COMPLETIONS, body)
            assert len(fake.calls) == count, f"it was not asked: {lie}"
            assert (found.status, found.json().get("choices")) == (200, expected), lie
            assert value(fleet, "quire:fleet_contradictions_total", replica=fake.url) == count, lie


@pytest.mark.parametrize("status", [299, of_long_runs(460), of_long_runs(599)])
def test_a_status_that_there_is_not_refuses_nothing(two: list[Serving], status: int) -> None:
    error = {"error": {"message": "no"}}
    with faking(two[0], lambda call: (status, error)) as fake:
        with fronting(fake.url, two[0].url) as fleet:
            assert text_of(fleet.ask("POST", COMPLETIONS, BODY)) == text_of(two[0].ask("POST", COMPLETIONS, BODY))
            assert value(fleet, "quire:fleet_contradictions_total", replica=fake.url) == 1
        with fronting(fake.url, patience=0.3) as fleet:  # where there is no other one
            found = fleet.ask("POST", COMPLETIONS, BODY)
            assert (found.status, found.error()["code"]) == (503, "no_replica")


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_end_that_comes_with_what_cannot_be_is_none(two: list[Serving], is_stream: bool) -> None:
    """Else the sample has ended where nothing counts it, and its client waits for ever."""
    body = BODY | {"prompt_logprobs": 1, "stream": is_stream}

    def called(call: dict[str, Any]) -> list[Any]:
        return [frame(call, 0, 0, [7], 0, "x", None, ["stop", None, None], {"prompt_logprobs": [99, []]})]

    with faking(two[0], called) as fake, fronting(fake.url, two[0].url) as fleet:
        found, expected = (each.ask("POST", COMPLETIONS, body) for each in (fleet, two[0]))
        assert fake.calls, "it was not asked"
        if is_stream:
            assert put_together(found.body).choices == put_together(expected.body).choices
        else:
            assert found.json()["choices"] == expected.json()["choices"]
        assert value(fleet, "quire:fleet_contradictions_total", replica=fake.url) >= 1


def test_a_refusal_may_be_any_json(two: list[Serving]) -> None:
    bodies: list[Any] = [{"error": "text"}, [1], "text", {"error": [1]}, {"error": {"code": []}}]
    expected, refusals = text_of(two[0].ask("POST", COMPLETIONS, BODY)), iter(bodies)
    with faking(two[0], lambda call: (500, next(refusals))) as fake, fronting(fake.url, two[0].url) as fleet:
        for count, body in enumerate(bodies, 1):
            assert text_of(fleet.ask("POST", COMPLETIONS, BODY)) == expected, body
            assert len(fake.calls) == count, f"it was not asked: {body}"


@pytest.mark.parametrize("change", [{"block_size": 0}, {"block_size": "16"}, {"has_windows": 1}], ids=str)
def test_a_replica_that_cannot_be_gets_nothing(two: list[Serving], change: dict[str, Any]) -> None:
    with faking(two[0], lambda call: []) as fake:
        fake.hello |= change
        with gateway(two[0].url, fake.url) as fleet:
            until(lambda: value(fleet, "quire:fleet_contradictions_total", replica=fake.url) >= 1)
            assert text_of(fleet.ask("POST", COMPLETIONS, BODY)) == text_of(two[0].ask("POST", COMPLETIONS, BODY))
            assert not fake.calls


def test_frames_of_what_was_never_asked_are_counted_and_dropped(two: list[Serving]) -> None:
    def called(call: dict[str, Any]) -> list[Any]:
        stranger = call | {"flow": 10_000}
        return [
            frame(stranger, 0, 0, [7], 0, "x"),
            frame(call, 5, 0, [7], 0, "x"),
            {"failed": [[10_000, 500, {}]]},
            END,
        ]

    with faking(two[0], called) as fake, fronting(fake.url, two[0].url) as fleet:
        assert text_of(fleet.ask("POST", COMPLETIONS, BODY)) == text_of(two[0].ask("POST", COMPLETIONS, BODY))
        assert value(fleet, "quire:fleet_late_frames_total") >= 2
        assert value(fleet, "quire:fleet_contradictions_total") == 0


@pytest.mark.parametrize("resume", ["exact", "any", "never"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_token_that_no_other_replica_would_draw(two: list[Serving], resume: str, is_stream: bool) -> None:
    """What was delivered cannot be taken back. Whether the answer ends there is what --resume says."""
    wrong = 7
    body = BODY | {"stream": is_stream, "temperature": 0}
    text = two[0].post("/detokenize", tokens=[wrong]).json()["prompt"]

    def called(call: dict[str, Any]) -> list[Any]:
        return [frame(call, 0, 0, [wrong], 0, text), END]

    with faking(two[0], called) as fake, fronting(fake.url, two[0].url, resume=resume) as fleet:
        found = fleet.ask("POST", COMPLETIONS, body)
        mismatches = value(fleet, "quire:fleet_resume_mismatch_total")
    if is_stream:
        assert found.status == 200
        answer = put_together(found.body)
        whole, said = answer.choices.get(0, {"text": ""})["text"], "".join(answer.errors)
        assert whole.startswith(text), "what came before the error is delivered"
    else:
        whole = found.json()["choices"][0]["text"] if found.status == 200 else ""
        said = "" if found.status == 200 else found.error()["message"]
    if resume == "exact":
        assert f"was delivered as {wrong} before the request was interrupted" in said
        assert mismatches == 1
    elif resume == "any":
        assert said == ""
        assert whole.startswith(text)
        assert len(whole) > len(text) + 5
        assert mismatches == 1
    else:
        assert f"{fake.url} was lost, and --resume is 'never'" in said
        assert mismatches == 0


def test_a_request_does_not_cross_to_other_bits(two: list[Serving]) -> None:
    def called(call: dict[str, Any]) -> list[Any]:
        fake.is_down = True
        return [frame(call, 0, 0, [7], 0, "x"), END]

    with faking(two[0], called, dtype="float32") as fake, fronting(fake.url, two[0].url, patience=0.3) as fleet:
        found = fleet.ask("POST", COMPLETIONS, BODY)
        assert found.status == 503
        assert found.headers["retry-after"] == "1"
        assert f"{two[0].url} computes other bits" in found.error()["message"]
        assert f"{fake.url} does not answer: " in found.error()["message"]
        fake.is_down = False
        until(lambda: value(fleet, "quire:fleet_replica_up", replica=fake.url) == 1)
        stream = put_together(fleet.ask("POST", COMPLETIONS, BODY | {"stream": True}).body)
        assert stream.choices[0]["text"] == "x"
        assert "computes other bits" in "".join(stream.errors)
        assert stream.is_done
        # What begins now begins at the other one.
        assert text_of(fleet.ask("POST", COMPLETIONS, BODY)) == text_of(two[0].ask("POST", COMPLETIONS, BODY))


def test_the_logprobs_of_a_prompt_are_of_one_replica_class(two: list[Serving]) -> None:
    """A request without a token begins again with other bits, and so do the positions that were reported."""

    def called(call: dict[str, Any]) -> list[Any]:
        fake.is_down = True
        more = {"cached": 0, "prompt_logprobs": [1, [[[5, -99.0, 1, "x"]], [[6, -99.0, 1, "y"]]]]}
        return [frame(call, 0, 0, [], 0, "", None, None, more), END]

    body = BODY | {"prompt_logprobs": 1, "temperature": 0}
    with faking(two[0], called, dtype="float32") as fake, fronting(fake.url, two[0].url) as fleet:
        found = fleet.ask("POST", COMPLETIONS, body).json()["choices"]
        assert len(fake.calls) == 1
        assert found == two[0].ask("POST", COMPLETIONS, body).json()["choices"]


def test_another_dtype_is_another_class_and_what_drains_there_stays(two: list[Serving]) -> None:
    body = BODY | {"max_tokens": 60, "temperature": 0.9}
    with serving({"dtype": "float32"}, slowed, fleet_secret=SECRET) as other:
        expected = text_of(other.ask("POST", COMPLETIONS, body))
        assert expected != text_of(two[0].ask("POST", COMPLETIONS, body))
        slow(other, 0.1)
        get_the_request(other, two[0])
        with fronting(other.url, two[0].url) as fleet, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(fleet.ask, "POST", COMPLETIONS, body)
            until(lambda: value(fleet, "quire:fleet_time_to_first_token_seconds_count") == 1)
            drain(other)
            until(lambda: fleet.gateway.fleet.mover._draining)
            slow(other, 0.0)
            assert text_of(asked.result()) == expected
            assert value(fleet, "quire:fleet_resumed_total") == 0


def test_at_sigterm_a_replica_hands_its_streams_over_before_its_grace_ends(two: list[Serving]) -> None:
    body = BODY | {"max_tokens": 60, "temperature": 0.9}
    with serving({}, slowed, fleet_secret=SECRET, drain_grace=3600.0) as leaving:
        assert leaving.get("/ready").status == 200
        assert leaving.server is not None
        get_the_request(leaving, two[0])
        slow(leaving, 0.1)
        with fronting(leaving.url, two[0].url) as fleet, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(fleet.ask, "POST", COMPLETIONS, body)
            until(lambda: value(fleet, "quire:fleet_time_to_first_token_seconds_count") == 1)
            leaving.server.handle_exit(signal.SIGTERM, None)
            assert text_of(asked.result()) == text_of(two[0].ask("POST", COMPLETIONS, body))
            assert value(fleet, "quire:fleet_resumed_total", reason="drained") == 1
        assert leaving.get("/ready").status == 503
        leaving.server.end_of_grace = 0.0


def test_a_gateway_with_a_certificate_serves_https(two: list[Serving], tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with fronting(two[0].url, ssl_certfile=cert, ssl_keyfile=key) as fleet:
        trusting = ssl.create_default_context(cafile=str(cert))
        with urllib.request.urlopen(f"https://127.0.0.1:{fleet.port}/ready", timeout=30, context=trusting) as answer:
            assert answer.status == 200


def test_a_replica_of_another_tokenizer_gets_nothing(two: list[Serving]) -> None:
    with faking(two[0], lambda call: [], tokenizer="another") as fake, fronting(two[0].url, fake.url) as fleet:
        assert text_of(fleet.ask("POST", COMPLETIONS, BODY)) == text_of(two[0].ask("POST", COMPLETIONS, BODY))
        assert not fake.calls
        assert value(fleet, "quire:fleet_left_out_total", replica=fake.url) >= 1


# ------------------------------------------------------------------------------------ replicas that cannot be asked


def test_a_wrong_secret_ends_the_gateway_with_a_sentence(two: list[Serving]) -> None:
    found = two[0].ask("GET", "/fleet/model", None, {"Authorization": "Bearer wrong"})
    assert found.status == 401
    config = GatewayConfig(fleet_secret="wrong")
    with pytest.raises(ConfigError, match=f"{two[0].url} does not serve this fleet: HTTP status 401"):
        asyncio.run(find_model(StaticMembers([two[0].url]), config))
    with serving() as plain, pytest.raises(ConfigError, match=f"{plain.url} does not serve this fleet"):
        fronting(plain.url).__enter__()


def test_an_unknown_session_is_refused_by_its_code(two: list[Serving]) -> None:
    for path in ("/fleet/generate", "/fleet/abort", "/fleet/search", "/fleet/match"):
        found = two[0].ask("POST", path, {"session": "1234", "flow": 1})
        assert (found.status, found.error()["code"]) == (404, "unknown_session"), path


@pytest.mark.parametrize("refusal", [(404, "unknown_session"), (503, "draining"), (429, None)])
def test_a_replica_that_refuses_is_passed_over(two: list[Serving], refusal: tuple[int, str | None]) -> None:
    status, code = refusal
    error = {"error": {"message": "no", "type": "x", "param": None, "code": code}}
    expected = text_of(two[0].ask("POST", COMPLETIONS, BODY))  # from now on it knows what its steps take
    with faking(two[0], lambda call: (status, error)) as fake, fronting(fake.url, two[0].url) as fleet:
        assert text_of(fleet.ask("POST", COMPLETIONS, BODY)) == expected
        search = {"prompt": "x", "use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 5}
        found = fleet.ask("POST", COMPLETIONS, search)
        assert found.json()["choices"] == two[0].ask("POST", COMPLETIONS, search).json()["choices"]
        assert len(fake.calls) == 2


def test_where_all_are_full_the_client_is_to_come_again(two: list[Serving]) -> None:
    error = {"error": {"message": "it is full", "type": "x", "param": None, "code": None}}

    def full(call: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 429, error

    with faking(two[0], full) as fake, faking(two[0], full) as other, fronting(fake.url, other.url) as fleet:
        for body in (BODY, BODY | {"use_beam_search": True, "n": 2, "seed": None}):
            found = fleet.ask("POST", COMPLETIONS, body)
            assert (found.status, found.headers["retry-after"]) == (429, "1")
            assert found.error()["message"] == "it is full"
        assert len(fake.calls) == len(other.calls) == 2


def test_without_a_replica_there_is_an_answer_after_some_patience(two: list[Serving]) -> None:
    with serving(fleet_secret=SECRET) as only, fronting(only.url, patience=0.3) as fleet:
        stream = put_together(fleet.ask("POST", COMPLETIONS, BODY | {"stream": True}).body)
        assert not stream.errors
        assert only.server is not None
        only.server.should_exit = True
        until(lambda: fleet.get("/ready").status == 503)
        for body in (BODY, BODY | {"use_beam_search": True, "n": 2, "seed": None}, BODY | {"stream": True}):
            found = fleet.ask("POST", COMPLETIONS, body)
            assert (found.status, found.headers["retry-after"], found.error()["code"]) == (503, "1", "no_replica")
            assert "no replica can take the request" in found.error()["message"]
        assert fleet.get("/v1/models").status == 200


def test_a_replica_that_comes_in_time_is_waited_for(two: list[Serving]) -> None:
    with faking(two[0], lambda call: [], dtype="float32") as fake, ThreadPoolExecutor(1) as pool:
        fake.first_lines = [{"event": 0, "snapshot": [], "state": STATE | {"draining": True}}]
        with fronting(fake.url, two[0].url, patience=20.0) as fleet:
            drain(two[0])
            until(lambda: fleet.get("/ready").status == 503)
            asked = pool.submit(fleet.ask, "POST", COMPLETIONS, BODY)
            undrain(two[0])
            assert text_of(asked.result()) == text_of(two[1].ask("POST", COMPLETIONS, BODY))


@pytest.mark.parametrize("extra", [{}, {"use_beam_search": True, "n": 2, "seed": None}])
def test_what_the_only_replica_refuses_as_it_drains_waits_for_another_one(
    two: list[Serving], extra: dict[str, Any]
) -> None:
    """The others may be on their way back when it stops: its refusal is no answer."""
    error = {"error": {"message": "no", "type": "x", "param": None, "code": "draining"}}
    body = BODY | extra
    with (
        faking(two[0], lambda call: (503, error)) as fake,
        ThreadPoolExecutor(1) as pool,
        fronting(fake.url, two[0].url, patience=20.0) as fleet,
    ):
        drain(two[0])
        asked = pool.submit(fleet.ask, "POST", COMPLETIONS, body)
        until(lambda: len(fake.calls) > 0)
        undrain(two[0])
        found = asked.result()
        assert found.json()["choices"] == two[1].ask("POST", COMPLETIONS, body).json()["choices"]


def test_a_stream_that_is_not_taken_may_begin_elsewhere(two: list[Serving]) -> None:
    """At replicas of other bits, too: nothing of it is delivered."""
    error = {"error": {"message": "no", "type": "x", "param": None, "code": "draining"}}
    body = BODY | {"stream": True, "prompt": ["def f(x):\n", "class A:\n"]}
    with faking(two[0], lambda call: (503, error), dtype="float32") as fake, fronting(fake.url, two[0].url) as fleet:
        found = put_together(fleet.ask("POST", COMPLETIONS, body).body)
        assert fake.calls, "it was not asked"
        assert not found.errors
        assert found.choices == put_together(two[0].ask("POST", COMPLETIONS, body).body).choices


@pytest.mark.parametrize("extra", [{}, {"use_beam_search": True, "n": 2, "seed": None}])
def test_a_call_that_is_lost_alone_is_sent_again(
    two: list[Serving], extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session stays, and nothing changes at an idle replica."""
    body, lost = BODY | {"temperature": 0} | extra, []
    with fronting(two[0].url, patience=60.0) as fleet:
        link = fleet.gateway.fleet.roster.links[two[0].url]
        post = link.post

        async def losing(path: str, message: Any) -> Any:
            if not lost and path != "/fleet/abort":
                lost.append(path)
                raise LinkLost("the connection is closed")
            return await post(path, message)

        monkeypatch.setattr(link, "post", losing)
        monkeypatch.setattr(fleet.gateway.fleet.roster, "changed", lambda: None)
        found = fleet.ask("POST", COMPLETIONS, body)
        assert lost
        assert found.json()["choices"] == two[0].ask("POST", COMPLETIONS, body).json()["choices"]


def test_calls_that_are_refused_leave_nothing(two: list[Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    with fronting(two[0].url) as fleet:
        until(lambda: not replica_of(two[0])._reporter.uncached)

        async def refuse(job: Any) -> None:
            raise ApiError("not this one")

        monkeypatch.setattr(two[0].service.engine_client, "submit", refuse)
        assert fleet.ask("POST", COMPLETIONS, BODY).status == 400
    assert not replica_of(two[0])._reporter.uncached


def test_what_is_taken_as_a_replica_begins_to_drain_is_moved(
    two: list[Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer to the call comes after the state that says so."""
    body = BODY | {"max_tokens": 60}
    expected = text_of(two[0].ask("POST", COMPLETIONS, body))
    first, worker = two[0], two[0].service.engine_client
    submit, go_on = worker.submit, threading.Event()

    async def late(job: Any) -> None:
        await submit(job)
        await asyncio.to_thread(go_on.wait, 30)

    get_the_request(first, two[1])
    with fronting(first.url, two[1].url) as fleet, ThreadPoolExecutor(1) as pool:
        dispatch = fleet.gateway.fleet
        monkeypatch.setattr(worker, "submit", late)
        monkeypatch.setattr(dispatch, "frames", lambda link, frames: None)  # as if they came later, too
        monkeypatch.setattr(first.service.engine_client.engine.runner, "seconds", 0.1)
        asked = pool.submit(fleet.ask, "POST", COMPLETIONS, body)
        until(lambda: worker.num_samples == 1)
        drain(first)
        until(lambda: dispatch.mover._draining)
        monkeypatch.undo()
        go_on.set()
        assert text_of(asked.result()) == expected
        assert value(fleet, "quire:fleet_resumed_total", reason="drained") == 1
    undrain(first)


def test_what_drains_is_moved_once(two: list[Serving]) -> None:
    """A replica's state and its answer to a call may come at once: each of them lets others go on with its calls."""
    body = BODY | {"max_tokens": 60}
    expected = text_of(two[0].ask("POST", COMPLETIONS, body))
    first = two[0]
    get_the_request(first, two[1])
    with fronting(first.url, two[1].url) as fleet, ThreadPoolExecutor(1) as pool:
        dispatch = fleet.gateway.fleet
        slow(first, 0.1)
        asked = pool.submit(fleet.ask, "POST", COMPLETIONS, body)
        link = dispatch.roster.links[first.url]
        until(lambda: dispatch.calls.accepted_by(link))
        fleet.on_loop(lambda: [dispatch._tasks.spawn(dispatch.mover.empty(link)) for _ in range(2)])
        assert text_of(asked.result()) == expected
        assert value(fleet, "quire:fleet_resumed_total", reason="drained") == 1
    slow(first, 0.0)


def test_what_is_compiled_as_a_replica_begins_to_drain_is_refused(
    two: list[Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, replica = two[0].service, replica_of(two[0])
    compiled = service.compiled

    async def late(*arguments: Any) -> Any:
        replica._service.draining = True
        return await compiled(*arguments)

    monkeypatch.setattr(service, "compiled", late)
    get_the_request(two[0], two[1])
    with fronting(two[0].url, two[1].url) as fleet:
        body = BODY | {"regex": "[a-z]{20}"}
        found = fleet.ask("POST", COMPLETIONS, body)
        assert replica.draining, "it was not asked"
        replica._service.draining = False
        assert text_of(found) == text_of(two[1].ask("POST", COMPLETIONS, body))
        assert value(fleet, "quire:fleet_routed_total", replica=two[0].url) == 0


def test_a_search_that_kills_each_replica_is_given_up(two: list[Serving]) -> None:
    with faking(two[0], lambda call: None) as fake, fronting(fake.url, patience=60.0) as fleet:
        found = fleet.ask("POST", COMPLETIONS, BODY | {"use_beam_search": True, "n": 2, "seed": None})
        assert (found.status, found.error()["code"]) == (503, "no_replica")
        assert "9 replicas in a row were lost with the beam search" in found.error()["message"]
        assert value(fleet, "quire:fleet_routed_total") == 0


def test_no_event_of_a_sample_comes_before_its_prompts_logprobs(two: list[Serving]) -> None:
    """Samples that go on one by one may be faster than the one with the prompt's logprobs, which all are to have."""
    prompt = "".join(f"x{i} = {i * i}\n" for i in range(30))
    body = BODY | {"prompt": prompt, "prompt_logprobs": 1, "n": 2, "stream": True}
    with serving({"max_num_batched_tokens": 16}, fleet_secret=SECRET) as other:
        expected = put_together(other.ask("POST", COMPLETIONS, body).body)
        first = expected.choices[0]["prompt_logprobs"][0][1]
        listed = [[int(t), one["logprob"], one["rank"], one["decoded_token"]] for t, one in first.items()]

        def called(call: dict[str, Any]) -> list[Any]:
            return [frame(call, 0, 0, [], 0, "", None, None, {"prompt_logprobs": [1, [listed]]}), END]

        with faking(other, called) as fake, fronting(fake.url, other.url) as fleet:
            found = put_together(fleet.ask("POST", COMPLETIONS, body).body)
            assert len(fake.calls) == 1
    assert found.choices == expected.choices


def test_a_request_that_kills_each_replica_is_given_up(two: list[Serving]) -> None:
    """Else it would go round for ever, and take all others with it."""
    with faking(two[0], lambda call: [frame(call, 0, 0, [7], 0, "x"), END]) as fake, fronting(fake.url) as fleet:
        found = fleet.ask("POST", COMPLETIONS, BODY)
        assert (found.status, found.error()["code"]) == (503, "no_replica")
        assert "9 replicas in a row were lost with the request before a new token came" in found.error()["message"]
        assert len(fake.calls) < 15


# ----------------------------------------------------------------------------------------------- its end


def test_one_that_is_stopped_lets_open_answers_end_and_takes_no_others(two: list[Serving]) -> None:
    lines: list[str] = []
    server = FleetServer(StaticMembers([two[0].url]), GatewayConfig(port=0, fleet_secret=SECRET), lines.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: len(lines) == 2)
    [port] = re.findall(r"http://127.0.0.1:(\d+)", lines[1])
    body = BODY | {"stream": True, "max_tokens": 40}
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    slow(two[0], 0.02)
    try:
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        beginning = answer.read(100)
        server.stop()
        until(lambda: is_refused(int(port)))
        slow(two[0], 0.0)
        found = put_together(beginning + answer.read())
    finally:
        slow(two[0], 0.0)
        connection.close()
    thread.join(30)
    assert not thread.is_alive()
    assert found.is_done
    assert found.choices[0]["text"] == text_of(two[0].ask("POST", COMPLETIONS, BODY | {"max_tokens": 40}))


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it waited at a socket that was just being closed; the next one is refused
        return False
    return False


def test_one_that_is_stopped_waits_for_no_replica() -> None:
    lines: list[str] = []
    server = FleetServer(StaticMembers(["http://127.0.0.1:9"]), GatewayConfig(port=0, fleet_secret="s"), lines.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: lines)
    server.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert lines == ["waiting for a replica"]
