"""A gateway: what it answers, and what it makes of replicas that it cannot believe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fleet.asks import CHAT, COMPLETIONS, Answer, compared, take
from tests.fleet.serving import gateway, replica
from tests.server.serving import Serving

pytestmark = pytest.mark.slow


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def one() -> Iterator[Serving]:
    with replica() as running:
        yield running


@pytest.fixture(scope="module")
def fleet(one: Serving) -> Iterator[Serving]:
    with gateway(one.url) as running:
        until(lambda: running.get("/health").status == 200)
        yield running


def test_one_request_may_come_twice_at_a_time(one: Serving, fleet: Serving) -> None:
    """As when a client goes to another gateway before the first one has noticed: the names are the same."""
    body = {"prompt": "def f(x):\n", "max_tokens": 200, "ignore_eos": True}
    search = body | {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 20}
    with gateway(one.url) as other:
        until(lambda: other.get("/health").status == 200)
        for each in (body, search):
            with ThreadPoolExecutor(4) as pool:
                places = (fleet, other, fleet, other)
                asked = [
                    pool.submit(one.ask, "POST", "/v1/completions", each, {"Idempotency-Key": "k"}) for one in places
                ]
                found = [future.result() for future in asked]
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
}


@pytest.mark.parametrize("kind", CONTINUED)
def test_a_stream_goes_on_after_each_of_its_events(fleet: Serving, kind: str) -> None:
    """A cut may fall after any event. What the client has then and what it gets for the last id are the answer."""
    path, own = CONTINUED[kind]
    body = own | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12, "seed": 3}
    whole = fleet.ask("POST", path, body).body
    expected = put_together(whole)
    assert expected.is_done
    events = [event + b"\n\n" for event in whole.split(b"\n\n")[:-1]]
    for cut in range(len(events)):
        had = put_together(*events[:cut])
        if had.last_id is None:
            continue
        rest = fleet.ask("POST", path, body, {"Last-Event-ID": had.last_id}).body
        found = put_together(*events[:cut], rest)
        assert (found.choices, found.is_done) == (expected.choices, True), cut
        if had.usage is None:
            assert compared({"usage": found.usage}) == compared({"usage": expected.usage}), cut
        second = rest.split(b"\n\n")[:-1]
        for again in range(1, len(second), 3):  # and when the second gateway goes, too
            head = [*events[:cut], *(event + b"\n\n" for event in second[:again])]
            had = put_together(*head)
            rest = fleet.ask("POST", path, body, {"Last-Event-ID": had.last_id or ""}).body
            assert put_together(*head, rest).choices == expected.choices, (cut, again)
