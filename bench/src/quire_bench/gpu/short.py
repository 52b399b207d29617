"""The figures that are wanted of a GPU first, in less than four minutes: `quire bench gpu --only short`.

Each stage is a function of a `Bench` with a limit, in STAGES; TARGETS reads the table off their rows. A stage races the
backend "triton" and, where it can run, "hopper", with FlashAttention 3 if its library is given.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire import ops
from quire_bench.gpu import engine, nano
from quire_bench.gpu.attention import CASCADE, DECODE, NARROW, PREFILL, cascade, ours, paged, sized
from quire_bench.gpu.common import Bench, Call, Contestant, Stage, copy, product, race
from quire_bench.gpu.libraries import fa3
from quire_bench.gpu.linears import linears
from quire_bench.gpu.report import Rows, Target
from quire_bench.kernels.attention import Shape

ROOT = Path(__file__).parents[4]
BLOCK_SIZES = (1, 4, 8, 16, 32, 128, 256)
CHECKED = ((64, 8), (64, 16), (64, 256), (128, 16), (128, 32), (128, 128))  # head dimensions and block sizes
MASKS: dict[str, dict[str, Any]] = {"": {}, ", not causal": {"causal": False}, ", window of 200": {"window": 200}}
WINDOW = 1024  # keys, of a prompt that is timed
MOST_ERROR, MOST_LSE_ERROR = 0.03, 2e-3  # of bf16 rows of size 1, and of their LSE
DOWN = (14336, 4096)  # inputs and outputs of the product with the fewest outputs


def with_hopper(bench: Bench) -> dict[str, Bench]:
    """The benches of both backends by name: "quire", and "hopper" where it can run, which is reported otherwise."""
    found = {"quire": bench}
    if (reason := ops.unavailable("hopper", bench.device)) is None:
        found["hopper"] = Bench(replace(bench.settings, backend="hopper"), bench.stage, bench.emit, bench.deadline)
    else:
        bench.row("stage", "hopper", skipped=reason)
    return found


def suite(bench: Bench) -> None:
    """Stage: the operators' tests on the GPU. If its time is up, those that have run count."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=line"]
    command += ["-n", "8"] if importlib.util.find_spec("xdist") is not None else []
    tests = ["tests/ops/test_state.py"] if bench.settings.tiny else ["tests/ops", "-k", "triton or hopper"]
    limit, ended = max(1.0, bench.seconds_left - 4), True
    try:
        done = subprocess.run([*command, *tests], capture_output=True, check=False, cwd=ROOT, timeout=limit)
        shown = done.stdout
    except subprocess.TimeoutExpired as error:
        shown, ended = error.stdout or b"", False
    passed, failed = outcomes(shown.decode(errors="replace"))
    if not passed:
        bench.failed("tests/ops", "pytest", shown.decode(errors="replace") or "no test had ended")
        return
    found = {"value" if ended else "failures_so_far": float(len(failed)), "unit": "failures"}
    bench.row("tests/ops", "pytest", **found, passes=passed, ended=ended, names=failed[:12])


def outcomes(shown: str) -> tuple[int, list[str]]:
    """Return the number of tests that passed, and the names of the others, from what `pytest -v` has written so far."""
    passed, failed = 0, set()
    for line in shown.splitlines():
        # "NAME OUTCOME [ 1%]", or of several processes "[gw0] [ 1%] OUTCOME NAME".
        if found := re.match(r"(tests/.*?) (PASSED|FAILED|ERROR)\b", line):
            name, outcome = found.groups()
        elif found := re.match(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR) (tests/.*)", line):
            outcome, name = found.groups()
        else:
            continue
        if outcome == "PASSED":
            passed += 1
        else:
            failed.add(name.strip())
    return passed, sorted(failed)


def exact(bench: Bench) -> None:
    """Stage: prompts against float64 over a cache in which what no sequence owns is NaN; the same bits each time."""
    for who, own in with_hopper(bench).items():
        for head_dim, block_size in CHECKED[: 1 if bench.settings.tiny else None]:
            for name, fields in MASKS.items():
                case = f"D {head_dim}, blocks of {block_size}{name}"
                try:
                    error, lse_error, same = _errors(own, head_dim, block_size, fields)
                except Exception as raised:
                    own.failed(case, who, raised)
                    continue
                passed = error < MOST_ERROR and lse_error < MOST_LSE_ERROR and same
                own.row(case, who, passed=passed, value=error, unit="error", lse_error=lse_error, same_bits=same)
            own.forget()


def _errors(bench: Bench, head_dim: int, block_size: int, fields: dict[str, Any]) -> tuple[float, float, bool]:
    """The largest errors of the rows and of their LSE (NaN counts as infinite), and whether bits repeat."""
    lens = [1, 37, 300, 129, 40] if bench.settings.tiny else [1, 37, 130, 300, 2500, 129, 128, 4096, 300, 777]
    rows = [1, 5, 40, 129, 7] if bench.settings.tiny else [1, 5, 130, 64, 300, 33, 128, 2048, 300, 96]
    heads, group, device = 2, 4, bench.device
    counts = [-(-n // block_size) for n in lens]
    order = torch.randperm(sum(counts) + 5, dtype=torch.int32)
    tables = torch.full((len(lens), max(counts)), 2**31 - 1, dtype=torch.int32)
    shape = (len(order), 2, heads, block_size, head_dim)
    memory = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    held = []
    for s, (n, count) in enumerate(zip(lens, counts, strict=True)):
        tables[s, :count], order = order[:count], order[count:]
        flat = torch.arange(n)
        block, slot = tables[s, flat // block_size].long().to(device), (flat % block_size).to(device)
        held.append(torch.randn(n, 2, heads, head_dim, device=device).bfloat16())
        memory[block, :, :, slot] = held[-1]
    spec = bench.spec(
        num_heads=heads * group, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, num_blocks=shape[0],
        dtype=torch.bfloat16, **fields,
    )  # fmt: skip
    starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    plan = bench.backend.plan(spec, starts, torch.tensor(lens, dtype=torch.int32), tables)
    q = torch.randn(sum(rows), heads * group, head_dim, device=device).bfloat16()
    kv = ops.PagedKV(memory[:, 0], memory[:, 1])

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return bench.backend.attention(q, kv, plan, return_lse=True)

    out, lse = call()
    same = all(torch.equal(x, y) for _ in range(3) for x, y in zip(call(), (out, lse), strict=True))
    worst = [0.0, 0.0]
    for s, (n, own) in enumerate(zip(lens, held, strict=True)):
        at = slice(int(starts[s]), int(starts[s + 1]))
        k, v = own.double().repeat_interleave(group, 2).unbind(1)
        score = torch.einsum("thd,khd->htk", q[at].double(), k) * spec.default_scale
        if spec.causal:
            before = torch.arange(n - rows[s], n, device=device)[:, None] - torch.arange(n, device=device)
            score.masked_fill_((before < 0) | (before >= (spec.window or n)), -torch.inf)
        wanted = torch.einsum("htk,khd->thd", score.softmax(-1), v), score.logsumexp(-1).T
        for i, (found, want) in enumerate(zip((out[at], lse[at]), wanted, strict=True)):
            away = (found.double() - want).abs().nan_to_num(torch.inf, torch.inf).max()
            worst[i] = max(worst[i], float(away))
    return worst[0], worst[1], same


def prompts(bench: Bench) -> None:
    """Stage: causal prompts, next to the reproducible plan and FlashAttention 3, and with a window."""
    for case in ("8 x 4096 D128", "8 x 4096 D64"):
        shape = sized(bench, PREFILL[case])
        work = float(shape.operations)
        contestants = {"product": product(bench)}
        for who, own in with_hopper(bench).items():
            contestants[who] = ours(own, shape, work, "TFLOP/s")
        contestants |= _others(bench, shape, work, "TFLOP/s")
        race(bench, case, contestants, "product", rounds=3, shape=shape.name)
        bench.forget()
        # Rates of the operations without a window, to compare with those above.
        windowed = {who: ours(own, shape, work, "TFLOP/s", window=WINDOW) for who, own in with_hopper(bench).items()}
        race(bench, f"{case}, window of {WINDOW}", windowed, rounds=2, shape=shape.name)
        bench.forget()


def _others(bench: Bench, shape: Shape, work: float, unit: str) -> dict[str, Contestant]:
    """The reproducible plan, where there is one, and FlashAttention 3, where its library is given."""
    found = {}
    if bench.backend.limits.reproducible:
        found["quire, reproducible"] = ours(bench, shape, work, unit, reproducible=True)
    if bench.settings.fa3 is not None:

        def made() -> Call:
            mine = paged(bench, shape)
            return mine.turns(fa3(bench, mine))

        found["fa3"] = Contestant(made, work, unit)
    return found


def decodes(bench: Bench) -> None:
    """Stage: decoding beside a copy, by block size, with caches of 8 bits, and FlashAttention 3."""
    for case in ("64 x 4096", "8 x 32768"):
        shape = sized(bench, DECODE[case])
        work = float(shape.kv_bytes)
        contestants = {"copy": copy(bench), "quire": ours(bench, shape, work, "GB/s")}
        for name, dtype in NARROW.items():
            if dtype in bench.backend.limits.kv_dtypes[torch.bfloat16]:
                contestants[f"quire, {name}"] = ours(bench, shape, work / 2, "GB/s", kv_dtype=dtype)
        race(bench, case, contestants | _others(bench, shape, work, "GB/s"), "copy", rounds=3, shape=shape.name)
        bench.forget()


def blocks(bench: Bench) -> None:
    """Stage: decoding and prompts with blocks of each size."""
    cases = {"64 x 4096": (DECODE, "GB/s"), "8 x 4096 D128": (PREFILL, "TFLOP/s")}
    for case, (shapes, unit) in cases.items():
        whole = sized(bench, shapes[case])
        work = float(whole.kv_bytes if unit == "GB/s" else whole.operations)
        backends = {"quire": bench} if unit == "GB/s" else with_hopper(bench)
        contestants = {
            f"{who}, blocks of {size}": ours(own, replace(whole, block_size=size), work, unit)
            for who, own in backends.items()
            for size in BLOCK_SIZES
            if who == "quire" or size >= 8
        }
        race(bench, case, contestants, rounds=2)
        bench.forget()


def cascades(bench: Bench) -> None:
    """Stage: a prefix of all sequences, by each backend."""
    for who, own in with_hopper(bench).items():
        cascade(_named(own, who))


def _named(bench: Bench, who: str) -> Bench:
    """The bench, with `who` before the name of each row of Quire."""
    prefix = "" if who == "quire" else f"{who}, "
    emit = bench.emit
    return Bench(bench.settings, bench.stage, lambda row: emit(row | {"who": prefix + row["who"]}), bench.deadline)


def products(bench: Bench) -> None:
    """Stage: quantised and reproducible products with few outputs, for few rows."""
    linears(bench, (DOWN,), (1, 32), ())


def steps(bench: Bench) -> None:
    """Stage: a step of decoding against the time to read weights and KV once, also reproducible."""
    engine.steps(bench, (("gpt2, batch 64", 64, 900), ("8B, batch 32", 32, 2048)))


def _decided(name: str, bench: Bench) -> None:
    """Stage: figures of `quire_bench.gpu.rows`, which decide what is on by default."""
    if bench.backend.name != "triton":
        bench.row(name, "quire", skipped=f"it measures the backend 'triton', not {bench.backend.name!r}")
        return
    from quire_bench.gpu.rows import ROWS  # imports Triton

    figures = ROWS[name](bench)
    counted = {"value": float(len(figures["FAILED"])), "unit": "failures"} if "FAILED" in figures else {}
    bench.row(name, "quire", figures=figures, **counted)


DECIDED = ("bits", "reproducible", "narrow_caches", "few_outputs", "sections", "captured_exchange", "ranks")
STAGES: dict[str, Stage] = {
    "suite": Stage(suite, 55, beside=True),
    "exact": Stage(exact, 30, compiles=True),
    "prompts": Stage(prompts, 25, compiles=True),
    "decodes": Stage(decodes, 20, compiles=True),
    "cascades": Stage(cascades, 20, compiles=True),
    "products": Stage(products, 15, compiles=True),
    "nano": Stage(nano.ours, 60),
    "steps": Stage(steps, 30, compiles=True),
    "nano-peer": Stage(nano.theirs, 45),
    "blocks": Stage(blocks, 25, compiles=True),
} | {name: Stage(partial(_decided, name), 40) for name in DECIDED}


def _figure(stage: str, case: str, who: str, key: str = "us") -> Callable[[Rows], float | None]:
    """Return a function for a figure of a stage's row."""

    def read(rows: Rows) -> float | None:
        return Rows([row for row in rows.rows if row["stage"] == f"short.{stage}"]).figure("short", case, who, key)

    return read


def _over(stage: str, case: str, above: str, below: str, key: str = "us") -> Callable[[Rows], float | None]:
    """Return a function for the ratio of one row's figure to another's."""

    def read(rows: Rows) -> float | None:
        first, second = (_figure(stage, case, who, key)(rows) for who in (above, below))
        return None if first is None or not second else first / second

    return read


def _cost(stage: str, case: str, who: str) -> Callable[[Rows], float | None]:
    """Return a function for the time that being reproducible costs, as a share."""

    def read(rows: Rows) -> float | None:
        found = _over(stage, case, f"{who}, reproducible", who)(rows)
        return None if found is None else found - 1

    return read


def _peer(rows: Rows) -> float | None:
    """Return Quire's tokens a second over nano-vllm's."""
    mine, theirs = (
        _figure(stage, nano.CASE, who, "value")(rows) for stage, who in (("nano", "quire"), ("nano-peer", "nano-vllm"))
    )
    return None if mine is None or not theirs else mine / theirs


_WIDE, _THIN, _MANY, _LONG = "8 x 4096 D128", "8 x 4096 D64", "64 x 4096", "8 x 32768"
_CASCADE = f"{CASCADE.batch} x ({CASCADE.shared} shared + {CASCADE.own})"
_PRODUCT = f"{DOWN[0]} x {DOWN[1]}"
_CASCADED = "shared tables, speedup"
_at_most = partial(Target, at_most=True)
TARGETS = (
    _at_most("tests/ops on the GPU: failures", _figure("suite", "tests/ops", "pytest", "value"), 0, "failures"),
    _at_most("reproducible: cases with other bits", _figure("bits", "bits", "quire", "value"), 0, "failures"),
    Target("prefill 8 x 4096, D 128, hopper: rate", _figure("prompts", _WIDE, "hopper", "value"), 500, "TFLOP/s"),
    Target("prefill 8 x 4096, D 128, hopper: share of FA3", _over("prompts", _WIDE, "fa3", "hopper"), 0.9, "x"),
    Target("prefill 8 x 4096, D 64, hopper: share of FA3", _over("prompts", _THIN, "fa3", "hopper"), 0.95, "x"),
    Target("prefill 8 x 4096, D 128: hopper over triton", _over("prompts", _WIDE, "quire", "hopper"), 1.0, "x"),
    Target("decode 64 x 4096: share of the copy", _figure("decodes", _MANY, "quire", "share"), 0.98, "%"),
    Target("decode 8 x 32768: share of the copy", _figure("decodes", _LONG, "quire", "share"), 0.98, "%"),
    Target("decode 64 x 4096: against FA3", _over("decodes", _MANY, "fa3", "quire"), 1.0, "x"),
    Target("decode 8 x 32768: against FA3", _over("decodes", _LONG, "fa3", "quire"), 1.0, "x"),
    *(
        Target(f"{what}: blocks of 16 against 256", _over("blocks", case, f"{who} 256", f"{who} 16"), 0.98, "%")
        for what, case, who in (
            ("decode", _MANY, "quire, blocks of"),
            ("prefill, triton", _WIDE, "quire, blocks of"),
            ("prefill, hopper", _WIDE, "hopper, blocks of"),
        )
    ),
    Target("cascade, triton: share of its roof", _figure("cascades", _CASCADE, _CASCADED, "share"), 0.6, "%"),
    Target(
        "cascade, hopper: share of its roof", _figure("cascades", _CASCADE, f"hopper, {_CASCADED}", "share"), 0.6, "%"
    ),
    *(
        _at_most(f"reproducible: cost in {what}", _cost(stage, case, who), 0.05, "%")
        for what, stage, case, who in (
            ("decode, 64 x 4096", "decodes", _MANY, "quire"),
            ("decode, 8 x 32768", "decodes", _LONG, "quire"),
            ("prefill, D 128", "prompts", _WIDE, "quire"),
            ("prefill, D 64", "prompts", _THIN, "quire"),
            ("a step of 8B", "steps", "8B, batch 32", "step"),
        )
    ),
    *(
        _at_most(
            f"{kind}, {rows} rows of {_PRODUCT}: time over bf16",
            _over("products", f"{rows} x {_PRODUCT}", f"quire, {who}", "torch"),
            0.7,
            "x",
        )
        for kind, who in (("int4", "int4, groups of 128"), ("int8", "int8"))
        for rows in (1, 32)
    ),
    *(
        _at_most(
            f"{kind} cache, decode 64 x 4096: time over bf16",
            _over("decodes", _MANY, f"quire, {kind}", "quire"),
            0.7,
            "x",
        )
        for kind in NARROW
    ),
    Target("nano-vllm's benchmark: new tokens a second over its own", _peer, 1.3, "x"),
    _at_most("GPT-2, 64 sequences: step over floor", _figure("steps", "gpt2, batch 64", "step", "value"), 2.0, "x"),
)
