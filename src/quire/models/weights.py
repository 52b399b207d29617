"""From a directory of safetensors to aligned tensors of our own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """The named tensors of a directory, in one safetensors file or several."""

    def __init__(self, directory: Path) -> None:
        """Open the files; no tensor is read yet. Raises ModelError where there are none, or one is unreadable."""
        self.directory = directory
        index = directory / INDEX
        if index.exists():
            names = sorted(set(read_json(index)["weight_map"].values()))
        elif (directory / SINGLE).exists():  # beside it there may be the same weights in another form
            names = [SINGLE]
        else:
            names = [path.name for path in sorted(directory.glob("*.safetensors"))]
        if not names:
            others = sorted(path.name for path in directory.iterdir())
            raise ModelError(
                f"{directory} holds no *.safetensors weights; it holds {', '.join(others) or 'nothing'}. Convert the "
                f"checkpoint with transformers' save_pretrained"
            )
        self._file_of: dict[str, Any] = {}
        for name in names:
            try:
                file = safe_open(directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{directory / name} cannot be read as safetensors: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]

    @property
    def names(self) -> frozenset[str]:
        """All tensors there are."""
        return frozenset(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError where it is missing or malformed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def load_weights(
    checkpoint: Checkpoint,
    sources: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    rows: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: str,
    ignored: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """Copy every weight into memory of its own, stacking its parts: name -> tensor of that dtype.

    Memory of our own is aligned and stays resident; weights used straight out of a mapped file are neither.
    sources: the checkpoint's tensors that make up each weight, stacked along dimension 0 in this order.
    rows: rows of each part of a stacked weight, by the weight's name within a layer.
    ignored: tensors of the checkpoint that are known not to be needed.

    Raises ModelError for a tensor that is missing, superfluous, or of a wrong shape.
    """
    expected = {part for parts in sources.values() for part in parts}
    if missing := expected - checkpoint.names:
        raise ModelError(f"{checkpoint.directory} lacks {len(missing)} tensors, among them {_first(missing)}")
    if superfluous := checkpoint.names - expected - ignored:
        raise ModelError(
            f"{checkpoint.directory} has {len(superfluous)} tensors that this family does not use, among them "
            f"{_first(superfluous)}; running without them would be a different model"
        )
    weights = {}
    for name, parts in sources.items():
        tensors = [checkpoint[part] for part in parts]
        lengths = rows[name.split(".")[-2]] if len(parts) > 1 else shapes[name][:1]
        for part, tensor, length in zip(parts, tensors, lengths, strict=True):
            expected_shape = (length, *shapes[name][1:])
            if tuple(tensor.shape) != expected_shape:
                raise ModelError(
                    f"{checkpoint.directory}: {part} has shape {tuple(tensor.shape)}; "
                    f"config.json asks for {expected_shape}"
                )
        weight = torch.empty(shapes[name], dtype=dtype, device=device)
        start = 0
        for tensor in tensors:
            weight[start : start + len(tensor)].copy_(tensor)
            start += len(tensor)
        weights[name] = weight
    return weights


def _first(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)[:3])
