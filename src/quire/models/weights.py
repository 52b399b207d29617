"""From a checkpoint's files to aligned tensors of our own."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import ModelError
from quire.models.decoder_config import DecoderConfig, stacked_rows, weight_shapes
from quire.ops.memory import mapped

INDEX = "model.safetensors.index.json"
SINGLE_FILES = ("model.safetensors", "*.safetensors", "pytorch_model*.bin", "model.pt", "*.pt")


class Checkpoint:
    """The named tensors of a directory: safetensors, in one file or several, or an old state dict."""

    def __init__(self, directory: Path) -> None:
        """Open the files. Raises ModelError where there are none, or one is unreadable."""
        self.directory = directory
        self._reader_of: dict[str, Callable[[str], Tensor]] = {}
        for path in _weight_files(directory):
            try:
                if path.suffix == ".safetensors":
                    file = safe_open(path, framework="pt")
                    self._reader_of |= dict.fromkeys(file.keys(), file.get_tensor)  # type: ignore[no-untyped-call]
                else:
                    tensors = _state_dict(path)
                    self._reader_of |= dict.fromkeys(tensors, tensors.__getitem__)
            except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise ModelError(f"{path} cannot be read as weights: {error}") from error

    @property
    def names(self) -> frozenset[str]:
        """All tensors there are."""
        return frozenset(self._reader_of)

    def __getitem__(self, name: str) -> Tensor:
        return self._reader_of[name](name)


def _weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights; of several forms of the same weights the first of SINGLE_FILES."""
    if (directory / INDEX).exists():
        return [directory / name for name in sorted(set(read_json(directory / INDEX)["weight_map"].values()))]
    for pattern in SINGLE_FILES:
        if found := sorted(directory.glob(pattern)):
            return found
    others = sorted(path.name for path in directory.iterdir())
    raise ModelError(
        f"{directory} holds no weights ({', '.join(SINGLE_FILES)}); it holds {', '.join(others) or 'nothing'}"
    )


def _state_dict(path: Path) -> dict[str, Tensor]:
    """A pickled state dict, bare or under "model" or "state_dict". Only tensors are unpickled, never code."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ModelError(f"{path} holds no state dict: its entries are not all tensors")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError where it is missing or malformed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


@dataclass(frozen=True)
class Sources:
    """Where a family's checkpoints keep the decoder's weights."""

    ends: Mapping[str, str]  # ours -> theirs, outside the layers
    layer_prefix: str  # of their tensors of layer {}
    # Ours -> theirs within a layer, with {} for the number of an expert; several are stacked in this order.
    layer: Mapping[str, tuple[str, ...]]
    ignored: re.Pattern[str] | None = None  # their tensors that are known not to be needed
    adapt: Callable[[str, Tensor], Tensor] | None = None  # our name, their tensor -> our form of it

    def of(self, name: str) -> tuple[str, ...]:
        """The checkpoint's tensors that make up our weight of that name, as in `weight_shapes`."""
        if name in self.ends:
            return (self.ends[name],)
        layer, part, expert, kind = _within_layer(name)
        prefix = self.layer_prefix.format(layer)
        return tuple(f"{prefix}{theirs.format(*expert)}.{kind}" for theirs in self.layer[part])


class Weights(Mapping[str, Tensor]):
    """A decoder's weights in a checkpoint, under the names of `weight_shapes`.

    Each but a tied embedding is copied into memory of its own when it is asked for, so that who packs them holds one at
    a time twice. Memory of our own is aligned and stays resident; weights used straight out of a mapped file are
    neither.
    """

    def __init__(
        self, checkpoint: Checkpoint, sources: Sources, config: DecoderConfig, dtype: torch.dtype, device: str
    ) -> None:
        """dtype: of all but norms, which are fp32. Raises ModelError for a tensor that is missing or superfluous."""
        self._checkpoint, self._sources, self._dtype, self._device = checkpoint, sources, dtype, device
        self._shapes, self._rows = weight_shapes(config), stacked_rows(config)
        self._tied = config.tied_embeddings
        expected = {part for name in self._shapes for part in sources.of(name)}
        if missing := expected - checkpoint.names:
            raise ModelError(f"{checkpoint.directory} lacks {len(missing)} tensors, among them {_first(missing)}")
        superfluous = set(checkpoint.names - expected)
        if config.tied_embeddings:
            superfluous -= {sources.ends["lm_head"]}
        if sources.ignored is not None:
            superfluous = {name for name in superfluous if not sources.ignored.fullmatch(name)}
        if superfluous:
            raise ModelError(
                f"{checkpoint.directory} has {len(superfluous)} tensors that this family does not use, among them "
                f"{_first(superfluous)}; without them it would be a different model"
            )

    def __getitem__(self, name: str) -> Tensor:
        """A copy of the weight. Raises ModelError where the checkpoint has it in a wrong shape.

        A tied embedding, which may be most of a model, is given as it stands in the file if nothing is to be changed.
        """
        shape, parts = self._shapes[name], self._sources.of(name)
        lengths = self._rows[_within_layer(name)[1]] if len(parts) > 1 else shape[:1]
        # Norms are small, and their weights multiply everything: they stay as exact as they came.
        dtype = torch.float32 if "norm." in name else self._dtype
        if name == "embedding" and self._tied and self._device == "cpu":
            tensor = self._checkpoint[parts[0]]
            if tensor.dtype == dtype and tensor.shape == shape:
                return tensor
        weight = mapped(shape, dtype) if self._device == "cpu" else torch.empty(shape, dtype=dtype, device=self._device)
        for part, home in zip(parts, torch.split(weight, list(lengths)), strict=True):
            tensor = self._checkpoint[part]
            ours = tensor
            if self._sources.adapt is not None and tensor.numel() == home.numel():
                ours = self._sources.adapt(name, tensor)
            if ours.shape != home.shape:
                raise ModelError(
                    f"{self._checkpoint.directory}: {part} has shape {tuple(tensor.shape)}; config.json asks for "
                    f"{tuple(home.shape)}"
                )
            home.copy_(ours)
        return weight

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _within_layer(name: str) -> tuple[str, str, list[str], str]:
    """Layer, part, expert where it is one's, and kind: layers.3.experts.5.mlp_in.weight has the part experts.mlp_in."""
    _, layer, *path, kind = name.split(".")
    return layer, ".".join(p for p in path if not p.isdigit()), [p for p in path if p.isdigit()], kind


def _first(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)[:3])
