"""/v1/messages: a conversation goes on, as Anthropic answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.server.api.blocks import Block, BlockEvents, Ending, read_whole
from quire.server.api.service import Service, with_fingerprint
from quire.server.api.streamed import StreamedAnswer
from quire.server.api.turn import Turn, prompt_of
from quire.server.http.api_error import ANTHROPIC_PATHS, ApiError
from quire.server.http.sse import JsonBody, named
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.tools.parser import Kind

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
EMPTY: dict[Kind, dict[str, Any]] = {
    Kind.CONTENT: {"type": "text", "text": ""},
    Kind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
}


async def messages(service: Service, request: HttpRequest, body: MessagesRequest) -> Response:
    """Answer a request."""
    chat = body.chat(can_think=service.model.dialect.thoughts is not None)
    body.messages.clear()  # the chat has them
    turn = await Turn.of(service, request, chat, "msg")
    if chat.stream:
        job = await turn.stream()
        events = BlockEvents(turn, job, _Script(turn))
        streamed = StreamedAnswer(service.worker, job, events, service.config.sse_keep_alive)
        return with_fingerprint(streamed, turn.system_fingerprint)
    blocks, ending = await read_whole(turn)
    own = {"content": [_content(block) for block in blocks], **_reason(ending), "usage": _usage(ending)}
    return with_fingerprint(JsonBody(_message(turn) | own), turn.system_fingerprint)


async def count_tokens(service: Service, request: HttpRequest, body: CountTokensRequest) -> Response:
    """Say how many tokens the prompt of a request has."""
    service.check_model(body.model)
    chat = body.chat(can_think=service.model.dialect.thoughts is not None)
    chat.check_together()
    prompt = await prompt_of(service, request, chat)
    return JsonBody({"input_tokens": len(prompt.tokens)})


def _message(turn: Turn) -> dict[str, Any]:
    """A message that has nothing yet."""
    usage = {"input_tokens": len(turn.prompt.tokens), "output_tokens": 0}
    return {
        "id": turn.identity.name.replace("-", "_"),
        "type": "message",
        "role": "assistant",
        "model": turn.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }


def _content(block: Block) -> dict[str, Any]:
    """A block that is whole. A call whose arguments broke off is shown as the text that it is."""
    if block.kind is not Kind.CALL:
        return EMPTY[block.kind] | {EMPTY[block.kind]["type"]: block.text}
    given = block.arguments()
    if given is None:
        return {"type": "text", "text": f"{block.name}({block.text}"}
    return _tool_use(block) | {"input": given}


def _tool_use(block: Block) -> dict[str, Any]:
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _reason(ending: Ending) -> dict[str, Any]:
    reason = REASONS[ending.reason] if ending.stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": ending.stop_text}


def _usage(ending: Ending) -> dict[str, Any]:
    """Numbers of tokens. Those found in the cache are not counted as input."""
    return {
        "input_tokens": ending.num_prompt - ending.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": ending.num_cached,
        "output_tokens": ending.num_generated,
    }


class _Script:
    """What a stream says."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def begin(self) -> bytes:
        """The message is empty; and a ping, as clients are used to one."""
        return named({"type": "message_start", "message": _message(self._turn)}) + named({"type": "ping"})

    def open(self, block: Block) -> bytes:
        """A block begins."""
        empty = _tool_use(block) if block.kind is Kind.CALL else EMPTY[block.kind]
        return named({"type": "content_block_start", "index": block.index, "content_block": empty})

    def grow(self, block: Block, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """A text has come to a block."""
        if block.kind is Kind.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            kind = EMPTY[block.kind]["type"]
            delta = {"type": f"{kind}_delta", kind: text}
        return named({"type": "content_block_delta", "index": block.index, "delta": delta})

    def close(self, block: Block) -> bytes:
        """A block is whole."""
        return named({"type": "content_block_stop", "index": block.index})

    def end(self, blocks: Sequence[Block], ending: Ending) -> bytes:
        """Why the message ends, and its tokens."""
        last = {"type": "message_delta", "delta": _reason(ending), "usage": _usage(ending)}
        return named(last) + named({"type": "message_stop"})

    def fail(self, blocks: Sequence[Block], error: ApiError) -> bytes:
        """An error."""
        return named(error.body_for(ANTHROPIC_PATHS))
