"""Dialect: a model's syntax of tool calls and reasoning, found in its chat template or named by an option."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from quire.errors import ConfigError
from quire.server.tools import families
from quire.server.tools.families import Read
from quire.server.tools.parser import AnswerParser, Writer
from quire.server.tools.reader import Wait
from quire.server.tools.values import Schema

T = TypeVar("T")


class Layout(NamedTuple):
    """The fixed texts around calls in an answer, for a grammar."""

    trigger: str  # beginning of `begin`, or of `head` without a `begin`; empty: calls begin the answer
    begin: str  # before all calls
    head: str  # before each call's name
    middle: str  # between a call's name and its arguments
    tail: str  # after a call's arguments
    between: str | None  # between two calls; None: only one call is possible
    end: str  # after all calls
    arguments: str = "json"  # their format: json, xml, glm, python or gemma


@dataclass(frozen=True)
class Syntax:
    """A family's syntax of calls."""

    read: Read
    layout: Layout
    marks: tuple[str, ...] = ()  # the syntax's own texts, which may be special tokens
    id_size: int = 24  # characters of a call's id


class ReasoningMarks(NamedTuple):
    """The texts around reasoning."""

    begin: str
    end: str


OBJECT = ('{"name": "', '", "arguments": ')
CALL_TAGS = ("<tool_call>", "</tool_call>")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
HARMONY = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")
HERMES = Syntax(
    families.json_between({"<tool_call>": ("</tool_call>",)}),
    Layout("<tool_call>", "", '<tool_call>\n{"name": "', OBJECT[1], "}\n</tool_call>", "\n", ""),
    CALL_TAGS,
)


def _xml(opening: str, closing: str) -> Syntax:
    head, tail = f"{opening}\n<function=", f"</function>\n{closing}"
    return Syntax(
        families.xml((opening, closing)),
        Layout(opening, "", head, ">\n", tail, "\n", "", "xml"),
        (opening, closing, "<function=", "</function>", "<parameter=", "</parameter>"),
    )


def _glm(middle: str) -> Syntax:
    layout = Layout("<tool_call>", "", "<tool_call>", middle, "</tool_call>", "\n", "", "glm")
    return Syntax(families.glm, layout, (*CALL_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))


def _array(brackets: dict[str, tuple[str, ...]], begin: str, end: str) -> Syntax:
    """Return the syntax of an array of objects. brackets: accepted texts around it; begin, end: those of a grammar."""
    trigger = next(mark for mark in brackets if begin.startswith(mark))
    layout = Layout(trigger, begin, *OBJECT, "}", ", ", end)
    return Syntax(
        families.json_between(brackets), layout, (*brackets, *(end for one in brackets.values() for end in one))
    )


def _python(brackets: dict[str, str], begin: str, between: str, end: str) -> Syntax:
    trigger = next((mark for mark in brackets if begin.startswith(mark)), "")
    layout = Layout(trigger, begin, "", "(", ")", between, end, "python")
    return Syntax(families.pythonic(brackets), layout, (*brackets, *brackets.values()))


def _mistral(layout: Layout) -> Syntax:
    return Syntax(families.mistral, layout, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), id_size=9)


def _gemma(begin: str, end: str, quote: str) -> Syntax:
    layout = Layout(begin, "", f"{begin}call:", "{", "}" + end, "", "", "gemma")
    return Syntax(families.gemma(begin, end, quote), layout, (begin, end, quote))


PHI = {"functools": (), "<|tool_call|>": ("<|/tool_call|>",)}
# By vLLM's names, if it has them.
SYNTAXES: dict[str, Syntax] = {
    "hermes": HERMES,
    "qwen3_coder": _xml(*CALL_TAGS),
    "seed_oss": _xml("<seed:tool_call>", "</seed:tool_call>"),
    "llama3_json": Syntax(
        families.json_anywhere,
        Layout(OBJECT[0], "", OBJECT[0], '", "parameters": ', "}", "; ", ""),
        ("<|python_tag|>",),
    ),
    "pythonic": _python({}, "[", ", ", "]"),
    "llama4_pythonic": _python({"<|python_start|>": "<|python_end|>"}, "[", ", ", "]"),
    "lfm2": _python({"<|tool_call_start|>": "<|tool_call_end|>"}, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": _python({"<function_calls>": "</function_calls>"}, "<function_calls>\n", "\n", "\n</function_calls>"),
    "gemma": _python({"```tool_code": "```"}, "```tool_code\n", "\n", "\n```"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "mistral": _mistral(Layout("[TOOL_CALLS]", "", "[TOOL_CALLS]", "[ARGS]", "", "", "")),
    "mistral_json": _mistral(Layout("[TOOL_CALLS]", "[TOOL_CALLS] [", *OBJECT, "}", ", ", "]")),
    "granite": _array({"<|tool_call|>": (), "<tool_call>": ()}, "<|tool_call|>[", "]"),
    "phi4": _array(PHI, "<|tool_call|>[", "]<|/tool_call|>"),
    "phi4_mini_json": _array(PHI, "functools[", "]"),
    "deepseek_v3": Syntax(
        families.deepseek,
        Layout(
            DEEPSEEK[0],
            DEEPSEEK[0],
            f"{DEEPSEEK[1]}function{DEEPSEEK[2]}",
            "\n```json\n",
            f"\n```{DEEPSEEK[3]}",
            "\n",
            DEEPSEEK[4],
        ),
        DEEPSEEK,
    ),
    "deepseek_v31": Syntax(
        families.deepseek,
        Layout(DEEPSEEK[0], DEEPSEEK[0], DEEPSEEK[1], DEEPSEEK[2], DEEPSEEK[3], "", DEEPSEEK[4]),
        DEEPSEEK,
    ),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "openai": Syntax(
        families.harmony,
        Layout("", "", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", None, ""),
        HARMONY,
    ),
}
THINK = ReasoningMarks("<think>", "</think>")
ANALYSIS = ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>")
REASONING_MARKS: dict[str, ReasoningMarks] = {
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "qwen3": THINK,
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningMarks("<|channel>thought\n", "<channel|>"),
    "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
    "openai_gptoss": ANALYSIS,
}
# Patterns of the chat templates of a family's calls, the most specific first.
SIGNS: tuple[tuple[str, str], ...] = (
    (r"<\|channel\|>", "openai"),
    (r"<\|tool_call>", "gemma4"),
    (r"<start_function_call>", "functiongemma"),
    (r"<｜tool▁calls▁begin｜>(?s:.*)```json", "deepseek_v3"),
    (r"<｜tool▁calls▁begin｜>", "deepseek_v31"),
    (r"\[TOOL_CALLS\](?s:.*)\[ARGS\]", "mistral"),
    (r"\[TOOL_CALLS\]", "mistral_json"),
    (r"</arg_value>\\n|<arg_key>[^\n]*\n|</arg_key>\s*\n", "glm45"),
    (r"<arg_key>", "glm47"),
    (r"<seed:tool_call>", "seed_oss"),
    (r"<function=", "qwen3_coder"),
    (r"functools\[", "phi4_mini_json"),
    (r"<\|/tool_call\|>", "phi4"),
    (r"<\|tool_call\|>", "granite"),
    (r"<\|tool_call_start\|>", "lfm2"),
    (r"<function_calls>", "olmo3"),
    (r"<\|python_start\|>", "llama4_pythonic"),
    (r"<tool_call>", "hermes"),
    (r"tool_code", "gemma"),
    (r"\[\w+\(\w+=", "pythonic"),
    (r"<\|python_tag\|>|ipython(?s:.*)\"parameters\": ", "llama3_json"),
)
SIGNS_OF_REASONING: tuple[tuple[str, str], ...] = (
    (r"<\|channel\|>analysis|<\|channel\|>", "openai_gptoss"),
    (r"<\|channel>thought", "gemma4"),
    (r"\[THINK\]", "mistral"),
    (r"<seed:think>", "seed_oss"),
    (r"</?think>", "qwen3"),
    (r"Here is my thought process", "granite"),
)


@dataclass(frozen=True)
class Dialect:
    """A model's syntax of calls and reasoning."""

    syntax: Syntax | None = None  # None: the model is not known to call functions
    reasoning: ReasoningMarks | None = None  # None: the model is not known to reason
    wants_json: bool = False  # its template does not encode the arguments of earlier calls, so it needs them as JSON

    @classmethod
    def find(cls, template: str | None, tools: str | None, reasoning: str | None) -> Dialect:
        """Return the dialect of a chat template, or the one that options name.

        `tools`, `reasoning`: names in `SYNTAXES` and `REASONING_MARKS`, "none", or None to detect them.
        Raises ConfigError for other names.
        """
        source = template or ""
        return cls(
            _found("tool_call_parser", tools, source, SIGNS, SYNTAXES),
            _found("reasoning_parser", reasoning, source, SIGNS_OF_REASONING, REASONING_MARKS),
            "tool_calls" in source and "tojson" not in source and ".items()" not in source,
        )

    def parser(
        self, functions: Mapping[str, Schema], special: tuple[str, ...], *, may_call: bool, begins: str
    ) -> AnswerParser:
        """Return a parser for an answer.

        functions: the parameters of each. special: the texts of special tokens, which are hidden unless they are part
        of the syntax. begins: "thinking" or "saying" if the prompt ends within reasoning or text, else empty.
        """
        writer = Writer(functions)
        read: Read = families.plain
        marks = ""
        if self.syntax is not None and (may_call or self.reasoning is ANALYSIS):
            read, marks = self.syntax.read, "\n".join(self.syntax.marks)
        if self.reasoning is not None:
            marks += "\n".join(self.reasoning)
        return AnswerParser(writer, self._run(writer, read, begins), _hidden(special, marks))

    def _run(self, writer: Writer, read: Read, begins: str) -> Wait[None]:
        reader, reasoning = writer.reader, self.reasoning
        if reasoning is ANALYSIS:
            if begins:
                take = writer.think if begins == "thinking" else writer.say
                yield from reader.until(("<|end|>", "<|call|>", "<|return|>"), take)
        elif reasoning is not None and begins != "saying":
            reader.mark()
            yield from reader.space()
            if (yield from reader.match(reasoning.begin)) or begins == "thinking":
                reader.unmark()
                yield from reader.until((reasoning.end,), writer.think)
            else:
                reader.rewind(reader.unmark())
        yield from read(writer)

    def begins(self, prompt: str, continued: str | None) -> str:
        """Return the `begins` of `parser` for a prompt. continued: the text of the message to continue, if any."""
        if self.reasoning is None:
            return ""
        begin, end = self.reasoning.begin.rstrip(), self.reasoning.end
        if continued is not None:
            return "thinking" if continued.rfind(begin) > continued.rfind(end) else "saying"
        last = prompt.rstrip()
        return (
            "thinking"
            if last.endswith(begin)
            else "saying"
            if last.endswith(end) and self.reasoning is not ANALYSIS
            else ""
        )


@lru_cache(maxsize=16)
def _hidden(special: tuple[str, ...], marks: str) -> tuple[str, ...]:
    """Return the special tokens that are not part of a syntax. Cached, since some vocabularies have thousands."""
    return tuple(one for one in special if one not in marks)


def _found(
    option: str, name: str | None, source: str, signs: tuple[tuple[str, str], ...], known: Mapping[str, T]
) -> T | None:
    """Return the entry that an option names, or that of the first pattern found in a template, or None."""
    if name is None:
        return next((known[one] for sign, one in signs if re.search(sign, source)), None)
    if name != "none" and name not in known:
        raise ConfigError(f"{option} is {name!r}; it must be 'none' or one of {', '.join(known)}")
    return known.get(name)
