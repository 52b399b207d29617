"""The sources that a model is read from: a directory of files, or one GGUF file, with one interface."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tokenizers import Tokenizer

from quire.errors import ModelError
from quire.models.gguf.model import GgufModel
from quire.models.pooling_config import Pooling
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
    """A model's files. Each method raises ModelError if a file exists and cannot be read."""

    @property
    def path(self) -> Path:
        """The directory, or the GGUF file."""

    def config(self) -> Mapping[str, Any]:
        """Return the model's configuration in the form of a config.json."""

    def generation(self) -> Mapping[str, Any]:
        """Return the model's sampling defaults in the form of a generation_config.json; may be empty."""

    @property
    def has_tokenizer(self) -> bool:
        """True if the model has a tokenizer. Without one it reads and returns token ids."""

    def tokenizer(self) -> Tokenizer | None:
        """Read the tokenizer from the files. Each call returns a new object; None: the model has no tokenizer."""

    def tokenizer_settings(self) -> Mapping[str, Any]:
        """Return special tokens and other settings in the form of a tokenizer_config.json; may be empty."""

    def template(self) -> tuple[str, str] | None:
        """Return the location of the chat template, for error messages, and its text; None: there is no template."""

    def weight_files(self, part: TextPart | None = None) -> list[Path]:
        """Return the files of the weights, or of a part of the weights; empty if there is only a description."""

    def tensors(self, part: TextPart | None = None) -> Tensors:
        """Return the weights, or those of a part under the names of a standalone model."""

    def for_transformers(self) -> AbstractContextManager[Path]:
        """Return a directory of all but the weights in the layout of transformers, which may exist only meanwhile."""

    def pooling_mode(self) -> Pooling | None:
        """Return how hidden states are pooled, if the weights' file itself has that; else None."""


class Directory:
    """A directory in the layout of transformers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Mapping[str, Any]:
        """Read config.json."""
        return read_json(self.path / CONFIG)

    def generation(self) -> Mapping[str, Any]:
        """Read generation_config.json; empty if it does not exist."""
        return self._optional(GENERATION)

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer.json."""
        return (self.path / TOKENIZER).exists()

    def tokenizer(self) -> Tokenizer | None:
        """Read tokenizer.json; None if it does not exist."""
        if not self.has_tokenizer:
            return None
        path = self.path / TOKENIZER
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"{path} cannot be read: {error}") from error

    def tokenizer_settings(self) -> Mapping[str, Any]:
        """Read tokenizer_config.json; empty if it does not exist."""
        return self._optional(SETTINGS)

    def template(self) -> tuple[str, str] | None:
        """Return the template of chat_template.jinja, else the one of tokenizer_config.json."""
        own = self.path / TEMPLATE
        if own.exists():
            return str(own), read_template(own, ModelError)
        found = default_template(self.tokenizer_settings())
        return None if found is None else (f"chat_template of {self.path / SETTINGS}", found)

    def weight_files(self, part: TextPart | None = None) -> list[Path]:
        """Return the files of one form of the weights, see `weights.weight_files`."""
        return weight_files(self.path, part)

    def tensors(self, part: TextPart | None = None) -> Tensors:
        """Open these files."""
        return Checkpoint(self.path, part)

    def for_transformers(self) -> AbstractContextManager[Path]:
        """Return the directory."""
        return nullcontext(self.path)

    def pooling_mode(self) -> Pooling | None:
        """Return None: other files have it, see `pooling_files`."""
        return None

    def _optional(self, name: str) -> Mapping[str, Any]:
        path = self.path / name
        return read_json(path) if path.exists() else {}


class Described(Directory):
    """A model without files, of which only the configuration is known."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        super().__init__(Path(name))
        self._config = config

    def config(self) -> Mapping[str, Any]:
        """Return the configuration."""
        return self._config


Where: TypeAlias = Path | Files  # a model's path, or its files


def files_of(where: Where) -> Files:
    """Return the files of a model. Raises ModelError for a path of a file that is not a GGUF file."""
    if not isinstance(where, Path):
        return where
    return GgufModel(where) if where.is_file() else Directory(where)
