"""logsumexp, top_k and top_k_softmax, against their definitions, on rows of every length and with infinities."""

from __future__ import annotations

import pytest
import torch

from quire.errors import BadDtype, BadShape, BadStride, BadValue
from tests.ops.conftest import checked_once
from tests.ops.dense import check_close

WIDTHS = (1, 2, 7, 15, 16, 17, 31, 33, 64, 1_000, 50_257)


def rows_of(width: int, device: str, size: float = 3.0) -> torch.Tensor:
    """Strided rows, some entries -inf, many of them equal."""
    gen = torch.Generator().manual_seed(width)
    values = (size * torch.randn(5, width, generator=gen)).round(decimals=1)
    values[1, ::3] = -torch.inf
    values[2] = 0.0
    values[3] = -torch.inf
    home = torch.full((5, width + 7), torch.nan)[:, 3:-4]
    return home.copy_(values).to(device) if device == "cpu" else values.to(device)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [3.0, 1e4])
def test_logsumexp(backend, device, width, size):
    rows = rows_of(width, device, size)
    want = torch.logsumexp(rows.cpu().double(), -1)
    check_close("logsumexp", backend.logsumexp(rows), want, 4e-7 * want.abs().nan_to_num(0, 0, 0) + 1e-6)
    assert backend.logsumexp(rows[:0]).shape == (0,)


@pytest.mark.parametrize("width", WIDTHS)
def test_top_k(backend, device, width):
    rows = rows_of(width, device)
    for k in sorted({0, 1, 2, min(width, 20), min(width, 1_024), width if width <= 1_000 else 1}):
        if k > width:
            continue
        want = torch.sort(rows.cpu(), dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(backend.top_k(rows, k).cpu(), want)


@pytest.mark.parametrize("width", WIDTHS)
def test_top_k_softmax(backend, device, width):
    rows = rows_of(width, device)[[0, 1, 2, 4]] if width > 1 else torch.tensor([[-3.0], [0.0]], device=device)
    for k in sorted({0, 1, min(width, 9), min(width, 128)}):
        ids, shares = backend.top_k_softmax(rows, k)
        assert torch.equal(ids, backend.top_k(rows, k))
        want = torch.softmax(rows.cpu().double(), -1).gather(1, ids.cpu())
        check_close("shares", shares, want, 4e-6 * want + 1e-30)  # of e^-20 the exponent alone is off by 1e-6
        assert all(map(torch.equal, backend.top_k_softmax(rows[1:2], k), (ids[1:2], shares[1:2])))
    assert [x.shape for x in backend.top_k_softmax(rows[:0], 1)] == [(0, 1), (0, 1)]


def test_zero_and_negative_zero_are_equal(backend, device):
    row = torch.tensor([[-0.0, 0.0, -0.0, -1.0, 0.0]], device=device)
    assert backend.top_k(row, 4).tolist() == [[0, 1, 2, 4]]


def test_a_row_does_not_depend_on_the_others(backend, device):
    rows = rows_of(50_257, device)
    together, ids = backend.logsumexp(rows), backend.top_k(rows, 50)
    for i in range(len(rows)):
        assert torch.equal(backend.logsumexp(rows[i : i + 1]), together[i : i + 1])
        assert torch.equal(backend.top_k(rows[i : i + 1], 50), ids[i : i + 1])


@checked_once
@pytest.mark.parametrize(
    ("logits", "k", "error"),
    [
        (torch.zeros(5), 1, BadShape),
        (torch.zeros(2, 5, dtype=torch.float64), 1, BadDtype),
        (torch.zeros(5, 2).t(), 1, BadStride),
        (torch.zeros(2, 5), 6, BadValue),
        (torch.zeros(2, 5), -1, BadValue),
    ],
)
def test_refusals(backend, device, logits, k, error):
    with pytest.raises(error):
        backend.top_k(logits.to(device), k)
    with pytest.raises(error):
        backend.top_k_softmax(logits.to(device), k)
    if error is not BadValue:
        with pytest.raises(error):
            backend.logsumexp(logits.to(device))
