"""Chats: the conversations of callers as chat templates take them, and a tokenizer that has the model's template."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.models.files import Where, files_of
from quire.sandbox.chat_template import ChatTemplate, make_renderers, special_tokens
from quire.sandbox.grammar import check_depth
from quire.text import Tokenizer

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class ChatTokenizer(Tokenizer):
    """A model's tokenizer with its chat template, which is rendered in a process of its own."""

    def __init__(self, where: Where) -> None:
        """Read the tokenizer. Raises ModelError where it is unreadable. The template is read at first use."""
        self._files = files_of(where)
        super().__init__(self._files)
        self._renderers = make_renderers()
        self._template: ChatTemplate | None = None
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation.

        messages: each with a role and a content, as OpenAI's clients write them. tools: functions that the model may
        call. chat_template: a template's text, in place of the model's. chat_template_kwargs: what the template sees
        besides. add_generation_prompt: end where the model's answer begins. continue_final_message: end where the last
        message does, so that the model goes on with it.

        Raises RequestError where there is no template or it does not take such messages, ModelError where the model's
        is none.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both True; a text ends either where an answer "
                "begins or where the last message ends, so set one of them to False"
            )
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise RequestError(f"messages is {messages!r}; it must be a list of at least one message")
        template = self._own() if chat_template is None else self._other(chat_template)
        return template.render(
            [plain_message(i, message) for i, message in enumerate(messages)],
            add_generation_prompt,
            [_plain_tool(i, tool) for i, tool in enumerate(tools or ())] or None,
            chat_template_kwargs,
            continue_final_message=continue_final_message,
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **rendering: Any
    ) -> list[int] | str:
        """The tokens of a conversation, or its text with tokenize=False. rendering, errors: see `render`."""
        text = self.render(messages, **rendering)
        return self.encode(text, add_special_tokens=False) if tokenize else text  # the template writes those itself

    def close(self) -> None:
        """End the processes that render."""
        self._renderers.close()

    def _own(self) -> ChatTemplate:
        with self._lock:
            if self._template is None:
                self._template = ChatTemplate.find(self._files, renderers=self._renderers)
        if self._template is None:
            raise RequestError(
                f"{self._files.path.name} has no chat template, so it continues prompts only; give one as chat_template"
            )
        return self._template

    def _other(self, source: str) -> ChatTemplate:
        if not isinstance(source, str):
            raise RequestError(f"chat_template is a {type(source).__name__}; it must be a template's text")
        found = special_tokens(self._files.tokenizer_settings())
        tokens = {name: text for name, text in found.items() if text is not None}
        try:
            return ChatTemplate(source, tokens, self._renderers)
        except Exception as error:  # Python's compiler fails in many ways
            raise RequestError(f"chat_template is no template that can be used: {error}") from error


def plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it. Raises RequestError for what is none, and for parts that are not text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] is {message!r}; it must be a mapping with a role")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        for i, part in enumerate(content):
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise RequestError(f"messages[{index}].content[{i}] is {part!r}; models here read parts of text only")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, (str, type(None))):
        raise RequestError(f"messages[{index}].content is {content!r}; it must be a text or a list of parts")
    plain = {**message, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(index, i, call) for i, call in enumerate(message["tool_calls"])]
    return plain


def plain_call(name: str, given: Any, call_id: str | None, wants_json: bool) -> dict[str, Any]:
    """A call of the history. Most templates take its arguments as an object, and write its JSON themselves.

    given: its arguments, as an object or as JSON. wants_json: the template takes JSON. Raises RequestError.
    """
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
    return {"type": "function", "function": {"name": name, "arguments": arguments}} | (
        {} if call_id is None else {"id": call_id}
    )


def plain_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool: with parameters, which most templates ask for, and without what is not said to models."""
    said = {key: value for key, value in function.items() if key != "strict"}
    return {"type": "function", "function": said | {"parameters": said.get("parameters") or NO_PARAMETERS}}


def _plain_call(index: int, i: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"messages[{index}].tool_calls[{i}] is {call!r}; it must have a function with a name")
    return plain_call(function["name"], function.get("arguments"), call.get("id"), wants_json=False)


def _plain_tool(i: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"tools[{i}] is {tool!r}; it must be {{'type': 'function', 'function': {{'name': ...}}}}")
    return plain_tool(function)


def find_chat_tokenizer(where: Where) -> ChatTokenizer | None:
    """A model's tokenizer, or None where it has none: such a model takes and gives token ids."""
    files = files_of(where)
    return ChatTokenizer(files) if files.has_tokenizer else None
