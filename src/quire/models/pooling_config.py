"""The configuration of pooling: from the hidden states of a text to one vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from quire.errors import RequestError
from quire.ops.activation import Function

Pooling: TypeAlias = Literal["cls", "last", "mean", "max", "weighted", "mean_sqrt_len"]


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """A layer after pooling."""

    in_size: int
    out_size: int
    bias: bool = True
    function: Function | Literal["tanh"] | None = None  # None: the result is not changed
    norm_eps: float | None = None  # of a LayerNorm that follows; None: no LayerNorm follows
    norm_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """The result of a model that does not write, from its checkpoint's files."""

    mode: Pooling = "last"
    encodes: bool = False  # the model is an encoder
    writes: bool = True  # the model can generate tokens, too
    normalized: bool = True  # vectors have length 1
    size: int = 0  # numbers of a vector
    digest: str = ""  # of the weights of dense layers in other files than the model's
    labels: tuple[str, ...] = ()  # of a classifier, whose vectors are their logits; empty: vectors are embeddings
    activation: str = "identity"  # from logits to scores: "sigmoid", "softmax" or "identity"
    second_offset: int = 0  # added to the token ids of a pair's second text: the id of a token also has its type
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that precede a text, by name
    default_prompt: str | None = None  # the name of the prompt of texts without another
    source: str = "the checkpoint has no pooling files"

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> PoolingConfig:
        """Return the fields that JSON has kept. Raises TypeError or ValueError for other ones."""
        config = cls(**{**found, "labels": tuple(found.get("labels", ()))})
        if not isinstance(config.prompts, dict) or {*map(type, config.prompts.values())} - {str}:
            raise ValueError(f"prompts is {config.prompts!r}; it must be an object of texts")
        if {*map(type, config.labels)} - {str}:
            raise ValueError(f"labels is {config.labels!r}; it must be a list of texts")
        return config

    def prompt(self, name: str | None) -> str:
        """Return the prompt of that name; None: the default one, or an empty text. Raises RequestError if unknown."""
        name = name or self.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise RequestError(f"prompt_name is {name!r}; this model's prompts are {known}", "prompt_name")
        return self.prompts[name]

    def check(self, wanted: Literal["embeds", "classifies"]) -> None:
        """Raise RequestError unless the model's vectors are embeddings, or a classifier's logits."""
        if wanted != ("classifies" if self.labels else "embeds"):
            raise RequestError(
                f"this model classifies texts and has no embeddings; its labels are {', '.join(self.labels[:8])}"
                if self.labels
                else "this model embeds texts and has no classifier; LLM.embed and /v1/embeddings give their vectors"
            )

    def check_writes(self) -> None:
        """Raise RequestError unless the model can generate tokens."""
        if not self.writes:
            raise RequestError(
                "this model writes no text; it embeds or classifies texts (LLM.embed or LLM.classify, /v1/embeddings "
                "or /v1/classify)"
            )

    def check_pairs(self) -> None:
        """Raise RequestError unless the model is a cross-encoder: it has one label, the score of two texts."""
        if len(self.labels) != 1:
            raise RequestError(
                f"this classifier has {len(self.labels)} labels, {', '.join(self.labels[:8])}; two texts are scored by "
                "a model with one label, or by the similarity of embeddings"
            )

    @property
    def rows(self) -> Literal["first", "last", "all"]:
        """The tokens whose hidden states make a text's vector."""
        return "last" if self.mode == "last" else "first" if self.mode == "cls" else "all"

    @property
    def takes_whole(self) -> bool:
        """True if one step must compute a whole text."""
        return self.encodes or self.mode != "last"

    def __str__(self) -> str:
        kind = f"scores of {len(self.labels)} labels" if self.labels else "embeddings"
        pooled = "the last token's hidden state" if self.mode == "last" else f"{self.mode} pooling"
        return f"{kind}: {pooled}{', of length 1' if self.normalized else ''} ({self.source})"
