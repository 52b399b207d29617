"""quire models: the list of supported models."""

from __future__ import annotations

import json
from collections import Counter

from quire.cli.options import AsJson, row


def models(as_json: AsJson = False) -> None:
    """List published models and types: on Quire's own decoder, through transformers' code, or refused with a reason."""
    from quire.models.supported import Repository, Supported, read

    sweep = read()
    if as_json:
        listed = {name: [one._asdict() for one in getattr(sweep, name)] for name in ("repositories", "types")}
        print(json.dumps({"transformers": sweep.transformers} | listed))
        return
    served: list[Repository | Supported] = [*sweep.repositories, *sweep.types]
    for found in served:
        row(found.name, found.how if not found.reason else f"{found.how}: {found.reason}")
    counts = Counter(found.how for found in sweep.types)
    shown = ", ".join(f"{count} {how}" for how, count in counts.items())
    row("types in all", f"{shown}; tried with transformers {sweep.transformers}")
