"""16-bit checkpoints whose weights are rounded at load, and options that contradict a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import engine_config
from quire.errors import ConfigError, ModelError
from quire.models import choose, load_model
from quire.models.quantisation.policy import Quantisation
from quire.models.weights import Checkpoint, Weights
from quire.ops import load
from quire.ops.weights.quantised import QuantisedWeight, quantised
from quire_bench.engine import loading
from tests.marks import of_long_runs, spread
from tests.models.checkpoints import save
from tests.models.quantisation import writers
from tests.models.quantisation.test_formats import CASES, divergence, gptq_config, logits
from tests.models.quantisation.writers import SIZES, drawn, write


def weights_of(directory: Path, **options: Any) -> Weights:
    config, choice = engine_config(model_impl="quire", **options), choose(directory, "quire")
    checkpoint = Checkpoint(directory)
    sources = choice.family.weight_sources(choice.config, checkpoint.names)
    quantisation = Quantisation.of(config, choice.scheme)
    return Weights(checkpoint, sources, choice.config, torch.bfloat16, "cpu", quantisation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "head", "tied"),
    spread(2, ["int4", "int8", None], [None, "int8", "int4", "none"], [True, False]),
)
def test_what_is_rounded(tmp_path: Path, quantization: str | None, head: str | None, tied: bool) -> None:
    """All linears but routers, and the output projection as it is asked for; norms and embeddings stay."""
    save(tmp_path, "Mixtral", **SIZES, tie_word_embeddings=tied, dtype=torch.bfloat16)
    weights = weights_of(tmp_path, quantization=quantization, quantization_head=head)
    plain = weights_of(tmp_path)
    bits = {"int4": 4, "int8": 8, "none": None, None: None}
    for name in weights:
        before, (found, usual) = weights.nbytes, (weights[name], plain[name])
        use = "experts" if ".experts." in name else "layers" if "layers" in name or "norm" in name else "head"
        use = "looked_up" if name == "embedding" and not tied else use
        assert weights.nbytes == replace(before, **{use: getattr(before, use) + found.nbytes})
        assert isinstance(usual, torch.Tensor)
        if name == ("embedding" if tied else "lm_head"):
            expected = bits[head] if head is not None else None if quantization is None else 8
        elif "norm" in name or "router" in name or name == "embedding":
            expected = None
        else:
            expected = bits[quantization]
        if expected is None:
            assert isinstance(found, torch.Tensor), name
            assert torch.equal(found, usual), name
            continue
        assert isinstance(found, QuantisedWeight), name
        columns = usual.shape[1]
        size = columns if expected == 8 else {128: 128, 160: 32}[columns]  # groups that are whole
        same = quantised(usual, expected, size, torch.bfloat16)
        assert (found.bits, found.group_size, found.dtype) == (expected, size, torch.bfloat16)
        assert torch.equal(found.values, same.values), name
        assert torch.equal(found.scales, same.scales), name
        assert found.zeros is None
        assert found.order is None
        assert found.activation_group == 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "quantization"), spread(2, ["Llama", "Qwen2", "Mixtral", "GPT2", "Bloom"], ["int8", "int4"])
)
def test_the_loss_is_small(tmp_path: Path, kind: str, quantization: str) -> None:
    """Of int8 against the checkpoint; of int4, too coarse for random numbers, against its own."""
    save(tmp_path, kind, **(SIZES if kind in ("Llama", "Qwen2", "Mixtral") else {}))
    alike = {} if quantization == "int8" else {"quantization": "int4", "quantization_activations": "bf16"}
    expected = logits(tmp_path, **alike)
    loss = divergence(logits(tmp_path, quantization=quantization), expected)
    assert 0 < loss < (0.1 if kind == "Mixtral" else 0.03)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_activations_that_stay(tmp_path: Path, quantization: str) -> None:
    """The model is that whose weights are the rounded ones."""
    save(tmp_path / "one", **SIZES, vocab_size=104)
    save(tmp_path / "two", **SIZES, vocab_size=104)
    tensors = load_file(tmp_path / "two" / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name:
            bits = 8 if name == "lm_head.weight" or quantization == "int8" else 4
            columns = tensor.shape[1]
            group_size = {128: 128, 160: 32}[columns] if bits == 4 else columns
            tensors[name] = quantised(tensor, bits, group_size, torch.float32).dequantised()
    save_file(tensors, tmp_path / "two" / "model.safetensors")
    found = logits(tmp_path / "one", quantization=quantization, quantization_activations="bf16")
    torch.testing.assert_close(found, logits(tmp_path / "two"), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not loading.STATUS.exists(), reason="only Linux tells how much memory is anonymous")
@pytest.mark.parametrize("quantization", ["int8", of_long_runs("int4")])
def test_loading_takes_little_more_memory_than_what_stays(tmp_path: Path, quantization: str) -> None:
    """And what stays is little more than the integers: the heap keeps some MiB, whatever the size of the model.

    That is of the numbers that are on their way, a piece of a weight at a time, and of the interpreter's own.
    """
    shape = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    save(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=True, **shape)
    found = loading.measure(str(tmp_path), quantization=quantization)
    assert found is not None
    heap = 8 * 2**20
    assert found.resident <= found.peak <= 1.15 * found.resident + heap
    stored = load_model(tmp_path, engine_config(quantization=quantization), load()).weight_bytes.total
    assert stored <= found.resident <= 1.15 * stored + heap


def test_what_is_said_of_it(tmp_path: Path) -> None:
    save(tmp_path, **SIZES)
    plain = load_model(tmp_path, engine_config(), load("reference"))
    for options, expected in (
        ({"quantization": "int4"}, "int4 at load, groups of 128; output projection int8 at load"),
        ({"quantization": "int8", "quantization_head": "none"}, "int8 at load"),
        ({"quantization_head": "int8"}, "output projection int8 at load"),
    ):
        model = load_model(tmp_path, engine_config(**options), load("reference"))
        assert model.quantisation == expected
        assert 0 < model.weight_bytes.total < plain.weight_bytes.total
    unrounded = engine_config(quantization="int8", quantization_head="none", quantization_activations="bf16")
    model = load_model(tmp_path, unrounded, load("reference"))
    assert model.quantisation == "int8 at load; multiplied unrounded"
    assert model.weight_bytes == plain.weight_bytes


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quantization": "int3"}, "quantization is 'int3'; it must be 'int4' or 'int8'"),
        ({"quantization_head": "fp8"}, "quantization_head is 'fp8'; it must be one of 'int8', 'int4', 'none'"),
        ({"quantization_activations": "no"}, "quantization_activations is 'no'; it must be 'int8' or 'bf16'"),
    ],
)
def test_options_that_there_are_not(options: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        engine_config(**options)


def test_options_that_contradict_the_checkpoint(tmp_path: Path) -> None:
    config, one = CASES["awq"]
    made = write(tmp_path, config, one(1))
    for directory, options, match in (
        (made.directory, {"quantization": "int4"}, "quantised already .awq int4, groups of 32, zeros.; leave it out"),
        (made.dequantised, {"quantization_activations": "bf16"}, "is 'bf16', and no weight is quantised"),
    ):
        with pytest.raises(ConfigError, match=match):
            load_model(directory, engine_config(**options), load("reference"))


def test_the_output_projection_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    """It is rounded where that is asked for, unless the file has integers."""
    config, one = CASES["awq"]
    made = write(tmp_path / "plain head", config, one(1), tie_word_embeddings=False)
    assert isinstance(weights_of(made.directory)["lm_head"], torch.Tensor)
    found = weights_of(made.directory, quantization_head="int8")["lm_head"]
    assert isinstance(found, QuantisedWeight)
    assert found.bits == 8
    generator = np.random.default_rng(1)

    def all_of_them(module: str, weight: torch.Tensor) -> Any:
        made = drawn(generator, *weight.shape, 4, 32)
        return made, writers.gptq(module, made, 4)

    sizes = {"vocab_size": 104, "tie_word_embeddings": False}
    made = write(tmp_path / "head", gptq_config(lm_head=True), all_of_them, **sizes)
    with pytest.raises(ConfigError, match="quantization_head is 'int8', and the checkpoint's output projection is"):
        weights_of(made.directory, quantization_head="int8")
    found = weights_of(made.directory, quantization_head="none")["lm_head"]
    assert isinstance(found, QuantisedWeight)
    assert found.bits == 4


def test_a_weight_that_is_not_finite(tmp_path: Path) -> None:
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp_in\.weight: the weight holds nan at \[83, 4\]"):
        load_model(tmp_path, engine_config(quantization="int4"), load("reference"))
