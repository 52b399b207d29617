"""The operators in compiled graphs: what torch is told of them is true, and a graph gives what eager calls give."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from quire import ops
from quire.errors import BadDtype, BadShape, BadValue, QuireError, Unsupported
from quire.ops import registered
from tests.marks import of_long_runs
from tests.ops.cases import Case, Step, half_dtype
from tests.ops.conftest import DEVICES, NAMES, choose

pytestmark = pytest.mark.slow

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 16, 4, 12
HIDDEN, INNER, POSITIONS = 48, 40, 40
TABLES = torch.tensor([[0, 2, 4, 9], [11, 3, 5, 7]])

# (query_lens, context_lens): a prefill, one of as many tokens, decode twice, a chunk beside a decode
STEPS = [((3, 2), (3, 2)), ((1, 4), (4, 6)), ((1, 1), (5, 7)), ((1, 1), (6, 8)), ((4, 1), (10, 9))]


# Torch is told the same of all backends, so one of them shows it: the one that a model here would take.
USUAL = next(name for name in ops.BACKENDS if ops.unavailable(name, DEVICES[-1]) is None)


@pytest.fixture(params=[name if name == USUAL else of_long_runs(name) for name in NAMES])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Backend:
    return choose(request, monkeypatch)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Inductor's code is scalar: it would compile a program for each instruction set to see whether that works."""
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        yield


def spec_of(device: str, kv_dtype: torch.dtype = torch.float32) -> ops.AttentionSpec:
    return ops.AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        block_size=BLOCK,
        num_blocks=BLOCKS,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=device,
    )


def update(plan: ops.AttentionPlan, query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> Tensor:
    """The plan updated to a step, and the rows' positions."""
    position = torch.cat([torch.arange(n - rows, n) for rows, n in zip(query_lens, context_lens, strict=True)])
    sequence = torch.repeat_interleave(torch.arange(2), torch.tensor(query_lens))
    slots = TABLES[sequence, position // BLOCK] * BLOCK + position % BLOCK
    starts = torch.tensor([0, query_lens[0], sum(query_lens)])
    plan.update(starts, torch.tensor(context_lens), TABLES, slots)
    return position


def new_cache(device: str, kv_dtype: torch.dtype = torch.float32) -> ops.PagedKV:
    """A block's K and V side by side, as the engine keeps them: two views of one memory. Scales lie in another."""
    memory = torch.zeros(BLOCKS, 2, KV_HEADS, BLOCK, DIM, device=device, dtype=kv_dtype)
    if kv_dtype != torch.int8:
        return ops.PagedKV(memory[:, 0], memory[:, 1])
    scales = torch.zeros(BLOCKS, 2, KV_HEADS, BLOCK, device=device)
    return ops.PagedKV(memory[:, 0], memory[:, 1], scales[:, 0], scales[:, 1])


def new_layer(backend: ops.Backend, device: str) -> Callable[..., tuple[Tensor, ...]]:
    """A decoder layer with every operator that changes something in place."""
    gen = torch.Generator().manual_seed(3)
    qkv_w, o_w, up_w, down_w = (
        (torch.randn(rows, columns, generator=gen) / columns**0.5).to(device)
        for rows, columns in (
            ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            (HIDDEN, HEADS * DIM),
            (2 * INNER, HIDDEN),
            (HIDDEN, INNER),
        )
    )
    weight = torch.rand(HIDDEN, generator=gen).to(device)
    angle = torch.arange(POSITIONS)[:, None] * torch.rand(DIM // 2, generator=gen)
    cos, sin = angle.cos().to(device), angle.sin().to(device)

    def layer(x: Tensor, positions: Tensor, out: Tensor, kv: ops.PagedKV, plan: ops.AttentionPlan):
        qkv = backend.rms_norm(x, weight, 1e-6) @ qkv_w.T
        q, k, v = qkv.view(-1, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
        backend.rope(q, k, positions, cos, sin)
        backend.write_kv(k, v, kv, plan)
        attended, lse = backend.attention(q, kv, plan, scale=0.3, out=out, return_lse=True)
        y = backend.add_rms_norm(attended.flatten(1) @ o_w.T, x, weight, 1e-6)
        return backend.swiglu(y @ up_w.T) @ down_w.T, qkv, lse

    return layer


def check_layer(
    backend: ops.Backend, device: str, compiler: str, kv_dtype: torch.dtype = torch.float32, **options
) -> int:
    """Steps of a compiled layer against the same in eager mode: outputs and all that is changed. Returns graphs."""
    layer, counter = new_layer(backend, device), CompileCounterWithBackend(compiler)
    compiled = torch.compile(layer, fullgraph=True, backend=counter, **options)
    plan = backend.make_plan(spec_of(device, kv_dtype), 8, 2, 4)
    caches = [new_cache(device, kv_dtype) for _ in range(2)]
    gen = torch.Generator().manual_seed(4)
    for query_lens, context_lens in STEPS:
        positions = update(plan, query_lens, context_lens).to(device)
        x = torch.randn(sum(query_lens), HIDDEN, generator=gen).to(device)
        found = []
        for run, kv in zip((layer, compiled), caches, strict=True):
            residual, out = x.clone(), torch.full((len(x), HEADS, DIM), torch.nan, device=device)
            found.append((*run(residual, positions, out, kv, plan), residual, out, *kv.tensors().values()))
        assert not torch.equal(found[0][3], x)
        torch.testing.assert_close(*found)
    return counter.frame_count


@pytest.mark.long  # the next test compares the same
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_a_compiled_layer_equals_an_eager_one(backend, device, kv_dtype):
    assert check_layer(backend, device, "aot_eager", kv_dtype, dynamic=True) == 1


@pytest.mark.parametrize(
    ("dynamic", "graphs"),
    [(True, 1), of_long_runs(None, 2)],  # None: the second size makes the first one dynamic
)
def test_a_layer_through_inductor_equals_an_eager_one(dynamic, graphs):
    assert check_layer(ops.load("auto"), "cpu", "inductor", torch.int8, dynamic=dynamic) == graphs


@pytest.mark.parametrize("rows", [1, of_long_runs(3)])
def test_inductor_rotates_clones_of_slices(rows):
    """Where an operator itself writes to such a clone of one row, Inductor (2.13) hands it the wrong memory."""
    backend, device = ops.load("auto"), "cpu"
    angle = torch.rand(POSITIONS, DIM // 2, device=device)
    positions = torch.arange(rows, device=device) + 5

    def rotate(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ((x @ weight).view(-1, 2, DIM)[:, i : i + 1].clone() for i in range(2))
        backend.rope(q, k, positions, angle.cos(), angle.sin())
        return q, k

    x, weight = torch.randn(rows, 8, device=device), torch.randn(8, 2 * DIM, device=device)
    torch.testing.assert_close(torch.compile(rotate, fullgraph=True)(x, weight), rotate(x, weight))


def test_inductor_writes_to_views_whose_offset_is_dynamic():
    backend, device = ops.load("auto"), "cpu"
    plan = backend.make_plan(spec_of(device), 8, 2, 4)
    update(plan, (3, 2), (3, 2))

    def step(memory: Tensor, rows: Tensor) -> Tensor:
        kv = ops.PagedKV(memory[:, 0], memory[:, 1])
        backend.write_kv(rows[:, :KV_HEADS], rows[:, KV_HEADS:], kv, plan)
        return backend.attention(rows, kv, plan)

    rows = torch.randn(5, HEADS, DIM, device=device)
    eager, graph = (torch.zeros(BLOCKS, 2, KV_HEADS, BLOCK, DIM, device=device) for _ in range(2))
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(graph, rows), step(eager, rows))
    torch.testing.assert_close(graph, eager)


def test_neither_an_update_nor_another_plan_recompiles(backend, device):
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(backend.attention, fullgraph=True, backend=counter)
    kv, q = new_cache(device), torch.randn(5, HEADS, DIM, device=device)
    kv.k.normal_()
    kv.v.normal_()
    plans = [backend.make_plan(spec_of(device), 8, 2, 4) for _ in range(2)]
    for query_lens, context_lens in (((3, 2), (3, 2)), ((1, 4), (9, 11)), ((4, 1), (16, 1))):
        for plan in plans:
            update(plan, query_lens, context_lens)
            torch.testing.assert_close(compiled(q, kv, plan), backend.attention(q, kv, plan))
    assert counter.frame_count == 1


# ------------------------------------------------------------------------------------ every operator by itself


def calls(backend: ops.Backend, device: str, dtype: torch.dtype) -> dict[str, tuple[object, ...]]:
    """For each operator its arguments; rows are slices of wider ones, so that their strides are not the usual."""
    gen = torch.Generator().manual_seed(5)

    def rows(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        wider = torch.randn(*shape[:-1], shape[-1] + 3, generator=gen).to(dtype).to(device)
        return wider[..., 1:-2]

    wide = torch.promote_types(dtype, torch.float32)
    weight = torch.rand(12, generator=gen).to(device)
    angle = torch.rand(9, 6, generator=gen).to(device)
    kv = ops.PagedKV(rows(6, 2, 4, 12), rows(6, 2, 4, 8))
    return {
        "copy_blocks": (kv, [5, 0], [3, 1]),
        "merge_states": (rows(3, 2, 12), rows(3, 2, dtype=wide), rows(3, 2, 12), rows(3, 2, dtype=wide)),
        "apply_sinks": (rows(3, 2, 12), rows(3, 2, dtype=wide), weight[:2]),
        "rms_norm": (rows(3, 2, 12), weight, 1e-6),
        "add_rms_norm": (rows(3, 12), rows(3, 12), weight, 1e-6),
        "layer_norm": (rows(3, 12), weight, None, 1e-6),
        "rope": (rows(3, 4, 12), rows(3, 2, 12), torch.tensor([4, 0, 8], device=device), angle.cos(), angle.sin()),
        "swiglu": (rows(3, 12),),
        "gelu": (rows(2, 3, 12), "tanh"),
        "logsumexp": (rows(3, 12, dtype=torch.float32),),
        "top_k": (rows(3, 12, dtype=torch.float32), 5),
        "top_k_softmax": (rows(3, 12, dtype=torch.float32), 5),
    }


def copied(arguments: tuple[object, ...]) -> list[object]:
    """The arguments again, with the same strides."""

    def copy(x: object) -> object:
        if isinstance(x, ops.PagedKV):
            return ops.PagedKV(copy(x.k), copy(x.v))
        if isinstance(x, Tensor) and x.dim():
            memory = torch.zeros(x.storage_offset() + x.numel() * 2, dtype=x.dtype, device=x.device)
            return memory.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
        return x

    return [copy(x) for x in arguments]


def tensors(arguments: list[object]) -> list[Tensor]:
    return [x for x in flat(arguments) if isinstance(x, Tensor)]


def flat(arguments: Iterable[object]) -> list[object]:
    """The arguments as the registered operators take them."""
    return [y for x in arguments for y in ((x.k, x.v) if isinstance(x, ops.PagedKV) else (x,))]


def test_every_operator_of_a_backend_is_registered(backend):
    plain = calls(backend, "cpu", torch.float32).keys()
    assert {"attention", "attention_out", "write_kv", *plain} == registered.SCHEMAS.keys()
    for name in ("attention", "write_kv", *plain):
        assert hasattr(torch.ops.quire, name)


@pytest.mark.parametrize("half", [False, of_long_runs(True)])
def test_each_operator_in_a_graph(backend, device, half):
    for name, arguments in calls(backend, device, half_dtype(backend) if half else torch.float32).items():
        torch._dynamo.reset()
        function = getattr(backend, name)
        compiled = torch.compile(lambda *x, f=function: f(*x), fullgraph=True, backend="aot_eager")
        eager, graph = copied(arguments), copied(arguments)
        expected, got = function(*eager), compiled(*graph)
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")
        for before, after in zip(tensors(eager), tensors(graph), strict=True):
            torch.testing.assert_close(after, before, msg=lambda text, name=name: f"an argument of {name}: {text}")


def test_operators_run_while_another_thread_compiles(backend, device, monkeypatch):
    """Torch says of the whole process that something is being traced: a call goes through the registered operator."""
    given = calls(backend, device, torch.float32)
    expected = {name: getattr(backend, name)(*copied(arguments)) for name, arguments in given.items()}
    step = Step(Case(query_lens=(3, 1), context_lens=(5, 2)), device)
    plan = step.write(backend)
    attended = backend.attention(step.q, step.kv, plan, return_lse=True)
    monkeypatch.setattr("quire.ops.in_graph.is_compiling", lambda: True)
    for name, arguments in given.items():
        found = getattr(backend, name)(*copied(arguments))
        torch.testing.assert_close(found, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    backend.write_kv(step.k_new, step.v_new, step.kv, plan)
    torch.testing.assert_close(backend.attention(step.q, step.kv, plan, return_lse=True), attended)


@pytest.mark.parametrize("half", [False, of_long_runs(True)])
def test_torch_agrees_with_what_it_is_told(backend, device, half):
    for name, arguments in calls(backend, device, half_dtype(backend) if half else torch.float32).items():
        opcheck(getattr(torch.ops.quire, name).default, (backend.name, *flat(arguments)))


ATTENTION = {
    "plain": {},
    "window": {"window": 5, "softcap": 3.0},
    "lse": {"return_lse": True, "scale": 0.2, "head_dim_v": 8},
    "sinks": {"alibi": True, "sinks": True, "layout": "NHD"},
    "slopes": {"alibi": True, "alibi_each": True},
    "chunk": {"chunk": 4},
}


# An LSE is in fp32 beside an output in a half type; nothing else that torch is told depends on kind and type together.
@pytest.mark.parametrize(
    ("kind", "half"),
    [
        ("plain", False),
        of_long_runs("window", True),
        of_long_runs("lse", False),
        ("lse", True),
        ("sinks", False),
        of_long_runs("slopes", False),
    ],
)
def test_torch_agrees_with_what_it_is_told_of_attention(backend, device, kind, half):
    dtype = half_dtype(backend) if half else torch.float32
    case = Case(query_lens=(4, 1), context_lens=(9, 12), dtype=dtype, row_strides="packed", **ATTENTION[kind])
    step = Step(case, device)
    plan = step.write(backend)
    cache = [x.nan_to_num() for x in (step.kv.k, step.kv.v)]  # NaN is not equal to itself: torch would take it for new
    q, k_new, v_new = (x.nan_to_num() for x in (step.q, step.k_new, step.v_new))
    scores = {
        "scale": case.scale,
        "alibi_slopes": step.alibi_slopes,
        "softcap": case.softcap,
        "sinks": step.sinks,
        "chunk": case.chunk,
        "return_lse": case.return_lse,
    }
    arguments = (backend.name, q, *cache, plan.key)
    opcheck(torch.ops.quire.attention.default, arguments, scores)
    out = torch.zeros(5, case.num_heads, case.dim_v + 3, dtype=dtype, device=device)[..., 1:-2]
    opcheck(torch.ops.quire.attention_out.default, arguments, {**scores, "out": out})
    opcheck(torch.ops.quire.write_kv.default, (backend.name, k_new, v_new, *cache, plan.key))


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_with_its_options_in_a_graph(backend, device, kind):
    step = Step(Case(query_lens=(4, 1), context_lens=(9, 12), row_strides="packed", **ATTENTION[kind]), device)
    plan = step.write(backend)
    out, lse = step.attend(backend, plan)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, kv: ops.PagedKV, given: Tensor | None):
        return backend.attention(
            q,
            kv,
            plan,
            scale=step.case.scale,
            alibi_slopes=step.alibi_slopes,
            softcap=step.case.softcap,
            sinks=step.sinks,
            chunk=step.case.chunk,
            out=given,
            return_lse=step.case.return_lse,
        )

    expected = (out, lse) if step.case.return_lse else out
    torch.testing.assert_close(attend(step.q, step.kv, None), expected)
    given = torch.full_like(out, torch.nan)
    torch.testing.assert_close(attend(step.q, step.kv, given), expected)
    torch.testing.assert_close(given, out)


# ------------------------------------------------------------------------------------- plans that come and go


def test_a_plan_is_freed_with_its_last_reference(backend, device):
    kv, q = new_cache(device), torch.randn(5, HEADS, DIM, device=device)
    plan = backend.make_plan(spec_of(device), 8, 2, 4)
    update(plan, (3, 2), (3, 2))
    torch.ops.quire.attention(backend.name, q, kv.k, kv.v, plan.key)
    alive, key = weakref.ref(plan), plan.key
    gc.disable()
    try:
        del plan
        assert alive() is None
    finally:
        gc.enable()
    with pytest.raises(BadValue, match=rf"plan is the key {int(key)}, and there is no such plan"):
        torch.ops.quire.attention(backend.name, q, kv.k, kv.v, key)


def test_a_plan_does_not_keep_the_memory_of_a_cache(backend, device):
    kv, q = new_cache(device), torch.randn(5, HEADS, DIM, device=device)
    plan = backend.make_plan(spec_of(device), 8, 2, 4)
    update(plan, (3, 2), (3, 2))
    backend.write_kv(q[:, :2], q[:, 2:], kv, plan)
    torch.ops.quire.attention(backend.name, q, kv.k, kv.v, plan.key)
    alive = [weakref.ref(x) for x in (kv, kv.k)]
    del kv
    assert [x() for x in alive] == [None, None]
    other = new_cache(device)  # perhaps where the first one was
    assert not backend.attention(q, other, plan).any()


# ------------------------------------------------------------------------------------------------- refusals


def test_a_graph_raises_what_the_backend_raises(backend, device):
    kv, q = new_cache(device), torch.randn(5, HEADS, DIM, device=device)
    plan = backend.make_plan(spec_of(device), 8, 2, 4)
    update(plan, (3, 2), (3, 2))

    def attend(x: Tensor, **options: object) -> Tensor:
        return backend.attention(x, kv, plan, **options)

    def write(k: Tensor) -> None:
        backend.write_kv(k, k, kv, plan)

    short = torch.empty(5, HEADS, DIM - 1, device=device)
    wrong: list[tuple[type[QuireError], Callable[..., object], tuple[Tensor, ...], dict[str, object]]] = [
        (BadShape, attend, (q[:4],), {}),
        (BadDtype, attend, (q.double(),), {}),
        (BadShape, attend, (q,), {"out": short}),
        (BadValue, attend, (q,), {"softcap": -1.0}),
        (BadShape, write, (q,), {}),
        (BadShape, backend.rms_norm, (q, q[0, 0, :5]), {"eps": 1e-6}),
        (BadShape, backend.swiglu, (short,), {}),
        (BadValue, backend.top_k, (q[0],), {"k": DIM + 1}),
    ]
    for kind, function, arguments, options in wrong:
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        with pytest.raises(kind) as eager:
            function(*arguments, **options)
        with pytest.raises(kind) as graph:
            compiled(*arguments, **options)
        assert str(graph.value) == str(eager.value)


def test_a_read_only_plan_is_refused_when_the_graph_runs(backend, device):
    kv, k = new_cache(device), torch.randn(5, KV_HEADS, DIM, device=device)
    plan = backend.make_plan(spec_of(device), 8, 2, 4)
    update(plan, (3, 2), (3, 2))
    write = torch.compile(lambda: backend.write_kv(k, k, kv, plan), fullgraph=True, backend="aot_eager")
    write()
    plan.update(torch.tensor([0, 3, 5]), torch.tensor([3, 2]), TABLES)
    with pytest.raises(BadValue, match="read-only"):
        write()


def test_a_backend_that_there_is_not():
    with pytest.raises(Unsupported, match="'nope'"):
        torch.ops.quire.swiglu("nope", torch.zeros(2, 4))
