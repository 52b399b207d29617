"""An OpenAI-compatible server whose answers are written byte by byte, and may end anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.loopback import Quiet, answering


def chunk(text: str | None = None, thought: str | None = None, reason: str | None = None) -> bytes:
    delta = {"content": text} if thought is None else {"reasoning_content": thought}
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": reason}]}).encode() + b"\n\n"


USAGE = (b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, '
         b'"prompt_tokens_details": {"cached_tokens": 4}}}\n\n')  # fmt: skip
DONE = b"data: [DONE]\n\n"


@contextmanager
def fake_server(
    parts: Sequence[bytes], status: int = 200, models: bytes | None = None, heard: list[object] | None = None
) -> Iterator[str]:
    """The URL of one that answers a chat with these parts, and then hangs up. heard: receives the bodies."""
    listed = json.dumps({"data": [{"id": "fake"}]}).encode() if models is None else models

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(listed)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if heard is not None:
                heard.append(json.loads(body))
            self.send_response(status)
            size = 1_000_000 if status == 200 else sum(map(len, parts))  # so that an early end is one
            self.send_header("Content-Length", str(size))
            self.end_headers()
            for part in parts:
                self.wfile.write(part)

    with answering(Handler) as url:
        yield url
