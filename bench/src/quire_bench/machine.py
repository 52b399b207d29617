"""The rates of this machine, the share of them that the kernels reach, and the targets that this meets.

The targets are for bf16 on a CPU whose AMX tiles the kernels use; on another one there are figures only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch

from quire import ops
from quire.errors import QuireError
from quire.frontend.llm import LLM
from quire.models import choose, locate
from quire.ops import native
from quire.ops.memory import in_huge_pages
from quire_bench.engine import throughput
from quire_bench.kernels import attention, linear, onednn
from quire_bench.kernels.attention import Shape
from quire_bench.kernels.linear import LinearFigure, LinearShape
from quire_bench.proc import num_cores, processor
from quire_bench.workloads import workload

POOL_BYTES = attention.CACHE_BYTES  # of weights
LINEARS = tuple(
    LinearShape(model, *sizes)
    for model, pairs in {
        "135M": ((576, 960), (576, 1536), (576, 3072), (1536, 576)),
        "GPT-2": ((768, 2304), (768, 3072), (3072, 768)),
        "1B": ((2048, 3072), (2048, 8192), (2048, 16384), (8192, 2048)),
    }.items()
    for sizes in pairs
)
LARGE = "1B"  # the model whose linears have targets of their own
ROWS = (32, 128, 512, 2048)
PREFILL = tuple(
    Shape(batch=1, num_heads=32, num_kv_heads=8, head_dim=dim, context_len=2048, query_len=2048) for dim in (64, 128)
)
DECODE = tuple(
    Shape(batch=32, num_heads=8 * group, num_kv_heads=8, head_dim=64, context_len=1024) for group in (1, 4, 8)
)
WORKLOADS = ("rose", "mixed", "decode", "single", "prefix")


@dataclass(frozen=True)
class Target:
    """A limit of a ratio."""

    limit: float
    at_most: bool = False

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"

    def met(self, ratio: float) -> bool:
        """Return whether the ratio is on the right side of the limit."""
        return ratio <= self.limit if self.at_most else ratio >= self.limit


ONE_ROW = Target(0.85)  # of the read rate, a large linear
MORE_ROWS = Target(1.15, at_most=True)  # times the time of one row, 32 rows of a large linear
ONEDNN, ONEDNN_LARGE = Target(1.0), Target(1.2)  # times as fast
PREFILL_TARGETS = {64: Target(0.35), 128: Target(0.5)}  # of the product rate
DECODE_TARGET = Target(0.8)  # of the read rate


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    value: float | None = None  # None: not measured, and `note` says why
    unit: str = ""
    ratio: float | None = None  # of `value` to what `compared_to` names
    compared_to: str = ""
    target: Target | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Return whether the target is met, or None if there is no target or no ratio."""
        return None if self.target is None or self.ratio is None else self.target.met(self.ratio)

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self) | {"target": None if self.target is None else str(self.target), "met": self.met}

    def __str__(self) -> str:
        value = f"{'-':>10s} {'':9s}" if self.value is None else f"{self.value:10,.1f} {self.unit:9s}"
        ratio = "" if self.ratio is None else f"{self.ratio:6.2f} x {self.compared_to}"
        verdict = "" if self.met is None else f"{self.target!s:>8s}  {'met' if self.met else 'not met'}"
        return f"{self.name:36s}{value}{ratio:28s}{verdict}{self.note}".rstrip()


HEAD = f"{'measured':36s}{'':20s}{'ratio':28s}{'must':>8s}  met"


def about() -> dict[str, Any]:
    """Return the machine that is measured. Raises Unsupported where the native kernels do not run."""
    library = native.default()
    return {
        "processor": processor(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "isa": library.isa,
        "fetching": str(library.fetching),
        "torch": str(torch.__version__),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def measure(models: Sequence[str], seconds: float, runs: int) -> Iterator[Row]:
    """All rows, one after the other.

    models: for which the workloads run. seconds: about as long as each comparison of linears takes. runs: calls of
    attention. Raises Unsupported where the native kernels do not run, and ConfigError or ModelError for a model.
    """
    for model in models:
        choose(locate(model))  # before minutes have passed
    judged = native.default().isa == "amx"
    yield from rates(runs)
    yield from linears(seconds, judged=judged)
    yield from attentions(runs, judged=judged)
    for model in models:
        yield from workloads(model)
    if not models:
        yield Row(name="workloads", note="left out: no --model was given")


def rates(runs: int) -> Iterator[Row]:
    """Yield the rates at which the machine reads and multiplies, back to back: medians."""
    threads = torch.get_num_threads()
    read, multiply = attention.read_rate(threads), attention.product_rate("bfloat16", threads)
    read(), multiply()
    rounds = [(read(), multiply()) for _ in range(runs)]
    read_rate, product_rate = (statistics.median(column) for column in zip(*rounds, strict=True))
    yield Row(name="read rate", value=read_rate, unit="GB/s")
    lacking = onednn.lacking()
    note = "" if lacking is None else f"multiply-adds in registers, as {lacking}"
    yield Row(name="product rate", value=product_rate, unit="GFLOP/s", note=note)


def linears(seconds: float, *, judged: bool) -> Iterator[Row]:
    """Linears of the models: one row compared with the read rate, more with one, and with oneDNN."""
    memory = in_huge_pages((POOL_BYTES,), torch.uint8)
    reader = attention.read_rate(torch.get_num_threads())
    for shape in LINEARS:
        for rows in ROWS:
            figure = linear.measure(shape, rows, memory, reader, seconds)
            if figure.one_row_seconds is not None:
                yield from _few_rows(figure, figure.one_row_seconds, judged=judged)
            yield _against_onednn(figure, judged=judged)


def _few_rows(figure: LinearFigure, one: float, *, judged: bool) -> Iterator[Row]:
    """One row's share of the read rate, and how many times as long the figure's rows take."""
    shape = figure.shape
    large = judged and shape.model == LARGE
    rate = shape.weight_bytes / one / 1e9
    yield Row(
        name=f"{shape.name}, 1 row",
        value=rate,
        unit="GB/s",
        ratio=rate / figure.read,
        compared_to="read rate",
        target=ONE_ROW if large else None,
    )
    yield Row(
        name=f"{shape.name}, {figure.rows} rows",
        value=1e6 * figure.seconds,
        unit="us",
        ratio=figure.seconds / one,
        compared_to="time of one row",
        target=MORE_ROWS if large else None,
    )


def _against_onednn(figure: LinearFigure, *, judged: bool) -> Row:
    name = f"{figure.shape.name}, {figure.rows} rows"
    if figure.onednn_seconds is None:
        return Row(name=name, value=figure.rate, unit="GFLOP/s", note=onednn.lacking() or "")
    target = ONEDNN_LARGE if figure.shape.model == LARGE else ONEDNN
    return Row(
        name=name,
        value=figure.rate,
        unit="GFLOP/s",
        ratio=figure.onednn_seconds / figure.seconds,
        compared_to="oneDNN's speed",
        target=target if judged else None,
    )


def attentions(runs: int, *, judged: bool) -> Iterator[Row]:
    """Prefill as a share of the product rate, decode of the read rate."""
    backend = ops.load("cpu")
    for shape in PREFILL + DECODE:
        figure = attention.measure(backend, shape, runs, sdpa_runs=0)
        decode = shape.query_len == 1
        target = DECODE_TARGET if decode else PREFILL_TARGETS[shape.head_dim]
        kind = f"decode, G = {shape.num_heads // shape.num_kv_heads}" if decode else f"prefill, D = {shape.head_dim}"
        yield Row(
            name=f"{kind}, {shape.batch} x {shape.context_len} tokens",
            value=figure.rate,
            unit="GB/s" if decode else "GFLOP/s",
            ratio=figure.fraction,
            compared_to="read rate" if decode else "product rate",
            target=target if judged else None,
        )


def workloads(model: str) -> Iterator[Row]:
    """New tokens a second of the workloads, each run once after one that warms up."""
    llm = LLM(model, num_speculative_tokens=0)
    throughput.measure(llm, workload("single"), warmup=0, runs=1)
    for name in WORKLOADS:
        shown = f"{name}, {llm.files.path.name}"
        try:
            found = throughput.measure(llm, workload(name), warmup=0, runs=1)
        except QuireError as error:  # as where its prompts are longer than the model takes
            yield Row(name=shown, note=f"not measured: {error}")
        else:
            yield Row(name=shown, value=found.workload.num_new_tokens / found.median, unit="new tok/s")
