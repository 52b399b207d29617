"""What a decoder is, in Quire's own words: sizes, variations, and the shapes of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from quire.cache.manager import CacheGroup, Heads
from quire.errors import ModelError
from quire.models.model import attention_width, cache_groups, mlp_width
from quire.ops.activation import Activation


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A layer's attention. The defaults are Llama's."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    window: int | None = None  # keys that a row sees, its own included; None: all before it
    rope: Mapping[str, Any] | None = None  # parameters as rope.py reads them; None: no RoPE
    bias: bool = False  # of the projection to q, k and v
    output_bias: bool = False
    qk_norm: Literal["head", "all heads"] | None = None  # what of q, and of k, is normalised before RoPE
    scale: float | None = None  # of q·k; None: 1 / sqrt(D)
    softcap: float | None = None  # of the scores
    sinks: bool = False  # each head has one more logit, without a value

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")

    @property
    def heads(self) -> Heads:
        """What the cache has to know of it."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def q_size(self) -> int:
        """Hq D."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Hkv D."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """A layer's MLP."""

    size: int  # I
    activation: Activation = Activation()  # noqa: RUF009  # frozen
    bias: bool = False

    @property
    def in_rows(self) -> tuple[int, ...]:
        """Rows of its first projection: gates and ups, or one of them."""
        return (self.size, self.size) if self.activation.gated else (self.size,)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """MLPs of one kind, a few of which each row goes through."""

    count: int  # E
    per_token: int  # k, that each row goes through
    mlp: MlpConfig  # each of them
    renormalised: bool  # a row's shares are those among its own experts, not among all

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ModelError(f"{self.per_token} experts a token cannot be chosen of {self.count}")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: what mixes the tokens, and what each of them goes through then."""

    mixer: AttentionConfig
    mlp: MlpConfig | ExpertsConfig


def layers_with(
    attention: AttentionConfig,
    mlp: MlpConfig | ExpertsConfig,
    windows: Sequence[int | None],  # [L]
    ropes: Sequence[Mapping[str, Any] | None],  # [L]
) -> tuple[LayerConfig, ...]:
    """Layers that differ in their windows and their RoPE alone."""
    pairs = zip(windows, ropes, strict=True)
    return tuple(LayerConfig(mixer=replace(attention, window=w, rope=rope), mlp=mlp) for w, rope in pairs)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The decoder: what its layers are, and what is the same in all of them. The defaults are Llama's."""

    vocab_size: int  # V
    hidden_size: int  # H
    max_position_embeddings: int
    tied_embeddings: bool  # the output projection is the embedding
    layers: tuple[LayerConfig, ...]  # [L]
    # Positions, besides RoPE.
    learned_positions: bool = False  # an embedding of each position is added to the token's
    alibi_slopes: tuple[float, ...] | None = None  # [Hq]
    # Normalisation.
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    embedding_norm: bool = False  # the embeddings are normalised
    input_norms: bool = True  # what a branch sees is normalised
    branch_norms: bool = False  # each branch is normalised before it is added to the residual
    # Branches.
    parallel_branches: bool = False  # attention and MLP see the same residual; else the MLP sees what attention added
    branch_scale: float | None = None  # multiplies what a branch adds to the residual
    # Both ends.
    embedding_scale: float | None = None  # multiplies the embeddings
    rounds_embedding_scale: bool = False  # to the weights' dtype first, as Gemma was trained
    logit_scale: float | None = None  # multiplies the logits
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        rotated = any(rope is not None for rope in self.ropes)
        positions = [rotated, self.learned_positions, self.alibi_slopes is not None]
        if sum(positions) != 1:
            raise ModelError(f"a decoder knows positions in exactly one way; this one in {sum(positions)}")
        if self.parallel_branches and not self.input_norms:
            raise ModelError("parallel branches without norms of their inputs are not served")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's: [L]."""
        return tuple(layer.mixer.window for layer in self.layers)

    @property
    def ropes(self) -> tuple[Mapping[str, Any] | None, ...]:
        """Each layer's: [L]."""
        return tuple(layer.mixer.rope for layer in self.layers)

    @property
    def experts(self) -> list[ExpertsConfig]:
        """Those of the layers that have some."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsConfig)]

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The layers with memory of their own, by window and heads."""
        return cache_groups([(layer.mixer.heads, layer.mixer.window) for layer in self.layers])

    @property
    def layer_width(self) -> int:
        """Numbers that a layer computes of a row at most, besides the residual, its norm and a branch.

        Experts also gather rows and results, some of them in fp32. Each kind of layer has room of its own.
        """
        attention = {attention_width(layer.mixer.heads) for layer in self.layers}
        dense = {mlp_width(layer.mlp.size) for layer in self.layers if isinstance(layer.mlp, MlpConfig)}
        experts = {of.per_token * (mlp_width(of.mlp.size) + 6 * self.hidden_size) for of in self.experts}
        return sum(attention) + sum(dense) + max(experts, default=0)

    @cached_property
    def weights(self) -> dict[str, WeightShape]:
        """Each weight by its name. q, k and v are one matrix, and so are the gate and up projections of an MLP."""
        return dict(_weights(self))


class WeightShape(NamedTuple):
    """A weight's shape, and how many rows each of the parts has of which it may be stacked."""

    shape: tuple[int, ...]
    parts: tuple[int, ...]


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight."""
    return {name: weight.shape for name, weight in config.weights.items()}


def weight_use(config: DecoderConfig, name: str) -> Literal["layers", "experts", "head", "looked_up"]:
    """What a step reads of the weight of that name, as `WeightBytes` has it."""
    if name == ("embedding" if config.tied_embeddings else "lm_head"):
        return "head"
    if name in ("embedding", "positions"):
        return "looked_up"
    return "experts" if ".experts." in name else "layers"


class _Linear(NamedTuple):
    name: str
    rows: tuple[int, ...]  # of each of its parts
    columns: int
    bias: bool


def _weights(config: DecoderConfig) -> Iterator[tuple[str, WeightShape]]:
    H = config.hidden_size
    yield "embedding", _whole(config.vocab_size, H)
    if config.learned_positions:
        yield "positions", _whole(config.max_position_embeddings, H)
    if not config.tied_embeddings:
        yield "lm_head", _whole(config.vocab_size, H)
    norms = {"final_norm": H} | ({"embedding_norm": H} if config.embedding_norm else {})
    for i, layer in enumerate(config.layers):
        prefix = f"layers.{i}."
        for linear in (*_attention_linears(layer.mixer, H), *_mlp_linears(layer.mlp, H)):
            rows = sum(linear.rows)
            yield f"{prefix}{linear.name}.weight", WeightShape((rows, linear.columns), linear.rows)
            if linear.bias:
                yield f"{prefix}{linear.name}.bias", WeightShape((rows,), linear.rows)
        if layer.mixer.sinks:
            yield f"{prefix}sinks", _whole(layer.mixer.num_heads)
        norms |= {prefix + name: size for name, size in _norms(config, layer.mixer).items()}
    for name, size in norms.items():
        yield f"{name}.weight", _whole(size)
        if config.norm == "layer":
            yield f"{name}.bias", _whole(size)


def _whole(*shape: int) -> WeightShape:
    return WeightShape(shape, shape[:1])


def _norms(config: DecoderConfig, attention: AttentionConfig) -> dict[str, int]:
    """Name and size of a layer's norms."""
    norms: dict[str, int] = {}
    if config.input_norms:
        norms |= {"input_norm": config.hidden_size, "mlp_norm": config.hidden_size}
    if attention.qk_norm is not None:
        D, by_head = attention.head_dim, attention.qk_norm == "head"
        norms |= {"q_norm": D if by_head else attention.q_size, "k_norm": D if by_head else attention.kv_size}
    if config.branch_norms:
        norms |= {"output_norm": config.hidden_size, "mlp_output_norm": config.hidden_size}
    return norms


def _attention_linears(attention: AttentionConfig, hidden_size: int) -> Iterator[_Linear]:
    q, kv = attention.q_size, attention.kv_size
    yield _Linear("qkv", (q, kv, kv), hidden_size, attention.bias)
    yield _Linear("output", (hidden_size,), q, attention.output_bias)


def _mlp_linears(mlp: MlpConfig | ExpertsConfig, hidden_size: int, prefix: str = "") -> Iterator[_Linear]:
    if isinstance(mlp, MlpConfig):
        yield _Linear(f"{prefix}mlp_in", mlp.in_rows, hidden_size, mlp.bias)
        yield _Linear(f"{prefix}mlp_out", (hidden_size,), mlp.size, mlp.bias)
        return
    yield _Linear("router", (mlp.count,), hidden_size, False)
    for i in range(mlp.count):
        yield from _mlp_linears(mlp.mlp, hidden_size, f"experts.{i}.")
