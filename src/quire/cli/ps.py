"""quire ps and stop: the models of a running server, and the ways to end it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from quire.cli.hub import since
from quire.cli.options import ApiKey, ServerUrl, fail, print_table

COUNTED = ("num_requests", "fleet_replica_requests")  # metrics of a server, and the sums of a gateway's replicas


def ps(
    url: ServerUrl,
    api_key: ApiKey = None,
) -> None:
    """List the models and adapters of a running server, with the requests that are open."""
    from quire.terminal.client import Client
    from quire.terminal.metrics import Scrape

    client = Client(url, api_key)
    listed = client.models()
    numbers = Scrape.of(client.get("/metrics")).values
    found = [kind for kind in COUNTED if f"{kind}_running" in numbers]
    counts = [f"{numbers.get(f'{kind}_{state}', 0):.0f} {state}" for kind in found for state in ("running", "waiting")]
    requests = ", ".join(counts) or "unknown"
    rows = [("NAME", "LOADED", "REQUESTS")]
    for one in listed:
        loaded = since(time.time() - one["created"]) if "created" in one else "unknown"
        rows.append((one["id"], loaded, requests if one.get("parent") is None else f"counted for {one['parent']}"))
    print_table(rows)


def stop(
    _: Annotated[str | None, typer.Argument(metavar="MODEL", help="Not used: see the error message.")] = None,
) -> None:
    """Explain how to stop a server: no route does it, since any client could use it."""
    fail(
        "no command stops a server: press Ctrl-C where it runs, or send SIGTERM to its process (kill PID, docker stop, "
        "systemctl stop); it ends the open requests first"
    )
