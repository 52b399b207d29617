"""A decoder's layers as one call: the same bits as one operator after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from quire.errors import BadDtype, BadShape, BadStride, BadValue
from quire.models.decoder import Decoder
from quire.ops import AttentionSpec, PagedKV, load, native
from quire.ops.activation import Activation
from quire.ops.backends.eager import EagerExecutor
from quire.ops.cpu.executor import NativeExecutor
from quire.ops.program import (
    Activate,
    Add,
    Attend,
    Keep,
    Multiply,
    Operator,
    Place,
    Program,
    Rotate,
    Scale,
    Write,
)
from tests.marks import spread
from tests.models.checkpoints import engine, probed_logits, save
from tests.models.test_families import VARIANTS
from tests.ops.conftest import OTHER_ISAS, WIDE, use_library

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=native.unavailable() or "")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GELU = Activation("gelu_tanh", gated=False)
PROMPTS = [list(range(2, 2 + n)) for n in (1, 16, 17, 50)]


@pytest.fixture(autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best instruction set, or the one that a test asks for."""
    use_library(request, monkeypatch, getattr(request, "param", None))


def run_one_by_one(model: Decoder) -> None:
    """Let the model's operators be called one by one."""
    model.layers = EagerExecutor(model.backend, model.layers.program)


# All kinds of operators.
FEW = ("grouped query", "gpt2", "gemma2", "qwen3", "olmo2", "granite", "gpt_neox", "qwen3 moe, some layers dense")
CASES = [
    *spread(21, [None], VARIANTS, DTYPES),
    *spread(4, [isa for isa in OTHER_ISAS if isa not in WIDE], FEW, DTYPES),
    *spread(4, [isa for isa in OTHER_ISAS if isa in WIDE], FEW, [torch.bfloat16]),
]


@pytest.mark.parametrize(("isa", "kind", "dtype"), CASES, ids=str, indirect=["isa"])
def test_every_bit_is_that_of_the_operators_one_by_one(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Prompts in chunks mixed with decoding; logits of every row."""
    family, changes = VARIANTS[kind]
    save(tmp_path, family, dtype, **changes)
    found = []
    for one_by_one in (False, True):
        made = engine(tmp_path, block_size=4, num_blocks=100, max_num_batched_tokens=24)
        assert isinstance(made.runner.model.layers, NativeExecutor)
        if one_by_one:
            run_one_by_one(made.runner.model)
        found.append(probed_logits(made, PROMPTS, max_tokens=12))
    (once, tokens), (again, same_tokens) = found
    assert {"prefill", "decode"} in once.steps
    assert once.alike == again.alike == once.parts == again.parts > 0
    assert tokens == same_tokens
    assert once.found.keys() == again.found.keys()
    for row, logits in once.found.items():
        assert torch.equal(logits, again.found[row])


def test_another_cache_is_found(tmp_path: Path) -> None:
    """A model may serve one engine after another."""
    save(tmp_path)
    first, second = (engine(tmp_path, block_size=size) for size in (4, 8))
    second.runner.model = first.runner.model
    _, tokens = probed_logits(first, PROMPTS, max_tokens=5)
    first.runner.model = second.runner.model
    _, same = probed_logits(second, PROMPTS, max_tokens=5)
    assert same == tokens


def test_what_each_operator_took(tmp_path: Path) -> None:
    """By the native executor and by the eager one: the same operators, in order."""
    save(tmp_path, "Gemma2")
    seen: list[list[str]] = []
    for one_by_one in (False, True):
        made = engine(tmp_path)
        if one_by_one:
            run_one_by_one(made.runner.model)
        calls: list[tuple[str, float, float]] = []
        made.runner.model.layers.observer = lambda *call, calls=calls: calls.append(call)
        probed_logits(made, PROMPTS[:1], max_tokens=1)
        kinds = [kind for kind, _, _ in calls]
        assert kinds[:4] == ["norm", "linear", "rope", "write"]
        assert {"attention", "activation"} < set(kinds)
        assert all(seconds >= 0 for _, _, seconds in calls)
        assert all(now[1] <= after[1] for now, after in pairwise(calls))
        seen.append(kinds)
    assert seen[0] == seen[1]


# ------------------------------------------------------------------------------------------ programs by hand


class NoCaches:
    """For programs without attention."""

    def layer(self, index: int) -> PagedKV:
        raise AssertionError(f"layer {index} was asked for")


def executor(
    operators: list[Operator], widths: dict[str, int], result: str, dtype: torch.dtype = torch.float32
) -> NativeExecutor:
    """Of a program whose input is the first buffer."""
    names = list(widths)
    first, last = (Place(name, 0, widths[name]) for name in (names[0], result))
    return NativeExecutor(Program(dtype, first, last, widths, operators))


def test_a_position_beyond_the_table_is_refused() -> None:
    tables = torch.ones(5, 2), torch.zeros(5, 2)
    run = executor([Rotate(Place("x", 0, 4), Place("x", 4, 4), *tables, 4)], {"x": 8}, "x")
    run(torch.ones(2, 8), torch.tensor([0, 4]), NoCaches(), [])
    with pytest.raises(BadValue, match="0 to 5"):
        run(torch.ones(2, 8), torch.tensor([5, 0]), NoCaches(), [])


def test_a_plan_of_other_tokens_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    made = engine(tmp_path)
    probed_logits(made, PROMPTS[:1], max_tokens=1)
    model = made.runner.model.model
    hidden, positions = torch.zeros(2, 48), torch.arange(2)
    with pytest.raises(BadValue, match="for 1 tokens, the program for 2"):
        model.layers(hidden, positions, made.runner.cache, made.runner.plans)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["native", "eager"])
def test_sums_and_multiples(kind: str, dtype: torch.dtype) -> None:
    """Of a part of a buffer's columns; 33 are more than a vector's lanes and no multiple of them."""
    part, other = Place("x", 3, 33), Place("x", 41, 33)
    operators = [Scale(part, 0.22), Add(part, other), Multiply(other, part)]
    program = Program(dtype, Place("x", 0, 75), Place("x", 0, 75), {"x": 75}, operators)
    run = NativeExecutor(program) if kind == "native" else EagerExecutor(load("cpu"), program)
    x = torch.randn(5, 75, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = x.clone()
    expected[:, 3:36] *= 0.22
    expected[:, 41:74] += expected[:, 3:36]
    expected[:, 3:36] *= expected[:, 41:74]
    assert torch.equal(run(x, torch.arange(5), NoCaches(), []), expected)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("x", torch.zeros(2, 7), BadShape),
        ("x", torch.zeros(2, 16)[:, ::2], BadStride),
        ("x", torch.zeros(4, 8)[::2], BadStride),
        ("x", torch.zeros(2, 8, device="meta"), BadValue),
        ("x", torch.zeros(2, 8).half(), BadDtype),
        ("positions", torch.zeros(1, dtype=torch.int64), BadShape),
        ("positions", torch.zeros(2, dtype=torch.int32), BadDtype),
        ("rows", torch.zeros(1, dtype=torch.int32), BadDtype),
        ("rows", torch.zeros(1, 1, dtype=torch.int64), BadShape),
    ],
)
def test_tensors_that_are_not_as_a_program_takes_them(name: str, value: torch.Tensor, error: type[Exception]) -> None:
    run = executor([Add(Place("x", 0, 4), Place("x", 4, 4))], {"x": 8}, "x")
    given = {"x": torch.ones(2, 8), "positions": torch.arange(2), "caches": NoCaches(), "plans": []}
    run(**given)
    with pytest.raises(error, match=f"^{name} "):
        run(**{**given, name: value})


def test_a_program_without_its_plans_is_refused() -> None:
    q, k, v = (Place("x", first, 4) for first in (0, 4, 8))
    operators = [Write(k, v, 0, 0, 4), Attend(q, Place("y", 0, 4), 0, 0, 4, 1.0, None, None)]
    run = executor(operators, {"x": 12, "y": 4}, "y")
    given = torch.ones(1, 12), torch.zeros(1, dtype=torch.int64), NoCaches()
    with pytest.raises(BadValue, match="given are 0 plans; the program has 1 cache groups"):
        run(*given, [])
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=4, block_size=1, num_blocks=1, dtype=torch.float32)
    for backend, match in (("reference", "a plan is a AttentionPlan"), ("cpu", "update it with slots")):
        plan = load(backend).plan(spec, torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[0]]))
        with pytest.raises(BadValue, match=match):
            run(*given, [plan])


def test_rows_out_of_order_are_refused() -> None:
    run = executor([Keep((Place("x", 0, 8), Place("x", 0, 8)))], {"x": 8}, "x")
    for rows in ([1, 0], [0, 0], [-1, 2], [0, 3]):
        with pytest.raises(BadValue, match=r"rows to keep are .*; they must ascend within 0..2"):
            run(torch.ones(3, 8), torch.arange(3), NoCaches(), [], torch.tensor(rows))


@pytest.mark.parametrize("kind", ["native", "eager"])
def test_rows_that_are_kept(kind: str) -> None:
    x, y = Place("x", 0, 8), Place("y", 0, 8)
    copy = Activate(x, y, GELU)
    program = Program(torch.float32, x, x, {"x": 8, "y": 8}, [copy, Keep((x, y)), Multiply(y, x)])
    run = NativeExecutor(program) if kind == "native" else EagerExecutor(load("cpu"), program)
    given = torch.randn(3, 8)
    expected = given * load("cpu").gelu(given, "tanh")
    for rows in ([0, 1, 2], [1, 2], [0], []):  # none is not all
        found = run(given.clone(), torch.arange(3), NoCaches(), [], torch.tensor(rows, dtype=torch.int64))
        assert torch.equal(found, expected[rows])
    assert torch.equal(run(given.clone(), torch.arange(3), NoCaches(), []), expected)


def test_a_program_has_only_so_many_buffers() -> None:
    with pytest.raises(BadValue, match="33 buffers"):
        executor([], {str(i): 1 for i in range(33)}, "0")


def test_input_and_output_are_whole_buffers() -> None:
    with pytest.raises(BadValue, match="is not the whole buffer, whose width is 8"):
        Program(torch.float32, Place("x", 0, 8), Place("x", 4, 4), {"x": 8}, [])


def test_a_plan_for_other_heads_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    model, other = engine(tmp_path).runner.model, engine(tmp_path, dtype="bfloat16").runner
    probed_logits(engine(tmp_path), PROMPTS[:1], max_tokens=1)
    batch_of_one = torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[0]]), torch.tensor([0])
    for plan in other.plans:
        plan.update(*batch_of_one)
    with pytest.raises(BadValue, match=r"a plan is for .*bfloat16.*; the program has .*float32"):
        model.layers(torch.zeros(1, 48), torch.arange(1), other.cache, other.plans)


def test_a_plan_for_other_kv_heads_is_refused() -> None:
    """K and V of more heads would be read beyond their columns."""
    q, k, v = Place("x", 0, 8), Place("x", 8, 4), Place("x", 12, 4)
    run = executor(
        [Write(k, v, 0, 0, 4), Attend(q, Place("y", 0, 8), 0, 0, 4, 1.0, None, None)], {"x": 16, "y": 8}, "y"
    )
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=4, block_size=1, num_blocks=1, dtype=torch.float32)
    step = torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[0]]), torch.tensor([0])
    with pytest.raises(BadValue, match="the program has num_kv_heads=1"):
        run(torch.ones(1, 16), torch.zeros(1, dtype=torch.int64), NoCaches(), [load("cpu").plan(spec, *step)])


@pytest.mark.parametrize(
    ("operator", "match"),
    [
        (Activate(Place("x", 4, 8), Place("y", 0, 8), GELU), "lies beyond its buffer, whose width is 8"),
        (Activate(Place("x", 0, 4), Place("y", 4, 4), GELU), "is not the whole buffer, whose width is 8"),
        (Scale(Place("x", -1, 4), 2.0), "lies beyond its buffer"),
    ],
)
def test_places_that_a_buffer_does_not_have_are_refused(operator: Operator, match: str) -> None:
    with pytest.raises(BadValue, match=match):
        Program(torch.float32, Place("x", 0, 8), Place("x", 0, 8), {"x": 8, "y": 8}, [operator])


@pytest.mark.parametrize("kind", ["grouped query", "olmo2", "gpt_neox", "qwen3 moe, some layers dense"])
def test_a_buffer_is_dropped_after_its_last_reader_and_no_earlier(tmp_path: Path, kind: str) -> None:
    family, changes = VARIANTS[kind]
    save(tmp_path, family, torch.float32, **changes)
    program = engine(tmp_path).runner.model.layers.program
    held, dropped = {program.input.buffer}, []
    for operator, done_with in zip(program.operators, program.last_uses(), strict=True):
        assert {place.buffer for place in operator.reads} <= held
        held |= {place.buffer for place in operator.fills}
        assert done_with <= held
        held -= done_with
        dropped += [(operator.kind, buffer) for buffer in done_with]
    assert held == {program.output.buffer}
    assert ("attention", "qkv") in dropped or ("attention", "q") in dropped
    assert ("linear", "attended") in dropped


# ------------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_no_bit_depends_on_the_number_of_threads(tmp_path: Path, threads: int) -> None:
    """Nor on whether there are cores for all of them."""
    save(tmp_path, hidden_size=96, intermediate_size=640)
    found = []
    before = torch.get_num_threads()
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            found.append(probed_logits(engine(tmp_path, max_num_batched_tokens=48), PROMPTS, max_tokens=12))
    finally:
        torch.set_num_threads(before)
    (alone, tokens), (together, same_tokens) = found
    assert tokens == same_tokens
    assert all(torch.equal(logits, together.found[row]) for row, logits in alone.found.items())


def test_engines_on_several_threads_may_share_a_model(tmp_path: Path) -> None:
    """While one computes, the other would else bind the layers to its own cache."""
    save(tmp_path)
    _, alone = probed_logits(engine(tmp_path), PROMPTS, max_tokens=40)
    made = [engine(tmp_path) for _ in range(3)]
    for one in made[1:]:
        one.runner.model = made[0].runner.model
    with ThreadPoolExecutor(len(made)) as pool:
        found = list(pool.map(lambda one: probed_logits(one, PROMPTS, max_tokens=40)[1], made))
    assert found == [alone] * len(made)
