"""The configuration of a decoder, independent of its family: sizes, variants, and the shapes of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from quire.cache.groups import AnyGroup, CacheGroup, Heads
from quire.errors import ModelError
from quire.models.model import attention_width, cache_groups, mlp_width, state_groups, state_width
from quire.models.pooling_config import DenseConfig, Pooling
from quire.models.rope import Temperature
from quire.models.state_config import GatedDeltaConfig, KeyDecayConfig, SelectiveConfig, StateConfig
from quire.ops.activation import Activation

MOST_EXPERTS = 2**16  # of all layers together, as each expert's weights have names


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A layer's attention. The defaults are Llama's."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    window: int | None = None  # keys that a row attends to, its own included; None: all up to its own
    chunked: bool = False  # the window does not slide: it begins at the last multiple of its length
    rope: Mapping[str, Any] | None = None  # parameters in the format of rope.py; None: no RoPE
    temperature: Temperature | None = None  # of a layer without RoPE
    bias: bool = False  # of the projection to q, k and v
    output_bias: bool = False
    gated: bool = False  # the attention output is multiplied by the sigmoid of a gate, which is projected with q
    head_gated: bool = False  # each head of it is multiplied by the sigmoid of a number, which is projected after v
    # The normalisation of q and k before RoPE.
    qk_norm: Literal["head", "head, no weight", "all heads"] | None = None
    scale: float | None = None  # of q·k; None: 1 / sqrt(D)
    softcap: float | None = None  # of the scores
    sinks: bool = False  # each head has one more logit, without a value
    v_norm: bool = False  # each head of v is normalised, without a weight
    v_is_k: bool = False  # v is the projection of k
    kv_of: int | None = None  # the layer whose keys and values this one reads; None: it has its own

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_gated and (self.kv_of is not None or self.v_is_k):
            raise ModelError("gates of heads are for layers that project q, k and v")
        if self.chunked and self.window is None:
            raise ModelError("attention in chunks needs their length")
        if self.temperature is not None and self.rope is not None:
            raise ModelError("a temperature of positions is for layers without RoPE")

    @property
    def heads(self) -> Heads:
        """The head counts and sizes that the cache needs."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def chunk(self) -> int | None:
        """The chunk length if rows attend only within their chunk; else None."""
        return self.window if self.chunked else None

    @property
    def rope_dim(self) -> int:
        """The head size that RoPE uses: D."""
        return self.head_dim

    @property
    def q_size(self) -> int:
        """Hq D."""
        return self.num_heads * self.head_dim

    @property
    def projected(self) -> tuple[int, ...]:
        """The output sizes of the projection: q, with its gate if gated, k and v if the layer computes them, gates."""
        q = 2 * self.q_size if self.gated else self.q_size
        if self.kv_of is not None:
            return (q,)
        return (q, *(self.kv_size,) * (1 if self.v_is_k else 2), *(self.num_heads,) * self.head_gated)

    @property
    def kv_size(self) -> int:
        """Hkv D."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The indexer of sparse attention, which chooses the keys that each row attends to (DeepSeek-V3.2)."""

    num_heads: int  # Hi
    head_dim: int  # Di; the rotated dimensions come first
    top_k: int  # keys that a row attends to
    shared: bool = False  # the layer has no indexer: it takes the keys that the last layer with one chose
    interleaved: bool = False  # in the checkpoint, rotated pairs are adjacent

    @property
    def q_size(self) -> int:
        """Hi Di."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: one latent row per token replaces the keys and values of all heads (DeepSeek-V2).

    A row of the cache is the normalised latent, and the part of the key that RoPE rotates and all heads share. The
    weight that projects the latent to a head's key is absorbed into the head's query. Another weight projects the
    attention output to the head's value.
    """

    num_heads: int  # Hq
    latent: int
    rope_dim: int  # rotated dimensions of a head's key
    plain_dim: int  # dimensions of a head's key that are not rotated
    v_dim: int
    q_rank: int | None  # size of the normalised row from which q is projected; None: from the layer's input
    rope: Mapping[str, Any] | None
    bias: bool  # of the projections to q's row, to the latent, and to the output
    scale: float  # of q·k
    index: IndexConfig | None = None  # None: a row attends to all keys before it
    head_gated: bool = False  # each head's result is multiplied by the sigmoid of a number, projected from the input
    window: int | None = None  # keys that a row attends to at most, its own among them
    gated: bool = False  # each value is multiplied by the sigmoid of a gate; q and gates are of q's row and the normed
    norm_eps: float = 1e-6  # of the norms of q's row, of the latent and of the rotated part
    rope_norm: bool = False  # the rotated part of the key is normalised before RoPE

    def __post_init__(self) -> None:
        if self.index is not None and self.q_rank is None:
            raise ModelError("an indexer projects its queries from q's row, and q_lora_rank is null; it must be a size")
        if self.index is not None and self.index.head_dim < self.rope_dim:
            raise ModelError(
                f"index_head_dim is {self.index.head_dim}; it must be at least qk_rope_head_dim, {self.rope_dim}"
            )

    @property
    def own_index(self) -> IndexConfig | None:
        """The layer's own indexer."""
        return None if self.index is None or self.index.shared else self.index

    @property
    def heads(self) -> Heads:
        """The head counts and sizes that the cache needs."""
        index_dim = 0 if self.own_index is None else self.own_index.head_dim
        return Heads(self.num_heads, 1, self.latent + self.rope_dim, self.latent, index_dim)

    @property
    def q_size(self) -> int:
        """The size of the query before it absorbs weights. Each head begins with its rotated dimensions."""
        return self.num_heads * (self.rope_dim + self.plain_dim)


Attention = AttentionConfig | LatentConfig
Mixer: TypeAlias = AttentionConfig | LatentConfig | StateConfig


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """A layer's MLP."""

    size: int  # I
    activation: Activation = Activation()  # noqa: RUF009  # frozen
    bias: bool = False
    gate_scale: float = 1.0  # multiplies the gate before the activation

    @property
    def in_rows(self) -> tuple[int, ...]:
        """The output sizes of the first projection: gate and up, or up alone."""
        return (self.size, self.size) if self.activation.gated else (self.size,)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: each row is routed to a few of them. See `Choice` for the routing."""

    count: int  # E
    per_token: int  # k, experts per row
    mlp: MlpConfig  # of each expert
    renormalised: bool  # a row's routing weights are normalised over its chosen experts, not over all
    epsilon: float = 0.0  # added to the divisor of that normalisation
    scores: Literal["softmax", "sigmoid"] = "softmax"
    weighed: Literal["results", "inputs"] = "results"  # the factor that the routing weights multiply
    scaled: bool = False  # a weight of each expert multiplies its routing weight
    corrected: bool = False  # a weight of each expert is added to its score, for the selection only
    groups: int = 1
    groups_chosen: int = 1
    group_best: int = 2
    factor: float = 1.0  # multiplies the routing weights
    router_bias: bool = False
    shared: MlpConfig | None = None  # a shared expert that processes all rows
    shared_gate: bool = False  # the result of the shared expert is multiplied by the sigmoid of a gate, one per row

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ModelError(f"{self.per_token} experts a token cannot be chosen of {self.count}")


@dataclass(frozen=True, kw_only=True)
class AsideConfig:
    """A block next to the residual, with weights that several layers use (Zamba).

    Its attention reads the residual and the embedding, side by side, and its MLP reads the attention's result. A
    projection of the MLP's result is added to the input of the next layer's mixer, and not to the residual.
    """

    weights_of: int  # the layer that holds its weights, except OWN_PARTS
    qkv_rank: int | None  # of the low-rank projections that are added to q, to k and to v; None: nothing is added
    mlp_rank: int | None  # likewise, to the first projection of the MLP

    OWN_PARTS = ("aside", "qkv_down", "qkv_up", "mlp_in_down", "mlp_in_up")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: a mixer of tokens, followed by an MLP or experts. A layer may lack one of the two, with its norm."""

    mixer: Mixer | None
    mlp: MlpConfig | ExpertsConfig | None
    experts: ExpertsConfig | None = None  # in addition to the MLP, with separate norms, also one for the router
    norms: Literal["before", "after"] | None = None  # of its branches; None: as the decoder has them
    joined: bool = False  # its mixer reads the same input as the mixer of the layer before it, which has no MLP
    aside: AsideConfig | None = None
    # Factors of the residual and of the branch where the mixer's result is added, and where the MLP's is.
    mixer_scales: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class RelativeConfig:
    """Scores that depend on the distance between a row and a key, in attention without a cache."""

    size: int  # R: distances, after they are put into buckets
    bias: bool = False  # each head has a number for each distance (MPNet)
    keys: bool = False  # each distance has a key for the rows' queries (DeBERTa's c2p)
    queries: bool = False  # each distance has a query for the keys (DeBERTa's p2c)
    shared: bool = False  # these are projected by the layer's weights of q and k, not by separate ones
    normed: bool = False  # the embeddings of distances are normalised
    buckets: Literal["log, halves", "log, symmetric"] | None = None  # None: clipped distances
    most: int = 128  # the distance from which all are in one bucket


@dataclass(frozen=True, kw_only=True)
class PerLayerConfig:
    """Per-layer embeddings: each layer adds a row of a separate table, mixed with a projection of the embedding."""

    vocab_size: int
    size: int  # of a layer's row


def layers_with(
    attention: AttentionConfig,
    mlp: MlpConfig | ExpertsConfig,
    windows: Sequence[int | None],  # [L]
    ropes: Sequence[Mapping[str, Any] | None],  # [L]
) -> tuple[LayerConfig, ...]:
    """Return layers that differ only in their windows and their RoPE."""
    pairs = zip(windows, ropes, strict=True)
    return tuple(LayerConfig(mixer=replace(attention, window=w, rope=rope), mlp=mlp) for w, rope in pairs)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder: its layers, and the settings that all layers share. The defaults are Llama's."""

    vocab_size: int  # V
    hidden_size: int  # H
    max_position_embeddings: int
    tied_embeddings: bool  # the output projection is the embedding
    layers: tuple[LayerConfig, ...]  # [L]
    # Positions, in addition to RoPE.
    learned_positions: bool = False  # an embedding of each position is added to the token's
    first_position: int = 0  # the table's row of position 0
    alibi_slopes: tuple[float, ...] | None = None  # [Hq]
    # The axis of each rotated pair of dimensions of an image row: 0 time, 1 height, 2 width; empty: images have none.
    image_axes: tuple[int, ...] = ()
    # Layers after which a part of an image's row is added to the residual, counted from the first (deepstack).
    deep_layers: int = 0
    # Normalisation.
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True  # of a layer norm
    norm_eps: float = 1e-6
    norms_residual: bool = False  # the norm after a branch replaces the residual (post-norm)
    first_norm: bool = True  # the first layer normalises its input; else the embeddings were
    embedding_norm: bool = False  # the embeddings are normalised
    # The norms before mixers and experts are multiplied by the sigmoid of an MLP of that size (A.X K2); None: they are
    # not.
    norm_gate: int | None = None
    input_norms: bool = True  # the input of each branch is normalised
    branch_norms: bool = False  # each branch is normalised before it is added to the residual
    # Branches.
    # The MLP reads the residual after attention ("in turn") or before it ("parallel"); with "one norm", both branches
    # share their norm.
    branches: Literal["in turn", "parallel", "parallel, one norm"] = "in turn"
    branch_scale: float | None = None  # multiplies each branch before it is added to the residual
    layer_scales: bool = False  # each layer ends by scaling the residual with a weight
    per_layer: PerLayerConfig | None = None
    # A draft head: its input is a token's embedding and the hidden state before it. It has no embedding.
    joins_hidden: bool = False
    # EAGLE-3: the first layer's attention reads both, side by side. Its residual is the hidden state before or after
    # its norm, and there is no final norm.
    attends_joined: Literal["before", "after"] | None = None
    seen: tuple[int, ...] = ()  # layers whose inputs a draft head reads: they follow the hidden states in the result
    # Both ends.
    embedding_scale: float | None = None  # multiplies the embeddings
    rounds_embedding_scale: bool = False  # round it to the weights' dtype first, as in Gemma's training
    head_bias: bool = False  # of the output projection
    logit_scale: float | None = None  # multiplies the logits
    logit_softcap: float | None = None
    # Models that do not write.
    family: str = ""  # of an encoder, whose tensors have other names in each family
    causal: bool = True  # False: rows attend to all tokens, before and after them, and no cache is kept
    has_head: bool = True  # False: the checkpoint has no output projection
    token_types: int = 0  # an embedding of each is added; the id of a token of type t is its own + t * V
    relative: RelativeConfig | None = None
    classifier: tuple[DenseConfig, ...] = ()  # after pooling
    classifier_pooling: Pooling = "cls"

    def __post_init__(self) -> None:
        rotated = any(rope is not None for rope in self.ropes)
        positions = [rotated, self.learned_positions, self.alibi_slopes is not None]
        if sum(positions) > 1:
            raise ModelError(f"a decoder knows positions in one way at most; this one in {sum(positions)}")
        if (count := sum(experts.count for experts in self.experts)) > MOST_EXPERTS:
            raise ModelError(f"there are {count} experts in all layers together; it must be at most {MOST_EXPERTS}")
        if self.head_bias and self.tied_embeddings:
            raise ModelError("an output projection that is the embedding and has a bias is not served")
        first = next((one.index for one in self.attention if isinstance(one, LatentConfig)), None)
        if first is not None and first.shared:
            raise ModelError("layer 0 takes the keys that an earlier layer chose; the first layer must have an indexer")
        if self.branches != "in turn" and not self.input_norms:
            raise ModelError("parallel branches without norms of their inputs are not served")

    @property
    def num_layers(self) -> int:
        """The number of layers L."""
        return len(self.layers)

    @property
    def num_token_ids(self) -> int:
        """The number of token ids, one for each token and type."""
        return self.vocab_size * max(1, self.token_types)

    @property
    def attention(self) -> list[AttentionConfig | LatentConfig]:
        """The attention of each layer that has one."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each attention."""
        return tuple(attention.window for attention in self.attention)

    @property
    def ropes(self) -> tuple[Mapping[str, Any] | None, ...]:
        """The RoPE of each layer: [L]; None without RoPE or without attention."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple(mixer.rope if isinstance(mixer, Attention) else None for mixer in mixers)

    @property
    def experts(self) -> list[ExpertsConfig]:
        """The experts of each layer that has some."""
        found = (layer.mlp if layer.experts is None else layer.experts for layer in self.layers)
        return [experts for experts in found if isinstance(experts, ExpertsConfig)]

    @property
    def groups(self) -> tuple[AnyGroup, ...]:
        """The cache groups: attention layers by window and heads, then recurrent layers by their state's sizes."""
        mixers = [layer.mixer for layer in self.layers]
        if not self.causal:  # one layer's memory for the tokens of a step
            return (CacheGroup((0,), None, self.attention[0].heads, causal=False),)
        attention = [
            (one.heads, one.window) if isinstance(one, Attention) and not shares_memory(one) else None for one in mixers
        ]
        states = [one.sizes if isinstance(one, StateConfig) else None for one in mixers]
        return (*cache_groups(attention), *state_groups(states))

    @property
    def layer_width(self) -> int:
        """The most numbers that a layer computes per row, in addition to the residual, its norm and a branch.

        Experts also gather rows and results, some of them in fp32. Each kind of layer has separate buffers.
        """
        attention = {attention_width(one.heads) for one in self.attention}
        states = {state_width(layer.mixer.sizes) for layer in self.layers if isinstance(layer.mixer, StateConfig)}
        dense = {mlp_width(layer.mlp.size) for layer in self.layers if isinstance(layer.mlp, MlpConfig)}
        dense |= {mlp_width(of.shared.size) + self.hidden_size for of in self.experts if of.shared is not None}
        experts = {of.per_token * (mlp_width(of.mlp.size) + 6 * self.hidden_size) for of in self.experts}
        # Queries, their packed copy in fp32, and the places of the chosen keys: a few integers each.
        indexers = [one.index for one in self.attention if isinstance(one, LatentConfig) and one.index is not None]
        attention |= {3 * index.q_size + 16 * index.top_k for index in indexers}
        per_layer = 0 if self.per_layer is None else 3 * self.num_layers * self.per_layer.size + self.hidden_size
        added = {weight.shape[0] for name, weight in self.weights.items() if name.endswith("_up.weight")}
        joined = 3 * self.hidden_size if any(layer.aside is not None for layer in self.layers) else 0
        return sum(attention) + sum(states) + sum(dense) + max(experts, default=0) + per_layer + sum(added) + joined

    def holder(self, name: str) -> int | None:
        """Return the layer that holds a weight that several layers may use; None: only the layer in its name does."""
        kind, *path = name.split(".", 2)
        aside = self.layers[int(path[0])].aside if kind == "layers" else None
        return None if aside is None or path[1].startswith(AsideConfig.OWN_PARTS) else aside.weights_of

    def stored_name(self, name: str) -> str:
        """Return the name of a layer's weight in `weights`, where it may be that of an earlier layer."""
        holder = self.holder(name)
        return name if holder is None else f"layers.{holder}.{name.split('.', 2)[2]}"

    @cached_property
    def weights(self) -> dict[str, WeightShape]:
        """The shape of each weight by name. q, k and v are one matrix, and so are the gate and up projections."""
        return dict(_weights(self))


class WeightShape(NamedTuple):
    """A weight's shape, and the number of rows of each part that it may be stacked from."""

    shape: tuple[int, ...]
    parts: tuple[int, ...]


def shares_memory(mixer: Mixer | None) -> bool:
    """Return whether the layer reads the keys and values that another layer stores."""
    return isinstance(mixer, AttentionConfig) and mixer.kv_of is not None


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every weight."""
    return {name: weight.shape for name, weight in config.weights.items()}


def weight_use(config: DecoderConfig, name: str) -> Literal["layers", "experts", "head", "looked_up"]:
    """Return the field of `WeightBytes` that counts a weight."""
    if config.has_head and name in ("embedding" if config.tied_embeddings else "lm_head", "lm_head.bias"):
        return "head"
    if name in ("embedding", "positions", "per_layer_embedding", "token_types"):
        return "looked_up"
    return "experts" if ".experts." in name else "layers"


class _Linear(NamedTuple):
    name: str
    rows: tuple[int, ...]  # of each of its parts
    columns: int
    bias: bool


def _weights(config: DecoderConfig) -> Iterator[tuple[str, WeightShape]]:
    H = config.hidden_size
    if config.joins_hidden:
        yield "join", _whole(H, 2 * H)
    else:
        yield "embedding", _whole(config.vocab_size, H)
    if config.learned_positions:
        yield "positions", _whole(config.first_position + config.max_position_embeddings, H)
    if config.token_types:
        yield "token_types", _whole(config.token_types, H)
    if (relative := config.relative) is not None:
        if relative.bias:
            yield "relative_bias", _whole(relative.size, config.attention[0].num_heads)
        if relative.keys or relative.queries:
            yield "distances", _whole(relative.size, H)
    for i, dense in enumerate(config.classifier):
        yield f"classifier.{i}.weight", _whole(dense.out_size, dense.in_size)
        if dense.bias:
            yield f"classifier.{i}.bias", _whole(dense.out_size)
        if dense.norm_eps is not None:
            yield f"classifier.{i}.norm.weight", _whole(dense.out_size)
        if dense.norm_bias:
            yield f"classifier.{i}.norm.bias", _whole(dense.out_size)
    if config.has_head and not config.tied_embeddings:
        yield "lm_head", _whole(config.vocab_size, H)
    if config.head_bias:
        yield "lm_head.bias", _whole(config.vocab_size)
    norms = {"final_norm": H} | ({"embedding_norm": H} if config.embedding_norm else {})
    if config.joins_hidden:
        norms |= {"join.embedding_norm": H, "join.hidden_norm": H}
    norms |= {"distances_norm": H} if config.relative is not None and config.relative.normed else {}
    if config.per_layer is not None:
        width = config.num_layers * config.per_layer.size
        yield "per_layer_embedding", _whole(config.per_layer.vocab_size, width)
        yield "per_layer_projection.weight", _whole(width, H)
        norms["per_layer_projection_norm"] = config.per_layer.size
    for i, layer in enumerate(config.layers):
        prefix = f"layers.{i}."
        for linear in _linears(config, layer):
            rows, name = sum(linear.rows), config.stored_name(prefix + linear.name)
            yield f"{name}.weight", WeightShape((rows, linear.columns), linear.rows)
            if linear.bias:
                yield f"{name}.bias", WeightShape((rows,), linear.rows)
        for experts in (layer.mlp, layer.experts):
            if isinstance(experts, ExpertsConfig) and experts.corrected:
                yield f"{prefix}correction", _whole(experts.count)
            if isinstance(experts, ExpertsConfig) and experts.scaled:
                yield f"{prefix}shares", _whole(experts.count)
        if config.layer_scales:
            yield f"{prefix}scale", _whole(1)
        if isinstance(layer.mixer, StateConfig):
            for name, shape in layer.mixer.vectors():
                parts = shape[:1]
                if name == "conv.weight" and isinstance(layer.mixer, GatedDeltaConfig | KeyDecayConfig):
                    parts = layer.mixer.conv_parts
                yield prefix + name, WeightShape(shape, parts)
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.sinks:
            yield f"{prefix}sinks", _whole(layer.mixer.num_heads)
        if isinstance(layer.mixer, LatentConfig) and layer.mixer.own_index is not None:  # a LayerNorm in any model
            yield f"{prefix}index_norm.bias", _whole(layer.mixer.own_index.head_dim)
        norms |= {config.stored_name(prefix + name): size for name, size in _norms(config, layer).items()}
    if not config.first_norm:
        del norms["layers.0.input_norm"]
    for name, size in norms.items():
        yield f"{name}.weight", _whole(size)
        if config.norm == "layer" and config.norm_bias:
            yield f"{name}.bias", _whole(size)


def _whole(*shape: int) -> WeightShape:
    return WeightShape(shape, shape[:1])


def _linears(config: DecoderConfig, layer: LayerConfig) -> Iterator[_Linear]:
    H, aside = config.hidden_size, layer.aside
    if layer.mixer is not None:
        yield from _mixer_linears(layer.mixer, H, H if aside is None else 2 * H)
    if aside is not None:
        yield _Linear("aside", (H,), H, False)
    if aside is not None and aside.qkv_rank is not None and isinstance(layer.mixer, AttentionConfig):
        yield _Linear("qkv_down", (aside.qkv_rank,) * 3, 2 * H, False)
        yield _Linear("qkv_up", layer.mixer.projected, aside.qkv_rank, False)
    if aside is not None and aside.mlp_rank is not None and isinstance(layer.mlp, MlpConfig):
        yield _Linear("mlp_in_down", (aside.mlp_rank,), H, False)
        yield _Linear("mlp_in_up", layer.mlp.in_rows, aside.mlp_rank, False)
    if layer.mlp is not None:
        yield from _mlp_linears(layer.mlp, H)
    if config.norm_gate is not None:
        for norm in ("input_norm", "mlp_norm") if isinstance(layer.mlp, ExpertsConfig) else ("input_norm",):
            yield _Linear(f"{norm}_down", (config.norm_gate,), H, False)
            yield _Linear(f"{norm}_up", (H,), config.norm_gate, False)
    if (relative := config.relative) is not None and not relative.shared and isinstance(layer.mixer, AttentionConfig):
        for name, wanted in (("distance_keys", relative.keys), ("distance_queries", relative.queries)):
            if wanted:
                yield _Linear(name, (layer.mixer.q_size,), H, True)
    if layer.experts is not None:
        yield from _mlp_linears(layer.experts, H)
    if config.per_layer is not None:
        yield _Linear("per_layer_gate", (config.per_layer.size,), H, False)
        yield _Linear("per_layer_output", (H,), config.per_layer.size, False)


def _norms(config: DecoderConfig, layer: LayerConfig) -> dict[str, int]:
    """Return the name and size of each of a layer's norms."""
    norms: dict[str, int] = {}
    mixer = layer.mixer
    if layer.experts is not None:
        names = "router_norm", "experts_norm", "experts_output_norm", "dense_output_norm"
        norms |= dict.fromkeys(names, config.hidden_size)
    if config.per_layer is not None:
        norms["per_layer_norm"] = config.hidden_size
    before = config.input_norms if layer.norms is None else layer.norms == "before"
    after = config.branch_norms if layer.norms is None else layer.norms == "after"
    if layer.aside is not None:
        norms["joined_norm"] = 2 * config.hidden_size
    elif before and not layer.joined:
        norms["input_norm"] = config.hidden_size
    if before and config.branches != "parallel, one norm" and None not in (mixer, layer.mlp):
        norms["mlp_norm"] = config.hidden_size
    if isinstance(mixer, LatentConfig):
        norms["latent_norm"] = mixer.latent
        if mixer.q_rank is not None:
            norms["q_norm"] = mixer.q_rank
        if mixer.own_index is not None:
            norms["index_norm"] = mixer.own_index.head_dim
        if mixer.rope_norm:
            norms["rope_norm"] = mixer.rope_dim
    elif isinstance(mixer, AttentionConfig) and mixer.qk_norm in ("head", "all heads"):
        D, by_head = mixer.head_dim, mixer.qk_norm == "head"
        norms["q_norm"] = D if by_head else mixer.q_size
        if mixer.kv_of is None:
            norms["k_norm"] = D if by_head else mixer.kv_size
    if after and layer.mixer is not None:
        norms["output_norm"] = config.hidden_size
    if after and layer.mlp is not None:
        norms["mlp_output_norm"] = config.hidden_size
    return norms


def _mixer_linears(mixer: Mixer, hidden_size: int, in_size: int) -> Iterator[_Linear]:
    match mixer:
        case AttentionConfig():
            yield _Linear("qkv", mixer.projected, in_size, mixer.bias)
            yield _Linear("output", (hidden_size,), mixer.q_size, mixer.output_bias)
        case LatentConfig(latent=latent, num_heads=heads, q_rank=rank):
            yield _Linear("qkv", (rank or mixer.q_size, latent + mixer.rope_dim), hidden_size, mixer.bias)
            if rank is not None:
                gates = (heads * mixer.v_dim,) * mixer.gated
                yield _Linear("q", (mixer.q_size, *gates), 2 * rank if mixer.gated else rank, False)
            if rank is not None and (index := mixer.own_index) is not None:
                yield _Linear("index_q", (index.q_size,), rank, False)
                yield _Linear("index_k", (index.head_dim,), hidden_size, False)
                yield _Linear("index_weights", (index.num_heads,), hidden_size, False)
            yield _Linear("kv", (heads * (mixer.plain_dim + mixer.v_dim),), latent, False)
            if mixer.head_gated:
                yield _Linear("gates", (heads,), hidden_size, False)
            yield _Linear("output", (hidden_size,), heads * mixer.v_dim, mixer.bias)
        case _:
            yield _Linear("state_in", mixer.in_rows, hidden_size, mixer.bias)
            if isinstance(mixer, KeyDecayConfig | SelectiveConfig):
                yield from (_Linear(name, (out,), size, False) for name, out, size in mixer.linears())
            yield _Linear("state_out", (hidden_size,), mixer.out_size, mixer.bias)


def _mlp_linears(mlp: MlpConfig | ExpertsConfig, hidden_size: int, prefix: str = "") -> Iterator[_Linear]:
    if isinstance(mlp, MlpConfig):
        yield _Linear(f"{prefix}mlp_in", mlp.in_rows, hidden_size, mlp.bias)
        yield _Linear(f"{prefix}mlp_out", (hidden_size,), mlp.size, mlp.bias)
        return
    yield _Linear("router", (mlp.count,), hidden_size, mlp.router_bias)
    if mlp.shared is not None:
        yield from _mlp_linears(mlp.shared, hidden_size, "shared.")
    if mlp.shared_gate:
        yield _Linear("shared_gate", (1,), hidden_size, False)
    for i in range(mlp.count):
        yield from _mlp_linears(mlp.mlp, hidden_size, f"experts.{i}.")
