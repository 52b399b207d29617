"""quire bench attention: attention alone, against what the machine reads and multiplies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import AsJson, row
from quire_bench.cli.options import Backend, Save, Threads


def attention(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            help="peers, groups, mqa, dims, blocks, scatter, contexts, batches, long, dtypes, int8, or all. "
            "Default: peers."
        ),
    ] = None,
    attention_backend: Backend = "auto",
    isa: Annotated[str | None, typer.Option(help="Of the native kernels, as in avx2. Default: the best here.")] = None,
    threads: Threads = None,
    runs: Annotated[int, typer.Option(min=1, help="Calls that count; their median is reported.")] = 9,
    sdpa_runs: Annotated[int, typer.Option(min=0, help="Calls of torch's attention to compare with.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Draw the shares of the ceilings into this file.")] = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Attention alone: GB/s of KV or GFLOP/s, and the share of what the machine reads or multiplies meanwhile."""
    from quire import ops
    from quire_bench.kernels import attention as bench_attention
    from quire_bench.plot import check_path
    from quire_bench.tables import save as write
    from quire_bench.threads import on_threads, thread_counts

    counts = thread_counts(threads)
    check_path(plot)
    shapes = bench_attention.chosen(sets or ["peers"])
    figures = []
    with bench_attention.instruction_set(isa) as name:
        backend = ops.load(attention_backend)
        if len(counts) > 1 and not as_json:
            print(f"{'threads':52s}" + "".join(f"{count:8d}{'':9s}" for count in counts), flush=True)
        for shape in shapes:
            scaled = []
            for count in counts:
                with on_threads(count):
                    scaled.append(bench_attention.measure(backend, shape, runs, sdpa_runs))
            figures += scaled
            gains = [figure.rate / scaled[0].rate for figure in scaled]
            if as_json:
                for figure, gain in zip(scaled, gains, strict=True):
                    found = figure.as_dict() | {"speedup_over_first": gain}
                    print(json.dumps({"backend": backend.name, "isa": name} | found), flush=True)
                continue
            unit = "GB/s" if shape.query_len == 1 else "GFLOP/s"
            if len(counts) > 1:
                cells = (f"{one.rate:8.1f}{gain:6.2f} x " for one, gain in zip(scaled, gains, strict=True))
                print(f"{shape.name:52s}{''.join(cells)} {unit}", flush=True)
            else:
                [figure] = scaled
                shown = "" if figure.speedup is None else f"{figure.speedup:7.1f} x torch SDPA"
                print(f"{shape.name:52s} {figure.rate:7.1f} {unit:7s} {figure.fraction:5.0%}{shown}", flush=True)
        beside = bench_attention.overhead(backend)
    if as_json:
        print(json.dumps({"backend": backend.name, "isa": name, "name": "smallest call", "seconds": beside}))
    else:
        row("kernels", f"{backend.name}, {name}")
        row("smallest call", f"{1e6 * beside:.1f} us on one thread")
    write(save, "Attention", (figure.as_dict() for figure in figures))
    if plot is not None:
        bench_attention.plot(figures, plot)
