"""A web of hosts in this process, for tests of a client: names, addresses, and a server with hostile answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiohttp.abc import ResolveResult

from quire.server.http.image_fetcher import PublicResolver

PUBLIC = "93.184.216.34"


class Resolver(PublicResolver):
    """Looks names up in a table, and leads the connections to the addresses that it would use to a local port.

    The addresses are checked before, as they are in a server.
    """

    def __init__(self, names: Mapping[str, Sequence[str] | list[Sequence[str]]], port: int = 0) -> None:
        super().__init__(self._found)
        self.names, self.port = {**names}, port
        self.asked: list[str] = []  # names
        self.used: list[str] = []  # addresses

    def _found(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        addresses = self.names.get(host)
        if addresses is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        if addresses and not isinstance(addresses[0], str):  # other ones each time
            addresses = addresses.pop(0) if len(addresses) > 1 else addresses[0]
        kinds = [socket.AF_INET6 if ":" in str(one) else socket.AF_INET for one in addresses]
        return [(kind, socket.SOCK_STREAM, 6, "", (one, port)) for kind, one in zip(kinds, addresses, strict=True)]

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_UNSPEC) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        self.used += [one["host"] for one in found]
        return [{**one, "host": "127.0.0.1", "port": self.port, "family": socket.AF_INET} for one in found[:1]]


@dataclass
class Web:
    """A server of files and of hostile answers."""

    port: int
    files: dict[str, bytes] = field(default_factory=dict)  # by path
    redirects: dict[str, str] = field(default_factory=dict)  # locations by path
    hosts: list[str] = field(default_factory=list)  # Host headers of all requests
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def web() -> Iterator[Web]:
    """Serve /endless, /slow, /slow-head, /long and /gzip, and the files and redirects that are added."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            here.hosts.append(self.headers["Host"])
            here.headers.append({**self.headers})
            with suppress(OSError):
                self._answer()

        def _answer(self) -> None:
            if self.path == "/slow-head":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                self._drip()
            if (to := here.redirects.get(self.path)) is not None:
                self._head(302, {"Location": to, "Content-Length": "0"})
            elif self.path == "/endless":
                self._head(200, {"Connection": "close"})
                while not over.is_set():
                    self.wfile.write(bytes(2**20))
            elif self.path == "/slow":
                self._head(200, {"Content-Length": "1000000"})
                self._drip()
            elif self.path == "/long":
                self._head(200, {"Content-Length": str(2**40)})
            elif self.path == "/gzip":
                self._head(200, {"Content-Encoding": "gzip", "Content-Length": "3"})
                self.wfile.write(b"abc")
            elif (body := here.files.get(self.path)) is not None:
                self._head(200, {"Content-Length": str(len(body))})
                self.wfile.write(body)
            else:
                self._head(404, {"Content-Length": "0"})

        def _head(self, status: int, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value.encode().decode("latin-1"))  # bytes of UTF-8
            self.end_headers()

        def _drip(self) -> None:
            while not over.is_set():
                self.wfile.write(b"a")
                time.sleep(0.01)

        def log_message(self, *_: Any) -> None:
            pass

    over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    here = Web(server.server_port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield here
    finally:
        over.set()
        server.shutdown()
        thread.join(60)
        server.server_close()
