"""A decoder's layers as one call: the same bits as one operator after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from quire.errors import BadDtype, BadShape, BadStride, BadValue
from quire.ops import AttentionSpec, cpu
from quire.ops.cpu import native
from quire.ops.cpu.program import Program
from tests.models.checkpoints import engine, probed_logits, save
from tests.models.test_families import VARIANTS
from tests.ops.conftest import OTHER_ISAS, use_library

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=native.unavailable() or "")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROMPTS = [list(range(2, 2 + n)) for n in (1, 16, 17, 50)]


@pytest.fixture(autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best instruction set, or the one that a test asks for."""
    use_library(request, monkeypatch, getattr(request, "param", None))


CASES = [
    *product([None], VARIANTS, DTYPES),
    # all kinds of operators
    *product(
        OTHER_ISAS,
        ("grouped query", "gpt2", "gemma2", "qwen3", "olmo2", "granite", "gpt_neox", "qwen3 moe, some layers dense"),
        DTYPES,
    ),
]


@pytest.mark.parametrize(("isa", "kind", "dtype"), CASES, ids=str, indirect=["isa"])
def test_every_bit_is_that_of_the_operators_one_by_one(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Prompts in chunks mixed with decoding; logits of every row."""
    family, changes = VARIANTS[kind]
    save(tmp_path, family, dtype, **changes)
    found = []
    for one_by_one in (False, True):
        made = engine(tmp_path, block_size=4, num_blocks=100, max_num_batched_tokens=24)
        assert made.runner.model.native_layers is not None
        if one_by_one:
            made.runner.model.native_layers = None
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
    save(tmp_path, "Gemma2")
    made = engine(tmp_path)
    layers = made.runner.model.native_layers
    seconds = torch.full((len(layers.kinds),), -1.0, dtype=torch.float64)
    run = layers._program.run
    layers._program.run = lambda *args: run(*args[:5], seconds)  # type: ignore[method-assign]
    probed_logits(made, PROMPTS, max_tokens=1)
    assert layers.kinds[:4] == ["norm", "linear", "rope", "write"]
    assert {"attention", "gelu", "multiply"} < set(layers.kinds)
    assert (seconds >= 0).all()


def test_a_position_beyond_the_table_is_refused() -> None:
    program = Program(torch.float32, {"first": 8, "second": 4})
    program.rope(("first", 0), ("first", 4), torch.ones(5, 2), torch.zeros(5, 2), (1, 1), 4)
    x, out = torch.ones(2, 8), torch.empty(2, 4)
    program.run(x, out, torch.tensor([0, 4]), [])
    with pytest.raises(BadValue, match="0 to 5"):
        program.run(x, out, torch.tensor([5, 0]), [])


def test_a_plan_of_other_tokens_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    made = engine(tmp_path)
    probed_logits(made, PROMPTS[:1], max_tokens=1)
    model = made.runner.model.model
    hidden, positions = torch.zeros(2, 48), torch.arange(2)
    with pytest.raises(BadValue, match="for 1 tokens, the program for 2"):
        model.native_layers(hidden, positions, made.runner.cache, made.runner.plans, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_multiples(dtype: torch.dtype) -> None:
    """Of a part of a buffer's columns; 33 are more than a vector's lanes and no multiple of them."""
    program = Program(dtype, {"first": 40, "second": 35})
    program.scale(("first", 3), ("first", 3), 33, 0.22)
    program.add(("first", 3), ("second", 1), 33)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(5, width, generator=generator).to(dtype) for width in (40, 35))
    scaled, total = first.clone(), second.clone()
    scaled[:, 3:36] *= 0.22
    total[:, 1:34] += scaled[:, 3:36]
    program.run(first, second, torch.arange(5), [])
    assert torch.equal(first, scaled)
    assert torch.equal(second, total)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("first", torch.zeros(2, 7), BadShape),
        ("first", torch.zeros(2, 16)[:, ::2], BadStride),
        ("first", torch.zeros(4, 8)[::2], BadStride),
        ("first", torch.zeros(2, 8, device="meta"), BadValue),
        ("second", torch.zeros(1, 4), BadShape),
        ("second", torch.zeros(2, 4).half(), BadDtype),
        ("positions", torch.zeros(1, dtype=torch.int64), BadShape),
        ("positions", torch.zeros(2, dtype=torch.int32), BadDtype),
        ("kept", torch.zeros(1, dtype=torch.int32), BadDtype),
        ("kept", torch.zeros(1, 1, dtype=torch.int64), BadShape),
        ("seconds", torch.zeros(2, dtype=torch.float64), BadShape),
    ],
)
def test_tensors_that_are_not_as_a_program_takes_them(name: str, value: torch.Tensor, error: type[Exception]) -> None:
    program = Program(torch.float32, {"first": 8, "second": 4})
    program.add(("first", 0), ("second", 0), 4)
    given = {"first": torch.ones(2, 8), "second": torch.ones(2, 4), "positions": torch.arange(2), "plans": []}
    program.run(**given, seconds=torch.zeros(1, dtype=torch.float64))
    with pytest.raises(error, match=f"^{name} "):
        program.run(**{**given, name: value})


def test_a_program_without_its_caches_is_refused() -> None:
    program = Program(torch.float32, {"first": 12, "second": 4})
    program.attention(("first", 0), ("first", 4), ("first", 8), ("second", 0), 0, 1.0, None, None)
    given = torch.ones(1, 12), torch.ones(1, 4), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(BadValue, match="given are 0 plans; the program has 1 cache groups"):
        program.run(*given, [])
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=4, block_size=1, num_blocks=1, dtype=torch.float32)
    plan = cpu.plan(spec, torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[0]]), torch.tensor([0]))
    with pytest.raises(BadValue, match="1 layers of attention; bind their caches first"):
        program.run(*given, [plan])


def test_rows_out_of_order_are_refused() -> None:
    program = Program(torch.float32, {"first": 8, "second": 8})
    program.keep(("first", 0), ("second", 0))
    for rows in ([1, 0], [0, 0], [-1, 2], [0, 3]):
        with pytest.raises(BadValue, match=r"rows to keep are .*; they must ascend within 0..2"):
            program.run(torch.ones(3, 8), torch.ones(3, 8), torch.arange(3), [], torch.tensor(rows))
    x, y = torch.arange(24.0).view(3, 8), -torch.arange(24.0).view(3, 8)
    program.run(x, y, torch.arange(3), [], torch.tensor([1, 2]))
    assert torch.equal(x[:2], torch.arange(24.0).view(3, 8)[1:])
    assert torch.equal(y[:2], -x[:2])
    program.run(x, y, torch.arange(3), [], torch.tensor([], dtype=torch.int64))  # none, which is not all


def test_a_program_has_only_so_many_buffers() -> None:
    with pytest.raises(BadValue, match="13 buffers"):
        Program(torch.float32, {str(i): 1 for i in range(13)})


def test_a_plan_for_other_heads_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    model, other = engine(tmp_path).runner.model, engine(tmp_path, dtype="bfloat16").runner
    with pytest.raises(BadValue, match=r"a plan is for .*bfloat16.*; the model has .*float32"):
        model.native_layers(torch.zeros(1, 48), torch.arange(1), other.cache, other.plans, None)


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
