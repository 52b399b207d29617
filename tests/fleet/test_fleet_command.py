"""`quire fleet`, as a process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from quire_bench.fleet.running import fetch
from tests.forks import QUIRE, Spawner

pytestmark = pytest.mark.slow

SECRET = ("--fleet-secret", "a secret of this test")


def test_a_gateway_leaves_no_files(tmp_path: Path, forks: Spawner) -> None:
    """Those of the model are gone before it serves, so that no signal can leave them; and it needs them no more."""
    chat = {"messages": [{"role": "user", "content": "a stack"}], "max_tokens": 4}
    with forks.running("serve", "--port", "0", "--num-blocks", "64", *SECRET) as replica:
        arguments = ("fleet", "--port", "0", "--replicas", replica.url, *SECRET)
        program = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}; {QUIRE}"
        with forks.running(*arguments, program=program) as gateway:
            assert not list(tmp_path.glob("quire-gateway-*"))
            headers = {"Content-Type": "application/json"}
            answer = json.loads(fetch(f"{gateway.url}/v1/chat/completions", json.dumps(chat).encode(), headers))
            assert answer["usage"]["completion_tokens"] == 4
        assert gateway.wait() == -signal.SIGTERM
        assert not list(tmp_path.iterdir())
