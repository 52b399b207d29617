"""Which backend a test runs on, and on which device: decided here and nowhere else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import ops
from quire.ops import native
from tests.marks import meetings, of_long_runs

HERE = Path(__file__).parent
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are small, and on shared cores a second thread makes them twenty times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The cpu backend runs the best instruction set of a machine; the others it is told to.
OTHER_ISAS = [] if native.unavailable() else native.runnable(native.library_path())[1:]
SLOW = pytest.mark.slow
NATIVE = ["cpu", *(pytest.param(f"cpu on {isa}", marks=SLOW) for isa in OTHER_ISAS)]
# The tests of what the kernels compute. What is checked before a call, and what is made of calls, is the same on every
# instruction set, so the other tests run on the best one only.
OF_KERNELS = (
    "cpu/",
    "test_conformance.py",
    "test_int8_cache.py",
    "test_not_finite.py",
    "test_recurrent.py",
    "test_sampling_operators.py",
    "test_sizes.py",
    "test_small_operators.py",
    "test_sparse.py",
    "test_states.py",
)
# gather differs from the reference in attention alone.
WITHOUT_ATTENTION = (
    "test_cache.py",
    "test_lora.py",
    "test_overlap.py",
    "test_recurrent.py",
    "test_sampling_operators.py",
    "test_small_operators.py",
    "test_state.py",
    "test_states.py",
)
# What is made of operators, and checked before them, is the same code on every backend.
COMPOSED = ("compat/", "test_cascade.py", "test_overlap.py", "test_plan.py", "test_public.py")
EMULATED = "amx_emulated"
# They differ from one another, and from amx, in bf16, in halves over an int8 cache, and in products of integers alone.
WIDE = ("avx512", "avx512_bf16", EMULATED)
# Without a GPU Triton's kernels run in its interpreter.
INTERPRETED = [] if torch.cuda.is_available() else ["triton"]
IN_PYTHON = ["reference", "gather", *INTERPRETED]


# The kernel of "hopper" has no interpreter, so without a GPU it is emulated: triton_backend/test_hopper.py.
NAMES = [name for name in ops.BACKENDS if name != "hopper" or torch.cuda.is_available()]

# What an operator checks is checked in one place for all backends: see `test_it_offers_the_whole_protocol`.
checked_once = pytest.mark.parametrize(
    "backend", [name if name == "reference" else of_long_runs(name) for name in NAMES], indirect=True
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {item for item in items if _repeats_another(item)}
    if not config.getoption("long"):
        of_operators = [item for item in items if item.path.is_relative_to(HERE)]
        left_out |= _more_of_the_same(of_operators, all_of_triton=config.getoption("triton"))
    items[:] = [item for item in items if item not in left_out]


def _more_of_the_same(items: list[pytest.Item], all_of_triton: bool) -> set[pytest.Item]:
    """Return the cases of each test on each backend that repeat values of its parameters which other cases have.

    All pairs of values meet in the cases that remain on the best instruction set. On other backends, and in the
    interpreter of Triton if `all_of_triton` is set, each value is in one of them. Otherwise the interpreter runs one
    case of each test, or as many as its marker `triton` gives, and none of the tests of what is made of operators. A
    case in which values merely meet for the first time is slow.
    """
    tests: dict[tuple[str, str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long") is None:
            is_interpreted = item.get_closest_marker("triton") is not None
            tests.setdefault((item.nodeid.partition("[")[0], _backend(item), is_interpreted), []).append(item)
    more: set[pytest.Item] = set()
    for (test, backend, _), cases in tests.items():
        few = None if all_of_triton else _num_interpreted(cases[0])
        each = meetings({item: _values(item) for item in cases}, 1)
        if backend == "gather" and test.partition("::")[0].endswith(WITHOUT_ATTENTION):
            more.update(cases)
        elif few is not None:
            more |= {*cases} - {*cases[len(cases) // 2 :][:few]}
        elif " on " in backend or backend in IN_PYTHON or (INTERPRETED and "triton_backend" in test):
            more |= set(cases) - each
        else:
            pairs = meetings({item: _marked(item) for item in cases}, 2)
            more |= set(cases) - each - pairs
            for item in pairs - each:
                item.add_marker(SLOW)
    return more


def _backend(item: pytest.Item) -> str:
    """Return the name of the backend that a case runs on; empty if it has no such parameter."""
    return str(item.callspec.params.get("backend", "")) if hasattr(item, "callspec") else ""


def _num_interpreted(item: pytest.Item) -> int | None:
    """Return how many cases of a test Triton's interpreter runs; None for a test that it does not run."""
    marker, backend = item.get_closest_marker("triton"), _backend(item)
    if not INTERPRETED or (backend not in INTERPRETED if backend else marker is None):
        return None
    composed = item.path.relative_to(HERE).as_posix().startswith(COMPOSED)
    return int(not composed) if marker is None else marker.kwargs.get("cases", 1)


def _values(item: pytest.Item) -> dict[str, int]:
    """Return a number for the value of each of the case's parameters, the backend aside."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: id(value) for name, value in given.items() if name != "backend"}


def _marked(item: pytest.Item) -> dict[str, tuple[int, ...]]:
    """The same for all that one mark `parametrize` gives: what was put together by hand stays together."""
    left, found = _values(item), {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found[str(names)] = tuple(left.pop(name) for name in names if name != "backend")
    return found | {name: (value,) for name, value in left.items()}


def _repeats_another(item: pytest.Item) -> bool:
    """Whether it is a test on another instruction set that tests no kernel, or none of that instruction set's own."""
    callspec = getattr(item, "callspec", None)
    backend = "" if callspec is None else str(callspec.params.get("backend"))
    if " on " not in backend or not item.path.is_relative_to(HERE):
        return False
    if backend.endswith(WIDE) and not _differs_on_wide_ones(item):
        return True
    return not item.path.relative_to(HERE).as_posix().startswith(OF_KERNELS)


def _differs_on_wide_ones(item: pytest.Item) -> bool:
    halves_of_int8 = item.path.name == "test_int8_cache.py" and "float16" in item.name
    all_dtypes = item.path.name == "test_quantised.py" or item.name.startswith("test_random_ragged_batches")
    return "bfloat16" in item.name or halves_of_int8 or all_dtypes


def use_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, isa: str | None) -> None:
    """Let the native kernels be those of that instruction set, the best one by default, of the build that is tested."""
    path = request.config.getoption("native_library")
    if isa or path:
        library = native.load(isa, path)
        pool = getattr(ctypes.CDLL(str(library.path)), "quire_test_parallel_for", None)  # under ThreadSanitizer
        if pool is not None:
            library = replace(library, parallel_for=ctypes.cast(pool, ctypes.c_void_p).value or 0)
        monkeypatch.setattr(native, "default", lambda: library)


def choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Backend:
    """The backend of that name; one that cannot run on this machine is skipped, with its own reason."""
    name, _, isa = request.param.partition(" on ")
    reasons = [ops.unavailable(name, device) for device in DEVICES]
    if None not in reasons:
        pytest.skip("; ".join(filter(None, reasons)))
    use_library(request, monkeypatch, isa or None)
    return ops.load(name, DEVICES[reasons.index(None)])


OTHERS = [pytest.param(name, marks=SLOW if name in ("gather", *INTERPRETED) else ()) for name in NAMES if name != "cpu"]


@pytest.fixture(params=[*OTHERS, *NATIVE])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Backend:
    """Every backend in turn."""
    return choose(request, monkeypatch)


@pytest.fixture
def device(backend: ops.Backend) -> str:
    """The device of that backend's tensors: the first one here that it serves."""
    return next(device for device in DEVICES if backend.unavailable(device) is None)
