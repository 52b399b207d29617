"""The requests that speed is measured on: the workloads of `quire.engine.workloads`, with their tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from quire.engine.workloads import workload_lengths
from quire.request import SamplingParams

FIRST_TOKEN, VOCABULARY = 2, 2000  # prompts draw from the ids that every model has


@dataclass(frozen=True)
class Workload:
    """Prompts and, for each, the number of tokens to generate."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_new_tokens(self) -> int:
        """Tokens to generate, of all requests."""
        return sum(self.new_tokens)

    def shifted(self, by: int) -> Workload:
        """The same lengths with other tokens, which no prefix cache has seen: each id is moved on by that many."""

        def shift(token: int) -> int:
            return FIRST_TOKEN + (token - FIRST_TOKEN + by) % (VOCABULARY - FIRST_TOKEN)

        return replace(self, prompts=[[shift(token) for token in prompt] for prompt in self.prompts])


def greedy(max_tokens: int) -> SamplingParams:
    """Just that many tokens, the most likely ones: a request goes on past the model's end tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def workload(name: str) -> Workload:
    """The workload of that name; the same tokens every time. Raises ConfigError where there is none."""
    lengths, shared_tokens = workload_lengths(name)
    rng = random.Random(1)

    def draw(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]

    shared = draw(shared_tokens)
    prompts = [shared + draw(prompt - shared_tokens) for prompt, _ in lengths]
    return Workload(name, prompts, [new for _, new in lengths])
