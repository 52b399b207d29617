"""The host names by which clients may address a server.

A web page can make its own name point to an address of the reader's machine (DNS rebinding): the browser then treats a
server there as a part of that page's site. Such a request names the page's host, not this server's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from quire.errors import ConfigError

ANY = "*"
LOCAL = "localhost"
NAME = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")  # IPv6 addresses are in brackets
DOMAIN = re.compile(r"(?:[a-z0-9_-]+\.)*[a-z][a-z0-9-]*\.?", re.IGNORECASE)  # no address has letters in its last part
HEADER = re.compile(rf"({NAME.pattern})(:[0-9]*)?")


def host_in(header: str) -> str | None:
    """Return the host of a Host header, in lower case and without its port, or None if the header is invalid."""
    match = HEADER.fullmatch(header)
    return None if match is None else _plain(match[1])


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback name or address, which only programs of this machine can reach."""
    try:
        return host == LOCAL or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_allowed(hosts: Collection[str]) -> None:
    """Raise ConfigError for an entry of `allowed_hosts` that no request could name."""
    for host in hosts:
        if host != ANY and not NAME.fullmatch(host):
            raise ConfigError(
                f"allowed_hosts has {host!r}; give names or addresses without scheme, port and path, such as "
                f"'example.org' or '[::1]', or '*' for any"
            )


def media_domains(given: Collection[str]) -> frozenset[str]:
    """Return the hosts of `allowed_media_domains`, in lower case. Raises ConfigError for one that is no name.

    given: names, or several with commas between them.
    """
    hosts = [host.strip() for text in given for host in text.split(",")]
    for host in hosts:
        if not DOMAIN.fullmatch(host):
            raise ConfigError(
                f"allowed_media_domains has {host!r}; give names of hosts, such as 'images.example.org', without "
                f"scheme, port and path"
            )
    return frozenset(map(_plain, hosts))


def hosts_to_check(allowed: Collection[str], listens_at: str, has_keys: bool) -> frozenset[str] | None:
    """Return the hosts that a request may name in addition to this machine; None allows any.

    listens_at: a server that other machines can reach may have names that it cannot know, so any is allowed. A server
    with keys needs no check, because a web page does not know them.
    """
    if ANY in allowed or not (allowed or (is_loopback(listens_at) and not has_keys)):
        return None
    return frozenset(map(_plain, allowed))


def _plain(host: str) -> str:
    return host.strip("[]").lower().removesuffix(".")
