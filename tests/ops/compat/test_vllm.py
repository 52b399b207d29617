"""vLLM's V1 and V2 over packed caches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadDtype, BadShape, BadStride, BadValue
from quire.ops import layouts
from quire.ops.compat.vllm import num_partitions
from tests.ops import dense
from tests.ops.cases import half_dtype
from tests.ops.conftest import checked_once
from tests.ops.small_caches import random_cache, random_rows, tables_of


class Packed:
    """A call's tensors; the cache is packed, and poisoned where nobody owns it."""

    def __init__(
        self, device: str, lens: list[int], *, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16,
        block_size: int = 16, dtype: torch.dtype = torch.float32, mapping: list[int] | None = None,
        alibi: bool | str = False,
    ) -> None:  # fmt: skip
        width = -(-max(lens) // block_size) + 1
        self.tables, num_blocks = tables_of(lens, block_size, width)
        self.lens, self.dtype = lens, dtype
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.k, self.v = (random_cache(shape, self.tables, lens, dtype, device, seed) for seed in (1, 2))
        self.query = random_rows((len(lens), num_heads, head_dim), dtype, device)
        self.out = torch.full_like(self.query, torch.nan)
        group = num_heads // num_kv_heads
        self.mapping = [h // group for h in range(num_heads)] if mapping is None else mapping
        self.slopes = (0.5 ** (1 + torch.arange(num_heads))).to(device) if alibi else None
        if alibi == "each":
            self.slopes = self.slopes * torch.linspace(1, 0.3, len(lens), device=device)[:, None]
        self.arguments = [
            *(self.out, self.query, layouts.pack_keys(self.k), layouts.pack_values(self.v)),
            *(torch.tensor(self.mapping, dtype=torch.int32, device=device), 0.3),
            *(torch.tensor(x, dtype=torch.int32, device=device) for x in (self.tables, lens)),
            *(block_size, max(lens)),
            self.slopes,
        ]

    def buffers(self, spare: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*self.query.shape[:2], num_partitions(max(self.lens)) + spare)
        wide = torch.full(shape, torch.nan, device=self.query.device)
        return wide, wide.clone(), torch.full((*shape, self.query.shape[2]), torch.nan).to(self.query)

    def slopes_of(self, sequence: int) -> Tensor | None:
        return self.slopes if self.slopes is None or self.slopes.dim() == 1 else self.slopes[sequence]

    def check(self, roundings: int = 2) -> None:
        parts = []
        for s, (table, n) in enumerate(zip(self.tables, self.lens, strict=True)):
            k, v = (dense.gather(cache, table, n)[:, self.mapping] for cache in (self.k, self.v))
            parts.append(dense.attend(self.query[s : s + 1], k, v, scale=0.3, alibi_slopes=self.slopes_of(s)))
        dense.concat(parts).check(self.out, None, self.dtype, roundings)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("alibi", [False, True, "each"])
@pytest.mark.parametrize("version", ["v1", "v2", "auto"])
def test_the_kernels_block_sizes(backend, device, version, block_size, alibi):
    for dtype in (torch.float32, half_dtype(backend)):
        call = Packed(device, [1, 17, 64, 33], block_size=block_size, alibi=alibi, dtype=dtype)
        assert call.arguments[2].shape[-1] == 16 // dtype.itemsize
        ops.paged_attention(*call.arguments, version=version, backend=backend.name)
        call.check()


@pytest.mark.parametrize("alibi", [False, True, "each"])
@pytest.mark.parametrize("lens", [[511, 512, 513], [1, 1025, 600], [0, 700]])
def test_partitions_merge(backend, device, lens, alibi):
    call = Packed(device, lens, block_size=32, alibi=alibi, head_dim=8)
    exp_sums, max_logits, tmp_out = call.buffers(spare=1)
    ops.paged_attention_v2(call.out, exp_sums, max_logits, tmp_out, *call.arguments[1:], backend=backend.name)
    call.check(roundings=6)
    P = num_partitions(max(lens))
    assert all(x[:, :, P:].isnan().all() for x in (exp_sums, max_logits, tmp_out)), "spare room is not touched"
    for s, n in enumerate(lens):  # the buffers hold each partition's own attention
        for p in range(P):
            keys = range(p * 512, min(n, (p + 1) * 512))
            lse = (max_logits + exp_sums.log())[s, :, p]
            if not keys:
                assert (lse == -torch.inf).all()
                assert not tmp_out[s, :, p].any()
                continue
            k, v = (dense.gather(cache, call.tables[s], n)[keys.start : keys.stop] for cache in (call.k, call.v))
            part = dense.attend(call.query[s : s + 1], k, v, scale=0.3, alibi_slopes=call.slopes_of(s))
            bias = 0 if call.slopes is None else call.slopes_of(s).cpu().double() * (keys.stop - n)
            dense.check_close("state", tmp_out[s, :, p], part.out[0], 1e-4)
            dense.check_close("lse", lse, part.lse[0] + bias, 1e-4)


def test_partitions_merge_in_ascending_order(backend, device):
    """Bit for bit the states of the buffers, folded from the first to the last."""
    call = Packed(device, [1500, 1100], head_dim=8, block_size=32)
    buffers = call.buffers()
    ops.paged_attention_v2(call.out, *buffers, *call.arguments[1:], backend=backend.name)
    _, lse, parts = buffers
    out, total = parts[:, :, 0].contiguous(), lse[:, :, 0].contiguous()
    for p in (1, 2):
        out, total = backend.merge_states(out, total, parts[:, :, p].contiguous(), lse[:, :, p].contiguous())
    assert torch.equal(out, call.out)
    backwards = parts[:, :, 2].contiguous(), lse[:, :, 2].contiguous()
    for p in (1, 0):
        backwards = backend.merge_states(*backwards, parts[:, :, p].contiguous(), lse[:, :, p].contiguous())
    assert not torch.equal(backwards[0], call.out)


@pytest.mark.parametrize("mapping", [[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1]])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_heads_may_be_mapped_anyhow(backend, device, version, mapping):
    call = Packed(device, [30, 5], mapping=mapping)
    ops.paged_attention(*call.arguments, version=version, backend=backend.name)
    call.check()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (5, 5), (7, 1)])
def test_any_groups_and_blocks(backend, device, num_heads, num_kv_heads):
    call = Packed(device, [9, 40, 0], num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=5)
    ops.paged_attention(*call.arguments, version="v1", backend=backend.name)
    call.check()


def test_no_sequence_at_all(backend, device):
    call = Packed(device, [3])
    arguments = [x[:0] if i in (0, 1, 6, 7) else x for i, x in enumerate(call.arguments)]
    for version in ("v1", "v2"):
        ops.paged_attention(*arguments, version=version, backend=backend.name)


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "max_context_len", "version"),
    [
        (1, 32, 8191, "v1"),  # short enough
        (1, 32, 8192, "v2"),
        (16, 32, 8192, "v2"),  # 512 pairs are not more than 512
        (17, 32, 8192, "v1"),
        (1, 513, 100_000, "v1"),
        (1, 512, 100_000, "v2"),
        (1, 1, 1, "v1"),
    ],
)
def test_the_rule_of_the_seed(num_seqs, num_heads, max_context_len, version):
    """V1 for len(seq) < 8192 or num_seqs * num_heads > 512."""
    assert ops.choose_version(num_seqs, num_heads, max_context_len) == version


def test_auto_follows_the_rule(backend, device, monkeypatch):
    import quire.ops.compat.vllm as module

    ran = []
    for name in ("paged_attention_v1", "paged_attention_v2"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, real=real, name=name, **kwargs: (ran.append(name), real(*args, **kwargs))
        )
    for limit in (64, 8192):
        call = Packed(device, [64, 3])
        call.arguments[9] = limit
        ops.paged_attention(*call.arguments, backend=backend.name)
        call.check()
    assert ran == ["paged_attention_v1", "paged_attention_v2"]


REFUSED = [
    (1, lambda x: x[0], BadShape, "query has shape"),
    (2, lambda x: x[..., :2], BadShape, r"key_cache has shape .* x = 4, so x must divide D"),
    (3, lambda x: x[:, :1], BadShape, "value_cache has shape"),
    (4, lambda x: x[:3], BadShape, r"head_mapping has shape \(3,\); expected \(4,\)"),
    (4, lambda x: x + 1, BadValue, r"head_mapping\[2\] is 2; it must be a KV head in 0\.\.1"),
    (6, lambda x: x[:1], BadShape, "block_tables"),
    (6, lambda x: x.masked_fill(x > 0, 99), BadValue, r"block_tables\[0, 0\] is 99; sequence 0 of 30 tokens"),
    (7, lambda x: x + 40, BadValue, r"context_lens\[0\] is 70; it must lie in 0\.\.30, the max_context_len"),
    (7, lambda x: x - 6, BadValue, r"context_lens\[1\] is -1"),
    (2, lambda x: x[0, 0, 0, 0], BadShape, "key_cache"),
    (2, lambda x: x[:0], BadShape, "there must be a block"),
    (2, lambda x: x.half(), BadDtype, "key_cache torch.float16"),
    (3, lambda x: x.half(), BadDtype, "value_cache torch.float16"),
    (4, lambda x: x - 1, BadValue, r"head_mapping\[0\] is -1"),
    (4, lambda x: x.float(), BadDtype, "head_mapping has dtype torch.float32"),
    (6, lambda x: x - 99, BadValue, r"block_tables\[0, 0\] is -\d+; sequence 0"),
    (6, lambda x: x[:, :1], BadValue, r"context_lens\[0\] is 30; .* fit sequence 0's table of 1 blocks of 16"),
    (6, lambda x: x.float(), BadDtype, "block_tables has dtype torch.float32"),
    (7, lambda x: x.tolist(), BadDtype, "context_lens is a list"),
    (8, lambda x: 8, BadShape, "B = 8"),
    (8, lambda x: 0, BadValue, "block_size is 0"),
    (9, lambda x: "30", BadValue, "max_context_len is '30'"),
    (5, lambda x: float("nan"), BadValue, "scale is nan"),
    (9, lambda x: 29, BadValue, r"context_lens\[0\] is 30; it must lie in 0\.\.29"),
]


@checked_once
@pytest.mark.parametrize(("index", "change", "error", "message"), REFUSED)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_is_refused(backend, device, version, index, change, error, message):
    call = Packed(device, [30, 5])
    call.arguments[index] = change(call.arguments[index])
    with pytest.raises(error, match=message):
        ops.paged_attention(*call.arguments, version=version, backend=backend.name)
    assert call.out.isnan().all()


@checked_once
def test_outputs_in_the_memory_of_inputs_are_refused(backend, device):
    call = Packed(device, [30, 5])
    query = call.arguments[1]
    caches = {"query": query, "key_cache": call.arguments[2], "value_cache": call.arguments[3]}
    for version in ("v1", "v2"):
        for name, x in caches.items():
            out = x.view(-1)[: query.numel()].view(query.shape)
            before = x.clone()
            with pytest.raises(BadStride, match=f"^out shares memory with {name}"):
                ops.paged_attention(out, *call.arguments[1:], version=version, backend=backend.name)
            assert torch.equal(x.view(torch.uint8), before.view(torch.uint8)), "a refused call wrote"
    sums, _, tmp = call.buffers()
    with pytest.raises(BadStride, match=r"^exp_sums shares memory with max_logits"):
        ops.paged_attention_v2(call.out, sums, sums, tmp, *call.arguments[1:], backend=backend.name)


@checked_once
def test_what_else_is_refused(backend, device):
    call = Packed(device, [30, 5])
    with pytest.raises(BadValue, match="version is 'v3'; it must be 'auto', 'v1' or 'v2'"):
        ops.paged_attention(*call.arguments, version="v3", backend=backend.name)
    sums, logits, tmp = call.buffers()
    for buffers, name in (((sums[..., :0], logits, tmp), "exp_sums"), ((sums, logits, tmp[0]), "tmp_out")):
        with pytest.raises(BadShape, match=name):
            ops.paged_attention_v2(call.out, *buffers, *call.arguments[1:], backend=backend.name)
    for i, (change, error) in enumerate(
        (
            (lambda b: (b[0].int(), b[1], b[2]), BadDtype),
            (lambda b: (b[0], b[1].half(), b[2]), BadDtype),
            (lambda b: (b[0], b[1], b[2].half()), BadDtype),
        )
    ):
        with pytest.raises(error, match=("exp_sums", "max_logits", "tmp_out")[i]):
            ops.paged_attention_v2(call.out, *change((sums, logits, tmp)), *call.arguments[1:], backend=backend.name)
    for out, error in ((call.out[..., :8], BadShape), (call.out[None], BadShape), (call.out.half(), BadDtype)):
        for version in ("v1", "v2"):
            with pytest.raises(error, match="out has"):
                ops.paged_attention(out, *call.arguments[1:], version=version, backend=backend.name)
    assert all(x.isnan().all() for x in (sums, logits, tmp)), "nothing was written"
    odd = Packed(device, [30, 5], block_size=24)
    with pytest.raises(BadValue, match="block_size is 24; V2's partitions of 512 tokens consist of whole blocks"):
        ops.paged_attention(*odd.arguments, version="v2", backend=backend.name)
