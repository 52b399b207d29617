"""One side of a comparison: a saved trace, a model with settings, or transformers' run of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import ConfigError, check_known

OPTIONS = ("dtype", "quantization", "quantization_head", "quantization_activations", "kv_cache_dtype",
           "attention_backend", "gguf_file")  # fmt: skip
SETTINGS = (*OPTIONS, "isa", "run")
RUNS = ("quire", "transformers")
URLS = ("http://", "https://")
MOST_TOKENS = 2_048  # of a prompt: one step computes it
MOST_PROMPT_TOKENS = 8_192  # of all prompts
DEFAULT_PROMPTS = (
    "The capital of France is",
    'def fibonacci(n: int) -> int:\n    """Return the nth number."""\n',
    "Question: 17 * 24 = ?\nAnswer:",
    "import json\n\nwith open(path) as file:\n    data =",
)


@dataclass(frozen=True)
class Side:
    """A trace's file, or a model with its settings."""

    name: str | None  # None: the embedded model
    options: Mapping[str, str] = field(default_factory=dict)  # of the engine
    isa: str | None = None
    run: str = "quire"

    @property
    def is_trace(self) -> bool:
        """True for a URL, and for a file that is not a GGUF file."""
        if self.name is None:
            return False
        return self.name.startswith(URLS) or (Path(self.name).is_file() and not self.name.endswith(".gguf"))

    @property
    def settings(self) -> str:
        """The settings that were given, for people."""
        given = {"run": self.run} if self.run != "quire" else {}
        given |= {**self.options} | ({} if self.isa is None else {"isa": self.isa})
        return ", ".join(f"{name}={value}" for name, value in given.items())


def parse_side(name: str | None, settings: Sequence[str], option: str) -> Side:
    """Return a side of the command line. Raises ConfigError for unknown settings, and for those of a trace.

    settings: texts such as "dtype=float32". option: the name of their option.
    """
    given = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{option} is {text!r}; it must be NAME=VALUE, as in dtype=float32")
        given[key] = value
    check_known(ConfigError, f"{option}: there is no setting", given, SETTINGS, {})
    run, isa = given.pop("run", "quire"), given.pop("isa", None)
    if run not in RUNS:
        raise ConfigError(f"{option}: run is {run!r}; it must be {' or '.join(RUNS)}")
    side = Side(name, given, isa, run)
    if side.is_trace and settings:
        raise ConfigError(f"{option} is {settings[0]!r}, and {name} is a trace, whose settings are fixed; leave it out")
    if run == "transformers" and (others := [key for key in (*given, *(["isa"] if isa else [])) if key != "dtype"]):
        raise ConfigError(f"{option}: {others[0]} is not for run=transformers, whose only other setting is dtype")
    return side


def read_prompts(path: Path) -> list[str | list[int]]:
    """Return a file's prompts: one on each line, a text, or JSON: a string or a list of token ids.

    Raises ConfigError for a file that cannot be read or has no prompts.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts is {path}, which cannot be read as text: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts is {path}, which has no line; write one prompt on each")
    return [_parsed(line) for line in lines]


def _parsed(line: str) -> str | list[int]:
    try:
        found = json.loads(line)
    except ValueError:
        return line
    if isinstance(found, list) and found and all(type(token) is int for token in found):
        return found
    return found if isinstance(found, str) and found else line


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError for prompts that are too long to be traced."""
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    if longest > MOST_TOKENS or total > MOST_PROMPT_TOKENS:
        raise ConfigError(
            f"the longest prompt has {longest:,} tokens, and all have {total:,}; a trace takes up to {MOST_TOKENS:,} "
            f"of one and {MOST_PROMPT_TOKENS:,} of all, so give fewer or shorter prompts"
        )
