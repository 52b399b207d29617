"""quire bench scheduler: requests one by one, all at once and as they come, paged and gathered."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.options import AsJson, fail, row
from quire.errors import ConfigError, QuireError
from quire.progress import progress_bar
from quire_bench.cli.options import Device, Dtype, Model

if TYPE_CHECKING:
    from quire_bench.engine.scheduler import Result


def scheduler(
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option(help="Of all requests. Default: 856 token ids, or as many as the model takes.")
    ] = None,
    num_requests: Annotated[int, typer.Option(help="With that prompt.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Of each request.")] = 16,
    mode: Annotated[str, typer.Option(help="naive, offline, online, or all.")] = "all",
    attention_backend: Annotated[
        list[str] | None,
        typer.Option(
            "--attention-backend", "--attention", help="May be repeated. Default: this machine's best, and gather."
        ),
    ] = None,
    prefix_caching: Annotated[
        bool | None, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Default: both.")
    ] = None,
    do_sample: Annotated[bool, typer.Option("--do-sample/--no-do-sample", help="Default: greedy.")] = False,
    top_k: Annotated[int | None, typer.Option(help="With --do-sample: tokens kept. Default: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --do-sample: probability kept. Default: all.")] = None,
    stop_on_eos: Annotated[bool, typer.Option("--stop-on-eos/--no-stop-on-eos")] = False,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    warmup: Annotated[int, typer.Option(min=0, help="Runs before those that count.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Runs that count.")] = 3,
    profile: Annotated[
        Path | None, typer.Option(help="Write a trace for chrome://tracing or Perfetto into this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the tokens a second into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Many requests with one prompt: one by one, all at once and as they come; paged against gathered KV.

    naive: each alone. offline: all are there from the start. online: each comes when the one before it has its first
    token, and those that are there go on meanwhile. prefill: the steps in which a request still has no token; decode:
    the others. With a prefix cache, the runs that count find the prompt there. Where the time goes is reported,
    and traced, of one more run.
    """
    from quire import LLM
    from quire_bench.engine import scheduler as bench
    from quire_bench.engine.split import chrome_trace
    from quire_bench.plot import check_path

    try:
        check_path(plot)
        if profile is not None and not profile.parent.is_dir():
            raise ConfigError(f"--profile is {profile}; there is no directory {profile.parent}")
        if mode not in (*bench.MODES, "all"):
            raise ConfigError(f"mode is {mode!r}; it must be {', '.join(bench.MODES)} or all")
        load = bench.Load(
            prompt=prompt,
            num_requests=num_requests,
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            top_k=top_k,
            top_p=top_p,
            stop_on_eos=stop_on_eos,
        )
        found: list[bench.Result] = []
        ways = product(
            attention_backend or ["auto", bench.GATHERED], [True, False] if prefix_caching is None else [prefix_caching]
        )
        for backend, caching in ways:
            llm = LLM(
                model,
                device=device,
                dtype=dtype,
                attention_backend=backend,
                enable_prefix_caching=caching,
                max_num_seqs=num_requests,
                num_speculative_tokens=0,
            )
            for one in bench.MODES if mode == "all" else (mode,):
                tokens = num_requests * max_new_tokens * (warmup + runs + 1)
                with progress_bar(f"{one}, {llm.backend.name}", tokens) as advance:
                    result = bench.measure(llm, one, load, warmup, runs, advance)
                found.append(result)
                _tell(result, as_json)
            del llm  # its cache, before there is another one
        for ratios in bench.ratios(found):
            if as_json:
                print(json.dumps(ratios.as_dict()))
            else:
                print(ratios)
        if profile is not None:
            trace = json.dumps(chrome_trace({result.name: result.spans for result in found}))
            try:
                profile.write_text(trace)
            except OSError as error:
                raise ConfigError(f"{profile} cannot be written: {error}") from error
        if plot is not None:
            bench.plot(found, plot)
    except QuireError as error:
        fail(error)


def _tell(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.as_dict()), flush=True)
        return
    print(f"=== {result.name} ===")
    for name, shown in result.table():
        row(name, shown)
    print(flush=True)
