"""Named workloads, run by `quire simulate` and measured by the benchmarks: the lengths of their requests."""

from __future__ import annotations

import random

from quire.errors import ConfigError


def chat_lengths(rng: random.Random) -> tuple[int, int]:
    """Return the prompt and new tokens of a request of a small chat-like load: log-normal, with an upper limit."""
    prompt = int(min(1500, rng.lognormvariate(5.2, 0.8))) + 8
    return prompt, int(min(256, rng.lognormvariate(4.2, 0.6))) + 8


def _mixed() -> list[tuple[int, int]]:
    rng = random.Random(0)
    return [chat_lengths(rng) for _ in range(48)]


# Name -> (prompt tokens, new tokens) of each request, and the number of prompt tokens that all requests share.
WORKLOADS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "rose": ([(856, 16)] * 64, 0),  # long prompts, short answers
    "rose_shared": ([(856, 16)] * 64, 856),  # one prompt for all
    "mixed": (_mixed(), 0),
    "decode": ([(16, 128)] * 32, 0),  # the steady state of decoding
    "single": ([(16, 128)], 0),  # one stream
    "prefill": ([(512, 1)], 0),  # one prompt, to its first token
    "prefix": ([(1088, 32)] * 32, 1024),  # 32 users of one system prompt
}


def workload_lengths(name: str) -> tuple[list[tuple[int, int]], int]:
    """Return the entry of WORKLOADS. Raises ConfigError for an unknown name."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
