"""Weights that replace those of a model's files: from directories or from memory, complete or in part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.files import Directory, Files
from quire.models.quantisation.module import Tensors
from quire.models.text_part import TextPart
from quire.models.weights import Checkpoint, weight_files
from quire.ops.memory import mapped

GIVEN = Path("the given weights")  # in error messages, in place of a path

NewWeights: TypeAlias = str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Layer: TypeAlias = Path | Mapping[str, Tensor]


class _Held:
    """Tensors in memory."""

    path = GIVEN

    def __init__(self, tensors: Mapping[str, Tensor], part: TextPart | None) -> None:
        named = ((name if part is None else part.name(name), tensor) for name, tensor in tensors.items())
        self._tensors = {name: tensor for name, tensor in named if name is not None}
        self.names = frozenset(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        whole, _, entry = name.partition("[")
        tensor = self._tensors[whole]
        return tensor[int(entry[:-1])] if entry else tensor


class Layered:
    """Tensors of several sources. One of a later source replaces those of the same name in earlier ones."""

    def __init__(self, sources: Sequence[Tensors]) -> None:
        self.path = sources[-1].path if sources else GIVEN
        self._source_of = {name: source for source in sources for name in source.names}
        self.names = frozenset(self._source_of)

    def __getitem__(self, name: str) -> Tensor:
        return self._source_of[name.partition("[")[0]][name]


class ReplacedFiles(Directory):
    """The files of a model, with other weights than those of its directory."""

    def __init__(self, path: Path, layers: Sequence[Layer]) -> None:
        """path: of the model; layers: its weights, where later ones replace earlier ones."""
        super().__init__(path)
        self.layers = tuple(layers)

    @property
    def is_on_disk(self) -> bool:
        """True if all weights can be read from files again."""
        return bool(self.layers) and all(isinstance(layer, Path) for layer in self.layers)

    @property
    def given(self) -> dict[str, Tensor]:
        """The weights in memory, by name."""
        held = (layer for layer in self.layers if not isinstance(layer, Path))
        return {name: tensor for layer in held for name, tensor in layer.items()}

    def weight_files(self, part: TextPart | None = None) -> list[Path]:
        """Return the files of those weights that are not in memory."""
        return [path for layer in self.layers if isinstance(layer, Path) for path in weight_files(layer, part)]

    def tensors(self, part: TextPart | None = None) -> Layered:
        """Open the weights."""
        return Layered([_tensors(layer, part) for layer in self.layers])


def _tensors(layer: Layer, part: TextPart | None = None) -> Tensors:
    return Checkpoint(layer, part) if isinstance(layer, Path) else _Held(layer, part)


def replaced(files: Files, new: NewWeights) -> ReplacedFiles:
    """Return the files of a model with these weights in place of those of the same names.

    Tensors are copied, so the caller may change its own. Raises ModelError for a model of a GGUF file, and for weights
    that cannot be read; the model is not compared with them yet.
    """
    if not isinstance(files, Directory):
        raise ModelError(
            f"the model is {files.path}; weights replace those of a directory with safetensors files, so convert it"
        )
    layers = list(files.layers if isinstance(files, ReplacedFiles) else [files.path])
    top: Layer
    if isinstance(new, (str, Path)):
        top = Path(new)
        if not top.is_dir():
            raise ModelError(f"{top} is no directory; give one with safetensors files, or tensors by their names")
    else:
        top = _copies(new.items() if isinstance(new, Mapping) else new)
        if layers and not isinstance(below := layers[-1], Path):
            layers, top = layers[:-1], {**below, **top}
    names = _tensors(top).names
    if all(_tensors(layer).names <= names for layer in layers):
        layers = []
    return ReplacedFiles(files.path, [*layers, top])


def _copies(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy tensors to the host's memory. Raises ModelError for anything else, and for a name that is given twice."""
    found: dict[str, Tensor] = {}
    for i, pair in enumerate(pairs):
        name, tensor = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, pair)
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise ModelError(
                f"entry {i} of the given weights is {str(pair)[:80]}; it must be a name and a dense tensor"
            )
        if name in found:
            raise ModelError(f"the given weights have {name} twice; give each tensor once")
        try:
            found[name] = mapped(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
        except RuntimeError as error:  # it has no memory, or is a part of a distributed tensor
            raise ModelError(f"{name} of the given weights cannot be copied: {error}") from error
    if not found:
        raise ModelError("the given weights are empty; give at least one tensor")
    return found
