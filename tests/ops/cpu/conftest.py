"""These tests are about the native kernels alone, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire import ops
from quire.ops import native
from tests.ops.conftest import NATIVE, choose


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def library(request: pytest.FixtureRequest) -> native.Library:
    """The kernels of that instruction set, of the build that is tested."""
    return native.load(request.param, request.config.getoption("native_library"))


@pytest.fixture(params=NATIVE)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Backend:
    return choose(request, monkeypatch)
