"""The chunks of a streamed answer, and the token counts, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.frontend.outputs import RequestOutput
from quire.server.http.sse import DONE, data, dumps
from quire.server.protocol.answers import Usage
from quire.server.protocol.sampling import StreamOptions

HOLE = "\0"  # placeholder of a text


class Chunks:
    """Writes the chunks of one streamed answer."""

    def __init__(self, head: Mapping[str, Any], options: StreamOptions | None) -> None:
        """Create it. head: the fields that all chunks begin with."""
        self._use(head)
        asked = options or StreamOptions()
        self._has_usage = asked.include_usage
        self._has_usage_so_far = asked.include_usage and asked.continuous_usage_stats
        self._end = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def _use(self, head: Mapping[str, Any]) -> None:
        self._head = head
        self._start = b"data: " + dumps(head)[:-1] + b',"choices":['
        self._around: dict[int, tuple[bytes, bytes]] = {}  # the bytes before and after the texts of each choice

    def note(self, output: RequestOutput) -> None:
        """Name no system from now on if the weights were replaced while the output was computed."""
        if output.is_mixed and self._head["system_fingerprint"] is not None:
            self._use({**self._head, "system_fingerprint": None})

    def choice(self, choice: Mapping[str, Any], num_prompt: int, num_generated: int) -> bytes:
        """Return a chunk of a choice. The counts are those of the choice's prompt, and generated for it so far."""
        if self._has_usage_so_far:
            return data({**self._head, "choices": [choice], "usage": usage(num_prompt, num_generated, 0)})
        return self._start + dumps(choice) + self._end

    def text(
        self, index: int, text: str, make: Callable[[int, str], Mapping[str, Any]], num_prompt: int, num_generated: int
    ) -> bytes:
        """Return the chunk `make(index, text)`. Only the text of such chunks differs, so the rest is encoded once."""
        if self._has_usage_so_far:
            return self.choice(make(index, text), num_prompt, num_generated)
        around = self._around.get(index)
        if around is None:
            start, end = dumps(make(index, HOLE)).split(dumps(HOLE))
            around = self._around[index] = (self._start + start, end + self._end)
        return around[0] + dumps(text) + around[1]

    def end(self, num_prompt: int, num_generated: int, num_cached: int, num_reasoning: int | None = None) -> bytes:
        """Return the end of an answer, with its token counts if requested."""
        if not self._has_usage:
            return DONE
        numbers = usage(num_prompt, num_generated, num_cached, num_reasoning)
        return data({**self._head, "choices": [], "usage": numbers}) + DONE


def usage(num_prompt: int, num_generated: int, num_cached: int, num_reasoning: int | None = None) -> Usage:
    """Return token counts in OpenAI's format. num_reasoning: reasoning tokens among the generated; None: unknown."""
    found: Usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    if num_reasoning is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return found
