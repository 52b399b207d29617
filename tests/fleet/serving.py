"""Replicas of the embedded model in this process; gateways are in `gateways`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fleet.gateways import SECRET, fronting
from tests.server.serving import Serving, serving

gateway = fronting


@contextmanager
def replica(options: dict[str, Any] | None = None, **config: Any) -> Iterator[Serving]:
    """A server that gateways may use."""
    with serving(options, **{"fleet_secret": SECRET} | config) as running:
        yield running
