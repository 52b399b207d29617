"""A plan is updated in place, step after step, and a refused update leaves it as it was."""

from __future__ import annotations

import pytest
import torch

from quire import ops
from quire.errors import QuireError
from tests.ops.cases import Case, Step
from tests.ops.conftest import INTERPRETED

TENSORS = ("query_starts", "context_lens", "block_tables", "slots")
BLOCKS = 40

# (query_lens, context_lens): growing, shrinking, empty, and growing again
STEPS = [
    ((5, 9), (5, 9)),
    ((1, 1, 30), (6, 10, 62)),
    ((1,), (7,)),
    ((), ()),
    ((0, 2), (12, 3)),
    ((1, 1, 1, 31), (90, 1, 8, 31)),
    ((2, 1), (2, 129)),
]


def step_of(query_lens: tuple[int, ...], context_lens: tuple[int, ...], device: str, seed: int = 0, **options) -> Step:
    """Steps with one spec: their pools are equally large."""
    used = sum(-(-n // 8) for n in context_lens)
    case = Case(
        query_lens=query_lens,
        context_lens=context_lens,
        seed=seed,
        spare_blocks=BLOCKS - used,
        spare_columns=seed % 2,
        return_lse=True,
        **options,
    )
    return Step(case, device)


def metadata(step: Step) -> tuple[torch.Tensor, ...]:
    return step.query_starts, step.context_lens, step.block_tables, step.new_slots


def snapshot(plan: ops.AttentionPlan) -> list[object]:
    sizes = [plan.num_tokens, plan.num_seqs, plan.writable]
    return sizes + [getattr(plan, name).tolist() for name in TENSORS]


def addresses(plan: ops.AttentionPlan) -> list[int]:
    return [getattr(plan, name).data_ptr() for name in TENSORS]


def check(backend: ops.Backend, plan: ops.AttentionPlan, step: Step) -> None:
    out, lse = step.attend(backend, plan)
    if step.num_seqs:
        step.dense().check(out, lse, step.case.dtype)
    else:
        assert out.shape[0] == lse.shape[0] == 0


@pytest.mark.parametrize("window", [None, 7])
def test_a_plan_serves_one_step_after_the_other(backend, device, window):
    plan = backend.make_plan(step_of((), (), device, window=window).spec, 40, 4, 20)
    fixed = addresses(plan)
    for seed, (query_lens, context_lens) in enumerate(STEPS if backend.name in INTERPRETED else STEPS * 2):
        step = step_of(query_lens, context_lens, device, seed, window=window)
        assert step.spec == plan.spec
        step.write(backend)
        plan.update(*metadata(step))
        assert (plan.num_tokens, plan.num_seqs, plan.writable) == (step.num_tokens, step.num_seqs, True)
        backend.write_kv(step.k_new, step.v_new, step.kv, plan)
        step.check_cache()
        check(backend, plan, step)
        plan.update(*metadata(step)[:3])
        check(backend, plan, step)
        assert addresses(plan) == fixed


def integers(*values: object) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


REFUSED = {
    "starts not at 0": integers([1, 2], [1], [[0]], [0]),
    "starts fall": integers([0, 2, 1], [2, 2], [[0], [1]], [0]),
    "too many tokens": integers([0, 24], [24], [[0, 1, 2]], list(range(24))),
    "too many sequences": integers([0, 1, 2, 3], [1, 1, 1], [[0], [1], [2]], [0, 8, 16]),
    "too many blocks": integers([0, 1], [1], [[0] * 5], [0]),
    "context beyond the table": integers([0, 1], [9], [[0]], [0]),
    "id out of range": integers([0, 1], [9], [[0, BLOCKS]], [0]),
    "slot out of range": integers([0, 1], [9], [[0, 1]], [BLOCKS * 8]),
    "slots too long": integers([0, 1], [9], [[0, 1]], [0, 1]),
    "slot twice": integers([0, 2], [9], [[0, 1]], [8, 8]),
    "end before the row": (*integers([0, 2], [9], [[0, 1]]), None, torch.tensor([7, 9])),
    "end beyond the context": (*integers([0, 2], [9], [[0, 1]]), None, torch.tensor([8, 10])),
    "ends fall": (*integers([0, 3], [9], [[0, 1]]), None, torch.tensor([9, 8, 9])),
    "ends too short": (*integers([0, 2], [9], [[0, 1]]), None, torch.tensor([9])),
    "no integers": (torch.tensor([0.0, 1.0]), *integers([9], [[0, 1]], [0])),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_update_leaves_the_plan_as_it_was(backend, device, reason):
    step = step_of((3, 20), (13, 20), device)
    step.write(backend)
    plan = backend.make_plan(step.spec, 23, 2, 4)
    plan.update(*metadata(step))
    before = snapshot(plan)
    with pytest.raises(QuireError):
        plan.update(*REFUSED[reason])
    assert snapshot(plan) == before
    if backend.name not in INTERPRETED or reason == next(iter(REFUSED)):
        backend.write_kv(step.k_new, step.v_new, step.kv, plan)
        step.check_cache()
        check(backend, plan, step)


def test_a_fresh_plan_is_empty(backend, device):
    step = step_of((3,), (3,), device)
    plan = backend.make_plan(step.spec, 10, 2, 4)
    assert (plan.num_tokens, plan.num_seqs, plan.writable) == (0, 0, False)
    assert backend.attention(step.q[:0], step.kv, plan).shape == (0, 6, 16)


def test_a_plan_without_any_room(backend, device):
    spec = step_of((), (), device).spec
    plan = backend.make_plan(spec, 0, 0, 0)
    plan.update(*integers([0]), torch.zeros(0, dtype=torch.int32), torch.zeros(0, 0, dtype=torch.int32))
    assert (plan.num_tokens, plan.num_seqs) == (0, 0)
