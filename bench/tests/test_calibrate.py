"""quire bench calibrate: what it writes, a fleet can be simulated with."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.engine.cost import model_cost
from quire.engine.trace import TraceRow
from quire.models import EMBEDDED, expected_weight_bytes, read_config
from quire.simulate.device import DeviceFile, ServerFit, StepFit, model_digest, read_device
from quire_bench.engine import calibrate
from quire_bench.fleet import replaying
from quire_bench.fleet.replaying import Sizes
from quire_bench.fleet.speed import expected


@pytest.mark.slow
def test_a_file_for_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "SEQUENCES": (1, 4),
        "CONTEXTS": (16, 64),
        "BETWEEN": (3,),
        "PROMPTS": (4, 16, 128, 140, 200),
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
        "AGAIN_ALONE": 1,
        "AGAIN_LOADED": 1,
        "AGAIN_GATEWAY": 1,
    }
    for name, value in (small | short).items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(replaying, "WARM_UP", 2)
    path = tmp_path / "device.json"
    arguments = ["bench", "calibrate", "--out", str(path), "--max-num-seqs", "8", "--kv-cache-memory", "64MiB"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    found = read_device(path)
    assert found.residuals["steps"] == 2 * 2 + 1 + 5 + 2
    assert {rows for rows, _ in found.step.rows} == {1, 3, 4, 16, 20, 34, 128}
    assert found.model_name == "embedded"
    assert found.machine["date"]
    assert found.host_bytes_per_second > 0
    assert found.per_neighbour >= 0
    assert found.server.arrival >= 0
    assert found.server.peer_byte > 0
    (tmp_path / "fleet.yaml").write_text(
        "replicas: [{kind: a, device: device.json, blocks: 200}]\n"
        "load: {rate: 2, duration: 3, prompt_tokens: 50, new_tokens: 10}\n"
    )
    simulated = CliRunner().invoke(app, ["simulate", "--fleet", str(tmp_path / "fleet.yaml"), "--json"])
    assert json.loads(simulated.stdout)["finished"] > 0


def test_what_load_and_neighbours_cost_is_found_again() -> None:
    """From how long all requests took, and streams and prompts that came alone."""
    model = model_cost(*read_config(EMBEDDED), expected_weight_bytes(EMBEDDED))
    step = StepFit(step=1e-3, sequence=0.0, token=5e-5, drawn=0.0, weight_byte=3e-10, cache_byte=1e-10,
                   linear_flop=1e-12, attention_flop=1e-12)  # fmt: skip
    known = DeviceFile(kind="any", model=model_digest(model), model_name="embedded", block_size=16, step=step,
                       bytes_per_second=1e10, host_bytes_per_second=2e10)  # fmt: skip
    rng = random.Random(0)
    rows = [TraceRow(0.0, rng.randrange(50, 300), rng.randrange(10, 40)) for _ in range(32)]

    one = calibrate._Load(1, Sizes(8, 512), rows, model, "")
    loaded = replace(known, server=ServerFit(arrival=2e-3))
    found = one.under_load(known, [calibrate._Loaded(one.seconds(loaded), expected(model, loaded, 1))])
    assert found.server.arrival == pytest.approx(2e-3, rel=0.02)

    two = calibrate._Load(2, Sizes(8, 512), rows, model, "")
    crowded = replace(loaded, per_neighbour=0.1, host_bytes_per_second=1.6e10)
    found = two.next_to_another(found, [calibrate._Loaded(two.seconds(crowded), expected(model, crowded, 2))])
    assert found.per_neighbour == pytest.approx(0.1, rel=0.1)
    assert found.host_bytes_per_second == pytest.approx(1.6e10, rel=0.05)


def test_a_dtype_that_fleets_are_not_simulated_with(tmp_path: Path) -> None:
    """Before anything is measured, not after minutes."""
    arguments = ["bench", "calibrate", "--dtype", "float32", "--out", str(tmp_path / "device.json")]
    shown = CliRunner().invoke(app, [*arguments, "--max-num-seqs", "8", "--kv-cache-memory", "64MiB"])
    assert shown.exit_code == 1
    assert "is loaded as torch.float32; fleets are simulated with the dtype of its files" in shown.stderr
