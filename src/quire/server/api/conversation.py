"""Conversation: from messages to the prompt that a model's chat template makes of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from quire.errors import RequestError
from quire.sandbox.grammar import check_depth
from quire.server.api.service import Prompt, Service
from quire.server.http.api_error import ApiError
from quire.server.protocol.chat import Message, Rendering, ToolCall


async def conversation(
    service: Service,
    request: HttpRequest,
    messages: Sequence[Message],
    rendering: Rendering,
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """The prompt that a conversation makes. Raises ApiError without a template, and where it refuses.

    variables: what the template sees besides what the rendering asks for.
    """
    template, config = service.model.template, service.config
    if template is None:
        message = (
            f"{service.model.names[0]} has no chat template, so it continues prompts only (/v1/completions); the "
            f"server takes a template as --chat-template FILE"
        )
        raise ApiError(message, param="messages")
    rendering.check_depths()
    plain = [_plain(message, service.model.dialect.wants_json) for message in messages]
    tools = [_tool(tool.function.model_dump(exclude_none=True)) for tool in rendering.tools or ()]
    given = config.template_kwargs() | dict(variables or {}) | (rendering.chat_template_kwargs or {})
    render = partial(
        template.render,
        plain,
        rendering.adds_prompt(),
        tools or None,
        given,
        continue_final_message=rendering.continue_final_message,
    )
    size = sum(len(message["content"]) for message in plain)
    try:
        text = await service.render(request, render, size)
        service.check_text(text, "messages")
        return await service.encode(request, text, add_special_tokens=False)  # the template writes those itself
    except RequestError as error:
        raise ApiError(str(error), param="messages") from error


def said(message: Message) -> str:
    """A message's text."""
    if isinstance(message.content, list):
        return "\n".join(part["text"] for part in message.content)
    return message.content or ""


def _plain(message: Message, wants_json: bool) -> dict[str, Any]:
    """A message as templates take it: without what it does not have."""
    calls = [_call(call, wants_json) for call in message.tool_calls or ()]
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": calls or None,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return {"role": message.role, "content": said(message)} | {key: one for key, one in more.items() if one is not None}


def _call(call: ToolCall, wants_json: bool) -> dict[str, Any]:
    """A call of the history. Most templates take its arguments as an object, and write its JSON themselves."""
    given = call.function.arguments
    if isinstance(given, dict):
        check_depth(given, "tool_calls.function.arguments")
        arguments: Any = json.dumps(given, ensure_ascii=False) if wants_json else given
    else:
        arguments = given or "{}"
        if not wants_json:
            with contextlib.suppress(ValueError, RecursionError):  # what a model has written wrongly, it should see so
                if isinstance(found := json.loads(arguments), dict):
                    check_depth(found)
                    arguments = found
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    """A tool of the request: with parameters, which most templates ask for, and without what is not said to models."""
    function.pop("strict", None)
    return {"type": "function", "function": function | {"parameters": function.get("parameters") or EMPTY}}


EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
