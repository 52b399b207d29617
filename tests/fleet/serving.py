"""A gateway in this process, on a thread of its own, for tests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quire.fleet.config import GatewayConfig
from quire.fleet.gateway import Gateway, GatewayServer, build_gateway, find_model
from quire.fleet.membership import parse_members
from quire.server.run import settings
from tests.server.serving import Serving, serving

SECRET = "of the fleet"


@dataclass
class Front(Serving):
    """A running gateway."""

    gateway: Gateway | None = None

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """What a function returns on the gateway's event loop."""
        return on_loop(self, function)


def on_loop(server: Serving, function: Callable[[], Any]) -> Any:
    """What a function returns on a server's event loop."""

    async def call() -> Any:
        return function()

    assert server.loop is not None
    return asyncio.run_coroutine_threadsafe(call(), server.loop).result(30)


@contextmanager
def replica(options: dict[str, Any] | None = None, **config: Any) -> Iterator[Serving]:
    """A server that gateways may use."""
    with serving(options, **{"fleet_secret": SECRET} | config) as running:
        yield running


@contextmanager
def gateway(*urls: str, **config: Any) -> Iterator[Front]:
    """A gateway of replicas at these URLs, of which one must serve."""
    members = parse_members(",".join(urls))
    own = GatewayConfig(**{"port": 0, "fleet_secret": SECRET, "patience": 5.0, "shutdown_timeout": 2.0} | config)
    with TemporaryDirectory() as directory:
        with ThreadPoolExecutor(1) as finding:  # a browser's driver has a loop on this thread
            found = finding.submit(lambda: asyncio.run(find_model(members, own))).result()
        parts = build_gateway(members, own, found, Path(directory))
        here = Front(parts.service, parts.metrics, inspector=None, gateway=parts)  # type: ignore[arg-type]
        ready = threading.Event()
        listening = socket.create_server(("127.0.0.1", 0))
        here.port = listening.getsockname()[1]

        def told() -> None:
            here.loop = asyncio.get_running_loop()
            ready.set()

        server = here.server = GatewayServer(settings(parts.app(), own), parts, told)  # type: ignore[assignment]
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            assert ready.wait(30)
            yield here
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
