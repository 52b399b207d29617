"""quire bench calibrate: what it writes, a fleet can be simulated with."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.engine.cost import ModelCost, model_cost
from quire.engine.trace import TraceRow
from quire.models import EMBEDDED, expected_weight_bytes, read_config
from quire.simulate.device import DeviceFile, ReplicaCost, ServerFit, StepFit, model_digest, read_device
from quire_bench.engine import calibrate
from quire_bench.fleet import replaying
from quire_bench.fleet.replaying import Sizes
from quire_bench.fleet.speed import expected
from quire_bench.fleet.steps_seen import SeenStep, steps_seen
from quire_bench.server.client import Record

MODEL = model_cost(*read_config(EMBEDDED), expected_weight_bytes(EMBEDDED))


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
        "AGAIN_STREAM": 2,
        "TOKENS": 12,
        "ASKED": (8, 32),
        "TIMES": 2,
        "LOADED": 6,
        "PROCESSES": 1,
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
    assert {rows for rows, _ in found.step.rows} == {1, 3, 4, 16, 20, 34, 128, 140, 200}
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


STEP = StepFit(step=1e-3, sequence=2e-4, token=5e-5, drawn=0.0, weight_byte=3e-10, cache_byte=1e-9, linear_flop=1e-12,
               attention_flop=1e-12)  # fmt: skip


def file_of(model: ModelCost) -> DeviceFile:
    return DeviceFile(kind="any", model=model_digest(model), model_name="embedded", block_size=16, step=STEP,
                      bytes_per_second=1e10, host_bytes_per_second=2e10)  # fmt: skip


def some_rows(between: float) -> list[TraceRow]:
    rng = random.Random(0)
    return [TraceRow(i * between, rng.randrange(50, 300), rng.randrange(10, 40)) for i in range(32)]


def records_of(device: DeviceFile, model: ModelCost, rows: Sequence[TraceRow]) -> list[Record]:
    """What a client sees of a replica that takes for its steps what the device says."""
    cost = ReplicaCost(model, device.step, device.block_size, device.server)
    records, now = [Record(row.arrival, row.arrival) for row in rows], 0.0
    for record, row in zip(records, rows, strict=True):
        record.answer.prompt_tokens = row.prompt_tokens
    running: list[int] = []
    waiting = list(range(len(rows)))
    while running or waiting:
        new = [i for i in waiting if rows[i].arrival <= now]
        if not running and not new:
            now = rows[waiting[0]].arrival
            continue
        keys = tuple(rows[i].prompt_tokens + len(records[i].answer.times) for i in running)
        now += SeenStep(0.0, keys, tuple(rows[i].prompt_tokens for i in new), 0).expected(cost)
        waiting, running = [i for i in waiting if i not in new], running + new
        for i in running:
            records[i].answer.times.append(now)
        running = [i for i in running if len(records[i].answer.times) < rows[i].new_tokens]
    return records


def test_steps_that_a_client_sees() -> None:
    device, model = file_of(MODEL), MODEL
    cost = ReplicaCost(model, device.step, 16)
    rows = some_rows(0.05)
    found = list(steps_seen(records_of(device, model, rows), 1e-4))
    assert len(found) > 50
    assert {len(one.prompts) for one in found} == {0, 1}
    for one in found:
        assert one.seconds == pytest.approx(one.expected(cost))
    assert sum(one.came for one in found) >= sum(len(one.prompts) for one in found) > 10


def test_no_step_is_seen_where_a_replica_had_nothing_to_do() -> None:
    rows = [TraceRow(0.0, 20, 3), TraceRow(50.0, 20, 2)]
    found = list(steps_seen(records_of(file_of(MODEL), MODEL, rows), 1e-4))
    assert [(one.keys, one.prompts, one.came) for one in found] == [((21,), (), 0), ((22,), (), 0), ((21,), (), 0)]


def test_what_a_server_adds_under_load_is_found_again() -> None:
    """By its probes and its steps, though it reads slower than when its steps were timed."""
    known = file_of(MODEL)
    loaded = replace(known, server=ServerFit(drawn=1e-4, arrival=2e-3), step=replace(STEP, weight_byte=4e-10))
    load = calibrate._Load(1, Sizes(8, 512), some_rows(0.1), MODEL, "")
    run = calibrate._Loaded(0.0, expected(MODEL, loaded, 1), records_of(loaded, MODEL, load.rows))
    found = load.under_load(known, [run])
    assert found.server.drawn == pytest.approx(1e-4, rel=0.05)
    assert found.server.arrival == pytest.approx(2e-3, rel=0.05)


def test_what_neighbours_cost_is_found_again() -> None:
    """From how long all requests took, and streams and prompts that came alone."""
    known = replace(file_of(MODEL), server=ServerFit(arrival=2e-3))
    two = calibrate._Load(2, Sizes(8, 512), some_rows(0.0), MODEL, "")
    crowded = replace(known, per_neighbour=0.1, host_bytes_per_second=1.6e10)
    found = two.next_to_another(known, [calibrate._Loaded(two.seconds(crowded), expected(MODEL, crowded, 2), [])])
    assert found.per_neighbour == pytest.approx(0.1, rel=0.1)
    assert found.host_bytes_per_second == pytest.approx(1.6e10, rel=0.05)


def test_a_dtype_that_fleets_are_not_simulated_with(tmp_path: Path) -> None:
    """Before anything is measured, not after minutes."""
    arguments = ["bench", "calibrate", "--dtype", "float32", "--out", str(tmp_path / "device.json")]
    shown = CliRunner().invoke(app, [*arguments, "--max-num-seqs", "8", "--kv-cache-memory", "64MiB"])
    assert shown.exit_code == 1
    assert "is loaded as torch.float32; fleets are simulated with the dtype of its files" in shown.stderr
