"""The report of a GPU benchmark: every target with its measurement, and all rows as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire_bench.gpu.common import Row
from quire_bench.tables import markdown_row, markdown_rule


@dataclass(frozen=True)
class Rows:
    """The rows, to be asked."""

    rows: list[Row]

    def of(self, stage: str, case: str, who: str) -> Iterable[Row]:
        """Rows of that stage (also of `stage.part`) and case, of all whose name begins so."""
        for row in self.rows:
            if row["case"] == case and row["who"].startswith(who) and row["stage"].split(".")[0] == stage:
                yield row

    def figure(self, stage: str, case: str, who: str, key: str = "us") -> float | None:
        """That figure of exactly this row, or of the first one; None where it is missing."""
        found = [row[key] for row in self.of(stage, case, who) if row["who"] == who and row.get(key) is not None]
        return float(found[0]) if found else None

    def fastest(self, stage: str, case: str, who: str) -> float | None:
        """The shortest time of all whose name begins so."""
        return min((float(row["us"]) for row in self.of(stage, case, who) if row.get("us")), default=None)


@dataclass(frozen=True)
class Target:
    """One target: what is wanted, and how it is read off the rows."""

    name: str
    measure: Callable[[Rows], float | None]
    bound: float
    unit: str  # of the bound: "%" of a share, "x" of a ratio, "TFLOP/s", ...
    peers: str = ""  # the case whose other libraries are reported
    at_most: bool = False  # the bound is an upper one

    def told(self, value: float | None) -> str:
        """A value in the target's unit."""
        if value is None:
            return "not measured"
        return f"{100 * value:.1f} %" if self.unit == "%" else f"{value:.4g} {self.unit}"

    def judge(self, rows: Rows) -> dict[str, Any]:
        """The target, measured."""
        value = self.measure(rows)
        met = None if value is None else value <= self.bound if self.at_most else value >= self.bound
        return {
            "target": self.name,
            "wanted": f"{'at most' if self.at_most else 'at least'} {self.told(self.bound)}",
            "measured": value,
            "told": self.told(value),
            "met": met,
            "beside": _others(rows, "peers", self.peers),
        }


def _others(rows: Rows, stage: str, case: str) -> str:
    """Return the results of the peers in that case."""
    fastest: dict[str, tuple[float, str]] = {}
    for row in rows.of(stage, case, ""):
        if row.get("value") and not row["who"].startswith(("copy", "product", "quire")):
            fastest.setdefault(row["who"], (row["value"], row["unit"]))
    return ", ".join(f"{who} {value:,.4g} {unit}" for who, (value, unit) in fastest.items())


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def _least(values: Iterable[float | None]) -> float | None:
    """The worst of them; None where one is missing."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return min(known) if known and len(known) == len(listed) else None


LONG = ("64 x 4096", "8 x 32768")
CASCADE = "256 x (32768 shared + 256)"


def _against(peer: str, case: str) -> Callable[[Rows], float | None]:
    """Return a function for the speed relative to the peer, in the run that has both."""

    def measure(rows: Rows) -> float | None:
        stage = "peers"
        theirs = rows.fastest(stage, case, peer)
        names = {row["stage"] for row in rows.of(stage, case, peer) if row.get("us")}
        mine = [row["us"] for row in rows.of(stage, case, "quire") if row["stage"] in names and row.get("us")]
        return _ratio(theirs, min(mine, default=None))

    return measure


def _both(peer: str) -> Callable[[Rows], float | None]:
    return lambda rows: _least(_against(peer, case)(rows) for case in LONG)


def _layouts(slower: str, faster: str) -> Callable[[Rows], float | None]:
    """The rate of one layout over that of another, in the worse of the two cases."""
    return lambda rows: _least(
        _ratio(rows.figure("decode", case, slower, "value"), rows.figure("decode", case, faster, "value"))
        for case in LONG
    )


def _share(stage: str, case: str, who: str, key: str) -> Callable[[Rows], float | None]:
    return lambda rows: rows.figure(stage, case, who, key)


def _times(case: str, slower: str, faster: str, key: str = "us") -> Callable[[Rows], float | None]:
    """Return a function for the relative speed of one way of the engine, by its time or by tokens a second."""

    def measure(rows: Rows) -> float | None:
        if key == "us":
            return _ratio(rows.fastest("engine", case, slower), rows.figure("engine", case, faster))
        return _ratio(rows.figure("engine", case, faster, key), rows.figure("engine", case, slower, key))

    return measure


def _cost(stage: str, cases: Iterable[str], who: str = "quire") -> Callable[[Rows], float | None]:
    """The share of the time that reproducibility costs, at worst."""

    def measure(rows: Rows) -> float | None:
        kept = _least(
            _ratio(rows.figure(stage, case, who), rows.figure(stage, case, f"{who}, reproducible")) for case in cases
        )
        return None if kept is None else 1 / kept - 1

    return measure


WIDE, NARROW, ROSE, SHARED = "8 x 4096 D128", "8 x 4096 D64", "engine, rose", "engine, rose_shared"
GPT2, LARGE = "gpt2, batch 64", "8B, batch 32"
COPY = "bf16, 32/8 heads, D 128: share of the copy's bandwidth"
TARGETS = (
    Target("correctness: tests that pass", _share("correctness", "tests/ops", "pytest", "value"), 1.0, "%"),
    *(Target(f"decode {case}, {COPY}", _share("decode", case, "quire", "share"), 0.9, "%", case) for case in LONG),
    Target("decode against FA3 paged", _both("fa3"), 1.0, "x"),
    Target("decode against FlashInfer", _both("flashinfer"), 1.0, "x"),
    Target("decode: blocks of 16 against 256", _layouts("quire", "quire, blocks of 256"), 0.97, "%"),
    Target("decode: paged against contiguous", _layouts("quire", "quire, contiguous"), 0.97, "%"),
    Target("prefill, causal, 8 x 4096, D 128", _share("prefill", WIDE, "quire", "value"), 450, "TFLOP/s", WIDE),
    Target("prefill against vLLM's Triton kernel", _against("vllm's triton", WIDE), 1.5, "x"),
    Target("prefill, causal, 8 x 4096, D 64", _share("prefill", NARROW, "quire", "value"), 330, "TFLOP/s", NARROW),
    Target(
        "cascade, 256 sequences, 32k shared: share of the roof",
        _share("cascade", CASCADE, "shared tables, speedup", "share"),
        0.6,
        "%",
    ),
    Target(f"{ROSE}: against transformers' continuous batching", _times("rose", "transformers", "paged"), 3.0, "x"),
    Target(
        f"{SHARED}: paged over gathered, online", _times("rose_shared", "gathered, online", "paged, online"), 4.02, "x"
    ),
    Target(f"{SHARED}: paged over gathered, offline", _times("rose_shared", "gathered", "paged", "value"), 5.35, "x"),
    Target(
        f"{SHARED}: paged over one by one", _times("rose_shared", "gathered, one by one", "paged", "value"), 6.73, "x"
    ),
    Target(
        "decode step over its floor, GPT-2, batch 64", _share("steps", GPT2, "step", "value"), 1.8, "x", at_most=True
    ),
    Target("decode step over its floor, 8B", _share("steps", LARGE, "step", "value"), 1.3, "x", at_most=True),
    Target(f"{ROSE}: cost of being reproducible", _cost("engine", ("rose",), "paged"), 0.05, "%", at_most=True),
    Target("decode: cost of being reproducible", _cost("decode", LONG), 0.05, "%", at_most=True),
    Target("prefill: cost of being reproducible", _cost("prefill", (WIDE, NARROW)), 0.05, "%", at_most=True),
)


def judged(rows: list[Row], targets: Iterable[Target] = TARGETS) -> list[dict[str, Any]]:
    """Every target, in order."""
    return [target.judge(Rows(rows)) for target in targets]


def markdown(environment: dict[str, Any], rows: list[Row], targets: Iterable[Target] = TARGETS) -> str:
    """The whole report."""
    lines = [", ".join(f"{name} {value}" for name, value in environment.items()), ""]
    lines += _table(
        ("target", "wanted", "measured", "met", "beside it"),
        [
            (one["target"], one["wanted"], one["told"], {True: "yes", False: "no", None: ""}[one["met"]], one["beside"])
            for one in judged(rows, targets)
        ],
    )
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = [row for row in rows if row["stage"] == stage]
        lines += ["", f"## {stage}", ""]
        lines += _table(("case", "who", "µs", "figure", "share", "more"), [_cells(row) for row in own])
    return "\n".join(lines) + "\n"


TOLD = {"stage", "case", "who", "us", "value", "unit", "share"}  # in columns of their own


def _cells(row: Row) -> tuple[str, ...]:
    us, value, share = (row.get(key) for key in ("us", "value", "share"))
    rest = ", ".join(f"{key} {_short(x)}" for key, x in row.items() if key not in TOLD)
    return (
        row["case"],
        row["who"],
        "" if us is None else f"{us:,.1f}",
        "" if value is None else f"{value:,.4g} {row.get('unit', '')}".strip(),
        "" if share is None else f"{100 * share:.1f} %",
        rest,
    )


def _short(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def _table(head: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    return [markdown_row(head), markdown_rule(len(head)), *map(markdown_row, body)]
