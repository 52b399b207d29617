"""quire bench serve and http: load on a server, and what the way over HTTP costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.bench.workloads import WORKLOADS
from quire.cli.options import AsJson, Model, fail, row
from quire.errors import ConfigError, QuireError
from quire.progress import progress_bar

if TYPE_CHECKING:
    from quire.server.load.prompts import Prompt

DEFAULT_REQUESTS, DEFAULT_LENGTH = 100, 128
MANY_TOKENS = 1.2  # in a chunk: random weights draw tokens that have no text, and a server may hold chunks together


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
    as_json: AsJson = False,
) -> None:
    """Load any OpenAI-compatible server: latencies, tokens a second, goodput. Requests do not wait for answers."""
    from quire.bench.plot import check_path
    from quire.server.load import client, report
    from quire.server.load.prompts import arrival_times, in_words, request_body

    try:
        if plot is not None:
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
            for title, told in found.table():
                row(title, told)
        if plot is not None:
            found.plot(plot)
    except QuireError as error:
        fail(error)
    if run.interrupted:
        raise typer.Exit(130)
    if not found.completed:
        fail(f"no request of {len(bodies):,} was completed")


def _prompts(
    workload: str | None, dataset: Path | None, sizes: tuple[int | None, int | None], count: int | None, seed: int
) -> list[Prompt]:
    """Those of the one source that was chosen. Raises ConfigError where it is more than one."""
    from quire.server.load import prompts

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


def http(
    model: Model = None,
    concurrency: Annotated[int, typer.Option(help="Requests, all at once.")] = 64,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 128,
    runs: Annotated[int, typer.Option(min=1, help="Each way, in turns; the medians are told.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a run may take.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """What the way over HTTP costs: the same requests through LLM in a process, and through quire serve, streaming."""
    from quire.bench.http_path import Load, measure

    try:
        load = Load(model, concurrency, input_len, output_len)
        with progress_bar("runs", 2 * runs) as advance:
            figures = measure(load, runs, timeout, advance).as_dict()
    except QuireError as error:
        fail(error)
    if as_json:
        print(json.dumps(figures))
        return
    for name, told in _rows(figures):
        row(name, told)


def _rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for way in ("offline", "http"):
        seconds = figures[f"{way}_seconds"]
        rate = f"{figures[f'{way}_tokens_per_second']:10,.1f} tok/s"
        yield way, f"{rate}, {len(seconds)} runs of {min(seconds):.2f} to {max(seconds):.2f} s"
    few = "" if figures["tokens_per_chunk"] < MANY_TOKENS else ": fewer chunks than tokens, so less was sent"
    yield "", f"{figures['ratio']:10.1%} of offline; {figures['tokens_per_chunk']:.2f} tokens a chunk{few}"
    yield "without the client", f"{figures['http_tokens_per_second_without_client']:10,.1f} tok/s"
    told = f"{figures['ratio_without_client']:10.1%} of offline"
    yield "", f"{told}; its {figures['client_cpu_seconds']:.2f} s of CPU time are not counted"
