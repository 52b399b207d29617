"""A cluster of Ray on this machine, for what needs one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def serve() -> Iterator[Any]:
    """Ray Serve in a cluster of two cores, without proxies. Skips where Ray is not installed: it is an extra."""
    ray = pytest.importorskip("ray", reason="ray is not installed; it comes with quire[ray]")
    from ray import serve

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_worker_niceness", "0")  # else what Ray starts yields to all others
    patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home directory
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    yield serve
    serve.shutdown()
    ray.shutdown()
    patch.undo()
