"""Whole blocks from one pool to another: what swapping does on a GPU."""

from __future__ import annotations

import pytest
import torch

from quire.ops.triton.cache import block_swapper
from tests.ops.conftest import DEVICES

DEVICE = DEVICES[-1]  # the interpreter's, or the GPU


@pytest.mark.parametrize("shape", [(2, 3, 16, 64), (2, 1, 1, 1), (2, 5, 7, 3), (1,), (2, 2, 16, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_every_byte_of_the_blocks_and_no_other(shape, dtype):
    gen = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(256, (n, *shape, dtype.itemsize), generator=gen, dtype=torch.uint8).view(dtype).view(n, *shape)
        for n in (9, 7)
    )
    host, pool = source.pin_memory() if DEVICE == "cuda" else source, target.to(DEVICE)
    before = target.clone()
    block_swapper([8, 0, 3], [1, 6, 2], torch.device(DEVICE))(host, pool)
    for src, dst in ((8, 1), (0, 6), (3, 2)):
        before.view(torch.uint8)[dst] = source.view(torch.uint8)[src]
    assert torch.equal(pool.cpu().view(torch.uint8), before.view(torch.uint8))
    block_swapper([6, 1], [0, 8], torch.device(DEVICE))(pool, host)  # and back
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host.view(torch.uint8)[0], before.view(torch.uint8)[6])
    assert torch.equal(host.view(torch.uint8)[8], before.view(torch.uint8)[1])
