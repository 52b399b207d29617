"""The requests of a load: prompts, their bodies, and the time when each is due."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, check_integer, check_number
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY, workload

# Where a server takes texts alone, a random token becomes one of these: common words, a token each for most tokenizers.
WORDS = (
    "the of and to in is was for on that with as by at from his it an are were which be this had also or has their "
    "first one its new after but who not they have her she two been other when there all during into time may more"
).split()
MAX_TOKENS = 2**24  # of a prompt, and of an answer


@dataclass(frozen=True)
class Prompt:
    """The prompt of one request."""

    content: str | list[int]  # a text, or token ids
    max_tokens: int


def random_prompts(count: int, input_len: int, output_len: int, seed: int) -> list[Prompt]:
    """Prompts of one length, of tokens that every model has; the same for the same seed."""
    check_integer(ConfigError, "num_prompts", count, 1)
    check_integer(ConfigError, "random_input_len", input_len, 1, MAX_TOKENS)
    check_integer(ConfigError, "random_output_len", output_len, 1, MAX_TOKENS)
    rng = random.Random(f"{seed}/prompts")
    ids = range(FIRST_TOKEN, VOCABULARY)
    return [Prompt(rng.choices(ids, k=input_len), output_len) for _ in range(count)]


def workload_prompts(name: str) -> list[Prompt]:
    """The requests of `quire bench throughput`. Raises ConfigError where there is no workload of that name."""
    work = workload(name)
    return [Prompt(prompt, new) for prompt, new in zip(work.prompts, work.new_tokens, strict=True)]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file: {"prompt": a text or token ids, "max_tokens": a number} on each line.

    Raises ConfigError that names the line where one is not understood.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    prompts = [_read_line(f"{path}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} is empty; it must have a line for each prompt")
    return prompts


def _read_line(where: str, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict) or not {"prompt", "max_tokens"} <= set(row):
        raise ConfigError(f'{where} is {line[:60]!r}; it must be {{"prompt": "...", "max_tokens": 16}}')
    prompt = row["prompt"]
    check_integer(ConfigError, f"{where}: max_tokens", row["max_tokens"], 1, MAX_TOKENS)
    if isinstance(prompt, list):
        for i, token in enumerate(prompt):
            check_integer(ConfigError, f"{where}: prompt token {i}", token, 0, 2**31 - 1)
    elif not isinstance(prompt, str):
        raise ConfigError(f"{where}: prompt is {prompt!r}; it must be a text or a list of token ids")
    return Prompt(prompt, row["max_tokens"])


def repeated(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """That many of them, from the first one on and then again; None: each once."""
    if count is None:
        return list(prompts)
    check_integer(ConfigError, "num_prompts", count, 1)
    return list(islice(cycle(prompts), count))


def in_words(prompt: Prompt) -> Prompt:
    """A prompt with a word for each token: for servers that take texts alone. Equal tokens give equal words."""
    words = [WORDS[token % len(WORDS)] for token in prompt.content if isinstance(token, int)]
    return Prompt(" ".join(words), prompt.max_tokens)


def request_body(prompt: Prompt, endpoint: str, model: str, options: Mapping[str, Any]) -> bytes:
    """The JSON of a streaming request. `options` are further fields; they override those that stand here.

    Raises ConfigError for token ids that are to be chatted about.
    """
    body: dict[str, Any] = {"model": model, "max_tokens": prompt.max_tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if endpoint == "completions":
        body["prompt"] = prompt.content
    elif isinstance(prompt.content, str):
        body["messages"] = [{"role": "user", "content": prompt.content}]
    else:
        raise ConfigError(f"a prompt is the token ids {str(prompt.content)[:40]}...; the endpoint chat takes texts")
    return json.dumps(body | dict(options), separators=(",", ":")).encode()


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """When each request is due, in seconds from the first one: a Poisson process; all at once if the rate is inf.

    Raises ConfigError for a rate that is none.
    """
    check_integer(ConfigError, "num_prompts", count, 1)
    if rate != math.inf:
        check_number(ConfigError, "request_rate", rate, 1e-6)
    rng, now, times = random.Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times
