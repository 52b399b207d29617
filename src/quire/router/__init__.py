"""Several models at one address: each is a separate `quire serve` that starts at its first request.

`pool` decides which models are in memory; `app` forwards requests to them.
"""

from quire.errors import check_installed

check_installed("quire.router", "aiohttp", "httptools", "starlette", "uvicorn")
