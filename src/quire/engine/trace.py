"""Traces: arrival times, lengths and shared prefixes of requests, written and read as CSV."""

from __future__ import annotations

import csv
import random
import re
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from hashlib import blake2b, shake_256
from itertools import pairwise
from pathlib import Path

from quire.errors import ConfigError, check_integer, check_number
from quire.request import Request

MAX_TOKENS = 2**24  # of a prompt; a limit, so that one malformed row cannot exhaust the host
TOKEN_SIZE = 4  # bytes, in a request
WHOLE = re.compile(r"\d{1,9}", re.ASCII)
PREFIX_PATH = re.compile(r"([^/@]+@\d{1,9}/)*[^/@]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace, without its tokens.

    `prefix_id` is a name, or, for a prefix that extends shorter ones, the path through these, each with its end: rows
    of `a` and of `a@50/b` begin with the same 50 tokens, if their prefix has at least that many. Raises ConfigError for
    a value out of range.
    """

    arrival: float  # seconds
    prompt_tokens: int
    new_tokens: int
    prefix_id: str = ""  # the prefix shared with other requests; empty: none
    prefix_tokens: int = 0  # the first tokens of the prompt, the same for all rows with that id

    def __post_init__(self) -> None:
        check_number(ConfigError, "arrival", self.arrival, 0.0)
        check_integer(ConfigError, "prompt_tokens", self.prompt_tokens, 1, MAX_TOKENS)
        check_integer(ConfigError, "new_tokens", self.new_tokens, 0, MAX_TOKENS)
        check_integer(ConfigError, "prefix_tokens", self.prefix_tokens, 0, self.prompt_tokens)
        if bool(self.prefix_id) != (self.prefix_tokens > 0):
            raise ConfigError(
                f"prefix_id is {self.prefix_id!r} and prefix_tokens is {self.prefix_tokens}; give both or neither"
            )
        if not self.prefix_id:
            return
        if not PREFIX_PATH.fullmatch(self.prefix_id):
            raise ConfigError(f"prefix_id is {self.prefix_id!r}; it must be a name, or a path such as a@50/b")
        ends = [0, *(end for _, end in self.prefixes())]
        if any(a >= b for a, b in pairwise(ends)):
            raise ConfigError(f"prefix_id is {self.prefix_id!r}; its ends must ascend to prefix_tokens={ends[-1]}")

    def prefixes(self) -> list[tuple[str, int]]:
        """Return the name and end of each part of the shared prefix."""
        if not self.prefix_id:
            return []
        *path, last = self.prefix_id.split("/")
        parts = [part.split("@") for part in path]
        return [*((name, int(end)) for name, end in parts), (last, self.prefix_tokens)]


COLUMNS = tuple(field.name for field in fields(TraceRow))
NEEDED = COLUMNS[:3]


def prompt_of(row: TraceRow, number: int, seed: int) -> array[int]:
    """Return the tokens of row `number`: the same for the same seed, and sharing only the prefix with other rows."""
    tokens: array[int] = array("i")
    for name, end in row.prefixes():
        tokens += _drawn(f"{seed}/prefix/{name}", end - len(tokens))
    return tokens + _drawn(f"{seed}/row/{number}", row.prompt_tokens - len(tokens))


def _drawn(name: str, count: int) -> array[int]:
    """Return `count` tokens below 65,536; fewer tokens of the same name are a prefix of more."""
    return array("i", array("H", shake_256(name.encode()).digest(2 * count)))


def poisson(count: int, prompt_tokens: int, new_tokens: int, rate: float | None, seed: int) -> list[TraceRow]:
    """Return `count` requests of one size, `rate` per second on average; None: all at the start."""
    check_integer(ConfigError, "requests", count, 1)
    if rate is not None:
        check_number(ConfigError, "rate", rate, 1e-9)
    rng = random.Random(seed)
    rows, now = [], 0.0
    for _ in range(count):
        rows.append(TraceRow(now, prompt_tokens, new_tokens))
        now += rng.expovariate(rate) if rate is not None else 0.0
    return rows


# ------------------------------------------------------------------------------------------------------------- CSV


def write_trace(path: Path, rows: Iterable[TraceRow]) -> None:
    """Write the rows. Raises ConfigError if the file cannot be written."""
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(map(astuple, rows))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def read_trace(path: Path) -> list[TraceRow]:
    """Read the rows of a CSV file with a header; the columns of the prefix are optional.

    Raises ConfigError with the file, line, column and value if one is malformed.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if sorted(header) != sorted({*header, *NEEDED} & {*COLUMNS}):
                raise ConfigError(
                    f"{path}, line 1: the columns are {','.join(header) or 'missing'}; they must be "
                    f"{','.join(NEEDED)} and may be {','.join(COLUMNS[3:])}"
                )
            return [_read_row(f"{path}, line {reader.line_num}", header, cells) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}") from error


def _read_row(where: str, header: list[str], cells: list[str]) -> TraceRow:
    if len(cells) != len(header):
        raise ConfigError(f"{where} has {len(cells)} cells; the header has {len(header)}")
    named = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
    try:
        return TraceRow(
            _seconds(named["arrival"]),
            _whole(named, "prompt_tokens"),
            _whole(named, "new_tokens"),
            named.get("prefix_id", ""),
            _whole(named, "prefix_tokens") if named.get("prefix_tokens") else 0,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _seconds(cell: str) -> float:
    try:
        return float(cell)
    except ValueError as error:
        raise ConfigError(f"arrival is {cell!r}; it must be a number of seconds") from error


def _whole(named: Mapping[str, str], column: str) -> int:
    if not WHOLE.fullmatch(named[column]):
        raise ConfigError(f"{column} is {named[column]!r}; it must be a whole number of at most 9 digits")
    return int(named[column])


# ------------------------------------------------------------------------------------------------------- recording


class TraceRecorder:
    """Records each request that is added to an engine. Keeps references, so that final lengths are known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._added: list[tuple[float, Request]] = []

    def add(self, request: Request) -> None:
        """Record a request that arrives now."""
        self._added.append((self._clock(), request))

    def rows(self) -> list[TraceRow]:
        """Return the trace so far, from the first arrival on, with the generated lengths and the shared prefixes.

        Tokens that a step with draft tokens drew after a stop string count as generated.
        """
        if not self._added:
            return []
        start = self._added[0][0]
        keys = [(r.cache_salt, r.tokens[: r.num_prompt].tobytes()) for _, r in self._added]
        return [
            TraceRow(round(at - start, 6), r.num_prompt, r.num_generated, *_prefix_path(salt, prompt, ends))
            for (at, r), (salt, prompt), ends in zip(self._added, keys, _shared_ends(keys), strict=True)
        ]


def _shared_ends(keys: list[tuple[str, bytes]]) -> list[list[int]]:
    """Return, for each prompt with its salt, the numbers of first tokens shared with other prompts, ascending.

    In sorted order the longest common prefix of two prompts is the minimum over the neighbors from one to the other. So
    a stack of ascending lengths contains every length that a prompt shares with any prompt before it.
    """
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = [_common_tokens(keys[i], keys[j]) for i, j in pairwise(order)]
    found: list[set[int]] = [set() for _ in keys]
    for later, lengths in ((order[1:], common), (order[-2::-1], common[::-1])):
        ascending: list[int] = []
        for i, length in zip(later, lengths, strict=True):
            while ascending and ascending[-1] >= length:
                ascending.pop()
            ascending += [length] if length else []
            found[i].update(ascending)
    return [sorted(ends) for ends in found]


def _common_tokens(a: tuple[str, bytes], b: tuple[str, bytes]) -> int:
    """Return the number of tokens before the first difference of two prompts; 0 for different salts."""
    if a[0] != b[0]:
        return 0
    size = min(len(a[1]), len(b[1]))
    different = int.from_bytes(a[1][:size], "little") ^ int.from_bytes(b[1][:size], "little")
    return ((different & -different).bit_length() - 1) // (8 * TOKEN_SIZE) if different else size // TOKEN_SIZE


def _prefix_path(salt: str, prompt: bytes, ends: list[int]) -> tuple[str, int]:
    """Return prefix_id and prefix_tokens. The name of a part is a digest of all tokens up to its end."""
    if not ends:
        return "", 0
    digest, names, start = blake2b(f"{salt}\0".encode(), digest_size=6), [], 0
    for end in ends:
        digest.update(prompt[start * TOKEN_SIZE : end * TOKEN_SIZE])
        names.append(digest.hexdigest())
        start = end
    path = [f"{name}@{end}/" for name, end in zip(names[:-1], ends, strict=False)]
    return "".join(path) + names[-1], ends[-1]
