"""Grammars of calls: whatever a model draws under one is read as a call of the request's functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from quire.errors import RequestError
from quire.models import EMBEDDED
from quire.sandbox.grammar import Grammars, Spec
from quire.sandbox.thinking import Thinking, ThinkingGuide
from quire.server.tools.dialect import ANALYSIS, SYNTAXES, Dialect
from quire.server.tools.grammar import Demand, Function, grammar_of
from quire.server.tools.parser import Answer, gathered

# Bounds stand where a syntax quotes its texts; elsewhere they are refused.
QUOTED = {"maxLength": 5}
ENDS = ["<|endoftext|>"]
MARKS = [
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_call>",
    "</tool_call>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "[TOOL_CALLS]",
    "[ARGS]",
    "</think>",
]


def functions(quotes: bool) -> tuple[Function, ...]:
    text: dict[str, Any] = {"type": "string"} | (QUOTED if quotes else {})
    properties = {
        "city": text,
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["c", "f"], "description": "of the answer"},
        "deep": {"type": "boolean"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/digit"}, "maxItems": 2},
    }
    weather = {
        "type": "object",
        "properties": properties,
        "required": ["unit", "deep"],
        "additionalProperties": False,
        "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 3}},
    }
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return (
        Function("weather", weather, True, "tools[0].function.parameters"),
        Function("now", nothing, True, "tools[1].function.parameters"),
    )


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    """The embedded model's, with a few tokens that families have."""
    made = FastTokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    made.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return made


@pytest.fixture(scope="module")
def grammars(tokenizer: FastTokenizer) -> Iterator[Grammars]:
    ends = [tokenizer.token_to_id(end) for end in ENDS]
    made = Grammars(tokenizer.to_str(), tokenizer.get_vocab_size(), ends)
    yield made
    made.close()


def allowed(mask: NDArray[np.int32], size: int) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])


def drawn(tokenizer: FastTokenizer, grammars: Grammars, lark: str, seed: int, closing: str) -> tuple[str, bool]:
    """A text that follows a grammar, and whether it has ended. closing: ends a text within it that has no quotes."""
    guide = grammars.compile(Spec("tools", lark))
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(ENDS[0])
    draw, tokens, queue = np.random.default_rng(seed), list[int](), list[int]()
    while not guide.done and len(tokens) < 400:
        choices = allowed(guide.allowed(), size)
        if end in choices and (len(choices) == 1 or draw.random() < 0.4):
            return tokenizer.decode(tokens, skip_special_tokens=False), True
        if not queue and closing and len(choices) > size // 2 and draw.random() < 0.3:
            queue = tokenizer.encode(closing, add_special_tokens=False).ids
        token = queue.pop(0) if queue else int(draw.choice(choices))
        if token not in choices or token == end:
            queue = []
            continue
        tokens.append(token)
        guide.accept(token)
    return tokenizer.decode(tokens, skip_special_tokens=False), guide.done


CLOSING = {"xml": "\n</parameter>\n", "glm": "</arg_value>\n", "gemma": '<|"|>'}


def closing_of(syntax: str) -> str:
    """What ends a text without quotes."""
    own = {"openai": "<|end|><|start|>assistant", "functiongemma": "<escape>"}
    return own.get(syntax, CLOSING.get(SYNTAXES[syntax].layout.arguments, ""))


def read(dialect: Dialect, text: str) -> Answer:
    parameters = {one.name: one.parameters for one in functions(quotes=False)}
    parser = dialect.parser(parameters, (), may_call=True, begins="")
    return gathered(parser.feed(text) + parser.finish())


def assert_follows(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    assert name in ("weather", "now")
    if name == "now":
        assert found == {}
        return
    assert {"unit", "deep"} <= set(found) <= {"city", "days", "unit", "deep", "list"}
    assert found["unit"] in ("c", "f")
    assert isinstance(found["deep"], bool)
    assert isinstance(found.get("city", ""), str)
    assert found.get("days", 0) in range(10)
    assert all(one in range(4) for one in found.get("list", []))


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_required_calls_are_right(syntax: str, tokenizer: FastTokenizer, grammars: Grammars) -> None:
    layout = SYNTAXES[syntax].layout
    dialect = Dialect(SYNTAXES[syntax], ANALYSIS if syntax == "openai" else None)
    known = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    num_ended = 0
    for has_many in (False, True):
        lark = grammar_of(dialect, Demand(functions(layout.arguments in ("json", "python")), True, has_many), known)
        for seed in range(3):
            text, has_ended = drawn(tokenizer, grammars, lark, seed, closing_of(syntax))
            answer = read(dialect, text)
            num_ended += has_ended
            assert answer.content == "" or not has_ended, text
            if has_ended:
                assert 1 <= len(answer.calls) <= (400 if has_many else 1)
            for name, arguments in answer.calls if has_ended else answer.calls[:-1]:
                assert_follows(name, arguments)
    assert num_ended >= 2


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_call_that_begins_in_a_text_is_right(syntax: str, tokenizer: FastTokenizer, grammars: Grammars) -> None:
    """As the model may write what it likes, a text with a call is taken, and one with a wrong call is not."""
    layout = SYNTAXES[syntax].layout
    dialect = Dialect(SYNTAXES[syntax], ANALYSIS if syntax == "openai" else None)
    known = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    few = functions(layout.arguments in ("json", "python"))
    lark = grammar_of(dialect, Demand(few, False, True), known)
    required = grammar_of(dialect, Demand((few[1],), True, False), known)
    call, has_ended = drawn(tokenizer, grammars, required, 0, closing_of(syntax))
    assert has_ended
    before = "" if syntax in ("openai", "pythonic", "llama4_pythonic") else "Let me look.\n"
    for text, is_right in ((before + call, True), (before + call.replace("now", "new"), False)):
        guide, is_taken = grammars.compile(Spec("tools", lark)), True
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            if token not in allowed(guide.allowed(), tokenizer.get_vocab_size()):
                is_taken = False
                break
            guide.accept(token)
        assert is_taken == is_right, (text, lark)
        if is_right:
            assert tokenizer.token_to_id(ENDS[0]) in allowed(guide.allowed(), tokenizer.get_vocab_size()) or guide.done


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_the_only_call_ends_the_answer(syntax: str, tokenizer: FastTokenizer, grammars: Grammars) -> None:
    """Its arguments are whatever the syntax can write, where they need not follow a schema."""
    layout, end = SYNTAXES[syntax].layout, tokenizer.token_to_id(ENDS[0])
    dialect = Dialect(SYNTAXES[syntax], ANALYSIS if syntax == "openai" else None)
    known = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    weather, now = functions(layout.arguments in ("json", "python"))
    free = (weather._replace(is_strict=False, parameters={"type": "object"}), now)
    lark = grammar_of(dialect, Demand(free, False, False), known)
    strict = grammar_of(dialect, Demand((weather,), True, False), known)
    call = next(
        text
        for seed in range(20)
        if (found := drawn(tokenizer, grammars, strict, seed, closing_of(syntax)))[1] and (text := found[0])
    )
    before = "" if syntax in ("openai", "pythonic", "llama4_pythonic") else "Let me look.\n"
    guide, size = grammars.compile(Spec("tools", lark)), tokenizer.get_vocab_size()
    for token in tokenizer.encode(before + call, add_special_tokens=False).ids:
        assert token in allowed(guide.allowed(), size), (before + call, lark)
        guide.accept(token)
    assert guide.done or list(allowed(guide.allowed(), size)) == [end], (call, lark)
    [[name, arguments]] = read(dialect, before + call).calls
    assert_follows(name, arguments)
    plain = grammars.compile(Spec("tools", lark))
    if syntax != "openai":  # whose texts have a channel of their own
        for token in tokenizer.encode("Nothing to call.", add_special_tokens=False).ids:
            assert token in allowed(plain.allowed(), size)
            plain.accept(token)
        assert end in allowed(plain.allowed(), size)


def test_references_that_multiply_are_refused() -> None:
    both = {
        str(i): {"type": "object", "properties": {k: {"$ref": f"#/$defs/{i + 1}"} for k in "ab"}} for i in range(15)
    }
    parameters = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": both | {"15": {"type": "null"}}}
    one = Function("f", parameters, True, "tools[0].function.parameters")
    with pytest.raises(RequestError, match="more than 4096 rules"):
        grammar_of(Dialect(SYNTAXES["gemma4"]), Demand((one,), True, False), {})


@pytest.mark.parametrize(
    ("syntax", "schema", "words"),
    [
        ("qwen3_coder", {"a": {"type": "string", "pattern": "x+"}}, "properties.a has pattern"),
        ("glm45", {"a": {"type": "string", "minLength": 3}}, "properties.a has minLength"),
        ("gemma4", {"a": {"type": ["string", "null"]}}, "properties.a has no single type"),
        ("gemma4", {"a": {"$ref": "#/nowhere"}}, "refers to none"),
        ("gemma4", {"a": {"$ref": "#/properties/a"}}, "refers to none"),
        ("gemma4", {"a": {"type": "object", "properties": {"b": {"$ref": "#"}}}}, "nested"),
        ("qwen3_coder", {"a>b": {"type": "integer"}}, "a name that"),
        ("pythonic", {"a b": {"type": "integer"}}, "a name that"),
        ("qwen3_coder", {"a": 5}, "is not a schema"),
    ],
)
def test_what_a_syntax_cannot_guarantee_is_refused(syntax: str, schema: dict[str, Any], words: str) -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": schema, "required": ["a"]}
    if "$ref" in str(schema) and "nested" in words:
        parameters["properties"]["a"]["properties"]["b"] = {"$ref": "#/properties/a"}
    one = Function("f", parameters, True, "tools[0].function.parameters")
    with pytest.raises(RequestError, match=words):
        grammar_of(Dialect(SYNTAXES[syntax]), Demand((one,), True, False), {})


# ------------------------------------------------------------------------------------------------- reasoning


def guided(thinking: Thinking, tokens: list[int], inner: ThinkingGuide | None = None) -> list[list[int]]:
    """What may be drawn before each token, of 64 tokens of which 63 ends a text."""
    every = np.full(2, -1, np.int32)
    guide = ThinkingGuide(thinking, inner, every, [63], bytes)
    found = []
    for token in tokens:
        found.append(allowed(guide.allowed(), 64).tolist())
        assert token in found[-1]
        twin = guide.copy()
        guide.accept(token)
        twin.accept(token)
        assert (twin.allowed() == guide.allowed()).all()
        assert twin.done == guide.done
    return found


def test_reasoning_ends_after_its_limit_of_tokens() -> None:
    every = list(range(64))
    one = Thinking((60,), (61,), has_begun=True, limit=3)
    assert guided(one, [1, 2, 3, 61, 5, 63]) == [every] * 3 + [[61]] + [every] * 2
    assert guided(one, [1, 61, 5]) == [every] * 3  # it ended by itself
    several = Thinking((50, 51), (60, 61, 62), has_begun=True, limit=2)
    assert guided(several, [1, 2, 60, 61, 62, 4]) == [every] * 2 + [[60], [61], [62], every]
    assert guided(several, [60, 61, 60, 61, 62, 4]) == [every] * 2 + [[60], [61], [62], every]
    early = Thinking((50, 51), (60, 61, 62), has_begun=True, limit=5)
    assert guided(early, [60, 61, 62, 4, 4, 4, 4]) == [every] * 7
    begins = Thinking((50, 51), (60,), has_begun=False, limit=1)
    assert guided(begins, [50, 51, 1, 60, 2]) == [every] * 3 + [[60], every]
    assert guided(begins, [50, 1, 51, 1, 1, 1]) == [every] * 6  # no reasoning
    assert guided(begins, [10, 32, 50, 51, 1, 60, 2]) == [every] * 5 + [[60], every]  # white space may come before them
    assert guided(begins, [10, 1, 50, 51, 1, 1]) == [every] * 6
    assert guided(Thinking((50,), (60,), has_begun=True, limit=0), [60, 1]) == [[60], every]


@pytest.mark.slow
def test_a_grammar_begins_after_reasoning(tokenizer: FastTokenizer, grammars: Grammars) -> None:
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("</think>")
    eos = tokenizer.token_to_id(ENDS[0])
    begin = tokenizer.token_to_id("<tool_call>")  # stands for the beginning of reasoning
    digits = [tokenizer.token_to_id(one) for one in "12"]
    for has_begun in (True, False):
        spec = Spec.of_reasoning(Thinking((begin,), (end,), has_begun, limit=None), Spec("regex", "[12]{2}"))
        guide = grammars.compile(spec)
        assert grammars.compile_if_quick(spec) is not None
        if not has_begun:
            assert set(digits) < set(allowed(guide.allowed(), size)) >= {begin}
            skipped = guide.copy()
            for digit in digits:
                skipped.accept(digit)
            assert skipped.done
            guide.accept(begin)
        for token in (digits[0], *tokenizer.encode("so }", add_special_tokens=False).ids, end):
            assert eos not in allowed(guide.allowed(), size)  # or there would be no answer
            assert not guide.done
            guide.accept(token)
        assert set(digits) <= set(allowed(guide.allowed(), size)) < set(range(size)) - {begin, eos}
        for digit in digits:
            guide.accept(digit)
        assert guide.done
