"""Conversation: from messages to a prompt, with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from quire.errors import RequestError
from quire.frontend.chat_tokenizer import plain_call, plain_tool
from quire.frontend.request_factory import TokenizedPrompt
from quire.server.api.service import Service
from quire.server.http.api_error import ApiError, bad_messages, shown
from quire.server.protocol.chat import Message, Rendering


async def conversation(
    service: Service,
    request: HttpRequest,
    messages: Sequence[Message],
    rendering: Rendering,
    variables: Mapping[str, Any] | None = None,
) -> TokenizedPrompt:
    """Render and tokenize a conversation. Raises ApiError without a template, or if the template refuses it.

    variables: template variables in addition to those of the rendering.
    """
    template, config = service.model.template, service.config
    if template is None:
        service.model.pooling.check_writes()
        message = (
            f"{service.model.names[0]} has no chat template, so it continues prompts only (/v1/completions); the "
            f"server takes a template as --chat-template FILE"
        )
        raise ApiError(message, param="messages")
    rendering.check_depths()
    urls = _images(service, messages)
    plain = [_plain(message, service.model.dialect.wants_json) for message in messages]
    tools = [plain_tool(tool.function.model_dump(exclude_none=True)) for tool in rendering.tools or ()]
    given = config.template_kwargs() | dict(variables or {}) | (rendering.chat_template_kwargs or {})
    render = partial(
        template.render,
        plain,
        rendering.adds_prompt(),
        tools or None,
        given,
        continue_final_message=rendering.continue_final_message,
    )
    size = sum(len(said(message)) for message in messages)
    try:
        text = await service.render(request, render, size)
        service.check_text(text, "messages")
        if urls:
            return await service.encode_images(request, text, urls)
        return await service.encode(request, text, add_special_tokens=False)  # the template has written them
    except RequestError as error:
        raise bad_messages(error) from error


def _images(service: Service, messages: Sequence[Message]) -> list[str]:
    """Return the URLs of all images. Raises ApiError if a client may not give one: it must not name files here."""
    urls: list[str] = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part["type"] == "text":
                continue
            place, url = f"messages[{i}].content[{j}]", part["image_url"]["url"]
            if (why := service.why_no_images()) is not None:
                raise ApiError(f"{place} is an image, and {why}", param="messages")
            if not url.startswith("data:"):
                if service.fetcher is None:
                    why = (
                        f"{place} has the URL {shown(url)}; an image is given as a data URL: data:image/png;base64,..."
                    )
                    raise ApiError(why, param="messages")
                try:
                    service.fetcher.check(url)
                except RequestError as error:
                    raise ApiError(f"{place}: {error}", param="messages") from error
            urls.append(url)
    return urls


def said(message: Message) -> str:
    """Return a message's text."""
    if isinstance(message.content, list):
        return "\n".join(part["text"] for part in message.content if part["type"] == "text")
    return message.content or ""


def _plain(message: Message, wants_json: bool) -> dict[str, Any]:
    """Convert a message to the form that templates expect, without absent fields."""
    calls = [
        plain_call(call.function.name, call.function.arguments, call.id, wants_json)
        for call in message.tool_calls or ()
    ]
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": calls or None,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    content: str | list[dict[str, str]] = said(message)
    if isinstance(message.content, list) and any(part["type"] != "text" for part in message.content):
        content = [
            {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"}
            for part in message.content
        ]
    return {"role": message.role, "content": content} | {key: one for key, one in more.items() if one is not None}
