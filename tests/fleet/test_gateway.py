"""A gateway: what it answers, and what it makes of replicas that it cannot believe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

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
