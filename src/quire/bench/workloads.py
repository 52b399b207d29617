"""The request mixes that speed is measured on: how many prompt tokens and new tokens each request has."""

from __future__ import annotations

import random
from dataclasses import dataclass

from quire.errors import ConfigError

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


def chat_like() -> list[tuple[int, int]]:
    """Log-normal lengths of 48 requests, a small chat-like load."""
    rng = random.Random(0)
    lengths = []
    for _ in range(48):
        prompt = int(min(1500, rng.lognormvariate(5.2, 0.8))) + 8
        lengths.append((prompt, int(min(256, rng.lognormvariate(4.2, 0.6))) + 8))
    return lengths


# Name -> (prompt tokens, new tokens) of each request, and how many of the prompt tokens all requests share.
WORKLOADS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "rose": ([(856, 16)] * 64, 0),  # long prompts, short answers
    "rose_shared": ([(856, 16)] * 64, 856),  # one prompt for all
    "mixed": (chat_like(), 0),
    "decode": ([(16, 128)] * 32, 0),  # the steady state of decoding
    "single": ([(16, 128)], 0),  # one stream
    "prefix": ([(1088, 32)] * 32, 1024),  # 32 users of one system prompt
}


def workload(name: str) -> Workload:
    """The workload of that name; the same tokens every time. Raises ConfigError where there is none."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
    lengths, shared_tokens = WORKLOADS[name]
    rng = random.Random(1)

    def draw(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]

    shared = draw(shared_tokens)
    prompts = [shared + draw(prompt - shared_tokens) for prompt, _ in lengths]
    return Workload(name, prompts, [new for _, new in lengths])
