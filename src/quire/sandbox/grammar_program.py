"""A sandbox's program: compile grammars on trial.

llguidance limits the cost of a grammar, but not everywhere: a long chain of rules that refer to one another overflows
its stack, which kills the process, and a large multipleOf keeps it busy for hours, without a way to interrupt it. The
server compiles a grammar only if the sandbox, which has less time, stack and memory, has survived it.

The sandbox loads this file by its path, so it imports nothing from quire.
"""

from __future__ import annotations

from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_STATES = 100_000  # of a grammar's lexer while it is used; a state takes about 600 bytes


def make_tokenizer(tokenizer_json: str, eos_tokens: list[int]) -> LLTokenizer:
    """Create a tokenizer.

    Without end tokens it finds one by its name. Raises ValueError if llguidance cannot use it.
    """
    return LLTokenizer(tokenizer_json, eos_token=eos_tokens or None)


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher, possibly in its error state, that has computed its first mask, which takes longest."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=MAX_STATES))
    matcher.compute_bitmask()
    return matcher


def prepare(tokenizer_json: str, eos_tokens: list[int]) -> Callable[[str], str]:
    """Return a function that returns the error of a grammar, or an empty text if it is valid."""
    tokenizer = make_tokenizer(tokenizer_json, eos_tokens)
    return lambda grammar: make_matcher(tokenizer, grammar).get_error()
