"""A gateway in this process, on a thread of its own, for tests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quire.fleet.config import GatewayConfig
from quire.fleet.gateway import GatewayServer, build_gateway, find_model
from quire.fleet.membership import parse_members
from quire.server.api.app import build_app
from quire.server.run import settings
from tests.server.serving import Serving, serving

SECRET = "of the fleet"


@contextmanager
def replica(options: dict[str, Any] | None = None, **config: Any) -> Iterator[Serving]:
    """A server that gateways may use."""
    with serving(options, **{"fleet_secret": SECRET} | config) as running:
        yield running


@contextmanager
def gateway(*urls: str, **config: Any) -> Iterator[Serving]:
    """A gateway of replicas at these URLs, of which one must serve."""
    members = parse_members(",".join(urls))
    own = GatewayConfig(**{"port": 0, "fleet_secret": SECRET, "patience": 5.0, "shutdown_timeout": 2.0} | config)
    with TemporaryDirectory() as directory:
        found = asyncio.run(find_model(members, own))
        service, fleet, metrics = build_gateway(members, own, found, Path(directory))
        here = Serving(service, metrics, inspector=None)  # type: ignore[arg-type]
        ready = threading.Event()
        listening = socket.create_server(("127.0.0.1", 0))
        here.port = listening.getsockname()[1]

        def told() -> None:
            here.loop = asyncio.get_running_loop()
            ready.set()

        server = GatewayServer(settings(build_app(service, metrics, ()), own), told, fleet, own)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            assert ready.wait(30)
            yield here
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
