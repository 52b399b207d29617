"""Readers of traces: the public formats of Mooncake (JSONL) and Azure (CSV), and Quire's own CSV."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.engine.trace import TraceRow, read_trace
from quire.errors import ConfigError, check_integer, check_number

MOONCAKE = ("timestamp", "input_length", "output_length")
MOONCAKE_BLOCK = 512  # tokens of each of a row's hash_ids
AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?", re.ASCII)


def read_rows(path: Path) -> list[TraceRow]:
    """Return the rows of a trace. Their arrivals ascend from 0.

    *.jsonl is Mooncake's format: timestamp (ms), input_length, output_length and, for shared prefixes, hash_ids.
    A CSV file with the columns TIMESTAMP, ContextTokens, GeneratedTokens is Azure's format. Any other CSV is Quire's.
    Raises ConfigError, with the line, if a row is malformed, incomplete, or arrives before the previous one.
    """
    if path.suffix == ".jsonl":
        rows = list(_mooncake(path))
    else:
        rows = list(_azure(path)) if _is_azure(path) else [(0, row) for row in read_trace(path)]
    if not rows:
        raise ConfigError(f"{path} is empty; a trace has a row for each request")
    for number, ((_, before), (line, row)) in enumerate(pairwise(rows), 2):
        if row.arrival < before.arrival:
            where = f"line {line}" if line else f"row {number}"
            raise ConfigError(
                f"{path}, {where}: it arrives at {row.arrival:g} s, before the row above it ({before.arrival:g} s); "
                f"rows must be in the order of their arrivals"
            )
    start = rows[0][1].arrival
    return [TraceRow(row.arrival - start, row.prompt_tokens, row.new_tokens, row.prefix_id, row.prefix_tokens)
            for _, row in rows]  # fmt: skip


def _mooncake(path: Path) -> Iterator[tuple[int, TraceRow]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as JSONL: {error}") from error
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not line.strip():
            raise ConfigError(f"{where} is empty; a trace has no holes")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is no JSON: {error}") from error
        yield number, _mooncake_row(where, found)


def _mooncake_row(where: str, found: Any) -> TraceRow:
    if not isinstance(found, dict) or (lacking := [name for name in MOONCAKE if found.get(name) is None]):
        names = ", ".join(lacking) if isinstance(found, dict) else "everything"
        raise ConfigError(f"{where} lacks {names}; a row has {', '.join(MOONCAKE)}")
    check_number(ConfigError, f"{where}: timestamp", found["timestamp"], 0.0)
    for name, least in (("input_length", 1), ("output_length", 0)):
        check_integer(ConfigError, f"{where}: {name}", found[name], least)
    length, hashes = found["input_length"], found.get("hash_ids") or []
    if not isinstance(hashes, list) or not {*map(type, hashes)} <= {int}:
        raise ConfigError(f"{where}: hash_ids is {str(hashes)[:60]}; it must be a list of integers")
    full, part = divmod(length, MOONCAKE_BLOCK)
    if hashes and len(hashes) not in (full, full + bool(part)):
        raise ConfigError(
            f"{where}: there are {len(hashes)} hash_ids for {length} tokens; each names {MOONCAKE_BLOCK} of them"
        )
    ends = [min(length, (i + 1) * MOONCAKE_BLOCK) for i in range(len(hashes))]
    path = "/".join(f"{name}@{end}" for name, end in zip(hashes[:-1], ends, strict=False))
    prefix = (f"{path}/" if path else "") + str(hashes[-1]) if hashes else ""
    try:
        return TraceRow(found["timestamp"] / 1e3, length, found["output_length"], prefix, ends[-1] if ends else 0)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _is_azure(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [name.strip() for name in next(csv.reader(file), [])] == AZURE
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}") from error


def _azure(path: Path) -> Iterator[tuple[int, TraceRow]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        next(reader)
        start: float | None = None
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if len(cells) != len(AZURE) or not all(cell.strip() for cell in cells):
                raise ConfigError(f"{where} is {','.join(cells)!r}; a row has {', '.join(AZURE)}, without holes")
            moment = _moment(where, cells[0].strip())
            start = moment if start is None else start
            numbers = []
            for name, cell in zip(AZURE[1:], cells[1:], strict=True):
                if not cell.strip().isdecimal():
                    raise ConfigError(f"{where}: {name} is {cell!r}; it must be a whole number")
                numbers.append(int(cell))
            if moment < start:
                raise ConfigError(f"{where}: {cells[0]} is before the first row; rows must be in order")
            try:
                yield reader.line_num, TraceRow(moment - start, numbers[0], numbers[1])
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error


def _moment(where: str, text: str) -> float:
    """Parse a date and time with any number of decimals. Return seconds since 1970."""
    found = MOMENT.fullmatch(text)
    try:
        if found is None:
            raise ValueError("it is another text")
        day = datetime.fromisoformat(f"{found[1]}T{found[2]}").replace(tzinfo=timezone.utc)
        return day.timestamp() + float(found[3] or 0)
    except ValueError as error:
        raise ConfigError(f"{where}: TIMESTAMP is {text!r}; it must be one such as 2023-11-16 18:17:03.979") from error
