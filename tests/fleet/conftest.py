"""Two replicas of a module, and a gateway of both for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fleet.gateways import fronting, replicas, slow_all, undrain
from tests.fleet.serving import Front
from tests.server.serving import Serving


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Serving]]:
    with replicas(2) as found:
        yield found


@pytest.fixture
def front(servers: list[Serving]) -> Iterator[Front]:
    with fronting(*(server.url for server in servers)) as found:
        yield found
    slow_all(servers, 0.0)
    for server in servers:
        undrain(server)
