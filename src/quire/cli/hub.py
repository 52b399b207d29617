"""quire pull, list and rm: the models of the hub's cache."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from quire.cli.options import AsJson, complete_model, fail, field_option, print_table
from quire.config import EngineConfig

UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def pull(
    repository: Annotated[str, typer.Argument(metavar="REPO", help="Its name on the hub: OWNER/NAME.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. Default: main.")] = None,
    gguf_file: Annotated[str | None, field_option(EngineConfig, "gguf_file")] = None,
) -> None:
    """Download a model from the Hugging Face hub into its cache, and print the path.

    Files that are in the cache are not downloaded again. To serve a revision other than main, give that path.
    """
    from quire.models.hub import pull as download

    try:
        path = download(repository, revision, gguf_file)
    except KeyboardInterrupt:
        print("run the same command again to resume the download", file=sys.stderr)
        raise
    print(path)


def list_models(as_json: AsJson = False) -> None:
    """List the models of the hub's cache, with their sizes on disk."""
    from quire.models.cached import SHORT, cached_models

    models, unread = cached_models()
    if as_json:
        print(json.dumps([asdict(model) | {"path": str(model.path)} for model in models]))
        return
    for warning in unread:
        print(f"a part of the cache cannot be read: {warning}", file=sys.stderr)
    if not models:
        print("The cache has no models. quire pull OWNER/NAME downloads one.")
        return
    rows = [("NAME", "REVISION", "SIZE", "MODIFIED", "")]
    for model in models:
        note = f"lacks {', '.join(model.missing[:3])}" if model.missing else ", ".join(model.gguf_files)
        named = ", ".join(model.refs) or model.commit[:SHORT]
        rows.append((model.name, named, size_of(model.size), since(time.time() - model.modified), note))
    print_table(rows)


def remove(
    repositories: Annotated[
        list[str], typer.Argument(metavar="REPO", help="Their names, as in quire list.", autocompletion=complete_model)
    ],
    revision: Annotated[
        str | None, typer.Option(help="Remove only this commit, or the one of this branch. Default: all.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove models from the hub's cache."""
    from quire.models.cached import SHORT, Removal

    removal = Removal(repositories, revision)
    named = ", ".join(f"{model.name} ({', '.join(model.refs) or model.commit[:SHORT]})" for model in removal.models)
    what = f"{named}, {size_of(removal.nbytes)}"
    if not yes:
        if not _can_ask():
            fail(f"{what} would be removed, and there is no terminal to ask at; --yes does not ask")
        if not typer.confirm(f"Remove {what}?"):
            print("Nothing was removed.")
            return
    removal.run()
    print(f"removed {what}")


def _can_ask() -> bool:
    return sys.stdin.isatty()


def size_of(count: int) -> str:
    """Return a number of bytes in readable form."""
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def since(seconds: float) -> str:
    """Return a past duration in readable form."""
    for unit, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' * (count != 1)} ago"
    return "just now"
