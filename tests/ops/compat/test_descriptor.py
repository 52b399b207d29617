"""InfiniOP's paged prefill: the seed's example with its numbers, its kernel as a reference, and each of its checks."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from quire import ops
from quire.errors import BadDtype, BadShape, BadStride, BadValue, QuireError, Unsupported
from quire.ops.compat.descriptor import attend_unseen
from tests.ops import dense
from tests.ops.cases import half_dtype
from tests.ops.conftest import checked_once
from tests.ops.small_caches import check, random_cache, random_rows, tables_of

STARTS = [0, 10, 30, 45, 70]  # four sequences of 10, 20, 15 and 25 query rows
NAMES = ("out", "q", "k_cache", "v_cache", "block_tables", "seq_lens", "cum_seq_lens_q")


def find_seq_id(token: int, cum_seq_lens_q: list[int]) -> int:
    """The sequence that a query token belongs to, by binary search."""
    low, high = 0, len(cum_seq_lens_q) - 1
    while low < high:
        middle = (low + high) // 2
        if cum_seq_lens_q[middle + 1] <= token:
            low = middle + 1
        else:
            high = middle
    return low


def three_passes(
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [N, Hkv, B, D]
    v_cache: Tensor,  # [N, Hkv, B, D]
    tables: list[list[int]],
    lens: list[int],
    starts: list[int],
    slopes: Tensor | None,  # [Hq]
    scale: float,
) -> Tensor:
    """The seed's kernel, a token and head at a time: the maximum, the sum with its 1e-6, the weighted sum."""
    q, k_cache, v_cache = (x.cpu().double() for x in (q, k_cache, v_cache))
    (num_tokens, num_heads, _), block_size = q.shape, k_cache.shape[2]
    out = torch.empty_like(q)
    for token in range(num_tokens):
        s = find_seq_id(token, starts)
        history = lens[s] - (starts[s + 1] - starts[s])
        limit = history + token - starts[s]  # the last key that the token sees
        for head in range(num_heads):
            kv_head = head // (num_heads // k_cache.shape[1])
            slope = 0.0 if slopes is None else float(slopes[head])
            places = [(tables[s][t // block_size], kv_head, t % block_size) for t in range(limit + 1)]

            def score(t: int, places=places, token=token, head=head, slope=slope, limit=limit) -> float:
                # t - limit is at most 0: in unsigned arithmetic it would be enormous
                return float(q[token, head] @ k_cache[places[t]]) * scale + slope * (t - limit)

            highest = max(score(t) for t in range(limit + 1))
            total = sum(math.exp(score(t) - highest) for t in range(limit + 1))
            weights = [math.exp(score(t) - highest) / (total + 1e-6) for t in range(limit + 1)]
            out[token, head] = sum(w * v_cache[place] for w, place in zip(weights, places, strict=True))
    return out


class Call:
    """The tensors of one call, by name."""

    def __init__(
        self, device: str, dtype: torch.dtype, *, lens: list[int], starts: list[int], block_size: int = 16,
        num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 16, width: int = 8, int_dtype=torch.int64,
        alibi: bool | str = False, nhd: bool = False,
    ) -> None:  # fmt: skip
        self.lens, self.starts = lens, starts
        self.tables, self.num_blocks = tables_of(lens, block_size, width)
        shape = (self.num_blocks, num_kv_heads, block_size, head_size)
        caches = [random_cache(shape, self.tables, lens, dtype, device, seed) for seed in (1, 2)]
        if nhd:
            caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
        q = random_rows((starts[-1], num_heads, head_size), dtype, device)
        self.slopes = (0.5 ** (1 + torch.arange(num_heads) / 4)).to(device) if alibi else None
        integers = [torch.tensor(x, dtype=int_dtype, device=device) for x in (self.tables, lens, starts)]
        self.given = dict(zip(NAMES, (torch.full_like(q, torch.nan), q, *caches, *integers), strict=True))
        if alibi == "each":
            self.slopes = self.slopes * torch.linspace(1, -0.4, len(lens), device=device)[:, None]
        if alibi:
            self.given["alibi_slopes"] = self.slopes

    def meta(self) -> dict[str, Tensor]:
        """Tensors that look the same and hold nothing."""
        return {name: x.to("meta") for name, x in self.given.items()}

    def check(self, scale: float) -> None:
        q, k, v = (self.given[name] for name in ("q", "k_cache", "v_cache"))
        check(self.given["out"], q, k, v, self.tables, self.lens, self.starts, scale=scale, alibi_slopes=self.slopes)


def small(device: str, **options) -> Call:
    return Call(device, torch.float32, **({"lens": [9, 21, 4], "starts": [0, 3, 4, 8], "block_size": 4} | options))


# ------------------------------------------------------------------------------------------------ what it computes


@pytest.mark.parametrize("int_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("alibi", [False, True])
def test_the_seeds_example(backend, device, int_dtype, alibi):
    """4 sequences, 32 heads over 8, 128 numbers a head, blocks of 16, tables of 128, 1,024 blocks, 70 query tokens."""
    dtype, scale = half_dtype(backend), 1 / math.sqrt(128)
    call = Call(
        device, dtype, lens=[10, 20, 15, 25], starts=STARTS, num_heads=32, num_kv_heads=8, head_size=128, width=128,
        int_dtype=int_dtype, alibi=alibi,
    )  # fmt: skip
    for name in ("k_cache", "v_cache"):
        cache = torch.full((1024, 8, 16, 128), torch.nan, dtype=dtype, device=device)
        cache[: call.num_blocks] = call.given[name]
        call.given[name] = cache
    with ops.PagedPrefill.create(device, **call.meta(), scale=scale, backend=backend.name) as prefill:
        info = prefill.info
        assert (info.dtype, info.scale, info.num_seqs, info.num_heads) == (dtype, scale, 4, 32)
        assert (info.num_kv_heads, info.head_size, info.block_size) == (8, 128, 16)
        assert (info.max_num_blocks_per_seq, info.total_q_tokens) == (128, 70)
        assert (info.q_stride, info.q_head_stride) == (32 * 128, 128)
        assert (info.kv_block_stride, info.kv_head_stride) == (8 * 16 * 128, 16 * 128)
        with pytest.raises(FrozenInstanceError):
            info.num_seqs = 5
        prefill.run(**call.given, host_metadata=on_host(call, device))
    call.check(scale)


def on_host(call: Call, device: str) -> tuple[Tensor, ...] | None:
    """Copies of the metadata, where it does not lie on the host itself."""
    return None if device == "cpu" else tuple(call.given[name].cpu() for name in NAMES[4:])


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_it_equals_the_seeds_three_passes(backend, device, alibi, group):
    """Up to the 1e-6 that the seed adds to a sum that is never below 1."""
    call = small(device, alibi=alibi, num_heads=2 * group)
    prefill = ops.PagedPrefill.create(device, **call.meta(), backend=backend.name)
    prefill.run(**call.given, host_metadata=on_host(call, device))
    q, k, v = (call.given[name] for name in ("q", "k_cache", "v_cache"))
    want = three_passes(q, k, v, call.tables, call.lens, call.starts, call.slopes, 16**-0.5)
    dense.check_close("out", call.given["out"], want, 1e-5)
    call.check(16**-0.5)  # and neither is wrong in the same way


def test_the_search_finds_every_token():
    starts = [0, 0, 3, 3, 3, 7, 8, 8]
    assert [find_seq_id(token, starts) for token in range(8)] == [1, 1, 1, 4, 4, 4, 4, 5]


def test_one_descriptor_serves_many_calls(backend, device):
    first = small(device)
    prefill = ops.PagedPrefill.create(device, **first.meta(), scale=0.2, backend=backend.name)
    for lens in ([9, 21, 4], [3, 1, 4], [32, 2, 30]):
        call = small(device, lens=lens)
        for name in ("k_cache", "v_cache"):  # the same pool, whatever the lengths
            pool = torch.full_like(first.given[name], torch.nan)
            pool = torch.cat([pool] * 3)
            pool[: call.num_blocks] = call.given[name]
            call.given[name] = pool
        if lens == [9, 21, 4]:
            prefill = ops.PagedPrefill.create(device, **call.meta(), scale=0.2, backend=backend.name)
        prefill.run(**call.given, host_metadata=on_host(call, device))
        call.check(0.2)


@pytest.mark.parametrize("nhd", [False, True])
def test_strided_tensors(backend, device, nhd):
    call = small(device, nhd=nhd)
    qkv = torch.full((8, 9, 16), torch.nan, device=device)
    qkv[:, :4] = call.given["q"]
    call.given["q"], call.given["out"] = qkv[:, :4], torch.empty(4, 8, 16, device=device).transpose(0, 1)
    prefill = ops.PagedPrefill.create(device, **call.given, backend=backend.name)
    assert (prefill.info.q_stride, prefill.info.q_head_stride) == (9 * 16, 16)
    assert prefill.info.kv_head_stride == (16 if nhd else 4 * 16)
    prefill.run(**call.given, host_metadata=on_host(call, device))
    call.check(16**-0.5)


@pytest.mark.slow
def test_a_run_allocates_no_tensor():
    """On the native backend, whose work needs no memory but the plan's. Scalars of the checks of lengths aside."""
    if reason := ops.unavailable("cpu"):
        pytest.skip(reason)
    lens = [700 + s for s in range(64)]
    starts = list(range(65))
    call = Call("cpu", torch.float32, lens=lens, starts=starts, block_size=16, width=512, int_dtype=torch.int32)
    prefill = ops.PagedPrefill.create("cpu", **call.given, backend="cpu")
    prefill.run(**call.given)
    plan = prefill._plan
    addresses = [x.data_ptr() for x in (plan.query_starts, plan.context_lens, plan.block_tables)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        prefill.run(**call.given)
    sizes = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    assert sum(size for size in sizes.values() if size > 0) < 2_000, sizes  # a copied table would be 131,072
    assert prefill._plan is plan
    assert [x.data_ptr() for x in (plan.query_starts, plan.context_lens, plan.block_tables)] == addresses


def test_each_sequence_with_slopes_of_its_own(backend, device):
    call = small(device, alibi="each")
    with ops.PagedPrefill.create(device, **call.meta(), scale=0.25, backend=backend.name) as prefill:
        prefill.run(**call.given)
    call.check(0.25)


# --------------------------------------------------------------------------------- lengths that the host never sees


@pytest.mark.parametrize("alibi", [False, True, "each"])
@pytest.mark.parametrize("lens", [[9, 21, 4], [3, 1, 4], [32, 32, 4]])
def test_attention_without_looking_at_lengths(lens, alibi):
    call = small("cpu", lens=lens, alibi=alibi, num_heads=6)
    size = 8 * 6 * (16 + 2)
    state = torch.full((size,), torch.nan)
    attend_unseen(*(call.given[name] for name in NAMES), call.slopes, 0.25, state)
    call.check(0.25)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU whose tensors have no memory: whatever needs their values fails."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return "cuda"


def test_it_waits_for_nothing():
    """A fake tensor has no values, so that a look at one on the host raises."""
    call = small("cpu", alibi=True)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(call.given[name]) for name in NAMES]
        with pytest.raises(DataDependentOutputException):
            given[-1][0].item()
        attend_unseen(*given, mode.from_tensor(call.slopes), 0.25, torch.empty(8 * 4 * 18))


def test_a_workspace_that_is_too_small(gpu):
    call = small("cpu")
    prefill = ops.PagedPrefill.create(gpu, **call.meta(), backend="reference")
    with pytest.raises(BadValue, match="workspace has 2303 bytes; it needs at least 2304"):
        prefill.run(**call.given, workspace=torch.empty(2303, dtype=torch.uint8))
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = {name: torch.empty(x.shape, dtype=x.dtype, device=gpu) for name, x in call.given.items()}
        with pytest.raises(
            BadValue, match="workspace is None; lengths on cuda need one of 2304 bytes, or host_metadata"
        ):
            prefill.run(**given)


@pytest.mark.parametrize(
    ("cum_seq_lens_q", "table"),
    [([0, 3, 4, 8], -5), ([0, 3, 4, 8], 2**40), ([5, 90, -7, 10**6], 0), ([-9, -9, -9, -9], 0), ([9, 9, 9, 9], 0)],
)
def test_unchecked_metadata_reads_nothing_but_the_cache(cum_seq_lens_q, table):
    """Wrong numbers may come out, from within the cache; nothing else is touched."""
    call = small("cpu")
    call.given["block_tables"] = torch.full((3, 8), table)
    call.given["cum_seq_lens_q"] = torch.tensor(cum_seq_lens_q)
    for cache in ("k_cache", "v_cache"):
        call.given[cache] = torch.ones_like(call.given[cache])
    attend_unseen(*(call.given[name] for name in NAMES), None, 0.25, torch.empty(8 * 4 * 18))
    out = call.given["out"]
    assert ((out == 0) | torch.isclose(out, torch.ones(()))).all()


def test_a_workspace_that_lies_askew(gpu):
    prefill = ops.PagedPrefill.create(gpu, **small("cpu").meta(), backend="reference")
    room = torch.empty(prefill.workspace_size + 4, dtype=torch.uint8)
    for workspace in (room[1:], torch.empty(2 * prefill.workspace_size, dtype=torch.uint8)[::2]):
        with pytest.raises(BadStride, match="workspace has strides"):
            prefill.run(**small("cpu").given, workspace=workspace)


def test_a_cpu_needs_no_workspace():
    call = small("cpu")
    prefill = ops.PagedPrefill.create("cpu", **call.meta())
    assert prefill.workspace_size == 0
    prefill.run(**call.given, workspace=torch.empty(0, dtype=torch.uint8))
    call.check(16**-0.5)


def test_host_metadata_is_checked(gpu):
    """Its looks and its values; nothing is computed before."""
    call = small("cpu")
    prefill = ops.PagedPrefill.create(gpu, **call.meta(), backend="reference")
    tables, lens, starts = (call.given[name] for name in NAMES[4:])
    for metadata, error, message in (
        ((tables, lens), BadValue, "host_metadata must be a tuple"),
        ((tables, lens.tolist(), starts), BadDtype, "seq_lens is a list"),
        ((tables, lens.float(), starts), BadDtype, "seq_lens has dtype torch.float32"),
        ((tables[:2], lens, starts), BadShape, r"block_tables on the host has shape \(2, 8\); described was \(3, 8\)"),
        ((tables, lens, starts[:0]), BadShape, r"cum_seq_lens_q on the host has shape \(0,\)"),
        ((tables, lens, starts + 1), BadValue, r"cum_seq_lens_q\[0\] is 1"),
    ):
        with pytest.raises(error, match=message):
            prefill._check_host(metadata)
    assert prefill._check_host((tables, lens, starts)) == (tables, lens, starts)


def test_a_stride_of_a_single_thing_does_not_matter():
    call = Call("cpu", torch.float32, lens=[9], starts=[0, 1], num_kv_heads=1, num_heads=2, block_size=4)
    prefill = ops.PagedPrefill.create("cpu", **call.meta())
    k = call.given["k_cache"]
    call.given["k_cache"] = k.as_strided(k.shape, (64, 16, 16, 1))
    call.given["q"] = torch.cat([call.given["q"]] * 2, dim=1)[:, :2]
    prefill.run(**call.given)
    call.check(16**-0.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU; the twin above runs on fake tensors")
def test_on_a_gpu():
    call = small("cuda", alibi=True)
    prefill = ops.PagedPrefill.create("cuda", **call.meta())
    workspace = torch.empty(prefill.workspace_size, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefill.run(**call.given, workspace=workspace, stream=stream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    call.check(16**-0.5)


# --------------------------------------------------------------------------------------------------- its checks


CREATE = [
    # one dtype for q, k, v, out
    ("k_cache", lambda x: x.half(), BadDtype, "k_cache has dtype torch.float16 and q torch.float32"),
    ("v_cache", lambda x: x.bfloat16(), BadDtype, "v_cache has dtype torch.bfloat16"),
    ("out", lambda x: x.double(), BadDtype, "out has dtype torch.float64"),
    ("q", lambda x: x.double(), BadDtype, "q has dtype torch.float64; it must be one of torch.float16"),
    ("block_tables", lambda x: x.float(), BadDtype, "block_tables has dtype torch.float32"),
    ("seq_lens", lambda x: x.short(), BadDtype, "seq_lens has dtype torch.int16"),
    ("cum_seq_lens_q", lambda x: x.double(), BadDtype, "cum_seq_lens_q has dtype torch.float64"),
    ("alibi_slopes", lambda x: torch.zeros(4).double(), BadDtype, "alibi_slopes has dtype torch.float64"),
    # 3-d q, 4-d caches, 2-d tables
    ("q", lambda x: x.flatten(1), BadShape, r"q has shape \(8, 64\); it must have 3"),
    ("out", lambda x: x[None], BadShape, r"out has shape \(1, 8, 4, 16\); it must have 3"),
    ("k_cache", lambda x: x[0], BadShape, "k_cache has shape .* it must have 4"),
    ("v_cache", lambda x: x[0], BadShape, "v_cache has shape .* it must have 4"),
    ("block_tables", lambda x: x[0], BadShape, r"block_tables has shape \(8,\); it must have 2"),
    ("seq_lens", lambda x: x[None], BadShape, r"seq_lens has shape \(1, 3\); it must have 1"),
    ("cum_seq_lens_q", lambda x: x[None], BadShape, r"cum_seq_lens_q has shape \(1, 4\); it must have 1"),
    # sizes
    ("out", lambda x: x[:7], BadShape, r"out has shape \(7, 4, 16\); expected \(8, 4, 16\)"),
    ("k_cache", lambda x: x[..., :8], BadShape, "k_cache has shape .* expected .*16"),
    ("v_cache", lambda x: x[:-1], BadShape, "v_cache has shape"),
    ("k_cache", lambda x: x[:, :0], BadShape, "k_cache has 0 heads"),
    ("k_cache", lambda x: x[:0], BadShape, "there must be a block"),
    ("k_cache", lambda x: torch.zeros(9, 3, 4, 16), BadShape, "k_cache has 3 heads; the 4 heads of q"),
    ("block_tables", lambda x: x[:2], BadShape, r"block_tables has shape \(2, 8\); expected \(3, 8\)"),
    ("cum_seq_lens_q", lambda x: x[:3], BadShape, r"cum_seq_lens_q has shape \(3,\); expected \(4,\)"),
    ("alibi_slopes", lambda x: torch.zeros(3), BadShape, r"alibi_slopes has shape \(3,\); expected \(4,\)"),
    ("alibi_slopes", lambda x: torch.zeros(2, 4), BadShape, r"has shape \(2, 4\); expected \(4,\) or \(3, 4\)"),
    ("alibi_slopes", lambda x: torch.zeros(1, 3, 4), BadShape, r"alibi_slopes has shape \(1, 3, 4\); .* have 1 or 2"),
    ("q", lambda x: x[:0], BadShape, "there must be a query token and a head"),
    ("q", lambda x: x[:, :0], BadShape, "there must be a query token and a head"),
    ("seq_lens", lambda x: x[:0], BadShape, r"seq_lens has shape \(0,\); the 8 query tokens"),
    ("q", lambda x: torch.zeros(8, 4, 1025), BadShape, r"a head size of 1025; it must lie in 1\.\.1024"),
    ("q", lambda x: torch.zeros(8, 4, 0), BadShape, "a head size of 0"),
    # strides
    ("q", lambda x: torch.zeros(8, 16, 4).mT, BadStride, "q has strides .* the last one must be 1"),
    ("out", lambda x: torch.zeros(8, 16, 4).mT, BadStride, "out has strides"),
    ("k_cache", lambda x: torch.zeros(*x.shape[:2], 16, 4).mT, BadStride, "k_cache has strides"),
    ("v_cache", lambda x: torch.zeros(*x.shape[:2], 16, 4).mT, BadStride, "v_cache has strides"),
    ("v_cache", lambda x: torch.zeros(len(x), 4, 2, 16).transpose(1, 2), BadStride, "the first two, of blocks"),
    # values
    ("alibi_slopes", lambda x: torch.zeros(8)[::2], BadStride, "alibi_slopes has strides"),
    ("block_tables", lambda x: x.to(torch.uint8), BadDtype, "block_tables has dtype torch.uint8"),
    ("scale", lambda x: "x", BadValue, "scale is 'x'"),
    ("scale", lambda x: math.inf, BadValue, "scale is inf"),
    ("scale", lambda x: math.nan, BadValue, "scale is nan"),
    ("seq_lens", lambda x: x.tolist(), BadDtype, "seq_lens is a list; it must be a tensor"),
    ("seq_lens", lambda x: None, BadValue, "seq_lens is None; only alibi_slopes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "message"), CREATE)
def test_create_refuses(name, change, error, message):
    given = small("cpu").given
    ops.PagedPrefill.create("cpu", **given)
    given[name] = change(given.get(name))
    with pytest.raises(error, match=message) as raised:
        ops.PagedPrefill.create("cpu", **given)
    assert raised.value.status == {
        BadShape: "BAD_SHAPE", BadDtype: "BAD_DTYPE", BadStride: "BAD_STRIDE", BadValue: "BAD_VALUE"
    }[error]  # fmt: skip


def test_create_refuses_a_device_that_is_not_there():
    for device in ("xpu", "gpu", None):
        with pytest.raises(Unsupported, match=str(device)) as raised:
            ops.PagedPrefill.create(device, **small("cpu").given)
        assert raised.value.status == "UNSUPPORTED"


def test_a_block_size_beyond_256():
    call = small("cpu", block_size=257)
    with pytest.raises(BadValue, match="block_size is 257"):
        ops.PagedPrefill.create("cpu", **call.given)


RUN = [
    # values of the metadata
    ("cum_seq_lens_q", [1, 3, 4, 8], BadValue, r"cum_seq_lens_q\[0\] is 1"),
    ("cum_seq_lens_q", [0, 5, 4, 8], BadValue, "cum_seq_lens_q falls from 5 to 4 at sequence 1"),
    ("cum_seq_lens_q", [0, 3, 4, 7], BadValue, "cum_seq_lens_q ends at 7; q has 8 tokens"),
    ("cum_seq_lens_q", [0, 3, 4, 9], BadValue, "cum_seq_lens_q ends at 9"),
    ("seq_lens", [2, 21, 4], BadValue, r"seq_lens\[0\] is 2; sequence 0 has 3 query tokens"),
    ("seq_lens", [9, 0, 4], BadValue, r"seq_lens\[1\] is 0; sequence 1 has 1 query tokens"),
    ("seq_lens", [9, 33, 4], BadValue, r"^seq_lens\[1\] is 33; sequence 1's table of 8 blocks of 4 holds 0\.\.32"),
    ("block_tables", [[0, 1, 2] + [-1] * 5, [-1] * 8, [3] + [-1] * 7], BadValue, r"block_tables\[1, 0\] is -1"),
    ("block_tables", [[0, 1, 999] + [-1] * 5] * 3, BadValue, r"block_tables\[0, 2\] is 999"),
    # looks that were not described
    ("q", torch.zeros(7, 4, 16), BadShape, r"q has shape \(7, 4, 16\); described was \(8, 4, 16\)"),
    ("q", torch.zeros(8, 4, 16).half(), BadDtype, "q has dtype torch.float16; described was torch.float32"),
    ("q", torch.zeros(4, 8, 16).transpose(0, 1), BadStride, "q has strides .* described were"),
    ("q", torch.zeros(8, 4, 32)[..., ::2], BadStride, "q has strides .* described were"),
    ("seq_lens", torch.tensor([9, 21, 4], dtype=torch.int32), BadDtype, "seq_lens has dtype torch.int32"),
    ("q", torch.zeros(8, 4, 16, device="meta"), BadValue, "q is on meta; the descriptor was created for cpu"),
    ("alibi_slopes", torch.zeros(4), BadValue, "created without alibi_slopes and is run with it"),
    ("k_cache", None, BadValue, "created with k_cache and is run without it"),
    # what a CPU has not
    ("stream", object(), BadValue, "a descriptor on the CPU has no streams"),
    ("host_metadata", ("a", "b", "c"), BadValue, "host_metadata was given; on the CPU"),
]  # fmt: skip


@checked_once
@pytest.mark.parametrize(("name", "value", "error", "message"), RUN)
def test_run_refuses(backend, device, name, value, error, message):
    if device != "cpu":
        pytest.skip("the checks of a host; the same code as on a CPU")
    call = small(device)
    prefill = ops.PagedPrefill.create(device, **call.given, backend=backend.name)
    given = {**call.given, name: torch.tensor(value) if isinstance(value, list) else value}
    with pytest.raises(error, match=message) as raised:
        prefill.run(**given)
    assert raised.value.status == error.status
    assert call.given["out"].isnan().all(), "something was written"
    prefill.run(**call.given)  # and it serves on
    call.check(16**-0.5)


@checked_once
def test_an_output_in_the_memory_of_the_queries_is_refused(backend, device):
    call = small(device)
    prefill = ops.PagedPrefill.create(device, **call.given, backend=backend.name)
    before = call.given["q"].clone()
    with pytest.raises(BadStride, match=r"^out shares memory with q"):
        prefill.run(**{**call.given, "out": call.given["q"]})
    assert torch.equal(call.given["q"], before)


@checked_once
def test_a_closed_descriptor(backend, device):
    call = small(device)
    prefill = ops.PagedPrefill.create(device, **call.given, backend=backend.name)
    prefill.close()
    prefill.close()
    with pytest.raises(BadValue, match="was closed"):
        prefill.run(**call.given)
    with pytest.raises(ZeroDivisionError), ops.PagedPrefill.create(device, **call.given, backend=backend.name) as other:
        raise ZeroDivisionError
    with pytest.raises(QuireError, match="was closed"):
        other.run(**call.given)
