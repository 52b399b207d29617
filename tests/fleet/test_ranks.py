"""Replicas of several processes among others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.ops import native
from tests.fleet.asks import COMPLETIONS
from tests.fleet.gateways import SECRET, fronting, replica_of, until
from tests.server.serving import Serving, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}"),
]

OPTIONS = {"num_blocks": 256, "max_num_seqs": 8}


@pytest.mark.long
def test_streams_go_on_elsewhere_when_a_rank_dies() -> None:
    """With the same bits: a replica of one process is of the same class."""

    def ask(server: Serving, seed: int) -> str:
        body = {"prompt": "def f(x):\n", "max_tokens": 300, "ignore_eos": True, "seed": seed, "logprobs": 1}
        answer = server.post(COMPLETIONS, **body)
        assert answer.status == 200, answer.body
        return str(answer.json()["choices"])

    with (
        serving(OPTIONS | {"tensor_parallel_size": 2}, fleet_secret=SECRET) as several,
        serving(OPTIONS, fleet_secret=SECRET) as alone,
        fronting(several.url, alone.url) as fleet,
        ThreadPoolExecutor(6) as pool,
    ):
        assert replica_of(several).fingerprint == replica_of(alone).fingerprint
        asked = [pool.submit(ask, fleet, seed) for seed in range(6)]
        worker, group = several.service.engine_client, several.service.engine_client.llm.llm.group
        assert group is not None
        until(lambda: worker.engine.has_work)
        group.processes[0].kill()
        found = [one.result(60) for one in asked]
        until(lambda: worker.llm.failure is not None)
        assert "rank 1 of the tensor-parallel group" in worker.llm.failure
        assert found == [ask(alone, seed) for seed in range(6)]
        group.close()
