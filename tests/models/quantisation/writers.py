"""Quantised checkpoints of tiny random models, written number by number as each format's layout says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import save

SIZES = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 32}
OWN_SIZES = ("GPT2", "Bloom", "GPTNeoX")
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Written:
    """What a linear of a checkpoint is, as the formats' authors have it: scale * (value - zero)."""

    values: np.ndarray[Any, Any]  # unsigned [out, in]
    scales: Tensor  # fp16 or bf16 [out, groups]
    zeros: np.ndarray[Any, Any]  # unsigned [out, groups]
    group_of: np.ndarray[Any, Any]  # [in]

    def weight(self) -> Tensor:
        """Its numbers: fp32 [out, in]."""
        zeros = torch.tensor(self.zeros[:, self.group_of]).float()
        return (torch.tensor(self.values).float() - zeros) * self.scales.float()[:, self.group_of]


def drawn(
    generator: np.random.Generator,
    out_size: int,
    in_size: int,
    bits: int,
    group_size: int,
    *,
    zeros: bool = False,
    order: np.ndarray[Any, Any] | None = None,  # inputs, one group after the other
    scale_dtype: torch.dtype = torch.float16,
) -> Written:
    """A random linear whose numbers are about as large as those of the tiny models."""
    size = in_size if group_size == -1 else group_size
    groups = -(-in_size // size)
    values = generator.integers(0, 2**bits, (out_size, in_size))
    scales = torch.tensor(generator.uniform(0.2, 1.0, (out_size, groups)) / 2 ** (bits - 1) * 0.5).to(scale_dtype)
    middle = np.full((out_size, groups), 2 ** (bits - 1))
    zero = generator.integers(1, 2**bits, (out_size, groups)) if zeros else middle
    group_of = np.arange(in_size) // size
    if order is not None:
        group_of[order] = np.arange(in_size) // size
    return Written(values, scales, zero, group_of)


def words_along_rows(numbers: np.ndarray[Any, Any], bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """[R, C] -> int32 [R, ceil(C bits / 32)]: the i-th number of a word is column 32 / bits c + places[i]."""
    rows, columns = numbers.shape
    factor = 32 // bits
    whole = np.zeros((rows, columns + -columns % factor), dtype=np.uint32)
    whole[:, :columns] = numbers
    words = np.zeros((rows, whole.shape[1] // factor), dtype=np.uint32)
    for i in range(factor):
        words |= whole[:, (i if places is None else places[i]) :: factor] << (bits * i)
    return torch.from_numpy(words.view(np.int32))


def words_along_columns(numbers: np.ndarray[Any, Any], bits: int) -> Tensor:
    """[R, C] -> int32 [ceil(R bits / 32), C]: the i-th number of a word is row 32 / bits r + i."""
    return words_along_rows(numbers.T.copy(), bits).T.contiguous()


def awq(name: str, w: Written, bits: int) -> dict[str, Tensor]:
    return {
        f"{name}.qweight": words_along_rows(w.values.T, bits, AWQ_COLUMNS),
        f"{name}.qzeros": words_along_rows(w.zeros.T, bits, AWQ_COLUMNS),
        f"{name}.scales": w.scales.T.contiguous(),
    }


def gptq(name: str, w: Written, bits: int, version: int = 1, with_groups: bool = True) -> dict[str, Tensor]:
    found = {
        f"{name}.qweight": words_along_columns(w.values.T, bits),
        f"{name}.qzeros": words_along_rows(w.zeros.T - (2 - version), bits),
        f"{name}.scales": w.scales.T.contiguous(),
    }
    return found | ({f"{name}.g_idx": torch.tensor(w.group_of, dtype=torch.int32)} if with_groups else {})


def packed(
    name: str, w: Written, bits: int, zeros: bool = False, group_of: bool = False, shape: bool = True
) -> dict[str, Tensor]:
    found = {
        f"{name}.weight_packed": words_along_rows(w.values, bits),
        f"{name}.weight_scale": w.scales,
    }
    if shape:
        found[f"{name}.weight_shape"] = torch.tensor(w.values.shape)
    if zeros:
        found[f"{name}.weight_zero_point"] = words_along_columns(w.zeros, bits)
    if group_of:
        found[f"{name}.weight_g_idx"] = torch.tensor(w.group_of, dtype=torch.int32)
    return found


def plain_bytes(name: str, w: Written, bits: int) -> dict[str, Tensor]:
    signed = torch.tensor(w.values - 2 ** (bits - 1)).to(torch.int8)
    return {f"{name}.weight": signed, f"{name}.weight_scale": w.scales}


@dataclass
class Checkpoint:
    """A quantised checkpoint, and the same model in a 16-bit one."""

    directory: Path
    dequantised: Path
    written: dict[str, Written] = field(default_factory=dict)  # by module


def write(
    directory: Path,
    config: dict[str, Any],
    one: Callable[[str, Tensor], tuple[Written, dict[str, Tensor]] | None],
    kind: str = "Llama",
    **changes: Any,
) -> Checkpoint:
    """one: a module's name and its plain weight -> what stands for it, and the tensors; None: it stays."""
    made = Checkpoint(directory / "quantised", directory / "plain")
    for target in (made.directory, made.dequantised):
        save(target, kind, **(changes if kind in OWN_SIZES else SIZES | changes))
    tensors = load_file(made.directory / "model.safetensors")
    plain = dict(tensors)
    for name in list(tensors):
        module = name.removesuffix(".weight")
        linear = name.endswith(".weight") and tensors[name].dim() == 2 and "embed" not in name
        if not linear or (found := one(module, tensors[name])) is None:
            continue
        made.written[module], stored = found
        plain[name] = made.written[module].weight()
        if kind == "GPT2":  # which keeps its weights as [in, out]
            plain[name] = plain[name].T.contiguous()
        del tensors[name]
        tensors |= stored
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, made.directory / "model.safetensors")
    save_file(plain, made.dequantised / "model.safetensors")
    content = json.loads((made.directory / "config.json").read_text())
    (made.directory / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return made
