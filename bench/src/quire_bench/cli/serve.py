"""quire bench serve: load on a server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.options import AsJson, fail, row
from quire.engine.workloads import WORKLOADS
from quire.errors import ConfigError
from quire.progress import progress_bar
from quire_bench.cli.options import Save

if TYPE_CHECKING:
    from quire_bench.server.prompts import Prompt

DEFAULT_REQUESTS, DEFAULT_LENGTH = 100, 128


def serve(
    url: Annotated[str, typer.Option("--url", "--base-url", help="Of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="As the server names it. Default: the first of /v1/models.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions, or chat.")] = "completions",
    workload: Annotated[str | None, typer.Option(help=f"{', '.join(WORKLOADS)}.")] = None,
    dataset: Annotated[
        Path | None, typer.Option("--dataset", "--dataset-path", help='JSONL: {"prompt": ..., "max_tokens": ...}.')
    ] = None,
    random_input_len: Annotated[
        int | None, typer.Option(help=f"Tokens of each random prompt; words, with chat. Default: {DEFAULT_LENGTH}.")
    ] = None,
    random_output_len: Annotated[
        int | None, typer.Option(help=f"Tokens to generate for each random prompt. Default: {DEFAULT_LENGTH}.")
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help=f"Requests. Default: those of the workload or dataset; {DEFAULT_REQUESTS} random ones."),
    ] = None,
    request_rate: Annotated[float, typer.Option(help="Requests a second on average; inf: all at once.")] = math.inf,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests under way at most. Default: no limit.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and random prompts.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Go on past the end tokens; not all servers know it.")
    ] = True,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    extra_body: Annotated[str | None, typer.Option(help="JSON: further fields of each request.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    percentile_metrics: Annotated[str, typer.Option(help="Which to tell.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Which to tell.")] = "50,90,99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limits in ms, as in 'ttft:200 itl:30': what a good answer keeps; itl is its longest gap."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this file.")] = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Load any OpenAI-compatible server: latencies, tokens a second, goodput. Requests do not wait for answers."""
    from quire_bench.plot import check_path
    from quire_bench.server import client, report
    from quire_bench.server.prompts import arrival_times, in_words, request_body
    from quire_bench.tables import save as write

    check_path(plot)
    metrics = report.parse_metrics(percentile_metrics)
    percents = report.parse_percents(metric_percentiles)
    limits = report.parse_limits(goodput or [])
    server = client.Server(url, endpoint, api_key, timeout)
    sizes = (random_input_len, random_output_len)
    prompts = _prompts(workload, dataset, sizes, num_prompts, seed)
    if endpoint == "chat" and dataset is None:
        prompts = [in_words(prompt) for prompt in prompts]
    arrivals = arrival_times(len(prompts), request_rate, seed)
    options = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {}) | _fields(extra_body)
    name = client.first_model(server) if model is None else model
    bodies = [request_body(prompt, endpoint, name, options) for prompt in prompts]
    with progress_bar("requests", len(bodies)) as advance:
        run = client.send(server, bodies, arrivals, max_concurrency, advance)
    found = report.Report(run, metrics, percents, limits)
    if as_json:
        print(json.dumps({"url": url, "model": name, "endpoint": endpoint, "seed": seed} | found.as_dict()))
    else:
        for title, shown in found.table():
            row(title, shown)
    write(save, "Load on a server", [found.as_dict()])
    if plot is not None:
        found.plot(plot)
    if run.interrupted:
        raise typer.Exit(130)
    if not found.completed:
        fail(f"no request of {len(bodies):,} was completed")


def _prompts(
    workload: str | None, dataset: Path | None, sizes: tuple[int | None, int | None], count: int | None, seed: int
) -> list[Prompt]:
    """Those of the one source that was chosen. Raises ConfigError where it is more than one."""
    from quire_bench.server import prompts

    if [workload is not None, dataset is not None, sizes != (None, None)].count(True) > 1:
        raise ConfigError("give one of --workload, --dataset and --random-input-len, --random-output-len; not several")
    if workload is not None:
        return prompts.repeated(prompts.workload_prompts(workload), count)
    if dataset is not None:
        return prompts.repeated(prompts.read_prompts(dataset), count)
    chosen = [DEFAULT_LENGTH if size is None else size for size in sizes]
    return prompts.random_prompts(DEFAULT_REQUESTS if count is None else count, chosen[0], chosen[1], seed)


def _fields(extra_body: str | None) -> dict[str, Any]:
    """The fields of a JSON object. Raises ConfigError where it is none."""
    try:
        fields = json.loads(extra_body or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"extra_body is {extra_body!r}; it must be JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"extra_body is {extra_body!r}; it must be a JSON object")
    return fields
