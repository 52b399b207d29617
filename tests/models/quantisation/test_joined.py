"""q, k and v, or gate and up, that are stored in different ways: still one call of the native library."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops import native
from quire.ops.backends.eager import EagerExecutor
from quire.ops.cpu.executor import NativeExecutor
from quire.ops.program import Operator, Project
from quire.ops.weights.linear import JoinedLinear
from tests.models.checkpoints import engine, probed_logits
from tests.models.quantisation import writers
from tests.models.quantisation.test_formats import gptq_config, ordered, packed_config
from tests.models.quantisation.writers import Written, drawn, write
from tests.ops.conftest import OTHER_ISAS, use_library

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=native.unavailable() or "")
PROMPTS = [list(range(2, 2 + n)) for n in (1, 16, 17, 50)]
Stored = Callable[[str, Tensor], tuple[Written, dict[str, Tensor]] | None]


@pytest.fixture(autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best instruction set, or the one that a test asks for."""
    use_library(request, monkeypatch, getattr(request, "param", None))


def by_pattern() -> tuple[dict[str, Any], Stored]:
    """GPTQ: some parts of other bits, with zeros, or left out."""
    generator = np.random.default_rng(5)
    dynamic = {
        r"-:.*layers\.0\.mlp\.up_proj": {},
        r"+:.*layers\.[01]\..*k_proj": {"bits": 8, "group_size": 64},
        r".*layers\.2\.mlp\.gate_proj": {"bits": 8, "sym": False},
    }

    def one(module: str, weight: Tensor) -> tuple[Written, dict[str, Tensor]] | None:
        if module == "lm_head" or "layers.0.mlp.up_proj" in module:
            return None
        zeros = "layers.2.mlp.gate" in module
        bits, size = (8, 64) if ".k_proj" in module and "layers.2" not in module else (8 if zeros else 4, 32)
        made = drawn(generator, *weight.shape, bits, size, zeros=zeros)
        return made, writers.gptq(module, made, bits)

    return gptq_config(dynamic=dynamic), one


def by_group() -> tuple[dict[str, Any], Stored]:
    """compressed-tensors: values of 8 bits with a scale an output, the others of 4."""
    generator = np.random.default_rng(6)
    few, many = (packed_config(*how)["config_groups"]["group_0"] for how in ((4, 32), (8, -1)))
    targets = [r"re:.*v_proj", r"re:.*up_proj"]

    def one(module: str, weight: Tensor) -> tuple[Written, dict[str, Tensor]] | None:
        if module == "lm_head":
            return None
        bits, size = (8, -1) if "v_proj" in module or "up_proj" in module else (4, 32)
        made = drawn(generator, *weight.shape, bits, size)
        return made, writers.packed(module, made, bits)

    return packed_config(config_groups={"few": few, "many": many | {"targets": targets}}), one


def by_order() -> tuple[dict[str, Any], Stored]:
    """GPTQ with act-order: from layer 1 on, each part has its own."""
    return gptq_config(desc_act=True), ordered(7, 4, 32, lambda name, made: writers.gptq(name, made, 4))


CASES = {"by pattern": by_pattern, "by group": by_group, "by order": by_order}
RUNS = [
    *product([None], CASES, (torch.float32, torch.bfloat16)),
    (None, "by pattern", torch.float16),
    *product(OTHER_ISAS, ["by pattern"], [torch.bfloat16]),
]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a case's checkpoint, which is written once."""

    @cache
    def of(case: str) -> Path:
        config, one = CASES[case]()
        # columns that fill no vector: heads of 24, an MLP of 160 or 352
        sizes = {"head_dim": 24, "intermediate_size": 352 if "order" in case else 160, "use_sliding_window": False}
        return write(tmp_path_factory.mktemp("joined"), config, one, "Qwen2", **sizes).directory

    return of


def joined(operator: Operator) -> bool:
    return isinstance(operator, Project) and isinstance(operator.linear, JoinedLinear)


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "case", "dtype"), RUNS, ids=str, indirect=["isa"])
def test_every_bit_is_that_of_the_parts_one_by_one(
    checkpoint_of: Callable[[str], Path], case: str, dtype: torch.dtype
) -> None:
    """Biases, prompts in chunks mixed with decoding; logits of every row."""
    options = {"block_size": 4, "max_num_batched_tokens": 24, "dtype": str(dtype).removeprefix("torch.")}
    found = []
    for one_by_one in (False, True):
        run = engine(checkpoint_of(case), **options)
        layers = run.runner.model.layers
        assert isinstance(layers, NativeExecutor)
        assert sum(map(joined, layers.program.operators)) >= 3
        if one_by_one:
            run.runner.model.layers = EagerExecutor(run.runner.model.backend, layers.program)
        found.append(probed_logits(run, PROMPTS, max_tokens=5))
    (once, tokens), (again, same_tokens) = found
    assert {"prefill", "decode"} in once.steps
    assert tokens == same_tokens
    assert once.found.keys() == again.found.keys()
    for row, logits in once.found.items():
        assert torch.equal(logits, again.found[row])


def test_a_joined_linear_is_one_operator_to_who_watches(checkpoint_of: Callable[[str], Path]) -> None:
    run = engine(checkpoint_of("by order"))
    layers = run.runner.model.layers
    calls: list[tuple[str, float, float]] = []
    layers.observer = lambda *call: calls.append(call)
    probed_logits(run, PROMPTS[:1], max_tokens=1)
    assert [kind for kind, _, _ in calls] == layers.program.kinds
    assert all(now[1] + now[2] == pytest.approx(after[1]) for now, after in pairwise(calls))
