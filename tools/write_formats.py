"""Write checkpoints of tiny models with the library compressed-tensors. tools/check_formats.py starts this program.

`python write_formats.py DIRECTORY CASE...` creates a directory for each case with `quantised` and `plain`: the
checkpoint, and the same weights decompressed by the library.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams

FOUR = {"num_bits": 4, "strategy": "group", "group_size": 32}
CASES: dict[str, dict[str, Any]] = {
    "W4A16 symmetric": {"weights": FOUR},
    "W4A16 asymmetric": {"weights": FOUR | {"symmetric": False}},
    "W4A16 with g_idx": {"weights": FOUR | {"actorder": "group"}},
    "W8A16, a scale an output": {"weights": {"num_bits": 8, "strategy": "channel"}},
    "W8A8": {
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    },
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@torch.no_grad()
def write(directory: Path, scheme: dict[str, Any], seed: int) -> None:
    """Write the checkpoint of one case and its decompressed weights."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    for parameter in model.parameters():  # with the usual, small initialisation attention would have little effect
        parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.normal_(1, 0.1)
    group = {"targets": ["Linear"], **scheme}
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and hasattr(module, "weight_scale"):
            choose_scales(module, QuantizationArgs(**scheme["weights"]))
    stored = "int-quantized" if "input_activations" in scheme else "pack-quantized"
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=stored)
    compressor.compress_model(model)
    model.save_pretrained(directory / "quantised")
    compressor.update_config(str(directory / "quantised"))
    compressor.decompress_model(model)
    names = {name for name, _ in transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).named_parameters()}
    plain = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    model.save_pretrained(directory / "plain", state_dict=plain)


def choose_scales(module: Any, args: QuantizationArgs) -> None:
    """Set scales by the extreme values of each group, which with act-order is a random subset of the inputs."""
    weight, groups = module.weight, module.weight_scale.shape[1]
    order = torch.arange(weight.shape[1])
    if hasattr(module, "weight_g_idx"):
        order = torch.randperm(weight.shape[1])
        module.weight_g_idx[order] = torch.arange(weight.shape[1], dtype=module.weight_g_idx.dtype) // args.group_size
    by_group = weight[:, order].unflatten(1, (groups, -1))
    scales, zeros = calculate_qparams(by_group.amin(2), by_group.amax(2), args)
    module.weight_scale.copy_(scales)
    module.weight_zero_point.copy_(zeros)


if __name__ == "__main__":
    for number, name in enumerate(sys.argv[2:]):
        write(Path(sys.argv[1]) / name, CASES[name], number)
