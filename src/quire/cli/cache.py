"""quire cache: the KV blocks in a directory that `--kv-disk` names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quire.cache.disk.directory import Found, clear, listed
from quire.cli.options import AsJson, row

Directory = Annotated[Path, typer.Argument(metavar="PATH", help="The directory that --kv-disk names.")]

cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="KV blocks on a disk: see them, remove them.")


@cache.command("stat")
def stat_command(path: Directory, as_json: AsJson = False) -> None:
    """List the models in a directory of KV blocks, with their sizes."""
    found = listed(path)
    if as_json:
        print(json.dumps([_facts(one) for one in found]))
        return
    for one in found:
        facts = _facts(one)
        used = ", in use" if one.is_used else ""
        row(one.path.name, f"{facts['model']}, {one.num_bytes / 2**20:,.1f} MiB{used}")
    row("in all", f"{sum(one.num_bytes for one in found) / 2**20:,.1f} MiB, {len(found)} models")


@cache.command("clear")
def clear_command(path: Directory) -> None:
    """Remove the KV blocks of all models from a directory, unless a process uses some of them."""
    found = clear(path)
    row("removed", f"{sum(one.num_bytes for one in found) / 2**20:,.1f} MiB, {len(found)} models")


def _facts(found: Found) -> dict[str, object]:
    return {
        "directory": str(found.path),
        "model": found.about.get("model", "unknown"),
        "block_size": found.about.get("block_size"),
        "bytes": found.num_bytes,
        "in_use": found.is_used,
    }
