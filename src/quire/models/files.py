"""What a model is read from: a directory of files, or one GGUF file. Both are asked for the same things."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tokenizers import Tokenizer

from quire.errors import ModelError
from quire.models.gguf.model import GgufModel
from quire.models.quantisation.module import Tensors
from quire.models.template import default_template, read_template
from quire.models.text_part import TextPart
from quire.models.weights import Checkpoint, read_json, weight_files

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


class Files(Protocol):
    """A model's files. Each method raises ModelError for what is there and cannot be read."""

    @property
    def path(self) -> Path:
        """The directory, or the file."""

    def config(self) -> Mapping[str, Any]:
        """What the model is, as a config.json says it."""

    def generation(self) -> Mapping[str, Any]:
        """How its makers want tokens chosen, as a generation_config.json says it; empty where they do not say."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether it has one; a model without takes and gives token ids."""

    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer, read anew."""

    def tokenizer_settings(self) -> Mapping[str, Any]:
        """Special tokens and more, as a tokenizer_config.json has them; may be empty."""

    def template(self) -> tuple[str, str] | None:
        """Its chat template: where it stands, for errors, and its text; None: it has none."""

    def weight_files(self, part: TextPart | None = None) -> list[Path]:
        """The files that hold the weights, or those that hold a part; none where there is a description alone."""

    def tensors(self, part: TextPart | None = None) -> Tensors:
        """The weights, or those of a part under the names that it has alone."""


class Directory:
    """A directory as transformers saves a model."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Mapping[str, Any]:
        """config.json's contents."""
        return read_json(self.path / CONFIG)

    def generation(self) -> Mapping[str, Any]:
        """generation_config.json's."""
        return self._optional(GENERATION)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer.json."""
        return (self.path / TOKENIZER).exists()

    def tokenizer(self) -> Tokenizer | None:
        """tokenizer.json's."""
        if not self.has_tokenizer:
            return None
        path = self.path / TOKENIZER
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"{path} cannot be read: {error}") from error

    def tokenizer_settings(self) -> Mapping[str, Any]:
        """tokenizer_config.json's contents."""
        return self._optional(SETTINGS)

    def template(self) -> tuple[str, str] | None:
        """A file's, or the one of tokenizer_config.json."""
        own = self.path / TEMPLATE
        if own.exists():
            return str(own), read_template(own, ModelError)
        found = default_template(self.tokenizer_settings())
        return None if found is None else (f"chat_template of {self.path / SETTINGS}", found)

    def weight_files(self, part: TextPart | None = None) -> list[Path]:
        """Those of one form of the weights."""
        return weight_files(self.path, part)

    def tensors(self, part: TextPart | None = None) -> Checkpoint:
        """What these hold."""
        return Checkpoint(self.path, part)

    def _optional(self, name: str) -> Mapping[str, Any]:
        path = self.path / name
        return read_json(path) if path.exists() else {}


Where: TypeAlias = Path | Files  # a model's place, or what is read from it


def files_of(where: Where) -> Files:
    """What a model is read from. Raises ModelError for a GGUF file that is none."""
    if not isinstance(where, Path):
        return where
    return GgufModel(where) if where.is_file() else Directory(where)
