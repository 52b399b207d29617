"""How memory is fetched: what decides it, what is said of it, and that no bit depends on it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from quire import LLM, SamplingParams, ops
from quire.cli import app
from quire.errors import ConfigError, Unsupported
from quire.ops import fetching, native
from quire.ops.cpu.linear import Packer
from tests.ops.cases import Case, Step

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=native.unavailable() or "")


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The library, which fetches as before afterwards."""
    loaded = ctypes.CDLL(str(native.library_path()))
    yield loaded
    fetching.apply(loaded, native.default().fetching)


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
    ("vendor", "values"), [(b"GenuineIntel", (1, 2560, 2)), (b"AuthenticAMD", (0, 6144, 1))], ids=str
)
def test_known_cores_have_a_row_in_the_table(library, vendor: bytes, values: tuple[int, ...]) -> None:
    machine = Vendor(library, vendor)
    chosen = fetching.choose(machine)
    assert chosen is fetching.KNOWN[vendor.decode()]
    fetching.apply(machine, chosen)
    assert machine.set_to == values


def test_other_cores_are_measured(library) -> None:
    assert fetching.choose(Vendor(library, b"CentaurHauls")).source == "measured"


@pytest.mark.parametrize(("took", "weights"), [((100, 90, 95), "nta"), ((300, 100, 95), "t1"), ((300, 100, 120), "t0")])
def test_past_the_caches_unless_that_is_much_slower(library, took: tuple[int, ...], weights: str) -> None:
    class Measured(Vendor):
        @property
        def quire_time_fetching(self) -> object:
            return self

        def __call__(self, memory: object, size: int, kind: int, ahead: int) -> int:
            return took[kind]

    assert fetching.choose(Measured(library, b"CentaurHauls")).weights == weights


def test_info_shows_it() -> None:
    shown = CliRunner().invoke(app, ["info"]).output
    assert f"prefetch           {native.default().fetching}" in shown


def test_an_option_overrides_it(library) -> None:
    """For the process; other backends have no choice."""
    before = LLM(prefetch="t1:512:nta").generate("import", SamplingParams(max_tokens=20))
    fetching.apply(library, native.default().fetching)
    assert LLM().generate("import", SamplingParams(max_tokens=20))[0].outputs == before[0].outputs
    with pytest.raises(Unsupported, match=r"prefetch is 't1:512:nta'; the backend 'reference' leaves"):
        LLM(prefetch="t1:512:nta", attention_backend="reference")


def test_loading_other_kernels_of_the_library_leaves_it(library, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.load("cpu").set_prefetch("t1:512:nta")
    monkeypatch.setattr(fetching, "apply", lambda *given: pytest.fail(f"set again: {given}"))
    for isa in native.runnable(native.library_path()):
        native.load(isa)
    monkeypatch.undo()


@pytest.mark.parametrize(
    "wanted", ["t3:64:t0", "t0:64", "t0:63:t0", "t0:-64:t0", "t0:65537:t1", "t0:many:t1", f"t0:{'9' * 5000}:t0", ""]
)
def test_what_is_not_understood_is_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"prefetch is .* it must be KIND:BYTES:KIND"):
        LLM(prefetch=wanted)


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
