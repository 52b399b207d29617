"""/: what this server is and where to go on, for a person with a browser, and as JSON for programs."""

from __future__ import annotations

import html
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from quire import __version__
from quire.server.http.sse import JsonBody

LINKS = {
    "/inspector": "the KV cache as it is",
    "/v1/models": "the models",
    "/openapi.json": "all routes and their fields",
    "/metrics": "metrics for Prometheus",
    "/ready": "whether requests are taken",
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Quire: {name}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 46rem; margin: 3rem auto; padding: 0 1rem }}
pre {{ padding: 1rem; border: 1px solid #8888; border-radius: .4rem; overflow-x: auto }}
td {{ padding-right: 1.5rem }}
</style>
<h1>Quire {version}</h1>
<p>This server continues texts with <b>{name}</b>. It speaks OpenAI's protocol at <code>{url}/v1</code>.</p>
<pre>{curl}</pre>
<table>
{rows}
</table>
</html>
"""


def start_page(request: HttpRequest, name: str, has_template: bool, needs_key: bool) -> Response:
    """The page of a server with that model, or the same as JSON where a program asks."""
    if "text/html" not in request.headers.get("accept", ""):
        found: dict[str, Any] = {"name": "quire", "version": __version__, "model": name, "routes": list(LINKS)}
        return JsonBody(found)
    url = f"{request.url.scheme}://{request.url.netloc}"
    rows = "\n".join(f'<tr><td><a href="{path}">{path}</a><td>{what}' for path, what in LINKS.items())
    page = PAGE.format(
        name=html.escape(name),
        version=__version__,
        url=html.escape(url),
        curl=html.escape(_curl(url, has_template, needs_key)),
        rows=rows,
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})


def _curl(url: str, has_template: bool, needs_key: bool) -> str:
    """A command that asks the model something."""
    route, body = "completions", '{"prompt": "import os\\n", "max_tokens": 32}'
    if has_template:
        route, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'
    key = ' \\\n  -H "Authorization: Bearer $QUIRE_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/{route} \\\n  -H \"Content-Type: application/json\"{key} \\\n  -d '{body}'"
