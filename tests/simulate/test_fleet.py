"""Simulated fleets: what goes wrong is survived, one seed gives one run, and leaps change nothing."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.cli import app
from quire.engine.cost import DEVICES, CostModel, StepWork, model_cost
from quire.engine.plan import Plan, PlanItem
from quire.engine.trace import TraceRow, write_trace
from quire.errors import ConfigError
from quire.models import EMBEDDED, expected_weight_bytes, read_config
from quire.request import Request, SamplingParams
from quire.simulate.device import (
    FORMAT,
    DeviceFile,
    Rates,
    ReplicaCost,
    ServerFit,
    StepFit,
    model_digest,
    read_device,
    write_device,
)
from quire.simulate.figures import Histogram
from quire.simulate.fitting import fit_steps, predicted, residuals
from quire.simulate.fleet import FleetSimulation, least_replicas, with_replicas
from quire.simulate.outcome import Outcome
from quire.simulate.replica import SimulatedReplica
from quire.simulate.spec import FleetSpec, make_spec, read_spec
from quire.simulate.steps import Steps
from tests.marks import of_long_runs

EXAMPLES = Path(__file__).parents[2] / "examples" / "fleets"
MODEL = model_cost(*read_config(EMBEDDED), expected_weight_bytes(EMBEDDED))
SLOW = StepFit(step=0.01, sequence=2e-4, token=1e-4, drawn=0.0, weight_byte=1e-10, cache_byte=1e-9, linear_flop=1e-12,
               attention_flop=1e-12, context_flop=1e-12, exponent=2)  # fmt: skip

SERVER = ServerFit(step=1e-3, drawn=1e-4, request=2e-3, prompt_token=1e-6, arrival=3e-3, mixed_row=1e-5, loaded=5e-5,
                   host_request=4e-3, host_step=1e-3, host_token=3e-5)  # fmt: skip


def device(path: Path, **known: Any) -> str:
    made = {"kind": "slow", "model": model_digest(MODEL), "model_name": "embedded", "block_size": 16,
            "bytes_per_second": 10e9, "host_bytes_per_second": 15e9, "step": SLOW,
            "per_neighbour": 0.05, "per_machine": 2, "server": SERVER}  # fmt: skip
    write_device(path / "slow.json", DeviceFile(**made | known))
    return "slow.json"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet")
    device(path)
    return path


def spec(directory: Path, **known: Any) -> FleetSpec:
    replicas = [{"kind": "a", "device": "slow.json", "count": 3, "per_host": 2, "blocks": 200,
                 "options": {"max_num_seqs": 16}}]  # fmt: skip
    load = {"rate": 4, "duration": 20, "prompt_tokens": {"median": 150, "spread": 0.6, "most": 500},
            "new_tokens": {"median": 40, "spread": 0.5, "most": 120}}  # fmt: skip
    load |= known.pop("load", {})
    return make_spec({"replicas": replicas, "load": load} | known, directory)


def run(fleet: FleetSpec, **options: Any) -> Outcome:
    return FleetSimulation(fleet, **options).run()


EVENTS = [
    {"at": 4, "kill": "a-0", "for": 3},
    {"at": 5, "hang": "a-1", "for": 1},
    {"at": 9, "hang": "a-1", "for": 4},
    {"at": 10, "partition": "a-2", "for": 3},
    {"at": 12, "slow": "a-host-0", "factor": 3, "for": 4},
    {"at": 15, "kill": "a", "for": 2},
]


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 3), st.booleans(), st.lists(st.sampled_from(EVENTS), max_size=4))
@example(937, 3, True, [EVENTS[1], EVENTS[2], EVENTS[4]])  # resumed, then ended by the model's longest sequence
def test_leaps_change_nothing(directory: Path, seed: int, gateways: int, talks: bool, events: list[Any]) -> None:
    load = {"turns": 3, "think": 1.0, "rate": 2} if talks else {"prefixes": 3, "prefix_tokens": 64}
    fleet = spec(directory, seed=seed, gateways={"count": gateways}, load=load, events=events,
                 network={"jitter": 0.3})  # fmt: skip
    stepped, leapt = run(fleet, leaps=False).as_dict(), run(fleet).as_dict()
    assert stepped == leapt


@pytest.mark.slow
def test_one_seed_gives_one_run(directory: Path) -> None:
    one, same, other = (run(spec(directory, seed=seed)).as_dict() for seed in (1, 1, 2))
    assert one == same
    assert one["trace_hash"] != other["trace_hash"]


@pytest.mark.slow
def test_what_goes_wrong_is_survived(directory: Path) -> None:
    """Every answer has all of its tokens, once: a Cell raises where a ledger says otherwise."""
    found = run(spec(directory, events=EVENTS, seed=3, load={"rate": 6}))
    assert found.counts["finished"] == found.counts["requests"] > 50
    assert found.counts["resumed"] > 5
    assert found.stalls.max > 1.5  # until a hung replica is given up
    plain = run(spec(directory, seed=3, load={"rate": 6}))
    assert plain.counts["resumed"] == 0
    assert plain.ttft.percentile(99) < found.ttft.percentile(99)


def test_the_longest_sequence_ends_an_answer(directory: Path) -> None:
    longest = {"max_model_len": 120}
    replicas = [{"kind": "a", "device": "slow.json", "count": 2, "blocks": 200, "options": longest}]
    load = {"prompt_tokens": 100, "new_tokens": 60}
    found = run(spec(directory, replicas=replicas, load=load, events=[{"at": 8, "kill": "a-0", "for": 3}]))
    assert found.counts["resumed"] > 0
    assert found.counts["finished"] == found.counts["requests"]
    assert found.counts["new_tokens"] == 20 * found.counts["finished"]


def test_jitter_keeps_the_order_of_an_answer(directory: Path) -> None:
    """A first token that came after the end would not be counted."""
    found = run(spec(directory, load={"new_tokens": 1}, network={"jitter": 3.0}))
    assert found.ttft.count == found.counts["finished"] == found.counts["requests"] > 50


@pytest.mark.slow
def test_without_a_gateway_clients_ask_again(directory: Path) -> None:
    found = run(spec(directory, gateways={"count": 0}, events=EVENTS[5:], load={"rate": 10}))
    assert found.errors["connection lost"] > 0
    assert found.counts["finished"] + found.counts["failed"] == found.counts["requests"]


@pytest.mark.slow
def test_nobody_there_is_503_and_a_timeout_an_error(directory: Path) -> None:
    found = run(spec(directory, events=[{"at": 5, "kill": "a", "for": 60}], clients={"retries": 0}))
    assert found.errors["503"] > 0
    found = run(spec(directory, clients={"timeout": 0.2, "retries": 1, "backoff": 0.1}))
    assert found.errors["timeout"] > 0
    assert found.counts["retries"] > 0


def test_the_gateway_finds_what_is_cached(directory: Path) -> None:
    load = {"turns": 4, "think": 0.5, "rate": 0.7}
    routed = run(spec(directory, load=load))
    in_turns = run(spec(directory, load=load, gateways={"count": 0}))
    assert routed.hit_rate > 1.2 * in_turns.hit_rate > 0


@pytest.mark.slow
def test_replicas_come_and_go(directory: Path) -> None:
    replicas = [{"kind": "a", "device": "slow.json", "blocks": 200, "options": {"max_num_seqs": 16}}]
    scaling = {"least": 1, "most": 6, "every": 5, "start_seconds": 2}
    fleet = spec(directory, replicas=replicas, autoscaling=scaling, load={"rate": 14, "duration": 25})
    found = run(fleet)
    counts = [moment.numbers["replicas"] for _, moment in sorted(found.moments.items())]
    assert counts[0] == 1
    assert max(counts) > 2
    assert found.counts["finished"] == found.counts["requests"]
    assert found.as_dict() == run(fleet, leaps=False).as_dict()


def test_a_server_reads_requests_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    device(tmp_path, server=ServerFit(request=1e-3, prompt_token=1e-2))
    write_trace(tmp_path / "two.csv", [TraceRow(0.0, 100, 5), TraceRow(0.0, 4, 5)])
    replicas = [{"kind": "a", "device": "slow.json", "blocks": 200}]
    found = run(spec(tmp_path, replicas=replicas, load={"arrivals": "trace", "trace": "two.csv"}))
    assert found.counts["finished"] == 2
    assert found.ttft.percentile(0) > 1.0  # the short one's, which came after the long one


def test_a_request_that_was_read_by_a_process_that_died_is_read_again(tmp_path: Path) -> None:
    device(tmp_path, server=ServerFit(request=1e-3, prompt_token=1e-2))
    write_trace(tmp_path / "one.csv", [TraceRow(0.0, 300, 800)])
    replicas = [{"kind": "a", "device": "slow.json", "blocks": 200}]
    load, events = {"arrivals": "trace", "trace": "one.csv"}, [{"at": 1, "kill": "a-0", "for": 1}]
    found = run(spec(tmp_path, replicas=replicas, load=load, events=events))
    assert (found.counts["finished"], dict(found.errors)) == (1, {})
    assert found.ttft.max > 2.0 + 3.0  # started again after two seconds, and read in three


def test_a_replica_that_starts_again_reads_nothing_of_before(tmp_path: Path) -> None:
    device(tmp_path, server=ServerFit(request=1e-3, prompt_token=1e-2))
    write_trace(tmp_path / "two.csv", [TraceRow(0.0, 900, 5), TraceRow(3.0, 4, 5)])
    replicas = [{"kind": "a", "device": "slow.json", "blocks": 200}]
    load, events = {"arrivals": "trace", "trace": "two.csv"}, [{"at": 1, "kill": "a-0", "for": 1}]
    found = run(spec(tmp_path, replicas=replicas, load=load, events=events, gateways={"count": 0},
                     clients={"retries": 0}))  # fmt: skip
    assert found.counts["finished"] == 1  # without a gateway the first one is lost
    assert found.ttft.max < 1.0  # which would have been read for nine seconds


@pytest.mark.slow
def test_a_replica_that_starts_again_is_measured_from_nothing(directory: Path) -> None:
    scaling = {"least": 3, "most": 3, "every": 2, "start_seconds": 1}
    fleet = spec(directory, events=[{"at": 4.5, "kill": "a-0", "for": 1}], autoscaling=scaling, load={"rate": 8})
    assert run(fleet).counts["finished"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, of_long_runs(1)])
def test_leaps_change_nothing_where_gateways_hear_late(directory: Path, seed: int) -> None:
    load = {"turns": 3, "think": 0.0, "rate": 2, "duration": 10}
    fleet = spec(directory, seed=seed, gateways={"count": 1, "lag": 1.0}, load=load)
    assert run(fleet, leaps=False).as_dict() == run(fleet).as_dict()


@pytest.mark.slow
def test_neighbours_share_what_a_host_reads(directory: Path) -> None:
    reading = StepFit(step=0.0, sequence=0.0, token=0.0, drawn=0.0, weight_byte=1e-9, cache_byte=1e-9, linear_flop=0.0,
                      attention_flop=0.0, context_flop=0.0)  # fmt: skip
    device(directory / "..", step=reading, bytes_per_second=10e9, host_bytes_per_second=10e9)
    replicas = [{"kind": "a", "device": "../slow.json", "count": 2, "per_host": 2, "blocks": 200}]
    load = {"rate": 8, "duration": 10, "new_tokens": 100, "prompt_tokens": 50}
    together = run(spec(directory, replicas=replicas, load=load))
    apart = run(spec(directory, replicas=[replicas[0] | {"per_host": 1}], load=load))
    assert together.itl.mean > 1.3 * apart.itl.mean


@pytest.mark.slow
def test_cells_are_added(directory: Path) -> None:
    fleet = spec(directory, cell=1)
    simulation = FleetSimulation(with_replicas(fleet, 4))
    assert simulation.num_cells == 2  # two hosts of two
    found = simulation.run()
    assert found.counts["requests"] == sum(simulation.cell(i).counts["requests"] for i in range(2)) > 0
    assert len(found.hashes) == 2


@pytest.mark.slow
def test_each_cell_scales_its_share(directory: Path) -> None:
    replicas = [{"kind": "a", "device": "slow.json", "count": 2, "blocks": 200, "options": {"max_num_seqs": 16}}]
    scaling = {"least": 2, "most": 7, "every": 5, "start_seconds": 2}
    fleet = spec(directory, replicas=replicas, autoscaling=scaling, cell=4, load={"rate": 24, "duration": 20})
    simulation = FleetSimulation(fleet)
    assert simulation.num_cells == 2
    most = [max(one.numbers["replicas"] for one in simulation.cell(i).moments.values()) for i in range(2)]
    assert fleet.autoscaling is not None
    shares = [fleet.autoscaling.share(i, 2) for i in range(2)]
    assert [(one.least, one.most) for one in shares] == [(1, 4), (1, 3)]
    assert all(1 < count <= share.most for count, share in zip(most, shares, strict=True))
    with pytest.raises(ConfigError, match=r"up to 9 replicas are 3 cells of 4, .* count and least must be at least 3"):
        FleetSimulation(spec(directory, replicas=replicas, autoscaling=scaling | {"most": 9}, cell=4))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_fleets(path: Path) -> None:
    simulation = FleetSimulation(read_spec(path))
    assert simulation.num_cells == -(-simulation.spec.num_replicas // 64)


@pytest.mark.slow
def test_the_fewest_replicas_that_are_enough(directory: Path) -> None:
    goals = {"ttft_p90": 0.25}
    fleet = spec(directory, load={"rate": 12, "duration": 5})
    count, outcome, tried = least_replicas(fleet, goals)
    assert count > 1
    assert outcome.figure("ttft_p90") <= 0.25
    assert tried[count]
    assert run(with_replicas(fleet, count - 1)).figure("ttft_p90") > 0.25
    with pytest.raises(ConfigError, match="cannot be met: a request that is alone"):
        least_replicas(fleet, {"ttft_p50": 0.001})


# ------------------------------------------------------------------------------------------------ figures and the fit


def test_a_percentile_lies_between_its_neighbours() -> None:
    """As that of a sorted list does, to a percent."""
    for values in ([1.0], [1.0, 2.0], [1.0, 2.0, 4.0], [1.0, 1.0, 3.0, 9.0, 9.0], [0.5 * i for i in range(1, 41)]):
        found = Histogram()
        for value in values:
            found.add(value)
        for percent in (0, 10, 50, 90, 99, 100):
            assert found.percentile(percent) == pytest.approx(float(np.percentile(values, percent)), rel=0.011)
    assert Histogram().percentile(50) == 0.0


@pytest.mark.slow
def test_a_fit_finds_what_steps_were_made_of() -> None:
    works = [
        StepWork(tokens + s, s + (tokens > 0), s + (tokens > 0), 1e8, 1e5 * s * context, 1e7 * (tokens + s), 1e4 * s, 0)
        for s in (0, 1, 4, 16) for tokens in (0, 16, 128, 512) for context in (16, 256) if s + tokens
    ]  # fmt: skip
    truth = StepFit(step=1e-3, sequence=2e-5, token=3e-6, drawn=0.0, weight_byte=3e-11, cache_byte=2e-10,
                    linear_flop=2e-12, attention_flop=0.0, context_flop=0.0, exponent=3)  # fmt: skip
    seconds = [predicted(truth, work) for work in works]
    fit = fit_steps(works, seconds)
    assert residuals(fit, works, seconds)["max"] < 0.05
    with pytest.raises(ConfigError, match="exponent is 5"):
        StepFit(**vars(truth) | {"exponent": 5})


@pytest.fixture
def _linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit the exponent of the truth alone: the search of the others takes most of the time."""
    monkeypatch.setattr("quire.simulate.fitting.EXPONENTS", (1,))


@pytest.mark.usefixtures("_linear")
def test_residuals_show_a_kind_of_steps_that_the_fit_has_wrong() -> None:
    """Also one that alone has its number of rows, whose factor fits it to the last bit."""
    works = [
        StepWork(s, s, s, 1e8, 1e5 * s * context, 1e7 * s, 1e4 * s, 0)
        for s in (1, 2, 4, 8, 16, 32, 128, 256, 512) for context in (16, 256)
    ]  # fmt: skip
    mixed = StepWork(20, 4, 4, 1e8, 1e5, 2e8, 1e4, 0)
    seconds = [predicted(SLOW, work) for work in works] + [1.5 * predicted(SLOW, mixed)]
    fit = fit_steps([*works, mixed], seconds)
    assert predicted(fit, mixed) == pytest.approx(seconds[-1], rel=0.01)
    assert residuals(fit, [*works, mixed], seconds)["max"] > 0.2


@pytest.mark.usefixtures("_linear")
def test_a_fit_knows_what_numbers_of_rows_take() -> None:
    """Kernels compute rows by the dozen: between 12 and 13 there is a stair that no line has."""
    works = [
        StepWork(s, s, s, 1e8, 1e5 * s * context, 1e7 * s, 1e4 * s, 0)
        for s in (1, 2, 4, 8, 12, 13, 16, 32, 128, 136, 256, 512) for context in (16, 256)
    ]  # fmt: skip
    truth = StepFit(step=1e-3, sequence=2e-5, token=3e-6, drawn=0.0, weight_byte=3e-11, cache_byte=2e-10,
                    linear_flop=2e-12, attention_flop=0.0, context_flop=0.0,
                    rows=((12, 1.0), (13, 1.4), (128, 1.0), (136, 1.2), (200, 1.0)))  # fmt: skip
    seconds = [predicted(truth, work) for work in works]
    fit = fit_steps(works, seconds)
    assert [rows for rows, _ in fit.rows] == [1, 2, 4, 8, 12, 13, 16, 32, 128, 136, 256, 512]
    assert residuals(fit, works, seconds)["max"] < 0.1 < residuals(replace(fit, rows=()), works, seconds)["max"]


@pytest.mark.usefixtures("_linear")
def test_prompts_in_one_step_separate_linears_from_attention() -> None:
    """Of single prompts alone, more rows and more pairs are the same; and linears of many rows take longer a row."""

    def of(prompts: int, tokens: int) -> StepWork:
        rows, pairs = prompts * tokens, prompts * tokens * (tokens + 1) / 2
        return StepWork(rows, prompts, prompts, 1e8, 1e3 * rows, 2e8 * rows, 1e5 * pairs, 0)

    truth = StepFit(step=1e-3, sequence=1e-4, token=1e-5, drawn=0.0, weight_byte=2e-10, cache_byte=1e-10,
                    linear_flop=1e-12, attention_flop=2e-12, context_flop=0.0,
                    rows=((64, 1.0), (256, 1.0), (512, 1.2), (1024, 1.6)))  # fmt: skip
    single = [of(1, tokens) for tokens in (4, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)]
    several = [of(2, 128), of(3, 128), of(8, 64), of(2, 384), of(4, 256)]
    unseen = [of(6, 128), of(10, 100), of(5, 60)]

    def off(works: list[StepWork]) -> float:
        fit = fit_steps(works, [predicted(truth, work) for work in works])
        return max(abs(predicted(fit, work) / predicted(truth, work) - 1) for work in unseen)

    assert off(single + several) < 0.03 < 0.06 < off(single)


def test_between_two_numbers_of_rows_there_is_a_line() -> None:
    fit = replace(SLOW, rows=[(4, 1.0), (8, 2.0)])
    assert [fit.factor(rows) for rows in (1, 4, 5, 6, 8, 100)] == [1.0, 1.0, 1.25, 1.5, 2.0, 2.0]
    assert SLOW.factor(7) == 1.0
    for rows, message in (
        ([(8, 1.0), (4, 1.0)], "its numbers of rows must ascend"),
        ([(1, 0.0)], "the factor of 1 rows is 0.0"),
        ([4], "it must be pairs of a number of rows and a factor"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(SLOW, rows=rows)


def test_rows_by_the_dozen_are_of_the_first_part_alone() -> None:
    fit = replace(SLOW, rows=[(12, 0.9), (13, 1.1)], attention_flop=1e-9)
    short, long = (StepWork(12, 12, 12, 1e8, size, 1e7, size, 0) for size in (1e5, 1e8))
    plain = replace(fit, rows=())
    own = 12 * fit.sequence
    assert predicted(fit, short) - own == pytest.approx(0.9 * (predicted(plain, short) - own), rel=0.01)
    longer = predicted(fit, long) - predicted(fit, short)
    assert longer == pytest.approx(predicted(plain, long) - predicted(plain, short))


def test_reading_for_attention_hides_behind_no_products() -> None:
    """A long prompt is computed while others decode: what these read comes on top."""
    fit = replace(SLOW, exponent=8, attention_flop=1e-7)
    alone, with_keys = (StepWork(512, 1, 1, 1e8, size, 1e10, 1e6, 0) for size in (0, 1e8))
    read = fit.cache_byte * 1e8
    assert predicted(fit, with_keys) - predicted(fit, alone) == pytest.approx(read)


def test_a_replica_takes_as_long_as_the_fit_says_and_longer_where_requests_come() -> None:
    fit = replace(SLOW, exponent=3, rows=[(3, 1.2), (40, 0.8)], attention_flop=1e-9)
    work = StepWork(30, 4, 5, 2e6, 3e5, 5e9, 1e7, 0, num_decoding=3)
    server = ServerFit(
        step=1e-3, drawn=1e-4, arrival=5e-3, mixed_row=1e-5, loaded=2e-5, host_step=3e-3, host_token=1e-3
    )
    cost = ReplicaCost(MODEL, fit, 16, server)
    took = predicted(fit, work) + 1e-3 + 4 * 1.2e-4
    assert cost.time_of(work) == pytest.approx(took + 27 * 1e-5)  # a later part of a prompt
    assert cost.time_of(work._replace(num_begun=2)) == pytest.approx(took + 27 * 1e-5 + 0.01)
    work = work._replace(num_decoding=0)
    assert cost.time_of(work._replace(num_begun=2)) == pytest.approx(took)  # nobody waits
    cost.rates = Rates(slowness=2.0)
    assert cost.time_of(work) == pytest.approx(2 * took)
    cost.rates = Rates(full=True)
    assert cost.time_of(work) == pytest.approx(took + 3e-3 + 4 * 1e-3)
    alone = cost.work_of(Plan([], num_tokens=0), 3, num_decoding=3, keys=30)
    assert cost.decoder(3)(30) == cost.time_of(alone)


def test_products_with_keys_of_earlier_steps_are_told_apart() -> None:
    fit = replace(SLOW, attention_flop=2e-9, context_flop=1e-9)
    cost = ReplicaCost(MODEL, fit, 16)
    request = Request("r", array("i", bytes(4 * 110)), 110, SamplingParams())
    work = cost.work_of(Plan([PlanItem(request, 100, 10)], num_tokens=10), 4, num_decoding=3, keys=30)
    within, earlier = (10 * 11 // 2 + 3) * cost.pair_flops, (10 * 100 + 27) * cost.pair_flops
    assert (work.attention_flops, work.context_flops) == (within + earlier, earlier)
    plain = replace(fit, attention_flop=0.0, context_flop=0.0)
    longer = 2e-9 * within + 1e-9 * earlier
    assert predicted(fit, work) - predicted(plain, work) == pytest.approx(longer)
    assert cost.time_of(work) == pytest.approx(predicted(fit, work))
    alone = cost.work_of(Plan([], num_tokens=0), 3, num_decoding=3, keys=30)
    assert cost.decoder(3)(30) == cost.time_of(alone)


def test_a_request_begins_once() -> None:
    """Also one whose prompt is cached; it goes on in the next step."""
    cost = CostModel(MODEL, DEVICES["cpu"], 16)

    def begun(start: int, cached: int, tokens: int = 32) -> int:
        request = Request("r", array("i", bytes(4 * tokens)), 32, SamplingParams())
        request.cache.num_cached = cached
        return cost.work_of(Plan([PlanItem(request, start, 1)], num_tokens=1), 1).num_begun

    assert [begun(0, 0), begun(16, 16), begun(31, 32)] == [1, 1, 1]
    assert [begun(16, 0), begun(17, 16), begun(32, 32, 33), begun(32, 0, 33)] == [0, 0, 0, 0]


def test_who_decodes_in_a_step() -> None:
    """Neither a later part of a prompt, nor a request that computes its tokens once more."""
    cost = CostModel(MODEL, DEVICES["cpu"], 16)
    request = Request("r", array("i", bytes(4 * 100)), 90, SamplingParams())
    for start, rows, decodes in ((0, 32, 0), (32, 32, 0), (0, 100, 0), (99, 1, 1)):
        plan = Plan([PlanItem(request, start, rows)], num_tokens=rows)
        assert cost.work_of(plan, 1, num_decoding=3, keys=300).num_decoding == 3 + decodes


def test_where_no_core_is_free_a_request_takes_time_from_steps(tmp_path: Path) -> None:
    """Two replicas on one machine: all that both compute is later by what else is done for requests, and no more."""
    seconds = {}
    load = {"arrivals": "trace", "trace": "trace.csv"}
    write_trace(tmp_path / "trace.csv", [TraceRow(0.001 * i, 100, 50) for i in range(16)])
    replicas: list[dict[str, Any]] = [{"kind": "a", "device": "slow.json", "count": 2, "per_host": 2, "blocks": 400}]
    for per_machine, request in ((0, 0.1), (2, 0.0), (2, 0.1), (3, 0.1)):
        device(tmp_path, server=ServerFit(host_request=request), per_machine=per_machine)
        fleet = make_spec({"replicas": replicas, "load": load, "gateways": {"count": 0}}, tmp_path)
        seconds[per_machine, request] = run(fleet).seconds
    assert seconds[0, 0.1] == seconds[3, 0.1] == seconds[2, 0.0]  # there are cores to spare, or it takes none
    replicas[0]["per_machine"] = 0
    free = make_spec({"replicas": replicas, "load": load, "gateways": {"count": 0}}, tmp_path)
    assert run(free).seconds == seconds[0, 0.1]  # as the fleet says
    longer = seconds[2, 0.1] - seconds[2, 0.0]
    assert 0.5 * 16 * 0.1 / 2 < longer < 1.1 * 16 * 0.1 / 2


def test_each_replica_is_held_up_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets the requests: it is the machine that has no core free."""
    held_up: Counter[int] = Counter()
    real = Steps.hold_up

    def counted(steps: Steps, replica: SimulatedReplica, seconds: float) -> bool:
        held_up[replica.number] += 1
        return real(steps, replica, seconds)

    monkeypatch.setattr(Steps, "hold_up", counted)
    device(tmp_path, server=ServerFit(host_request=1e-3))
    write_trace(tmp_path / "trace.csv", [TraceRow(0.001 * i, 100, 900 if i == 0 else 20) for i in range(80)])
    replicas = [{"kind": "a", "device": "slow.json", "count": 2, "per_host": 2, "blocks": 400}]
    load = {"arrivals": "trace", "trace": "trace.csv"}
    run(make_spec({"replicas": replicas, "load": load, "gateways": {"count": 0}}, tmp_path))
    assert sum(held_up.values()) > 100
    assert abs(held_up[0] - held_up[1]) <= 0.2 * sum(held_up.values())


def test_a_device_costs_what_its_cost_model_says() -> None:
    work = StepWork(3, 1, 2, 2e6, 3e5, 5e9, 1e7, 1e6)
    cost = ReplicaCost(MODEL, DEVICES["cpu"], 16)
    byte, flop = 1 / DEVICES["cpu"].bytes_per_second, 1 / DEVICES["cpu"].flops_per_second
    assert cost.time_of(work) == pytest.approx(max(2.3e6 * byte, 5.01e9 * flop) + 1e6 / 21e9)
    cost.rates = Rates(slowness=2.0)
    assert cost.time_of(work) == pytest.approx(2 * (max(2.3e6 * byte, 5.01e9 * flop) + 1e6 / 21e9))


def test_a_device_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    device(tmp_path)
    found = read_device(tmp_path / "slow.json")
    assert (found.step, found.host_bytes_per_second) == (SLOW, 15e9)


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"load": {"rate": -1}}, "load: rate is -1.0; it must be finite and at least"),
        ({"load": {"rate": 1e4, "duration": 600}}, "the load is 10,000.0 requests a second, and the fleet can serve"),
        ({"load": {"arrivals": "tides"}}, "load: arrivals is 'tides'"),
        ({"load": {"arrivals": "trace"}}, "arrivals is 'trace' and trace is ''"),
        ({"load": {"prefixes": 3}}, "prefixes is 3 and prefix_tokens is 0"),
        ({"load": {"prompt_tokens": {"median": 3, "spread": -1}}}, "load: prompt_tokens: spread is -1"),
        ({"load": {"speed": 0}}, "load: speed is 0"),
        ({"network": {"jitter": -0.1}}, "network: jitter is -0.1"),
        ({"gateways": {"lags": 1}}, "gateways: there is no entry 'lags'; did you mean 'lag'"),
        ({"autoscaling": {"least": 2}}, "autoscaling: most is missing"),
        ({"autoscaling": {"least": 5, "most": 2}}, "autoscaling: most is 2"),
        ({"events": [{"at": 1, "kill": "b-7"}]}, "there is no replica, host or kind 'b-7' to kill"),
        ({"events": [{"at": 1}]}, r"events\[0\] has at; it must have one of kill, hang, slow, partition"),
        ({"events": [{"at": -1, "kill": "a-0"}]}, r"events\[0\]: at is -1"),
        ({"goal": {"ttft_p95": 1}}, "goal 'ttft_p95' is unknown"),
        ({"replicas": []}, "there are no replicas"),
        ({"replicas": [{"kind": "a"}]}, r"replicas\[0\]: device is missing"),
        ({"replicas": [{"kind": "a", "device": "none.json"}]}, "there is no device file"),
        ({"replicas": [{"kind": "a", "device": "cpu", "options": {"max_seats": 3}}]}, "options of a: .*max_seats"),
        ({"replicas": [{"kind": "a", "device": "cpu", "per_neighbour": -1}]}, r"replicas\[0\]: per_neighbour is -1"),
        ({"replicas": [{"kind": "a", "device": "cpu", "count": 0}]}, r"replicas\[0\]: count is 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(directory: Path, known: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FleetSimulation(spec(directory, **known))


def test_a_device_file_of_another_model_is_refused(tmp_path: Path) -> None:
    device(tmp_path, model="another", model_name="smol135")
    with pytest.raises(ConfigError, match=r"slow\.json was measured with another model, smol135"):
        FleetSimulation(spec(tmp_path))
    for content, message in (
        ("{", "cannot be read as a device file"),
        ("{}", f"is no device file of format {FORMAT}"),
        (json.dumps({"format": FORMAT - 1}), f"is no device file of format {FORMAT}"),
        (json.dumps({"format": FORMAT}), "step is None; it must be an object of numbers"),
    ):
        (tmp_path / "slow.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            FleetSimulation(spec(tmp_path))
    with pytest.raises(ConfigError, match="sequence is -1"):
        StepFit(**vars(SLOW) | {"sequence": -1.0})


@pytest.mark.slow
def test_the_command(directory: Path, tmp_path: Path) -> None:
    path = directory / "fleet.yaml"
    path.write_text(
        "replicas: [{kind: a, device: slow.json, count: 2, blocks: 200}]\n"
        "load: {rate: 3, duration: 10, prompt_tokens: 100, new_tokens: 30}\n"
    )
    shown = CliRunner().invoke(app, ["simulate", "--fleet", str(path), "--plot", str(tmp_path / "shown.png")])
    assert shown.exit_code == 0, shown.output
    assert "prefix hit rate" in shown.stdout
    assert (tmp_path / "shown.png").stat().st_size > 1000
    found = CliRunner().invoke(app, ["simulate", "--fleet", str(path), "--goal", "ttft_p90=0.5", "--json"])
    assert json.loads(found.stdout)["replicas"] >= 1
    for arguments, message in (
        (["--goal", "speed=3"], "goal 'speed' is unknown"),
        (["--goal", "ttft_p90=soon"], "goal is 'ttft_p90=soon'"),
        (["--blocks", "3"], "a load and its options are part of the --fleet file"),
    ):
        wrong = CliRunner().invoke(app, ["simulate", "--fleet", str(path), *arguments])
        assert wrong.exit_code == 1
        assert message in wrong.stderr
