"""quire bench disk: KV blocks that come from a disk, and decoding while they go there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.errors import QuireError
from quire_bench.cli.options import Model


def disk(
    model: Model = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where the blocks go; a directory below it is made, and removed.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Of each prompt.")] = 1088,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts; their median is reported.")] = 7,
    steps: Annotated[int, typer.Option(min=2, help="That decode, with and without writing.")] = 200,
    sequences: Annotated[int, typer.Option(min=1, help="That decode.")] = 1,
    as_json: AsJson = False,
) -> None:
    """The first token of a known prompt after `quire serve --kv-disk` was started again, and steps while it writes."""
    from quire_bench.engine.disk import measure
    from quire_bench.server.restart import first_tokens

    try:
        with TemporaryDirectory(prefix="quire-disk-", dir=directory) as made:
            found = first_tokens(model, Path(made) / "kv", tokens, prompts)
            step = measure(model, Path(made) / "kv", tokens, prompts, steps, sequences)
    except QuireError as error:
        fail(error)
    if as_json:
        print(json.dumps({"first_token": asdict(found), "step": asdict(step)}))
        return
    print(f"first token of {found.tokens:,} tokens, {found.bytes / 2**20:.1f} MiB of blocks:")
    for name in ("computed", "on_disk", "in_memory", "cached"):
        if (seconds := getattr(found, name)) is not None:
            print(f"  {name.replace('_', ' '):12s} {1e3 * seconds:8.1f} ms  {seconds / found.computed:6.1%}")
    if found.unread:
        print(f"  {found.unread} of {2 * prompts} prompts after a restart were computed, as reading was no faster")
    slower = step.seconds_writing / step.seconds - 1
    print(
        f"a step that decodes: {1e3 * step.seconds:.2f} ms, while {step.bytes_written / 2**20:.1f} MiB/s are written:"
    )
    print(f"  {1e3 * step.seconds_writing:.2f} ms  {slower:+.1%}")
