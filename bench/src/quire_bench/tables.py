"""Tables in Markdown, and results as files: the format of bench/results."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire_bench.proc import num_cores, processor


def markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a table, or its head."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def markdown_rule(columns: int) -> str:
    """Return the line between a table's head and its rows."""
    return "|" + "---|" * columns


def save(path: Path | None, title: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write figures with their command, date, commit and machine into a file; None: nowhere.

    Figures within others get names such as "ttft p50"; lists, of single runs, are left out. A column that a row lacks
    is null there. Raises ConfigError where the file cannot be written.
    """
    if path is None:
        return
    flat = [dict(_flat("", row)) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    head = {
        "title": title,
        "command": command(sys.argv),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "machine": f"{num_cores()} cores of {processor()}",
        "note": "",
        "columns": columns,
    }
    lines = ",\n  ".join(json.dumps([row.get(name) for name in columns], ensure_ascii=False) for row in flat)
    text = json.dumps(head, ensure_ascii=False, indent=1).removesuffix("\n}") + f',\n "rows": [\n  {lines}\n ]\n}}\n'
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _flat(prefix: str, figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name} ", value)
        elif not isinstance(value, (list, tuple)):
            yield prefix + name, value


def command(words: Sequence[str]) -> str:
    """Return the command line of this process, without the name of the file that figures are saved in."""
    program, *rest = words
    name = "quire" if rest[:1] == ["bench"] else f"python -m quire_bench.{Path(program).parent.name}"
    kept = [word for before, word in zip(["", *rest], rest, strict=False) if "--save" not in (before, word)]
    return " ".join([name, shlex.join(kept)])


def commit() -> str | None:
    """Return the commit of the clone that this package is in; None without one."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.check_output(words, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
