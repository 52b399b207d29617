"""Layers that keep a state in a native program, and over threads: the bits of the backend's own operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadShape, BadValue
from quire.ops.backends.eager import EagerExecutor
from quire.ops.cpu.executor import NativeExecutor
from quire.ops.program import Convolve, Gate, GatedDelta, GatedNormalize, Place, Program, StateSpace
from quire.ops.recurrent.plan import RecurrentPlan
from quire.ops.recurrent.records import RecurrentCache
from tests.ops.recurrent import Layer, Sizes, bits, make_plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (
    Sizes(heads=6, k_heads=2, dim_k=24, dim_v=40),
    Sizes(heads=1, k_heads=1, dim_k=64, dim_v=300),  # fewer heads than threads: columns are divided
)


class Caches:
    """Of two layers."""

    def __init__(self, *layers: RecurrentCache) -> None:
        self.layers = layers

    def layer(self, index: int) -> RecurrentCache:
        return self.layers[index]


def make_caches(layer: Layer) -> Caches:
    caches = Caches(*(RecurrentCache.allocate(layer.sizes.spec(records=6)) for _ in range(2)))
    for cache in caches.layers:
        for x in cache.tensors().values():
            x.fill_(torch.nan)
    return caches


def make_program(layer: Layer, index: int) -> Program:
    """Convolution, recurrence, gated norm, gate; what they take from the input stands side by side in it."""
    sizes, wide = layer.sizes, layer.sizes.heads * layer.sizes.dim_v
    x, gates = Place("x", 0, sizes.width), Place("x", sizes.width, layer.gates_widths[0])
    z = Place("x", sizes.width + layer.gates_widths[0], wide)
    buffers = {"x": z.first + wide, "convolved": sizes.width, "mixed": wide, "out": wide}
    convolved, mixed, out = (Place(name, 0, buffers[name]) for name in ("convolved", "mixed", "out"))
    if layer.rule == "delta":
        recurrence = GatedDelta(convolved, gates, mixed, layer.decay_rate, layer.dt_bias, index, 0)
    else:
        weights = layer.decay_rate, layer.skip, layer.dt_bias, layer.dt_limits
        recurrence = StateSpace(convolved, gates, mixed, *weights, index, 0)
    first = "norm" if layer.rule == "delta" else "gate"
    operators = [
        Convolve(x, convolved, layer.weight, layer.bias, "silu", index, 0),
        recurrence,
        GatedNormalize(mixed, z, out, layer.bias[:wide].contiguous(), 1e-6, sizes.heads, first),
        Gate(z, out),
    ]
    return Program(sizes.dtype, Place("x", 0, buffers["x"]), out, buffers, operators)


def make_steps(backend: ops.Backend, layer: Layer) -> list[tuple[RecurrentPlan, Tensor]]:
    """Two steps of two sequences: 40 and 5 tokens, then 60 and 1."""
    spec = layer.sizes.spec(records=6)
    tables = (
        ([0, 40, 45], [40, 5], [[-1, 0], [-1, -1]], [[-1, 1], [2, -1]]),
        ([0, 60, 61], [100, 6], [[0, -1, 1], [-1, -1, -1]], [[1, 3, 4], [2, -1, -1]]),
    )
    gen = torch.Generator().manual_seed(3)
    width = make_program(layer, 0).input.size
    return [
        (make_plan(backend, spec, *table), torch.randn(table[0][-1], width, generator=gen).to(layer.sizes.dtype))
        for table in tables
    ]


def run(executor: EagerExecutor | NativeExecutor, caches: Caches, steps: list[tuple[RecurrentPlan, Tensor]]) -> Tensor:
    found = []
    for plan, x in steps:
        found.append(executor(x.clone(), torch.zeros(len(x), dtype=torch.int64), caches, [plan]))
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["delta", "ssd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_program_has_the_bits_of_its_operators_on_any_threads(backend, sizes, dtype, rule):
    layer = Layer(replace(sizes, dtype=dtype), rule, seed=1)
    steps, program = make_steps(backend, layer), make_program(layer, 1)
    torch.set_num_threads(1)
    eager, caches = EagerExecutor(backend, program), make_caches(layer)
    want = run(eager, caches, steps)
    assert want.isfinite().all()
    for threads in (1, 7):
        torch.set_num_threads(threads)
        for executor in (backend.compile(program), eager):
            own = make_caches(layer)
            assert torch.equal(bits(run(executor, own, steps)), bits(want)), threads
            for name, x in own.layers[1].tensors().items():
                assert torch.equal(bits(x), bits(caches.layers[1].tensors()[name])), name
            assert all(x.isnan().all() for x in own.layers[0].tensors().values())
    assert isinstance(backend.compile(program), NativeExecutor)


def test_plans_and_caches_of_other_sizes_are_refused(backend):
    layer, other = Layer(SIZES[0], "delta", seed=1), Layer(replace(SIZES[0], taps=3), "delta", seed=1)
    executor = backend.compile(make_program(layer, 0))
    plan, x = make_steps(backend, layer)[0]
    positions = torch.zeros(len(x), dtype=torch.int64)
    with pytest.raises(BadValue, match="the program has taps=4 in group 0"):
        executor(x.clone(), positions, make_caches(layer), [make_steps(backend, other)[0][0]])
    with pytest.raises(BadShape, match=r"cache.tail has shape \(6, 2, 336\); expected \(6, 3, 336\)"):
        executor(x.clone(), positions, make_caches(other), [plan])
    with pytest.raises(BadValue, match="a plan is a RecurrentPlan; make it with the cpu backend"):
        executor(x.clone(), positions, make_caches(layer), [make_steps(ops.load("reference"), layer)[0][0]])
    with pytest.raises(BadValue, match="a plan is for 45 tokens, the program for 44"):
        executor(x[:44].clone(), positions[:44], make_caches(layer), [plan])
    assert torch.isfinite(executor(x.clone(), positions, make_caches(layer), [plan])).all()
