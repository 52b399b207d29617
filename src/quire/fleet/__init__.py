"""A fleet: replicas of one model and a gateway in front of them."""

from __future__ import annotations

from quire.errors import check_installed

check_installed("quire.fleet", "aiohttp", "fastapi", "httptools", "prometheus_client", "starlette", "uvicorn")
