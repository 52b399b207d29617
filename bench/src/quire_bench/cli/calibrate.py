"""quire bench calibrate: what steps and requests of a model take here, for `quire simulate --fleet`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import AsJson, row
from quire.progress import progress_bar
from quire_bench.cli.options import Dtype, MaxNumSeqs, Model


def calibrate(
    model: Model = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("device.json"),
    kind: Annotated[str, typer.Option(help="What the device is called. Default: the processor.")] = "",
    dtype: Dtype = "auto",
    max_num_seqs: MaxNumSeqs = 128,
    kv_cache_memory: Annotated[str, typer.Option(help="Of the engine that is measured.")] = "2GiB",
    threads: Annotated[int | None, typer.Option(min=1, help="Of a replica. Default: torch's number.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time decode, prefill and mixed steps, requests and tokens over HTTP, and fit the simulator's model to them.

    Takes about five minutes, in which nothing else should run. Starts servers and gateways and stops them again.
    """
    import os

    import torch

    from quire import LLM
    from quire.simulate.device import write_device
    from quire_bench.engine.calibrate import PARTS
    from quire_bench.engine.calibrate import calibrate as measure
    from quire_bench.engine.under_load import LONGEST
    from quire_bench.proc import processor

    if threads is not None:
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the server
    common = {"dtype": dtype, "max_num_seqs": max_num_seqs, "kv_cache_memory": kv_cache_memory}
    llm = LLM(model, num_speculative_tokens=0, **common)  # type: ignore[arg-type]
    options = [] if model is None else ["--model", model]
    for name, value in common.items():
        options += [f"--{name.replace('_', '-')}", str(value)]
    options += ["--num-speculative-tokens", "0"]
    with progress_bar("calibrate", PARTS) as advance:
        found = measure(llm, options, kind or processor(), advance)
    write_device(out, found)
    if as_json:
        print(out.read_text())
        return
    step, server, errors = found.step, found.server, found.residuals
    row("device", f"{found.kind}, {found.model_name}, {found.machine['threads']} threads")
    together = f"two replicas together {found.host_bytes_per_second / 1e9:,.1f}"
    row("reads", f"{found.bytes_per_second / 1e9:,.1f} GB/s; {together}")
    own = f"{1e6 * step.step:,.0f} us besides reading"
    row("a step", f"{own}, a sequence {1e6 * step.sequence:,.1f}, a token {1e6 * step.token:,.2f}")
    row("a server", f"adds {1e6 * server.step:,.0f} us to a step")
    row("a request", f"{1e3 * server.request:,.2f} ms, and {1e6 * server.prompt_token:,.2f} us a token of its prompt")
    shown = ", ".join(f"{name} {errors[name]:.1%}" for name in ("p50", "p90", "max"))
    next_to = found.per_neighbour
    if llm.decoder.max_model_len < LONGEST:
        row("under load", f"not measured: the model's sequences have fewer than {LONGEST} tokens")
    else:
        loaded = f"{1e6 * server.loaded:,.0f} more where requests come and go"
        row("a token", f"takes {1e6 * server.drawn:,.0f} us of the server in the step that draws it, {loaded}")
        seen = f"by {found.machine['prompts_seen']} steps"
        row("under load", f"a request makes the step that it begins in {1e3 * server.arrival:,.2f} ms longer, {seen}")
        row("a prompt", f"takes {1e6 * server.mixed_row:,.1f} us more for each token, next to sequences that decode")
        work = f"{1e3 * server.host_request:,.2f} ms of CPU time a request, {1e6 * server.host_step:,.0f} us a step"
        row("other work", f"takes {work}, {1e6 * server.host_token:,.0f} us a token")
        row(
            "two replicas",
            f"a step takes {next_to:.1%} longer next to another one, without what reading and shared cores cost",
        )
        row("a gateway", f"adds {1e3 * server.gateway:,.2f} ms to a request")
        given = f"{1e-9 / server.peer_byte:,.2f} GB/s" if server.peer_byte else "none"
        row("blocks", f"from another replica: {given}")
    row("residuals", f"{shown} of {errors['steps']} kinds of steps; exponent {step.exponent}")
    row("written", str(out))
