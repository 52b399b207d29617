"""The server's web pages: each is joined from several files into one that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from pathlib import Path

from starlette.responses import HTMLResponse

PAGES = Path(__file__).parent / "page"
MAX_WATCHERS = 16  # of one page
HEARTBEAT = 15.0  # seconds of silence after which a stream shows that it is alive

PART = re.compile(r'<link rel="stylesheet" href="([\w./-]+\.css)">|<script src="([\w./-]+\.js)"></script>')


def page_at(path: Path) -> HTMLResponse:
    """Return the response for the page in a file."""
    return answer(joined(path))


def joined(path: Path, values: Mapping[str, str] | None = None) -> str:
    """Return a page with its styles and scripts inlined. It refers to them by paths relative to its own.

    values: texts that replace {{name}}.
    """

    def part(found: re.Match[str]) -> str:
        tag = "style" if found[1] else "script"
        return f"<{tag}>\n{(path.parent / (found[1] or found[2])).read_text(encoding='utf-8')}</{tag}>"

    page = path.read_text(encoding="utf-8")
    for name, value in (values or {}).items():
        page = page.replace(f"{{{{{name}}}}}", html.escape(value))
    return PART.sub(part, page)


def answer(page: str) -> HTMLResponse:
    """Return the response for a page, with a policy that allows only its inline scripts and requests to this server."""
    headers = {
        "Content-Security-Policy": _policy(page),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, headers=headers)


def _policy(page: str) -> str:
    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    nothing = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    some = f"connect-src 'self'; img-src data:; script-src {hashes('script')}; style-src {hashes('style')}"
    return f"{nothing}; {some}"
