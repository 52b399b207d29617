"""The small operators of a decoder against their formulas in float64, in every dtype, on odd sizes and strided rows.

Inputs are rounded to the dtype first; the result may be off by its one rounding and by 16 eps of fp32 in the sums.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadDtype, BadShape, BadValue, QuireError
from quire.ops.activation import Activation
from quire.ops.choice import Choice
from tests.marks import spread
from tests.ops.conftest import checked_once
from tests.ops.dense import check_close

SHAPES = [(1, 1), (3, 2), (5, 7), (2, 3, 64), (4, 129), (2, 1000), (0, 8), (33,), (70, 31)]


def dtypes(backend: ops.Backend) -> list[torch.dtype]:
    return sorted(backend.limits.kv_dtypes, key=str)


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str, size: float = 1.0, seed: int = 0) -> Tensor:
    """Random rows that lie strided in a wider tensor of NaN."""
    gen = torch.Generator().manual_seed(seed + math.prod(shape))
    home = torch.full((*shape[:-1], shape[-1] + 5), torch.nan, dtype=dtype, device=device)[..., 3:-2]
    return home.copy_((size * torch.randn(shape, generator=gen, dtype=torch.float64)).to(dtype))


def check_rounded(name: str, got: Tensor, want: Tensor, dtype: torch.dtype, size: Tensor | None = None) -> None:
    """One rounding to the dtype of an fp32 result whose terms are as large as `size`."""
    sums = torch.promote_types(dtype, torch.float32)
    size = want.abs() if size is None else size
    rounding = 0.51 * torch.finfo(dtype).eps * want.abs() + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert got.dtype == dtype
    assert got.shape == want.shape
    check_close(name, got, want, rounding + 16 * torch.finfo(sums).eps * size + torch.finfo(sums).tiny)


def exact(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64, copy=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


# ---------------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])  # 300² is beyond fp16
def test_rms_norm(backend, device, shape, size):
    for dtype in dtypes(backend):
        x, weight = draw(shape, dtype, device, size), draw(shape[-1:], dtype, device, seed=1).contiguous()
        before = exact(x)
        got = backend.rms_norm(x, weight, 1e-5)
        check_rounded("rms_norm", got, rms_norm(exact(x), exact(weight), 1e-5), dtype)
        assert torch.equal(exact(x), before)


def test_rms_norm_of_zeros_and_of_heads_within_a_packed_qkv(backend, device):
    for dtype in dtypes(backend):
        weight = draw((16,), dtype, device).contiguous()
        assert not backend.rms_norm(torch.zeros(3, 16, dtype=dtype, device=device), weight, 1e-6).any()
        heads = draw((5, 9, 16), dtype, device)[:, 4:6]
        check_rounded(
            "rms_norm", backend.rms_norm(heads, weight, 1e-6), rms_norm(exact(heads), exact(weight), 1e-6), dtype
        )


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) == 2])
def test_add_rms_norm(backend, device, shape):
    for dtype in dtypes(backend):
        x, residual = draw(shape, dtype, device), draw(shape, dtype, device, size=3.0, seed=1)
        weight = draw(shape[-1:], dtype, device, seed=2).contiguous()
        x_before, total = exact(x), exact(x) + exact(residual)
        got = backend.add_rms_norm(x, residual, weight, 1e-6)
        check_rounded("residual", residual, total, dtype)
        check_rounded("add_rms_norm", got, rms_norm(exact(residual), exact(weight), 1e-6), dtype)
        assert torch.equal(exact(x), x_before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shift", [0.0, 20.0])
def test_layer_norm(backend, device, shape, with_bias, shift):
    for dtype in dtypes(backend):
        x = draw(shape, dtype, device)
        x += shift
        weight = draw(shape[-1:], dtype, device, seed=1).contiguous()
        bias = draw(shape[-1:], dtype, device, seed=2).contiguous() if with_bias else None
        wide, scale = exact(x), exact(weight)
        mean = wide.mean(-1, keepdim=True)
        deviation = torch.sqrt((wide - mean).square().mean(-1, keepdim=True) + 1e-5)
        offset = 0.0 if bias is None else exact(bias)
        want = (wide - mean) / deviation * scale + offset
        size = want.abs() + (wide.abs() + mean.abs()) / deviation * scale.abs() + abs(offset)
        check_rounded("layer_norm", backend.layer_norm(x, weight, bias, 1e-5), want, dtype, size)


# ----------------------------------------------------------------------------------------------------- rope


def angles(length: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    return angle.cos().float(), angle.sin().float()


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (i, i + half) turned as complex numbers, the rest as it was; and the size of the terms."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1), 2 * x.abs().amax() + 0 * x


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (8, 8), (10, 6), (64, 64), (80, 32), (17, 16), (128, 2)])
@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64])
def test_rope_in_a_packed_qkv(backend, device, head_dim, rotary_dim, int_dtype):
    cos, sin = angles(500, rotary_dim // 2)
    positions = torch.tensor([0, 499, 1, 7, 7, 130], dtype=int_dtype)
    for dtype in dtypes(backend):
        packed = draw((6, 9, head_dim), dtype, device)
        q, k, v = packed.split((5, 2, 2), dim=1)
        before = exact(packed)
        backend.rope(q, k, positions.to(device), cos.to(device), sin.to(device))
        for name, heads, at in (("q", q, slice(0, 5)), ("k", k, slice(5, 7))):
            want, size = rotated(before[:, at], positions.long(), cos, sin)
            check_rounded(name, heads, want, dtype, size)
            assert torch.equal(exact(heads[..., rotary_dim:]), before[:, at, rotary_dim:])
        assert torch.equal(exact(v), before[:, 7:])
        assert torch.equal(exact(packed[0]), before[0])  # position 0 turns nothing


def test_rope_of_a_part_of_heads_that_lie_anywhere(backend, device):
    """Heads before tokens, every second token, and heads cut out of wider ones."""
    cos, sin = angles(50, 3)
    positions = torch.tensor([4, 0, 49, 7])
    for dtype in dtypes(backend):
        q_home, k_home = draw((5, 4, 10), dtype, device), draw((8, 3, 17), dtype, device)
        q, k = q_home.transpose(0, 1), k_home[::2, ::2, 3:13]
        before, k_before = exact(q), exact(k)
        around = exact(k_home)
        backend.rope(q, k, positions.to(device), cos.to(device), sin.to(device))
        for name, heads, old in (("q", q, before), ("k", k, k_before)):
            want, size = rotated(old, positions, cos, sin)
            check_rounded(name, heads, want, dtype, size)
        around[::2, ::2, 3:9] = exact(k)[..., :6]
        assert torch.equal(exact(k_home), around)


def test_rope_of_q_alone(backend, device):
    """K may have no head at all."""
    cos, sin = angles(50, 8)
    positions = torch.tensor([4, 0, 49])
    for dtype in dtypes(backend):
        q, none = draw((3, 4, 24), dtype, device), torch.empty(3, 0, 24, dtype=dtype, device=device)
        want, size = rotated(exact(q), positions, cos, sin)
        backend.rope(q, none, positions.to(device), cos.to(device), sin.to(device))
        check_rounded("q", q, want, dtype, size)


def test_rope_of_no_rows(backend, device):
    cos, sin = (x.to(device) for x in angles(4, 4))
    rows = torch.zeros(0, 2, 8, device=device)
    backend.rope(rows, rows[:, :1], torch.zeros(0, dtype=torch.int64, device=device), cos, sin)
    assert rows.shape == (0, 2, 8)


# ---------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("shape", [(1, 2), (3, 6), (5, 14), (4, 258), (2, 2000), (0, 8), (70, 62)])
@pytest.mark.parametrize("size", [1.0, 40.0, 200.0])
def test_swiglu(backend, device, shape, size):
    for dtype in dtypes(backend):
        gate_up = draw(shape, dtype, device)
        gate_up[:, : shape[1] // 2] *= size
        gate, up = exact(gate_up).chunk(2, dim=-1)
        want = gate / (1 + torch.exp(-gate)) * up
        # exp(-gate) overflows in fp32 where the result is below 1e-35
        check_rounded("swiglu", backend.swiglu(gate_up), want, dtype, want.abs() + 1e-24)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_gelu(backend, device, shape, size):
    for dtype in dtypes(backend):
        x = draw(shape, dtype, device, size)
        wide = exact(x)
        erf = wide * 0.5 * torch.erfc(-wide / math.sqrt(2))
        check_rounded("gelu", backend.gelu(x, "none"), erf, dtype, wide.abs())
        tanh = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        check_rounded("gelu", backend.gelu(x, "tanh"), tanh, dtype, wide.abs())


FORMULAS = {
    "silu": lambda x, slope: x / (1 + torch.exp(-slope * x)),
    "gelu": lambda x, _: x * 0.5 * torch.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x, _: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x, _: x.clamp(min=0),
    "relu_squared": lambda x, _: x.clamp(min=0) ** 2,
    "sigmoid": lambda x, _: 1 / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize(
    ("shape", "function"), spread(2, [(1, 2), (3, 6), (4, 258), (2, 2000), (0, 8), (70, 62)], FORMULAS)
)
def test_activations(backend, device, shape, function):
    slopes = (1.0, 1.702) if function == "silu" else (1.0,)
    for dtype, slope in itertools.product(dtypes(backend), slopes):
        x = draw(shape, dtype, device, 10.0)
        before, f = exact(x), FORMULAS[function]
        plain = f(before, slope)
        room = before.abs() + before**2 + (function == "sigmoid")  # what may be formed on the way
        got = backend.activate(x, Activation(function, gated=False, slope=slope))
        check_rounded(function, got, plain, dtype, room + 1e-24)
        gate, up = before.chunk(2, dim=-1)
        for limit, offset in ((None, 0.0), (None, 1.0), (7.0, 1.0)):
            low, high = (-math.inf, math.inf) if limit is None else (-limit, limit)
            factor = up.clamp(low, high) + offset
            want = f(gate.clamp(max=high), slope) * factor
            size = (gate.abs() + gate**2 + 1) * (up.abs() + 1)
            got = backend.activate(x, Activation(function, slope=slope, limit=limit, offset=offset))
            check_rounded(f"{function} {limit} {offset}", got, want, dtype, size)
        assert torch.equal(exact(x), before)


@pytest.mark.parametrize("function", FORMULAS)
def test_activations_show_what_is_not_finite(backend, device, function):
    """A NaN among the gates, or the ups, stays one; so does one that is clamped."""
    x = torch.ones(2, 80, device=device)
    x[0, 3] = x[1, 50] = torch.nan
    for limit in (None, 7.0):
        got = backend.activate(x, Activation(function, limit=limit))
        assert got.isnan().nonzero().tolist() == [[0, 3], [1, 10]]


@checked_once
def test_activations_that_mean_nothing_are_refused(backend, device):
    for options, shown in (
        ({"function": "swish"}, "'swish'; it must be one of silu, gelu"),
        ({"function": "relu", "slope": 2.0}, "a slope of 2.0 is silu's"),
        ({"gated": False, "offset": 1.0}, "an offset of 1.0 is for gated"),
        ({"limit": 0.0}, "limit is 0.0; it must be positive"),
    ):
        with pytest.raises(BadValue, match=shown):
            Activation(**options)
    for shape in ((3, 7), (3, 2, 8)):
        with pytest.raises(BadShape, match=r"expected \[T, 2 I\]"):
            backend.activate(torch.ones(shape, device=device), Activation())


# ------------------------------------------------------------------------------------------ choices of experts


def chosen(logits: Tensor, choice: Choice) -> tuple[list[list[int]], list[list[float]]]:
    """The definition, row by row, in float64."""
    ids, shares = [], []
    for row in exact(logits):
        scores = row.softmax(-1) if choice.scores == "softmax" else row.sigmoid()
        preferred = scores if choice.bias is None else scores + exact(choice.bias)
        groups = list(preferred.view(choice.groups, -1))
        best = [float(group.sort(descending=True).values[: choice.group_best].sum()) for group in groups]
        kept = sorted(range(choice.groups), key=lambda g: (-best[g], g))[: choice.groups_chosen]
        size = len(row) // choice.groups
        allowed = [e for e in range(len(row)) if e // size in kept]
        own = sorted(allowed, key=lambda e: (-float(preferred[e]), e))[: choice.num_chosen]
        weights = scores[own] / (scores[own].sum() if choice.renormalised else 1) * choice.factor
        ids.append(own)
        shares.append((weights if choice.scales is None else weights * exact(choice.scales)[own]).tolist())
    return ids, shares


@pytest.mark.parametrize(
    ("sizes", "scores", "renormalised"),
    spread(
        2,
        [
            (1, 1, 1, 1, 2),
            (7, 3, 1, 1, 2),
            (64, 6, 8, 3, 2),
            (12, 2, 4, 2, 1),
            (40, 8, 40, 9, 2),
            (130, 8, 1, 1, 2),
            (64, 1, 4, 1, 3),
            (12, 3, 2, 1, 3),
            (40, 4, 8, 2, 9),
        ],
        ["softmax", "sigmoid"],
        [False, True],
    ),
)
def test_choices(backend, device, sizes, scores, renormalised):
    count, k, groups, groups_chosen, group_best = sizes
    gen = torch.Generator().manual_seed(count)
    logits = 2 * torch.randn(50, count, generator=gen).to(device)
    bias, scales = ((torch.randn(count, generator=gen) / 5 + mean).to(device) for mean in (0.0, 1.0))
    for added, scaled in itertools.product((None, bias), (None, scales)):
        choice = Choice(
            num_chosen=k, renormalised=renormalised, scores=scores, bias=added, groups=groups,
            groups_chosen=groups_chosen, group_best=group_best, factor=1.5, scales=scaled,
        )  # fmt: skip
        before = logits.clone()
        ids, shares = backend.choose(logits, choice)
        want_ids, want = chosen(logits, choice)
        assert torch.equal(logits, before)
        assert ids.tolist() == want_ids
        torch.testing.assert_close(exact(shares), torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=1e-5)


def test_of_equal_experts_and_groups_the_first_are_chosen(backend, device):
    choice = Choice(num_chosen=3, renormalised=True, scores="sigmoid", groups=4, groups_chosen=2)
    ids, shares = backend.choose(torch.zeros(2, 8, device=device), choice)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(shares, torch.full((2, 3), 1 / 3, device=device))


def test_a_group_with_an_expert_that_is_never_chosen_counts_less_than_others(backend, device):
    bias = torch.tensor([-torch.inf, 0.0, 0.0, 0.0], device=device)
    choice = Choice(num_chosen=1, renormalised=False, scores="sigmoid", bias=bias, groups=2)
    ids, shares = backend.choose(torch.tensor([[0.0, 5.0, 0.0, -1.0]], device=device), choice)
    assert (ids.tolist(), shares.tolist()) == ([[2]], [[0.5]])


def test_weights_of_a_choice_may_have_any_strides(backend, device):
    gen = torch.Generator().manual_seed(1)
    logits, weights = torch.randn(5, 12, generator=gen).to(device), torch.randn(2, 24, generator=gen).to(device)
    choice = Choice(num_chosen=3, renormalised=True, bias=weights[0, ::2], scales=weights[1, ::2])
    ids, shares = backend.choose(logits, choice)
    want_ids, want = chosen(logits, choice)
    assert ids.tolist() == want_ids
    torch.testing.assert_close(exact(shares), torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=1e-5)


@checked_once
def test_choices_that_cannot_be_made_are_refused(backend, device):
    for options, shown in (
        ({"num_chosen": 0}, "0 experts are to be chosen"),
        ({"groups": 4, "groups_chosen": 5}, "5 groups of experts of 4"),
        ({"group_best": 0}, "group_best is 0; it must be at least 1"),
        ({"scores": "tanh"}, "scores is 'tanh'; it must be 'softmax' or 'sigmoid'"),
    ):
        with pytest.raises(BadValue, match=shown):
            Choice(**{"num_chosen": 2, "renormalised": True} | options)
    for options, error, shown in (
        ({"bias": torch.zeros(1)}, BadShape, r"choice.bias has shape \(1,\); expected \(6,\)"),
        ({"scales": torch.zeros(6, 1)}, BadShape, r"choice.scales has shape \(6, 1\); expected \(6,\)"),
        ({"bias": torch.zeros(6).double()}, BadDtype, "choice.bias has dtype torch.float64; expected torch.float32"),
        ({"bias": torch.zeros(6, device="meta")}, BadValue, "choice.bias is on meta; expected"),
        ({"num_chosen": 7}, BadValue, r"7 experts of 6 are to be chosen; it must be 1\.\.6"),
        ({"groups": 4}, BadValue, "2 of 6 experts in 4 groups are to be chosen, out of 1 of these"),
        ({"groups": 6}, BadValue, "2 of 6 experts in 6 groups are to be chosen, out of 1 of these"),
    ):
        choice = Choice(**{"num_chosen": 2, "renormalised": True} | options)
        with pytest.raises(error, match=shown):
            backend.choose(torch.zeros(3, 6, device=device), choice)


# ------------------------------------------------------------------------------------------------- refusals


def good_calls() -> dict[str, dict[str, object]]:
    """By operator; x, residual, q and k stand for rows that a refused call must leave as they are."""
    x, weight = torch.ones(3, 8), torch.ones(8)
    turn = {"cos": torch.zeros(50, 4), "sin": torch.ones(50, 4)}
    return {
        "rms_norm": {"x": x, "weight": weight, "eps": 1e-6},
        "add_rms_norm": {"x": x, "residual": x.clone(), "weight": weight, "eps": 1e-6},
        "layer_norm": {"x": x, "weight": weight, "bias": weight, "eps": 1e-6},
        "rope": {"q": torch.ones(3, 4, 8), "k": torch.ones(3, 2, 8), "positions": torch.arange(1, 4), **turn},
        "swiglu": {"gate_up": x},
    }


REFUSED: list[tuple[str, str, Tensor, type[QuireError], tuple[str, ...]]] = [
    ("rms_norm", "weight", torch.ones(7), BadShape, ("weight", "(7,)", "(8,)")),
    ("rms_norm", "weight", torch.ones(1), BadShape, ("weight", "(1,)", "(8,)")),
    ("add_rms_norm", "residual", torch.ones(2, 8), BadShape, ("residual", "(2, 8)", "(3, 8)")),
    ("add_rms_norm", "residual", torch.ones(1, 8), BadShape, ("residual", "(1, 8)", "(3, 8)")),
    ("add_rms_norm", "residual", torch.ones(3, 8).half(), BadDtype, ("residual", "float16", "float32")),
    ("add_rms_norm", "weight", torch.ones(3, 8), BadShape, ("weight", "(3, 8)", "(8,)")),
    ("layer_norm", "weight", torch.ones(9), BadShape, ("weight", "(9,)", "(8,)")),
    ("layer_norm", "bias", torch.ones(1), BadShape, ("bias", "(1,)", "(8,)")),
    ("rope", "q", torch.ones(3, 32), BadShape, ("q", "(3, 32)", "[T, Hq, D]")),
    ("rope", "k", torch.ones(4, 2, 8), BadShape, ("k", "(4, 2, 8)", "[T, Hkv, D]")),
    ("rope", "k", torch.ones(3, 2, 10), BadShape, ("k", "(3, 2, 10)")),
    ("rope", "positions", torch.arange(4), BadShape, ("positions", "(4,)", "(3,)")),
    ("rope", "positions", torch.arange(3)[None], BadShape, ("positions", "(1, 3)", "(3,)")),
    ("rope", "cos", torch.ones(50), BadShape, ("cos", "(50,)", "[P, D_rot / 2]")),
    ("rope", "sin", torch.ones(50, 3), BadShape, ("sin", "(50, 3)", "(50, 4)")),
    ("rope", "cos", torch.ones(40, 4), BadShape, ("cos", "(40, 4)", "(50, 4)")),
    ("swiglu", "gate_up", torch.ones(3, 7), BadShape, ("gate_up", "(3, 7)", "even")),
]


@checked_once
@pytest.mark.parametrize(("operator", "name", "value", "error", "fragments"), REFUSED)
def test_small_operators_refuse(backend, device, operator, name, value, error, fragments):
    def call(arguments: dict[str, object]) -> dict[str, object]:
        return {key: x.to(device) if isinstance(x, Tensor) else x for key, x in arguments.items()}

    getattr(backend, operator)(**call(good_calls()[operator]))
    arguments = call({**good_calls()[operator], name: value})
    before = {key: x.clone() for key, x in arguments.items() if isinstance(x, Tensor)}
    with pytest.raises(error) as raised:
        getattr(backend, operator)(**arguments)
    assert all(fragment in str(raised.value) for fragment in fragments), raised.value
    assert all(torch.equal(arguments[key], x) for key, x in before.items()), "a refused call wrote"


@checked_once
def test_rope_refuses_to_turn_more_than_head_dim(backend, device):
    cos, sin = (x.to(device) for x in angles(50, 5))
    rows = torch.ones(3, 2, 8, device=device)
    with pytest.raises(BadShape, match=r"\(50, 5\).*at most 8"):
        backend.rope(rows, rows.clone(), torch.arange(3, device=device), cos, sin)


@checked_once
def test_rows_to_add_are_two_dimensional_and_heads_of_one_dtype(backend, device):
    x = torch.ones(2, 3, 8, device=device)
    with pytest.raises(BadShape, match=r"x has shape \(2, 3, 8\)"):
        backend.add_rms_norm(x, x.clone(), torch.ones(8, device=device), 1e-6)
    cos, sin = (t.to(device) for t in angles(50, 4))
    rows = torch.ones(3, 2, 8, device=device)
    with pytest.raises(BadDtype, match=r"k has dtype torch\.bfloat16 and q torch\.float32"):
        backend.rope(rows, rows.bfloat16(), torch.arange(3, device=device), cos, sin)


def test_rope_never_reads_beyond_its_tables(backend, device):
    """On the host that is an error. A GPU cannot raise one: what it does with such a row is its own affair."""
    cos, sin = (t.to(device) for t in angles(50, 4))
    rows = torch.ones(3, 2, 8, device=device)
    positions = torch.tensor([0, 50, 1], device=device)
    if device == "cpu":
        with pytest.raises((BadValue, IndexError)):
            backend.rope(rows, rows.clone(), positions, cos, sin)
        return
    backend.rope(rows, rows.clone(), positions, cos, sin)
    want, size = rotated(torch.ones(3, 2, 8, dtype=torch.float64), torch.tensor([0, 0, 1]), cos.cpu(), sin.cpu())
    check_rounded("rows", rows[::2], want[::2], torch.float32, size[::2])
