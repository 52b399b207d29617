"""quire bench calibrate: what it writes, a fleet can be simulated with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.simulate.device import read_device
from quire_bench.engine import calibrate
from quire_bench.fleet import replaying


@pytest.mark.slow
def test_a_file_for_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "SEQUENCES": (1, 4),
        "CONTEXTS": (16, 64),
        "BETWEEN": (3,),
        "PROMPTS": (4, 16, 64, 128),
        "MIXED": ((2, 32), (4, 16)),
    }
    short = {
        "ROUNDS": 2,
        "STEPS": 3,
        "AGAIN": 1,
        "STREAMS": (1, 2),
        "TOKENS": 12,
        "ASKED": (8, 32),
        "TIMES": 2,
        "LOADED": 6,
        "AGAIN_LOADED": 1,
    }
    for name, value in (small | short).items():
        monkeypatch.setattr(calibrate, name, value)
    for name, value in {"SEATS": 4, "WARM_UP": 2, "BLOCKS": 256}.items():
        monkeypatch.setattr(replaying, name, value)
    path = tmp_path / "device.json"
    arguments = ["bench", "calibrate", "--out", str(path), "--max-num-seqs", "8", "--kv-cache-memory", "64MiB"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    found = read_device(path)
    assert found.residuals["steps"] == 2 * 2 + 1 + 4 + 2
    assert {rows for rows, _ in found.step.rows} >= {1, 3, 4, 16, 64, 128}
    assert found.model_name == "embedded"
    assert found.machine["date"]
    assert found.host_bytes_per_second > 0
    assert found.per_neighbour >= 0
    assert found.server.under_load >= 0
    (tmp_path / "fleet.yaml").write_text(
        "replicas: [{kind: a, device: device.json, blocks: 200}]\n"
        "load: {rate: 2, duration: 3, prompt_tokens: 50, new_tokens: 10}\n"
    )
    simulated = CliRunner().invoke(app, ["simulate", "--fleet", str(tmp_path / "fleet.yaml"), "--json"])
    assert json.loads(simulated.stdout)["finished"] > 0
