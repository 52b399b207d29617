"""Quantised checkpoints that are not served, and those that are broken: each in a sentence that says what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config import engine_config
from quire.errors import ModelError
from quire.models import load_model
from quire.models.quantisation.policy import read_scheme
from quire.ops import load
from tests.models.quantisation import writers
from tests.models.quantisation.test_formats import (
    awq_config,
    bytes_config,
    every,
    gptq_config,
    ordered,
    packed_config,
)
from tests.models.quantisation.writers import write

FIRST = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        *(
            (
                {"quant_method": method},
                f"stored as quant_method {method}, which is not served; take .*16-bit checkpoint",
            )
            for method in ("bitsandbytes", "torchao", "fbgemm_fp8", "hqq", "eetq", "quanto", "openvino")
        ),
        ({"bits": 4}, "stored as quant_method None, which is not served"),
        ("int4", "quantization_config is 'int4'; it must be an object"),
        (awq_config(version="gemv"), "stored as AWQ version 'gemv', which is not served; take .*awq \\(gemm\\)"),
        (awq_config(version="marlin"), "AWQ version 'marlin'"),
        (awq_config(bits=8), "bits is 8; format 'awq' serves 4 only"),
        (awq_config(zero_point=False), "zero_point is False"),
        (awq_config(48), "group_size is 48; it must be one of 32, 64, 128, a multiple of 128, or -1"),
        (awq_config(modules_to_not_convert="gate"), "modules_to_not_convert is 'gate'; it must be a list"),
        (awq_config(rotation="hadamard"), "format 'awq' does not understand: rotation='hadamard'"),
        (gptq_config(3), "bits is 3; format 'gptq' serves 4, 8 only"),
        (gptq_config(4, True), "group_size is True"),
        (gptq_config(checkpoint_format="marlin"), "GPTQ in the format 'marlin'"),
        (gptq_config(is_marlin_format=True), "GPTQ in the format 'marlin'"),
        (gptq_config(dynamic={"(": {}}), "dynamic has '\\('"),
        (gptq_config(dynamic={"a": {"bits": 2}}), "bits is 2"),
        (gptq_config(dynamic={"a": 4}), "dynamic's 'a' is 4; it must be an object"),
        (gptq_config(adapter={"rank": 32}), "does not understand: adapter="),
        *(
            (packed_config(format=name), f"compressed-tensors in the format '{name}', which is not served")
            for name in ("float-quantized", "marlin-24", "nvfp4-pack-quantized", "naive-quantized")
        ),
        (packed_config(kv_cache_scheme={"num_bits": 8}), "compressed-tensors with a kv_cache_scheme"),
        (packed_config(transform_config={"R1": {}}), "compressed-tensors with a transform_config"),
        (packed_config(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity of the format 'sparse-24-bitmask'"),
        (packed_config(config_groups={}), "no config_groups"),
        (packed_config(config_groups={"a": 1}), "config_groups' a is 1"),
        (packed_config(2), "weights of 2 bits"),
    ],
)
def test_a_config_that_is_not_served(config: Any, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_scheme({"quantization_config": config})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"strategy": "tensor"}, "input_activations of"),
        ({"dynamic": False}, "input_activations of"),
        ({"num_bits": 4}, "input_activations of"),
        ({"type": "float"}, "input_activations of"),
        ({"clip": 2.0}, "does not understand: clip=2.0"),
    ],
)
def test_activations_that_are_not_served(change: dict[str, Any], match: str) -> None:
    config = bytes_config()
    config["config_groups"]["group_0"]["input_activations"] |= change
    with pytest.raises(ModelError, match=match):
        read_scheme({"quantization_config": config})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"type": "float"}, "weights of 8 bits of type 'float'"),
        ({"strategy": "block"}, "strategy is 'block'"),
        ({"actorder": "maybe"}, "actorder 'maybe'"),
        ({"symmetric": False}, "int8 activations and weights that have zeros or groups"),
        ({"strategy": "group", "group_size": 32}, "int8 activations and weights that have zeros or groups"),
        ({"dynamic": True}, "dynamic is True"),
    ],
)
def test_weights_that_are_not_served(change: dict[str, Any], match: str) -> None:
    config = bytes_config()
    config["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(ModelError, match=match):
        read_scheme({"quantization_config": config})


def awq(tmp_path: Path) -> Path:
    one = every(0, 4, 32, lambda name, w: writers.awq(name, w, 4), zeros=True)
    return write(tmp_path, awq_config(), one).directory


def gptq(tmp_path: Path) -> Path:
    return write(tmp_path, gptq_config(), every(0, 4, 32, lambda name, w: writers.gptq(name, w, 4))).directory


def packed(tmp_path: Path) -> Path:
    one = every(0, 4, 32, lambda name, w: writers.packed(name, w, 4, True), zeros=True)
    return write(tmp_path, packed_config(symmetric=False), one).directory


def eight(tmp_path: Path) -> Path:
    return write(tmp_path, bytes_config(), every(0, 8, -1, lambda name, w: writers.plain_bytes(name, w, 8))).directory


def act_order(tmp_path: Path) -> Path:
    one = ordered(0, 4, 32, lambda name, w: writers.packed(name, w, 4, False, True))
    return write(tmp_path, packed_config(), one).directory


def with_value(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[1] = value
    return tensor


Change = Callable[[Tensor], Tensor | None]
BROKEN: list[tuple[Callable[[Path], Path], str, Change, str]] = [
    (awq, "qweight", lambda t: None, r"lacks 1 tensors, among them model\.layers\.0\.self_attn\.q_proj\.qweight"),
    (awq, "qzeros", lambda t: None, r"lacks 1 tensors, among them .*q_proj\.qzeros"),
    (awq, "scales", lambda t: None, r"lacks 1 tensors, among them .*q_proj\.scales"),
    (awq, "qweight", lambda t: t.T.contiguous(), r"q_proj\.qweight has shape \(16, 128\); .* ask for \(128, 16\)"),
    (awq, "qzeros", lambda t: t[:1], r"q_proj\.qzeros has shape \(1, 16\); .* ask for \(4, 16\)"),
    (awq, "scales", lambda t: t[:, :9], r"q_proj\.scales has shape \(4, 9\); .* ask for \(4, 128\)"),
    (awq, "qweight", lambda t: t.long(), r"q_proj\.qweight is int64; its format has int32"),
    (awq, "scales", lambda t: t.int(), r"q_proj\.scales is int32; its format has float16 or bfloat16 or float32"),
    (awq, "scales", lambda t: with_value(t, float("nan")), r"q_proj\.scales holds nan at \[0, 1\]; all scales must be"),
    (gptq, "scales", lambda t: with_value(t, float("inf")), r"q_proj\.scales holds inf at \[0, 1\]"),
    (
        gptq,
        "qzeros",
        lambda t: t - 2,
        r"q_proj\.qzeros holds the zero 5; .* 4 bits has 7 \(version 1\) or 8 \(version 2\)",
    ),
    (gptq, "qzeros", lambda t: t + 1, r"q_proj\.qzeros holds both 7 and 8"),
    (gptq, "g_idx", lambda t: t + 1, r"q_proj\.g_idx holds 4 at \[96\]; its groups are 0\.\.3"),
    (gptq, "g_idx", lambda t: t - 1, r"q_proj\.g_idx holds -1 at \[0\]; its groups are 0\.\.3"),
    (gptq, "g_idx", lambda t: with_value(t, 2), r"q_proj\.g_idx puts 31 inputs into group 0; groups of 32 are served"),
    (gptq, "g_idx", lambda t: t[:5], r"q_proj\.g_idx has shape \(5,\)"),
    (
        packed,
        "weight_shape",
        lambda t: t + 1,
        r"q_proj\.weight_shape is \[129, 129\]; config.json asks for \[128, 128\]",
    ),
    (packed, "weight_zero_point", lambda t: None, r"lacks 1 tensors, among them .*q_proj\.weight_zero_point"),
    (packed, "weight_packed", lambda t: None, r"lacks 1 tensors, among them .*q_proj\.weight_packed"),
    (packed, "weight_scale", lambda t: t.T.contiguous(), r"q_proj\.weight_scale has shape \(4, 128\)"),
    (eight, "weight_scale", lambda t: None, r"q_proj\.weight is int8, without scales to convert it with"),
    (eight, "weight", lambda t: t.short(), r"q_proj\.weight is int16; its format has int8"),
    (act_order, "weight_g_idx", lambda t: with_value(t, 9), r"q_proj\.weight_g_idx holds 9 at \[1\]"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind", "change", "match"), BROKEN)
def test_a_broken_file(tmp_path: Path, make: Callable[[Path], Path], kind: str, change: Change, match: str) -> None:
    directory = make(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    changed = change(tensors.pop(f"{FIRST}.{kind}"))
    if changed is not None:
        tensors[f"{FIRST}.{kind}"] = changed.contiguous()
    save_file(tensors, directory / "model.safetensors")
    refused(directory, match)


def refused(directory: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        load_model(directory, engine_config(model_impl="quire"), load("reference"))


def test_integers_beyond_their_bits(tmp_path: Path) -> None:
    directory = eight(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    (directory / "config.json").write_text(json.dumps(config))
    refused(directory, r"q_proj\.weight holds -\d+; integers of 4 bits lie in -8\.\.7")


def test_a_group_that_does_not_divide(tmp_path: Path) -> None:
    one = every(0, 4, 64, lambda name, w: writers.awq(name, w, 4), zeros=True)
    directory = write(tmp_path, awq_config(64), one).directory
    refused(directory, r"down_proj has 160 inputs, which groups of 64 do not divide")


def test_a_size_that_fills_no_word(tmp_path: Path) -> None:
    one = every(0, 4, -1, lambda name, w: writers.gptq(name, w, 4))
    directory = write(tmp_path, gptq_config(4, -1), one, intermediate_size=164).directory
    refused(directory, r"gate_proj has 164 outputs; its format packs 8 of them into a word")


def test_tensors_that_nothing_asks_for(tmp_path: Path) -> None:
    """A format's tensors without its config, those of another format, and a bias that is not zero."""
    directory = gptq(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {f"{FIRST}.bias": torch.ones(128)}, directory / "model.safetensors")
    refused(directory, r"has 1 tensors that this family does not use, among them .*q_proj\.bias")
    save_file(tensors | {f"{FIRST}.weight_scale": torch.ones(128)}, directory / "model.safetensors")
    refused(directory, r"has 1 tensors that this family does not use, among them .*q_proj\.weight_scale")
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "quantization_config"})
    )
    refused(
        directory, r"lacks 21 tensors, among them .*\.qweight is there, and config\.json has no quantization_config"
    )


def test_experts_whose_parts_differ(tmp_path: Path) -> None:
    one = ordered(0, 4, 32, lambda name, w: writers.gptq(name, w, 4))

    def two(module: str, weight: Tensor) -> Any:
        return one(module, weight) if ".w1" in module else None

    directory = write(tmp_path, gptq_config(desc_act=True), two, "Mixtral").directory
    refused(directory, "int4 in groups of 32 of 128 inputs, in a separate order, not quantised.*experts only")
