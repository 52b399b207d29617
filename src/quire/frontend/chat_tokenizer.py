"""Chats: conversations in the form that chat templates take, and a tokenizer with the model's template."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.frontend.tokenizer import Tokenizer
from quire.models.files import Where, files_of
from quire.sandbox.chat_template import ChatTemplate, make_renderers, special_tokens
from quire.sandbox.grammar import check_depth

IMAGE = {"type": "image"}  # a part of a message as templates take it
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class ChatTokenizer(Tokenizer):
    """A model's tokenizer with its chat template, which is rendered in a separate process."""

    def __init__(self, where: Where) -> None:
        """Read the tokenizer. The template is read at first use. Raises ModelError if the tokenizer is unreadable."""
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
        """Render a conversation as text.

        Args:
            messages: messages with a role and a content, in the form of OpenAI's API.
            tools: functions that the model may call, in the form of OpenAI's API.
            chat_template: the text of a template to use instead of the model's.
            chat_template_kwargs: additional variables of the template.
            add_generation_prompt: end the text where the model's answer begins.
            continue_final_message: end the text where the last message ends, so that the model continues it.

        Returns:
            The text, special tokens included.

        Raises:
            RequestError: there is no template, or it does not support these messages.
            ModelError: the model's template is invalid.

        Example:
            ```python
            from quire import LLM

            with LLM(num_blocks=128) as llm:
                print(llm.get_tokenizer().render([{"role": "user", "content": "hello"}]))
            ```
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
        """Render a conversation and tokenize it.

        Args:
            messages: messages with a role and a content, see `render`.
            tokenize: return token ids; False returns the text.
            **rendering: further arguments of `render`.

        Returns:
            The token ids, or the text with tokenize=False.

        Raises:
            RequestError: see `render`.
            ModelError: see `render`.
        """
        text = self.render(messages, **rendering)
        # The template writes the special tokens.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def close(self) -> None:
        """Stop the processes that render."""
        self._renderers.close()

    def _own(self) -> ChatTemplate:
        with self._lock:
            if self._template is None:
                self._template = ChatTemplate.find(self._files, renderers=self._renderers)
        if self._template is None:
            raise RequestError(f"{self._files.path.name} has no chat template; give one as chat_template")
        return self._template

    def _other(self, source: str) -> ChatTemplate:
        if not isinstance(source, str):
            raise RequestError(f"chat_template is a {type(source).__name__}; it must be a template's text")
        found = special_tokens(self._files.tokenizer_settings())
        tokens = {name: text for name, text in found.items() if text is not None}
        try:
            return ChatTemplate(source, tokens, self._renderers)
        except Exception as error:  # Python's compiler fails in many ways
            raise RequestError(f"chat_template is not a valid template: {error}") from error


def plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it. Raises RequestError if it is invalid or has parts other than text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] is {message!r}; it must be a mapping with a role")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        for i, part in enumerate(content):
            if part != IMAGE and (not isinstance(part, Mapping) or not isinstance(part.get("text"), str)):
                raise RequestError(f"messages[{index}].content[{i}] is {part!r}; it must be a text or an image")
        if IMAGE in content:
            content = [part if part == IMAGE else {"type": "text", "text": part["text"]} for part in content]
        else:
            content = "\n".join(part["text"] for part in content)
    elif not isinstance(content, (str, type(None))):
        raise RequestError(f"messages[{index}].content is {content!r}; it must be a text or a list of parts")
    plain = {**message, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(index, i, call) for i, call in enumerate(message["tool_calls"])]
    return plain


def plain_call(name: str, given: Any, call_id: str | None, wants_json: bool) -> dict[str, Any]:
    """Return a tool call of the history in the form that templates take.

    `given` is the call's arguments, as an object or as JSON. Most templates take an object and write its JSON
    themselves; `wants_json` means that this one takes JSON. Raises RequestError for an object that is nested too
    deeply.
    """
    if isinstance(given, dict):
        check_depth(given, "tool_calls.function.arguments")
        arguments: Any = json.dumps(given, ensure_ascii=False) if wants_json else given
    else:
        arguments = given or "{}"
        if not wants_json:
            with contextlib.suppress(ValueError, RecursionError):  # invalid JSON of a model is shown to it unchanged
                if isinstance(found := json.loads(arguments), dict):
                    check_depth(found)
                    arguments = found
    return {"type": "function", "function": {"name": name, "arguments": arguments}} | (
        {} if call_id is None else {"id": call_id}
    )


def plain_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with parameters, which most templates require, and without `strict`, which models do not see."""
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
    """Return a model's tokenizer, or None if it has none: such a model takes and returns token ids."""
    files = files_of(where)
    return ChatTokenizer(files) if files.has_tokenizer else None
