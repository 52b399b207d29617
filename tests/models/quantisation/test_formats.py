"""Every format: the integers that were written are those that are read, and the model is the one that they make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config import engine_config
from quire.models import choose, expected_weight_bytes, load_model, read_json
from quire.models.quantisation.module import Module
from quire.models.quantisation.policy import read_scheme
from quire.models.weights import Checkpoint
from quire.ops import load
from quire.ops.weights.quantised import QuantisedWeight
from tests.marks import of_long_runs, quick, spread
from tests.models.checkpoints import engine, probed_logits
from tests.models.quantisation import writers
from tests.models.quantisation.writers import Written, drawn, write

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 1, 4]]
One = Callable[[str, Tensor], tuple[Written, dict[str, Tensor]] | None]


def awq_config(group_size: int = 32, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"} | changes


def gptq_config(bits: int = 4, group_size: int = 32, sym: bool = True, **changes: Any) -> dict[str, Any]:
    method = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym, "desc_act": False}
    return method | {"checkpoint_format": "gptq", "true_sequential": True, "damp_percent": 0.1} | changes


def packed_config(bits: int = 4, group_size: int = 32, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    } | changes


def bytes_config(**changes: Any) -> dict[str, Any]:
    config = packed_config(8, -1, format="int-quantized")
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None}
    config["config_groups"]["group_0"]["input_activations"] = tokens
    return config | changes


def is_plain(module: str) -> bool:
    """Whether a linear is the output projection or a router, which formats leave as they were."""
    return module == "lm_head" or module.endswith(".gate")


def every(
    seed: int,
    bits: int,
    group_size: int,
    store: Callable[[str, Written], dict[str, Tensor]],
    kept: Callable[[str], bool] = is_plain,
    **how: Any,
) -> One:
    """All linears but those that are kept."""
    generator = np.random.default_rng(seed)

    def one(module: str, weight: Tensor) -> tuple[Written, dict[str, Tensor]] | None:
        if kept(module):
            return None
        made = drawn(generator, *weight.shape, bits, group_size, **how)
        return made, store(module, made)

    return one


def ordered(
    seed: int, bits: int, group_size: int, store: Callable[[str, Written], dict[str, Tensor]], **how: Any
) -> One:
    """As `every`, each linear with an order of its own, but q, k and v of layer 0, which share one."""
    generator = np.random.default_rng(seed)

    def one(module: str, weight: Tensor) -> tuple[Written, dict[str, Tensor]] | None:
        if module == "lm_head":
            return None
        order = np.random.default_rng(7).permutation(weight.shape[1])
        if "layers.0.self_attn" not in module:
            order = generator.permutation(weight.shape[1])
        made = drawn(generator, *weight.shape, bits, group_size, order=order, **how)
        return made, store(module, made)

    return one


CASES: dict[str, tuple[dict[str, Any], Callable[[int], One]]] = {
    "awq": (awq_config(), lambda s: every(s, 4, 32, lambda n, w: writers.awq(n, w, 4), zeros=True)),
    "awq, one group": (awq_config(-1), lambda s: every(s, 4, -1, lambda n, w: writers.awq(n, w, 4), zeros=True)),
    "gptq v1": (gptq_config(), lambda s: every(s, 4, 32, lambda n, w: writers.gptq(n, w, 4))),
    "gptq v1, 8 bits": (gptq_config(8, 64), lambda s: every(s, 8, 64, lambda n, w: writers.gptq(n, w, 8))),
    "gptq v2 that says v1": (gptq_config(), lambda s: every(s, 4, 32, lambda n, w: writers.gptq(n, w, 4, 2))),
    "gptq v1 that says v2": (
        gptq_config(8, checkpoint_format="gptq_v2"),
        lambda s: every(s, 8, 32, lambda n, w: writers.gptq(n, w, 8, 1)),
    ),
    "gptq v1, zeros": (
        gptq_config(sym=False),
        lambda s: every(s, 4, 32, lambda n, w: writers.gptq(n, w, 4, with_groups=False), zeros=True),
    ),
    "gptq v2, zeros, 8 bits": (
        gptq_config(8, sym=False, checkpoint_format="gptq_v2"),
        lambda s: every(s, 8, 32, lambda n, w: writers.gptq(n, w, 8, 2), zeros=True),
    ),
    "gptq, a scale an output": (gptq_config(4, -1), lambda s: every(s, 4, -1, lambda n, w: writers.gptq(n, w, 4))),
    "gptq, last group smaller": (gptq_config(4, 128), lambda s: every(s, 4, 128, lambda n, w: writers.gptq(n, w, 4))),
    "gptq, large groups": (gptq_config(4, 256), lambda s: every(s, 4, 256, lambda n, w: writers.gptq(n, w, 4))),
    "gptq, act-order": (
        gptq_config(4, 32, desc_act=True),
        lambda s: ordered(s, 4, 32, lambda n, w: writers.gptq(n, w, 4)),
    ),
    "gptq, act-order, zeros, 8 bits": (
        gptq_config(8, 32, False, desc_act=True),
        lambda s: ordered(s, 8, 32, lambda n, w: writers.gptq(n, w, 8), zeros=True),
    ),
    "packed": (
        packed_config(),
        lambda s: every(s, 4, 32, lambda n, w: writers.packed(n, w, 4), scale_dtype=torch.bfloat16),
    ),
    "packed, zeros": (
        packed_config(symmetric=False),
        lambda s: every(s, 4, 32, lambda n, w: writers.packed(n, w, 4, True, shape=False), zeros=True),
    ),
    "packed, a scale an output": (
        packed_config(4, -1),
        lambda s: every(s, 4, -1, lambda n, w: writers.packed(n, w, 4)),
    ),
    "packed, 8 bits": (packed_config(8), lambda s: every(s, 8, 32, lambda n, w: writers.packed(n, w, 8))),
    "packed, 8 bits, zeros": (
        packed_config(8, -1, False),
        lambda s: every(s, 8, -1, lambda n, w: writers.packed(n, w, 8, True), zeros=True),
    ),
    "packed, act-order": (
        packed_config(),
        lambda s: ordered(s, 4, 32, lambda n, w: writers.packed(n, w, 4, False, True)),
    ),
    "bytes": (bytes_config(), lambda s: every(s, 8, -1, lambda n, w: writers.plain_bytes(n, w, 8))),
}


def read(made: writers.Checkpoint, module: str) -> QuantisedWeight:
    """That linear of the checkpoint, as its format's reader has it."""
    scheme = read_scheme(read_json(made.directory / "config.json"))
    assert scheme is not None
    form = scheme.form(module)
    assert form is not None
    out_size, in_size = made.written[module].values.shape
    return form.read(Module(Checkpoint(made.directory), module, out_size, in_size), torch.float32)


def logits(directory: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> Tensor:
    """Of all rows of the prompts."""
    options = {"attention_backend": "reference", "model_impl": "quire", "dtype": "float32"} | options
    probe = probed_logits(engine(directory, **options), prompts, 1)[0]
    return torch.stack([probe.found[tuple(prompt[:end])] for prompt in prompts for end in range(1, len(prompt) + 1)])


def assert_means_its_numbers(made: writers.Checkpoint, most: float = 0.03, **options: Any) -> None:
    """The model is that of its numbers, but for the rounding of activations. most: of the divergence by that."""
    expected = logits(made.dequantised, **options)
    unrounded = logits(made.directory, quantization_activations="bf16", **options)
    torch.testing.assert_close(unrounded, expected, rtol=1e-4, atol=1e-4)
    assert 0 < divergence(logits(made.directory, **options), expected) < most


def divergence(found: Tensor, expected: Tensor) -> float:
    """Mean KL divergence in nats."""
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("case", quick(CASES, 5))
def test_the_integers_are_those_of_the_file(tmp_path: Path, case: str) -> None:
    config, one = CASES[case]
    sizes = {"intermediate_size": 160 if "smaller" in case else 384, "num_hidden_layers": 1}
    made = write(tmp_path, config, one(len(case)), **sizes)
    assert len(made.written) == 7
    for module, written in made.written.items():
        found = read(made, module)
        order = torch.arange(found.in_size) if found.order is None else found.order
        assert torch.equal(found.values.long(), torch.tensor(written.values)[:, order]), module
        by_input = [written.group_of[int(i)] for i in order]
        repeat = np.arange(found.in_size) // found.group_size
        assert torch.equal(found.scales[:, repeat], written.scales.float()[:, by_input]), module
        middle = torch.full_like(found.scales, 2 ** (found.bits - 1))
        zeros = middle if found.zeros is None else found.zeros
        assert torch.equal(zeros[:, repeat], torch.tensor(written.zeros).float()[:, by_input]), module
        assert torch.equal(found.dequantised(), written.weight()), module
        assert ("act-order" in case) == (found.order is not None)
        assert ("zeros" in case or "awq" in case) == (found.zeros is not None)


# One of each way to store integers; the test above reads all of them.
MULTIPLIED = (
    "awq", "gptq v1, zeros", "gptq, act-order", "gptq, last group smaller", "packed", "packed, act-order", "bytes",
)  # fmt: skip
MORE = [of_long_runs(case) for case in CASES if case not in MULTIPLIED]


@pytest.mark.parametrize("case", [*quick(MULTIPLIED, 3), *MORE])
def test_the_model_is_that_of_its_numbers(tmp_path: Path, case: str) -> None:
    config, one = CASES[case]
    made = write(tmp_path, config, one(len(case)), intermediate_size=160 if "smaller" in case else 384)
    assert_means_its_numbers(made)


@pytest.mark.parametrize("kind", quick(["Mixtral", "Qwen2", "Phi3", "GPTNeoX", "Bloom", "GPT2"], 1))
def test_families(tmp_path: Path, kind: str) -> None:
    """Biases, experts, and families that stack or reorder what the checkpoint has."""
    generator = np.random.default_rng(3)
    changes = {"n_embd": 96} if kind == "GPT2" else {"hidden_size": 96, "n_head": 6} if kind == "Bloom" else {}

    def one(module: str, weight: Tensor) -> tuple[Written, dict[str, Tensor]] | None:
        if module in ("lm_head", "embed_out") or module.endswith((".gate", "wte", "wpe")) or "embed" in module:
            return None
        shape = weight.T.shape if kind == "GPT2" else weight.shape
        made = drawn(generator, *shape, 4, 32)
        return made, writers.gptq(module, made, 4)

    made = write(tmp_path, gptq_config(), one, kind, **changes)
    assert_means_its_numbers(made, 0.1 if kind == "Mixtral" else 0.03)  # a router may choose another expert


LATENT_SIZES = {"hidden_size": 96, "moe_intermediate_size": 64, "q_lora_rank": 32, "num_attention_heads": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    spread(3, ["DeepseekV2", "DeepseekV3"], ["awq", "gptq v1, zeros", "gptq, act-order", "packed", "bytes"]),
)
def test_a_latent_is_made_of_the_numbers_that_the_integers_mean(tmp_path: Path, kind: str, case: str) -> None:
    """What makes keys and values of it becomes part of the query and the output: these linears stay numbers."""
    config, one = CASES[case]
    dense = {"first_k_dense_replace": 3} if case == "gptq, act-order" else {}  # experts have no orders that differ
    made = write(tmp_path, config, one(len(case)), kind, **LATENT_SIZES, **dense)
    assert sum("kv_b_proj" in module for module in made.written) == 3
    assert_means_its_numbers(made, 0.1)  # a router may choose another expert


@pytest.mark.slow
def test_parts_may_differ(tmp_path: Path) -> None:
    """Left out, of other bits, of other groups, by each format's own way to say so."""
    generator = np.random.default_rng(5)
    dynamic = {
        r"-:.*layers\.0\.mlp\.up_proj": {},
        r"+:.*layers\.1\..*k_proj": {"bits": 8, "group_size": 64},
        r".*layers\.2\.mlp\.gate_proj": {"sym": False},
    }

    def one(module: str, weight: Tensor) -> tuple[Written, dict[str, Tensor]] | None:
        if module == "lm_head" or "layers.0.mlp.up_proj" in module or "layers.2.self_attn.q" in module:
            return None
        bits, group_size = (8, 64) if "layers.1.self_attn.k" in module else (4, 32)
        made = drawn(generator, *weight.shape, bits, group_size, zeros="layers.2.mlp.gate" in module)
        return made, writers.gptq(module, made, bits)

    config = gptq_config(dynamic=dynamic, modules_to_not_convert=["layers.2.self_attn.q_proj"])
    made = write(tmp_path, config, one, "Qwen2", use_sliding_window=False)
    assert_means_its_numbers(made)


@pytest.mark.parametrize(
    "ignore", [["lm_head", "model.layers.1.mlp.down_proj"], ["lm_head", r"re:.*\.1\.mlp\.down"], ["model.layers.1"]]
)
def test_what_is_ignored_stays(tmp_path: Path, ignore: list[str]) -> None:
    def kept(module: str) -> bool:
        return module == "lm_head" or "layers.1.mlp.down_proj" in module or ignore[0] in module

    made = write(tmp_path, packed_config(ignore=ignore), every(6, 4, 32, lambda n, w: writers.packed(n, w, 4), kept))
    assert_means_its_numbers(made)


def test_a_quantised_output_projection(tmp_path: Path) -> None:
    one = every(8, 4, 32, lambda n, w: writers.gptq(n, w, 4), lambda module: False)
    made = write(tmp_path, gptq_config(lm_head=True), one, vocab_size=104, tie_word_embeddings=False)
    assert "lm_head" in made.written
    assert_means_its_numbers(made)


def test_biases_of_zeros_are_passed_over(tmp_path: Path) -> None:
    """Old writers gave every quantised linear one."""

    def stored(module: str, written: Written) -> dict[str, Tensor]:
        return writers.gptq(module, written, 4) | {f"{module}.bias": torch.zeros(len(written.values))}

    assert_means_its_numbers(write(tmp_path, gptq_config(), every(9, 4, 32, stored)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("awq", "awq int4, groups of 32, zeros"),
        ("gptq v1, 8 bits", "gptq int8, groups of 64"),
        ("gptq, act-order", "gptq int4, groups of 32, act-order"),
        ("gptq, a scale an output", "gptq int4, a scale an output"),
        ("bytes", "compressed-tensors int8, a scale an output, activations int8"),
    ],
)
def test_what_is_said_of_it(tmp_path: Path, case: str, expected: str) -> None:
    config, one = CASES[case]
    made = write(tmp_path, config, one(1))
    choice = choose(made.directory)
    assert choice.scheme is not None
    assert choice.scheme.description == expected
    model = load_model(made.directory, engine_config(attention_backend="reference"), load("reference"))
    plain = load_model(made.dequantised, engine_config(attention_backend="reference"), load("reference"))
    assert (model.quantisation, plain.quantisation) == (expected, None)
    assert model.weight_bytes == expected_weight_bytes(made.directory)
    assert plain.weight_bytes == expected_weight_bytes(made.dequantised)
    assert 0 < model.weight_bytes.total < plain.weight_bytes.total / 2
