"""/v1/messages: the next message of a conversation, in Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import Unpack

from quire.server.api.blocks import Block, BlockEvents, Ending, Script, read_whole
from quire.server.api.derived import apply
from quire.server.api.service import Service, with_fingerprint
from quire.server.api.streamed import StreamedAnswer
from quire.server.api.turn import Turn, prompt_of
from quire.server.http.api_error import ANTHROPIC_PATHS, ApiError
from quire.server.http.sse import JsonBody, named
from quire.server.protocol.answers import ChatLogprob
from quire.server.protocol.messages import (
    AnthropicBlock,
    AnthropicDelta,
    AnthropicEnd,
    AnthropicEvent,
    AnthropicMessage,
    AnthropicUsage,
    CountTokensRequest,
    InputTokens,
    MessagesRequest,
    StopReason,
)
from quire.server.tools.parser import Kind

REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
EMPTY: dict[Kind, AnthropicBlock] = {
    Kind.CONTENT: {"type": "text", "text": ""},
    Kind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
}


async def messages(service: Service, request: HttpRequest, body: MessagesRequest) -> Response:
    """Answer a request."""
    chat = body.chat(can_think=service.model.dialect.reasoning is not None)
    body.messages.clear()  # the chat has them
    turn = await Turn.of(service, request, chat, "msg")
    if chat.stream:
        job = await turn.stream()
        events = BlockEvents(turn, job, _Script(turn))
        streamed = StreamedAnswer(service.engine_client, job, events, service.config.sse_keep_alive)
        return with_fingerprint(streamed, turn.system_fingerprint)
    blocks, ending = await read_whole(turn)
    whole = _message(turn, [_content(block) for block in blocks], _reason(ending), _usage(ending))
    return with_fingerprint(JsonBody(whole), turn.system_fingerprint)


async def count_tokens(service: Service, request: HttpRequest, body: CountTokensRequest) -> Response:
    """Return the number of tokens of a request's prompt."""
    chat = body.chat(can_think=service.model.dialect.reasoning is not None)
    if (derived := service.derived_from(request, chat.model)) is not None:
        apply(derived, chat)
    service.check_model(chat.model)
    chat.check_together()
    prompt = await prompt_of(service, request, chat)
    return JsonBody(InputTokens(input_tokens=len(prompt.tokens)))


def _message(
    turn: Turn, content: list[AnthropicBlock], reason: AnthropicEnd, usage: AnthropicUsage
) -> AnthropicMessage:
    return {
        "id": turn.identity.name.replace("-", "_"),
        "type": "message",
        "role": "assistant",
        "model": turn.model,
        "content": content,
        **reason,
        "usage": usage,
    }


def _content(block: Block) -> AnthropicBlock:
    """Return a complete block. A call with incomplete arguments is shown as text."""
    if block.kind is not Kind.CALL:
        if block.kind is Kind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        return {"type": "text", "text": block.text}
    given = block.arguments()
    if given is None:
        return {"type": "text", "text": f"{block.name}({block.text}"}
    return {**_tool_use(block), "input": given}


def _tool_use(block: Block) -> AnthropicBlock:
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _reason(ending: Ending) -> AnthropicEnd:
    reason = REASONS[ending.reason] if ending.stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": ending.stop_text}


def _usage(ending: Ending) -> AnthropicUsage:
    num_new = ending.num_prompt - ending.num_cached - ending.num_kept
    return _counts(num_new, ending.num_cached, ending.num_generated, ending.num_kept)


def _counts(num_new: int, num_cached: int, num_generated: int, num_kept: int) -> AnthropicUsage:
    return {
        "input_tokens": num_new,
        "cache_creation_input_tokens": num_kept,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_generated,
    }


def _event(**fields: Unpack[AnthropicEvent]) -> bytes:
    return named(fields)


class _Script(Script):
    """Writes the events of a stream."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def begin(self) -> bytes:
        """Return an empty message, and a ping, since clients may expect one."""
        nothing = _counts(len(self._turn.prompt.tokens), 0, 0, 0)
        message = _message(self._turn, [], {"stop_reason": None, "stop_sequence": None}, nothing)
        return _event(type="message_start", message=message) + _event(type="ping")

    def open(self, block: Block) -> bytes:
        """Return the start of a block."""
        empty = _tool_use(block) if block.kind is Kind.CALL else EMPTY[block.kind]
        return _event(type="content_block_start", index=block.index, content_block=empty)

    def grow(self, block: Block, text: str, logprobs: list[ChatLogprob]) -> bytes:
        """Return the text that is added to a block."""
        delta: AnthropicDelta = {"type": "text_delta", "text": text}
        if block.kind is Kind.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind is Kind.REASONING:
            delta = {"type": "thinking_delta", "thinking": text}
        return _event(type="content_block_delta", index=block.index, delta=delta)

    def close(self, block: Block) -> bytes:
        """Return the end of a block."""
        return _event(type="content_block_stop", index=block.index)

    def end(self, blocks: Sequence[Block], ending: Ending) -> bytes:
        """Return the reason why the message ends, and its token counts."""
        last = _event(type="message_delta", delta=_reason(ending), usage=_usage(ending))
        return last + _event(type="message_stop")

    def fail(self, blocks: Sequence[Block], error: ApiError) -> bytes:
        """Return an error."""
        return named(error.body_for(ANTHROPIC_PATHS))
