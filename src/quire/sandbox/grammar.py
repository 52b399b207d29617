"""Structured output: convert a client's constraints to masks of the tokens that the engine may draw, by llguidance."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.request import StructuredOutputsParams
from quire.sandbox import grammar_program
from quire.sandbox.grammar_program import make_matcher, make_tokenizer
from quire.sandbox.process import Died, Limits, OutOfCpuTime, OutOfTime, Sandbox
from quire.sandbox.thinking import Thinking, ThinkingGuide

MAX_SIZE = 2**16  # characters of a grammar
MAX_DEPTH = 100  # of a schema's nesting; llguidance's limit is 128
MAX_REASON = 300  # characters of an error report about a grammar
BY_NAME, LISTED = ("properties", "$defs", "definitions"), ("allOf", "anyOf", "oneOf", "prefixItems")  # hold schemas
OTHER_KEYS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}  # decide about further keys
JOINED = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}  # add to the properties next to them
GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # a rule in GBNF
LONG_WORD = re.compile(r"(\S{80})\S+")  # from the client's text
NUM_REMEMBERED = 4096  # grammars that need no further trial
MAX_TRIALS = 4  # grammars that are tried at the same time; fewer on fewer cores
# Limits of a trial in addition to time, in bytes. Threads of the server have at least twice that stack.
TRIAL = {"memory": 2**27, "stack": 2**20, "answer": 2**20}
QUICK = 0.02  # s; grammars that compile faster do not wait for slower ones
# CPU time that a guide and its copies may use together: per token, and in total beyond that. Most grammars need
# microseconds per token; ambiguous ones become slower and slower.
ALLOWANCE_A_TOKEN = 0.002  # s
ALLOWANCE = 0.25  # s


@dataclass(frozen=True)
class Spec:
    """The constraint on a text."""

    kind: str  # json_object, json_schema, regex, choice, grammar, tools or thinking
    # A JSON schema, a regular expression, JSON of a list of texts, or a grammar in llguidance's variant of Lark's
    # syntax, also for tools; for thinking, JSON of the reasoning's delimiters and of the Spec after it.
    text: str = ""

    @staticmethod
    def of(asked: StructuredOutputsParams, *, is_closed: bool = True) -> Spec:
        """Return the Spec of these parameters. Raises RequestError for a schema that is not plain JSON.

        is_closed: objects of a schema have no keys but those of their `properties`, see `closed`.
        """
        if asked.regex:
            return Spec("regex", asked.regex)
        if asked.grammar:
            return Spec("grammar", asked.grammar)
        if asked.choice:
            return Spec("choice", json.dumps(list(asked.choice)))
        if asked.json_object:
            return JSON_OBJECT
        schema: Any = asked.json or {}
        if isinstance(schema, str):
            with suppress(ValueError, RecursionError):  # if it cannot be read, llguidance gives the reason
                schema = json.loads(schema) if len(schema) <= MAX_SIZE else schema
            if not isinstance(schema, dict):
                return Spec("json_schema", str(asked.json))
        return Spec.of_schema(schema, is_closed=is_closed)

    @staticmethod
    def of_schema(schema: Mapping[str, Any], *, is_closed: bool = False) -> Spec:
        """Return the Spec of a JSON schema. Raises RequestError if it is not plain JSON. is_closed: see `closed`."""
        check_depth(schema)
        try:
            text = json.dumps(closed(schema) if is_closed else schema, allow_nan=False, ensure_ascii=False)
            return Spec("json_schema", text)
        except (TypeError, ValueError) as error:
            raise RequestError(f"json_schema is not JSON: {error}") from error

    @staticmethod
    def of_reasoning(thinking: Thinking, after: Spec | None) -> Spec:
        """Return the Spec of reasoning followed by the Spec `after`; None: by any text."""
        return Spec("thinking", json.dumps([asdict(thinking), None if after is None else [after.kind, after.text]]))

    def reasoning(self) -> tuple[Thinking, Spec | None]:
        """Return the arguments of `of_reasoning`."""
        found, after = json.loads(self.text)
        thinking = Thinking(tuple(found["begin"]), tuple(found["end"]), found["has_begun"], found["limit"])
        return thinking, None if after is None else Spec(*after)

    def grammar(self) -> str:
        """Return the grammar in llguidance's format. Raises RequestError if it cannot be read.

        A model that may write white space anywhere may write nothing else for ever. So at most one blank is allowed,
        where json.dumps has one, unless a schema's "x-guidance" specifies otherwise.
        """
        if len(self.text) > MAX_SIZE:
            raise RequestError(f"{self.kind} has {len(self.text)} characters; it may have at most {MAX_SIZE}")
        try:
            if self.kind == "regex":
                return LLMatcher.grammar_from_regex(self.text)
            if self.kind == "choice":
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(self.text))))
            if self.kind in ("grammar", "tools"):
                if self.kind == "grammar" and GBNF.search(self.text):
                    raise ValueError('it is in GBNF (root ::= "a"); Lark\'s notation is wanted (start: "a")')
                return json.dumps({"grammars": [{"lark_grammar": self.text}]})
            return LLMatcher.grammar_from_json_schema(
                self.text or '{"type": "object"}',
                defaults={"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"},
            )
        except ValueError as error:
            raise RequestError(f"{self.kind} cannot be followed: {_reason(str(error))}") from error


JSON_OBJECT = Spec("json_object")  # not from a client, so it is not tried


class Grammars:
    """Compiles the constraints of clients. Any number of threads may use it."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int], seconds: float = 10.0
    ) -> None:
        """tokenizer_json: the contents of a tokenizer.json; seconds: limit of a grammar's trial, half as CPU time."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_tokens = list(eos_token_ids)
        self._seconds = seconds
        self._tools: _Tools | None = None  # made at first use, which takes a second
        self._making = threading.Lock()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # by digest, the most recently used last
        self._lock = threading.Lock()

    def compile_if_quick(self, spec: Spec) -> AnyGuide | None:
        """Return `compile`'s guide if the grammar is known to compile quickly or to be invalid; else None."""
        if spec.kind == "thinking":
            thinking, after = spec.reasoning()
            inner = None if after is None else self.compile_if_quick(after)
            return None if after is not None and inner is None else self._thinking(spec, thinking, inner)
        if spec != JSON_OBJECT:
            known = self._recall(_digest(spec.grammar()))
            if known is None or known.seconds > QUICK:
                return None
        return self.compile(spec)

    def compile(self, spec: Spec) -> AnyGuide:
        """Compile a guide for one request. May take seconds.

        Raises RequestError for a constraint that cannot be followed, SandboxFailed if nothing can be tried.
        """
        if spec.kind == "thinking":
            thinking, after = spec.reasoning()
            return self._thinking(spec, thinking, None if after is None else self.compile(after))
        grammar = spec.grammar()
        tools = self._made_tools()
        if spec == JSON_OBJECT:
            return GrammarGuide(spec, make_matcher(tools.tokenizer, grammar), tools.drawable)
        digest = _digest(grammar)
        known = self._recall(digest) or _Known(self._tried(spec.kind, grammar, tools), math.inf)
        if known.reason:
            self._remember(digest, known._replace(seconds=0.0))
            raise RequestError(f"{spec.kind} cannot be followed: {_reason(known.reason)}")
        # Not a copy of a matcher that others use: copies share a lexer and its limits.
        begin = time.perf_counter()
        matcher = make_matcher(tools.tokenizer, grammar)
        self._remember(digest, known._replace(seconds=min(known.seconds, time.perf_counter() - begin)))
        return GrammarGuide(spec, matcher, tools.drawable)

    def _thinking(self, spec: Spec, thinking: Thinking, inner: AnyGuide | None) -> ThinkingGuide:
        tools = self._made_tools()
        guide = ThinkingGuide(thinking, inner, tools.drawable, self._eos_tokens, tools.tokenizer.decode_bytes)
        guide.source = (spec.kind, spec.text)
        return guide

    def close(self) -> None:
        """End the processes in which grammars are tried."""
        with self._making:
            if self._tools is not None:
                self._tools.trials.close()

    def _tried(self, kind: str, grammar: str, tools: _Tools) -> str:
        """Return the error of a grammar, found by its trial; empty if it is valid.

        Raises RequestError if the machine was too busy to find out, in which case the grammar may be tried again.
        """
        try:
            return str(tools.trials.ask(grammar))
        except OutOfCpuTime as error:
            return f"it is not compiled within {error.seconds:g} s"
        except OutOfTime as error:
            raise RequestError(f"{kind} cannot be followed: it is not compiled within {error.seconds:g} s") from error
        except Died:
            return "it takes too much memory, or is too deeply nested, to be compiled"

    def _recall(self, digest: bytes) -> _Known | None:
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
            return self._known.get(digest)

    def _remember(self, digest: bytes, known: _Known) -> None:
        with self._lock:
            self._known[digest] = known
            self._known.move_to_end(digest)
            if len(self._known) > NUM_REMEMBERED:
                self._known.popitem(last=False)

    def _made_tools(self) -> _Tools:
        with self._making:
            if self._tools is None:
                try:
                    tokenizer = make_tokenizer(self._tokenizer_json, self._eos_tokens)
                except ValueError as error:
                    raise RequestError(f"no grammar can be followed with this model's tokenizer: {error}") from error
                drawable = np.zeros(-(-tokenizer.vocab_size // 32) * 32, np.bool_)
                drawable[: min(tokenizer.vocab_size, self._vocab_size)] = True
                if not self._eos_tokens:  # the model has no end token: llguidance's choice is another token
                    drawable[tokenizer.eos_tokens] = False
                # A grammar that survives its trial is compiled again here.
                limits = Limits(seconds=self._seconds, cpu_seconds=self._seconds / 2, **TRIAL)
                arguments = (self._tokenizer_json, self._eos_tokens)
                trials = Sandbox(num_trials(), Path(grammar_program.__file__), limits, *arguments)
                self._tools = _Tools(tokenizer, trials, np.packbits(drawable, bitorder="little").view(np.int32))
            return self._tools


def num_trials() -> int:
    """Return the number of grammars that are tried at the same time."""
    return max(1, min(MAX_TRIALS, os.cpu_count() or 1))


def _digest(grammar: str) -> bytes:
    return blake2b(grammar.encode(errors="surrogatepass"), digest_size=16).digest()


class _Known(NamedTuple):
    """The cached result for a grammar."""

    reason: str  # the error; empty if valid
    seconds: float  # shortest time so far to compile it, or to report the error


class _Tools(NamedTuple):
    tokenizer: LLTokenizer
    trials: Sandbox
    drawable: NDArray[np.int32]  # a bit for each of the tokenizer's tokens: whether the model may draw it


@dataclass
class _Budget:
    """CPU time of a guide and its copies, all of which run on the engine's thread."""

    num_tokens: int = 0
    spent: float = 0.0  # s
    overdrawn: float = 0.0  # s beyond the allowance per token; the unused allowance of fast tokens is not saved

    def add_token(self, seconds: float) -> None:
        """Account for a token."""
        self.num_tokens += 1
        self.spent += seconds
        self.overdrawn = max(0.0, self.overdrawn + seconds - ALLOWANCE_A_TOKEN)

    def check(self, kind: str) -> None:
        """Raise RequestError if too much time is spent."""
        if self.overdrawn > ALLOWANCE:
            message = f"{self.spent:.2f} s for {self.num_tokens} tokens"
            raise RequestError(f"{kind} takes too long to be followed: {message}")


class GrammarGuide:
    """A `Guide`: the state of one request in a grammar."""

    def __init__(self, spec: Spec, matcher: LLMatcher, drawable: NDArray[np.int32]) -> None:
        """Raises RequestError if no text can follow the grammar."""
        self.source = (spec.kind, spec.text)
        self._kind = spec.kind
        self._matcher = matcher
        self._drawable = drawable
        self._budget = _Budget()
        self._allowed = self._mask()

    def allowed(self) -> NDArray[np.int32]:
        """Return the mask of the tokens that may come next."""
        return self._allowed

    def accept(self, token: int) -> None:
        """Advance by a token.

        Raises RequestError if the grammar becomes too large or too slow, or reaches a dead end.
        """
        self._budget.check(self._kind)  # time that a copy has overdrawn costs the others nothing more
        begin = time.thread_time()
        self._matcher.consume_token(token)
        self._allowed = self._mask()
        self._budget.add_token(time.thread_time() - begin)
        self._budget.check(self._kind)

    def forced(self) -> list[int]:
        """Return the tokens of the text that must come next, in the tokenizer's own division; often none."""
        return self._matcher.compute_ff_tokens()

    @property
    def done(self) -> bool:
        """True if the text is complete, and nothing can be added."""
        return self._done

    def copy(self) -> GrammarGuide:
        """Return a copy in the same state, to be continued differently, which shares the CPU time allowance."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def for_drafts(self) -> GrammarGuide | None:
        """Return a copy with a separate allowance of CPU time; None while this guide has overdrawn its allowance."""
        if self._budget.overdrawn > 0:
            return None
        other = self.copy()
        other._budget = _Budget()
        return other

    def _mask(self) -> NDArray[np.int32]:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32, len(self._drawable))
        self._done = self._matcher.is_stopped()  # also in an error
        if self._done and not self._matcher.is_accepting():
            raise RequestError(f"{self._kind} cannot be followed: {_reason(self._matcher.get_error())}")
        return mask & self._drawable


def check_depth(schema: Mapping[str, Any], name: str = "json_schema") -> None:
    """Raise RequestError, with its name, for a schema that is too deeply nested to be written or read."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ())
        ]
    if level:
        raise RequestError(f"{name} is nested more than {MAX_DEPTH} levels deep")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have no keys but those of their `properties`, unless it allows others by name.

    A schema that adds to the properties of an object by another schema (JOINED) is returned unchanged: each of the two
    would forbid the keys of the other. Raises RequestError for one that is too deeply nested.
    """
    check_depth(schema)
    found: dict[str, Any] = deepcopy(dict(schema))
    parts = list(_schemas(found))
    if any(len(_list(one, "allOf")) > 1 or ("properties" in one and not JOINED.isdisjoint(one)) for one in parts):
        return found
    for one in parts:
        if "properties" in one and OTHER_KEYS.isdisjoint(one):
            one["additionalProperties"] = False
    return found


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it."""
    if not isinstance(schema, dict):
        return
    yield schema
    by_name = (schema[key] for key in BY_NAME if isinstance(schema.get(key), dict))
    inner = [one for values in by_name for one in values.values()]
    inner += [one for key in LISTED for one in _list(schema, key)]
    for one in (*inner, schema.get("items"), schema.get("additionalProperties")):
        yield from _schemas(one)


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    return found if isinstance(found := schema.get(key), list) else []


AnyGuide = GrammarGuide | ThinkingGuide


def _reason(message: str) -> str:
    """Return llguidance's error message without excerpts of the grammar and of its internal state."""
    lines = message.splitlines()
    if not lines or lines[0] == "NoExtensionBias":
        return "there is no such text"
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    reason = LONG_WORD.sub(r"\1...", reason)
    return reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "..."
