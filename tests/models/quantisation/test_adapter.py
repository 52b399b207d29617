"""Quantised weights in transformers' own modelling code: the same readers, the same rounding at load."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config import engine_config
from quire.errors import ConfigError, ModelError
from quire.models import load_model
from quire.ops import load
from tests.marks import of_long_runs, spread
from tests.models.checkpoints import save
from tests.models.quantisation import writers
from tests.models.quantisation.test_formats import (
    CASES,
    assert_means_its_numbers,
    awq_config,
    divergence,
    gptq_config,
    logits,
)
from tests.models.quantisation.writers import SIZES, Written, drawn, write

pytestmark = pytest.mark.slow

THEIRS = {"model_impl": "transformers"}


@pytest.mark.parametrize("case", ["gptq, act-order", "bytes", *map(of_long_runs, ["awq", "gptq v1", "packed, zeros"])])
def test_every_format(tmp_path: Path, case: str) -> None:
    config, one = CASES[case]
    made = write(tmp_path, config, one(len(case)), intermediate_size=384)
    assert_means_its_numbers(made, **THEIRS)
    found = logits(made.directory, **THEIRS)
    torch.testing.assert_close(found, logits(made.directory), rtol=1e-3, atol=1e-1)  # roundings of x may flip


@pytest.mark.parametrize(("kind", "tied"), [("GPT2", False), ("Olmo", True), of_long_runs("Qwen2", True)])
def test_families(tmp_path: Path, kind: str, tied: bool) -> None:
    """Biases, a Conv1D, and one that has no decoder here."""
    generator = np.random.default_rng(3)

    def one(module: str, weight: Tensor) -> tuple[Written, dict[str, Tensor]] | None:
        if module == "lm_head" or module.endswith(("wte", "wpe")):
            return None
        shape = weight.T.shape if kind == "GPT2" else weight.shape
        made = drawn(generator, *shape, 4, 32)
        bias = {f"{module}.bias": torch.zeros(shape[0])} if "o_proj" in module else {}
        return made, writers.gptq(module, made, 4) | bias

    changes = {"n_embd": 96} if kind == "GPT2" else {}
    made = write(tmp_path, gptq_config(), one, kind, tie_word_embeddings=tied, **changes)
    assert_means_its_numbers(made, **THEIRS)


@pytest.mark.parametrize(
    ("options", "tied"),
    spread(2, [{"quantization": "int8"}, {"quantization": "int4", "quantization_head": "int4"}], [True, False]),
)
def test_at_load(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    """As Quire's own decoder does it."""
    save(tmp_path, **SIZES, tie_word_embeddings=tied)
    found = logits(tmp_path, **options, quantization_activations="bf16", **THEIRS)
    expected = logits(tmp_path, **options, quantization_activations="bf16")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert divergence(logits(tmp_path, **options, **THEIRS), logits(tmp_path, **options)) < 0.03


def test_what_is_said_of_it(tmp_path: Path) -> None:
    config, one = CASES["awq"]
    made = write(tmp_path, config, one(1))
    ours, theirs = (
        load_model(made.directory, engine_config(model_impl=impl), load("reference"))
        for impl in ("quire", "transformers")
    )
    assert theirs.quantisation == ours.quantisation == "awq int4, groups of 32, zeros"
    for use in ("layers", "head", "looked_up"):
        assert getattr(theirs.weight_bytes, use) == pytest.approx(getattr(ours.weight_bytes, use), rel=0.02)
    with pytest.raises(ConfigError, match="quantised already"):
        load_model(made.directory, engine_config(quantization="int8", **THEIRS), load("reference"))


def test_routers_and_stacked_experts_stay(tmp_path: Path) -> None:
    save(tmp_path, "Mixtral", **SIZES)
    model = load_model(tmp_path, engine_config(quantization="int8", **THEIRS), load("reference"))
    assert model.quantisation == "int8 at load; output projection int8 at load; experts not quantised"


def refused(directory: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        load_model(directory, engine_config(**THEIRS), load("reference"))


def test_broken_files(tmp_path: Path) -> None:
    config, one = CASES["awq"]
    directory = write(tmp_path, config, one(1)).directory
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"

    def saved(changes: dict[str, Tensor | None]) -> Path:
        changed = tensors | changes
        kept = {key: tensor.contiguous() for key, tensor in changed.items() if tensor is not None}
        save_file(kept, directory / "model.safetensors")
        return directory

    refused(saved({f"{name}.scales": None}), r"lacks 1 tensors, among them .*q_proj\.scales")
    refused(saved({f"{name}.scales": tensors[f"{name}.scales"][:1]}), r"q_proj\.scales has shape \(1, 128\)")
    refused(saved({f"{name}.weight_scale": torch.ones(4)}), r"has 1 unexpected keys, among them .*q_proj\.weight_scale")
    refused(saved({f"{name}.bias": torch.ones(128)}), r"has 1 unexpected keys, among them .*q_proj\.bias")


def test_stacked_experts_of_integers_are_refused(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)

    def one(module: str, weight: Tensor) -> tuple[Written, dict[str, Tensor]] | None:
        if module == "lm_head" or module.endswith("gate"):
            return None
        made = drawn(generator, *weight.shape, 4, 32, zeros=True)
        return made, writers.awq(module, made, 4)

    refused(write(tmp_path, awq_config(), one, "Mixtral").directory, "experts.* keys, among them")
