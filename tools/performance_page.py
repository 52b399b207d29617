"""Write docs/performance.md from the figures in bench/results: `python tools/performance_page.py`.

Each file there has the command, date, commit and machine of a measurement and its rows; `--save` of a command of
`quire bench` writes one. This page shows the figures that most readers look for. To show further ones, save them and
name the file in `SECTIONS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
HEAD = """# Performance

<!-- Written by tools/performance_page.py from bench/results. -->

Each table names its command, machine and date, and `bench/results` has its rows as data, with figures that this page
leaves out. Checkpoints have random weights in bf16, as speed does not depend on them: `smol135` has the shape of a 135M
Llama (30 layers, 9 heads of 64, 3 KV heads), `llama1b` that of Llama 3.2 1B, `gpt2` that of GPT-2 small. Other engines
ran in alternation with Quire on the same prompts; a ratio is the speed of Quire relative to the other engine.
"""


@dataclass(frozen=True)
class Table:
    """A file of bench/results and the part of it that the page shows."""

    name: str
    columns: Sequence[str] = ()  # none: all
    rows: str = ""  # rows whose first cell has this in it
    engines: Sequence[str] = ()  # titles of engines: a row for each workload, and a column for each of these


ENGINES = ("Quire", "vLLM-CPU", "OpenVINO GenAI", "llama.cpp")
SECTIONS: dict[str, Sequence[Table]] = {
    "Attention: the native CPU kernels": (Table("attention-zen5"), Table("attention-vllm-zen5")),
    "Comparison with other engines": (Table("peers-zen5", engines=ENGINES), Table("peers-amx")),
    "Rounded weights and caches": (
        Table("quantisation-zen5", ("rounded", "context", "KLD", "same top token", "perplexity")),
        Table("peers-rounded-zen5", rows="llama1b", engines=("Quire", "OpenVINO GenAI", "llama.cpp")),
    ),
    "GGUF files, and llama.cpp on the same ones": (Table("gguf-zen5", rows="llama1b", engines=("Quire", "llama.cpp")),),
    "Start-up": (Table("install-zen5"),),
    "The host's part of a step": (Table("host-zen5", rows="text"),),
    "The server": (Table("server"),),
    "On a GPU": (Table("gpu"),),
}


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page that the results give."""
    lines = [HEAD]
    for heading, tables in SECTIONS.items():
        lines += [f"## {heading}", ""]
        for table in tables:
            found = read(table.name)
            lines += [caption(table.name, found), "", *cells(table, found), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def read(name: str) -> dict[str, Any]:
    """Return a result by name."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def caption(name: str, found: dict[str, Any]) -> str:
    """Return the line above a table: where and how its figures were measured."""
    command = f"`{found['command']}`" if found["command"] else ""  # else the rows have one each
    where = ", ".join(part for part in (command, found["date"], f"`{name}`") if part)
    note = f" {found['note'][0].upper()}{found['note'][1:]}." if found["note"] else ""
    return f"**{found['title']}** ({where}): {found['machine']}.{note}"


def cells(table: Table, found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table."""
    columns, rows = found["columns"], [row for row in found["rows"] if table.rows in row[0]]
    if table.engines:
        columns, rows = side_by_side(table.engines, columns, rows)
    shown = [columns.index(name) for name in table.columns or columns]
    yield line([columns[at] for at in shown])
    yield "|" + "---|" * len(shown)
    for row in rows:
        yield line([row[at] for at in shown])


def side_by_side(
    engines: Sequence[str], columns: list[str], rows: list[list[Any]]
) -> tuple[list[str], list[list[Any]]]:
    """Return a row for each workload: new tokens a second (or seconds) of each engine, and Quire's speed over it."""
    wide: dict[str, dict[str, str]] = {}
    for row in rows:
        given = dict(zip(columns, row, strict=True))
        rate, seconds = (median(given[name]) for name in ("new tok/s", "seconds"))
        ratio = median(given["ratio"]) if given["engine"] != "Quire" else ""
        cell = rate or f"{seconds} s"
        wide.setdefault(given["workload"], {})[given["engine"]] = f"{cell}, {ratio} x" if ratio else cell
    body = [[workload, *(of.get(engine, "") for engine in engines)] for workload, of in wide.items()]
    return ["new tokens a second", *engines], body


def median(cell: str) -> str:
    """Return the first figure of a cell such as 2.57 (2.44 to 2.63)."""
    return cell.partition(" (")[0]


def line(row: Sequence[Any]) -> str:
    """Return a row in Markdown; numbers have three digits, or those before the point."""
    return "| " + " | ".join(short(cell) if isinstance(cell, float) else str(cell) for cell in row) + " |"


def short(value: float) -> str:
    """Return three digits, or those before the point."""
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


if __name__ == "__main__":
    main()
