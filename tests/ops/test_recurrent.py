"""Layers that keep a state: each operator against the plain recurrence in float64, whatever the steps it is cut into.

Inputs are rounded to the dtype first. What the records hold beyond what a sequence owns is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadDtype, BadShape, BadStride, BadValue, QuireError, Unsupported
from quire.ops.recurrent.plan import num_pieces
from quire.ops.recurrent.records import PIECE, RecurrentCache, RecurrentSpec
from tests.marks import quick
from tests.ops.conftest import checked_once
from tests.ops.recurrent import Layer, Run, Sizes, bits, exact_convolution, exact_recurrence, make_plan

LENGTHS = (0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 150)
SIZES = (
    Sizes(),
    Sizes(heads=6, k_heads=2, dim_k=24, dim_v=40, taps=3),
    Sizes(heads=3, k_heads=1, dim_k=7, dim_v=5, taps=2),
    Sizes(heads=2, k_heads=2, dim_k=128, dim_v=128),
    Sizes(heads=4, k_heads=1, dim_k=33, dim_v=70, taps=1),
)
RULES = ("delta", "ssd", "kda", "selective", "lru")
# Chunks of three sequences of 75, 33 and 100 tokens.
CUTTINGS = [
    {0: [10, 30, 0, 35], 1: [32, 1], 2: [31, 1, 1, 60, 7]},
    {0: [1] * 75, 1: [1] * 33, 2: [50, *[1] * 50]},
    {2: [64, 32, 4], 0: [75], 1: [1, 32]},
]


def is_interpreted(backend: ops.Backend) -> bool:
    """Whether it is Triton's interpreter that computes, which takes a thousand times as long."""
    return backend.name == "triton" and not torch.cuda.is_available()


def dtypes(backend: ops.Backend, turn: int | None = None) -> list[torch.dtype]:
    """All that the backend serves; where it is slow one of them in turn, where there are turns."""
    served = sorted(backend.limits.kv_dtypes, key=str)
    is_fast = backend.name == "cpu" or (backend.name == "triton" and not is_interpreted(backend))
    return served if turn is None or is_fast else [served[turn % len(served)]]


def check(got: Tensor, want: Tensor, sums: float) -> None:
    """One rounding to the dtype, and what `sums` of the largest number of the row may be lost in sums of fp32."""
    eps = torch.finfo(got.dtype).eps
    wide = 1e-9 if got.dtype == torch.float64 else sums
    bound = 0.51 * eps * want.abs() + wide * want.abs().amax(-1, keepdim=True) + 1e-7
    error = (got.to("cpu", torch.float64) - want).abs()
    assert torch.isfinite(got).all()
    assert (error <= bound).all(), f"off by {(error / bound).max():.2f} bounds, {error.max():.2e}"


def play(
    run: Run, parts: dict[int, tuple[Tensor, Tensor]], cuts: dict[int, list[int]]
) -> dict[int, tuple[Tensor, ...]]:
    """Give each sequence its inputs in steps of these numbers of tokens. What came out for all of its tokens."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {name: [] for name in parts}
    edges = {name: [0, *torch.tensor(cut).cumsum(0).tolist()] for name, cut in cuts.items()}
    for i in range(max(map(len, cuts.values()))):
        step = []
        for name, (x, gates) in parts.items():
            if i < len(cuts[name]):
                rows = slice(*list(pairwise(edges[name]))[i])
                step.append((name, x[rows], gates[rows]))
        for (name, *_), result in zip(step, run.step(step), strict=True):
            found[name].append(result)
    return {name: tuple(map(torch.cat, zip(*results, strict=True))) for name, results in found.items()}


def check_same(backend: ops.Backend, got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    """The same bits, of a backend that promises them."""
    for a, b in zip(got, want, strict=True):
        if backend.limits.reproducible:
            assert torch.equal(bits(a), bits(b))
        else:
            bound = (1e-5 + 8 * torch.finfo(a.dtype).eps) * b.abs().amax(-1, keepdim=True)
            assert ((a - b).abs() <= bound).all()


# ----------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_the_plain_recurrence(backend, device, sizes, rule):
    lengths = LENGTHS if not is_interpreted(backend) else (0, 1, PIECE, 2 * PIECE + 3)
    for dtype in dtypes(backend, SIZES.index(sizes) + RULES.index(rule)):
        layer = Layer(Sizes(**{**vars(sizes), "dtype": dtype}), rule, seed=sizes.dim_v, device=device)
        parts = {n: layer.inputs(length, seed=n) for n, length in enumerate(lengths)}
        results = play(Run(layer, backend), parts, {n: [length] for n, length in enumerate(lengths)})
        for name, (x, gates) in parts.items():
            convolved, out = results[name]
            assert out.shape == (len(x), sizes.heads * sizes.dim_v)
            if len(x):
                check(convolved, exact_convolution(layer, x), 4e-6)
                check(out, exact_recurrence(layer, convolved, gates), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("keep_all", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", quick(SIZES[:3], 1, 1), ids=str)
def test_the_same_in_any_steps(backend, device, sizes, rule, keep_all):
    """Whole prompts, chunks that begin and end anywhere, single tokens, several sequences in a step or one."""
    lengths, cuttings = (75, 33, 100), CUTTINGS
    if is_interpreted(backend):
        lengths, cuttings = (40, 33), [{0: [10, 0, 21, 2, 1, 6], 1: [31, 1, 1]}]
    for dtype in dtypes(backend, SIZES.index(sizes) + keep_all):
        layer = Layer(Sizes(**{**vars(sizes), "dtype": dtype}), rule, seed=3, device=device)
        parts = {n: layer.inputs(length, seed=n) for n, length in enumerate(lengths)}
        whole = play(Run(layer, backend), parts, {n: [length] for n, length in enumerate(lengths)})
        for cuts in cuttings:
            cut = play(Run(layer, backend, keep_all), parts, cuts)
            for name in parts:
                check_same(backend, whole[name], cut[name])


def test_rows_that_were_guessed_wrong_are_written_again(backend, device):
    layer = Layer(SIZES[0], "delta", seed=1, device=device)
    x, gates = layer.inputs(50, seed=2)
    guessed, _ = layer.inputs(8, seed=9)
    want = play(Run(layer, backend), {0: (x, gates)}, {0: [50]})[0]
    run = Run(layer, backend)
    run.step([(0, x[:20], gates[:20])])
    before = run.held[0]
    run.step([(0, guessed, gates[:8])])
    assert run.held[0].rows == before.rows
    run.held[0] = before
    got = run.step([(0, x[20:], gates[20:])])[0]
    check_same(backend, got, [y[20:] for y in want])


@pytest.mark.triton(cases=0)
def test_a_state_is_read_by_several(backend, device):
    """As those are that go on from one prefix."""
    layer = Layer(SIZES[1], "delta", seed=1, device=device)
    x, gates = layer.inputs(PIECE, seed=2)
    run = Run(layer, backend)
    run.step([(0, x, gates)])
    count = 9 if is_interpreted(backend) else 40
    tails = {n: layer.inputs(count, seed=n) for n in (1, 2)}
    run.held |= dict.fromkeys(tails, run.held[0])
    state = run.cache.state[run.held[0].state].clone()
    plan, _ = run._plan([(n, count) for n in tails])
    both = [torch.cat([tail[i] for tail in tails.values()]) for i in (0, 1)]
    convolved = layer.convolve(backend, both[0], run.cache, plan)
    out = layer.recur(backend, convolved, both[1], run.cache, plan)
    assert torch.equal(run.cache.state[run.held[0].state], state)
    for i, n in enumerate(tails):
        whole = tuple(torch.cat(p) for p in zip((x, gates), tails[n], strict=True))
        alone = play(Run(layer, backend), {0: whole}, {0: [PIECE + count]})
        check_same(backend, [out[count * i : count * i + count]], [alone[0][1][PIECE:]])


@pytest.mark.triton(cases=0)
@pytest.mark.slow
def test_strong_and_weak_decay_and_large_numbers(backend, device):
    count = PIECE + 3 if is_interpreted(backend) else 100
    for turn, (rate, size) in enumerate(((-30.0, 1.0), (-1e-6, 1.0), (0.0, 1.0), (-0.5, 20.0))):
        for rule in [RULES[turn % len(RULES)]] if is_interpreted(backend) else RULES:
            layer = Layer(SIZES[1], rule, seed=5, device=device)
            layer.decay_rate.fill_(rate)
            x, gates = layer.inputs(count, seed=6)
            x, gates = x * size, gates * size
            convolved, out = play(Run(layer, backend), {0: (x, gates)}, {0: [count]})[0]
            check(out, exact_recurrence(layer, convolved, gates), 2e-5)


def test_what_is_not_finite_is_reported_and_reaches_later_rows_alone(backend, device):
    for rule in ("delta", "selective") if is_interpreted(backend) else RULES:
        layer = Layer(SIZES[0], rule, seed=5, device=device)
        x, gates = layer.inputs(70, seed=6)
        plain = play(Run(layer, backend), {0: (x, gates)}, {0: [70]})[0]
        broken = x.clone()
        broken[40] = torch.nan
        run = Run(layer, backend)
        other = layer.inputs(5, seed=7)
        out = run.step([(0, broken, gates), (1, *other)])[0][1]
        check_same(backend, [out[:40]], [plain[1][:40]])
        assert not out[40:].isfinite().any(-1).any()
        taps = layer.sizes.taps
        assert run.nonfinite[:40] == [0] * 40
        assert run.nonfinite[40 : 40 + taps] == [1] * taps
        assert run.nonfinite[70:] == [0] * 5


def test_convolutions_alone(backend, device):
    """Layers without a state, and without an activation or a bias."""
    for dtype in dtypes(backend):
        spec = RecurrentSpec(
            num_heads=0, num_k_heads=0, dim_k=0, dim_v=0, width=21, taps=3, num_states=4, num_rows=4, dtype=dtype,
            device=device,
        )  # fmt: skip
        cache = RecurrentCache.allocate(spec)
        gen = torch.Generator().manual_seed(1)
        x = torch.randn(50, 21, generator=gen, dtype=torch.float64).to(dtype).to(device)
        weight = torch.randn(21, 3, generator=gen, dtype=torch.float64).to(spec.state_dtype).to(device)
        out, tables = [], (([[-1, 0]], [[1, 2]]), ([[0, -1]], [[2, -1]]))
        for (begin, end), (states, rows) in zip(((0, 40), (40, 50)), tables, strict=True):
            plan = make_plan(backend, spec, [0, end - begin], [end], states, rows)
            out.append(backend.convolve(x[begin:end], weight, None, None, cache, plan))
        known = torch.cat([torch.zeros(2, 21, dtype=torch.float64), x.double().cpu()])
        check(torch.cat(out), (known.unfold(0, 3, 1) * weight.double().cpu()).sum(-1), 4e-6)


@pytest.mark.parametrize("first", ["norm", "gate"])
@pytest.mark.parametrize(("heads", "size"), [(1, 64), (3, 21), (16, 128)])
def test_gated_norm(backend, device, heads, size, first):
    for dtype in dtypes(backend):
        gen = torch.Generator().manual_seed(size)
        wide = heads * size
        x, gate, weight = (
            torch.randn(5, wide + 2, generator=gen, dtype=torch.float64).to(dtype).to(device)[:, 1:-1] for _ in range(3)
        )
        got = backend.gated_norm(x, gate, weight[0], 1e-5, heads, first)
        a, b, w = (y.double().cpu() for y in (x, gate, weight[0]))
        factor = b * b.sigmoid()
        a = a * factor if first == "gate" else a
        parts = a.view(5, heads, size)
        normed = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * w
        check(got, normed * factor if first == "norm" else normed, 2e-6)


def test_gate(backend, device):
    for dtype in dtypes(backend):
        gen = torch.Generator().manual_seed(1)
        both = (20 * torch.randn(7, 66, generator=gen, dtype=torch.float64)).to(dtype).to(device)
        x, gate = both[:, :33], both[:, 33:]
        want = x.double().cpu() * gate.double().cpu().sigmoid()
        backend.gate(x, gate)
        check(x, want, 2e-6)
        want = x.double().cpu() * gate[:, :1].double().cpu().sigmoid()
        backend.gate(x, gate[:, :1])  # one for all of a row
        check(x, want, 2e-6)


# ------------------------------------------------------------------------------------------------ bad input

STEP = {"starts": [0, 3, 10], "lens": [40, 7], "states": [[1, -1], [-1, -1]], "rows": [[2, -1], [3, -1]]}


@checked_once
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"starts": [0, 3]}, BadShape, r"query_starts has 2 entries and context_lens 2"),
        ({"starts": [0, 4, 3]}, BadValue, r"query_starts falls from 4 to 3 at sequence 1"),
        ({"lens": [40, 6]}, BadValue, r"context_lens\[1\] is 6, and sequence 1 has 7 rows in this step"),
        (
            {"states": [[-1, -1], [-1, -1]]},
            BadValue,
            r"state_tables\[0, 0\] is -1, for piece 1 of sequence 0, .* needs",
        ),
        ({"rows": [[-1, -1], [3, -1]]}, BadValue, r"row_tables\[0, 0\] is -1, for piece 1 of sequence 0, .* needs it"),
        ({"rows": [[2, -1], [-1, -1]]}, BadValue, r"row_tables\[1, 0\] is -1, for piece 0 of sequence 1, .* needs it"),
        ({"rows": [[2, -1], [64, -1]]}, BadValue, r"row_tables\[1, 0\] is 64.* a record in 0..63"),
        ({"rows": [[2, -1], [-2, -1]]}, BadValue, r"row_tables\[1, 0\] is -2"),
        ({"rows": [[2, -1], [2, -1]]}, BadValue, r"row_tables\[0, 0\] and row_tables\[1, 0\] are both 2"),
        ({"rows": [[2], [3]]}, BadShape, r"row_tables has shape \(2, 1\); expected \(2, P\)"),
        ({"lens": [66, 7], "starts": [0, 36, 43]}, BadValue, r"tokens 30..65 .* takes 3 entries .* which have 2"),
        (
            {"lens": [64, 40], "starts": [0, 3, 13], "states": [[1, 5], [-1, 5]], "rows": [[2, -1], [3, 4]]},
            BadValue,
            r"state_tables\[0, 1\] and state_tables\[1, 1\] are both 5",
        ),
        (
            {"lens": [64, 40], "starts": [0, 3, 13], "states": [[1, 5], [-1, 1]], "rows": [[2, -1], [3, 4]]},
            BadValue,
            r"state_tables\[0, 0\] is 1, which the step reads, and writes for another piece",
        ),
    ],
)
def test_a_step_that_cannot_be(backend, device, changed, error, message):
    spec = Sizes().spec(device)
    make_plan(backend, spec, *STEP.values())
    with pytest.raises(error, match=message):
        make_plan(backend, spec, *(STEP | changed).values())


@checked_once
def test_a_plan_keeps_what_it_held(backend, device):
    plan = backend.make_recurrent_plan(Sizes().spec(device), 16, 2, 2)
    tensors = [torch.tensor(x, dtype=torch.int32) for x in STEP.values()]
    plan.update(*tensors)
    with pytest.raises(BadShape, match="the step has 17 query tokens; the plan was made for at most 16"):
        plan.update(torch.tensor([0, 3, 17], dtype=torch.int32), *tensors[1:])
    assert (plan.num_tokens, plan.num_seqs) == (10, 2)
    assert plan.query_starts.tolist() == [0, 3, 10]


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("num_heads", 3, BadValue, "spec.num_heads is 3, no multiple of spec.num_k_heads, 2"),
        ("dim_k", 0, BadValue, "spec.dim_k is 0 with num_heads=2"),
        ("num_heads", 0, BadValue, "with num_heads=0; without a state it must be 0"),
        ("taps", 34, BadValue, r"spec.taps is 34; it must be in 1..33"),
        ("dim_v", 1025, BadValue, r"spec.dim_v is 1025"),
        ("dtype", torch.int8, BadDtype, "spec.dtype is torch.int8"),
        ("device", "gpu", BadValue, "spec.device is 'gpu'"),
    ],
)
def test_a_spec_that_cannot_be(backend, field, value, error, message):
    with pytest.raises(error, match=message):
        RecurrentSpec(**{**vars(Sizes().spec()), field: value})


@checked_once
def test_arguments_that_do_not_fit(backend, device):
    layer = Layer(Sizes(), "delta", seed=1, device=device)
    spec = layer.sizes.spec(device)
    plan, cache = make_plan(backend, spec, *STEP.values()), RecurrentCache.allocate(spec)
    x, gates = layer.inputs(10, seed=1)
    delta = [x, gates, layer.decay_rate, layer.dt_bias, cache, plan]
    space = [x, gates[:, :2], layer.decay_rate, layer.skip, layer.dt_bias, layer.dt_limits, cache, plan]
    convolution = [x, layer.weight, layer.bias, "silu", cache, plan]
    narrow = RecurrentCache(**(cache.tensors() | {"keys": cache.keys[..., :15]}))
    apart = RecurrentCache(**(cache.tensors() | {"state": torch.zeros(64, 2, 16, 17, device=device)[..., :16]}))
    cases = [
        (backend.gated_delta, delta, 0, x[:9], BadShape, r"qkv has shape \(9, 96\); expected \(10, 96\)"),
        (backend.gated_delta, delta, 1, gates.double(), BadDtype, "gates has dtype torch.float64"),
        (backend.gated_delta, delta, 2, layer.decay_rate[:1], BadShape, "decay_rate has shape"),
        (backend.gated_delta, delta, 4, narrow, BadShape, r"cache.keys has shape \(64, 2, 32, 15\)"),
        (backend.gated_delta, delta, 4, apart, BadStride, "cache.state has strides .* each record must be contiguous"),
        (backend.state_space, space, 5, (2.0, 1.0), BadValue, r"dt_limits\[1\] is 1.0"),
        (backend.state_space, space, 1, gates, BadShape, "dt has shape"),
        (backend.convolve, convolution, 1, layer.weight[:, :3], BadShape, "weight has shape"),
        (backend.convolve, convolution, 3, "relu", BadValue, "activation is 'relu'; it must be 'silu' or None"),
        (backend.convolve, convolution, 5, None, BadValue, "plan is a NoneType"),
    ]  # fmt: skip
    for operator, arguments, at, value, error, message in cases:
        wrong = [*arguments]
        wrong[at] = value
        with pytest.raises(error, match=message):
            operator(*wrong)
    with pytest.raises(QuireError, match="first is 'both'; it must be 'norm' or 'gate'"):
        backend.gated_norm(x, x, layer.weight.flatten()[: x.shape[1]], 1e-5, 1, "both")
    with pytest.raises(QuireError, match="heads"):
        backend.gated_norm(x, x, layer.bias, 1e-5, 5, "norm")
    with pytest.raises(BadStride, match="x shares memory with gate"):
        backend.gate(x[:, 1:], x[:, :-1])


def test_dtypes_that_a_backend_does_not_serve_are_refused(backend, device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        spec = Sizes(dtype=dtype).spec(device)
        if dtype in backend.limits.kv_dtypes:
            assert backend.make_recurrent_plan(spec, 1, 1, 1).num_tokens == 0
        else:
            with pytest.raises(Unsupported, match=f"does not serve dtype {dtype}"):
                backend.make_recurrent_plan(spec, 1, 1, 1)


def test_pieces_of_a_step():
    assert [num_pieces(*span) for span in ((0, 1), (0, 32), (31, 33), (40, 40), (5, 100))] == [1, 2, 2, 1, 4]
