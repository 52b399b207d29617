"""A native program whose caches and weights are set to other memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadShape
from quire.ops.activation import Activation
from quire.ops.backends.eager import EagerExecutor
from quire.ops.choice import Choice
from quire.ops.cpu.executor import NativeExecutor
from quire.ops.cpu.linear import Packer
from quire.ops.experts import ExpertLayer
from quire.ops.program import Attend, MixExperts, Normalize, Place, Program, Project, Rotate, Write
from tests.ops.cpu.test_recurrent_program import SIZES, make_caches, make_program, make_steps, run
from tests.ops.recurrent import Layer, bits
from tests.ops.test_moved import MOVES, SHAPE, make_plan


class OneLayer:
    """A cache of one layer."""

    def __init__(self, kv: ops.PagedKV) -> None:
        self.kv = kv

    def layer(self, index: int) -> ops.PagedKV:
        return self.kv


def attending() -> NativeExecutor:
    """What writes K and V, 16 numbers each, and attends to them."""
    q, k, v = (Place("x", first, 16) for first in (0, 16, 32))
    out = Place("out", 0, 16)
    operators = [Write(k, v, 0, 0, 8), Attend(q, out, 0, 0, 8, None, None, None)]
    return NativeExecutor(Program(torch.float32, Place("x", 0, 48), out, {"x": 48, "out": 16}, operators))


def step(executor: NativeExecutor, caches: OneLayer, plan: ops.AttentionPlan) -> Tensor:
    return executor(torch.ones(1, 48), torch.zeros(1, dtype=torch.int64), caches, [plan])


@pytest.mark.parametrize("move", MOVES)
def test_the_caches_of_a_program_are_found_where_they_lie_now(backend, move):
    """Keys are all alike; the program writes ones to the sixth slot, which the row does not see."""
    caches, plan = OneLayer(ops.PagedKV(torch.ones(SHAPE), torch.ones(SHAPE))), make_plan(backend, "cpu", torch.float32)
    executor = attending()
    assert torch.equal(step(executor, caches, plan), torch.ones(1, 16))
    for number in (7.0, 8.0):
        MOVES[move](caches.kv.v, torch.full(SHAPE, number))
        assert torch.equal(step(executor, caches, plan), torch.full((1, 16), number))
        want = torch.full(SHAPE, number)
        want[1, :, 1] = 1
        assert torch.equal(caches.kv.v, want)
    caches.kv.v.resize_(0)
    with pytest.raises(BadShape, match=r"kv.v has shape \(0,\)"):
        step(executor, caches, plan)


def test_a_plan_for_more_blocks_than_the_cache_has_is_refused(backend):
    caches, plan = OneLayer(ops.PagedKV(torch.ones(SHAPE), torch.ones(SHAPE))), make_plan(backend, "cpu", torch.float32)
    executor = attending()
    step(executor, caches, plan)
    step_of_more = torch.tensor([0, 1]), torch.tensor([5]), torch.tensor([[900, 901]]), torch.tensor([3605])
    larger = backend.plan(replace(plan.spec, num_blocks=1000), *step_of_more)
    with pytest.raises(BadShape, match=r"kv.k has shape \(2, 2, 4, 8\); expected \(1000, 2, 4, 8\)"):
        step(executor, caches, larger)


def test_the_records_of_a_program_are_found_where_they_lie_now(backend):
    layer = Layer(SIZES[0], "delta", seed=1)
    steps, program = make_steps(backend, layer), make_program(layer, 1)
    want = run(EagerExecutor(backend, program), make_caches(layer), steps)
    executor, caches = backend.compile(program), make_caches(layer)
    found = []
    for one in steps:
        found.append(run(executor, caches, [one]))
        for x in caches.layers[1].tensors().values():
            x.data = x.clone()
    assert torch.equal(bits(torch.cat(found)), bits(want))
    caches.layers[1].state.resize_(0)
    with pytest.raises(BadShape, match=r"cache.state has shape \(0,\)"):
        run(executor, caches, steps[:1])


def weighted_program(name: str) -> tuple[Program, list[Tensor]]:
    """A program on rows of 8 numbers, and the weights that it was given."""
    gen = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    x, out = Place("x", 0, 8), Place("out", 0, 8)
    norm, tables, bias, chosen = [draw(8), draw(8)], [draw(4, 2), draw(4, 2)], draw(8), [draw(3), draw(3)]
    pack = Packer()
    choice = Choice(num_chosen=2, renormalised=False, scores="sigmoid", bias=chosen[0], scales=chosen[1])
    linears = [[pack(draw(*shape)) for _ in range(3)] for shape in ((8, 8), (8, 8))]
    experts = ExpertLayer(pack(draw(3, 8), None, torch.float32), *linears, choice, Activation("relu", gated=False))
    turned = [Rotate(Place("x", 0, 4), Place("x", 4, 4), *tables, 4), Normalize(x, out, torch.ones(8), None, 1e-6)]
    made = {
        "norm": ([Normalize(x, out, *norm, 1e-6)], norm),
        "rope": (turned, tables),
        "linear": ([Project(x, pack(draw(8, 8), bias), out)], [bias]),
        "experts": ([MixExperts(x, experts, out)], chosen),
    }
    operators, weights = made[name]
    return Program(torch.float32, x, out, {"x": 8, "out": 8}, operators), weights


@pytest.mark.parametrize("name", ["norm", "rope", "linear", "experts"])
def test_a_program_keeps_the_weights_that_it_was_compiled_with(backend, name):
    program, weights = weighted_program(name)
    x, positions = torch.randn(3, 8, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 3, 1])
    want = EagerExecutor(backend, program)(x.clone(), positions, None, [])
    executor = NativeExecutor(program)
    for weight in weights:
        owner = weight.detach()
        weight.data = torch.full_like(weight, torch.nan)
        with suppress(RuntimeError):  # a resize would move the memory
            owner.resize_(10**6)
        del owner
    assert torch.equal(executor(x.clone(), positions, None, []), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_of_any_dtype_and_strides_serve_a_program(backend, dtype):
    x, out = Place("x", 0, 8), Place("out", 0, 8)
    weight = torch.arange(1, 17).to(dtype)[::2]
    program = Program(torch.float32, x, out, {"x": 8, "out": 8}, [Normalize(x, out, weight, None, 1e-6)])
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    found = NativeExecutor(program)(rows.clone(), torch.zeros(3, dtype=torch.int64), None, [])
    want = rows * (rows.square().mean(1, keepdim=True) + 1e-6).rsqrt() * torch.arange(1, 17, 2)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
