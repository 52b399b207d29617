"""Chat templates: from messages to the text that a model was taught to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from quire.errors import ConfigError, ModelError, QuireError, RequestError
from quire.models.weights import read_json
from quire.server.sandbox.template_sandbox import Raised, Refused, Sandbox

MAX_SOURCE = 2**20  # bytes of a template
MAX_CHARACTERS = 2**22  # that a template may render
MAX_TOLD = 500  # characters of an error that a template gives
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One model's chat template, compiled. Any number of threads may use it: each rendering has its own environment."""

    def __init__(self, source: str, code: CodeType, variables: Mapping[str, str]) -> None:
        """variables: what every rendering sees, such as the special tokens. See `compile` and `find`."""
        self.source = source
        self._code = code
        self._variables = dict(variables)

    @classmethod
    def compile(cls, source: str, variables: Mapping[str, str]) -> ChatTemplate:
        """A template from its text. Raises TemplateError where it is none."""
        sandbox = Sandbox()
        return cls(source, sandbox.compile(sandbox.parse_bounded(source), filename="<chat template>"), variables)

    @classmethod
    def find(cls, directory: Path, override: Path | None = None) -> ChatTemplate | None:
        """The template of a model's directory, or the one of a file that is given instead of it; None: it has none.

        Raises ConfigError for a bad file, ModelError for a bad template of the model.
        """
        path = directory / SETTINGS
        settings = tokenizer_settings(directory)
        tokens = {name: text for name, text in special_tokens(settings).items() if text is not None}
        own = directory / "chat_template.jinja"
        if override is not None:
            return cls._load(_read(override, ConfigError), tokens, f"chat_template {override}", ConfigError)
        if own.exists():
            return cls._load(_read(own, ModelError), tokens, str(own), ModelError)
        source = _default(settings.get("chat_template"))
        return None if source is None else cls._load(source, tokens, f"chat_template of {path}", ModelError)

    @classmethod
    def _load(cls, source: str, variables: Mapping[str, str], name: str, error: type[QuireError]) -> ChatTemplate:
        try:
            return cls.compile(source, variables)
        except Exception as bad:  # what strangers write can fail in many ways, Python's compiler among them
            line = f"line {bad.lineno}: " if isinstance(bad, TemplateSyntaxError) else ""
            raise error(f"{name} is no template that can be used: {line}{bad}") from bad

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a chat. Messages and tools are plain data, as JSON has it.

        add_generation_prompt: end where the model's answer begins. Raises RequestError where the template does not
        take such messages, and where it takes too long or makes too much text. May take seconds in the worst case.
        """
        sandbox = Sandbox()
        template = Template.from_code(sandbox, self._code, sandbox.globals)
        # Templates ask whether a key is there, and print a None that they find.
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        pieces, count = [], 0
        try:
            for piece in template.generate({**self._variables, "documents": None, **given}):
                pieces.append(piece)
                count += len(piece)
                sandbox.spend(1)
                if count > MAX_CHARACTERS:
                    raise Refused(f"it makes more than {MAX_CHARACTERS:,} characters")
        except Raised as error:
            raise RequestError(f"{error.message}"[:MAX_TOLD]) from None
        except Exception as error:  # a template can fail like any program
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            told = f"{kind}{error}"[:MAX_TOLD]
            raise RequestError(f"the model's chat template cannot render these messages: {told}") from error
        return "".join(pieces)


def tokenizer_settings(directory: Path) -> dict[str, Any]:
    """A model's tokenizer_config.json, empty where it has none. Raises ModelError where it cannot be read."""
    path = directory / SETTINGS
    return read_json(path) if path.exists() else {}


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """The text of each special token, by what it is for; None where the model has no such token."""
    return {name: _text(settings.get(name)) for name in SPECIAL_TOKENS}


def _text(token: object) -> str | None:
    """A special token's text: a string, or an object with the string and how it is split off."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _default(found: object) -> str | None:
    """A tokenizer_config.json's template: a string, or a list of named ones, of which "default" is meant."""
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _read(path: Path, error: type[QuireError]) -> str:
    try:
        data = path.read_bytes()
        if len(data) > MAX_SOURCE:
            raise error(f"chat_template {path} has {len(data)} bytes; the most is {MAX_SOURCE}")
        return data.decode()
    except (OSError, UnicodeDecodeError) as bad:
        raise error(f"chat_template {path} cannot be read: {bad}") from bad
