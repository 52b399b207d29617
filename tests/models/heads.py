"""Checkpoints with a random draft head, in the layout that their family publishes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AFTER = ("Glm4Moe", "DeepseekV3", "GlmMoeDsa")  # families whose head is the layer after the last one


def add_head(directory: Path, kind: str, layer: int, num_layers: int) -> None:
    """Give a checkpoint a head whose layer has other weights, of the same shapes as `layer` of the model."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(1)
    hidden_size = tensors["model.norm.weight"].shape[0]
    ends = {
        "mtp.fc.weight": (hidden_size, 2 * hidden_size),
        "mtp.pre_fc_norm_embedding.weight": (hidden_size,),
        "mtp.pre_fc_norm_hidden.weight": (hidden_size,),
        "mtp.norm.weight": (hidden_size,),
    }
    own = "mtp.layers.0."
    if kind in AFTER:
        own = f"model.layers.{num_layers}."
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        ends = {f"{own}{name}.weight": shape for name, shape in zip(names, ends.values(), strict=True)}
    if kind == "Ernie4_5_Moe":  # the model's last norm is the head's, too
        own = "model.mtp_block.0."
        names = ("linear_proj", "emb_norm", "hidden_norm")
        ends = {f"model.mtp_{name}.0.weight": shape for name, shape in zip(names, ends.values(), strict=False)}
    model = f"model.layers.{layer}."
    like = {own + name.removeprefix(model): tensor for name, tensor in tensors.items() if name.startswith(model)}
    dtype = tensors["model.norm.weight"].dtype
    shapes = {name: tuple(tensor.shape) for name, tensor in like.items()} | ends
    tensors |= {name: random(shape).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, path, {"format": "pt"})


def random(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) * 0.2 if len(shape) > 1 else 1 + torch.randn(shape) * 0.1
