"""Checkpoints with a random draft head, in the layout that their family publishes, and of EAGLE-3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import TINY

EAGLE = TINY | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 40}
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


def save_eagle(directory: Path, changes: dict[str, Any] | None = None, **config: Any) -> dict[str, Tensor]:
    """Save a random checkpoint of EAGLE-3. changes: tensors to replace, to add, or to leave out (None)."""
    torch.manual_seed(2)
    config = EAGLE | config
    H, V, few, mid = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"], "midlayer."
    q, kv = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        f"{mid}self_attn.q_proj.weight": (q, 2 * H),
        f"{mid}self_attn.k_proj.weight": (kv, 2 * H),
        f"{mid}self_attn.v_proj.weight": (kv, 2 * H),
        f"{mid}self_attn.o_proj.weight": (H, q),
        f"{mid}mlp.gate_proj.weight": (config["intermediate_size"], H),
        f"{mid}mlp.up_proj.weight": (config["intermediate_size"], H),
        f"{mid}mlp.down_proj.weight": (H, config["intermediate_size"]),
        f"{mid}hidden_norm.weight": (H,),
        f"{mid}input_layernorm.weight": (H,),
        f"{mid}post_attention_layernorm.weight": (H,),
        "norm.weight": (H,),
        "fc.weight": (H, 3 * H),
        "lm_head.weight": (few, H),
    }
    made = {
        name: torch.randn(shape) * 0.3 if len(shape) > 1 else 1 + torch.randn(shape) * 0.2
        for name, shape in shapes.items()
    }
    frequent = torch.randperm(V)[:few].sort().values
    made |= {"d2t": frequent - torch.arange(few), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, frequent, True)}
    made = {name: one for name, one in (made | (changes or {})).items() if one is not None}
    directory.mkdir(exist_ok=True)
    save_file(made, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return made
