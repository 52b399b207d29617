"""flash-attn's functions, on the examples of transformers' page and on every edge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadDtype, BadShape, BadStride, BadValue, Unsupported
from tests.ops import dense
from tests.ops.cases import half_dtype
from tests.ops.conftest import checked_once
from tests.ops.small_caches import random_cache

TABLE = [[2, -1, -1, -1], [0, 1, -1, -1], [3, 5, 6, -1]]
CACHED = [30, 32, 70]


def rows(device: str, *counts_and_heads: tuple[int, int], dim: int = 16, dtype=torch.float32) -> list[Tensor]:
    gen = torch.Generator().manual_seed(9)
    return [torch.randn(n, heads, dim, generator=gen).to(dtype).to(device) for n, heads in counts_and_heads]


def starts(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def check_varlen(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, q_lens: list[int], k_lens: list[int], **options
) -> None:
    parts = [
        dense.attend(*each, **options) for each in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)
    ]
    dense.concat(parts).check(out, lse, q.dtype)


# ----------------------------------------------------------------------------------------------------- varlen


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_pages_example(backend, device, batched, causal):
    """Query lengths 10, 3, 1 over key lengths 0, 1, 7: q [1, 14, H, D], K and V [1, 8, Hkv, D]."""
    q, k, v = rows(device, (14, 6), (8, 2), (8, 2))
    cu_q, cu_k = torch.tensor([0, 10, 13, 14]), torch.tensor([0, 0, 1, 8])
    given = [x[None] for x in (q, k, v)] if batched else [q, k, v]
    out, lse = ops.varlen_attention(
        *given, cu_q, cu_k, max_seqlen_q=10, max_seqlen_k=7, causal=causal, return_lse=True, backend=backend.name
    )
    assert out.shape == ((1, 14, 6, 16) if batched else (14, 6, 16))
    out = out[0] if batched else out
    check_varlen(out, lse, q, k, v, [10, 3, 1], [0, 1, 7], causal=causal)
    assert not out[:10].any()  # the first sequence has no key
    assert (lse[:10] == -torch.inf).all()
    if causal:  # bottom right: of three queries over one key, the last one sees it
        assert not out[10:12].any()
        dense.check_close("out", out[12], v[0].repeat_interleave(3, dim=0), 1e-6)


@pytest.mark.parametrize(
    ("flash", "ours"),
    [
        ({"causal": True}, {}),
        ({"causal": False}, {"causal": False}),
        ({"causal": True, "window_size": (4, 0)}, {"window": 5}),
        ({"causal": True, "window_size": (4, -1)}, {"window": 5}),
        ({"causal": True, "window_size": (0, 3)}, {"window": 1}),
        ({"causal": False, "window_size": (4, 0)}, {"window": 5}),
        ({"causal": False, "window_size": (-1, 0)}, {}),
        ({"causal": True, "softcap": 1.5, "softmax_scale": 0.4}, {"softcap": 1.5, "scale": 0.4}),
        ({"causal": True, "alibi_slopes": True}, {"alibi_slopes": True}),
    ],
)
@pytest.mark.parametrize("lens", [([4, 1, 20], [4, 30, 20]), ([1, 1, 1], [1, 300, 2]), ([9, 0, 2], [3, 5, 0])])
def test_ragged_against_dense(backend, device, lens, flash, ours):
    q_lens, k_lens = lens
    for dtype in (torch.float32, half_dtype(backend)):
        q, k, v = rows(device, (sum(q_lens), 6), (sum(k_lens), 2), (sum(k_lens), 2), dtype=dtype)
        slopes = {"alibi_slopes": torch.linspace(-0.5, 0.5, 6, device=device)} if "alibi_slopes" in ours else {}
        out, lse = ops.varlen_attention(
            *(q, k, v, starts(q_lens), starts(k_lens).long(), max(q_lens), max(k_lens)),
            **{**flash, **slopes}, return_lse=True, backend=backend.name,
        )  # fmt: skip
        check_varlen(out, lse, q, k, v, q_lens, k_lens, **{**ours, **slopes})


def test_each_sequence_with_slopes_of_its_own(backend, device):
    """flash-attn's second form, [batch, heads]."""
    q_lens, k_lens = [4, 1, 20], [4, 30, 25]
    q, k, v = rows(device, (25, 6), (59, 2), (59, 2))
    slopes = torch.linspace(-0.5, 0.5, 18, device=device).view(3, 6)
    given = q, k, v, starts(q_lens), starts(k_lens), 20, 30
    out = ops.varlen_attention(*given, causal=True, alibi_slopes=slopes, backend=backend.name)
    for s, (one_q, one_k, one_v) in enumerate(zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)):
        want = dense.attend(one_q, one_k, one_v, alibi_slopes=slopes[s])
        want.check(out.split(q_lens)[s], None, torch.float32)
    with pytest.raises(BadShape, match=r"alibi_slopes has shape \(2, 6\); expected \(6,\) or \(3, 6\)"):
        ops.varlen_attention(*given, causal=True, alibi_slopes=slopes[:2], backend=backend.name)


def test_alibi_over_keys_to_the_right(backend, device):
    """flash-attn takes the distance for what it is, Quire signed: a lonely last row sees none, others are refused."""
    q, k, v = rows(device, (2, 6), (9, 2), (9, 2))
    slopes = torch.linspace(0.1, 0.5, 6, device=device)
    given = k, v, starts([1, 1]), starts([4, 5])
    out = ops.varlen_attention(q, *given, 1, 5, alibi_slopes=slopes, backend=backend.name)
    check_varlen(out, None, q, k, v, [1, 1], [4, 5], alibi_slopes=slopes)
    with pytest.raises(Unsupported, match="alibi_slopes with causal=False and several query rows"):
        ops.varlen_attention(q, k, v, starts([2]), starts([9]), 2, 9, alibi_slopes=slopes, backend=backend.name)


def test_values_of_another_size(backend, device):
    q, k = rows(device, (5, 6), (9, 2))
    [v] = rows(device, (9, 2), dim=24)
    out = ops.varlen_attention(q, k, v, starts([2, 3]), starts([4, 5]), 3, 5, causal=True, backend=backend.name)
    assert out.shape == (5, 6, 24)
    check_varlen(out, None, q, k, v, [2, 3], [4, 5])


def test_strided_rows_and_poison_after_them(backend, device):
    """q, k and v out of one packed tensor, the rest of which is NaN; K and V are not copied."""
    packed = torch.full((12, 9, 20), torch.nan, device=device)
    q, k, v = rows(device, (12, 4), (12, 2), (12, 2))
    views = packed[:, :4, 2:18], packed[:, 4:6, 2:18], packed[:, 7:9, 2:18]
    for view, x in zip(views, (q, k, v), strict=True):
        view.copy_(x)
    out = ops.varlen_attention(*views, starts([5, 7]), starts([5, 7]), 7, 7, causal=True, backend=backend.name)
    check_varlen(out, None, q, k, v, [5, 7], [5, 7])


@pytest.mark.parametrize(("q_lens", "k_lens"), [([], []), ([0, 0], [0, 0]), ([3], [0]), ([0], [3])])
def test_next_to_nothing(backend, device, q_lens, k_lens):
    q, k, v = rows(device, (sum(q_lens), 4), (sum(k_lens), 2), (sum(k_lens), 2))
    out = ops.varlen_attention(
        q, k, v, starts(q_lens), starts(k_lens), max(q_lens, default=0), max(k_lens, default=0), backend=backend.name
    )
    assert out.shape == q.shape
    assert not out.any()


VARLEN_REFUSED = [
    ({"cu_seqlens_q": torch.tensor([1, 5, 8])}, BadValue, r"cu_seqlens_q is \[1, 5, 8\]; it must start at 0"),
    ({"cu_seqlens_q": torch.tensor([0, 9, 8])}, BadValue, r"cu_seqlens_q is \[0, 9, 8\]"),
    ({"cu_seqlens_k": torch.tensor([0, 5, 7])}, BadValue, r"cu_seqlens_k is \[0, 5, 7\]; .* end at the 8 rows"),
    (
        {"cu_seqlens_k": torch.tensor([0, 8]), "max_seqlen_k": 8},
        BadShape,
        "cu_seqlens_q has 3 entries and cu_seqlens_k 2",
    ),
    ({"cu_seqlens_q": torch.tensor([0.0, 5, 8])}, BadDtype, "cu_seqlens_q has dtype torch.float32"),
    ({"cu_seqlens_q": torch.tensor([[0, 8]])}, BadShape, r"cu_seqlens_q has shape \(1, 2\)"),
    ({"max_seqlen_q": 4}, BadValue, "max_seqlen_q is 4; sequence 0 has 5 rows"),
    ({"max_seqlen_k": 2}, BadValue, "max_seqlen_k is 2; sequence 0 has 5 rows"),
    ({"window_size": (3, 2)}, Unsupported, r"window_size is \(3, 2\) with causal=False"),
    ({"window_size": (3, -1)}, Unsupported, r"window_size is \(3, -1\) with causal=False"),
    ({"window_size": (-2, 0)}, BadValue, r"window_size is \(-2, 0\)"),
    ({"q": torch.zeros(1, 8, 4, 16)}, BadShape, r"k has shape \(8, 2, 16\); expected \[1, T, H, D\] as q"),
    ({"q": torch.zeros(8, 64)}, BadShape, r"q has shape \(8, 64\)"),
    ({"v": torch.zeros(7, 2, 16)}, BadShape, "k 8 rows and v 7"),
    ({"softcap": -1.0}, BadValue, "softcap is -1.0"),
    ({"window_size": 3}, BadValue, "window_size is 3; it must be a pair"),
    ({"max_seqlen_q": None}, BadValue, "max_seqlen_q is None"),
    ({"cu_seqlens_q": [0, 5, 8]}, BadDtype, "cu_seqlens_q is a list"),
    ({"k": torch.zeros(8, 2, 16).half()}, BadDtype, "^k has dtype torch.float16"),
    ({"k": torch.zeros(8, 2, 8)}, BadShape, r"^k has shape \(8, 2, 1, 8\)"),
]


@checked_once
@pytest.mark.parametrize(("change", "error", "message"), VARLEN_REFUSED)
def test_varlen_refuses(backend, device, change, error, message):
    q, k, v = rows("cpu", (8, 4), (8, 2), (8, 2))
    cu = torch.tensor([0, 5, 8])
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 5}
    given = {
        name: x.to(device) if isinstance(x, Tensor) and x.dim() > 2 else x for name, x in {**given, **change}.items()
    }
    with pytest.raises(error, match=message):
        ops.varlen_attention(**given, backend=backend.name)


def test_what_quire_has_not_is_no_argument():
    with pytest.raises(TypeError, match="dropout_p"):
        ops.varlen_attention(*[None] * 7, dropout_p=0.1)


# ------------------------------------------------------------------------------------------------ with a KV cache


class Cached:
    """The page's second example: 30, 32 and 70 cached tokens, blocks of 32, a table of 4 columns."""

    def __init__(self, device: str, table: list[list[int]], rows_each: int = 1, dtype=torch.float32) -> None:
        self.table, self.num_new = table, rows_each
        hnd = [random_cache((9, 2, 32, 16), table, CACHED, dtype, device, seed) for seed in (1, 2)]
        self.k_cache, self.v_cache = (x.transpose(1, 2).contiguous() for x in hnd)  # [N, B, Hkv, D]
        q, k, v = rows(device, (3 * rows_each, 4), (3 * rows_each, 2), (3 * rows_each, 2), dtype=dtype)
        self.q, self.k, self.v = (x.view(3, rows_each, *x.shape[1:]) for x in (q, k, v))
        self.metadata = {
            "cache_seqlens": torch.tensor(CACHED, dtype=torch.int32, device=device),
            "block_table": torch.tensor(table, dtype=torch.int32, device=device),
        }

    def whole(self, s: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence, new tokens included, from before they were appended."""
        return tuple(
            torch.cat([dense.gather(cache.transpose(1, 2), self.table[s], CACHED[s]), new[s]])
            for cache, new in ((self.k_cache, self.k), (self.v_cache, self.v))
        )

    def run(self, backend: ops.Backend, new: bool = True, **options) -> Tensor | tuple[Tensor, Tensor]:
        rows = (self.k, self.v) if new else ()
        options = self.metadata | options
        return ops.attention_with_kvcache(self.q, self.k_cache, self.v_cache, *rows, **options, backend=backend.name)

    def answer(self, **options) -> dense.Dense:
        return dense.concat([dense.attend(self.q[s], *self.whole(s), **options) for s in range(3)])


ROOMY = [[2, 7, -1, -1], [0, 1, -1, -1], [3, 5, 6, -1]]  # for five new tokens


@pytest.mark.parametrize("causal", [False, True])
def test_the_pages_decode(backend, device, causal):
    """Sequence 0 grows within its block, sequence 1 (32 cached, blocks of 32) into its second one, 2 in its third."""
    for dtype in (torch.float32, half_dtype(backend)):
        call = Cached(device, TABLE, dtype=dtype)
        want = call.answer()
        before = call.k_cache.clone(), call.v_cache.clone()
        out, lse = call.run(backend, causal=causal, return_lse=True)
        assert out.shape == (3, 1, 4, 16)
        assert lse.shape == (3, 1, 4)
        want.check(out[:, 0], lse[:, 0], dtype)
        places = [(2, 30), (1, 0), (6, 6)]  # block and offset of each new token
        for cache, was, new in zip((call.k_cache, call.v_cache), before, (call.k, call.v), strict=True):
            for s, place in enumerate(places):
                was[place] = new[s, 0]
            assert torch.equal(cache.view(torch.uint8), was.view(torch.uint8)), "exactly three slots were written"


@checked_once
def test_a_missing_block_names_the_sequence(backend, device):
    """32 cached at block size 32 goes to the second block: a -1 there is an error, and nothing is written."""
    call = Cached(device, [[2, -1, -1, -1], [0, -1, -1, -1], [3, 5, 6, -1]])
    before = call.k_cache.clone()
    with pytest.raises(BadValue, match=r"block_table\[1, 1\] is -1; sequence 1 has 32 cached and 1 new token"):
        call.run(backend)
    assert torch.equal(call.k_cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 2.0}, {"alibi_slopes": True}, {"scale": 0.5}])
def test_several_new_tokens(backend, device, options):
    call = Cached(device, ROOMY, rows_each=5)
    if "alibi_slopes" in options:
        options = {"alibi_slopes": torch.linspace(-0.5, 0.5, 4, device=device)}
    want = call.answer(**options)
    flash = {"window": "window_size", "scale": "softmax_scale"}
    given = {flash.get(name, name): (x - 1, 0) if name == "window" else x for name, x in options.items()}
    out = call.run(backend, causal=True, **given)
    want.check(out.flatten(0, 1), None, torch.float32)


def test_with_a_kv_cache_each_sequence_has_slopes_of_its_own(backend, device):
    call = Cached(device, ROOMY, rows_each=5)
    slopes = torch.linspace(-0.5, 0.5, 12, device=device).view(3, 4)
    want = dense.concat([dense.attend(call.q[s], *call.whole(s), alibi_slopes=slopes[s]) for s in range(3)])
    out, lse = call.run(backend, causal=True, alibi_slopes=slopes, return_lse=True)
    want.check(out.flatten(0, 1), lse.flatten(0, 1), torch.float32)
    with pytest.raises(BadShape, match=r"alibi_slopes has shape \(2, 4\); expected \(4,\) or \(3, 4\)"):
        call.run(backend, causal=True, alibi_slopes=slopes[:2])


@pytest.mark.parametrize("as_given", ["tensor", "int32 tensor", "pair of tensors", "list"])
def test_a_window_that_is_a_tensor(backend, device, as_given):
    window = {
        "tensor": torch.tensor([6, 0], device=device),
        "int32 tensor": torch.tensor([6, 0], dtype=torch.int32),
        "pair of tensors": (torch.tensor(6, device=device), torch.tensor(0)),
        "list": [6, 0],
    }[as_given]
    call = Cached(device, ROOMY, rows_each=5)
    want = call.answer(window=7)
    out = call.run(backend, window_size=window)
    want.check(out.flatten(0, 1), None, torch.float32)


def test_a_query_over_more_new_tokens_than_it_has(backend, device):
    """Five new tokens, of which only the last two ask."""
    call = Cached(device, ROOMY, rows_each=5)
    call.q = call.q[:, 3:]
    want = call.answer()
    out = call.run(backend, causal=True)
    want.check(out.flatten(0, 1), None, torch.float32)


def test_one_length_for_all(backend, device):
    call = Cached(device, TABLE)
    call.metadata["cache_seqlens"] = 20
    out = call.run(backend, new=False)
    call.metadata["cache_seqlens"] = torch.tensor([20, 20, 20])
    same = call.run(backend, new=False)
    assert torch.equal(out, same)


def test_without_new_tokens_the_cache_is_whole(backend, device):
    call = Cached(device, TABLE)
    want = dense.concat(
        [
            dense.attend(
                call.q[s], *(dense.gather(x.transpose(1, 2), TABLE[s], CACHED[s]) for x in (call.k_cache, call.v_cache))
            )
            for s in range(3)
        ]
    )
    out = call.run(backend, new=False)
    want.check(out[:, 0], None, torch.float32)


SHORT = torch.tensor([30, 31, 2])
KVCACHE_REFUSED = [
    ({"cache_seqlens": torch.tensor([30, 128, 70])}, BadValue, r"cache_seqlens\[1\] is 128; with 1 new .* 0\.\.128"),
    ({"cache_seqlens": torch.tensor([30, -1, 70])}, BadValue, r"cache_seqlens\[1\] is -1"),
    ({"cache_seqlens": torch.tensor([30, 32])}, BadShape, r"cache_seqlens \(2,\)"),
    ({"block_table": torch.tensor(TABLE)[:2]}, BadShape, r"block_table has shape \(2, 4\)"),
    ({"block_table": torch.tensor([[2], [99], [3]])}, BadValue, r"cache_seqlens\[1\] is 32"),
    ({"block_table": torch.tensor([[2, 0], [0, 1], [99, 5]]), "cache_seqlens": SHORT}, BadValue, "is 99; sequence 2"),
    ({"block_table": torch.tensor([[2], [2], [3]]), "cache_seqlens": SHORT // 10}, BadValue, "new_token_slots.*67"),
    ({"k": None}, BadValue, "k and v come together"),
    ({"v": None}, BadValue, "k and v come together"),
    ({"k": torch.zeros(2, 1, 2, 16)}, BadShape, r"k has shape \(2, 1, 2, 16\); .* with S = 3"),
    ({"v": torch.zeros(3, 2, 2, 16)}, BadShape, r"v has shape \(3, 2, 2, 16\)"),
    ({"q": torch.zeros(3, 4, 16)}, BadShape, r"q, k_cache and v_cache have shapes \(3, 4, 16\)"),
    ({"window_size": (5, -1)}, Unsupported, "window_size"),
    ({"window_size": torch.tensor([5, -1])}, Unsupported, r"window_size is \(5, -1\) with causal=False"),
    ({"window_size": torch.tensor([-3, 0])}, BadValue, r"window_size is \(-3, 0\); each side must be -1"),
    ({"window_size": torch.tensor([5.0, 0.0])}, BadValue, r"window_size is tensor.*; both sides must be integers"),
    ({"window_size": torch.tensor([5, 0, 0])}, BadValue, r"window_size is tensor.*; it must be a pair"),
    ({"window_size": (None, 0)}, BadValue, r"window_size is \(None, 0\); both sides must be integers"),
    ({"cache_seqlens": torch.tensor([30.5, 32.5, 70.5])}, BadDtype, "cache_seqlens has dtype torch.float32"),
    ({"block_table": torch.tensor(TABLE) + 0.5}, BadDtype, "block_table has dtype torch.float32"),
    ({"block_table": None}, BadDtype, "block_table is a NoneType"),
    ({"softcap": -1.0}, BadValue, "softcap is -1.0"),
    ({"softmax_scale": float("inf")}, BadValue, "scale is inf"),
    ({"alibi_slopes": torch.zeros(3)}, BadShape, "alibi_slopes has shape"),
    ({"alibi_slopes": torch.zeros(4).double()}, BadDtype, "alibi_slopes has dtype"),
    ({"q": torch.zeros(3, 1, 16, 4).mT}, BadStride, "q has strides"),
    ({"k_cache": torch.zeros(9, 32, 2, 16).half()}, BadDtype, "k_cache has dtype"),
]  # fmt: skip


@checked_once
@pytest.mark.parametrize(("change", "error", "message"), KVCACHE_REFUSED)
def test_with_a_kv_cache_refuses(backend, device, change, error, message):
    call = Cached(device, TABLE)
    given = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, "k": call.k, "v": call.v, **call.metadata}
    given |= {name: x.to(device) if isinstance(x, Tensor) else x for name, x in change.items()}
    before = call.k_cache.clone()
    with pytest.raises(error, match=message):
        ops.attention_with_kvcache(**given, backend=backend.name)
    assert torch.equal(call.k_cache.view(torch.uint8), before.view(torch.uint8))


# -------------------------------------------------------------------------------------------- update and gather


def slots_of(table: list[int], begin: int, end: int, block_size: int = 32) -> list[int]:
    return [table[t // block_size] * block_size + t % block_size for t in range(begin, end)]


def test_update_and_gather_then_attend_as_the_page_does(backend, device):
    """Query lengths 10, 3 and 1 over 0, 1 and 70 cached tokens: written by slots, gathered, attended over as ragged."""
    query_lens, cached, table = [10, 3, 1], [0, 1, 70], [[7, -1, -1], [4, -1, -1], [3, 5, 6]]
    hnd = [random_cache((9, 2, 32, 16), table, cached, torch.float32, device, seed) for seed in (1, 2)]
    k_cache, v_cache = (x.transpose(1, 2).contiguous() for x in hnd)
    q, k, v = rows(device, (14, 4), (14, 2), (14, 2))
    write = [slot for t, n, rows in zip(table, cached, query_lens, strict=True) for slot in slots_of(t, n, n + rows)]
    read = [slot for t, n, rows in zip(table, cached, query_lens, strict=True) for slot in slots_of(t, 0, n + rows)]
    keys, values = ops.update_and_gather(
        *(x.transpose(0, 1)[None] for x in (k, v)), k_cache, v_cache,
        torch.tensor(read, device=device), torch.tensor(write, device=device),
    )  # fmt: skip
    assert keys.shape == (1, 2, 85, 16)
    key_lens = [10, 4, 71]
    keys, values = (x.transpose(1, 2) for x in (keys, values))
    out = ops.varlen_attention(
        q[None], keys, values, starts(query_lens), starts(key_lens), 10, 71, causal=True, backend=backend.name
    )
    parts = []
    for s, (n, each, begin) in enumerate(zip(cached, query_lens, (0, 10, 13), strict=True)):
        whole = [
            torch.cat([dense.gather(cache, table[s], n), new[begin : begin + each]])
            for cache, new in zip(hnd, (k, v), strict=True)
        ]
        parts.append(dense.attend(q[begin : begin + each], *whole))
    dense.concat(parts).check(out[0], None, torch.float32)
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache.flatten(0, 1)[write], new)


def test_a_window_may_write_over_what_it_reads(device):
    """Slots 0 to 3 hold a window of four; two new tokens take the places of the oldest, and are seen with the rest."""
    old = torch.arange(4.0, device=device).view(1, 4, 1, 1)
    k_cache, v_cache = old.clone(), old.clone() + 100
    new = torch.tensor([10.0, 11.0], device=device).view(1, 1, 2, 1)
    keys, values = ops.update_and_gather(
        new, new + 100, k_cache, v_cache, torch.tensor([1, 2, 3, -1, -1]), torch.tensor([0, 1])
    )
    assert keys.flatten().tolist() == [1, 2, 3, 10, 11]
    assert values.flatten().tolist() == [101, 102, 103, 110, 111]
    assert k_cache.flatten().tolist() == [10, 11, 2, 3]


def test_no_past_and_nothing_kept(device):
    cache = torch.zeros(1, 4, 1, 1, device=device)
    new = torch.tensor([5.0, 6.0], device=device).view(1, 1, 2, 1)
    none = torch.zeros(0, dtype=torch.int64)
    keys, _ = ops.update_and_gather(new, new, cache, cache.clone(), none, torch.tensor([-1, 2]))
    assert keys.flatten().tolist() == [5, 6]
    assert cache.flatten().tolist() == [0, 0, 6, 0]


@pytest.mark.parametrize(
    ("read", "write", "error", "message"),
    [
        ([0, 4], [0, 1], BadValue, r"read_index\[1\] is 4; it must be -1 or a slot in 0\.\.3"),
        ([0, -2], [0, 1], BadValue, r"read_index\[1\] is -2"),
        ([0], [0, 4], BadValue, r"write_index\[1\] is 4"),
        ([0], [2, 2], BadValue, "write_index names slot 2 twice"),
        ([0, -1], [0, 1], BadValue, "read_index has -1 1 times; it must occur 2 times, once per new token"),
        ([0], [0], BadShape, "write_index has 1 entries for 2 new tokens"),
        ([[0]], [0, 1], BadShape, "read_index has shape"),
        ([0.5], [0, 1], BadDtype, "read_index has dtype torch.float32"),
    ],
)
def test_update_and_gather_refuses(read, write, error, message):
    cache, new = torch.zeros(1, 4, 1, 1), torch.ones(1, 1, 2, 1)
    with pytest.raises(error, match=message):
        ops.update_and_gather(new, new, cache, cache, torch.tensor(read), torch.tensor(write))
    assert not cache.any()


def test_update_and_gather_refuses_shapes():
    cache, new, index = torch.zeros(1, 4, 1, 1), torch.ones(1, 1, 2, 1), torch.tensor([0, 1])
    for states, other, error in (
        (new[0], cache, BadShape),
        (new, cache[0], BadShape),
        (torch.ones(1, 2, 2, 1), cache, BadShape),
        (new, cache[:0], BadShape),
        (new.half(), cache, BadDtype),
    ):
        with pytest.raises(error):
            ops.update_and_gather(states, states, other, other, index, index)


def test_update_and_gather_refuses_shared_memory():
    cache, new, index = torch.zeros(1, 4, 1, 1), torch.ones(1, 1, 2, 1), torch.tensor([0, 1])
    in_the_cache = cache.view(-1)[1:3].view(1, 1, 2, 1)
    for k_cache, v_cache, states, message in (
        (cache, cache, new, "k_cache shares memory with v_cache"),
        (cache, cache.clone(), in_the_cache, "k_cache shares memory with key_states"),
        (cache.clone(), cache[:, :1].expand(1, 4, 1, 1), new, "v_cache has strides"),
    ):
        with pytest.raises(BadStride, match=message):
            ops.update_and_gather(states, states, k_cache, v_cache, index, index)
    assert not cache.any()


def test_update_and_gather_refuses_caches_that_are_no_pair():
    new, index = torch.ones(1, 1, 2, 1), torch.tensor([0, 1])
    for other in (torch.zeros(2, 4, 1, 1), torch.zeros(1, 8, 1, 1)):
        with pytest.raises(BadShape, match="the cache of value_states has shape"):
            ops.update_and_gather(new, new, torch.zeros(1, 4, 1, 1), other, index, index)


def test_indices_of_transformers(device):
    """Its sentinel among the read and its trash among the written slots become -1."""
    cache = torch.arange(4.0, device=device).view(1, 4, 1, 1)
    new = torch.tensor([8.0, 9.0], device=device).view(1, 1, 2, 1)
    read, write = torch.tensor([3, 1, 1]), torch.tensor([0, 0])  # slot 1 is the sentinel, slot 0 the trash
    keys, _ = ops.update_and_gather(
        new, new, cache, cache.clone(), read.masked_fill(read == 1, -1), write.masked_fill(write == 0, -1)
    )
    assert keys.flatten().tolist() == [3, 8, 9]
    assert cache.flatten().tolist() == [0, 1, 2, 3]
