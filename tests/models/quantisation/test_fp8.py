"""FP8 checkpoints: of the labs and of compressed-tensors, each the model that its numbers and scales mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config import engine_config
from quire.errors import ConfigError, ModelError
from quire.models import expected_weight_bytes, load_model, read_json
from quire.ops import load
from tests.marks import quick
from tests.models.checkpoints import engine, probed_logits, save
from tests.models.quantisation.test_formats import logits

SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 32}
KEPT = ("embed", "norm", "lm_head", ".router.", "mlp.gate.", "shared_expert_gate", "A_log", "conv1d", "dt_bias")


def labs(**changes: Any) -> dict[str, Any]:
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return scheme | changes


def floats(strategy: str, activations: dict[str, Any], **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    group = {"targets": ["Linear"], "weights": weights | changes, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
# config.json; what the scales' tensors are called; outputs and inputs that share one: 0 means all
CASES: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "labs, blocks": (labs(), "weight_scale_inv", (128, 128)),
    "labs, large blocks": (labs(weight_block_size=[64, 256]), "weight_scale_inv", (64, 256)),
    "labs, one scale": (labs(weight_block_size=None, activation_scheme="static"), "weight_scale", (0, 0)),
    "tensor": (floats("tensor", TOKEN | {"strategy": "tensor", "dynamic": False}), "weight_scale", (0, 0)),
    "channel": (floats("channel", TOKEN), "weight_scale", (1, 0)),
    "block": (floats("block", TOKEN, block_structure=[128, 128]), "weight_scale", (128, 128)),
}


def stored(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 numbers of a weight [..., out, in], their scales, and what they mean: fp32."""
    high, wide = block[0] or weight.shape[-2], block[1] or weight.shape[-1]
    rows, columns = -(-weight.shape[-2] // high), -(-weight.shape[-1] // wide)
    gen = torch.Generator().manual_seed(weight.numel())
    scales = torch.rand(*weight.shape[:-2], rows, columns, generator=gen) * 2e-3 + 1e-4
    repeated = scales.repeat_interleave(high, -2)[..., : weight.shape[-2], :]
    repeated = repeated.repeat_interleave(wide, -1)[..., : weight.shape[-1]]
    numbers = (weight.float() * 5 / repeated).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * repeated


def published(directory: Path, case: str, kind: str = "Llama", **changes: Any) -> tuple[Path, Path]:
    """A checkpoint, and the same model in fp32."""
    scheme, scale_kind, block = CASES[case]
    packed, plain = directory / "packed", directory / "plain"
    for target in (packed, plain):
        save(target, kind, **(SIZES | changes))
    tensors, meant = {}, load_file(plain / "model.safetensors")
    for name, tensor in load_file(packed / "model.safetensors").items():
        if tensor.dim() < 2 or any(part in name for part in KEPT):
            tensors[name] = tensor
            continue
        numbers, scales, meant[name] = stored(tensor, block)
        scales = scales.flatten()[:1] if block == (0, 0) else scales
        whole = name.removesuffix(".weight")
        tensors[name] = numbers
        scale_name = f"{whole}.{scale_kind}" if whole != name else f"{name}_{scale_kind.removeprefix('weight_')}"
        tensors[scale_name] = scales
        if scheme.get("activation_scheme") == "static" or case == "tensor":
            tensors[f"{whole}.input_scale"] = torch.tensor(0.5)
    save_file(tensors, packed / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / "model.safetensors")
    content = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(content | {"quantization_config": scheme}))
    return packed, plain


@pytest.mark.parametrize("case", quick(CASES, 2))
def test_the_model_is_that_of_its_numbers(tmp_path: Path, case: str) -> None:
    packed, plain = published(tmp_path, case)
    expected = logits(plain)
    for backend in ("reference", "cpu"):
        found = logits(packed, attention_backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    model = load_model(packed, engine_config(dtype="bfloat16"), load())
    assert "e4m3" in model.quantisation
    assert "multiplied in 16 bits" in model.quantisation
    half = load_model(plain, engine_config(dtype="bfloat16"), load()).weight_bytes.layers
    assert 0.5 < model.weight_bytes.layers / half < 0.54
    raw = read_json(packed / "config.json") | {"dtype": "bfloat16"}
    (packed / "config.json").write_text(json.dumps(raw))
    assert expected_weight_bytes(packed) == model.weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Phi3", {"hidden_size": 128, "num_attention_heads": 8}),
        ("Qwen3Moe", {}),
        ("Qwen3_5Moe", {}),
        ("DeepseekV3", {"moe_intermediate_size": 64, "q_lora_rank": 32, "num_attention_heads": 6}),
    ],
)
def test_families(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """Rows that are stacked, experts one by one and in one tensor, and a latent, which is made of plain numbers."""
    packed, plain = published(tmp_path, "labs, blocks", kind, **changes)
    torch.testing.assert_close(logits(packed), logits(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_rows_keep_their_bits(tmp_path: Path) -> None:
    """In bf16, by the native kernels: alone, in a batch, and in chunks."""
    packed, _ = published(tmp_path, "channel")
    prompts = [list(range(2, 60)), [5, 6, 7], list(range(30, 3, -1))]
    (together, tokens) = probed_logits(engine(packed, dtype="bfloat16"), prompts, 8)
    for i, prompt in enumerate(prompts):
        alone, same = probed_logits(engine(packed, dtype="bfloat16", max_num_batched_tokens=16), [prompt], 8)
        assert same["r0"] == tokens[f"r{i}"]
        assert all(torch.equal(found, together.found[row]) for row, found in alone.found.items())


DOWN = "model.layers.1.mlp.down_proj"


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name])

    return apply


def with_nan(weight: Tensor) -> Tensor:
    codes = weight.view(torch.uint8).clone()
    codes[3, 4] = 0xFF
    return codes.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed(f"{DOWN}.weight", with_nan), rf"{DOWN}: codes holds NaN at \[3, 4\]"),
        (changed(f"{DOWN}.weight_scale_inv", lambda x: x * torch.inf), rf"{DOWN}.weight_scale_inv holds inf at"),
        (changed(f"{DOWN}.weight_scale_inv", lambda x: x[:1].clone()), rf"{DOWN}.weight_scale_inv has shape \(1, 3\)"),
        (changed(f"{DOWN}.weight", lambda x: x[:-1].clone()), rf"{DOWN}.weight has shape \(191, 320\)"),
        (changed(f"{DOWN}.weight", lambda x: x.float().to(torch.float8_e5m2)), "is float8_e5m2; .* float8_e4m3fn"),
        (lambda tensors: tensors.pop(f"{DOWN}.weight_scale_inv"), rf"{DOWN}.weight is float8_e4m3fn, without scales"),
        (lambda tensors: tensors.pop(f"{DOWN}.weight"), rf"lacks 1 tensors, among them {DOWN}.weight"),
    ],
)
def test_a_file_that_is_broken(tmp_path: Path, change: Callable[[dict[str, Tensor]], None], match: str) -> None:
    packed, _ = published(tmp_path, "labs, blocks")
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelError, match=match):
        engine(packed)


@pytest.mark.parametrize(
    ("scheme", "match"),
    [
        (labs(fmt="e5m2"), "FP8 of the kind 'e5m2', which is not served"),
        (labs(weight_block_size=[128]), r"weight_block_size is \[128\]; it must be \[outputs, inputs\]"),
        (labs(weight_block_size=[128, 64]), r"weight_block_size is \[128, 64\]; .* a multiple of 128"),
        (labs(activation_scheme="other"), "activation_scheme is 'other'"),
        (labs(rotation="hadamard"), "does not understand: rotation="),
        (floats("token", TOKEN), "strategy is 'token'"),
        (floats("tensor", TOKEN, num_bits=4), "num_bits is 4"),
        (floats("group", TOKEN, group_size=32), r"group_size is \[1, 32\]"),
    ],
)
def test_a_config_that_is_not_served(tmp_path: Path, scheme: dict[str, Any], match: str) -> None:
    packed, _ = published(tmp_path, "labs, blocks")
    content = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(content | {"quantization_config": scheme}))
    with pytest.raises(ModelError, match=match):
        engine(packed)


def test_options_that_contradict_it(tmp_path: Path) -> None:
    packed, _ = published(tmp_path, "labs, blocks")
    with pytest.raises(ConfigError, match=r"the checkpoint is quantised already \(fp8 e4m3, blocks of 128 x 128"):
        engine(packed, quantization="int8")
