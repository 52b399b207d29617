"""Settings for all tests."""

import gc
import os
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from quire.importing import uncollected
from tests.forks import Spawner

pytest_plugins = ["tests.flaky"]

# Each has a test of ten seconds or more: at the end one worker would wait for it.
LONGEST = ("test_compiled.py", "test_chaos.py", "test_fuzz.py", "test_throughput.py", "test_fleet.py")

# The time of an example depends on the machine, so it has no deadline.
settings.register_profile("usual", deadline=None, print_blob=True, max_examples=30)
settings.register_profile("long", deadline=None, print_blob=True, max_examples=100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--native-library", type=Path, default=None, help="Test this build of the native kernels, a sanitized one say."
    )

    parser.addoption("--long", action="store_true", help="Repeat random runs more often, and compile every kernel.")
    parser.addoption("--triton", action="store_true", help="Run more tests of Triton's kernels in its interpreter.")


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether to do all repetitions, of which the suite does a part."""
    return bool(pytestconfig.getoption("long"))


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawner]:
    """Starts `quire` in processes that have imported all they need."""
    with Spawner(tmp_path_factory.mktemp("forks")) as found:
        yield found


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("long") else "usual")
    # Workers side by side on the same cores would spend their time waiting for each other's threads.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    if not torch.cuda.is_available() and find_spec("triton") is not None:
        from tests import interpreter

        interpreter.enable()  # before anything imports a kernel


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # what a test draws does not depend on the tests before it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without the garbage collector, which would take a fifth of the time."""
    with uncollected():
        return (yield)


def pytest_collection_finish() -> None:
    # What was imported stays. Looking through all of it again and again takes a tenth of the time of many tests.
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("long"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long") is not None])
        items[:] = [item for item in items if item.get_closest_marker("long") is None]
    items.sort(key=lambda item: item.path.name not in LONGEST)
