"""A sandbox's program: grammars are compiled on trial.

llguidance bounds what a grammar may cost, but not everywhere: rules that refer to one another in a long chain overflow
its stack, which kills the process, and a large multipleOf keeps it busy for hours, which nothing can interrupt. What
the sandbox survives, with less time, stack and memory than the server has, the server compiles too.

The sandbox loads this file by its path, so it imports nothing of quire.
"""

from __future__ import annotations

from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_STATES = 100_000  # of a grammar's lexer while it is used; a state takes some 600 bytes


def make_tokenizer(tokenizer_json: str, eos_tokens: list[int]) -> LLTokenizer:
    """Without end tokens it takes one by its name. Raises ValueError for a tokenizer that llguidance cannot use."""
    return LLTokenizer(tokenizer_json, eos_token=eos_tokens or None)


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher that may be in its error state. The first mask, which takes longest, has been computed."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=MAX_STATES))
    matcher.compute_bitmask()
    return matcher


def prepare(tokenizer_json: str, eos_tokens: list[int]) -> Callable[[str], str]:
    """What says of a grammar what is wrong with it; nothing if nothing is."""
    tokenizer = make_tokenizer(tokenizer_json, eos_tokens)
    return lambda grammar: make_matcher(tokenizer, grammar).get_error()
