"""The best tiles for a shape: those around the table's choice, and the number of programs for which keys are cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any
from unittest.mock import patch

from quire_bench.gpu.attention import DECODE, PREFILL, Paged, paged, sized
from quire_bench.gpu.common import Bench, Clock

SHAPES = {  # kind of tile -> what it is tried on; "exact": of plans that must be reproducible, for all rows
    "few": {name: DECODE[name] for name in ("64 x 4096", "8 x 32768", "gpt2 64 x 1024")},
    "many": {name: PREFILL[name] for name in ("8 x 4096 D128", "8 x 4096 D64")},
    "exact": {"64 x 4096": DECODE["64 x 4096"], "8 x 4096 D128": PREFILL["8 x 4096 D128"]},
}
AROUND: dict[str, dict[str, tuple[int, ...]]] = {  # kind of tile -> field -> what is tried
    "few": {"block_n": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4, 5)},
    "many": {"block_m": (64, 128), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    "exact": {"block_m": (16, 32, 64, 128), "block_n": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3)},
}
RESIDENT = {"few": (1, 2, 3, 4, 6, 8)}  # programs of a processor that keys are cut for; it matters for few rows
BEST = 6  # of a shape, that are reported


def sweep(bench: Bench) -> None:
    """Stage: tiles for decode and prefill, until its time is up; shapes share it evenly."""
    if bench.backend.name != "triton":
        bench.row("stage", "quire", skipped=f"the backend {bench.backend.name!r} has no tiles")
        return
    turns = [(kind, name) for kind, shapes in SHAPES.items() for name in shapes]
    for i, (kind, name) in enumerate(turns):
        until = bench.seconds_left * (1 - 1 / (len(turns) - i))
        try:
            call = paged(bench, sized(bench, SHAPES[kind][name]), reproducible=kind == "exact")
            _Sweep(bench, call, kind, name).run(until)
        except Exception as error:  # the next shape may work
            bench.failed(name, kind, error)
        bench.forget()


@contextmanager
def _planned_with(kind: str, tile: Any, resident: int) -> Iterator[None]:
    """Plans that are made in here take this tile, and cut keys for so many programs."""
    partition: Any = import_module("quire.ops.triton.partition")
    choose = partition.choose

    def choice(chip: str, wanted: str, spec: Any) -> Any:
        return tile if wanted == kind else choose(chip, wanted, spec)

    on_every_chip = dict.fromkeys(partition.RESIDENT, resident)
    with patch.object(partition, "choose", choice), patch.object(partition, "RESIDENT", on_every_chip):
        yield


class _Sweep:
    """One shape, and what it took with each choice."""

    def __init__(self, bench: Bench, call: Paged, kind: str, name: str) -> None:
        self.bench, self.call, self.kind, self.name = bench, call, kind, name
        tiles: Any = import_module("quire.ops.triton.tiles")
        chip = tiles.chip_of(bench.device)
        self.chosen, self.resident = tiles.choose(chip, kind, call.spec), tiles.RESIDENT[chip]
        self.found: dict[tuple[Any, int], float] = {}
        self.failed = 0

    def run(self, until: float) -> None:
        """The table's choice, other cuts, other tiles, the nearest first, and other cuts of the best tile."""
        fields, nearest = AROUND[self.kind], self.chosen
        tiles = {replace(nearest, **dict(zip(fields, values, strict=True))) for values in product(*fields.values())}
        order = sorted(tiles, key=lambda tile: sum(getattr(tile, f) != getattr(nearest, f) for f in fields))
        order = order[:3] if self.bench.settings.tiny else order
        cuts = RESIDENT.get(self.kind, ())[: 2 if self.bench.settings.tiny else None]
        for tile, cut in [
            (nearest, self.resident),
            *((nearest, cut) for cut in cuts),
            *((tile, self.resident) for tile in order),
        ]:
            if self.bench.seconds_left > until:
                self.time(tile, cut)
        if self.found:
            best, _ = min(self.found, key=lambda choice: self.found[choice])
            for cut in cuts:  # nothing is compiled for these
                self.time(best, cut)
        self.report()

    def time(self, tile: Any, cut: int) -> None:
        """Time one choice, once."""
        if (tile, cut) in self.found:
            return
        call = self.call
        try:
            with _planned_with(self.kind, tile, cut):
                plans = tuple(call.backend.plan(call.spec, call.starts, call.lens, table) for table in call.tables)
            clock = Clock(replace(call, plans=plans).call(), self.bench.on_gpu)
            for _ in range(1 if self.bench.settings.tiny else 5):
                clock.sample()
            self.found[tile, cut] = clock.seconds
        except Exception as error:  # too much shared memory, say
            self.failed += 1
            if tile == self.chosen:
                self.bench.failed(self.name, f"{self.kind}, {_told(tile, cut)}", error)

    def report(self) -> None:
        """The best choices, and the table's."""
        table = (self.chosen, self.resident)
        best = sorted(self.found, key=lambda choice: self.found[choice])[:BEST]
        for choice in dict.fromkeys([table, *best]):
            if choice in self.found:
                took = self.found[choice]
                who = f"{self.kind}, {_told(*choice)}{', the table has it' if choice == table else ''}"
                faster = self.found[table] / took if table in self.found else None
                self.bench.row(self.name, who, us=1e6 * took, value=faster, unit="x the table's rate")
        self.bench.row(self.name, f"{self.kind}, tried", value=len(self.found), unit="choices", failed=self.failed)


def _told(tile: Any, cut: int) -> str:
    sizes = f"{tile.block_m} x {tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"
    return f"{sizes}, {cut} programs a processor"
