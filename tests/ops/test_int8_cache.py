"""Caches of int8: how rows are rounded, to the bit, and what rows see of the scales."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from quire import ops
from quire.errors import BadDtype, BadShape, BadStride, BadValue, Unsupported
from quire.ops.weights.rounding import LARGEST, SMALLEST, quantised_rows
from tests.marks import quick, spread
from tests.ops import dense
from tests.ops.cases import LAYOUTS, Case, Step, errors_of_bytes
from tests.ops.conftest import INTERPRETED, checked_once
from tests.ops.test_cache import one_row_plan
from tests.ops.test_not_finite import rows_that_see

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 256)


def served(backend: ops.Backend) -> list[torch.dtype]:
    """Dtypes of q that have caches of int8."""
    return sorted((dtype for dtype, kv in backend.limits.kv_dtypes.items() if torch.int8 in kv), key=str)


def test_every_dtype_of_rows_has_them(backend):
    on_amd = backend.name == "triton" and torch.cuda.is_available() and torch.version.hip is not None
    assert served(backend) == ([] if on_amd else sorted(backend.limits.kv_dtypes, key=str))


def test_the_rule_of_rounding():
    x = torch.tensor(
        [
            [127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 63.49],  # a scale of 1, ties to even
            [SMALLEST, -SMALLEST, SMALLEST / 2, 0, 0, 0, 0, 0],
            [SMALLEST * 0.999, 0, -SMALLEST / 2, 0, 0, 0, 0, 0],
            [3.4028234e38, -3.4028234e38, 1, 0, 0, 0, 0, 1.7e38],
            [1, 2, torch.nan, 3, 4, 5, 6, 7],
            [1, 2, 3, torch.inf, 4, 5, 6, 7],
            [-torch.inf, torch.nan, 0, 0, 0, 0, 0, 0],
            [0, -0.0, 0, 0, 0, 0, 0, 0],
        ]
    )
    q, scale = quantised_rows(x)
    assert q.tolist() == [
        [127, -127, 0, 2, 2, 0, -2, 63],
        [127, -127, 64, 0, 0, 0, 0, 0],
        [0] * 8,
        [127, -127, 0, 0, 0, 0, 0, 63],
        *[[0] * 8] * 4,
    ]
    assert scale[[0, 2, 7]].tolist() == [1, 0, 0]
    assert scale[1] == torch.tensor(SMALLEST) / torch.tensor(127.0)
    assert scale[4:7].isnan().all()
    assert [x.tolist() for x in quantised_rows(torch.zeros(2, 0))] == [[[], []], [0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_kv_rounds_as_the_rule_says(backend, device, layout):
    """Every bit of integers and scales, for numbers of all sizes, and rows that are not finite among them."""
    for dtype in served(backend):
        for i, dim in enumerate(DIMS):
            if (i - LAYOUTS.index(layout)) % (2 if backend.name == "cpu" else len(LAYOUTS)):
                continue  # each dim with half of the layouts, and in Python with one
            case = Case(query_lens=(9,), context_lens=(9,), dtype=dtype, kv_dtype=torch.int8, layout=layout, seed=i)
            step = Step(replace(case, head_dim=dim, head_dim_v=DIMS[-1 - i], row_strides="packed"), device)
            for new in (step.k_new, step.v_new):
                new.copy_(torch.randn(new.shape))
                new[2] *= 1e-3
                new[3] *= 1e3
                new[4] = 0
                new[5, 0] = torch.finfo(dtype).max if dtype != torch.float64 else 1e30
                new[6, 1] = torch.finfo(dtype).tiny if dtype != torch.float64 else 1e-38
            step.k_new[7, 1, -1] = step.v_new[8, 0, 0] = torch.nan
            step.k_new[1, 0, 0] = -torch.inf
            slots = [8, 9, -1, 10, 11, 12, 3, 4, 5]
            plan = one_row_plan(backend, step, slots)
            before = [x.clone() for x in step.kv.tensors().values()]
            backend.write_kv(step.k_new, step.v_new, step.kv, plan)
            (k, k_scale), (v, v_scale) = quantised_rows(step.k_new), quantised_rows(step.v_new)
            for name, got, old, rows in zip(
                step.kv.tensors(), step.kv.tensors().values(), before, (k, v, k_scale, v_scale), strict=True
            ):
                for row, slot in enumerate(slots):
                    if slot >= 0:
                        old[slot // 8, :, slot % 8] = rows[row]
                torch.testing.assert_close(got, old, rtol=0, atol=0, equal_nan=True, msg=f"{name}, {dtype}, D={dim}")
            assert plan.nonfinite.tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 1]


CASES = [  # causal, with a window, with changed scores, not causal, of many rows, with shared blocks
    Case(query_lens=(4, 1), context_lens=(7, 2), block_size=4, group_size=2, head_dim=8),
    Case(query_lens=(6, 1), context_lens=(8, 2), block_size=3, group_size=1, head_dim=8, window=3),
    Case(query_lens=(3, 2), context_lens=(5, 2), block_size=16, alibi=True, softcap=3.0, head_dim=8, head_dim_v=24),
    Case(query_lens=(2, 1), context_lens=(3, 1), block_size=1, head_dim=8, causal=False),
    Case(query_lens=(40, 1), context_lens=(270, 90), block_size=32, head_dim=33, num_kv_heads=1),
    Case(query_lens=(1, 1, 3), context_lens=(300, 290, 270), shared_prefix=True, block_size=32, num_kv_heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=["causal", "window", "scores", "not causal", "many rows", "shared"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_scale_that_is_not_finite_reaches_the_rows_that_see_it(backend, device, case, dtype):
    """And no other, not by a bit; whatever integers it belongs to."""
    step = Step(replace(case, dtype=dtype, kv_dtype=torch.int8, return_lse=True), device)
    plan = step.write(backend)
    clean, clean_lse = step.attend(backend, plan)
    size, group = case.block_size, case.group_size
    owned = torch.cat(step.slots).unique().tolist()
    few = 1 if backend.name in INTERPRETED else 8 if len(owned) > 20 else len(owned)
    for i, slot in enumerate(owned[:: len(owned) // few]):
        seen, head = rows_that_see(step, slot), i % case.num_kv_heads
        for scales in (step.kv.k_scale, step.kv.v_scale):
            place = scales[slot // size, head, slot % size : slot % size + 1]
            before = place.clone()
            place.fill_(torch.nan)
            out, lse = step.attend(backend, plan)
            place.copy_(before)
            hit = torch.zeros(out.shape[:2], dtype=torch.bool)
            hit[seen, head * group : (head + 1) * group] = True
            assert out[hit].isnan().all()
            hits_lse = hit if scales is step.kv.k_scale else torch.zeros_like(hit)
            if device == "cpu" and backend.name != "triton":
                assert torch.equal(out[~hit], clean[~hit])
                assert torch.equal(lse[~hits_lse], clean_lse[~hits_lse])
            else:
                assert torch.allclose(out[~hit], clean[~hit], rtol=1e-2)
                assert torch.allclose(lse[~hits_lse], clean_lse[~hits_lse], rtol=1e-5)


@pytest.mark.parametrize(("case", "dtype"), spread(2, CASES, DTYPES))
def test_attention_is_that_over_the_rounded_rows(backend, device, case, dtype):
    some = [LAYOUTS[CASES.index(case) % len(LAYOUTS)]]  # of the layouts where Python or the interpreter computes
    for layout in LAYOUTS if backend.name == "cpu" else some:
        for lse in (True,) if backend.name in ("triton", "hopper") else (False, True):
            cased = replace(case, dtype=dtype, kv_dtype=torch.int8, layout=layout, return_lse=lse)
            Step(cased, device).check(backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_key_far_above_the_others(backend, device, dtype):
    """Its value is zero where those of the others are largest; and one number of the query is far above the others."""
    draw, n = torch.Generator().manual_seed(0), 256
    k, v = (torch.randn(n, 1, 32, generator=draw) for _ in range(2))
    k *= 0.1
    k[100, 0, 0] = 3
    v[:, 0, 1] = v.abs().max()
    v[100, 0, 1] = 0
    q = torch.randn(1, 2, 32, generator=draw) * 1e-3
    q[..., 0] = 4
    q = q.to(dtype)
    rows = [quantised_rows(x) for x in (k, v)]
    blocks = [x.view(16, 16, 1, -1).transpose(1, 2).contiguous().to(device) for x, _ in rows]
    scales = [x.view(16, 16, 1).transpose(1, 2).contiguous().to(device) for _, x in rows]
    spec = ops.AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=32, block_size=16, num_blocks=16, dtype=dtype, kv_dtype=torch.int8,
        device=device,
    )  # fmt: skip
    plan = backend.plan(spec, torch.tensor([0, 1]), torch.tensor([n]), torch.arange(16)[None])
    out, lse = backend.attention(q.to(device), ops.PagedKV(*blocks, *scales), plan, scale=1.0, return_lse=True)
    held = [x.double() * scale.double()[..., None] for x, scale in rows]
    errors = errors_of_bytes(backend, spec, n)
    # Each of the small weights may be too small for fp16.
    dense.attend(q, *held, scale=1.0).check(out, lse, dtype, largest=LARGEST * n, **errors)


@pytest.mark.parametrize("head_dim", quick([1, 63, 130, 3, 4, 16, 31, 32, 64, 65, 127, 128, 192], 3, 3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(backend, device, head_dim, dtype):
    """Of rows and heads, at the edges of what kernels take at a time."""
    pairs = itertools.product((1, 5, 13, 70), (1, 4, 7))
    if backend.name != "cpu":  # Python or the interpreter computes
        pairs = [(1, 7), (13, 4)]
    for rows, group in pairs:
        case = Case(
            query_lens=(rows, 1),
            context_lens=(rows + 67, 33),
            head_dim=head_dim,
            head_dim_v=max(1, 130 - head_dim),
            group_size=group,
            num_kv_heads=1,
            block_size=16,
            dtype=dtype,
            kv_dtype=torch.int8,
            poison="mixed",
        )
        Step(case, device).check(backend)


@checked_once
def test_k_and_v_need_scales_of_their_own(backend, device):
    step = Step(Case(query_lens=(3,), context_lens=(9,), kv_dtype=torch.int8), device)
    plan, kv = step.write(backend), step.kv
    for wrong, error, fragments in (
        (replace(kv, k_scale=None), BadShape, ("kv.k_scale", "None")),
        (replace(kv, v_scale=kv.v_scale[:, :, :-1]), BadShape, ("kv.v_scale", "(4, 2, 7)")),
        (replace(kv, v_scale=kv.v_scale.double()), BadDtype, ("kv.v_scale", "float64")),
        (replace(kv, k=kv.k.float()), BadDtype, ("kv.k", "float32", "int8")),
    ):
        with pytest.raises(error) as raised:
            backend.attention(step.q, wrong, plan)
        assert all(fragment in str(raised.value) for fragment in fragments), raised.value
    for shared in (replace(kv, v=kv.k), replace(kv, v_scale=kv.k_scale)):
        with pytest.raises(BadStride, match="shares memory"):
            backend.write_kv(step.k_new, step.v_new, shared, plan)
    other = Step(Case(query_lens=(3,), context_lens=(9,)), device)
    with pytest.raises(BadShape, match=r"kv\.k_scale has shape .* no scales"):
        backend.attention(other.q, replace(other.kv, k_scale=kv.k_scale), other.write(backend))


@pytest.mark.triton(cases=0)
def test_a_sequence_has_its_bits_in_every_batch(backend, device):
    """On a backend that promises it: alone and next to others, which share its first blocks."""
    if not backend.limits.reproducible:
        assert backend.name in ("reference", "gather")
        return
    case = replace(CASES[-1], query_lens=(1, 1, 3, 5), context_lens=(300, 290, 270, 9), dtype=torch.bfloat16)
    step = Step(replace(case, kv_dtype=torch.int8, return_lse=True), device)
    step.spec = replace(step.spec, reproducible=True)
    out, lse = step.attend(backend, step.write(backend))
    starts = step.query_starts.tolist()
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        tables, lens = step.block_tables[s : s + 1], step.context_lens[s : s + 1]
        plan = backend.plan(step.spec, torch.tensor([0, end - begin]), lens, tables)
        alone, its_lse = backend.attention(step.q[begin:end], step.kv, plan, return_lse=True)
        assert torch.equal(alone, out[begin:end])
        assert torch.equal(its_lse, lse[begin:end])


# ------------------------------------------------------------------------------------------------- latent caches

LATENT = replace(CASES[4], head_dim=40, head_dim_v=32, latent=True)
SHORTER = {"query_lens": (3, 1), "context_lens": (70, 20)}  # for the interpreter


@pytest.mark.parametrize(
    ("dims", "dtype"), spread(2, [(20, 16), (24, 16), (40, 32), (96, 64), (160, 128), (576, 512)], DTYPES)
)
def test_both_parts_of_a_latent_row_have_their_scale(backend, device, dims, dtype):
    """The rows' last numbers are 30 times as large as those that are V, too."""
    rows = [(1, 1), (1, 16), (5, 3), (13, 8), (70, 4)]
    if backend.name != "cpu":  # Python or the interpreter computes
        rows = [(1, 16)] if backend.name in ("triton", "hopper") else [(1, 16), (13, 8)]
    for i, (count, group) in enumerate(rows):
        case = Case(
            query_lens=(count, 1),
            context_lens=(count + 67, 33),
            head_dim=dims[0],
            head_dim_v=dims[1],
            latent=True,
            group_size=group,
            num_kv_heads=1 + i % 2,
            block_size=16,
            dtype=dtype,
            kv_dtype=torch.int8,
            poison="mixed",
            return_lse=True,
            seed=i,
        )
        Step(case, device).check(backend)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latent_rows_in_every_layout(backend, device, layout):
    cases = [LATENT, replace(LATENT, query_lens=(9, 1), window=50), replace(LATENT, softcap=3.0, alibi=True)]
    lens, dtypes, turn = {"query_lens": (4, 1)}, DTYPES, LAYOUTS.index(layout)
    if backend.name != "cpu":
        dtypes = [DTYPES[turn % len(DTYPES)]]
    if backend.name in INTERPRETED:
        cases, lens, dtypes = [cases[turn % len(cases)]], SHORTER, DTYPES[1:2]
    for case in cases:
        for dtype in dtypes:
            Step(replace(case, dtype=dtype, kv_dtype=torch.int8, layout=layout, **lens), device).check(backend)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_latent_row_as_exact_as_its_parts(backend, device, dtype):
    """With one scale for all of a row, the part that is V would be rounded to a few whole numbers here."""
    lens = SHORTER if backend.name in INTERPRETED else {"query_lens": (3, 1)}
    case = replace(LATENT, dtype=dtype, size=0.1, **lens)
    found = []
    for kv_dtype in (torch.int8, None):
        step = Step(replace(case, kv_dtype=kv_dtype), device)
        found.append(step.attend(backend, step.write(backend))[0].float())
    assert (found[0] - found[1]).abs().max() < 0.05 * found[1].abs().max()


@pytest.mark.parametrize("part", ["latent", "rotated"])
def test_a_latent_row_that_is_not_finite_reaches_the_rows_that_see_it(backend, device, part):
    case = replace(LATENT, query_lens=(4, 1), context_lens=(7, 2), block_size=4, kv_dtype=torch.int8)
    step = Step(case, device)
    place = 0 if part == "latent" else case.dim_v
    step.k_new[2, 0, place] = torch.inf  # of the key 5 of 7
    plan = step.write(backend)
    assert plan.nonfinite.tolist() == [0, 0, 1, 0, 0]
    out, _ = step.attend(backend, plan)
    assert out[2:4].isnan().all()
    assert out[[0, 1, 4]].isfinite().all()


@pytest.mark.triton(cases=0)
def test_a_latent_row_has_its_bits_in_every_chunk(backend, device):
    if not backend.limits.reproducible:
        assert backend.name in ("reference", "gather")
        return
    case = replace(LATENT, query_lens=(40, 1), context_lens=(290, 290), dtype=torch.bfloat16, kv_dtype=torch.int8)
    step = Step(case, device)
    step.spec = replace(step.spec, reproducible=True)
    out, _ = step.attend(backend, step.write(backend))
    for row in (0, 17, 39):
        n = torch.tensor([290 - 39 + row], dtype=torch.int32)
        plan = backend.plan(step.spec, torch.tensor([0, 1], dtype=torch.int32), n, step.block_tables[:1])
        assert torch.equal(backend.attention(step.q[row : row + 1], step.kv, plan)[0], out[row])


@pytest.mark.triton(cases=0)
def test_a_latent_spec_says_what_fits(backend, device):
    step = Step(replace(LATENT, kv_dtype=torch.int8), device)
    for wrong, fragments in (
        ({"head_dim_v": 40}, ("head_dim_v is 40", "below spec.head_dim, 40")),
        ({"head_dim_v": None}, ("head_dim_v is 40", "below")),
        ({"head_dim_v": 30}, ("head_dim_v is 30", "multiple of 4")),
        ({"latent": 1}, ("spec.latent is 1", "True or False")),
    ):
        with pytest.raises(BadValue) as raised:
            replace(step.spec, **wrong)
        assert all(fragment in str(raised.value) for fragment in fragments), raised.value
    plan, kv = step.write(backend), step.kv
    with pytest.raises(BadStride, match=r"kv\.v has strides .* with spec\.latent=True it must be kv\.k\[\.\.\., :32\]"):
        backend.attention(step.q, replace(kv, v=kv.v.clone()), plan)
    with pytest.raises(BadStride, match="shares memory"):  # other values than what the keys begin with
        backend.write_kv(step.k_new, step.v_new.clone(), kv, plan)


def test_triton_serves_latent_rows_that_its_programs_cut(backend, device):
    if backend.name not in ("triton", "hopper"):
        return
    step = Step(replace(LATENT, head_dim=40, head_dim_v=24, kv_dtype=torch.int8), device)
    with pytest.raises(Unsupported, match=r"head_dim_v is 24 and spec\.head_dim 40; .* here 32"):
        step.write(backend)
