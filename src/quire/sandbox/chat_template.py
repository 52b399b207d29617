"""Chat templates: convert messages to the text format that a model was trained on."""

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

MAX_CHARACTERS = 2**22  # limit of a rendered text
MAX_TEMPLATES = 2  # rendered at the same time
MAX_SECONDS = 2.0  # of CPU time
MAX_WAIT = 5  # factor of MAX_SECONDS for the wall time, if the machine has other work
MEMORY = 2**29  # bytes
PROGRAM = Path(__file__).with_name("template_program.py")  # imports transformers, so nothing here imports it
# Names that a request's variables cannot have: the arguments of transformers' function, and those it passes to
# templates.
RESERVED = {"conversations", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
            "return_assistant_tokens_mask", "documents"}  # fmt: skip
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def make_renderers(seconds: float = MAX_SECONDS, memory: int = MEMORY) -> Sandbox:
    """Return the processes in which templates are rendered.

    seconds: CPU time of each rendering. memory: bytes for each.
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

    transformers renders it, in a separate process that starts with the first rendering, or with `start`.
    """

    def __init__(self, source: str, variables: Mapping[str, str], renderers: Sandbox | None = None) -> None:
        """variables: names that every rendering gets, such as the special tokens.

        renderers: from `make_renderers`, if templates are to share them. Raises jinja2.TemplateError, or an error of
        Python, if the text is not a valid template.
        """
        check(source)
        self.source = source
        self._variables = dict(variables)
        self._renderers = renderers or make_renderers()

    @classmethod
    def find(cls, where: Where, override: Path | None = None, renderers: Sandbox | None = None) -> ChatTemplate | None:
        """Return the template of a model, or of the file `override` instead; None if the model has none.

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
        except Exception as bad:  # untrusted text can fail in many ways, including in Python's compiler
            line = f"line {bad.lineno}: " if isinstance(bad, TemplateSyntaxError) else ""
            raise error(f"{name} is not a usable template: {line}{bad}") from bad

    def start(self) -> None:
        """Start a process, so that the first rendering need not wait for it. Raises SandboxFailed."""
        self._renderers.start()

    def close(self) -> None:
        """Stop the processes."""
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
        """Return the text of a chat. Messages, tools and variables are plain data, as in JSON.

        add_generation_prompt: end where the model's answer begins. variables: additional variables of the template.
        continue_final_message: end where the last message's text does, so that the model continues it. Raises
        RequestError if the template does not support such messages, takes too long or renders too much text;
        SandboxFailed if no template can be rendered. May take seconds in the worst case.
        """
        if taken := sorted((RESERVED | self._variables.keys()).intersection(variables or ())):
            raise RequestError(f"a chat template's variables must not be named {taken[0]!r}, which has its own meaning")
        request = {
            **(variables or {}),
            # Templates test for keys, and print None values.
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
    """{% generation %} marks an assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the contents."""
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def check(source: str) -> None:
    """Compile a template like transformers, without evaluating it. Raises the error of the compiler.

    A server thus reports an invalid template at its start, before a process has loaded transformers. Jinja evaluates
    constants when it compiles, which a template can make take for ever: this disables that.
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
    return value  # without a context, Jinja does not evaluate printed expressions


# --------------------------------------------------------------------------------------------------- files


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the text of each special token by name; None if the model has no such token."""
    return {name: _text(settings.get(name)) for name in SPECIAL_TOKENS}


def _text(token: object) -> str | None:
    """Return a special token's text; the token is a string, or an object with the string and its options."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None
