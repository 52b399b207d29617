"""Membership: the replicas that should be in a fleet, from a list, from DNS, or from Ray Serve.

A member need not serve: the gateway connects to each member, checks it, and drops a dead one without the source's help.
So a listed member that is gone costs nothing, and a source that fails for a while changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from quire.errors import ConfigError

log = logging.getLogger("quire.fleet")

SCHEME = "http"  # replicas do not support TLS
DNS = "dns"
LOOKUP_PERIOD = 1.0  # seconds between two look-ups of a name
EXAMPLE = "http://10.0.0.7:8000"

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]  # host, port -> addresses; raises OSError


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A replica that should be in the fleet."""

    url: str  # http://host:port, without a path
    name: str  # its name in logs and metrics: host:port


Members = frozenset[Member]


class Membership(Protocol):
    """A source of members."""

    def changes(self) -> AsyncIterator[Members]:
        """Yield the members when first known, and all of them again after each change.

        The iterator ends if they cannot change any more. It raises nothing.
        """
        ...


class StaticMembers:
    """A list that does not change."""

    def __init__(self, urls: Iterable[str]) -> None:
        """Raises ConfigError for an invalid URL, for one that is given twice, and for an empty list."""
        members = [member_at(url) for url in urls]
        if not members:
            raise ConfigError(f"there is no replica; give at least one URL, as in {EXAMPLE!r}")
        seen: set[Member] = set()
        for member in members:
            if member in seen:
                raise ConfigError(f"replica {member.url!r} is given twice; give each replica once")
            seen.add(member)
        self._members = frozenset(seen)

    async def changes(self) -> AsyncIterator[Members]:
        """Yield all members once."""
        yield self._members


async def _addresses(host: str, port: int) -> list[str]:
    """Return all addresses of a name, of one family: with both, each replica would be found twice. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family = min(entry[0] for entry in found)  # IPv4 if there is one
    return [str(entry[4][0]) for entry in found if entry[0] == family]


class DnsMembers:
    """A name that resolves to the addresses of all replicas, such as that of a headless service of Kubernetes.

    It is looked up every second. While that fails, or while the name has no address, the last answer remains valid:
    replicas that serve are kept while DNS is down.
    """

    def __init__(self, name: str, *, period: float = LOOKUP_PERIOD, resolve: Resolve = _addresses) -> None:
        """name: for example 'dns://quire-replicas:8000'. Raises ConfigError for an invalid one.

        period: seconds between two look-ups. resolve: returns the addresses of a host.
        """
        self._host, self._port = _host_and_port(name, DNS)
        self._period = period
        self._resolve = resolve
        self._is_failing = False

    async def changes(self) -> AsyncIterator[Members]:
        """Yield the members after each change, from the first successful look-up on."""
        known: Members = frozenset()
        while True:
            found = await self._look_up()
            if found and found != known:
                known = found
                yield known
            await asyncio.sleep(self._period)

    async def _look_up(self) -> Members:
        """Return the current members; none if the look-up fails. A failure is logged once until DNS answers again."""
        try:
            found = await self._resolve(self._host, self._port)
        except OSError as error:
            if not self._is_failing:
                log.warning("%s cannot be looked up (%s); the replicas known so far stay", self._host, error)
            self._is_failing = True
            return frozenset()
        if self._is_failing:
            log.info("%s can be looked up again", self._host)
        self._is_failing = False
        return frozenset(_member(address, self._port) for address in found)


def parse_members(text: str) -> StaticMembers | DnsMembers:
    """Parse `--replicas`: 'http://a:8000,http://b:8000', or 'dns://name:8000' for a headless service.

    Raises ConfigError, with a valid example, for anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if any(part.startswith(f"{DNS}://") for part in parts):
        if len(parts) > 1:
            raise ConfigError(f"replicas is {text!r}; one {DNS}:// name resolves to all replicas, so give it alone")
        return DnsMembers(parts[0])
    if not all(parts):
        where = "is empty" if not any(parts) else f"is {text!r}, where a URL is empty"
        raise ConfigError(f"replicas {where}; give URLs, as in {EXAMPLE + ',http://10.0.0.8:8000'!r}")
    return StaticMembers(parts)


def member_at(url: str) -> Member:
    """Return the member at 'http://host:port'. Raises ConfigError for an invalid URL, or one with more parts."""
    return _member(*_host_and_port(url, SCHEME))


def _member(host: str, port: int) -> Member:
    """Return the member at a host name or an address."""
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Member(f"{SCHEME}://{name}", name)


def _host_and_port(url: str, scheme: str) -> tuple[str, int]:
    """Split 'scheme://host:port'; the host is in lower case. Raises ConfigError for anything else."""
    wanted = f"{scheme}://host:port"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:  # brackets that do not match, or a port that is not a number
        raise ConfigError(f"replica {url!r} is no URL: {error}; write {wanted}") from error
    if "://" not in url:
        raise ConfigError(f"replica {url!r} has no scheme; write {wanted}, as in {f'{scheme}://{url}'!r}")
    if parts.scheme != scheme:
        raise ConfigError(f"replica {url!r} has the scheme {parts.scheme!r}; write {wanted}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"replica {url!r} has more than a host and a port; write {wanted} without a path or a user")
    if not host:
        raise ConfigError(f"replica {url!r} names no host; write {wanted}")
    if port is None or port == 0:
        raise ConfigError(f"replica {url!r} names no port; write {wanted}")
    _check_host(url, host)
    return host, port


def _check_host(url: str, host: str) -> None:
    """Raise ConfigError for a host that is neither an address nor a valid DNS name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            is_name = bool(host.encode("idna")) and not any(character in " %[]_" for character in host.strip("_"))
        except UnicodeError:
            is_name = False
        if not is_name:
            raise ConfigError(f"replica {url!r} names the host {host!r}, which is no name and no address") from None
