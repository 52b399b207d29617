"""Prompts that have beginnings in common: conversations, and questions about documents."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire_bench.server.prompts import Prompt
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY

BLOCK = 16  # tokens
ANSWER = 16  # tokens; with it the longest prompts are within what the embedded model serves
TURNS = 7  # of a conversation


@dataclass(frozen=True)
class Trace:
    """Prompts in the order in which they are sent."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def working_set(self) -> int:
        """Blocks that are looked for more than once, counted once."""
        seen = Counter(block for prompt in self.prompts for block in _blocks(prompt))
        return sum(times > 1 for times in seen.values())

    @property
    def infinite_hit_rate(self) -> float:
        """Share of the prompts' tokens that one cache which never evicts would have had."""
        known: set[int] = set()
        cached = 0
        for prompt in self.prompts:
            blocks = list(_blocks(prompt))
            reusable = blocks[: (len(prompt.content) - 1) // BLOCK]  # the last token is always computed
            cached += BLOCK * next((i for i, block in enumerate(reusable) if block not in known), len(reusable))
            known.update(blocks)
        return cached / sum(len(prompt.content) for prompt in self.prompts)


def sessions(count: int, seed: int) -> Trace:
    """Conversations of 7 turns, mixed: each prompt is all that was said before, and something new.

    The answers in them are made up, so that what is sent does not depend on what was generated.
    """
    rng = random.Random(f"{seed}/sessions")
    turns = [talk for talk in range(-(-count // TURNS)) for _ in range(TURNS)]
    rng.shuffle(turns)
    said: dict[int, list[int]] = {}
    prompts = []
    for talk in turns[:count]:
        prompt = said.get(talk, []) + _tokens(rng, rng.randint(30, 110))
        prompts.append(Prompt(prompt, ANSWER))
        said[talk] = prompt + _tokens(rng, ANSWER)
    return Trace("sessions", tuple(prompts))


def shared_prefixes(count: int, seed: int) -> Trace:
    """Questions about documents of 768 tokens, some of them asked for more often: the n-th with a weight of 1 / n."""
    rng = random.Random(f"{seed}/prefixes")
    documents = [_tokens(rng, 48 * BLOCK) for _ in range(max(1, count // 8))]
    weights = [1 / rank for rank in range(1, len(documents) + 1)]
    chosen = rng.choices(documents, weights, k=count)
    return Trace("shared prefixes", tuple(Prompt(one + _tokens(rng, rng.randint(16, 96)), ANSWER) for one in chosen))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(FIRST_TOKEN, VOCABULARY), k=count)


def _blocks(prompt: Prompt) -> Iterator[int]:
    """A number for each full block of a prompt and all that comes before it."""
    parent = 0
    tokens: Sequence[int] = [token for token in prompt.content if isinstance(token, int)]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hash((parent, *tokens[start : start + BLOCK]))
        yield parent
