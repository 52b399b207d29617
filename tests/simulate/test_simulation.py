"""The simulator: it plans what the engine plans, and its figures are those of its cost model, worked out by hand."""

import json
import math
import random
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cache.groups import CacheGroup, Heads, RowGroup, StateGroup
from quire.cache.manager import Move
from quire.cli import app
from quire.config import engine_config
from quire.engine.cost import DEVICES, CostModel, Device, ModelCost, attended, cost_of, model_cost
from quire.engine.plan import Plan, PlanItem
from quire.engine.trace import TraceRow, poisson, write_trace
from quire.errors import BadValue, ConfigError
from quire.models import EMBEDDED, read_config
from quire.models.decoder_config import ExpertsConfig, IndexConfig, MlpConfig, weight_shapes
from quire.models.model import Model, WeightBytes
from quire.request import FinishReason, Request, SampleGroup
from quire.simulate.figures import Histogram
from quire.simulate.simulation import Simulation, _written

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)
TOY = ModelCost(
    groups=(CacheGroup((0, 1), heads=HEADS),),
    max_model_len=100_000,
    layer_params=1000,
    head_params=200,
    number_bytes=2,
    weights=WeightBytes(layers=2000, head=400, looked_up=10**6),
)
SLOW = Device("slow", bytes_per_second=1000.0, flops_per_second=1e12, link_bytes_per_second=500.0)


def simulation(rows: list[TraceRow], device: Device = SLOW, model: ModelCost = TOY, **options: object) -> Simulation:
    hosts = int(str(options.pop("num_host_blocks", 0)))
    one = Simulation(model, device, engine_config(**{"num_blocks": 100} | options), num_host_blocks=hosts, hashed=True)
    one.run(rows)
    return one


# ---------------------------------------------------------------------------------------------------- the cost


def request(num_computed: int, num_tokens: int) -> Request:
    made = Request("r", array("i", [0] * num_tokens), num_tokens, SamplingParams())
    made.cache.num_computed = num_computed
    return made


@pytest.mark.parametrize("window", [None, 1, 4, 30])
def test_what_a_step_sees(window: int | None) -> None:
    """Against counting, for every beginning and end of a piece."""
    for computed in range(0, 40, 3):
        for num_new in (1, 2, 5, 17):
            rows = range(computed, computed + num_new)
            seen = [range(0 if window is None else max(0, row - window + 1), row + 1) for row in rows]
            keys = len({key for keys in seen for key in keys})
            pairs = sum(map(len, seen))
            item = PlanItem(request(computed, computed + num_new), computed, num_new)
            assert attended([item, item], window) == (2 * keys, 2 * pairs)
            if window is not None:  # as many keys are chosen, others by each row as far as there are enough
                assert attended([item], None, window) == (min(computed + num_new, num_new * window), pairs)


def test_sparse_attention_reads_the_chosen_keys() -> None:
    """And the indexer all of its own. Decoding sequences cost the same next to a plan as in it, in a simulation too."""
    heads = Heads(4, 1, 12, latent=8, index_dim=6)
    toy = replace(TOY, groups=(CacheGroup((0, 1), heads=heads),))
    sparse = replace(toy, indexes={0: IndexConfig(num_heads=3, head_dim=6, top_k=5)})
    plan = Plan([PlanItem(request(40, 41), 40, 1), PlanItem(request(2, 4), 2, 2)], num_tokens=3)
    dense, work = (CostModel(model, SLOW, block_size=4).work_of(plan, 2) for model in (toy, sparse))
    new, latent, index = 3 * 2 * 18 * 2, 2 * 12 * 2, 2 * 6 * 2  # bytes: two layers, two a number
    assert dense.cache_bytes == new + (41 + 4) * (latent + index)
    assert work.cache_bytes == new + (5 + 4) * latent + (41 + 4) * index
    pair, scored = 4 * 2 * 4 * 12, 2 * 2 * 18
    assert dense.attention_flops == (41 + 3 + 4) * pair
    assert work.attention_flops == (5 + 3 + 4) * pair + (41 + 3 + 4) * scored
    apart = CostModel(sparse, SLOW, block_size=4).work_of(Plan([plan.items[1]], num_tokens=2), 2, 1, 41)
    assert (apart.cache_bytes, apart.attention_flops) == (work.cache_bytes, work.attention_flops)
    rows, ends = [TraceRow(0.0, 30, 9), TraceRow(0.1, 40, 12)], []
    for leaps in (True, False):
        one = Simulation(sparse, SLOW, engine_config(num_blocks=100), leaps=leaps)
        one.run(rows)
        ends.append(one.now)
    assert ends[0] == ends[1]


def test_bytes_and_flops_of_a_step() -> None:
    cost = CostModel(TOY, replace(SLOW, flops_per_second=1.0), block_size=4)
    plan = Plan([PlanItem(request(10, 13), 10, 3)], num_tokens=3)
    # 3 rows through the layers, one through the head; keys 11, 12 and 13 of two layers, 4 heads of 8, times 4
    assert cost.seconds(plan, 1) == 2 * (3 * 1000 + 200) + (11 + 12 + 13) * 4 * 2 * 4 * 8
    cost = CostModel(TOY, SLOW, block_size=4)
    kv = 2 * 2 * 2 * 8 * 2  # K and V, two layers, two heads of 8, two bytes
    assert cost.seconds(plan, 1) == pytest.approx(((1000 + 200) * 2 + (13 + 3) * kv) / 1000)
    plan = Plan(swap_out=[Move(0, 1, 2)] * 3, copies=[Move(0, 1, 2)])
    assert cost.seconds(plan, 0) == pytest.approx(2 * 4 * kv / 1000 + 3 * 4 * kv / 500)


def test_the_model_of_a_config() -> None:
    config, dtype = read_config(EMBEDDED)
    cost = model_cost(config, dtype)
    layer = sum(
        shape[0] * (shape[1] if len(shape) > 1 else 1)
        for name, shape in weight_shapes(config).items()
        if name.startswith(("layers.", "final_norm"))
    )
    head = config.vocab_size * config.hidden_size
    assert (cost.layer_params, cost.head_params) == (layer, head)
    assert cost.weights == WeightBytes(layers=layer * dtype.itemsize, head=head * dtype.itemsize)
    assert cost.number_bytes == dtype.itemsize
    assert cost.max_model_len == config.max_position_embeddings


def test_the_model_of_what_is_loaded() -> None:
    """Of a model whose layers are not ours, what it loaded says about as much."""
    config, dtype = read_config(EMBEDDED)
    weights = replace(model_cost(config, dtype).weights, head=567, looked_up=89)
    model = SimpleNamespace(
        config=config, dtype=dtype, max_model_len=config.max_position_embeddings, weight_bytes=weights
    )
    exact = cost_of(cast(Model, model))
    assert exact == replace(model_cost(config, dtype), weights=weights)
    model.config = SimpleNamespace(vocab_size=config.vocab_size, hidden_size=config.hidden_size, groups=config.groups)
    assert cost_of(cast(Model, model)) == exact


def test_experts_are_read_where_they_are_chosen() -> None:
    """Of 4 experts, 2 a token: one reads half of them, two three quarters, as if by chance."""
    model = replace(TOY, weights=replace(TOY.weights, experts=6000), expert_params=4000, expert_share=0.5)
    assert [model.weight_bytes(tokens) for tokens in (1, 2)] == [2400 + 3000, 2400 + 4500]
    assert model.weight_bytes(1000) == 2400 + 6000
    assert model.linear_flops(3, 1) == 2 * (3 * (1000 + 2000) + 200)
    plain, dtype = read_config(EMBEDDED)
    experts = ExpertsConfig(count=4, per_token=1, mlp=MlpConfig(size=16), renormalised=True)
    layers = tuple(replace(layer, mlp=experts) if i in (0, 2) else layer for i, layer in enumerate(plain.layers))
    cost, dense = (model_cost(config, dtype) for config in (replace(plain, layers=layers), plain))
    assert cost.expert_params == 2 * 4 * 3 * 16 * plain.hidden_size
    assert cost.weights.experts == cost.expert_params * dtype.itemsize
    assert cost.expert_share == 0.25
    mlp = plain.layers[0].mlp
    assert isinstance(mlp, MlpConfig)
    mlps, routers = 2 * 3 * mlp.size * plain.hidden_size, 2 * 4 * plain.hidden_size
    assert cost.layer_params == dense.layer_params - mlps + routers


# ----------------------------------------------------------------------------------------------------- the run


def test_two_requests_by_hand() -> None:
    """One prompt of 5 and one of 3, which comes while the first is decoded: every time follows from the bytes."""
    rows = [TraceRow(1.0, 5, 3), TraceRow(3.6, 3, 1)]
    found = simulation(rows).result()
    weights, kv = 2 * 1200 / 1000, 128 / 1000
    first = 1.0 + weights + (5 + 5) * kv  # 4.68: by then the second one is there
    second = first + weights + (6 + 1 + 3 + 3) * kv
    third = second + weights + (7 + 1) * kv
    third -= 1.0
    assert found.seconds == pytest.approx(third)
    assert found.steps == 3
    assert found.ttft["mean"] == pytest.approx((first - 1.0 + second - 3.6) / 2)
    assert found.ttft["max"] == pytest.approx(second - 3.6)
    assert found.itl["mean"] == pytest.approx((third - (first - 1.0)) / 2)
    assert (found.requests, found.finished, found.refused, found.ended_early) == (2, 2, 0, 0)
    assert (found.prompt_tokens, found.new_tokens, found.computed_tokens) == (8, 4, 8 + 2)
    assert found.new_tokens_per_second == pytest.approx(4 / third)
    assert found.total_tokens_per_second == pytest.approx(12 / third)


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    found = simulation([TraceRow(1e6, 5, 1), TraceRow(0.0, 5, 1)]).result()
    assert found.seconds == pytest.approx(1e6 + 2.4 + 10 * 0.128)
    assert simulation([TraceRow(1.7e9, 5, 1)]).result().seconds == pytest.approx(2.4 + 10 * 0.128)
    assert found.ttft["max"] == pytest.approx(2.4 + 10 * 0.128)


LOAD = [replace(row, prompt_tokens=5 + i * 7 % 60) for i, row in enumerate(poisson(150, 10, 40, 2.0, seed=3))]


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_same_rows_and_options_give_the_same_run(preemption: str) -> None:
    options = {"num_blocks": 30, "preemption": preemption, "num_host_blocks": 30 * (preemption == "swap")}
    one, other = simulation(LOAD, **options).result(), simulation(LOAD, **options).result()
    assert one == other
    assert one.preemptions > 20
    assert (one.swapped_blocks > 0) == (preemption == "swap")
    assert (one.computed_tokens > sum(row.prompt_tokens + row.new_tokens - 1 for row in LOAD)) == (
        preemption == "recompute"
    )
    assert one.trace_hash != simulation(LOAD, **(options | {"num_blocks": 31})).result().trace_hash
    assert one.finished == 150


def test_what_is_wasted_does_not_depend_on_when_one_looks() -> None:
    rows = [TraceRow(0.0, 16, 192)] * 64
    config = engine_config(num_blocks=10_000)
    every, some = (Simulation(TOY, SLOW, config, sample_every=n) for n in (1, 61))
    a, b = every.run(rows), some.run(rows)
    assert a.waste == pytest.approx(b.waste, abs=0.03)
    assert a.most_used_blocks == b.most_used_blocks == 64 * 13  # 207 tokens are stored at the end
    assert a.waste > 0.03


def test_shared_prefixes_are_hits() -> None:
    rows = [TraceRow(float(i), 200, 2, "system", 160) for i in range(10)]
    found = simulation(rows).result()
    assert found.hit_rate == pytest.approx(9 * 160 / (10 * 200))
    assert found.computed_tokens == 10 * (200 + 1) - 9 * 160
    assert simulation(rows, enable_prefix_caching=False).result().hit_rate == 0
    assert found.evicted_blocks == 0  # the prefix is 10 blocks, and each request leaves 2 others
    rows = [TraceRow(1000.0 * i, 200, 2) for i in range(10)]
    found = simulation(rows, num_blocks=40).result()
    assert found.evicted_blocks == 10 * 12 - 39  # all full blocks but those that still stand; one was never full


def test_what_can_never_fit_is_counted_with_the_reason() -> None:
    found = simulation([TraceRow(0.0, 2000, 2), TraceRow(0.0, 20, 2)]).result()
    assert (found.refused, found.finished, found.prompt_tokens) == (1, 1, 20)
    assert "request 0 can never fit: 2000 prompt tokens" in (found.first_refusal or "")


@pytest.mark.parametrize("budget", [256, 2048])
def test_a_long_prompt_cannot_starve_decodes(budget: int) -> None:
    """While a prompt of 32k tokens is computed, 16 others get a token in each step, and a step is bounded."""
    rows = [TraceRow(0.0, 64, 500)] * 16 + [TraceRow(0.05, 32_768, 4)]
    model = model_cost(*read_config(EMBEDDED))
    found = simulation(rows, DEVICES["cpu"], replace(model, max_model_len=2**16), num_blocks=4000,
                       max_num_batched_tokens=budget)  # fmt: skip
    whole = CostModel(model, DEVICES["cpu"], 16).seconds(
        Plan([PlanItem(request(0, 32_768), 0, 32_768)], num_tokens=32_768), 1
    )
    last_piece = Plan([PlanItem(request(32_768 - budget, 32_768), 32_768 - budget, budget)], num_tokens=budget)
    piece = CostModel(model, DEVICES["cpu"], 16).seconds(last_piece, 17)
    assert found.ttft.max > found.itl.max > 0.5 * piece  # they were served side by side
    assert found.itl.max < 1.05 * piece
    assert found.itl.max < 2.5 * budget / 32_768 * whole
    assert found.itl.count == 16 * 499 + 3


@pytest.mark.slow
def test_it_plans_what_the_engine_plans() -> None:
    """The same requests on a real engine with a small pool: every step has the same items, moves and victims.

    Without drafts, which depend on what the tokens are.
    """
    rows = [TraceRow(0.0, 5 + 11 * i % 50, 10 + 7 * i % 20, *(("p", 4) if i % 3 == 0 else ("", 0))) for i in range(24)]
    options = {"num_blocks": 14, "max_num_seqs": 8, "max_num_batched_tokens": 24, "block_size": 8}

    def written(plan: Plan) -> list[object]:
        items = [(item.request.num_prompt, item.request.cache.num_computed, item.num_new) for item in plan.items]
        return [items, [r.num_prompt for r in plan.preempted], list(plan.copies), list(plan.swap_out)]

    def watched(scheduler: object, plans: list[object]) -> None:
        real = scheduler.plan

        def plan() -> Plan:
            found = real()
            plans.append(written(found))
            return found

        scheduler.plan = plan

    simulated, served = [], []
    one = Simulation(model_cost(*read_config(EMBEDDED)), DEVICES["cpu"], engine_config(**options), leaps=False)
    watched(one.scheduler, simulated)
    assert one.run(rows).preemptions > 0
    llm = LLM(**options, num_speculative_tokens=0)
    watched(llm.engine.scheduler, served)
    prompts = [[1, 2, 3, 4, *([100 + i] * (row.prompt_tokens - 4))] if row.prefix_id else [100 + i] * row.prompt_tokens
               for i, row in enumerate(rows)]  # fmt: skip
    params = [SamplingParams(max_tokens=row.new_tokens, ignore_eos=True) for row in rows]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert served == simulated


def test_drafts_save_steps_by_their_acceptance() -> None:
    """With few and with many requests, on a device that reads for longer than it multiplies."""
    for count in (1, 16):
        rows = poisson(count, 20, 60, None, 0)
        found = []
        for share in (None, 0.0, 0.8, 1.0):
            options = {"num_blocks": 2000, "num_speculative_tokens": 3}
            one = Simulation(TOY, SLOW, engine_config(**options), draft_acceptance=share)
            found.append(one.run(rows))
            one.scheduler.audit()
        plain, wrong, mostly, right = found
        assert [result.new_tokens for result in found] == [60 * count] * 4
        assert plain.steps == wrong.steps > 1.4 * mostly.steps > 1.4 * right.steps
        assert plain.seconds > mostly.seconds > right.seconds
    with pytest.raises(ConfigError, match="draft_acceptance is 2"):
        Simulation(TOY, SLOW, engine_config(num_blocks=20), draft_acceptance=2.0)


def test_a_run_needs_a_number_of_blocks_and_a_host_for_swapping() -> None:
    for options, hosts, message in (
        ({}, 0, "num_blocks is unset"),
        (
            {"num_blocks": 5, "max_model_len": 200_000},
            0,
            "max_model_len is 200000; the model was made for up to 100000",
        ),
        ({"num_blocks": 5, "preemption": "swap"}, 0, "preemption is 'swap' with 0 blocks on the host"),
        ({"num_blocks": 5}, 9, "preemption is 'recompute' with 9 blocks on the host"),
    ):
        with pytest.raises(ConfigError, match=message):
            Simulation(TOY, SLOW, engine_config(**options), num_host_blocks=hosts)


def test_histogram() -> None:
    histogram = Histogram()
    assert histogram.percentile(50) == 0
    for i in range(1, 1001):
        histogram.add(i / 1000)
    histogram.add(0.0, 10)
    assert histogram.count == 1010
    assert histogram.percentile(50) == pytest.approx(0.495, rel=0.01)
    assert histogram.percentile(99) == pytest.approx(0.990, rel=0.01)
    assert histogram.as_dict()["max"] == histogram.percentile(100) == 1.0
    assert histogram.as_dict()["mean"] == pytest.approx(500.5 / 1010)


@pytest.mark.parametrize("count", [2, 10, 200])
def test_times_between_are_added_as_one_by_one(count: int) -> None:
    rng, at, moments = random.Random(count), 5.0, []
    for _ in range(count):
        moments.append(at)
        at += rng.choice([0.01, 0.0101, rng.random()])
    one, other = Histogram(), Histogram()
    for histogram in (one, other):
        histogram.add(0.3)
    one.add_between(moments, 7)
    for before, after in pairwise(moments):
        other.add(after - before, 7)
    assert vars(one) == vars(other)


# --------------------------------------------------------------------------------------------------- the command


def run(arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments.split()])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def test_command(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.csv", [TraceRow(0.1 * i, 300, 20, "system", 256) for i in range(30)])
    shown = run(f"--trace {tmp_path / 'trace.csv'} --blocks 100")
    for name in ("requests", "virtual time", "new tokens", "TTFT", "ITL", "preemptions", "prefix hit rate", "waste"):
        assert f"\n{name}" in f"\n{shown}"
    assert "30 of 30 finished" in shown
    found = json.loads(run(f"--trace {tmp_path / 'trace.csv'} --blocks 100 --json --device h200"))
    assert found["finished"] == 30
    assert found["trace_hash"]
    found = json.loads(
        run("--requests 50 --prompt-tokens 60 --new-tokens 30 --rate 1000 --blocks 40 --json --preemption swap")
    )
    assert found["new_tokens"] == 1500
    assert found["swapped_blocks"] > 0
    shortest = json.loads(run("--workload mixed --blocks 200 --json --scheduling-policy shortest"))
    assert shortest["ttft"]["p50"] < json.loads(run("--workload mixed --blocks 200 --json"))["ttft"]["p50"]
    shown = run("--workload prefix --blocks 200", status=1)
    assert "no request of 32 finished: request 0 has a prompt of 1088 tokens" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--blocks 5", "there must be a load; give one of --trace, --workload and --requests"),
        ("--blocks 5 --workload decode --requests 3", "give one of --trace"),
        ("--blocks 5 --workload mixed --rate 3", "--prompt-tokens, --new-tokens and --rate describe --requests"),
        ("--blocks 100000000000 --requests 3", "num_blocks is 100000000000"),
        ("--blocks 5 --requests 0", "requests is 0"),
        ("--blocks 5 --workload nope", "there is no workload 'nope'"),
        ("--blocks 5 --requests 3 --device tpu", "device is 'tpu'; the devices are cpu, h200"),
        ("--blocks 5 --trace nope.csv", "nope.csv cannot be read as CSV"),
        ("--blocks 5 --requests 3 --model-config nope.json", "holds no nope.json"),
        ("--blocks 0 --requests 3", "num_blocks is 0"),
        ("--blocks 5 --requests 3 --scheduling-policy lottery", "scheduling_policy is 'lottery'"),
        ("--blocks 5 --requests 3 --rate 0", "rate is 0"),
    ],
)
def test_what_is_wrong_is_told(arguments: str, message: str) -> None:
    assert message in run(arguments, status=1)


# ------------------------------------------------------------------------------- what the figures are made of


TWO_GROUPS = replace(TOY, groups=(CacheGroup((0, 1), heads=HEADS), CacheGroup((2,), window=4, heads=HEADS)))


def test_every_group_costs_what_its_rows_see() -> None:
    flops = CostModel(TWO_GROUPS, replace(SLOW, bytes_per_second=1e12, flops_per_second=1.0), block_size=4)
    plan = Plan([PlanItem(request(10, 13), 10, 3)], num_tokens=3)
    attention = 4 * 4 * 8  # of one layer, one query and one key
    assert flops.seconds(plan, 1) == 2 * (3 * 1000 + 200) + attention * (2 * (11 + 12 + 13) + 3 * 4)
    size = CostModel(TWO_GROUPS, SLOW, block_size=4)
    kv = 2 * 2 * 8 * 2  # of one layer and token
    assert size.seconds(plan, 1) == pytest.approx((2400 + kv * (2 * (13 + 3) + (6 + 3))) / 1000)
    moved = Plan(swap_out=[Move(0, 1, 2), Move(1, 1, 2)], swap_in=[Move(1, 1, 2)])
    assert size.seconds(moved, 0) == pytest.approx(4 * kv * (2 + 1 + 1) / 500)


def test_states_and_rows_are_reported_apart() -> None:
    """A prompt of 40 tokens and 25 new ones: 40, 41, .., 63 are computed at the looks, and rows after 32 are kept."""
    model = replace(TOY, groups=(*TOY.groups, StateGroup((2,), piece=32), RowGroup((2,), piece=32)))
    one = Simulation(model, SLOW, engine_config(num_blocks=30, max_num_seqs=2), sample_every=1)
    found = one.run([TraceRow(0.0, 40, 25, "", 0)])
    assert found.finished == 1
    assert found.most_used_blocks == 4  # of 16 tokens, without states and rows
    assert found.most_used_states == 1
    assert found.row_waste == sum(range(1, 25)) / (24 * 32)
    assert found.evicted_blocks == 0
    plain = Simulation(TOY, SLOW, engine_config(num_blocks=30, max_num_seqs=2), sample_every=1)
    without = plain.run([TraceRow(0.0, 40, 25, "", 0)])
    assert (without.waste, without.most_used_blocks) == (found.waste, found.most_used_blocks)
    assert (without.row_waste, without.most_used_states) == (0.0, 0)


def test_only_what_is_multiplied_is_counted() -> None:
    config, dtype = read_config(EMBEDDED)
    tied = model_cost(config, dtype)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, rope=None)) for layer in config.layers)
    untied = model_cost(replace(config, tied_embeddings=False, learned_positions=True, layers=layers), dtype)
    assert (untied.layer_params, untied.head_params) == (tied.layer_params, tied.head_params)


def test_the_devices_are_those_of_their_data_sheets() -> None:
    h200 = DEVICES["h200"]
    assert (h200.bytes_per_second, h200.flops_per_second) == (0.9 * 4.8e12, 0.7 * 989e12)
    assert DEVICES["cpu"].bytes_per_second == 42e9


def test_percentiles_are_told_apart() -> None:
    histogram = Histogram()
    for i in range(1, 101):
        histogram.add(float(i))
    shown = histogram.as_dict()
    for name, value in (("p50", 50.5), ("p90", 90.1), ("p99", 99.01), ("max", 100)):
        assert shown[name] == pytest.approx(value, rel=0.011)


def test_moves_are_counted_both_ways_and_hashed() -> None:
    one = Simulation(TOY, SLOW, engine_config(num_blocks=30, preemption="swap"), num_host_blocks=30, hashed=True)
    moved = {"out": 0, "in": 0}
    real = one.scheduler.plan

    def watched() -> Plan:
        plan = real()
        moved["out"] += len(plan.swap_out)
        moved["in"] += len(plan.swap_in)
        return plan

    one.scheduler.plan = watched
    found = one.run(LOAD)
    assert found.swapped_blocks == moved["out"] + moved["in"]
    assert min(moved.values()) > 0
    texts = [
        _written(Plan(**{part: [Move(0, 1, to)]}), 0.0) for part in ("swap_out", "swap_in", "copies") for to in (2, 3)
    ]
    assert len(set(texts)) == 6


def test_copies_and_early_ends_are_counted() -> None:
    one = Simulation(TOY, SLOW, engine_config(num_blocks=50))
    group = SampleGroup()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    group.members = [Request(f"s{i}", array("i", range(10)), 10, params, i, group=group) for i in range(3)]
    for member in group.members:
        one.add(member)
    one.step()
    one.step()
    one.scheduler.finish("s2", FinishReason.ABORT)
    while one.scheduler.has_work:
        one.step()
    found = one.result()
    assert found.copied_blocks == 2  # the last of three keeps the block
    assert (found.finished, found.ended_early) == (2, 1)


def test_a_request_that_is_taken_back_ends_with_the_next_step() -> None:
    def generated(*, leaps: bool) -> list[int]:
        one = Simulation(TOY, SLOW, engine_config(num_blocks=50), leaps=leaps)
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        requests = [Request(f"r{i}", array("i", range(10)), 10, params) for i in range(2)]
        for request in requests:
            one.add(request)
        for _ in range(5):
            one.go_on(one.clock.now)
        one.scheduler.finish("r0", FinishReason.ABORT)
        while one.scheduler.has_work:
            one.go_on(math.inf)
        return [request.num_generated for request in requests]

    stepped = generated(leaps=False)
    assert stepped[0] < 10 < stepped[1] == 60
    assert generated(leaps=True) == stepped


def test_that_no_request_can_go_on_is_an_error() -> None:
    one = Simulation(TOY, SLOW, engine_config(num_blocks=50))
    one.add(Request("r", array("i", [1]), 1, SamplingParams(max_tokens=4)))
    one.scheduler.plan = Plan
    with pytest.raises(BadValue, match="no request can continue: 0 run, 0 are swapped out, 1 wait"):
        one.step()
