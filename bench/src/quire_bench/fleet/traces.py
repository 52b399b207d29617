"""Prompts that have beginnings in common: conversations, and questions about documents. And some that have none."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire_bench.server.prompts import Prompt
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY

BLOCK = 16  # tokens
ANSWER = 16  # tokens
LONGEST = 1024  # tokens: what the embedded model serves
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

    def hit_rate(self, num_blocks: float = math.inf) -> float:
        """Share of the prompts' tokens that one cache of so many blocks would have had, were they sent one by one.

        It evicts what was read the longest ago, of one prompt the last blocks first.
        """
        known: OrderedDict[int, None] = OrderedDict()
        cached = 0
        for prompt in self.prompts:
            blocks = list(_blocks(prompt))
            reusable = blocks[: (len(prompt.content) - 1) // BLOCK]  # the last token is always computed
            cached += BLOCK * next((i for i, block in enumerate(reusable) if block not in known), len(reusable))
            for block in reversed(blocks):
                known[block] = None
                known.move_to_end(block)
            while len(known) > num_blocks:
                known.popitem(last=False)
        return cached / sum(len(prompt.content) for prompt in self.prompts)


def sessions(count: int, seed: int, longest: int = LONGEST) -> Trace:
    """Conversations of 7 turns, mixed: each prompt is all that was said before, and something new.

    The answers in them are made up, so that what is sent does not depend on what was generated. longest: tokens that no
    request has more of, with its answer.
    """
    rng = random.Random(f"{seed}/sessions")
    turns = [talk for talk in range(-(-count // TURNS)) for _ in range(TURNS)]
    rng.shuffle(turns)
    said: dict[int, list[int]] = {}
    prompts = []
    for talk in turns[:count]:
        prompt = said.get(talk, []) + _tokens(rng, rng.randint(longest // 34, longest // 8 - ANSWER))
        prompts.append(Prompt(prompt, ANSWER))
        said[talk] = prompt + _tokens(rng, ANSWER)
    return Trace("sessions", tuple(prompts))


def shared_prefixes(count: int, seed: int, longest: int = LONGEST) -> Trace:
    """Questions about documents, some of them asked for more often: the n-th with a weight of 1 / n.

    longest: a document has three quarters of so many tokens.
    """
    rng = random.Random(f"{seed}/prefixes")
    documents = [_tokens(rng, longest * 3 // 4 // BLOCK * BLOCK) for _ in range(max(1, count // 8))]
    weights = [1 / rank for rank in range(1, len(documents) + 1)]
    chosen = rng.choices(documents, weights, k=count)
    return Trace("shared prefixes", tuple(Prompt(one + _tokens(rng, rng.randint(16, 96)), ANSWER) for one in chosen))


def unshared(count: int, seed: int, longest: int = LONGEST) -> Trace:
    """Prompts that have nothing in common, as long as what is new of a conversation's."""
    rng = random.Random(f"{seed}/unshared")
    lengths = [rng.randint(longest // 34, longest // 8 - ANSWER) for _ in range(count)]
    return Trace("nothing shared", tuple(Prompt(_tokens(rng, length), ANSWER) for length in lengths))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(FIRST_TOKEN, VOCABULARY), k=count)


def _blocks(prompt: Prompt) -> Iterator[int]:
    """A number for each full block of a prompt and all that comes before it."""
    parent = 0
    tokens: Sequence[int] = [token for token in prompt.content if isinstance(token, int)]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hash((parent, *tokens[start : start + BLOCK]))
        yield parent
