"""Reading a GGUF file's metadata so that no key that matters is overlooked."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.models.gguf.file import GgufFile

# Keys of an architecture that say nothing about what the model computes, or what its tensors' shapes say again.
IMMATERIAL = {"vocab_size", "tensor_data_layout", "max_position_embeddings"}


class Metadata:
    """Hands out what a file says of its architecture, and remembers which; `finish` complains about the rest."""

    def __init__(self, file: GgufFile) -> None:
        """Raises ModelError where the file does not say its architecture."""
        self.file = file
        found = file.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise ModelError(f"{file.path}: general.architecture is {found!r}; it must be a text")
        self.architecture = found
        self._understood: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key below the architecture's, as JSON has it; the default where it is missing."""
        self._understood.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, np.ndarray):
            value = value.tolist()
            if len(set(value)) == 1:  # what may differ between layers is the same in all
                return value[0]
        if isinstance(value, float) and np.float32(value) == value:
            return float(str(np.float32(value)))  # the number that was meant when it became an fp32 number
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError where it is missing without a default, or something else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, value, "a positive integer")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """An integer that is not negative. Raises ModelError for something else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, value, "an integer that is not negative")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. Raises ModelError where it is missing without a default, or something else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise self.error(key, value, "a number")
        return value

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of that name."""
        return tensor in self.file.tensors

    def error(self, key: str, value: object, wanted: str) -> ModelError:
        """That a value is wrong."""
        shown = str(value) if len(str(value)) < 100 else f"{str(value)[:100]}..."
        return ModelError(f"{self.file.path}: {self.architecture}.{key} is {shown}; it must be {wanted}")

    def finish(self) -> None:
        """Raise ModelError if a key was set that nothing asked for: it may change what the model computes."""
        prefix = f"{self.architecture}."
        given = {key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)}
        if unknown := given - self._understood - IMMATERIAL:
            listed = ", ".join(f"{key}={self.file.metadata[prefix + key]!r}"[:100] for key in sorted(unknown)[:5])
            raise ModelError(
                f"{self.file.path} has {len(unknown)} keys that are not understood of the architecture "
                f"{self.architecture!r}: {listed}"
            )
