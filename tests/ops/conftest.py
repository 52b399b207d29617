"""Which backend a test runs on, and on which device: decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire import ops

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are small, and on shared cores a second thread makes them twenty times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=list(ops.BACKENDS))
def backend(request: pytest.FixtureRequest) -> ops.Ops:
    """Every backend in turn; one that cannot run on this machine is skipped, with its own reason."""
    reasons = [ops.unavailable(request.param, device) for device in DEVICES]
    if None not in reasons:
        pytest.skip("; ".join(filter(None, reasons)))
    return ops.load(request.param, DEVICES[reasons.index(None)])


@pytest.fixture
def device(backend: ops.Ops) -> str:
    """The device of that backend's tensors: the first one here that it serves."""
    return next(device for device in DEVICES if backend.unavailable(device) is None)
