"""Weights that replicas replace in place: which of them a gateway follows, and which replicas it leaves out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.errors import ModelError
from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.calls import Calls
from quire.fleet.choosing import Chooser
from quire.fleet.link import Link
from quire.fleet.replica import Replica
from quire.fleet.roster import MAX_SERVED, Roster
from quire.models import EMBEDDED
from quire.models.files import Directory
from tests.fleet.states import state

FIRST = {"weights": "1", "tokenizer": "a", "dtype": "float32"}


def version(number: int) -> dict[str, str]:
    return {"weights": str(number), "weights version": str(number)}


class Fleet:
    """A gateway's roster, which has asked process "a" for its model, and greetings that the test makes."""

    def __init__(self) -> None:
        self.roster = Roster(cast(Any, None), Fingerprint(FIRST), "s", "a")

    def greet(self, process: str, url: str | None = None, **parts: str) -> Link:
        """Connect a process with these parts of its fingerprint, by a new connection unless it has one."""
        url = url or f"http://{process}"
        link = self.roster.links.get(url) or Link(len(self.roster.links), url, "s", cast(Any, None), cast(Any, None))
        self.roster.links[url] = link
        link.hello = cast(Any, SimpleNamespace(incarnation=process, salt="", block_size=16, has_windows=False))
        link.fingerprint, link.state = Fingerprint(FIRST | parts), state()
        assert self.roster.connected(link) == self.roster.is_fitting(link)
        return link

    @property
    def fitting(self) -> str:
        """The processes that get new requests."""
        there = [link for link in self.roster.links.values() if self.roster.is_fitting(link)]
        return "".join(sorted(link.hello.incarnation for link in there if link.hello is not None))

    @property
    def weights(self) -> str:
        return self.roster.model.parts["weights"]


def test_the_fleet_follows_its_own_replicas_alone() -> None:
    fleet = Fleet()
    for name in "abc":
        fleet.greet(name)
    fleet.greet("x", **version(7))
    assert fleet.fitting == "abc"
    fleet.greet("x", **version(8))  # was left out, and has other ones now
    assert (fleet.weights, fleet.fitting) == ("1", "abc")
    fleet.greet("a", **version(2))
    assert (fleet.weights, fleet.fitting) == ("2", "a")
    fleet.greet("b", **version(2))
    fleet.greet("x", **version(2))  # is one of the fleet from now on
    assert fleet.fitting == "abx"
    fleet.greet("x", **version(3))
    assert (fleet.weights, fleet.fitting) == ("3", "x")
    fleet.greet("c", **version(2))  # it is late
    assert (fleet.weights, fleet.fitting) == ("3", "x")
    for name in "abc":
        fleet.greet(name, **version(3))
    assert (fleet.fitting, fleet.roster.num_updates) == ("abcx", 2)
    assert fleet.roster.model == Fingerprint(FIRST | version(3))
    fleet.greet("x", tokenizer="b", **version(4))
    assert (fleet.weights, fleet.fitting) == ("3", "abc")
    fleet.greet("a", dtype="bfloat16", **version(4))  # other bits of the same model
    assert (fleet.weights, fleet.fitting) == ("4", "a")


def test_weights_that_are_replaced_while_a_replica_is_not_connected() -> None:
    """Before its first session, or while its address is not in the list: it is the same process."""
    fleet = Fleet()
    fleet.greet("a", **version(2))
    assert (fleet.weights, fleet.fitting) == ("2", "a")
    fleet.roster.links.clear()
    fleet.greet("a", "http://elsewhere", **version(3))
    assert (fleet.weights, fleet.fitting) == ("3", "a")
    fleet.greet("b", "http://elsewhere", **version(4))  # another process at the same address
    assert (fleet.weights, fleet.fitting) == ("3", "")
    for i in range(2 * MAX_SERVED):
        fleet.greet(str(i), "http://restarted", **version(3))
    assert len(fleet.roster._served) == MAX_SERVED
    fleet.greet(str(i), "http://restarted", **version(5))
    assert fleet.weights == "5"


def test_a_request_that_names_a_fingerprint_stays_in_the_model() -> None:
    """Old weights may finish their requests. A client's header names no replica with another tokenizer."""
    fleet = Fleet()
    new, old, other = fleet.greet("a"), fleet.greet("b", **version(0)), fleet.greet("c", tokenizer="b")
    chooser = Chooser(fleet.roster, "s", Calls(fleet.roster.index, lambda _: None))
    for needed, expected in ((new, [new]), (old, [new, old]), (other, [new])):
        assert needed.fingerprint is not None
        found = chooser._candidates(lambda _: (), needed.fingerprint.digest)
        assert [one.name for one in found] == [link.url for link in expected]


def test_new_weights_never_have_the_old_fingerprint(tmp_path: Path) -> None:
    """If their files cannot be read, the replica has none, and tries again."""
    old = Fingerprint(FIRST)
    own = SimpleNamespace(_version="0", fingerprint=old)
    own._llm = SimpleNamespace(weights_version="step-1", files=Directory(tmp_path))
    replica = cast(Replica, own)
    for _ in range(2):
        with pytest.raises(ModelError, match="holds no weights"):
            Replica._identify(replica)
    (tmp_path / "model.safetensors").symlink_to(EMBEDDED / "model.safetensors")
    for _ in range(2):
        Replica._identify(replica)
        assert old.difference(replica.fingerprint) == ("weights", "weights version")
