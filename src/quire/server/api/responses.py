"""/v1/responses: the next turn of a conversation, in OpenAI's newer API. Nothing is stored between requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict, Unpack

from quire.server.api.blocks import Block, BlockEvents, Ending, Script, read_whole
from quire.server.api.service import Service
from quire.server.api.streamed import StreamedAnswer
from quire.server.api.turn import Turn
from quire.server.http.api_error import ApiError
from quire.server.http.sse import JsonBody, named
from quire.server.protocol.answers import ChatLogprob
from quire.server.protocol.responses import (
    EventFields,
    ItemPart,
    ModelResponse,
    OutputItem,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from quire.server.tools.parser import Kind

PREFIXES = {Kind.REASONING: "rs", Kind.CONTENT: "msg", Kind.CALL: "fc"}


async def respond(service: Service, request: HttpRequest, body: ResponsesRequest) -> Response:
    """Answer a request."""
    chat = body.chat()
    body.input.clear()  # the chat has it
    turn = await Turn.of(service, request, chat, "resp")
    if chat.stream:
        job = await turn.stream()
        events = BlockEvents(turn, job, _Script(_Writer(turn, body)))
        return StreamedAnswer(service.engine_client, job, events, service.config.sse_keep_alive)
    found = await read_whole(turn)
    return JsonBody(_Writer(turn, body).ended(*found))


class _Writer:
    """Writes the response and its items."""

    def __init__(self, turn: Turn, body: ResponsesRequest) -> None:
        self._name = turn.identity.name.partition("-")[2]
        self._head = _head(turn, body)

    def response(
        self, status: Literal[Status, "failed"], blocks: Sequence[Block] = (), usage: ResponseUsage | None = None
    ) -> ModelResponse:
        """Return the response with a status. If that is not "completed", its last item is incomplete."""
        items = [self.item(block, "completed") for block in blocks]
        if items and status != "completed":
            items[-1]["status"] = "incomplete"
        return {**self._head, "status": status, "output": items, "usage": usage}

    def ended(self, blocks: Sequence[Block], ending: Ending) -> ModelResponse:
        """Return the response of a finished answer."""
        usage: ResponseUsage = {
            "input_tokens": ending.num_prompt,
            "input_tokens_details": {"cached_tokens": ending.num_cached, "cache_write_tokens": ending.num_kept},
            "output_tokens": ending.num_generated,
            "output_tokens_details": {"reasoning_tokens": ending.num_reasoning},
            "total_tokens": ending.num_prompt + ending.num_generated,
        }
        if ending.reason == "length":
            found = self.response("incomplete", blocks, usage)
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            found = self.response("completed", blocks, usage)
            found["completed_at"] = int(time.time())
        return found

    def item(self, block: Block, status: Status) -> OutputItem:
        """Return a block as an item."""
        kind, name = block.kind, self.item_id(block)
        if kind is Kind.CALL:
            call: OutputItem = {"id": name, "type": "function_call", "status": status}
            return {**call, "call_id": block.call_id, "name": block.name, "arguments": block.text}
        parts = [self.part(block)] if block.parts else []
        if kind is Kind.REASONING:
            own: OutputItem = {"id": name, "type": "reasoning", "status": status, "summary": []}
            return {**own, "content": parts, "encrypted_content": None}
        return {"id": name, "type": "message", "status": status, "role": "assistant", "content": parts}

    def item_id(self, block: Block) -> str:
        """Return the id of a block's item."""
        return f"{PREFIXES[block.kind]}_{self._name}{block.index:04d}"

    def part(self, block: Block) -> ItemPart:
        """Return the only part of a block's item, with the text so far."""
        if block.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _head(turn: Turn, body: ResponsesRequest) -> ModelResponse:
    """Return the fields of a response that repeat its request."""
    reasoning, text = body.reasoning, body.text
    drawn = turn.body.model_dump(include={"temperature", "top_p"})
    shown = {} if text is None or text.format is None else text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": turn.identity.name.replace("-", "_"),
        "object": "response",
        "created_at": turn.identity.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": turn.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "system_fingerprint": turn.system_fingerprint,
        "temperature": drawn["temperature"],
        "text": {"format": {"type": "text"} | shown},
        "tool_choice": _chosen(body),
        "tools": [tool.model_dump(include=SHOWN_OF_TOOLS) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": drawn["top_p"],
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": None,
    }


SHOWN_OF_TOOLS = {"type", "name", "description", "parameters", "strict"}


def _chosen(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump(exclude_none=True)


class _ItemPlace(TypedDict):
    item_id: str
    output_index: int


class _PartPlace(_ItemPlace):
    content_index: int


class _Script(Script):
    """Writes the events of a stream."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._number = 0

    def begin(self) -> bytes:
        """Return the events for a new response."""
        first = self._writer.response("in_progress")
        return self._event("response.created", response=first) + self._event("response.in_progress", response=first)

    def open(self, block: Block) -> bytes:
        """Return the events for a new item, and for its part if it has one."""
        item = self._writer.item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is Kind.CALL:
            return added
        return added + self._event("response.content_part.added", **self._place(block), part=self._writer.part(block))

    def grow(self, block: Block, text: str, logprobs: list[ChatLogprob]) -> bytes:
        """Return the event for text that is added to an item."""
        if block.kind is Kind.CALL:
            return self._event("response.function_call_arguments.delta", **self._item_of(block), delta=text)
        if block.kind is Kind.REASONING:
            return self._event("response.reasoning_text.delta", **self._place(block), delta=text)
        return self._event("response.output_text.delta", **self._place(block), delta=text, logprobs=logprobs)

    def close(self, block: Block) -> bytes:
        """Return the events for a complete item."""
        if block.kind is Kind.CALL:
            done = self._event(
                "response.function_call_arguments.done",
                **self._item_of(block),
                name=block.name,
                arguments=block.text,
            )
        else:
            place, part = self._place(block), self._writer.part(block)
            if block.kind is Kind.REASONING:
                done = self._event("response.reasoning_text.done", **place, text=block.text)
            else:
                done = self._event("response.output_text.done", **place, text=block.text, logprobs=block.logprobs)
            done += self._event("response.content_part.done", **place, part=part)
        item = self._writer.item(block, "completed")
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def end(self, blocks: Sequence[Block], ending: Ending) -> bytes:
        """Return the event for the finished response."""
        last = self._writer.ended(blocks, ending)
        return self._event(f"response.{last['status']}", response=last)

    def fail(self, blocks: Sequence[Block], error: ApiError) -> bytes:
        """Return the event for a failed response."""
        last = self._writer.response("failed", blocks)
        last["error"] = {"code": error.code or "server_error", "message": str(error)}
        return self._event("response.failed", response=last)

    def _event(self, kind: str, **fields: Unpack[EventFields]) -> bytes:
        number, self._number = self._number, self._number + 1
        event: ResponseEvent = {"type": kind, "sequence_number": number, **fields}
        return named(event)

    def _item_of(self, block: Block) -> _ItemPlace:
        return {"item_id": self._writer.item_id(block), "output_index": block.index}

    def _place(self, block: Block) -> _PartPlace:
        return {**self._item_of(block), "content_index": 0}
