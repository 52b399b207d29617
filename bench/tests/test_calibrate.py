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
from quire.engine.cost import model_cost
from quire.engine.trace import TraceRow
from quire.models import EMBEDDED, expected_weight_bytes, read_config
from quire.simulate.device import DeviceFile, ReplicaCost, ServerFit, StepFit, model_digest, read_device
from quire_bench.engine import calibrate, step_kinds, under_load
from quire_bench.fleet import replaying
from quire_bench.fleet.replaying import Sizes
from quire_bench.fleet.speed import cost_at, expected
from quire_bench.fleet.steps_seen import step_seconds, steps_seen
from quire_bench.proc import num_cores
from quire_bench.server.client import Record

MODEL = model_cost(*read_config(EMBEDDED), expected_weight_bytes(EMBEDDED))


@pytest.mark.long
@pytest.mark.slow
def test_a_file_for_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "SEQUENCES": (1, 4),
        "CONTEXTS": (16, 64),
        "BETWEEN": (3,),
        "PROMPTS": (4, 16, 128, 140, 200),
        "MIXED": ((2, 32), (4, 16)),
        "SEVERAL": ((4, 32), (7, 20)),
        "CACHED": ((64, 32),),
        "STEPS": 3,
        "AGAIN": 1,
    }
    short = {"ROUNDS": 2, "AGAIN_STREAM": 2, "TOKENS": 12, "ASKED": (8, 32), "TIMES": 2}
    light = {"LOADED": 6, "AGAIN_APART": 1, "AGAIN_GATEWAY": 1, "LOOPS_STREAMS": (1, 2), "LOOPS_TOKENS": 12}
    for module, values in (step_kinds, small), (calibrate, short), (under_load, light):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(replaying, "WARM_UP", 2)
    path = tmp_path / "device.json"
    arguments = ["bench", "calibrate", "--out", str(path), "--max-num-seqs", "8", "--kv-cache-memory", "64MiB"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    found = read_device(path)
    assert found.residuals["steps"] == 2 * 2 + 1 + 5 + 2 + 2 + 1
    assert {rows for rows, _ in found.step.rows} == {1, 3, 4, 16, 20, 32, 34, 128, 140, 200}
    assert found.model_name == "embedded"
    assert found.machine["date"]
    assert found.host_bytes_per_second > 0
    assert found.per_machine == max(1, num_cores() // int(found.machine["threads"]))
    assert 0 <= found.server.host_request < 0.2
    assert found.server.drawn < 0.01
    assert found.machine["prompts_seen"] >= 0
    assert found.server.peer_byte > 0
    (tmp_path / "fleet.yaml").write_text(
        "replicas: [{kind: a, device: device.json, blocks: 200}]\n"
        "load: {rate: 2, duration: 3, prompt_tokens: 50, new_tokens: 10}\n"
    )
    simulated = CliRunner().invoke(app, ["simulate", "--fleet", str(tmp_path / "fleet.yaml"), "--json"])
    assert json.loads(simulated.stdout)["finished"] > 0


STEP = StepFit(step=1e-3, sequence=2e-4, token=5e-5, drawn=0.0, weight_byte=3e-10, cache_byte=1e-9, linear_flop=1e-12,
               attention_flop=1e-12, context_flop=1e-12)  # fmt: skip
KNOWN = DeviceFile(kind="any", model=model_digest(MODEL), model_name="embedded", block_size=16, step=STEP,
                   bytes_per_second=1e10, host_bytes_per_second=2e10)  # fmt: skip


def some_rows(between: float) -> list[TraceRow]:
    rng = random.Random(0)
    return [TraceRow(i * between, rng.randrange(50, 300), rng.randrange(10, 40)) for i in range(32)]


def records_of(device: DeviceFile, rows: Sequence[TraceRow], budget: int = 10**9, computing: int = 1) -> list[Record]:
    """Return a client's records of a replica whose steps take the device's time and that cuts prompts at the budget."""
    cost = cost_at(device, MODEL, computing)
    records, now = [Record(row.arrival, row.arrival) for row in rows], 0.0
    for record, row in zip(records, rows, strict=True):
        record.answer.prompt_tokens = row.prompt_tokens
    left = {i: row.prompt_tokens for i, row in enumerate(rows)}  # of prompts, to be computed
    running: list[int] = []
    while left or running:
        room, parts = budget, {}
        for i in [i for i in left if rows[i].arrival <= now]:
            if room > 0:
                parts[i] = min(left[i], room)
                room -= parts[i]
        if not running and not parts:
            now = rows[min(left)].arrival
            continue
        keys = [rows[i].prompt_tokens + len(records[i].answer.times) for i in running]
        now += step_seconds(cost, keys, list(parts.values()))
        for i, tokens in parts.items():
            left[i] -= tokens
        running += [i for i in parts if not left[i]]
        left = {i: tokens for i, tokens in left.items() if tokens}
        for i in running:
            records[i].answer.times.append(now)
        running = [i for i in running if len(records[i].answer.times) < rows[i].new_tokens]
    return records


@pytest.mark.parametrize("budget", [10**9, 200])
def test_steps_that_a_client_sees(budget: int) -> None:
    """Also where prompts are cut: no step is seen then that has a part of one."""
    cost = ReplicaCost(MODEL, STEP, 16)
    found = list(steps_seen(records_of(KNOWN, some_rows(0.05), budget), 1e-4))
    assert len(found) > 50
    assert {len(one.prompts) for one in found} == {0, 1}
    assert sum(one.came for one in found) > 10 < sum(len(one.prompts) for one in found)
    for one in found:
        assert one.seconds == pytest.approx(step_seconds(cost, one.keys, one.prompts))


def loaded_as(device: DeviceFile, rows: Sequence[TraceRow], count: int = 1) -> under_load._Loaded:
    """So many replicas that take what the device says, each with all of the rows."""
    records = [records_of(device, rows, computing=count) for _ in range(count)]
    return under_load._Loaded(expected(MODEL, device, count), records, under_load._Work(1, 1, 1, 0.0))


def test_what_a_server_adds_under_load_is_found_again() -> None:
    """By its probes and its steps, though it reads slower than when its steps were timed."""
    server = ServerFit(step=5e-4, drawn=1e-4, arrival=2e-3, mixed_row=2e-5, loaded=5e-5)
    loaded = replace(KNOWN, server=server, step=replace(STEP, weight_byte=4e-10, cache_byte=4 / 3 * 1e-9))
    load = under_load._Load(Sizes(8, 512), some_rows(0.1), MODEL)
    run = loaded_as(loaded, load.rows)
    run.records[0][3].answer.times[5] += 2e-4  # as where another program has the core
    timed = replace(KNOWN, server=ServerFit(step=6e-4))  # a stream has a token in each step
    found = load.under_load(timed, [run])
    assert found.server.drawn == pytest.approx(1e-4, rel=0.1)  # a stream has a token in each step, too
    assert found.server.step == pytest.approx(5e-4, rel=0.05)
    assert found.server.arrival == pytest.approx(2e-3, rel=0.05)
    assert found.server.mixed_row == pytest.approx(2e-5, rel=0.05)
    assert found.server.loaded == pytest.approx(5e-5, rel=0.05)
    assert found.machine["prompts_seen"] >= under_load.LEAST_SEEN


WORKS = [under_load._Work(*counts, 5e-3 * counts[0] + 1e-3 * counts[1] + 3e-5 * counts[2])
         for counts in ((100, 400, 3000), (8, 190, 760), (32, 190, 3000))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("waited", "per_machine"), [(2e-3, 2), (0.0, 8)])
@pytest.mark.parametrize("longer", [0.0, 0.1])
def test_what_neighbours_cost_is_found_again(waited: float, per_machine: int, longer: float) -> None:
    """By CPU time, how long steps of both took, and streams and prompts that came alone.

    waited: seconds that a step waits for other work: all of it, or nothing where cores are free. longer: the share that
    it takes more than that.
    """
    known = replace(KNOWN, per_machine=per_machine)
    load = under_load._Load(Sizes(8, 512), some_rows(0.0), MODEL)
    crowded = replace(known, per_neighbour=longer, host_bytes_per_second=1.6e10)
    run = loaded_as(replace(crowded, server=ServerFit(step=waited)), load.rows, 2)._replace(
        probes=expected(MODEL, crowded, 2), work=under_load._Work(64, 500, 1000, 1.0)
    )
    found = load.next_to_another(known, run, WORKS)
    assert found.server.host_request == pytest.approx(5e-3, rel=0.01)
    assert found.server.host_step == pytest.approx(1e-3, rel=0.01)
    assert found.server.host_token == pytest.approx(3e-5, rel=0.01)
    assert found.per_neighbour == pytest.approx(longer, abs=0.01)
    assert found.host_bytes_per_second == pytest.approx(1.6e10, rel=0.05)


def test_a_dtype_that_fleets_are_not_simulated_with(tmp_path: Path) -> None:
    """Before anything is measured, not after minutes."""
    arguments = ["bench", "calibrate", "--dtype", "float32", "--out", str(tmp_path / "device.json")]
    shown = CliRunner().invoke(app, [*arguments, "--max-num-seqs", "8", "--kv-cache-memory", "64MiB"])
    assert shown.exit_code == 1
    assert "is loaded as torch.float32; fleets are simulated with the dtype of its files" in shown.stderr
