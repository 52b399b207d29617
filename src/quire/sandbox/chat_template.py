"""Chat templates: from messages to the text that a model was taught to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.errors import ConfigError, ModelError, QuireError, RequestError
from quire.models.files import Where, files_of
from quire.models.template import read_template
from quire.sandbox.process import Died, Limits, OutOfTime, Sandbox

MAX_CHARACTERS = 2**22  # that a template may render
MAX_TEMPLATES = 2  # that are rendered at the same time
MAX_SECONDS = 2.0  # of CPU time
MAX_WAIT = 5  # times as many seconds in all, where the machine has other things to do
MEMORY = 2**29  # bytes
PROGRAM = Path(__file__).with_name("template_program.py")  # which imports transformers, so nothing here imports it
# What a request's variables cannot be: the arguments of transformers' function, and what it gives to templates.
RESERVED = {"conversations", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
            "return_assistant_tokens_mask", "documents"}  # fmt: skip
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def make_renderers(seconds: float = MAX_SECONDS, memory: int = MEMORY) -> Sandbox:
    """The processes in which templates are rendered.

    seconds: of CPU time for each rendering. memory: bytes for each.
    """
    limits = Limits(
        seconds=MAX_WAIT * seconds,
        cpu_seconds=seconds,
        memory=memory,
        stack=2**23,
        answer=12 * MAX_CHARACTERS + 4096,  # a character takes at most twelve bytes of JSON
    )
    return Sandbox(MAX_TEMPLATES, PROGRAM, limits, MAX_CHARACTERS)


class ChatTemplate:
    """One model's chat template. Any number of threads may use it.

    transformers renders it, in a process of its own. That process starts with the first rendering, or with `start`.
    """

    def __init__(self, source: str, variables: Mapping[str, str], renderers: Sandbox | None = None) -> None:
        """variables: what every rendering sees, such as the special tokens.

        renderers: from `make_renderers`, where templates are to share them. Raises jinja2.TemplateError, or what Python
        raises, for a text that is no template.
        """
        check(source)
        self.source = source
        self._variables = dict(variables)
        self._renderers = renderers or make_renderers()

    @classmethod
    def find(cls, where: Where, override: Path | None = None, renderers: Sandbox | None = None) -> ChatTemplate | None:
        """The template of a model, or the one of a file that is given instead of it; None: it has none.

        Raises ConfigError for a bad file, ModelError for a bad template of the model.
        """
        files = files_of(where)
        error: type[QuireError] = ModelError
        if override is not None:
            error = ConfigError
            name, source = f"chat_template {override}", read_template(override, error)
        elif (found := files.template()) is not None:
            name, source = found
        else:
            return None
        tokens = {name: text for name, text in special_tokens(files.tokenizer_settings()).items() if text is not None}
        try:
            return cls(source, tokens, renderers)
        except Exception as bad:  # what strangers write can fail in many ways, Python's compiler among them
            line = f"line {bad.lineno}: " if isinstance(bad, TemplateSyntaxError) else ""
            raise error(f"{name} is no template that can be used: {line}{bad}") from bad

    def start(self) -> None:
        """Start a process, so that the first rendering need not wait for it. Raises SandboxFailed."""
        self._renderers.start()

    def close(self) -> None:
        """End the processes."""
        self._renderers.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a chat. Messages, tools and variables are plain data, as JSON has it.

        add_generation_prompt: end where the model's answer begins. variables: what the template sees besides.
        continue_final_message: end where the last message's text does, so that the model goes on with it. Raises
        RequestError where the template does not take such messages, and where it takes too long or makes too much
        text; SandboxFailed where no template can be rendered. May take seconds in the worst case.
        """
        if taken := sorted((RESERVED | self._variables.keys()).intersection(variables or ())):
            raise RequestError(f"a chat template's variables must not be named {taken[0]!r}, which has its own meaning")
        request = {
            **(variables or {}),
            # Templates ask whether a key is there, and print a None that they find.
            "conversations": [[{k: v for k, v in message.items() if v is not None} for message in messages]],
            "tools": tools,
            "chat_template": self.source,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **self._variables,
        }
        try:
            answer: dict[str, str] = self._renderers.ask(request)
        except OutOfTime as error:
            answer = {"error": str(error)}
        except Died:
            answer = {"error": f"it makes more than {MAX_CHARACTERS:,} characters, or takes too much memory on the way"}
        if "raised" in answer:
            raise RequestError(answer["raised"])
        if "error" in answer:
            raise RequestError(f"the model's chat template cannot render these messages: {answer['error']}")
        return answer["text"]


# --------------------------------------------------------------------------------------------------- the check


class _Generation(Extension):
    """{% generation %} marks an assistant's text for those who train."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Its contents."""
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def check(source: str) -> None:
    """Compile a template as transformers would, and compute nothing of it. Raises what it fails with.

    A server says at its start that a template is none, before a process has loaded transformers. Jinja computes
    constants when it compiles, which a template can make take for ever: here it computes none.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
        finalize=_needs_a_context,
    )
    tree = environment.parse(source)
    for node in tree.find_all(nodes.EvalContextModifier):
        node.options = []
    environment.compile(tree, filename="<chat template>")


@pass_context
def _needs_a_context(_: object, value: object) -> object:
    return value  # without a context, Jinja computes nothing that it would print


# --------------------------------------------------------------------------------------------------- files


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """The text of each special token, by what it is for; None where the model has no such token."""
    return {name: _text(settings.get(name)) for name in SPECIAL_TOKENS}


def _text(token: object) -> str | None:
    """A special token's text: a string, or an object with the string and how it is split off."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None
