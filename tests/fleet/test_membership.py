"""Who should be in a fleet: a list, DNS, and the sentences for what is neither."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.fleet.membership import DnsMembers, Member, Members, StaticMembers, member_at, parse_members

Answers = Iterable["list[str] | OSError"]


def urls(members: Members) -> list[str]:
    return sorted(member.url for member in members)


async def first(changes: AsyncIterator[Members], count: int) -> list[list[str]]:
    """The first sets, and no more than these."""
    found = []
    async for members in changes:
        found.append(urls(members))
        if len(found) == count:
            break
    return found


class Resolver:
    """DNS that gives these answers, one a look-up, and then the last one for ever."""

    def __init__(self, answers: Answers) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append((host, port))
        if isinstance(answer, OSError):
            raise answer
        return answer


def looked_up(answers: Answers, count: int) -> list[list[str]]:
    members = DnsMembers("dns://replicas:8000", period=0.0, resolve=Resolver(answers))
    return asyncio.run(first(members.changes(), count))


# ------------------------------------------------------------------------------------------------------- a list


def test_a_list_is_given_once_and_never_changes() -> None:
    async def all_of(changes: AsyncIterator[Members]) -> list[Members]:
        return [members async for members in changes]

    found = asyncio.run(all_of(StaticMembers(["http://a:1", "http://B:2"]).changes()))
    assert found == [frozenset({Member("http://a:1", "a:1"), Member("http://b:2", "b:2")})]


def test_text_is_a_list_or_a_name() -> None:
    assert isinstance(parse_members("dns://replicas.quire.svc:8000"), DnsMembers)
    listed = parse_members(" http://a:1, http://[fd00::1]:2/ ")
    assert isinstance(listed, StaticMembers)
    assert asyncio.run(first(listed.changes(), 1)) == [["http://[fd00::1]:2", "http://a:1"]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "replicas is empty; give URLs, as in 'http://10.0.0.7:8000,http://10.0.0.8:8000'"),
        (" , ", "replicas is empty"),
        ("http://a:1,,http://b:1", "replicas is 'http://a:1,,http://b:1', where a URL is empty"),
        ("a:1", "replica 'a:1' has no scheme; write http://host:port, as in 'http://a:1'"),
        ("10.0.0.7:8000", "has no scheme"),
        ("https://a:1", "has the scheme 'https'; write http://host:port"),
        ("http://a:1/v1", "has more than a host and a port; write http://host:port without a path or a user"),
        ("http://a:1?x=1", "has more than"),
        ("http://me:secret@a:1", "has more than"),
        ("http://a", "names no port"),
        ("http://a:0", "names no port"),
        ("http://:80", "names no host"),
        ("http://a:99999", "is no URL: Port out of range"),
        ("http://a:x", "is no URL"),
        ("http://[::1:80", "is no URL"),
        ("http://a b:1", "names the host 'a b', which is no name and no address"),
        ("http://a..b:1", "which is no name"),
        (f"http://{'a' * 64}:1", "which is no name"),
        ("http://a:1,http://A:1/", "replica 'http://a:1' is given twice; give each replica once"),
        ("dns://a", "names no port; write dns://host:port"),
        ("dns://a:1/x", "has more than"),
        ("dns://a:1,dns://b:1", "one dns:// name resolves to all replicas, so give it alone"),
        ("http://a:1,dns://b:1", "give it alone"),
    ],
)
def test_what_is_no_list_of_replicas_is_said(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_members(text)
    assert words in str(caught.value)


def test_a_list_without_a_replica_is_none() -> None:
    with pytest.raises(ConfigError, match="there is no replica; give at least one URL"):
        StaticMembers([])


@given(st.text(max_size=40))
def test_any_text_is_understood_or_refused_with_a_sentence(text: str) -> None:
    with suppress(ConfigError):
        assert isinstance(parse_members(text), (StaticMembers, DnsMembers))


@given(st.ip_addresses(), st.integers(1, 65_535))
def test_every_address_makes_a_member_that_reads_itself(address: object, port: int) -> None:
    host = f"[{address}]" if ":" in str(address) else str(address)
    member = member_at(f"http://{host}:{port}")
    assert member_at(member.url) == member
    assert member.url == f"http://{member.name}"


# ---------------------------------------------------------------------------------------------------------- DNS


def test_a_name_stands_for_its_addresses_and_only_changes_are_given() -> None:
    answers = [["10.0.0.1"], ["10.0.0.1"], ["10.0.0.2", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.2"]]
    assert looked_up(answers, 3) == [
        ["http://10.0.0.1:8000"],
        ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        ["http://10.0.0.2:8000"],
    ]


def test_addresses_of_six_groups_stand_in_brackets() -> None:
    assert looked_up([["fd00::1"]], 1) == [["http://[fd00::1]:8000"]]


def test_dns_that_fails_empties_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    down = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    answers: list[list[str] | OSError] = [down, down, ["10.0.0.1"], down, [], down, down, ["10.0.0.2"]]
    with caplog.at_level(logging.INFO, "quire.fleet"):
        assert looked_up(answers, 2) == [["http://10.0.0.1:8000"], ["http://10.0.0.2:8000"]]
    failures = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(failures) == 3  # at the beginning, after the first answer, and after the empty one
    assert "replicas cannot be looked up" in failures[0].message
    assert "the replicas known so far stay" in failures[0].message


def test_the_name_is_looked_up_as_it_is_given() -> None:
    resolver = Resolver([["10.0.0.1"]])
    asyncio.run(first(DnsMembers("dns://Replicas:80", resolve=resolver).changes(), 1))
    assert resolver.asked == [("replicas", 80)]


def test_the_system_is_asked_by_default() -> None:
    found = asyncio.run(first(DnsMembers("dns://localhost:8000").changes(), 1))
    assert found in ([["http://127.0.0.1:8000"]], [["http://[::1]:8000"]])  # one family


@pytest.mark.slow
@given(
    st.lists(
        st.one_of(
            st.none(),
            st.lists(st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]), max_size=3),
        ),
        max_size=20,
    )
)
def test_the_members_are_those_of_the_last_answer_that_had_any(answers: list[list[str] | None]) -> None:
    expected: list[list[str]] = []
    for answer in [*answers, ["10.9.9.9"]]:
        found = sorted({f"http://{address}:8000" for address in answer or ()})
        if found and expected[-1:] != [found]:
            expected.append(found)
    given = [OSError("down") if answer is None else answer for answer in answers]
    assert looked_up([*given, ["10.9.9.9"]], len(expected)) == expected
