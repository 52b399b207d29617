"""Adapters in a fleet: named by the gateway, computed by replicas, known by their weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fleet.gateways import at, drain, fronting, replica_of, slow, slowed, until
from tests.fleet.serving import SECRET, Front
from tests.models.adapters import embedded_linears, save_adapter
from tests.server.serving import Serving, serving

pytestmark = pytest.mark.slow

BODY = {"prompt": "def f(x):\n" * 8, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Front, list[Serving]]]:
    """A gateway of two replicas with the adapter a, and a replica apart whose a has other weights."""
    for seed, name in enumerate("ab"):
        save_adapter(tmp_path / name, embedded_linears(), seed, spread=0.05)
    with ExitStack() as stack:
        options = {"num_blocks": 128, "max_num_seqs": 8, "async_scheduling": False}
        running = [
            stack.enter_context(serving(options, slowed, fleet_secret=SECRET, lora=(f"a={tmp_path / path}",)))
            for path in ("a", "a", "b")
        ]
        for each in running:
            each.headers["Authorization"] = f"Bearer {SECRET}"
        yield stack.enter_context(fronting(*(each.url for each in running[:2]))), running


def test_a_fleet_serves_adapters(fleet: tuple[Front, list[Serving]]) -> None:
    """With the texts of one server; the same prompt goes to where its blocks are, and goes on elsewhere."""
    front, replicas = fleet
    assert [one["id"] for one in front.ask("GET", "/v1/models").json()["data"]] == ["quire-embedded", "a"]
    expected = {model: replicas[0].post("/v1/completions", model=model, **BODY).json() for model in ("a", None)}
    assert expected["a"]["choices"] != expected[None]["choices"]
    for model, answer in expected.items():
        for _ in range(2):
            found = front.post("/v1/completions", model=model, **BODY)
            assert found.json()["choices"] == answer["choices"]
    assert found.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    search = BODY | {"use_beam_search": True, "n": 2, "max_tokens": 4}
    assert (
        front.post("/v1/completions", model="a", **search).json()["choices"]
        == (replicas[0].post("/v1/completions", model="a", **search).json()["choices"])
    )
    assert front.post("/v1/completions", model="b", **BODY).status == 404
    assert len({replica_of(each).fingerprint.digest for each in replicas}) == 2
    assert replica_of(replicas[0]).fingerprint.difference(replica_of(replicas[2]).fingerprint) == ("adapters",)
    for each in replicas[:2]:
        slow(each, 0.02)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(front.post, "/v1/completions", model="a", **BODY)
        works = front.gateway.fleet.jobs
        until(lambda: any(len(ledger.tokens) > 4 for work in works.works for ledger in work.ledgers))
        [assignment] = {one for work in works.works for one in work.assigned.values()}
        drain(at(replicas, assignment.link.url))
        found = asked.result()
    assert found.json()["choices"] == expected["a"]["choices"]
    assert len([one for one in front.gateway.fleet.placements if one.cause.reason != "new"]) == 1
