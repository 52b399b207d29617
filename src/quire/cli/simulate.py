"""quire simulate: run the scheduler under a load on a simulated device."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.options import ENGINE, AsJson, fail, row, with_options
from quire.engine.workloads import WORKLOADS, workload_lengths
from quire.errors import ConfigError
from quire.progress import progress_bar

if TYPE_CHECKING:
    from quire.engine.trace import TraceRow
    from quire.simulate.figures import SimulationResult


# The fields of EngineConfig and CacheConfig that the scheduler reads.
SCHEDULING = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "block_size",
              "enable_prefix_caching", "preemption", "state_snapshot_interval")  # fmt: skip


@with_options(*ENGINE, only=SCHEDULING)
def simulate(
    blocks: Annotated[int | None, typer.Option(help="KV blocks in the pool. Required without --fleet.")] = None,
    fleet: Annotated[Path | None, typer.Option(help="A fleet and its load, as YAML.")] = None,
    goal: Annotated[
        list[str] | None,
        typer.Option(help="With --fleet: find the replicas needed to meet it, as in ttft_p90=0.5 (s)."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="With --fleet: plot the run over time into this file.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="With --fleet: cells that are simulated at a time.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(help="CSV: arrival, prompt_tokens, new_tokens and, if given, prefix_id, ...")
    ] = None,
    workload: Annotated[str | None, typer.Option(help=f"{', '.join(WORKLOADS)}; all arrive at once.")] = None,
    requests: Annotated[int | None, typer.Option(help="That many requests of one size.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each prompt, with --requests. Default: 100.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate for each, with --requests. Default: 100.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, with --requests. Default: all at once.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="A config.json or its directory. Default: the embedded model.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or h200.")] = "cpu",
    host_blocks: Annotated[int | None, typer.Option(min=1, help="For swap. Default: as many as --blocks.")] = None,
    draft_acceptance: Annotated[
        float | None, typer.Option(help="Probability that a draft token is right. Default: no draft tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and tokens. The same seed gives the same run.")] = 0,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Run the real scheduler, or a fleet of them, over a load with a virtual clock."""
    if fleet is not None:
        from quire.cli.simulate_fleet import simulate_fleet

        others = (trace, workload, requests, prompt_tokens, new_tokens, rate, blocks, model_config, host_blocks)
        simulate_fleet(fleet, goal or [], plot, processes, as_json=as_json, is_alone=others == (None,) * len(others))
        return
    from quire.config import engine_config
    from quire.engine.cost import DEVICES, model_cost
    from quire.engine.trace import poisson, read_trace
    from quire.models import EMBEDDED, expected_weight_bytes, read_config
    from quire.simulate.simulation import Simulation

    if goal or plot is not None or processes != 1:
        raise ConfigError("--goal, --plot and --processes are for --fleet; give a YAML file with it")
    if blocks is None:
        raise ConfigError("there is no --blocks, and no --fleet; give the number of KV blocks")
    if [trace, workload, requests].count(None) != 2:
        raise ConfigError("there must be a load; give one of --trace, --workload and --requests")
    if requests is None and (prompt_tokens, new_tokens, rate) != (None, None, None):
        raise ConfigError("--prompt-tokens, --new-tokens and --rate describe --requests; a trace has its own")
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}; the devices are {', '.join(DEVICES)}")
    config, path = engine_config(num_blocks=blocks, seed=seed, **options), model_config or EMBEDDED
    if trace is not None:
        rows = read_trace(trace)
    elif workload is not None:
        rows = _rows_of(workload)
    else:
        sizes = [100 if given is None else given for given in (prompt_tokens, new_tokens)]
        rows = poisson(requests or 0, sizes[0], sizes[1], rate, seed)
    simulation = Simulation(
        model_cost(*read_config(path), expected_weight_bytes(path)),
        DEVICES[device],
        config,
        num_host_blocks=host_blocks or (blocks if config.cache.preemption == "swap" else 0),
        seed=seed,
        hashed=as_json,
        draft_acceptance=draft_acceptance,
    )
    start = time.perf_counter()
    with progress_bar("simulate", len(rows)) as advance:
        result = simulation.run(rows, advance)
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        _print_table(result, time.perf_counter() - start)
    if not result.finished:
        fail(f"no request of {result.requests} finished" + (f": {result.first_refusal}" if result.refused else ""))


def _rows_of(workload: str) -> list[TraceRow]:
    """Return the requests of a workload, which all arrive at once."""
    from quire.engine.trace import TraceRow

    lengths, shared = workload_lengths(workload)
    return [TraceRow(0.0, prompt, new, "shared" if shared else "", shared) for prompt, new in lengths]


def _print_table(result: SimulationResult, wall_seconds: float) -> None:
    message = f"{result.finished:,} of {result.requests:,} finished"
    if result.refused:
        message += f"; {result.refused:,} refused, the first because {result.first_refusal}"
    row("requests", message)
    row("virtual time", f"{result.seconds:,.2f} s in {result.steps:,} steps")
    row("new tokens", f"{result.new_tokens:,}, {result.new_tokens_per_second:,.1f} a second")
    row("with prompts", f"{result.total_tokens_per_second:,.1f} tokens a second")
    row("computed tokens", f"{result.computed_tokens:,}")
    for name, figures in (("TTFT", result.ttft), ("ITL", result.itl)):
        row(name, ", ".join(f"{which} {1e3 * value:,.2f}" for which, value in figures.items()) + " ms")
    moved = f"{result.swapped_blocks:,} blocks swapped, {result.copied_blocks:,} copied"
    row("preemptions", f"{result.preemptions:,}; {moved}")
    row("evicted blocks", f"{result.evicted_blocks:,}")
    row("prefix hit rate", f"{result.hit_rate:.1%} of the prompt tokens")
    row("waste", f"{result.waste:.2%} of the owned slots; at most {result.most_used_blocks:,} blocks seen in use")
    if result.most_used_states:
        row(
            "states",
            f"at most {result.most_used_states:,} seen in use; {result.row_waste:.2%} of open pieces' rows empty",
        )
    row("simulated in", f"{wall_seconds:,.2f} s")
