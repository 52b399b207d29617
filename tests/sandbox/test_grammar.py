"""Structured output on the embedded model, and what a grammar may not do to a server."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from quire import LLM
from quire.errors import RequestError
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.requests import make_requests
from quire.request import Request, SamplingParams, StructuredOutputsParams
from quire.sandbox import grammar as grammar_module
from quire.sandbox.grammar import ALLOWANCE, ALLOWANCE_A_TOKEN, MAX_SIZE, GrammarGuide, Grammars, Spec
from quire.sandbox.process import OutOfCpuTime, OutOfTime, Process, Sandbox, SandboxFailed

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ž"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ARITHMETIC = r"""
start: sum
sum: product (("+" | "-") product)~0..2
product: atom ("*" atom)?
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_blocks=1024, max_num_seqs=64)


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Iterator[Grammars]:
    made = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids)
    yield made
    made.close()


NUM_REMEMBERED = 64
Job = tuple[RequestOutput, list[Request]]


def asked(llm: LLM, name: str, guide: GrammarGuide | None, **sampling: Any) -> Job:
    params = SamplingParams(**({"max_tokens": 300} | sampling))
    output, requests = make_requests(name, None, llm.tokenizer.encode("x = "), params)
    for request in requests:
        request.guide = guide and guide.copy()
    return output, requests


def generate(llm: LLM, jobs: list[Job]) -> list[CompletionOutput]:
    """What each sample of each job got."""
    processor = OutputProcessor(llm.engine, llm.tokenizer)
    for output, requests in jobs:
        for request in requests:
            processor.add(request, output, deque())
    while llm.engine.has_work:
        list(processor.process(llm.engine.step()))
    return [sample for output, _ in jobs for sample in output.outputs]


def texts(llm: LLM, guide: GrammarGuide, count: int, **sampling: Any) -> list[str]:
    """Whole ones, of different seeds."""
    found = generate(llm, [asked(llm, f"{i}", guide, seed=i, **sampling) for i in range(count)])
    assert {sample.finish_reason for sample in found} <= {"stop", "length"}
    return [sample.text for sample in found if sample.finish_reason == "stop"]


def mask_of(guide: GrammarGuide) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(guide.allowed().view(np.uint8), bitorder="little")).tolist())


def follow(guide: GrammarGuide, llm: LLM, text: str) -> None:
    for token in llm.tokenizer.encode(text)[1:]:
        assert token in mask_of(guide)
        guide.accept(token)


# ------------------------------------------------------------------------------------------------ what comes out


def test_objects_can_be_parsed(llm: LLM, grammars: Grammars) -> None:
    found = texts(llm, grammars.compile(Spec("json_object")), 32, max_tokens=100)
    assert len(found) > 10
    assert all(isinstance(json.loads(text), dict) for text in found)
    assert len(set(found)) > 5


def test_siblings_go_their_own_ways(llm: LLM, grammars: Grammars) -> None:
    samples = generate(llm, [asked(llm, "s", grammars.compile(Spec.of_schema(PERSON)), seed=1, n=3)])
    assert len({sample.text for sample in samples}) == 3
    for person in (json.loads(sample.text) for sample in samples):
        assert list(person) == ["name", "age", "tags"]
        assert 0 <= person["age"] <= 150


PATTERNS = (
    r"\d{3}-\d{4}",
    r"(yes|no|maybe)",
    r"[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8}){1,2}",
    r'"[^"\n]{0,20}"',
    "[\u4e00-\u9fff]{2,5}",
    "(🙂|🙃){2,4}",
    r"a/b\.c(\n|\t)?",
    r"^anchored$",
    r"",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regular_expressions(llm: LLM, grammars: Grammars, pattern: str) -> None:
    found = texts(llm, grammars.compile(Spec("regex", pattern)), 8, max_tokens=80)
    assert len(found) == 8
    assert all(re.fullmatch(pattern, text) for text in found)


def test_grammars_of_lark(llm: LLM, grammars: Grammars) -> None:
    found = texts(llm, grammars.compile(Spec("grammar", ARITHMETIC)), 32)
    assert len(found) > 16
    for text in found:
        assert re.fullmatch(r"[0-9+*()-]+", text)
        ast.parse(text, mode="eval")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "array", "object"]
    kind = rng.choice(kinds if depth < 2 else kinds[:6])
    if kind == "string":
        low = rng.randint(0, 4)
        return {"type": kind, "minLength": low, "maxLength": low + rng.randint(0, 9)}
    if kind in ("integer", "number"):
        low = rng.randint(-500, 500)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "enum":
        return {"enum": rng.sample(["é", "two\nlines", 3, -1.5, None, True, [1], {"k": 2}], rng.randint(1, 5))}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": kind, "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "object":
        names = rng.sample(["a", "b c", "ü", 'quo"te', "d\\e"], rng.randint(0, 4))
        return {
            "type": kind,
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    return {"type": kind}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in schema["enum"])
    kind = schema["type"]
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind in ("integer", "number"):
        is_kind = isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
        return is_kind and schema["minimum"] <= value <= schema["maximum"]
    if kind == "array":
        in_bounds = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return in_bounds and all(conforms(item, schema["items"]) for item in value)
    if kind == "object":
        properties = schema["properties"]
        named = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(properties)
        return named and all(conforms(item, properties[name]) for name, item in value.items())
    return isinstance(value, bool) if kind == "boolean" else value is None


def test_random_schemas(llm: LLM, grammars: Grammars) -> None:
    rng = random.Random(5)
    schemas = [random_schema(rng) for _ in range(60)]
    jobs = [
        asked(llm, f"{i}", grammars.compile(Spec.of_schema(schema)), seed=i, temperature=i % 3, max_tokens=100)
        for i, schema in enumerate(schemas)
    ]
    ended = 0
    for schema, sample in zip(schemas, generate(llm, jobs), strict=True):
        assert sample.error is None
        if sample.finish_reason == "stop":
            assert conforms(json.loads(sample.text), schema), (schema, sample.text)
            ended += 1
    assert ended > 45  # a number may have any number of digits after its point


@pytest.mark.parametrize(
    "draft", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]
)
def test_what_pydantic_writes(llm: LLM, grammars: Grammars, draft: str) -> None:
    schema = {
        "$schema": draft,
        "$defs": {
            "Point": {"properties": {"x": {"title": "X", "type": "integer"}}, "required": ["x"], "type": "object"}
        },
        "title": "Shape",
        "description": "…",
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Point"}, "name": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["at", "name"],
    }
    follow(grammars.compile(Spec.of_schema(schema)), llm, '{"at": {"x": -12}, "name": null}')


INNER = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = INNER | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (INNER, CLOSED),
        ({"properties": {"properties": INNER}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"$defs": {"x": INNER}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        ({"type": "array", "items": {"anyOf": [INNER, {"type": "null"}]}},
         {"type": "array", "items": {"anyOf": [CLOSED, {"type": "null"}]}}),
        ({"allOf": [INNER]}, {"allOf": [CLOSED]}),  # how pydantic may write a reference with a default
        *((one, one) for one in (
            {"type": "object"},  # any object, such as a dict of Python
            {"const": INNER},
            INNER | {"additionalProperties": {"type": "string"}},
            INNER | {"patternProperties": {"^x": {"type": "string"}}},
            INNER | {"anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
            {"allOf": [INNER, {"properties": {"b": {}}}]},
        )),
    ],
)  # fmt: skip
def test_objects_are_closed_unless_the_schema_says_otherwise(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = deepcopy(schema)
    for given in (schema, json.dumps(schema)):
        assert json.loads(Spec.of(StructuredOutputsParams(json=given)).text) == expected
        assert json.loads(Spec.of(StructuredOutputsParams(json=given), is_closed=False).text) == schema
    assert schema == before


def test_a_closed_object_has_no_further_key(llm: LLM, grammars: Grammars) -> None:
    guides = [grammars.compile(Spec.of(StructuredOutputsParams(json=INNER), is_closed=each)) for each in (False, True)]
    for guide in guides:
        follow(guide, llm, '{"a": 1')
    comma = llm.tokenizer.encode(",")[-1]
    assert [comma in mask_of(guide) for guide in guides] == [True, False]


def test_there_is_little_white_space_unless_a_schema_asks_for_it(llm: LLM, grammars: Grammars) -> None:
    guide = grammars.compile(Spec.of_schema(PERSON))
    for text in (json.dumps({"name": "x", "age": 3, "tags": ["a", "b"]}), '{"name":"x","age":3,"tags":["a","b"]}'):
        own = guide.copy()
        follow(own, llm, text)
        assert own.done
    for text in ("{", '{"name":', '{"name": "x",'):
        own = guide.copy()
        follow(own, llm, text)
        may = {llm.tokenizer.decode([token]) for token in mask_of(own)}
        assert not any(piece.startswith(("\n", "  ", "\t")) for piece in may)
    loose = grammars.compile(Spec.of_schema(PERSON | {"x-guidance": {"whitespace_flexible": True}}))
    follow(loose, llm, '{\n    "name": "x",\n')


def test_end_tokens(llm: LLM, grammars: Grammars) -> None:
    """Allowed where a text may end. A model without one never gets to draw one."""
    [end] = llm.engine.eos_token_ids
    whole = grammars.compile(Spec.of_schema({"type": "integer"}))
    assert end not in mask_of(whole)
    follow(whole, llm, "12")
    assert end in mask_of(whole)
    assert not whole.done
    endless = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, [])
    guide = endless.compile(Spec.of_schema({"type": "array", "items": {"type": "integer"}}))
    follow(guide, llm, "[12]")
    assert guide.done
    guide = endless.compile(Spec.of_schema({"type": "integer"}))
    follow(guide, llm, "12")
    assert end not in mask_of(guide)
    endless.close()


def test_a_vocabulary_unlike_the_tokenizers(llm: LLM) -> None:
    """What the one has beyond the other is never drawn."""
    own = llm.engine.vocab_size
    for size in (own - 100, own + 100):
        other = Grammars(llm.tokenizer.json(), size, llm.engine.eos_token_ids)
        anything = other.compile(Spec("grammar", r"start: /(.|\n)*/"))
        assert max(mask_of(anything)) < min(own, size)
        assert len(mask_of(anything)) > own / 2
        other.close()


# ------------------------------------------------------------------------------------------------ what is refused


def chain(length: int) -> str:
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


REFUSED: dict[str, tuple[Spec, str]] = {
    "look-ahead": (Spec("regex", "(?=a)b"), "look-around, including look-ahead and look-behind, is not supported"),
    "back-reference": (Spec("regex", r"(a)\1"), "regex cannot be followed: backreferences are not supported"),
    "open group": (Spec("regex", "("), "unclosed group"),
    "no text": (Spec("regex", r"[^\s\S]"), "regex cannot be followed: there is no such text"),
    "half a character": (Spec("regex", "a\ud800"), "surrogates not allowed"),
    "parentheses": (Spec("regex", "(" * 30_000 + ")" * 30_000), "exceed the maximum number of nested"),
    "optional groups": (Spec("regex", "[ab]?" * 3_000), "regex cannot be followed: lexer precomputation failed"),
    "long": (Spec("regex", "a" * (MAX_SIZE + 1)), "regex has 65537 characters; it may have at most 65536"),
    "type": (Spec.of_schema({"type": "strin"}), "json_schema cannot be followed: Invalid type: strin"),
    "keyword": (Spec.of_schema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: \\["uniqueItems"\\]'),
    "bounds": (Spec.of_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum .5. is greater"),
    "itself": (Spec.of_schema({"$ref": "#"}), "json_schema cannot be followed: there is no such text"),
    "pattern": (Spec.of_schema({"type": "string", "pattern": "^(?!a).*$"}), "look-around"),
    "no schema": (Spec("json_schema", "[]"), "Expecting object schema"),
    "number": (Spec("json_schema", '{"minimum": 1e999}'), "number out of range"),
    "chain": (Spec("grammar", chain(5_000)), "it takes too much memory, or is too deeply nested, to be compiled"),
    "no start": (Spec("grammar", 'a: "b"'), "grammar cannot be followed: no start rule found"),
    "unknown name": (Spec("grammar", "start: b"), 'unknown name: "b"'),
    "import": (Spec("grammar", "start: A\n%import .secret.A"), "Unknown common regex"),
    "terminal": (Spec("grammar", 'start: A\nA: A "x"'), 'circular reference in token "A" definition'),
    "panic": (Spec("grammar", 'start: a::0\na::_: "x" a::incr(_)'), "grammar cannot be followed: panic"),
}


@pytest.mark.parametrize(("spec", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(
    grammars: Grammars, spec: Spec, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a short sentence, without a word on the server's own streams, and as often as it is asked for."""
    for _ in range(2):
        with pytest.raises(RequestError, match=reason) as caught:
            grammars.compile(spec)
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    grammars.compile(Spec("regex", "good"))


def test_schemas_that_are_no_json() -> None:
    for schema, reason in (
        (nested(1_000_0), "json_schema is nested more than 100 levels deep"),
        ({"const": float("nan")}, "json_schema is not JSON"),
        ({"const": {1, 2}}, "json_schema is not JSON"),
    ):
        with pytest.raises(RequestError, match=reason):
            Spec.of_schema(schema)


NAMES = [f"p{i}" for i in range(900)]
BOUNDED = {
    "quantifiers": Spec("regex", "(a{1,1000}){1,1000}"),
    "dots": Spec("regex", "(.*.*)*" * 10),
    "minItems": Spec.of_schema({"type": "array", "minItems": 10**9}),
    "lengths": Spec.of_schema({"type": "string", "minLength": 10**5, "maxLength": 10**9}),
    "enum": Spec.of_schema({"enum": [f"number {i}" for i in range(3_000)]}),
    "required": Spec.of_schema({"properties": {name: {} for name in NAMES}, "required": NAMES}),
    "tree": Spec.of_schema({"$defs": {"n": {"properties": {"l": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
    "doubling": Spec.of_schema(
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}},
         "$ref": "#/$defs/d0"}
    ),
    "repeated rules": Spec("grammar", 'start: x{1000000000}\nx: "a" | "b" x'),
    "ambiguous": Spec("grammar", 'start: start start | start "a" | "a"'),
}  # fmt: skip


def test_what_is_large_is_followed_or_ends_with_an_error(llm: LLM, grammars: Grammars) -> None:
    jobs = [asked(llm, name, grammars.compile(spec), max_tokens=40) for name, spec in BOUNDED.items()]
    [alone] = generate(llm, [asked(llm, "plain", None, seed=1, max_tokens=40)])
    *found, plain = generate(llm, [*jobs, asked(llm, "plain", None, seed=1, max_tokens=40)])
    assert plain == alone
    for sample in found:
        assert (sample.finish_reason == "error") == (sample.error is not None)
        assert sample.error is None or sample.error.startswith("RequestError: ")


def test_a_grammar_that_outgrows_its_limits_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: no limit of time is met before."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}
    patient = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids, seconds=200.0)
    guide = patient.compile(Spec.of_schema(many))
    set_pace(monkeypatch, 0.0)
    [sample] = generate(llm, [asked(llm, "r", guide, seed=1)])
    patient.close()
    message = "RequestError: json_schema cannot be followed: Parser Error: Current row has .* items"
    assert re.match(message, str(sample.error))


def test_a_grammar_that_takes_too_long_ends_its_request(
    llm: LLM, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = grammars.compile(Spec("grammar", ARITHMETIC))
    monkeypatch.setattr(grammar_module, "ALLOWANCE", 0.0)
    monkeypatch.setattr(grammar_module, "ALLOWANCE_A_TOKEN", 0.0)
    [sample] = generate(llm, [asked(llm, "r", guide)])
    message = r"RequestError: grammar takes too long to be followed: .* s for 1 tokens"
    assert re.fullmatch(message, str(sample.error))


def set_pace(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each token of a grammar take that long."""
    clock = SimpleNamespace(thread_time=itertools.count(0.0, seconds).__next__)
    monkeypatch.setattr(grammar_module, "time", clock)


def test_copies_share_one_allowance(llm: LLM, grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many samples a request asks for, and however fast the others were before."""
    guide, other = (grammars.compile(Spec("regex", "(a|b){40}")) for _ in range(2))
    copies = [guide.copy() for _ in range(32)]
    copies += [copies[-1].copy() for _ in range(32)]
    [token] = llm.tokenizer.encode("a")[1:]
    set_pace(monkeypatch, 0.0)
    for each in copies * 20:
        each.accept(token)
    set_pace(monkeypatch, ALLOWANCE / 49.5 + ALLOWANCE_A_TOKEN)
    for each in copies[:49]:
        each.accept(token)
    with pytest.raises(RequestError, match=r"regex takes too long to be followed: .* s for 1330 tokens"):
        copies[49].accept(token)
    jobs = [asked(llm, "slow", guide, n=16), asked(llm, "other", other, n=2, max_tokens=3)]
    found = generate(llm, jobs)
    assert [sample.finish_reason for sample in found] == ["error"] * 16 + ["length"] * 2


def test_draft_tokens_take_nothing_of_the_allowance(
    llm: LLM, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a guide that is slow at present is not followed along them, also after reasoning."""
    guide = grammars.compile(Spec("regex", "(a|b){40}"))
    [token] = llm.tokenizer.encode("a")[1:]
    set_pace(monkeypatch, ALLOWANCE + 2 * ALLOWANCE_A_TOKEN)
    walker = guide.for_drafts()
    assert walker is not None
    with pytest.raises(RequestError, match="takes too long"):
        walker.accept(token)
    set_pace(monkeypatch, 2 * ALLOWANCE_A_TOKEN)
    guide.accept(token)
    assert guide.for_drafts() is None
    set_pace(monkeypatch, 0.0)
    guide.accept(token)
    assert guide.for_drafts() is not None, "it is fast again"


def test_nothing_is_fetched(grammars: Grammars) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        for schema in (
            {"$ref": f"{address}x.json"},
            {"$id": address, "$ref": "other.json"},
            {"$schema": address, "type": "object"},
            {"$ref": "file:///etc/hostname"},
        ):
            with pytest.raises(RequestError, match="does not fetch resources"):
                grammars.compile(Spec.of_schema(schema))
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_tokenizer_that_gives_no_bytes() -> None:
    words = FastTokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(RequestError, match="no grammar can be followed with this model's tokenizer: can't determine"):
        Grammars(words.to_str(), 2, []).compile(Spec("json_object"))


# ------------------------------------------------------------------------------------------------ the trial


# Compiling it takes hours, and ever more memory. Which limit it meets first depends on the machine, unless one is tiny.
FOR_HOURS = {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]}


def test_slow_grammars_are_given_up(llm: LLM) -> None:
    hasty = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids, seconds=0.02)
    # 0.01 s of CPU time, or 0.02 s on a clock, which a busy machine may come to first.
    with pytest.raises(RequestError, match=r"json_schema cannot be followed: it is not compiled within 0\.0[12] s"):
        hasty.compile(Spec.of_schema(FOR_HOURS))
    hasty.close()


def test_after_one_that_was_given_up(llm: LLM, long: bool) -> None:
    seconds = {} if long else {"seconds": 0.8}
    patient = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids, **seconds)
    for _ in range(2 if long else 1):
        with pytest.raises(RequestError, match=r"cannot be followed: it (is not compiled|takes too much memory)"):
            patient.compile(Spec.of_schema(FOR_HOURS))
    assert patient.compile(Spec("regex", "a|b")).allowed().any()
    patient.close()


def test_many_threads(llm: LLM, grammars: Grammars) -> None:
    """What each gets is its own."""
    specs = [Spec("regex", f"{i % 7}x{{{i % 7 + 1}}}") for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        guides = list(pool.map(grammars.compile, specs))
    for i, guide in enumerate(guides):
        follow(guide, llm, f"{i % 7}" + "x" * (i % 7 + 1))
        assert guide.done


def test_trials_are_remembered(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(Sandbox, "ask", lambda self, grammar: tried.append(grammar) or "")
    monkeypatch.setattr(grammar_module, "NUM_REMEMBERED", NUM_REMEMBERED)
    fresh = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids)
    first = Spec("regex", "first")
    for i in range(NUM_REMEMBERED):
        fresh.compile(first)
        fresh.compile(Spec("regex", f"{i}"))
    assert len(tried) == NUM_REMEMBERED + 1
    for i in reversed(range(NUM_REMEMBERED)):
        fresh.compile(Spec("regex", f"{i}"))
    assert len(tried) == NUM_REMEMBERED + 2
    fresh.compile(Spec("json_object"))
    assert len(tried) == NUM_REMEMBERED + 2


def test_what_is_known_is_told_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good grammar that took no time, and one that was refused; not one that took long."""
    tried: list[str] = []

    def ask(_: Sandbox, grammar: str) -> str:
        tried.append(grammar)
        if json.loads(grammar) == "bad":
            raise OutOfCpuTime(5.0)
        return ""

    monkeypatch.setattr(Sandbox, "ask", ask)
    monkeypatch.setattr(Spec, "grammar", lambda self: json.dumps(self.text))
    matcher = grammar_module.make_matcher
    good = LLMatcher.grammar_from_regex("a")
    monkeypatch.setattr(grammar_module, "make_matcher", lambda tokenizer, grammar: matcher(tokenizer, good))
    clock = iter([0.0, 0.01, 1.0, 2.0, 2.5, 2.51, 3.0, 3.01, 4.0, 4.01])
    monkeypatch.setattr(grammar_module, "time", SimpleNamespace(perf_counter=clock.__next__))
    fresh = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids)
    quick, slow, bad = (Spec("regex", text) for text in ("quick", "slow", "bad"))
    assert fresh.compile_if_quick(Spec("json_object")) is not None
    assert [fresh.compile_if_quick(spec) for spec in (quick, slow, bad)] == [None] * 3
    fresh.compile(quick)
    fresh.compile(slow)
    for _ in range(3):
        with pytest.raises(RequestError, match="not compiled within"):
            fresh.compile(bad)
    assert fresh.compile_if_quick(quick) is not None
    assert fresh.compile_if_quick(slow) is None
    with pytest.raises(RequestError, match="not compiled within"):
        fresh.compile_if_quick(bad)
    assert len(tried) == 3
    fresh.compile(slow)
    assert fresh.compile_if_quick(slow) is not None  # it had only been a busy moment
    assert len(tried) == 3


@pytest.mark.parametrize(
    ("failure", "error"), [(OutOfTime(10.0), RequestError), (SandboxFailed("no process"), SandboxFailed)]
)
def test_what_says_nothing_about_a_grammar_is_not_remembered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, failure: Exception, error: type[Exception]
) -> None:
    def ask(_: Sandbox, grammar: str) -> str:
        raise failure

    fresh = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids)
    spec = Spec("regex", "abc")
    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "ask", ask)
        with pytest.raises(error):
            fresh.compile(spec)
    monkeypatch.setattr(Sandbox, "ask", lambda *_: "")
    assert fresh.compile_if_quick(spec) is None
    assert not fresh.compile(spec).done


def test_grammars_are_tried_side_by_side(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "num_trials", lambda: 3)
    fresh = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids)
    all_there, used = threading.Barrier(3), set()

    def ask(process: Process, grammar: str) -> str:
        used.add(id(process))
        all_there.wait(20)
        return ""

    monkeypatch.setattr(Process, "ask", ask)
    with ThreadPoolExecutor(3) as pool:
        guides = list(pool.map(fresh.compile, [Spec("regex", f"{i}") for i in range(3)]))
    assert (len(guides), len(used)) == (3, 3)
    for i in range(2):
        monkeypatch.setattr(Process, "ask", lambda process, grammar: used.add(id(process)) or "")
        used.clear()
        fresh.compile(Spec("regex", f"a{i}"))
        fresh.compile(Spec("regex", f"b{i}"))
        assert len(used) == 1  # one process is enough for one after the other
    fresh.close()
