"""Structured output: from what a client asks for to the masks that the engine draws under, through llguidance."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from copy import copy
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
MAX_DEPTH = 100  # of a schema's nesting; llguidance reads 128
MAX_REASON = 300  # characters of what is reported about a grammar that is wrong
GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # a rule of that notation
LONG_WORD = re.compile(r"(\S{80})\S+")  # which is the client's own
NUM_REMEMBERED = 4096  # grammars that need no further trial
MAX_TRIALS = 4  # grammars that are tried side by side; less where there are fewer cores
# What a trial may take besides time, in bytes. Threads of the server have at least twice that stack.
TRIAL = {"memory": 2**27, "stack": 2**20, "answer": 2**20}
QUICK = 0.02  # s; what compiles in less does not wait for what takes longer
# CPU time that a guide and its copies may take together: for each token, and in all beyond that. Most grammars need
# microseconds a token; ambiguous ones get ever slower.
ALLOWANCE_A_TOKEN = 0.002  # s
ALLOWANCE = 0.25  # s


@dataclass(frozen=True)
class Spec:
    """What a text has to be."""

    kind: str  # json_object, json_schema, regex, choice, grammar, tools or thinking
    # A JSON schema, a regular expression, JSON of a list of texts, or a grammar in llguidance's variant of Lark's
    # syntax, as that of tools is; of thinking, JSON of the thoughts and of the Spec after them.
    text: str = ""

    @staticmethod
    def of(asked: StructuredOutputsParams) -> Spec:
        """What they ask for. Raises RequestError for a schema that is not plain JSON."""
        if asked.regex:
            return Spec("regex", asked.regex)
        if asked.grammar:
            return Spec("grammar", asked.grammar)
        if asked.choice:
            return Spec("choice", json.dumps(list(asked.choice)))
        if asked.json_object:
            return JSON_OBJECT
        return Spec("json_schema", asked.json) if isinstance(asked.json, str) else Spec.of_schema(asked.json or {})

    @staticmethod
    def of_schema(schema: Mapping[str, Any]) -> Spec:
        """JSON of a schema. Raises RequestError for what is not plain JSON."""
        check_depth(schema)
        try:
            return Spec("json_schema", json.dumps(schema, allow_nan=False, ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise RequestError(f"json_schema is no JSON: {error}") from error

    @staticmethod
    def of_thoughts(thinking: Thinking, after: Spec | None) -> Spec:
        """Thoughts, and then what they are followed by; None: any text."""
        return Spec("thinking", json.dumps([asdict(thinking), None if after is None else [after.kind, after.text]]))

    def thoughts(self) -> tuple[Thinking, Spec | None]:
        """What `of_thoughts` was given."""
        found, after = json.loads(self.text)
        thinking = Thinking(tuple(found["begin"]), tuple(found["end"]), found["has_begun"], found["limit"])
        return thinking, None if after is None else Spec(*after)

    def grammar(self) -> str:
        """As llguidance takes it. Raises RequestError where it cannot be read.

        A model that may write white space anywhere may write nothing else for ever. So there is a blank at most, where
        json.dumps has one, unless a schema's "x-guidance" says otherwise.
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


JSON_OBJECT = Spec("json_object")  # no stranger's, so it is not tried


class Grammars:
    """Compiles what clients ask for. Any number of threads may use it."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int], seconds: float = 10.0
    ) -> None:
        """tokenizer_json: the contents of a tokenizer.json; seconds: of a grammar's trial, half of it CPU time."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_tokens = list(eos_token_ids)
        self._seconds = seconds
        self._tools: _Tools | None = None  # made at first use: that takes a second
        self._making = threading.Lock()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # by digest, the latest one asked for last
        self._lock = threading.Lock()

    def compile_if_quick(self, spec: Spec) -> AnyGuide | None:
        """As `compile`, where the grammar is known, to be refused or to take no time; else None."""
        if spec.kind == "thinking":
            thinking, after = spec.thoughts()
            inner = None if after is None else self.compile_if_quick(after)
            return None if after is not None and inner is None else self._thinking(thinking, inner)
        if spec != JSON_OBJECT:
            known = self._recall(_digest(spec.grammar()))
            if known is None or known.seconds > QUICK:
                return None
        return self.compile(spec)

    def compile(self, spec: Spec) -> AnyGuide:
        """A guide for one request. Takes its time.

        Raises RequestError for what cannot be followed, SandboxFailed where nothing can be tried.
        """
        if spec.kind == "thinking":
            thinking, after = spec.thoughts()
            return self._thinking(thinking, None if after is None else self.compile(after))
        grammar = spec.grammar()
        tools = self._made_tools()
        if spec == JSON_OBJECT:
            return GrammarGuide(spec.kind, make_matcher(tools.tokenizer, grammar), tools.drawable)
        digest = _digest(grammar)
        known = self._recall(digest) or _Known(self._tried(spec.kind, grammar, tools), math.inf)
        if known.reason:
            self._remember(digest, known._replace(seconds=0.0))
            raise RequestError(f"{spec.kind} cannot be followed: {_reason(known.reason)}")
        # Not a copy of one that others use: copies share a lexer and its limits.
        begin = time.perf_counter()
        matcher = make_matcher(tools.tokenizer, grammar)
        self._remember(digest, known._replace(seconds=min(known.seconds, time.perf_counter() - begin)))
        return GrammarGuide(spec.kind, matcher, tools.drawable)

    def _thinking(self, thinking: Thinking, inner: AnyGuide | None) -> ThinkingGuide:
        tools = self._made_tools()
        return ThinkingGuide(thinking, inner, tools.drawable, self._eos_tokens, tools.tokenizer.decode_bytes)

    def close(self) -> None:
        """End the processes in which grammars are tried."""
        with self._making:
            if self._tools is not None:
                self._tools.trials.close()

    def _tried(self, kind: str, grammar: str, tools: _Tools) -> str:
        """What is wrong with a grammar, by its trial; empty if nothing is.

        Raises RequestError where the machine was too busy to find out, which is no reason to refuse it again.
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
                if not self._eos_tokens:  # the model can tell no end: what would stand for one is some other token
                    drawable[tokenizer.eos_tokens] = False
                # What a trial survives is compiled once more here.
                limits = Limits(seconds=self._seconds, cpu_seconds=self._seconds / 2, **TRIAL)
                arguments = (self._tokenizer_json, self._eos_tokens)
                trials = Sandbox(num_trials(), Path(grammar_program.__file__), limits, *arguments)
                self._tools = _Tools(tokenizer, trials, np.packbits(drawable, bitorder="little").view(np.int32))
            return self._tools


def num_trials() -> int:
    """Grammars that are tried side by side."""
    return max(1, min(MAX_TRIALS, os.cpu_count() or 1))


def _digest(grammar: str) -> bytes:
    return blake2b(grammar.encode(errors="surrogatepass"), digest_size=16).digest()


class _Known(NamedTuple):
    """What is known of a grammar."""

    reason: str  # why it cannot be followed; empty if it can
    seconds: float  # that it takes at least until this is said


class _Tools(NamedTuple):
    tokenizer: LLTokenizer
    trials: Sandbox
    drawable: NDArray[np.int32]  # a bit for each of the tokenizer's tokens: whether the model ever draws it


@dataclass
class _Budget:
    """CPU time of a guide and its copies, all of which are followed on the engine's thread."""

    num_tokens: int = 0
    spent: float = 0.0  # s
    overdrawn: float = 0.0  # s beyond the allowance a token; what fast tokens leave of it is not saved for slow ones

    def add_token(self, seconds: float) -> None:
        """Account for a token."""
        self.num_tokens += 1
        self.spent += seconds
        self.overdrawn = max(0.0, self.overdrawn + seconds - ALLOWANCE_A_TOKEN)

    def check(self, kind: str) -> None:
        """Raise RequestError where too much is spent."""
        if self.overdrawn > ALLOWANCE:
            message = f"{self.spent:.2f} s for {self.num_tokens} tokens"
            raise RequestError(f"{kind} takes too long to be followed: {message}")


class GrammarGuide:
    """A `Guide`: one request's way through a grammar."""

    def __init__(self, kind: str, matcher: LLMatcher, drawable: NDArray[np.int32]) -> None:
        """Raises RequestError where no text can follow the grammar."""
        self._kind = kind
        self._matcher = matcher
        self._drawable = drawable
        self._budget = _Budget()
        self._allowed = self._mask()

    def allowed(self) -> NDArray[np.int32]:
        """The tokens that may come next, a bit each."""
        return self._allowed

    def accept(self, token: int) -> None:
        """Go on after a token. Raises RequestError where the grammar gets too large or too slow, or ends nowhere."""
        self._budget.check(self._kind)  # what a copy has overdrawn costs the others nothing more
        begin = time.thread_time()
        self._matcher.consume_token(token)
        self._allowed = self._mask()
        self._budget.add_token(time.thread_time() - begin)
        self._budget.check(self._kind)

    @property
    def done(self) -> bool:
        """Whether the text is complete, and nothing can be added."""
        return self._done

    def copy(self) -> GrammarGuide:
        """The same way, to be continued differently, at the expense of the same allowance."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def _mask(self) -> NDArray[np.int32]:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32, len(self._drawable))
        self._done = self._matcher.is_stopped()  # in an error, too
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


AnyGuide = GrammarGuide | ThinkingGuide


def _reason(message: str) -> str:
    """What llguidance says, without excerpts of the grammar and its own state."""
    lines = message.splitlines()
    if not lines or lines[0] == "NoExtensionBias":
        return "there is no such text"
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    reason = LONG_WORD.sub(r"\1...", reason)
    return reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "..."
