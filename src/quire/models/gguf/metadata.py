"""Reading a GGUF file's metadata without overlooking any key that matters."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.models.gguf.file import GgufFile

# Keys of an architecture that do not affect the model's computation, or that follow from its tensors' shapes.
IMMATERIAL = {"vocab_size", "tensor_data_layout", "max_position_embeddings"}


class Metadata:
    """A reader of an architecture's keys that records which were read; `finish` rejects the others."""

    def __init__(self, file: GgufFile) -> None:
        """Read the architecture's name. Raises ModelError if the file has none."""
        self.file = file
        found = file.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise ModelError(f"{file.path}: general.architecture is {found!r}; it must be a text")
        self.architecture = found
        self._understood: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's key as a JSON type; the default if it is missing."""
        self._understood.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, np.ndarray):
            value = value.tolist()
            if len(set(value)) == 1:  # one value per layer, and all layers have the same
                return value[0]
        if isinstance(value, float) and np.float32(value) == value:
            return float(str(np.float32(value)))  # the decimal number from before it was rounded to fp32
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Raises ModelError for any other value, or a missing one without a default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, value, "a positive integer")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """Return an integer that is not negative. Raises ModelError for any other value."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, value, "an integer that is not negative")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number. Raises ModelError for any other value, or a missing one without a default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise self.error(key, value, "a number")
        return value

    def has(self, tensor: str) -> bool:
        """Return whether the file has a tensor of that name."""
        return tensor in self.file.tensors

    def error(self, key: str, value: object, wanted: str) -> ModelError:
        """Return the error for an invalid value. wanted: the valid values."""
        shown = str(value) if len(str(value)) < 100 else f"{str(value)[:100]}..."
        return ModelError(f"{self.file.path}: {self.architecture}.{key} is {shown}; it must be {wanted}")

    def finish(self) -> None:
        """Raise ModelError if the file sets a key that was never read: it may change the model's output."""
        prefix = f"{self.architecture}."
        given = {key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)}
        if unknown := given - self._understood - IMMATERIAL:
            listed = ", ".join(f"{key}={self.file.metadata[prefix + key]!r}"[:100] for key in sorted(unknown)[:5])
            raise ModelError(
                f"{self.file.path} has {len(unknown)} keys that are not understood of the architecture "
                f"{self.architecture!r}: {listed}"
            )
