"""The OpenAI-compatible server. The only package that imports asyncio."""

from __future__ import annotations

from quire.errors import check_installed

check_installed(
    "quire.server",
    "fastapi",
    "httptools",
    "prometheus_client",
    "pydantic",
    "pydantic_core",
    "starlette",
    "typing_extensions",
    "uvicorn",
)
