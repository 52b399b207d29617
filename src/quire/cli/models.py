"""quire models: which types of models are served, and how."""

from __future__ import annotations

import json
from collections import Counter

from quire.cli.options import AsJson, row


def models(as_json: AsJson = False) -> None:
    """List the types of models: on Quire's own decoder, through transformers' code, or refused and why."""
    from quire.models.supported import read

    sweep = read()
    if as_json:
        print(json.dumps({"transformers": sweep.transformers, "types": [one._asdict() for one in sweep.types]}))
        return
    for found in sweep.types:
        row(found.name, found.how if not found.reason else f"{found.how}: {found.reason}")
    counts = Counter(found.how for found in sweep.types)
    shown = ", ".join(f"{count} {how}" for how, count in counts.items())
    row("in all", f"{shown}; tried with transformers {sweep.transformers}")
