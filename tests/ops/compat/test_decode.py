"""RoseLLM's decode: the new token beside the cache, and then in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadDtype, BadShape, BadValue
from tests.ops import dense
from tests.ops.cases import half_dtype
from tests.ops.conftest import checked_once
from tests.ops.small_caches import random_cache, random_rows, tables_of


class Decode:
    """Sequences with cached tokens, and a new one for each."""

    def __init__(
        self, device: str, lens: list[int], *, num_kv_heads: int = 2, group: int = 1, head_dim: int = 16,
        head_dim_v: int = 16, block_size: int = 8, width: int = 5, padding: int = -1, dtype=torch.float32,
    ) -> None:  # fmt: skip
        room = [n + 1 for n in lens]  # blocks for the new token too, so that it can be appended
        self.tables, num_blocks = tables_of(room, block_size, width)
        self.lens, self.device, self.block_size = lens, device, block_size
        shape, dims = (num_blocks + 1, num_kv_heads, block_size), (head_dim, head_dim_v)
        self.k_cache, self.v_cache = (
            random_cache((*shape, dim), self.tables, lens, dtype, device, dim) for dim in dims
        )
        rows = (len(lens), num_kv_heads * group, head_dim)
        self.q = random_rows(rows, dtype, device)
        gen = torch.Generator().manual_seed(8)
        self.k_new, self.v_new = (
            torch.randn(len(lens), num_kv_heads, dim, generator=gen).to(dtype).to(device) for dim in dims
        )
        self.table = torch.tensor(self.tables, device=device)
        if padding != -1:
            column = torch.arange(width, device=device)
            own = column < -(-torch.tensor(room, device=device)[:, None] // block_size)
            self.table = self.table.masked_fill(~own, padding)
        self.context_lens = torch.tensor(lens, device=device)

    def arguments(self) -> tuple[Tensor, ...]:
        return self.q, self.k_new, self.v_new, self.k_cache, self.v_cache, self.table, self.context_lens

    def dense(self, **options: object) -> dense.Dense:
        parts = []
        for s, (table, n) in enumerate(zip(self.tables, self.lens, strict=True)):
            k, v = (
                torch.cat([dense.gather(cache, table, n), new[s : s + 1]])
                for cache, new in ((self.k_cache, self.k_new), (self.v_cache, self.v_new))
            )
            parts.append(dense.attend(self.q[s : s + 1], k, v, **options))
        return dense.concat(parts)


LENS = [0, 1, 7, 8, 9, 31, 32]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("padding", [-1, 0, 10**6])
def test_the_new_token_is_the_first_element(backend, device, group, padding):
    for dtype in (torch.float32, half_dtype(backend)):
        step = Decode(device, LENS, group=group, padding=padding, dtype=dtype)
        out = ops.paged_attention_decode(*step.arguments(), scale=0.2, block_size=8, backend=backend.name)
        step.dense(scale=0.2).check(out, None, dtype, roundings=5)


def test_values_of_another_size(backend, device):
    step = Decode(device, LENS, group=3, head_dim_v=24)
    out = ops.paged_attention_decode(*step.arguments(), backend=backend.name)
    assert out.shape == (7, 6, 24)
    step.dense().check(out, None, torch.float32, roundings=5)
    ops.append_token(*step.arguments()[1:], backend=backend.name)
    inside = ops.paged_decode(
        step.q, step.k_cache, step.v_cache, step.table, step.context_lens + 1, backend=backend.name
    )
    dense.check_close("out", out, inside, 1e-5)


def test_the_cache_is_not_written_until_the_token_is_appended(backend, device):
    step = Decode(device, LENS)
    before = step.k_cache.clone(), step.v_cache.clone()
    ops.paged_attention_decode(*step.arguments(), backend=backend.name)
    for cache, was in zip((step.k_cache, step.v_cache), before, strict=True):
        assert torch.equal(cache.view(torch.int32), was.view(torch.int32))
    ops.append_token(*step.arguments()[1:], backend=backend.name)
    for cache, was, new in zip((step.k_cache, step.v_cache), before, (step.k_new, step.v_new), strict=True):
        for s, n in enumerate(step.lens):
            was[step.tables[s][n // 8], :, n % 8] = new[s]
        assert torch.equal(cache.view(torch.int32), was.view(torch.int32))


def test_two_meanings_of_a_context_length(backend, device):
    """Beside the cache the new token is not counted; once appended, `paged_decode` counts it."""
    step = Decode(device, LENS, group=2)
    beside = ops.paged_attention_decode(*step.arguments(), backend=backend.name)
    ops.append_token(*step.arguments()[1:], backend=backend.name)
    caches = step.k_cache, step.v_cache, step.table
    inside = ops.paged_decode(step.q, *caches, step.context_lens + 1, backend=backend.name)
    dense.check_close("out", beside, inside, 1e-5)
    without = ops.paged_decode(step.q, *caches, step.context_lens, backend=backend.name)
    assert (without[1:] - inside[1:]).abs().amax(dim=(1, 2)).min() > 1e-3  # the new token matters in every sequence


def test_tables_need_no_room_for_the_new_token(backend, device):
    step = Decode(device, [8, 3], width=2)
    out = ops.paged_attention_decode(
        *(step.q, step.k_new, step.v_new, step.k_cache, step.v_cache, step.table[:, :1], step.context_lens),
        backend=backend.name,
    )
    step.dense().check(out, None, torch.float32, roundings=5)


def test_decoding_token_by_token_equals_prefill(backend, device):
    """Twenty tokens through the seed's two calls, and all at once."""
    gen = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(20, h, 16, generator=gen).to(device) for h in (4, 2, 2))
    k_cache, v_cache = (torch.full((5, 2, 8, 16), torch.nan, device=device) for _ in range(2))
    table, out = torch.tensor([[3, 0, 4]]), []
    for t in range(20):
        step = q[t : t + 1], k[t : t + 1], v[t : t + 1], k_cache, v_cache, table, torch.tensor([t])
        out.append(ops.paged_attention_decode(*step, backend=backend.name))
        ops.append_token(*step[1:], backend=backend.name)
    dense.attend(q, k, v).check(torch.cat(out), None, torch.float32, roundings=5)


REFUSED = [
    ("q", lambda x: x[:, None].expand(-1, 2, -1, -1), BadShape, "exactly one query token a sequence"),
    ("q", lambda x: torch.cat([x, x]), BadShape, r"for 3 sequences; decoding takes exactly one query token"),
    ("context_lens", lambda x: torch.tensor([4, 41, 2]), BadValue, r"context_lens\[1\] is 41; sequence 1's .*\.\.40"),
    ("context_lens", lambda x: torch.tensor([4, -1, 2]), BadValue, r"context_lens\[1\] is -1"),
    ("table", lambda x: x.masked_fill(x >= 0, -1), BadValue, r"^block_table\[0, 0\] is -1"),
    ("table", lambda x: x[:2], BadShape, "block_table has 2 rows for 3 sequences"),
    ("k_new", lambda x: x[..., :1], BadShape, r"k_new has shape \(3, 2, 1\); expected \(3, 2, 16\)"),
    ("k_new", lambda x: x.half(), BadDtype, "k_new has dtype torch.float16; expected torch.float32"),
    ("v_new", lambda x: x[..., :8], BadShape, r"v_new has shape \(3, 2, 8\); expected \(3, 2, 16\)"),
    ("v_new", lambda x: x.double(), BadDtype, "v_new has dtype torch.float64"),
    ("table", lambda x: x.float(), BadDtype, "block_table has dtype torch.float32"),
    ("table", lambda x: x[0], BadShape, r"block_table has shape \(5,\); it must have 2"),
    ("context_lens", lambda x: x + 0.9, BadDtype, "context_lens has dtype torch.float32"),
    ("context_lens", lambda x: x.tolist(), BadDtype, "context_lens is a list"),
    ("k_new", lambda x: x[:, :1], BadShape, r"k_new has shape \(3, 1, 16\); expected \(3, 2, 16\)"),
    ("v_new", lambda x: x[0], BadShape, "v_new has shape"),
    ("k_cache", lambda x: x[0], BadShape, "k_cache_layer has shape"),
    ("k_cache", lambda x: x.half(), BadDtype, "k_cache_layer has dtype torch.float16"),
]  # fmt: skip


@checked_once
@pytest.mark.parametrize(("name", "change", "error", "message"), REFUSED)
def test_what_is_refused(backend, device, name, change, error, message):
    step = Decode(device, [4, 20, 2])
    setattr(step, name, change(getattr(step, name)))
    with pytest.raises(error, match=message):
        ops.paged_attention_decode(*step.arguments(), backend=backend.name)


@checked_once
def test_another_block_size_is_refused(backend, device):
    with pytest.raises(BadValue, match="block_size is 16; the cache has blocks of 8"):
        ops.paged_attention_decode(*Decode(device, [4]).arguments(), block_size=16, backend=backend.name)


NUM_BLOCKS = 8  # of `Decode(device, [4, 20, 2])`


@checked_once
@pytest.mark.parametrize(
    ("lens", "table", "error", "message"),
    [
        ([4, 40, 2], None, BadValue, "sequence 1 has 40 tokens; its table of 5 blocks of 8 has no room"),
        ([4, -1, 2], None, BadValue, "sequence 1 has -1 tokens"),
        ([4, 24, 2], None, BadValue, r"block_table\[1, 3\] is -1; the new token of sequence 1 goes there"),
        ([4, 4, 2], [[0], [0], [1]], BadValue, r"new_token_slots\[0\] and new_token_slots\[1\] are both 4"),
        ([4, 4, 2], [[0], [99], [1]], BadValue, r"block_table\[1, 0\] is 99; .* block id in 0\.\."),
        ([4, 4, 2], [[0], [NUM_BLOCKS], [1]], BadValue, r"block_table\[1, 0\] is 8; .* block id in 0\.\.7"),
        ([4, 4], None, BadShape, "3 new tokens, 3 tables and 2 lengths"),
        ([4.9, 4.9, 2.9], None, BadDtype, "context_lens has dtype torch.float32"),
        ([[4, 4, 2]], None, BadShape, r"context_lens has shape \(1, 3\)"),
        ([4, 4, 2], [0, 0, 1], BadShape, r"block_table has shape \(3,\)"),
    ],
)
def test_append_refuses(backend, device, lens, table, error, message):
    step = Decode(device, [4, 20, 2])
    assert len(step.k_cache) == NUM_BLOCKS
    step.context_lens = torch.tensor(lens)
    if table is not None:
        step.table = torch.tensor(table)
    before = step.k_cache.clone()
    with pytest.raises(error, match=message):
        ops.append_token(*step.arguments()[1:], backend=backend.name)
    assert torch.equal(step.k_cache.view(torch.int32), before.view(torch.int32))
