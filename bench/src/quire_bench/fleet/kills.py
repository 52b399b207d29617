"""The wait of a client when the replica that computes its answer is killed, and whether the answer stays the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import ConfigError, check_integer
from quire_bench.fleet.running import Fleet, fleet, pieces
from quire_bench.server.prompts import random_prompts
from quire_bench.server.report import summary

NEW_TOKENS = 256
EARLIEST, LATEST = 8, 128  # pieces of an answer that have come at the kill


def measure(
    options: Sequence[str], kills: int, prompt_len: int, seed: int = 0, advance: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Stream one sampled answer after the other, and kill the replica that computes it; it is restarted then.

    options: of each of the two replicas. prompt_len: tokens, which have to be computed again after a kill, as has what
    was generated. advance: is called after each kill.
    Raises QuireError where an answer ends with an error, or before it could be disturbed.
    """
    for name, value in (("kills", kills), ("prompt_len", prompt_len)):
        check_integer(ConfigError, name, value, 1)
    rng, stalls, different = random.Random(f"{seed}/kills"), [], 0
    with fleet(2, *options) as found:
        for i, prompt in enumerate(random_prompts(kills, prompt_len, NEW_TOKENS, seed)):
            body = {"prompt": prompt.content, "max_tokens": NEW_TOKENS, "temperature": 0.8, "seed": i}
            body |= {"ignore_eos": True, "cache_salt": "disturbed"}
            undisturbed = "".join(pieces(found.replicas[0].url, body | {"cache_salt": "undisturbed"}))
            text, stall = _disturbed(found, body, rng.randint(EARLIEST, LATEST))
            stalls.append(stall)
            different += text != undisturbed
            advance()
    milliseconds = [1e3 * stall for stall in stalls]
    return {
        "prompt_len": prompt_len,
        "kills": kills,
        "different": different,
        "stall_ms": summary(milliseconds, (50, 90, 99)) | {"max": max(milliseconds)},
        "stalls": stalls,
    }


def _disturbed(found: Fleet, body: dict[str, Any], after: int) -> tuple[str, float]:
    """Return an answer, and the longest wait for a piece of it since the kill, which follows that many pieces."""
    texts, stall, last, killed = [], 0.0, 0.0, None
    for text in pieces(found.url, body):
        now = time.perf_counter()
        if killed is not None:
            stall = max(stall, now - last)
        last = now
        texts.append(text)
        if len(texts) == after:
            killed = found.busiest()
            killed.kill()
            last = time.perf_counter()
    if killed is not None:
        found.restart(killed)
    return "".join(texts), stall
