"""quire bench disk: prompts that are not read from the disk."""

from __future__ import annotations

import pytest

from quire_bench.server import restart

METRICS = """
quire:kv_disk_hits_total{model_name="embedded"} 2.0
quire:kv_disk_misses_total{model_name="embedded",reason="late"} 1.0
quire:kv_disk_misses_total{model_name="embedded",reason="slower"} 3.0
quire:kv_disk_misses_total{model_name="embedded",reason="checksum"} 4.0
quire:kv_disk_misses_total{model_name="embedded",reason="io"} 0.0
"""


def test_a_prompt_that_is_computed_as_that_is_faster_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    client = restart._Client("http://127.0.0.1:1")
    monkeypatch.setattr(client, "_answer", lambda method, path: METRICS.encode())
    assert client.metric("kv_disk_hits_total") == 2
    assert client.failed_reads() == {"checksum": 4}


def test_where_no_prompt_was_read_there_is_no_median() -> None:
    assert restart._median([]) is None
    assert restart._median([3.0, 1.0, 2.0]) == 2.0
