"""Blocks: an answer as a list of reasoning, texts and calls, complete or while it grows.

Every protocol except OpenAI's chats structures answers in this way. A `Script` writes the events of one protocol.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.frontend.jobs import Delta
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.server.api.answers import AnswerWriter
from quire.server.api.chat import chat_logprobs
from quire.server.api.jobs import Stream
from quire.server.api.service import num_logprobs, offload_if_large
from quire.server.api.streamed import EventWriter
from quire.server.api.turn import Turn
from quire.server.http.api_error import ApiError, request_failed
from quire.server.protocol.answers import ChatLogprob
from quire.server.tools.parser import Kind


@dataclass
class Block:
    """A part of an answer."""

    kind: Kind  # REASONING, CONTENT or CALL
    index: int
    name: str = ""  # of the called function
    call_id: str = ""
    parts: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)  # of a text's tokens, if requested

    @property
    def text(self) -> str:
        """The text; of a call, the JSON of its arguments."""
        return "".join(self.parts)

    def arguments(self) -> dict[str, Any] | None:
        """Return the arguments of a call, or None if they are incomplete."""
        try:
            found = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


class Ending(NamedTuple):
    """The finish reason and the token counts of an answer."""

    reason: str  # "stop", "length" or "tool_calls"
    stop_text: str | None  # the stop string that ended it
    num_prompt: int  # tokens
    num_generated: int
    num_cached: int  # of the prompt
    num_reasoning: int  # of the generated ones
    num_kept: int  # of the prompt: computed, and kept in the cache as the request asks


class Script(ABC):
    """Writes the events of a growing answer in one protocol."""

    def begin(self) -> bytes:
        """Return the events before all blocks."""
        return b""

    def open(self, block: Block) -> bytes:
        """Return the events for a new block."""
        return b""

    @abstractmethod
    def grow(self, block: Block, text: str, logprobs: list[ChatLogprob]) -> bytes:
        """Return the events for text that is added to a block."""

    @abstractmethod
    def close(self, block: Block) -> bytes:
        """Return the events for a complete block."""

    @abstractmethod
    def end(self, blocks: Sequence[Block], ending: Ending) -> bytes:
        """Return the events for a complete answer."""

    @abstractmethod
    def fail(self, blocks: Sequence[Block], error: ApiError) -> bytes:
        """Return the events for an answer that ended with an error."""


class BlockReader:
    """Parses one answer, that of the first sample, into blocks."""

    def __init__(self, turn: Turn) -> None:
        self.blocks: list[Block] = []
        self._turn = turn
        self._writer = AnswerWriter(turn.reading, 0)

    def read(self, text: str, *, is_last: bool) -> Iterator[tuple[Block, str]]:
        """Parse a text. Yield each block that it adds to, with the added text. A block without parts is new."""
        for kind, piece in self._writer.pieces(text, is_last=is_last):
            if kind is Kind.CALL:
                self.blocks.append(Block(kind, len(self.blocks), piece, self._writer.call_id))
                yield self.blocks[-1], ""
                continue
            belongs = Kind.CALL if kind is Kind.ARGUMENTS else kind
            if not self.blocks or self.blocks[-1].kind is not belongs:
                self.blocks.append(Block(belongs, len(self.blocks)))
            yield self.blocks[-1], piece
            self.blocks[-1].parts.append(piece)

    def logprobs(self, tokens: Sequence[int], found: Sequence[dict[int, Logprob]] | None) -> list[ChatLogprob]:
        """Return the logprobs of tokens in OpenAI's format; empty if they were not requested."""
        turn = self._turn
        shown = chat_logprobs(turn.service.tokenizer, tokens, found, turn.body.top_logprobs or 0)
        return [] if shown is None else list(shown["content"])

    def ending(self, output: RequestOutput, reason: str | None, stop_reason: int | str | None) -> Ending:
        """Return the ending of a parsed answer."""
        [sample] = output.outputs
        return Ending(
            self._writer.reason(reason) or "stop",
            stop_reason if isinstance(stop_reason, str) else None,
            len(output.prompt_token_ids),
            len(sample.token_ids),
            output.num_cached_tokens or 0,
            self._turn.reading.num_reasoning(sample.token_ids, self._writer.reasoning),
            self._turn.num_kept(output),
        )

    def whole(self, output: RequestOutput, sample: CompletionOutput) -> Ending:
        """Parse a finished answer. The first text gets the logprobs of all tokens after the reasoning."""
        for _ in self.read(sample.text, is_last=True):
            pass
        ending = self.ending(output, sample.finish_reason, sample.stop_reason)
        said = next((block for block in self.blocks if block.kind is Kind.CONTENT), None)
        if said is not None and sample.logprobs is not None:
            start = ending.num_reasoning
            said.logprobs = self.logprobs(sample.token_ids[start:], sample.logprobs[start:])
        return ending


async def read_whole(turn: Turn) -> tuple[list[Block], Ending]:
    """Compute an answer, and return its blocks and its ending. Raises ApiError if it cannot be served."""
    output = await turn.run()
    reader, [sample] = BlockReader(turn), output.outputs
    size = num_logprobs([output]) + len(sample.text)
    return reader.blocks, await offload_if_large(size, lambda: reader.whole(output, sample))


class BlockEvents(EventWriter):
    """Writes a stream with a script."""

    def __init__(self, turn: Turn, job: Stream, script: Script) -> None:
        self._turn = turn
        self._script = script
        self._reader = BlockReader(turn)
        self._open: Block | None = None
        self._logprobs: list[ChatLogprob] = []  # of tokens whose text is held back, such as half of a character
        self._end: tuple[str | None, int | str | None] | None = None  # None: the answer has failed or is not finished
        [self._output] = job.outputs

    def begin(self) -> bytes:
        """Return the script's first events."""
        return self._script.begin()

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Return the script's events of deltas."""
        return b"".join(part for delta in deltas for part in self._events(delta))

    def end(self) -> bytes:
        """Return the script's last events; empty if the answer has failed."""
        if self._end is None:
            return b""
        return self._script.end(self._reader.blocks, self._reader.ending(self._output, *self._end))

    def fail(self, error: ApiError) -> bytes:
        """Return the script's events of an error."""
        return self._script.fail(self._reader.blocks, error)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if delta.error is not None:
            yield self.fail(request_failed(delta.error, self._turn.body.grammar_field()))
            return
        self._logprobs += self._reader.logprobs(delta.token_ids, delta.logprobs)
        for block, text in self._reader.read(delta.text, is_last=delta.finish_reason is not None):
            if block is not self._open:
                yield self._closed()
                self._open = block
                yield self._script.open(block)
            if text:
                yield self._grown(block, text)
        if self._open is not None and self._open.kind is not Kind.CONTENT:
            self._logprobs = []  # logprobs of reasoning and calls are not reported
        if delta.finish_reason is not None:
            if self._logprobs and self._open is not None:
                yield self._grown(self._open, "")
            yield self._closed()
            self._end = (delta.finish_reason, delta.stop_reason)

    def _grown(self, block: Block, text: str) -> bytes:
        own: list[ChatLogprob] = []
        if block.kind is Kind.CONTENT:
            own, self._logprobs = self._logprobs, own
        block.logprobs += own
        return self._script.grow(block, text, own)

    def _closed(self) -> bytes:
        block, self._open = self._open, None
        return b"" if block is None else self._script.close(block)
