"""How memory is fetched: what decides it, what is said of it, and that no bit depends on it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from quire import ops
from quire.cli import app
from quire.errors import ConfigError
from quire.ops.cpu import fetching, native
from quire.ops.cpu.linear import Packer
from tests.ops.cases import Case, Step

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=native.unavailable() or "")


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The library, which fetches as before afterwards."""
    loaded = ctypes.CDLL(str(native.library_path()))
    yield loaded
    fetching.apply(loaded)


class Vendor:
    """A library on the processor of another vendor."""

    def __init__(self, library: ctypes.CDLL, name: bytes) -> None:
        self._library, self._name = library, name
        self.set_to: tuple[int, ...] | None = None

    def quire_vendor(self, to: ctypes.Array[ctypes.c_char]) -> None:
        to.value = self._name

    def quire_set_fetching(self, *values: int) -> None:
        self.set_to = values

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)


@pytest.mark.parametrize(
    ("vendor", "values"), [(b"GenuineIntel", (1, 3072, 2)), (b"AuthenticAMD", (0, 6144, 1))], ids=str
)
def test_known_cores_have_a_row_in_the_table(library, monkeypatch, vendor: bytes, values: tuple[int, ...]) -> None:
    monkeypatch.delenv(fetching.VARIABLE, raising=False)
    machine = Vendor(library, vendor)
    assert fetching.apply(machine) is fetching.KNOWN[vendor.decode()]
    assert machine.set_to == values


def test_other_cores_are_measured(library, monkeypatch) -> None:
    monkeypatch.delenv(fetching.VARIABLE, raising=False)
    machine = Vendor(library, b"CentaurHauls")
    chosen = fetching.apply(machine)
    assert chosen.source == "measured"
    assert machine.set_to == (fetching.KINDS.index(chosen.weights), chosen.ahead, fetching.KINDS.index(chosen.keys))


@pytest.mark.parametrize(("took", "weights"), [((100, 90, 95), "nta"), ((300, 100, 95), "t1"), ((300, 100, 120), "t0")])
def test_past_the_caches_unless_that_is_much_slower(library, monkeypatch, took: tuple[int, ...], weights: str) -> None:
    class Measured(Vendor):
        @property
        def quire_time_fetching(self) -> object:
            return self

        def __call__(self, memory: object, size: int, kind: int, ahead: int) -> int:
            return took[kind]

    monkeypatch.delenv(fetching.VARIABLE, raising=False)
    assert fetching.apply(Measured(library, b"CentaurHauls")).weights == weights


def test_the_variable_overrides_it_and_info_shows_it(library, monkeypatch) -> None:
    monkeypatch.setenv(fetching.VARIABLE, "t1:512:nta")
    native.default.cache_clear()
    try:
        shown = CliRunner().invoke(app, ["info"]).output
    finally:
        native.default.cache_clear()
    assert "weights t1, 512 bytes ahead, keys and values nta (set by QUIRE_PREFETCH)" in shown


@pytest.mark.parametrize("wanted", ["t3:64:t0", "t0:64", "t0:63:t0", "t0:-64:t0", "t0:65537:t1", "t0:many:t1", ":"])
def test_what_is_not_understood_is_refused(library, monkeypatch, wanted: str) -> None:
    monkeypatch.setenv(fetching.VARIABLE, wanted)
    with pytest.raises(ConfigError, match=r"QUIRE_PREFETCH is .* it must be KIND:BYTES:KIND"):
        fetching.apply(library)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_bit_depends_on_it(library, dtype: torch.dtype) -> None:
    """Distances beyond a whole weight, too."""
    gen = torch.Generator().manual_seed(1)
    weight, x = torch.randn(200, 700, generator=gen).to(dtype), torch.randn(40, 700, generator=gen).to(dtype)
    linear, step, backend = (
        Packer()(weight),
        Step(Case(query_lens=(1, 9), context_lens=(600, 300), dtype=dtype)),
        ops.load("cpu"),
    )
    plan = step.write(backend)
    found = []
    for kind in range(len(fetching.KINDS)):
        for ahead in (64, 3072, 65536):
            library.quire_set_fetching(kind, ahead, kind)
            found.append([*(linear(x[:rows]) for rows in (1, 7, 40)), step.attend(backend, plan)[0]])
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))
