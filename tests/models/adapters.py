"""Random adapters as PEFT saves them, and the models that they make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.models import EMBEDDED
from quire.models.lora.peft import CONFIG, TENSORS
from quire.models.weights import Checkpoint

SPREAD = 0.3  # of the matrices' numbers, so that an adapter matters as much as the weights
BASE = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_alpha": 12, "r": 6, "lora_dropout": 0.1}
Shapes = Mapping[str, tuple[int, int]]  # in and out, by module


def linears(model: Any) -> Shapes:
    """The linears of a model of transformers but its output projection."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and module is not model.get_output_embeddings():
            shape = module.weight.shape
            found[name] = tuple(shape) if type(module) is Conv1D else (shape[1], shape[0])
    return found


def embedded_linears() -> Shapes:
    """Those of the model that comes with Quire."""
    checkpoint = Checkpoint(EMBEDDED)
    names = [name for name in checkpoint.names if name.endswith("_proj.weight") and not name.startswith("mtp.")]
    shapes = {name.removesuffix(".weight"): checkpoint[name].shape for name in sorted(names)}
    return {name: (shape[1], shape[0]) for name, shape in shapes.items()}


def plain(name: str) -> bool:
    """Whether a linear can have an adapter: it neither belongs to experts, nor is folded into others, nor a head's."""
    others = "experts.", ".gate.", "router", "kv_b_proj", "indexer.weights_proj"
    return not any(part in name for part in others) and not name.endswith(".gate")


def save_adapter(
    directory: Path,
    shapes: Shapes,
    seed: int = 0,
    chosen: Callable[[str], bool] = lambda _: True,
    rank_of: Callable[[str], int] | None = None,
    dtype: torch.dtype = torch.float32,
    spread: float = SPREAD,
    **config: Any,
) -> dict[str, torch.Tensor]:
    """Save a random adapter of the chosen modules: what it adds to the weights [out, in] of each."""
    config = BASE | {"target_modules": sorted(filter(chosen, shapes))} | config
    generator, tensors, added = torch.Generator().manual_seed(seed), {}, {}
    for name in filter(chosen, shapes):
        rank = config["r"] if rank_of is None else rank_of(name)
        alpha = config["lora_alpha"]
        for pattern, value in config.get("alpha_pattern", {}).items():
            alpha = value if re.search(f"{pattern}$", name) else alpha
        in_size, out_size = shapes[name]
        a = torch.randn(rank, in_size, generator=generator).mul_(spread).to(dtype)
        b = torch.randn(out_size, rank, generator=generator).mul_(spread).to(dtype)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        added[name] = alpha / (rank**0.5 if config.get("use_rslora") else rank) * (b.double() @ a.double())
    directory.mkdir(exist_ok=True, parents=True)
    save_file(tensors, directory / TENSORS)
    (directory / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return added


def merge(model: Any, added: Mapping[str, torch.Tensor]) -> None:
    """Add these to the weights of a model of transformers."""
    with torch.no_grad():
        for name, own in added.items():
            module = model.get_submodule(name)
            module.weight += (own.T if type(module) is Conv1D else own).to(module.weight.dtype)


def save_merged(model: Any, added: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Save a model of transformers with these added to its weights, which are changed."""
    merge(model, added)
    model.save_pretrained(directory)
