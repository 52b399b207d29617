"""These tests are about the native kernels alone, on every instruction set of this machine."""

from __future__ import annotations

import pytest

from quire import ops
from tests.ops.conftest import NATIVE, choose


@pytest.fixture(params=NATIVE)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Backend:
    return choose(request, monkeypatch)
