"""Decoders that do not write: the bare model, which embeds texts, and a classifier on the last token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quire.models.decoder_config import DecoderConfig
from quire.models.hf_config import num_labels
from quire.models.pooling_config import DenseConfig
from quire.models.quantisation.module import Tensors
from quire.models.weights import Family, Sources

CLASSIFIER = "ForSequenceClassification"
CAUSAL = {
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "GPT2Model": "GPT2LMHeadModel",
    "GPT2ForSequenceClassification": "GPT2LMHeadModel",
}
PREFIX = "model."


def causal_name(architecture: str) -> str:
    """Return the architecture with an output projection whose layers are those of a bare model or a classifier."""
    return CAUSAL.get(architecture, architecture.removesuffix(CLASSIFIER).removesuffix("Model") + "ForCausalLM")


@dataclass(frozen=True)
class Headless:
    """The family of a decoder without its output projection."""

    family: Family
    causal: str  # the architecture that the family reads
    classifies: bool

    def decoder_config(self, raw: Mapping[str, Any]) -> DecoderConfig:
        """Return the decoder that a config.json describes. Raises ModelError as the family does."""
        decoder = self.family.decoder_config({**raw, "architectures": [self.causal]})
        score = DenseConfig(in_size=decoder.hidden_size, out_size=num_labels(raw), bias=False)
        return replace(
            decoder,
            has_head=False,
            tied_embeddings=False,
            head_bias=False,
            classifier=(score,) if self.classifies else (),
            classifier_pooling="last",
        )

    def weight_sources(self, config: DecoderConfig, names: frozenset[str]) -> Sources:
        """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
        theirs = self.family.weight_sources(config, names)
        return replace(theirs, ends={**theirs.ends, "classifier.0.weight": "score.weight"})


class Prefixed:
    """The tensors of a bare decoder under the names that they have within a model with an output projection."""

    def __init__(self, tensors: Tensors) -> None:
        self.path, self._tensors = tensors.path, tensors
        self.names = frozenset(f"{PREFIX}{name}" for name in tensors.names)

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor."""
        return self._tensors[name.removeprefix(PREFIX)]


def whole_names(tensors: Tensors) -> Tensors:
    """Return the tensors of a decoder under the names of the whole model, also if a checkpoint has the bare names."""
    bare = "embed_tokens.weight" in tensors.names and "norm.weight" in tensors.names
    return Prefixed(tensors) if bare else tensors
