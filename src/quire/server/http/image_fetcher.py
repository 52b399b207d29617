"""Images at addresses on the web, fetched from hosts that the operator allows.

A client chooses these addresses, and the server may reach machines that the client cannot. So only public addresses of
the allowed hosts are connected to, on the ports of the web, and each redirect is checked as the first address was.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from quire import __version__
from quire.errors import RequestError
from quire.sandbox.images import MAX_BYTES

MAX_SECONDS = 10.0  # for all images of a prompt
MAX_TOGETHER = 2 * MAX_BYTES  # bytes of all images of a prompt
MAX_CONNECTIONS = 8  # of a prompt
MAX_REDIRECTS = 3
MAX_URL = 8192  # characters
MAX_LOOKUPS = 4  # threads that resolve names
PORTS = (80, 443)
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK = 2**16  # bytes
UNICAST = IPv6Network("2000::/3")  # all that is assigned
TRANSLATED = IPv6Network("64:ff9b::/96")  # addresses of IPv4, on a network of IPv6 alone (RFC 6052)
# Networks that some versions of Python count as global: protocols, relays of 6to4, Teredo, documentation. And the
# address at which Azure gives each of its machines that machine's own data.
SPECIAL = [
    ip_network(text)
    for text in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20", "168.63.129.16/32")
]
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": f"quire/{__version__}"}


class ImageFetcher:
    """Fetches images from allowed hosts. It belongs to an event loop.

    Args:
        domains: the hosts, in lower case.
        resolver: finds their addresses; None: the system's resolver.
    """

    def __init__(self, domains: Collection[str], resolver: PublicResolver | None = None) -> None:
        self._domains = frozenset(domains)
        self._resolver = PublicResolver() if resolver is None else resolver

    def check(self, url: str) -> str:
        """Return a URL that may be fetched, in the form in which it is. Raises RequestError for others."""
        if len(url) > MAX_URL:
            raise RequestError(f"a URL of an image has {len(url):,} characters; it must have at most {MAX_URL:,}")
        try:
            found = urlsplit(url)
            host = (found.hostname or "").removesuffix(".")
            port = {"http": 80, "https": 443}.get(found.scheme) if found.port is None else found.port
        except ValueError as error:
            raise _refused(url, f"is invalid: {str(error)[:80]}") from error
        if found.scheme not in ("http", "https"):
            raise _refused(url, "must begin with data:, http:// or https://")
        if "@" in found.netloc:
            raise _refused(url, "has a user or a password; it must have neither")
        if host not in self._domains:
            raise _refused(url, f"has the host {host[:80]!r}, which --allowed-media-domains does not name")
        if port not in PORTS:
            raise _refused(url, f"has the port {port}; it must be 80 or 443")
        # Made of the parts that were checked, so that no other reading of the text can lead to another host.
        return urlunsplit((found.scheme, f"{host}:{port}", f"/{found.path.removeprefix('/')}", found.query, ""))

    def close(self) -> None:
        """Start no further lookups of names."""
        self._resolver.end()

    async def fetch(self, urls: Sequence[str]) -> dict[str, bytes]:
        """Return the files at URLs, each fetched once. Raises RequestError if one cannot be fetched in time."""
        targets = {url: self.check(url) for url in urls}
        try:
            return await asyncio.wait_for(self._all(targets), MAX_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError(f"the images of the prompt were not fetched within {MAX_SECONDS:g} seconds") from None

    async def _all(self, targets: dict[str, str]) -> dict[str, bytes]:
        connector = aiohttp.TCPConnector(
            resolver=self._resolver, use_dns_cache=False, force_close=True, limit=MAX_CONNECTIONS
        )
        timeout = aiohttp.ClientTimeout(total=None)  # `fetch` has one for all of them
        left = [MAX_TOGETHER]
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=HEADERS,
            auto_decompress=False,
            timeout=timeout,
            trust_env=False,  # a proxy of the environment would resolve the names again
        ) as http:
            tasks = [asyncio.create_task(self._one(http, url, target, left)) for url, target in targets.items()]
            try:
                return dict(zip(targets, await asyncio.gather(*tasks), strict=True))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, http: aiohttp.ClientSession, url: str, target: str, left: list[int]) -> bytes:
        """Return the file at a URL. left: the bytes that the images of the prompt may still have, which is reduced."""
        for _ in range(MAX_REDIRECTS + 1):
            try:
                async with http.get(target, allow_redirects=False) as answer:
                    if answer.status not in REDIRECTS:
                        return await _body(answer, url, left)
                    target = urljoin(target, answer.headers.get("Location", ""))
            except RequestError:
                raise
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise _refused(url, f"cannot be fetched: {_reason(error)}") from error
            try:
                target = self.check(target)
            except RequestError as error:
                raise _refused(url, f"redirects to another, and {error}") from error
        raise _refused(url, f"redirects more than {MAX_REDIRECTS} times")


class PublicResolver(AbstractResolver):
    """Resolves names to public addresses alone. A connection is made to an address that was checked here.

    Args:
        lookup: has the interface of socket.getaddrinfo.
    """

    def __init__(self, lookup: Callable[..., Sequence[Any]] = socket.getaddrinfo) -> None:
        self._lookup = lookup
        # Not the event loop's own threads: a lookup may take half a minute, and other work would wait for it.
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "quire-lookup")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the public addresses of a host. Raises OSError if it has none."""
        look_up = partial(self._lookup, host, port, family=family, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        addresses = [(kind, proto, address[0]) for kind, _, proto, _, address in found if is_public(address[0])]
        if not addresses:
            raise OSError(f"{host} has no public address")
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=proto, flags=socket.AI_NUMERICHOST)
            for kind, proto, address in addresses
        ]

    async def close(self) -> None:
        """Start no further lookups."""
        self.end()

    def end(self) -> None:
        """Start no further lookups."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_public(text: str) -> bool:
    """Return whether an IP address is one of the public internet, and names one machine."""
    address: IPv4Address | IPv6Address = ip_address(text)
    if isinstance(address, IPv6Address) and address in TRANSLATED:
        address = IPv4Address(int(address) & 0xFFFFFFFF)
    if isinstance(address, IPv6Address) and address not in UNICAST:  # so also IPv4-mapped ones
        return False
    is_special = address.is_multicast or address.is_reserved or any(address in network for network in SPECIAL)
    return address.is_global and not is_special


async def _body(answer: aiohttp.ClientResponse, url: str, left: list[int]) -> bytes:
    """Return the body of an answer with status 200. Raises RequestError for other ones, and for long ones."""
    if answer.status != HTTPStatus.OK:
        raise _refused(url, f"cannot be fetched: the answer has the status {answer.status}")
    body = bytearray()
    if (answer.content_length or 0) > MAX_BYTES:
        raise _refused(url, f"has {answer.content_length:,} bytes; an image must have at most {MAX_BYTES:,}")
    async for chunk in answer.content.iter_chunked(CHUNK):
        body += chunk
        left[0] -= len(chunk)
        if len(body) > MAX_BYTES:
            raise _refused(url, f"has more than {MAX_BYTES:,} bytes, which is the most of an image")
        if left[0] < 0:
            raise RequestError(f"the images at URLs have more than {MAX_TOGETHER:,} bytes together, which is the most")
    return bytes(body)


def _refused(url: str, why: str) -> RequestError:
    return RequestError(f"the URL {url[:80]!r} of an image {why}")


def _reason(error: Exception) -> str:
    """Return the cause of an error, without addresses of machines."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is invalid"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its host has no public address"
    if isinstance(error, (aiohttp.ClientConnectionError, OSError)):
        return "the connection failed"
    return "the answer is invalid"
