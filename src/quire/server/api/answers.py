"""Reading: the parsing of a chat request's answers, and the grammar that guarantees that they can be parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from quire.frontend.request_factory import TokenizedPrompt
from quire.sandbox.grammar import Spec
from quire.sandbox.thinking import Thinking
from quire.server.api.service import Service
from quire.server.http.api_error import ApiError
from quire.server.protocol.chat import (
    AnsweredCall,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    FunctionDelta,
    NamedTool,
    ToolCallDelta,
)
from quire.server.tools.dialect import ANALYSIS
from quire.server.tools.grammar import NO_ARGUMENTS, Demand, Function, grammar_of
from quire.server.tools.parser import AnswerParser, Kind, Piece


class Reading:
    """The rules for parsing one request's answers."""

    def __init__(
        self, service: Service, body: ChatRequest, name: str, prompt: TokenizedPrompt, continued: str | None
    ) -> None:
        """Create it. name: of the answer. continued: the text of the message to continue, if any.

        Raises ApiError for tool calls or a reasoning budget if the model's syntax for them is unknown.
        """
        dialect = service.model.dialect
        self.dialect = dialect
        self._service = service
        self._name = name
        self._may_call = body.may_call()
        self._functions = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
        self.has_one_call = body.parallel_tool_calls is False
        self.shows_reasoning = body.include_reasoning
        self.is_plain = not self._may_call and dialect.reasoning is None
        self.thinking: Thinking | None = None
        self.tools: Callable[[], Spec] | None = None
        if self.is_plain and body.thinking_token_budget is None:
            return
        served = service.model.names[0]
        if self._may_call and dialect.syntax is None:
            template = service.model.template
            if template is None or "tools" not in template.source:
                message = f"the chat template of {served} does not show tools to the model, so it cannot call them"
                raise ApiError(f"{message}; the server takes another template as --chat-template FILE", param="tools")
            message = f"the chat template of {served} writes calls in no syntax that is known here"
            raise ApiError(f"{message}; the server takes its name as --tool-call-parser NAME", param="tools")
        if body.thinking_token_budget is not None and dialect.reasoning is None:
            message = f"the chat template of {served} writes reasoning in no syntax that is known here"
            raise ApiError(
                f"{message}; the server takes its name as --reasoning-parser NAME", param="thinking_token_budget"
            )
        self._begins = dialect.begins(prompt.text or "", continued)
        tokenizer = service.tokenizer
        self._special: tuple[str, ...] = ()
        if body.skip_special_tokens:
            special = tokenizer.special_tokens
            self._special = tuple(text for text, token in tokenizer.added_tokens.items() if token in special and text)
        self.thinking = self._thinking(body)
        self.tools = partial(self._grammar, self._demand(body)) if self._has_grammar(body) else None

    def parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        return self.dialect.parser(self._functions, self._special, may_call=self._may_call, begins=self._begins)

    def call_id(self, sample: int, number: int) -> str:
        """Return a call's id: the same for the same answer, so that another replica can continue a stream."""
        size = 24 if self.dialect.syntax is None else self.dialect.syntax.id_size
        digest = blake2b(f"{self._name}/{sample}/{number}".encode(), digest_size=16).hexdigest()[:size]
        return digest if size < 10 else f"call_{digest}"

    def num_reasoning(self, tokens: Sequence[int], reasoning: str) -> int:
        """Count the reasoning tokens of an answer. If no single token ends the reasoning, tokenize its text again."""
        if not reasoning or self.dialect.reasoning is None:
            return 0
        end = self._ids(self.dialect.reasoning.end)
        if len(end) > 1 or self.dialect.reasoning is ANALYSIS:
            return len(self._service.tokenizer.encode(reasoning, add_special_tokens=False))
        begin = self._ids(self.dialect.reasoning.begin)
        size = tokens.index(end[0]) if end[0] in tokens else len(tokens)
        return size - (len(begin) if tuple(tokens[: len(begin)]) == begin else 0)

    def counted(self, num_reasoning: int) -> int | None:
        """Return the number of reasoning tokens for the usage, or None if the model is not known to reason."""
        return None if self.dialect.reasoning is None else num_reasoning

    # ------------------------------------------------------------------------------------------------- grammars

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._service.tokenizer.encode(text, add_special_tokens=False))

    def _thinking(self, body: ChatRequest) -> Thinking | None:
        reasoning, limit = self.dialect.reasoning, body.thinking_token_budget
        if reasoning is None or self._begins == "saying" or (limit is None and body.grammar_field() is None):
            return None
        if reasoning is ANALYSIS and self._has_grammar(body):
            if limit is not None:
                message = "thinking_token_budget does not go with a grammar for this model; leave one of them out"
                raise ApiError(message, param="thinking_token_budget")
            return None  # the grammar includes the reasoning
        begin, is_inside = self._ids(reasoning.begin), self._begins == "thinking"
        if len(begin) > 1 and not is_inside and body.grammar_field() != "thinking_token_budget":
            return None  # the begin mark could also begin the grammar's text, so reasoning is not allowed
        return Thinking(begin, self._ids(reasoning.end), is_inside, limit)

    def _has_grammar(self, body: ChatRequest) -> bool:
        """Return whether the grammar is one of calls or of channels."""
        if body.has_calls_of_a_grammar():
            return True
        asks_json = body.grammar_field() == "response_format"
        return asks_json and (self._may_call or self.dialect.reasoning is ANALYSIS)

    def _demand(self, body: ChatRequest) -> Demand:
        form, chosen = body.response_format, body.tool_choice
        instead: dict[str, Any] | None = None
        if form is not None and form.type != "text":
            instead = {"type": "object"} if form.type == "json_object" else form.schema_given()
        functions = tuple(
            Function(
                tool.function.name,
                tool.function.parameters or NO_ARGUMENTS,
                bool(tool.function.strict) or body.must_call() or instead is not None,
                f"tools[{i}].function.parameters",
            )
            for i, tool in enumerate((body.tools or ()) if self._may_call else ())
            if not isinstance(chosen, NamedTool) or tool.function.name == chosen.function.name
        )
        is_many = not self.has_one_call and not isinstance(chosen, NamedTool)
        return Demand(functions, body.must_call(), is_many, instead)

    def _grammar(self, demand: Demand) -> Spec:
        return Spec("tools", grammar_of(self.dialect, demand, self._service.tokenizer.added_tokens))


class AnswerWriter:
    """Turns one answer's text into the parts of OpenAI's messages and deltas."""

    def __init__(self, reading: Reading, sample: int) -> None:
        self._reading = reading
        self._sample = sample
        self._parser = None if reading.is_plain else reading.parser()
        self._num_calls = 0
        self.reasoning = ""

    @property
    def has_calls(self) -> bool:
        """True if a call has begun."""
        return self._num_calls > 0

    @property
    def call_id(self) -> str:
        """The id of the last started call."""
        return self._reading.call_id(self._sample, self._num_calls - 1)

    def pieces(self, text: str, *, is_last: bool) -> Iterator[Piece]:
        """Parse a text, and yield the pieces that it adds to the answer, without those that the request hides."""
        if self._parser is None:
            if text:
                yield Piece(Kind.CONTENT, text)
            return
        found = self._parser.feed(text)
        if is_last:
            found += self._parser.finish()
        for piece in found:
            if piece.kind is Kind.REASONING:
                self.reasoning += piece.text
                if not self._reading.shows_reasoning:
                    continue
            elif piece.kind is not Kind.CONTENT:
                self._num_calls += piece.kind is Kind.CALL
                if self._num_calls > 1 and self._reading.has_one_call:
                    continue
            yield piece

    def delta(self, text: str, *, is_last: bool) -> ChatDelta:
        """Parse a text, and return the delta that it adds to the message; empty if it adds nothing."""
        delta: ChatDelta = {}
        for piece in self.pieces(text, is_last=is_last):
            self._add(piece, delta)
        return delta

    def message(self, text: str) -> ChatMessage:
        """Return the complete message of a text."""
        delta = self.delta(text, is_last=True)
        calls = [_complete(call) for call in delta.get("tool_calls", ())]
        content = delta.get("content") or (None if calls else "")
        message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if "reasoning" in delta:
            message["reasoning_content"] = message["reasoning"] = delta["reasoning"]
        return message

    def reason(self, found: str | None) -> str | None:
        """Return the finish reason in OpenAI's terms."""
        return "tool_calls" if found == "stop" and self.has_calls else found

    def _add(self, piece: Piece, delta: ChatDelta) -> None:
        kind, text = piece
        if kind is Kind.CONTENT:
            delta["content"] = delta.get("content", "") + text
        elif kind is Kind.REASONING:
            # Clients look for either name.
            delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + text
        else:
            self._add_call(kind, text, delta.setdefault("tool_calls", []))

    def _add_call(self, kind: Kind, text: str, calls: list[ToolCallDelta]) -> None:
        number = self._num_calls - 1
        if kind is Kind.CALL:
            function = FunctionDelta(name=text, arguments="")
            calls.append({"index": number, "id": self.call_id, "type": "function", "function": function})
        elif calls and calls[-1]["index"] == number:
            calls[-1]["function"]["arguments"] += text
        else:
            calls.append({"index": number, "function": {"arguments": text}})


def _complete(call: ToolCallDelta) -> AnsweredCall:
    """Return a call of a complete message: the only delta of a call has all of it."""
    function = call["function"]
    return {
        "id": call["id"],
        "type": call["type"],
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }
