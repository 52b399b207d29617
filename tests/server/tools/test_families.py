"""What each family's syntax is read as: whole, in any pieces, cut off anywhere, and wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.server.tools.dialect import REASONING_MARKS, SIGNS, SIGNS_OF_REASONING, SYNTAXES, Dialect
from quire.server.tools.parser import Answer, gathered
from quire.server.tools.values import json_of_text
from tests.sandbox.chat_templates import TEMPLATES

Calls = Sequence[tuple[str, dict[str, Any]]]
TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "whole": {"type": "integer"},
        "part": {"type": "number"},
        "yes": {"type": "boolean"},
        "nothing": {"type": ["string", "null"]},
        "list": {"type": "array", "items": {"type": "string"}},
        "object": {"type": "object"},
    },
}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS: dict[str, Any] = {"get_weather": WEATHER, "types": TYPED, "clock": {"type": "object"}, "f": {}}


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dumped(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def arrayed(calls: Calls) -> str:
    return "[" + ", ".join(dumped(*call) for call in calls) + "]"


def xml(begin: str, end: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        def one(name: str, arguments: dict[str, Any]) -> str:
            inner = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
            return f"{begin}\n<function={name}>\n{inner}</function>\n{end}"

        return "\n".join(one(*call) for call in calls)

    return write


def glm(space: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        return "\n".join(
            f"<tool_call>{name}{space}"
            + "".join(
                f"<arg_key>{key}</arg_key>{space}<arg_value>{plain(value)}</arg_value>{space}"
                for key, value in arguments.items()
            )
            + "</tool_call>"
            for name, arguments in calls
        )

    return write


def python(begin: str, between: str, end: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        each = (f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
        return begin + between.join(each) + end

    return write


def gemma(begin: str, end: str, quote: str) -> Callable[[Calls], str]:
    def value(one: Any) -> str:
        if isinstance(one, str):
            return f"{quote}{one}{quote}"
        if isinstance(one, list):
            return "[" + ",".join(map(value, one)) + "]"
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in one.items()) + "}"
        return json.dumps(one)

    return lambda calls: "".join(f"{begin}call:{name}{value(arguments)}{end}" for name, arguments in calls)


def deepseek(inner: Callable[[str, str], str], between: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        each = (f"<｜tool▁call▁begin｜>{inner(n, json.dumps(a))}<｜tool▁call▁end｜>" for n, a in calls)
        return f"<｜tool▁calls▁begin｜>{between.join(each)}<｜tool▁calls▁end｜>"

    return write


def harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


WRITTEN: dict[str, Callable[[Calls], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{dumped(*call)}\n</tool_call>" for call in calls),
    "qwen3_coder": xml("<tool_call>", "</tool_call>"),
    "seed_oss": xml("<seed:tool_call>", "</seed:tool_call>"),
    "llama3_json": lambda calls: "; ".join(dumped(*call, "parameters") for call in calls),
    "pythonic": python("[", ", ", "]"),
    "llama4_pythonic": python("<|python_start|>[", ", ", "]<|python_end|>"),
    "lfm2": python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": python("<function_calls>\n", "\n", "\n</function_calls>"),
    "gemma": python("```tool_code\n", "\n", "\n```"),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a)}" for name, a in calls),
    "mistral_json": lambda calls: "[TOOL_CALLS] " + arrayed(calls),
    "granite": lambda calls: "<|tool_call|>" + arrayed(calls),
    "phi4": lambda calls: f"<|tool_call|>{arrayed(calls)}<|/tool_call|>",
    "phi4_mini_json": lambda calls: "functools" + arrayed(calls),
    "deepseek_v3": deepseek(lambda name, a: f"function<｜tool▁sep｜>{name}\n```json\n{a}\n```", "\n"),
    "deepseek_v31": deepseek(lambda name, a: f"{name}<｜tool▁sep｜>{a}", ""),
    "glm45": glm("\n"),
    "glm47": glm(""),
    "openai": harmony,
}
ONE = [("get_weather", {"city": "Paris", "days": 3})]
TWO = [*ONE, ("clock", {"zone": "Central Europe"})]
TYPES = {
    "text": "a",
    "whole": -7,
    "part": 2.5,
    "yes": True,
    "nothing": None,
    "list": ["x", "y z"],
    "object": {"a": {"b": [1, False]}},
}
ODD = 'say "hi" to\nO\'Neil\\ \t{é} [漢字] 🎉, ok </x> : <y> 1'
BEHAVIOURS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": ONE,
    "two": TWO,
    "types": [("types", TYPES)],
    "no arguments": [("f", {})],
    "none and some": [("f", {}), *ONE],
    "odd letters": [("types", {"text": ODD})],
    "empty text": [("types", {"text": ""})],
    "spaces": [("types", {"text": "  two  spaces "})],
}


def dialect(syntax: str | None, reasoning: str | None = None) -> Dialect:
    reasoning = "openai_gptoss" if syntax == "openai" else reasoning
    return Dialect(SYNTAXES[syntax] if syntax else None, REASONING_MARKS[reasoning] if reasoning else None)


def read(
    how: Dialect, pieces: Sequence[str], begins: str = "", special: tuple[str, ...] = (), may_call: bool = True
) -> Answer:
    parser = how.parser(FUNCTIONS, special, may_call=may_call, begins=begins)
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish()
    return gathered(found)


def cuts(text: str, seed: int) -> list[str]:
    """The text in pieces of random lengths."""
    draw, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        size = draw.choice([1, 1, 2, 3, 7, 20])
        pieces.append(text[at : at + size])
        at += size
    return pieces


def parsed(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


STRIDE = 3  # characters from one place where a text is cut in two to the next; 1 with --long


@pytest.fixture(scope="module", autouse=True)
def _all_places(long: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if long:
            patch.setattr(f"{__name__}.STRIDE", 1)
        yield


def assert_pieces_do_not_matter(how: Dialect, text: str, begins: str = "", special: tuple[str, ...] = ()) -> Answer:
    whole = read(how, [text], begins, special)
    assert read(how, list(text), begins, special) == whole
    for size in (3, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(how, pieces, begins, special) == whole, (text, size)
    for seed in range(12 if STRIDE == 1 else 4):
        assert read(how, cuts(text, seed), begins, special) == whole, (text, seed)
    for at in range(0, len(text), STRIDE):
        assert read(how, [text[:at], text[at:]], begins, special) == whole, (text, at)
    return whole


def test_all_syntaxes_are_tried() -> None:
    assert set(WRITTEN) == set(SYNTAXES)


@pytest.mark.slow
@pytest.mark.parametrize("syntax", WRITTEN)
def test_calls_are_read(syntax: str) -> None:
    how = dialect(syntax)
    for name, calls in BEHAVIOURS.items():
        found = assert_pieces_do_not_matter(how, WRITTEN[syntax](calls))
        assert parsed(found) == calls, name
        assert (found.content, found.reasoning) == ("", ""), name


@pytest.mark.slow
@pytest.mark.parametrize("syntax", WRITTEN)
def test_text_before_and_after_calls_is_kept(syntax: str) -> None:
    how, text = dialect(syntax), WRITTEN[syntax](TWO)
    said = "This says [1] {2} of 3 < 4 tools: nothing.\n\n  More.\n"
    if syntax == "openai":
        before = f"<|channel|>commentary<|message|>Let me look.\n<|end|><|start|>assistant{text}"
        said = f"<|channel|>final<|message|>{said}"
    else:
        before = f"Let me look.\n{text}"
    found = assert_pieces_do_not_matter(how, said)
    assert (found.content, found.calls) == (said.removeprefix("<|channel|>final<|message|>"), [])
    found = assert_pieces_do_not_matter(how, before)
    if syntax == "pythonic":  # a list within a text may be anything
        assert (found.content, found.calls) == (before, [])
    else:
        assert (found.content, parsed(found)) == ("Let me look.", TWO)
    if syntax != "openai":
        found = assert_pieces_do_not_matter(how, f"{text}\n\nDone.")
        assert (found.content, parsed(found)) == ("Done.", TWO)
    if syntax not in ("openai", "pythonic"):
        one = WRITTEN[syntax](ONE)
        found = assert_pieces_do_not_matter(how, f"Sure. {one} and\n{one}\tdone \n{one} \n")
        assert (found.content, parsed(found)) == ("Sure.  and\n\tdone", ONE * 3)


@pytest.mark.parametrize("syntax", WRITTEN)
def test_what_is_cut_off_does_not_look_whole(syntax: str) -> None:
    """At every place: no error, no call that was not begun, and arguments that can be read are the whole ones."""
    for calls in (TWO, BEHAVIOURS["types"], BEHAVIOURS["odd letters"]):
        how, text = dialect(syntax), WRITTEN[syntax](calls)
        for end in range(len(text)):
            found = read(how, [text[:end]])
            assert len(found.calls) <= len(calls)
            for call, (name, arguments) in zip(found.calls, calls, strict=False):
                assert call.name == name
                try:
                    shown = json.loads(call.arguments)
                except ValueError:
                    continue
                assert shown == arguments


@pytest.mark.parametrize("syntax", WRITTEN)
def test_random_text_is_read_to_its_end(syntax: str) -> None:
    """Pieces of the syntax in any order: no error, no endless loop, and any split is read alike."""
    how, draw = dialect(syntax), random.Random(5)
    marks = [
        *SYNTAXES[syntax].marks,
        *'{}[]()",:;=\n <>',
        '"name"',
        '"arguments"',
        "get_weather",
        "call:",
        "x=1",
        "null",
    ]
    for _ in range(60):
        text = "".join(draw.choice(marks) for _ in range(draw.randint(1, 30)))
        whole = read(how, [text])
        assert read(how, list(text)) == whole, text
        assert read(how, cuts(text, 1)) == whole, text


@pytest.mark.slow
@pytest.mark.parametrize("syntax", WRITTEN)
def test_what_is_deeply_nested_is_read_to_its_end(syntax: str) -> None:
    for inner in ("[", "{a:", '{"a":', "(", "f(a=", "{'a':[")[:: 1 if STRIDE == 1 else 2]:
        for text in (WRITTEN[syntax]([("types", {"list": 5})]), WRITTEN[syntax]([("types", {"text": "5"})])):
            nested = text.replace("5", inner * 2000)
            assert read(dialect(syntax), [nested]) == read(dialect(syntax), cuts(nested, 3))


def test_names_come_first_and_arguments_in_pieces() -> None:
    """As soon as a name, and what tells that it has ended, is there, the call begins."""
    for syntax, write in WRITTEN.items():
        parser = dialect(syntax).parser(FUNCTIONS, (), may_call=True, begins="")
        text = write([("types", {"text": "word " * 20})])
        more = {"openai": "<|constrain|>json<|message|>", "deepseek_v31": "<｜tool▁sep｜>", "mistral": "[ARGS]"}
        end = text.index("types") + len("types") + len(more.get(syntax, "")) + 1
        kinds = [piece.kind.value for piece in parser.feed(text[:end])]
        assert kinds[:1] == ["call"], syntax
        later = [piece for letter in text[end:] for piece in parser.feed(letter)]
        assert len([piece for piece in later if piece.kind.value == "arguments"]) >= (1 if "(" in text else 20), syntax


# Syntax, text, content, calls; arguments as text where they are no JSON.
ROWS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":[]}}</tool_call>', "", [("f", {"a": []})]),
    ("hermes", '<tool_call>\n{"arguments": {"name": "x"}, "name": "f"}\n</tool_call>', "", [("f", {"name": "x"})]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>', "", [("f", "hello")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "id": 7, "arguments": {}}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', "", [("f", "{a: 1}")]),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>', "",
     [("f", {}), ("g", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}', "",
     [("f", {}), ("g", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>', "",
     [("f", {"s": "</tool_call>"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2\t3\r\x00\x1f\x7f"}}</tool_call>', "",
     [("f", {"a": "1\n2\t3\r\x00\x1f\x7f"})]),
    ("hermes", '<tool_call>{"name": "f",\n\t"arguments": {\n"a\nb": [\n1]}}</tool_call>', "", [("f", {"a\nb": [1]})]),
    ("hermes", '<tool_call>{"arguments": {"a": "1\n2"}, "name": "f"}</tool_call>', "", [("f", {"a": "1\n2"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"1\\n2\\"}"}</tool_call>', "",
     [("f", {"a": "1\n2"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\d\\.\\\n \\n\\\\"}}</tool_call>', "",
     [("f", {"a": "\\d\\.\\\n \n\\"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "C:\\users\\new"}}</tool_call>', "",
     [("f", {"text": "C:\\users\new"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "\\usepackage{x}"}}</tool_call>', "",
     [("f", {"text": "\\usepackage{x}"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a\\u": "\\u12", "b": "\\u00e9\\uD83D\\ude00\\\\u"}}'
     "</tool_call>", "", [("f", {"a\\u": "\\u12", "b": "é😀\\u"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00', "", [("f", '{"a": "\\\\u00')]),
    ("hermes", "<tool_call>f()</tool_call>", "<tool_call>f()</tool_call>", []),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("hermes", "a <tool_call", "a <tool_call", []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", "text </tool_call> end", "text </tool_call> end", []),
    ("hermes", "1 <tool_ 2 <tool_call", "1 <tool_ 2 <tool_call", []),
    ("qwen3_coder", "<function=f>\n</function>", "", [("f", {})]),
    ("qwen3_coder", "<tool_call>\n<function=f></function></tool_call>", "", [("f", {})]),
    ("qwen3_coder", "<function=types><parameter=text>a</parameter></function>", "", [("types", {"text": "a"})]),
    ("qwen3_coder", "<function=types><parameter=whole>\nseven\n</parameter></function>", "",
     [("types", {"whole": "seven"})]),
    ("qwen3_coder", "<function=types><parameter=yes>True</parameter></function>", "", [("types", {"yes": True})]),
    ("qwen3_coder", "<function=types><parameter=nothing>null</parameter></function>", "",
     [("types", {"nothing": None})]),
    ("qwen3_coder", "<function=types><parameter=nothing>no</parameter></function>", "", [("types", {"nothing": "no"})]),
    ("qwen3_coder", "<function=types><parameter=text>null</parameter></function>", "", [("types", {"text": "null"})]),
    ("qwen3_coder", "<function=types><parameter=list>['a', 'b']</parameter></function>", "",
     [("types", {"list": ["a", "b"]})]),
    ("qwen3_coder", "<function=types><parameter=text>\n\n a\n\n</parameter></function>", "",
     [("types", {"text": "\n a\n"})]),
    ("qwen3_coder", "<function=types><parameter=text>\n<b>x</b>\n</function>", "", [("types", {"text": "<b>x</b>"})]),
    ("qwen3_coder", "<function=f><parameter=a>5</parameter></function>", "", [("f", {"a": "5"})]),
    ("qwen3_coder", '<function=f><parameter=a>{"b": 1}</parameter></function>', "", [("f", {"a": {"b": 1}})]),
    ("qwen3_coder", "<function=types><parameter=text>\n<a>\n</parameter>\n</a>\n</parameter>\n</function>", "",
     [("types", {"text": "<a>\n</parameter>\n</a>"})]),
    ("qwen3_coder", "<function=types>\n<parameter=text>\n</parameter>\n</parameter>\n</parameter>\n</function>\nSo.",
     "So.", [("types", {"text": ""})]),
    ("qwen3_coder", "<function=types><parameter=text>say </parameter> twice </parameter><parameter=whole>5</parameter>"
     "</function>", "", [("types", {"text": "say </parameter> twice ", "whole": 5})]),
    ("qwen3_coder", "<function=f><parameter=a>\n[1,\n</parameter>\n2]\n</parameter></function>", "",
     [("f", {"a": "[1,\n</parameter>\n2]"})]),
    ("qwen3_coder", "<tool_call><function=types><parameter=text>\na\n</function>\nb\n</parameter></function>"
     "</tool_call>", "", [("types", {"text": "a\n</function>\nb"})]),
    ("qwen3_coder", "<tool_call><function=types><parameter=text>\na\n</function></tool_call> So. <function=f>"
     "</function>", "So.", [("types", {"text": "a"}), ("f", {})]),
    ("qwen3_coder", "<tool_call><function=types><parameter=text>a</parameter></tool_call>\n<tool_call><function=types>"
     "<parameter=text>b</parameter></tool_call> So.", "So.", [("types", {"text": "a"}), ("types", {"text": "b"})]),
    ("qwen3_coder", "<function=types><parameter=text>\na\n</parameter>\nand", "",
     [("types", '{"text": "a\\n</parameter>\\nand')]),
    ("qwen3_coder", "<tool_call>\n<function=types>\n<parameter=text>\nhi\n</parameter>\n<tool_call>\n<function=f>\n"
     "</function>\n</tool_call> So.", "So.", [("types", {"text": "hi"}), ("f", {})]),
    ("qwen3_coder", "<function=types>\n<parameter=text>\nhi\n</parameter>\n<function=f>\n<parameter=a>\nx\n</parameter>"
     "\n</function> So.", "So.", [("types", {"text": "hi"}), ("f", {"a": "x"})]),
    ("qwen3_coder", "<tool_call><function=f><tool_call><function=types></function></tool_call>", "",
     [("f", {}), ("types", {})]),
    ("qwen3_coder", "<tool_call><function=f><function=types></function></tool_call>", "", [("f", {}), ("types", {})]),
    ("qwen3_coder", "<tool_call>\n<function=types>\n<parameter=text>\nhi\n</parameter>\n</parameter>\n</function>\n"
     "</tool_call> So.", "So.", [("types", {"text": "hi"})]),
    ("qwen3_coder", '<tool_call>\n<function=types>\n<parameter=text>\nhi\n</parameter>\n<parameter name="n">3'
     "</parameter>\n</function>\n</tool_call> So.", "So.", [("types", {"text": "hi"})]),
    ("qwen3_coder", '<function=types><parameter=text>\n<x>\n<parameter name="a">1</parameter>\n<parameter>\n2\n'
     "</parameter>\n</parameter>\n</function>", "",
     [("types", {"text": '<x>\n<parameter name="a">1</parameter>\n<parameter>\n2\n</parameter>'})]),
    ("qwen3_coder", "<function=types>\n<parameter=text>\nhi\n</parameter>,\n<parameter=whole>\n2\n</parameter>\n"
     "</function>", "", [("types", {"text": "hi", "whole": 2})]),
    ("qwen3_coder", "<function=types>\n<parameter=text>\nhi\n</function> after", "after", [("types", {"text": "hi"})]),
    ("qwen3_coder", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
    ("qwen3_coder", "<function=\nf>", "<function=\nf>", []),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama3_json", '{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama3_json", '{"name": "f", "parameters": {}};{"name": "f", "parameters": {}}', "", [("f", {}), ("f", {})]),
    ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "clock", "parameters": {}}', "",
     [("f", {}), ("clock", {})]),
    ("llama3_json", 'See: {"name": "f", "parameters": {}} Yes?', "See:  Yes?", [("f", {})]),
    ("llama3_json", 'A. {"name": "f", "parameters": {}}; B.', "A.  B.", [("f", {})]),
    ("llama3_json", '{"name": "f", "parameters": {}} I used {f} here.', "I used {f} here.", [("f", {})]),
    ("llama3_json", '{"name": "f", "parameters": {}} It had {"q": 1}', 'It had {"q": 1}', [("f", {})]),
    ("llama3_json", '{"name": "John", "age": 3}', '{"name": "John", "age": 3}', []),
    ("llama3_json", '{"parameters": {}}', '{"parameters": {}}', []),
    ("llama3_json", '{"type": 5, "name": "f"}', '{"type": 5, "name": "f"}', []),
    ("llama3_json", "{{{", "{{{", []),
    ("pythonic", "[f(a='x 1', b=-2.5e3)]", "", [("f", {"a": "x 1", "b": -2500.0})]),
    ("pythonic", "[ f ( a = 1 ) ]", "[ f ( a = 1 ) ]", []),
    ("pythonic", "[f( a = 1 , b = None )]", "", [("f", {"a": 1, "b": None})]),
    ("pythonic", "[f(a={'b': (1, 2)}, c=[[]])]", "", [("f", {"a": {"b": [1, 2]}, "c": [[]]})]),
    ("pythonic", "[f(a=true, b=null)]", "", [("f", {"a": True, "b": None})]),
    ("pythonic", "[f(a='it\\'s', b=\"\\\"\")]", "", [("f", {"a": "it's", "b": '"'})]),
    ("pythonic", '[f(a="""x "y" z""")]', "", [("f", {"a": 'x "y" z'})]),
    ("pythonic", "[get_weather('Paris', 3)]", "", [("get_weather", {"city": "Paris", "days": 3})]),
    ("pythonic", "[f(a=b'z')]", "", [("f", {"a": "b'z'"})]),
    ("pythonic", "[f(a=1e999)]", "", [("f", {"a": "inf"})]),
    ("pythonic", "[f(a=some.name)]", "", [("f", {"a": "some.name"})]),
    ("pythonic", "[f(a=1) and so", "and so", [("f", {"a": 1})]),
    ("pythonic", "[f(a=1), unknown(b=2)] ok", "unknown(b=2)] ok", [("f", {"a": 1})]),
    ("pythonic", "[unknown(a=1)]", "[unknown(a=1)]", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "  [f()]", "", [("f", {})]),
    ("lfm2", "<|tool_call_start|>[g(a=1)]<|tool_call_end|>", "", [("g", {"a": 1})]),
    ("lfm2", "<|tool_call_start|>none<|tool_call_end|>", "<|tool_call_start|>none<|tool_call_end|>", []),
    ("olmo3", "<function_calls>g(a=1)</function_calls>", "", [("g", {"a": 1})]),
    ("gemma", "```tool_code\n[g(a=1)]\n```\nSo.", "So.", [("g", {"a": 1})]),
    ("gemma", "```python\nf()\n```", "```python\nf()\n```", []),
    ("gemma4", "<|tool_call>call:a-b.c{}<tool_call|>", "", [("a-b.c", {})]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x, y}<|"|>,b:[]}<tool_call|>', "", [("f", {"a": "x, y}", "b": []})]),
    ("gemma4", '<|tool_call>call:f{m:{<|"|>3<|"|>:<|"|>n<|"|>}}<tool_call|>', "", [("f", {"m": {"3": "n"}})]),
    ("gemma4", "<|tool_call>call:f{a:108.,b:22.8}<tool_call|>", "", [("f", {"a": 108.0, "b": 22.8})]),
    ("gemma4", '<|tool_call>call:f{a:[[<|"|>x]<|"|>],1]}<tool_call|>', "", [("f", {"a": [["x]"], 1]})]),
    ("gemma4", "<|tool_call>f{}<tool_call|>", "", [("f", {})]),
    ("gemma4", "<|tool_call>{}<tool_call|>", "<|tool_call>{}<tool_call|>", []),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x', "", [("f", '{"a": "x')]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}", "", [("f", {})]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"name": "J"}, "name": "f"}]', "", [("f", {"name": "J"})]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]\nmore', "more", [("f", {})]),
    ("mistral", '[TOOL_CALLS] {"name": "f"}', '[TOOL_CALLS] {"name": "f"}', []),
    ("mistral", "[TOOL_CALLS] not json", "[TOOL_CALLS] not json", []),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]', "", [("f", {})]),
    ("granite", '<tool_call>[{"name": "f", "arguments": {}}]', "", [("f", {})]),
    ("granite", '<tool_call>{"name": "f", "arguments": {}}, and {g} is left', ", and {g} is left", [("f", {})]),
    ("granite", '<tool_call>[{"name": "f", "arguments": {}}, {"x": 1}] ok', ', {"x": 1}] ok', [("f", {})]),
    ("granite", "<|tool_call|>[]", "<|tool_call|>[]", []),
    ("phi4", '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>', "", [("f", {})]),
    ("phi4", 'functools[{"name": "f", "arguments": {}}]', "", [("f", {})]),
    ("phi4_mini_json", "functools are tools", "functools are tools", []),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", [("f", {})]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", []),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>", "", [("f", {})]),
    ("glm45", "<tool_call>f</tool_call>", "", [("f", {})]),
    ("glm45", "<tool_call> f \n</tool_call>", "", [("f", {})]),
    ("glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
    ("glm45", "<tool_call>types<arg_key>text</arg_key><arg_value>a</arg_value>b</arg_value>\n<arg_key>whole</arg_key>"
     "<arg_value>5</arg_value></tool_call>", "", [("types", {"text": "a</arg_value>b", "whole": 5})]),
    *((syntax, "<tool_call>types\n<arg_key>text</arg_key>\n<arg_value>hi</arg_value>,\n<arg_key>whole</arg_key>"
       "<arg_value>2</arg_value></tool_call>", "", [("types", {"text": "hi", "whole": 2})])
      for syntax in ("glm45", "glm47")),
    *((syntax, "<tool_call>types\n<arg_key>text</arg_key>\n<arg_value>hi</arg_value>\n<tool_call>f\n</tool_call> So.",
       "So.", [("types", {"text": "hi"}), ("f", {})]) for syntax in ("glm45", "glm47")),
    ("glm45", "<tool_call>f\n<tool_call>clock\n</tool_call>", "", [("f", {}), ("clock", {})]),
    ("glm45", "<tool_call>types<arg_key>text</arg_key><arg_value>a</arg_value>, b</arg_value></tool_call>", "",
     [("types", {"text": "a</arg_value>, b"})]),
    ("glm45", "<tool_call>types<arg_key>whole</arg_key><arg_value>x</arg_value></tool_call>", "",
     [("types", {"whole": "x"})]),
    ("openai", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", [("f", {})]),
    ("openai", '<|channel|>commentary to=python<|message|>{"a": 1}<|call|>', "", [("python", {"a": 1})]),
    ("openai", "<|channel|>final<|message|>Hi<|return|>", "Hi", []),
    ("openai", "<|channel|>commentary<|message|>1<|end|><|start|>assistant<|channel|>final<|message|>2", "1\n2", []),
    ("openai", "<|channel|>commentary<|message|>1<|end|><|start|>assistant<|channel|>commentary to=f<|message|>{}"
     "<|call|><|start|>assistant<|channel|>final<|message|>2", "1\n2", [("f", {})]),
    ("openai", "no channel", "no channel", []),
]  # fmt: skip


@pytest.mark.slow
def test_rows() -> None:
    assert len(ROWS) >= 95
    for syntax, text, content, calls in ROWS:
        found = assert_pieces_do_not_matter(dialect(syntax), text)
        shown = [
            (
                call.name,
                call.arguments if isinstance(arguments, str) and arguments != "hello" else json.loads(call.arguments),
            )
            for call, (_, arguments) in zip(found.calls, calls, strict=True)
        ]
        assert (found.content, shown) == (content, calls), (syntax, text, found)


@pytest.mark.parametrize("name", [name for name in REASONING_MARKS if name != "openai_gptoss"])
def test_reasoning_is_read(name: str) -> None:
    begin, end = REASONING_MARKS[name]
    how = dialect("hermes", name)
    call = WRITTEN["hermes"](ONE)
    for text, begins, expected in (
        (f"{begin}\nI think.\n{end}\n\nHi.\n", "", ("I think.", "Hi.\n")),
        (f"\n{begin}I think.{end}Hi.", "", ("I think.", "Hi.")),
        (f"I\n\nthink.\n{end}\n\nHi.", "thinking", ("I\n\nthink.", "Hi.")),
        (f"{begin}I think.{end}Hi.", "thinking", ("I think.", "Hi.")),
        (f"{begin}I think, and", "", ("I think, and", "")),
        (f"{begin}{end}Hi.", "", ("", "Hi.")),
        ("\nHi, no reasoning.", "", ("", "\nHi, no reasoning.")),
        (f"Hi {begin}this{end} later.", "", ("", f"Hi {begin}this{end} later.")),
        (f"{begin}this{end} is text.", "saying", ("", f"{begin}this{end} is text.")),
        (f"{begin}I look.{end}\n\n{call}", "", ("I look.", "")),
        (f"{begin}I would {call}.{end}No.", "", (f"I would {call}.", "No.")),
    ):
        found = assert_pieces_do_not_matter(how, text, begins)
        assert (found.reasoning, found.content) == expected, text
        assert (parsed(found) == ONE) == text.endswith("</tool_call>")
    assert read(how, [f"{begin}a{end}{call}"], may_call=False).content == call


def test_channels_are_read() -> None:
    how = dialect("openai")
    begin = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
    found = assert_pieces_do_not_matter(how, f"{begin}<|channel|>final<|message|>Hi.\n")
    assert (found.reasoning, found.content) == ("I think.", "Hi.\n")
    found = assert_pieces_do_not_matter(how, begin + harmony(ONE) + "<|start|>assistant" + begin)
    assert (found.reasoning, found.content, parsed(found)) == ("I think.\nI think.", "", ONE)
    found = assert_pieces_do_not_matter(how, begin + harmony(TWO))
    assert (found.reasoning, found.content, parsed(found)) == ("I think.", "", TWO)
    assert read(how, ["on with it<|end|>"], "saying").content == "on with it"
    assert read(how, ["and so<|end|><|start|>assistant<|channel|>final<|message|>x"], "thinking") == Answer(
        "and so", "x", []
    )


def test_special_tokens_are_hidden_but_for_the_syntax() -> None:
    special = ("<|im_end|>", "<|im_start|>", "<tool_call>", "<|eot|>", "<think>", "</think>")
    text = f"<think>a<|eot|>b</think>x<|im_end|>y <|im_ {WRITTEN['hermes'](ONE)}<|im_end|>"
    found = assert_pieces_do_not_matter(dialect("hermes", "qwen3"), text, special=special)
    assert (found.reasoning, found.content, parsed(found)) == ("ab", "xy <|im_", ONE)


REAL: dict[str, tuple[str | None, str | None]] = {  # what a template of each says, in its own words
    "chatml": (None, None),
    "gemma": (None, None),
    "llama3": ("llama3_json", None),
    "mistral": ("mistral_json", None),
    "qwen3": ("hermes", "qwen3"),
}
WORDS: dict[str, tuple[str, str | None, str | None]] = {
    "gpt-oss": ("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", "openai", "openai_gptoss"),
    "gemma 4": ("{{ '<|tool_call>call:' + f }}{{ '<|channel>thought\\n<channel|>' }}", "gemma4", "gemma4"),
    "functiongemma": ("<start_function_call>call:", "functiongemma", None),
    "deepseek v3": ("'<｜tool▁calls▁begin｜>' + '\\n```json\\n'", "deepseek_v3", None),
    "deepseek v3.1": ("<｜tool▁calls▁begin｜> </think>", "deepseek_v31", "qwen3"),
    "mistral 3.2": ("'[TOOL_CALLS]' + name + '[ARGS]' [THINK]", "mistral", "mistral"),
    "glm 4.6": ("<tool_call>{n}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n</think>", "glm45", "qwen3"),
    "glm 4.7": ("<tool_call>{n}<arg_key>{k}</arg_key><arg_value>{v}</arg_value>", "glm47", None),
    "qwen3-coder": ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", None),
    "seed-oss": ("<seed:tool_call>\n<function=f> <seed:think>", "seed_oss", "seed_oss"),
    "phi-4-mini": ("<|tool_call|>[...]<|/tool_call|>", "phi4", None),
    "phi-4 of vLLM": ("functools[{...}]", "phi4_mini_json", None),
    "granite 3": ("<|tool_call|> Here is my thought process:", "granite", "granite"),
    "granite 4": ("<tool_call>\n", "hermes", None),
    "lfm2": ("<|tool_call_start|>[", "lfm2", None),
    "olmo 3": ("<function_calls>", "olmo3", None),
    "llama 4": ("<|python_start|>", "llama4_pythonic", None),
    "llama 3.2": ("[func_name1(params_name1=params_value1)]", "pythonic", None),
    "gemma 3": ("```tool_code", "gemma", None),
}


def test_templates_name_their_family() -> None:
    for source, tools, reasoning in (*((TEMPLATES[n], *names) for n, names in REAL.items()), *WORDS.values()):
        found = Dialect.find(source, None, None)
        assert found.syntax is (SYNTAXES[tools] if tools else None), source[:80]
        assert found.reasoning == (REASONING_MARKS[reasoning] if reasoning else None), source[:80]
    assert {name for _, name in SIGNS} <= set(SYNTAXES)
    assert {name for _, name in SIGNS_OF_REASONING} <= set(REASONING_MARKS)
    assert Dialect.find(TEMPLATES["qwen3"], "none", "none") == Dialect()
    assert Dialect.find(None, "hermes", "granite").reasoning == REASONING_MARKS["granite"]
    assert Dialect.find("{{ m.tool_calls[0].function.arguments }}", None, None).wants_json
    assert not Dialect.find(TEMPLATES["qwen3"], None, None).wants_json
    with pytest.raises(ConfigError, match="tool_call_parser is 'hermse'; it must be 'none' or one of hermes, "):
        Dialect.find(None, "hermse", None)
    with pytest.raises(ConfigError, match="reasoning_parser is 'x'"):
        Dialect.find(None, None, "x")


def test_where_a_prompt_ends() -> None:
    how = dialect(None, "qwen3")
    assert how.begins("<|im_start|>assistant\n<think>\n", None) == "thinking"
    assert how.begins("<|im_start|>assistant\n<think>\n\n</think>\n\n", None) == "saying"
    assert how.begins("what is <think>?<|im_start|>assistant\n", None) == ""
    assert how.begins("…", "<think>I was") == "thinking"
    assert how.begins("…", "<think>a</think>I was") == "saying"
    assert how.begins("…", "I was") == "saying"
    assert dialect(None).begins("<think>", None) == ""


def test_types_of_hostile_schemas() -> None:
    wide: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/a"}] * 100}
    endless = {"properties": {"x": {"$ref": "#/properties/x"}, "y": wide}, "$defs": {"a": wide}}
    for key in ("x", "y", "z"):
        assert json_of_text("5", endless, key) == '"5"'
    assert json_of_text("5", {"properties": {"x": {"anyOf": [{"type": "null"}, {"type": "integer"}]}}}, "x") == "5"
    assert json_of_text("NaN", {"properties": {"x": {"type": "number"}}}, "x") == '"nan"'
    assert json_of_text("3.0", {"properties": {"x": {"type": "integer"}}}, "x") == "3.0"
    assert json_of_text("true", {"properties": {"x": {"type": "integer"}}}, "x") == '"true"'
    assert json_of_text("[" * 10_000, {}, "x") == json.dumps("[" * 10_000)
