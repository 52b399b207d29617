"""Ray's head is killed under load, and no client notices: see tests.ray.head."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.ray.head import play

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_clients_do_not_notice_that_the_head_is_killed() -> None:
    pytest.importorskip("ray", reason="ray is not installed; it comes with quire[ray]")
    with TemporaryDirectory(prefix="ray-") as directory:  # tmp_path is too long for Ray's sockets
        report = asyncio.run(play(Path(directory), 1.0, new_head=False))
    assert not report.failures, str(report)
    assert list(report.answers) == ["with the head", "without a head", "without a head and a replica"]
