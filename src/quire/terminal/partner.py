"""The partner of a chat: a model on an engine of this process, or a model of a server."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.config import EMBEDDED_NAME
from quire.errors import PromptTooLong, QuireError
from quire.terminal.client import Client, Refused

if TYPE_CHECKING:
    from quire.frontend.llm import LLM
    from quire.server.tools.parser import AnswerParser

Message = dict[str, Any]  # role and content: a text, or a list of images and a text
LEAST_ROOM = 256  # tokens that an answer should have room for, or a quarter of the longest sequence
TOO_LONG = "context_length_exceeded"  # an error's code


class TooLong(QuireError):
    """A conversation is too long for the model."""


class Piece(NamedTuple):
    """A part of an answer."""

    text: str
    is_thought: bool = False


@dataclass
class Usage:
    """The tokens and times of an answer."""

    began: float  # s of time.monotonic()
    first: float | None = None  # time of the first token
    ended: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were found in the prefix cache
    new_tokens: int = 0
    finish_reason: str | None = None

    def see(self) -> None:
        """Record the arrival of a token."""
        self.ended = time.monotonic()
        self.first = self.ended if self.first is None else self.first

    def __str__(self) -> str:
        if not self.prompt_tokens:
            return "the server has not counted its tokens, since it was stopped"
        parts = [f"{self.prompt_tokens:,} prompt tokens ({self.cached_tokens:,} from the prefix cache)"]
        if self.first is not None and self.ended is not None:
            parts.append(f"the first new token after {self.first - self.began:.2f} s")
            seconds = self.ended - self.first
            speed = f", {(self.new_tokens - 1) / seconds:,.1f} a second" if self.new_tokens > 1 and seconds > 0 else ""
            parts.append(f"{self.new_tokens:,} new tokens{speed}")
        return "; ".join(parts)


class Partner(Protocol):
    """Answers conversations, one at a time."""

    name: str
    chosen: str  # backend and types of the model, with reasons; empty for a server's model
    writes_code: bool  # answers are Python, not markdown
    has_template: bool  # otherwise a text is continued without a template
    usage: Usage | None  # of the last answer

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """Yield the answer piece by piece. Raises QuireError, and TooLong if the conversation does not fit."""

    def stop(self) -> None:
        """End the answer early. A signal handler may call this."""

    def close(self) -> None:
        """Free all resources."""


class OwnModel:
    """A model on an engine of this process."""

    def __init__(self, llm: LLM, template: Path | None, sampling: Mapping[str, Any], lora: str | None = None) -> None:
        """template: a file with a chat template, instead of the model's own. sampling: fields of SamplingParams.

        Raises QuireError for an invalid template, and for a model without a tokenizer.
        """
        from quire.frontend.startup_summary import chosen
        from quire.request import SamplingParams
        from quire.sandbox.chat_template import ChatTemplate
        from quire.server.tools.dialect import Dialect

        self._llm = llm
        self._lora = lora
        self._tokenizer = llm.get_tokenizer()
        self._template = ChatTemplate.find(llm.text_files, template)
        self._dialect = Dialect.find(None if self._template is None else self._template.source, None, None)
        own = {"max_tokens": None} | dict(llm.default_sampling) | dict(sampling)
        if self._dialect.reasoning is not None:
            own["skip_special_tokens"] = False  # reasoning may begin and end with special tokens
        self._sampling = SamplingParams(**own)
        self._is_stopped = False
        self.name = llm.config.model or EMBEDDED_NAME
        said = chosen(llm)
        self.chosen = "; ".join(said[what] for what in ("backend", "dtype", "weights", "longest"))
        self.writes_code = llm.config.model is None
        self.has_template = self._template is not None
        self.usage: Usage | None = None
        if self._template is not None:  # its process takes seconds to start, during which the user types
            threading.Thread(target=_started, args=(self._template.start,), daemon=True).start()

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """Yield the answer. Without a template, continue the last message as plain text."""
        from quire.frontend.images import split_images

        self._is_stopped = False
        usage = self.usage = Usage(time.monotonic())
        marked, images = split_images(messages)
        if self._template is None:
            if images:
                raise QuireError("this model has no chat template, so it takes no images; --chat-template gives it one")
            text = messages[-1]["content"]
            prompt: Any = self._tokenizer.encode(text)
        else:
            text = self._template.render(marked)
            prompt = self._tokenizer.encode(text, add_special_tokens=False)
        if images:
            prompt = {"prompt": text, "multi_modal_data": {"image": images}}
        try:
            usage.prompt_tokens = len(self._llm.factory.tokenize(prompt).tokens)
        except PromptTooLong as error:
            raise TooLong(str(error)) from error
        self._check_room(usage.prompt_tokens, len(messages))
        parser = self._parser(text)
        shown = 0
        for output in self._llm.stream(prompt, self._sampling, lora=self._lora):
            sample = output.outputs[0]
            if len(sample.token_ids) > usage.new_tokens:
                usage.see()
            usage.new_tokens = len(sample.token_ids)
            usage.cached_tokens = output.num_cached_tokens or 0
            usage.finish_reason = None if sample.finish_reason is None else str(sample.finish_reason)
            if sample.error is not None:
                raise QuireError(sample.error)
            new, shown = sample.text[shown:], len(sample.text)
            yield from _pieces(new, parser)
            if self._is_stopped:
                return
        if parser is not None:
            yield from _read(parser.finish())

    def stop(self) -> None:
        """End the answer after the current step."""
        self._is_stopped = True

    def close(self) -> None:
        """Free the model, and end the process of the template."""
        if self._template is not None:
            self._template.close()
        self._llm.close()

    def _check_room(self, num_tokens: int, num_messages: int) -> None:
        longest = self._llm.engine.scheduler.max_model_len
        room = min(LEAST_ROOM, longest // 4) if num_messages > 1 else 1
        if num_tokens + room > longest:
            raise TooLong(
                f"the conversation has {num_tokens:,} tokens, and this model takes {longest:,} with its answer"
            )

    def _parser(self, prompt: str) -> AnswerParser | None:
        """Return a parser that separates reasoning from the answer; None for a model without reasoning."""
        if self._dialect.reasoning is None or self._template is None:
            return None
        special = self._tokenizer.special_tokens
        hidden = tuple(text for text, token in self._tokenizer.added_tokens.items() if token in special and text)
        begins = self._dialect.begins(prompt, None)
        return self._dialect.parser({}, hidden, may_call=False, begins=begins)


class ServedModel:
    """A model of an OpenAI-compatible server."""

    def __init__(self, client: Client, model: str | None, sampling: Mapping[str, Any]) -> None:
        """model: its name at the server; None: the first one. Raises QuireError without a server or such a model."""
        names = self.names(client)
        if not names:
            raise QuireError(f"the server at {client.url} has no model")
        if model is not None and model not in names:
            raise QuireError(f"the server at {client.url} has no model {model!r}; it has {', '.join(names[:8])}")
        self._client = client
        self._sampling = dict(sampling)
        self.name = model or names[0]
        self.chosen = ""
        self.writes_code = self.name == EMBEDDED_NAME
        self.has_template = True  # otherwise the server reports an error
        self.usage: Usage | None = None

    @staticmethod
    def names(client: Client) -> list[str]:
        """Return the names of a server's models. Raises QuireError if it lists none."""
        return [str(one["id"]) for one in client.models()]

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """Yield the answer."""
        usage = self.usage = Usage(time.monotonic())
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        is_whole = False
        try:
            for data in self._client.events("/v1/chat/completions", body):
                if data == "[DONE]":
                    is_whole = True
                    continue
                event = _event(data, self._client.url)
                _count(usage, event)
                for piece in _said(event):
                    usage.see()
                    yield piece
                is_whole |= usage.finish_reason is not None
        except Refused as error:
            if error.code == TOO_LONG:
                raise TooLong(str(error)) from error
            raise
        if not is_whole and not self._client.is_stopped:
            raise QuireError(f"the server at {self._client.url} ended in the middle of an answer")

    def stop(self) -> None:
        """Close the connection, so that the server ends the answer."""
        self._client.stop()

    def close(self) -> None:
        """Do nothing: there are no resources."""


def _started(start: Any) -> None:
    with contextlib.suppress(QuireError, RuntimeError, OSError):  # the first rendering raises the same error
        start()


def _pieces(text: str, parser: AnswerParser | None) -> Iterator[Piece]:
    if not text:
        return
    if parser is None:
        yield Piece(text)
    else:
        yield from _read(parser.feed(text))


def _read(pieces: Sequence[Any]) -> Iterator[Piece]:
    from quire.server.tools.parser import Kind

    for piece in pieces:
        yield Piece(piece.text, piece.kind is Kind.REASONING)


def _event(data: str, url: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise QuireError(f"the server at {url} sends an event that is no JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise QuireError(f"the server at {url} sends an event that is no object: {data[:80]!r}")
    if failed := event.get("error"):
        raise QuireError(f"the server reports: {failed.get('message', failed) if isinstance(failed, dict) else failed}")
    return event


def _said(event: Mapping[str, Any]) -> Iterator[Piece]:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Piece(thought, is_thought=True)
        if text := delta.get("content"):
            yield Piece(text)


def _count(usage: Usage, event: Mapping[str, Any]) -> None:
    for choice in event.get("choices") or ():
        usage.finish_reason = choice.get("finish_reason") or usage.finish_reason
    if counted := event.get("usage"):
        usage.prompt_tokens = counted.get("prompt_tokens") or 0
        usage.new_tokens = counted.get("completion_tokens") or 0
        usage.cached_tokens = (counted.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
