"""/: a chat page for browsers, and a description of this server as JSON for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire import __version__
from quire.config import EMBEDDED_NAME
from quire.server.api.service import ServedModel
from quire.server.http.sse import JsonBody
from quire.server.observability.page import answer, joined

ROUTES = ("/inspector", "/v1/models", "/openapi.json", "/metrics", "/ready")
PAGE = Path(__file__).parent / "start.html"
LIMIT = 200  # tokens of an answer by a model that would not end it: a user can change it


def start_page(request: HttpRequest, model: ServedModel, needs_key: bool, reads_images: bool) -> Response:
    """Return the start page of a server with this model, or the same information as JSON if HTML is not accepted."""
    name, is_embedded = model.names[0], model.root == EMBEDDED_NAME
    kind = "vectors" if not model.pooling.writes else "text" if model.template is None else "chat"
    if "text/html" not in request.headers.get("accept", ""):
        found: dict[str, Any] = {"name": "quire", "version": __version__, "model": name, "routes": list(ROUTES)}
        return JsonBody(found)
    url = f"{request.url.scheme}://{request.url.netloc}"
    values = {
        "name": name,
        "version": __version__,
        "url": url,
        "curl": _curl(url, _example(model), needs_key),
        "does": "embeds or classifies" if kind == "vectors" else "continues",
        "kind": kind,
        "key": "needed" if needs_key else "",
        "images": "read" if reads_images and kind == "chat" else "",
        "embedded": "embedded" if is_embedded else "",
        "limit": str(LIMIT) if is_embedded or kind == "text" else "",
    }
    return answer(joined(PAGE, values))


def _example(model: ServedModel) -> tuple[str, str]:
    """Return a route and a body that the model answers."""
    if model.pooling.labels:
        return "classify", '{"input": "Quire is fast"}'
    if not model.pooling.writes:
        return "embeddings", '{"input": "Quire is fast"}'
    if model.template is None:
        return "completions", '{"prompt": "import os\\n", "max_tokens": 32}'
    return "chat/completions", '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'


def _curl(url: str, example: tuple[str, str], needs_key: bool) -> str:
    """Return an example command that sends a request to the model."""
    route, body = example
    key = ' \\\n  -H "Authorization: Bearer $QUIRE_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/{route} \\\n  -H \"Content-Type: application/json\"{key} \\\n  -d '{body}'"
