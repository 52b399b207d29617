"""One streamed answer of an OpenAI-compatible server: when which tokens came. Sync, and fed with bytes."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

MAX_LINE = 2**20  # bytes of an event
MAX_MESSAGE = 200  # characters of an error that are reported

# In a JSON string a quote has a backslash before it, so these are found in no generated text.
TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content|arguments)":\s*"[^"]')
FINISHED = re.compile(rb'"finish_reason":\s*"')
NO_CHOICES = re.compile(rb'"choices":\s*\[\s*\]')
ERROR = re.compile(rb'"error":\s*[{"]')
USAGE = re.compile(rb'"(prompt|completion)_tokens":\s*(\d{1,12})')


class StreamError(Exception):
    """An answer that is not, or not to its end, a stream of events. Its kind and message are counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Answer:
    """The events of one streamed answer: when those with tokens came, and what the server counted.

    A chunk is one event with tokens. One with an empty text is a token whose text is still held back, unless it opens
    the answer (a role) or closes it.
    """

    def __init__(self) -> None:
        self.times: array[float] = array("d")  # of the chunks
        self.told: array[int] = array("q")  # tokens so far, as reported with each chunk; 0: not reported
        self.prompt_tokens: int | None = None  # as the server counted them
        self.completion_tokens: int | None = None
        self.finished = False  # with a reason, or [DONE]
        self._closing: float | None = None  # when a chunk with a reason and without text came
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take in bytes, cut anywhere. Raises StreamError for an error event and for a line without an end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # others are comments, field names that nobody sends, and the empty ones
                self._event(line, now)
        if len(self._rest) > MAX_LINE:
            raise StreamError("malformed stream", f"an event is longer than {MAX_LINE:,} bytes")

    def close(self, now: float) -> None:
        """The stream has ended. Raises StreamError where the answer has not."""
        self.feed(b"\n", now)
        if not self.finished:
            raise StreamError("stream ended early", "the connection was closed before the answer was complete")
        if self._closing is not None and self.completion_tokens == len(self.times) + 1:
            self.times.append(self._closing)  # the one token that is missing had no text
            self.told.append(self.completion_tokens if self.told and self.told[-1] else 0)
        if not self.times:
            raise StreamError("no tokens", "the answer is complete, and no token came")

    def _event(self, line: bytes, now: float) -> None:
        if line.startswith((b"data: [DONE]", b"data:[DONE]")):
            self.finished = True
            return
        shown = 0
        if b"_tokens" in line:
            counts = dict(USAGE.findall(line))
            if b"completion" in counts:
                shown = self.completion_tokens = int(counts[b"completion"])
            if b"prompt" in counts:
                self.prompt_tokens = int(counts[b"prompt"])
        if b'"choices"' not in line:
            if ERROR.search(line):
                raise StreamError("error event", error_message(line.removeprefix(b"data:")))
            return
        closes = FINISHED.search(line) is not None
        self.finished |= closes
        if TEXT.search(line) or not (closes or b'"role":' in line or NO_CHOICES.search(line)):
            self.times.append(now)
            self.told.append(shown)
        elif closes:
            self._closing = now

    @property
    def num_tokens(self) -> int:
        """Tokens that came: as the server counted them, or one a chunk."""
        return len(self.times) if self.completion_tokens is None else self.completion_tokens

    @property
    def counts_are_told(self) -> bool:
        """Return whether each chunk came with the number of tokens until then."""
        return bool(self.told) and 0 not in self.told

    def chunk_tokens(self) -> list[int]:
        """Tokens of each chunk: as reported, or else those of the answer spread over its chunks evenly."""
        if self.counts_are_told:
            return [max(0, after - before) for before, after in zip([0, *self.told[:-1]], self.told, strict=True)]
        chunks, tokens = len(self.times), max(self.num_tokens, len(self.times))
        return [(i + 1) * tokens // chunks - i * tokens // chunks for i in range(chunks)]


def error_message(body: bytes) -> str:
    """Return the message of an error body, in one line: OpenAI's message, FastAPI's detail, or the text itself."""
    text = body.decode("utf-8", "replace")
    try:
        found: Any = json.loads(text)
        while isinstance(found, dict) and (keys := [key for key in ("error", "message", "detail") if key in found]):
            found = found[keys[0]]
    except (ValueError, RecursionError):
        found = text
    return " ".join(str(found).split())[:MAX_MESSAGE]
