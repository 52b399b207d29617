"""A GGUF file as `quire.models.files.Files`: its configuration and weights under the names of other checkpoints."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from quire.errors import ModelError
from quire.models.gguf.architecture import TensorPlace
from quire.models.gguf.architectures import architecture_of
from quire.models.gguf.file import GgufFile, TensorInfo, single
from quire.models.gguf.metadata import Metadata
from quire.models.gguf.mmproj import TEXT_ARCHITECTURES, Mmproj
from quire.models.gguf.vocabulary import Vocabulary
from quire.models.pooling_config import Pooling
from quire.models.template import default_template
from quire.models.text_part import TextPart
from quire.ops.weights.gguf_blocks import FLOATS, MXFP4, weight_of

SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
NO_VOCABULARY = ("no_vocab", "none")  # tokenizer models of files without a vocabulary
POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
MMPROJ = "mmproj*.gguf"  # names of files of vision parts
AXES = 3  # of an image's position
VERSION = 2  # of quantised blocks; some had other layouts in earlier versions


class GgufModel:
    """A model in a GGUF file, which may be split into several files."""

    def __init__(self, path: Path) -> None:
        """Open a file, or the first of several. Raises ModelError if it is malformed or its model is not supported."""
        self.path = path
        self.file = GgufFile(path)
        self.mmproj: Mmproj | None = None  # set by read_images
        self._metadata = Metadata(self.file)
        self._architecture = architecture_of(self._metadata)
        version = single(path, self.file.metadata, "general.quantization_version", VERSION)
        if version != VERSION:
            raise ModelError(f"{path}: general.quantization_version is {version!r}; served is {VERSION}")

    def read_images(self, path: Path) -> None:
        """Add the vision part in another file. Raises ModelError if it is not supported, or of another model."""
        self.mmproj = Mmproj(path, self._metadata)

    def mmproj_nearby(self) -> list[Path]:
        """Return the files of vision parts in the directory of this file; empty for an architecture without any."""
        if self._metadata.architecture not in TEXT_ARCHITECTURES:
            return []
        return sorted(path for path in self.path.parent.glob(MMPROJ) if path.name != self.path.name)

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        """The vocabulary; None if the file has none."""
        model = single(self.path, self.file.metadata, "tokenizer.ggml.model", "none")
        return None if model in NO_VOCABULARY else Vocabulary(self.path, self.file.metadata)

    @cached_property
    def _places(self) -> Mapping[str, TensorPlace]:
        """The place of each tensor, by its name in other checkpoints."""
        return self._architecture.places(self._metadata)

    def config(self) -> Mapping[str, Any]:
        """Return the model's config.json, which is that of the whole model if it has a vision part.

        Raises ModelError for metadata with unknown keys or invalid values.
        """
        text = self._text_config()
        if self.mmproj is None:
            return text
        sections = np.ravel(self.file.metadata.get(f"{self._metadata.architecture}.rope.dimension_sections", []))
        return self.mmproj.whole(text, sections[:AXES].tolist())

    def _text_config(self) -> dict[str, Any]:
        config = self._architecture.config(self._metadata)
        self.pooling_mode()
        self._metadata.finish()
        kinds = {
            name.removesuffix(".weight"): self.file.tensors[place.tensor].kind
            for name, place in self._places.items()
            if _stays_quantised(self.file, place)
        }
        config["dtype"] = _quantised_dtype(kinds) if kinds else _usual_dtype(self.file.tensors)
        if kinds:
            config["quantization_config"] = {
                "quant_method": "gguf",
                "description": _described(self.file.tensors),
                "kinds": kinds,
                "column_turns": {
                    name.removesuffix(".weight"): place.column_turns
                    for name, place in self._places.items()
                    if place.column_turns is not None
                },
            }
        return config

    def generation(self) -> Mapping[str, Any]:
        """Return the tokens that end generation, and the default sampling parameters."""
        given = self.file.metadata
        found = {ours: given.get(f"general.sampling.{theirs}") for theirs, ours in SAMPLING.items()}
        if self._vocabulary is not None:
            found["eos_token_id"] = list(self._vocabulary.end_tokens())
        return {key: value for key, value in found.items() if value is not None}

    @property
    def has_tokenizer(self) -> bool:
        """True if the file has a vocabulary."""
        return self._vocabulary is not None

    def tokenizer(self) -> Tokenizer | None:
        """Build the tokenizer from the vocabulary; None if the file has none."""
        return None if self._vocabulary is None else self._vocabulary.tokenizer()

    def tokenizer_settings(self) -> Mapping[str, Any]:
        """Return the special tokens and the chat templates."""
        return {} if self._vocabulary is None else self._vocabulary.settings()

    def template(self) -> tuple[str, str] | None:
        """Return the default chat template and its location; None if the file has none."""
        found = default_template(self.tokenizer_settings())
        return None if found is None else (f"tokenizer.chat_template of {self.path}", found)

    def weight_files(self, part: TextPart | None = None) -> list[Path]:
        """Return all files, or those of the text part."""
        return [*self.file.paths, *([self.mmproj.path] if self.mmproj is not None and part is None else [])]

    def tensors(self, part: TextPart | None = None) -> GgufTensors:
        """Return all tensors, or those of the text part, which have the names of a standalone model in both."""
        return GgufTensors(self.file, self._places, self.mmproj if part is None else None)

    @contextmanager
    def for_transformers(self) -> Iterator[Path]:
        """Write all but the weights into a directory that exists within this context, in the layout of transformers.

        Raises ModelError without a vision part, a tokenizer or one of the vision part's tokens.
        """
        if self.mmproj is None or self._vocabulary is None:
            raise ModelError(f"{self.path} has no {'vision part' if self.mmproj is None else 'tokenizer'}")
        projector, tokenizer = self.mmproj.projector, self._vocabulary.tokenizer()
        # Files of Gemma 3 may lack the token whose rows an image replaces, since it has no embedding.
        tokenizer.add_special_tokens([AddedToken(projector.image_token, normalized=False)])
        tokens = {key: tokenizer.token_to_id(text) for key, text in projector.tokens.items()}
        for key, token in tokens.items():
            if token is None:
                raise ModelError(f"{self.path} has no token {projector.tokens[key]}, which images need")
        config = self.mmproj.whole(_without_layers(self._text_config()), [])
        files: dict[str, Mapping[str, Any]] = {
            "config.json": config | tokens,
            "preprocessor_config.json": self.mmproj.preprocessor(),
            "processor_config.json": self.mmproj.vision.pixels,
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "extra_special_tokens": dict(projector.named),
            },
        }
        with TemporaryDirectory(prefix="quire-") as directory:
            for name, content in files.items():
                Path(directory, name).write_text(json.dumps(content), encoding="utf-8")
            tokenizer.save(str(Path(directory, "tokenizer.json")))
            yield Path(directory)

    def pooling_mode(self) -> Pooling | None:
        """Return the pooling of an embedding model; None if the file has none."""
        found = self._metadata.get("pooling_type")
        if found is None or found == 0:
            return None
        if found not in POOLINGS:
            raise ModelError(f"{self.path}: pooling_type is {found!r}; served are 1 (mean), 2 (cls) and 3 (last)")
        return POOLINGS[found]


class GgufTensors:
    """A GGUF file's tensors under the names of other checkpoints. The names of quantised ones end with "blocks"."""

    def __init__(self, file: GgufFile, places: Mapping[str, TensorPlace], mmproj: Mmproj | None = None) -> None:
        """mmproj: a vision part, whose tensors are added."""
        self.path, self._file, self._mmproj = file.path, file, mmproj
        self._places = {}
        for name, place in places.items():
            quantised = _stays_quantised(file, place)
            self._places[f"{name.removesuffix('weight')}blocks" if quantised else name] = place

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._places) | (frozenset() if self._mmproj is None else self._mmproj.names)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor's numbers, or a quantised tensor's blocks: uint8 [out, bytes of a row]."""
        if name not in self._places and self._mmproj is not None:
            return self._mmproj[name]
        place = self._places[name]
        if place.values is not None:
            return self._latent(place.tensor, place.values)
        if place.dequantised:
            return self._numbers(place.tensor)
        info, rows = self._file.tensors[place.tensor], self._file.blocks(place.tensor)
        shape = info.shape
        if place.entry is not None:
            rows, shape = rows.view(shape[0], -1, rows.shape[1])[place.entry], shape[1:]
        if info.kind in FLOATS:
            rows = rows.view(FLOATS[info.kind]).view(shape)
        if place.heads is not None:
            rows = _halves(rows, place.heads)
        if place.less_one:
            rows = rows.float() - 1.0
        if place.log:
            rows = (-rows.float()).log()
        if place.flat:
            rows = rows.flatten()
        if place.turns is not None:
            rows = rows[place.turns.order(len(rows))]
        if place.part is not None:
            rows = _part(rows, *place.part)
        if place.column_turns is not None and info.kind in FLOATS:
            rows = rows[:, place.column_turns.order(rows.shape[1])]
        return rows.T if place.transposed and info.kind in FLOATS else rows

    def _latent(self, keys: str, values: str) -> Tensor:
        """Return the projection of a latent to keys and values, by head: [heads * (Dk + Dv), latent]."""
        if values not in self._file.tensors:
            raise ModelError(f"{self.path} has {keys}, and no {values}")
        k, v = self._numbers(keys), self._numbers(values)  # [heads, latent, Dk], [heads, Dv, latent]
        if k.dim() != 3 or v.dim() != 3 or (k.shape[0], k.shape[1]) != (v.shape[0], v.shape[2]):
            raise ModelError(
                f"{self.path}: {keys} is {list(k.shape)} and {values} {list(v.shape)}; they must be "
                "[heads, latent, Dk] and [heads, Dv, latent]"
            )
        return torch.cat([k.transpose(1, 2), v], 1).flatten(0, 1)

    def _numbers(self, name: str) -> Tensor:
        """Return a tensor dequantised to fp32."""
        info, rows = self._file.tensors[name], self._file.blocks(name)
        found = weight_of(info.kind, rows, info.shape[-1], torch.float32)
        weight = found if isinstance(found, Tensor) else found.dequantised()
        return weight.view(info.shape).float()


def _without_layers(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a text part of the same width, which is not computed."""
    counts = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size")
    return {key: text[key] for key in ("hidden_size", "dtype")} | dict.fromkeys(counts, 1)


def _stays_quantised(file: GgufFile, place: TensorPlace) -> bool:
    return file.tensors[place.tensor].kind not in FLOATS and place.values is None and not place.dequantised


def _part(rows: Tensor, number: int, count: int) -> Tensor:
    """Return one of `count` equal parts of the rows."""
    if len(rows) % count:
        raise ModelError(f"{len(rows)} rows have no {count} equal parts")
    return rows.chunk(count)[number]


def _halves(
    rows: Tensor,  # [heads * D, ...]
    heads: int,
) -> Tensor:
    """Move neighbouring rows half a head apart: row 2 i becomes row i of its head, row 2 i + 1 becomes i + D / 2."""
    if len(rows) % (2 * heads):
        raise ModelError(f"{len(rows)} rows are no {heads} heads of an even size")
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _quantised_dtype(kinds: Mapping[str, str]) -> str:
    """Return the dtype of computation for a quantised file, in the notation of config.json.

    Rows are rounded to 8 bits for products with integer weights. If rows between linears were bfloat16, the logits'
    error would be up to twice as large, and larger than in llama.cpp, which computes in float32. MXFP4 weights are
    multiplied with rows of 16 bits.
    """
    return "bfloat16" if MXFP4 in kinds.values() else "float32"


def _usual_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the dtype of most numbers, in the notation of config.json."""
    numbers = Counter[str]()
    for info in tensors.values():
        numbers[info.kind] += math.prod(info.shape)
    return str(FLOATS[max(numbers, key=lambda kind: numbers[kind])]).removeprefix("torch.")


def _described(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the kinds of quantised tensors, such as "gguf Q4_K, Q6_K": the one with the most numbers first."""
    numbers = Counter[str]()
    for info in tensors.values():
        if info.kind not in FLOATS:
            numbers[info.kind] += math.prod(info.shape)
    return f"gguf {', '.join(kind for kind, _ in numbers.most_common())}"
