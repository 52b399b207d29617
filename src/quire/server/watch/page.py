"""A page of the server's own: one file that runs what stands in it and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse

MAX_WATCHERS = 16  # of one page
HEARTBEAT = 15.0  # seconds of silence after which a stream shows that it is alive


def page_at(path: Path) -> HTMLResponse:
    """The page in a file, as it is answered."""
    page = path.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(page),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, headers=headers)


def _policy(page: str) -> str:
    """The page may run what stands in it and talk to this server, nothing else."""

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    nothing = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    some = f"connect-src 'self'; img-src data:; script-src {hashes('script')}; style-src {hashes('style')}"
    return f"{nothing}; {some}"
