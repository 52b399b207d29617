"""The layers of a decoder: writes a program of operators from a configuration and its weights.

Every layer adds two branches to the residual, attention and an MLP (or experts). The input of each branch is the
normalised residual. One operator adds a branch and computes the next norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from torch import Tensor

from quire.cache.groups import plans_of_layers
from quire.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    ExpertsConfig,
    IndexConfig,
    LatentConfig,
    LayerConfig,
    Mixer,
    MlpConfig,
)
from quire.models.distances import Distances
from quire.models.lora.slots import LoraTables
from quire.models.quantisation.stacking import StackedWeight, Weight, matrix, tensor
from quire.models.rope import Temperature, rope_tables
from quire.models.sharding import Shard
from quire.models.state_config import (
    ConvolutionConfig,
    GatedDeltaConfig,
    KeyDecayConfig,
    LightningConfig,
    LinearUnitConfig,
    SelectiveConfig,
    StateConfig,
    StateSpaceConfig,
)
from quire.ops.activation import Activation
from quire.ops.choice import Choice
from quire.ops.collectives import Columns
from quire.ops.experts import ExpertLayer
from quire.ops.program import (
    Activate,
    Add,
    AddLora,
    Attend,
    AttendWithin,
    Convolve,
    Copy,
    Gate,
    GatedDelta,
    GatedNormalize,
    Gather,
    Keep,
    MixExperts,
    Multiply,
    Normalize,
    Operator,
    Place,
    Program,
    Project,
    Rotate,
    Scale,
    ScanRows,
    Select,
    StateSpace,
    Write,
)
from quire.ops.relative import Relative
from quire.ops.weights.linear import Linear, Linears

LATENT_EPS = 1e-6  # of the norms of q's row, the latent and an indexer's key, whatever rms_norm_eps is
SILU = Activation("silu", gated=False)
Table = tuple[Tensor, Tensor]  # cos and sin: fp32 [max_model_len, D_rot / 2] each


def write_program(
    config: DecoderConfig,
    weights: Mapping[str, Weight],
    linears: Linears,
    tables: Sequence[Table | None],  # of each layer
    alibi_slopes: Tensor | None,  # fp32 [Hq]
    dtype: torch.dtype,  # of the hidden states
    device: torch.device,
    loras: LoraTables | None = None,
    shard: Shard | None = None,
    longest: int = 0,
) -> Program:
    """Write the program of all layers, from the embeddings to the final norm. Reads the weights one after the other.

    With per-layer embeddings, the rows of all layers follow the embedding in the program's input.

    loras: a table is added for each linear that may have adapters; None: no adapters.
    shard: the part of a model that `config` and `weights` are; None: the whole model.
    longest: tokens of the longest sequence, for relative positions.
    """
    writer = _Writer(config, weights, linears, tables, alibi_slopes, dtype, device, loras, shard, longest)
    hidden = writer.begin()
    for index in range(config.num_layers):
        writer.write_seen(index)
        hidden = writer.layer(index, hidden)
    return Program(dtype, writer.input, writer.end(hidden), writer.buffers, writer.operators, list(writer.names))


def position_tables(config: DecoderConfig, max_model_len: int, device: torch.device) -> list[Table | None]:
    """Return the cos and sin of each layer, up to `max_model_len`."""
    found = [_positions(layer.mixer) for layer in config.layers]
    return rope_tables(found, config.max_position_embeddings, max_model_len, device)


def _positions(mixer: Mixer | None) -> tuple[Mapping[str, Any] | Temperature | None, int]:
    """Return the position encoding of q and k, and the size of the head that it applies to."""
    if mixer is None or isinstance(mixer, StateConfig):
        return None, 0
    temperature = mixer.temperature if isinstance(mixer, AttentionConfig) else None
    return (mixer.rope if temperature is None else temperature), mixer.rope_dim


class _Writer:
    """A writer of operators. Each method appends some and returns the place of their result."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        linears: Linears,
        tables: Sequence[Table | None],
        alibi_slopes: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        loras: LoraTables | None,
        shard: Shard | None,
        longest: int,
    ) -> None:
        self.config, self.weights, self.linears, self.loras = config, weights, linears, loras
        self.shard = shard
        self.tables, self.alibi_slopes, self.dtype, self.device = tables, alibi_slopes, dtype, device
        self.operators: list[Operator] = []
        self.names: dict[str, None] = {}  # of the operators: of its weight, else the layer and the kind
        self.scope = ""  # the layer's, before a kind
        self.buffers: dict[str, int] = {}  # widths
        H = config.hidden_size
        self.residual, self.hidden, self.branch = (self.buffer(name, H) for name in ("residual", "hidden", "branch"))
        self.normalized = self.residual if config.norms_residual else self.hidden
        self.input, self.per_layer = self.residual, cast(Place | None, None)
        if config.joins_hidden:
            self.input = self.buffer("input", 2 * H)
        if config.seen:  # the caller passes zeros after the embedding
            self.input = self.buffer("input", (1 + len(config.seen)) * H)
        if config.deep_layers:  # the caller passes parts of image rows, or zeros, after the embedding
            self.input = self.buffer("input", (1 + config.deep_layers) * H)
        if config.per_layer is not None:  # the caller passes the layers' rows after the embedding
            width = config.num_layers * config.per_layer.size
            self.input, self.per_layer = self.buffer("input", H + width), self.buffer("per layer", width)
        self.group_of_layer = plans_of_layers(config.groups)
        self.made: dict[str, Linear] = {}
        self.distances = None
        if config.relative is not None:
            self.distances = Distances(config.relative, config.norm_eps, weights, linears, longest, dtype)

    # ------------------------------------------------------------------------------------------- the layer

    def begin(self) -> Place:
        """Write the operators before the first layer. Return the place of its input."""
        if self.per_layer is not None:
            self.write_per_layer(self.per_layer)
        if self.config.seen:
            embedding, *_ = self.seen()
            self.write(Copy(embedding, self.residual))
            self.write(Scale(embedding, 0.0))
        if self.config.deep_layers:
            self.write(Copy(self.deep(0), self.residual))
        if self.config.attends_joined is not None:
            return self.write_side_by_side()
        if self.config.joins_hidden:
            self.write_join()
        if any(layer.aside is not None for layer in self.config.layers):
            self.write(Copy(self.residual, self.buffer("embedding", self.residual.size)))
        if self.has("embedding_norm"):
            self.normalize("embedding_norm", self.residual, self.residual)
        return self.normalized_residual("layers.0.input_norm")

    def write_join(self) -> None:
        """Normalise the embedding and the hidden state before it, and project both. The norms' weights are folded."""
        norms = [tensor(self.weights[f"join.{part}_norm.weight"]) for part in ("embedding", "hidden")]
        weight = tensor(self.weights["join"])
        joined = self.buffer("joined", self.input.size)
        self.normalize_plainly(self.input, joined, 2)
        folded = (weight.float() * torch.cat(norms)).to(weight.dtype)
        self.write(Project(joined, self.linears.linear(folded), self.residual))

    def write_side_by_side(self) -> Place:
        """Normalise the embedding and the hidden state before it. Return both. The norms' weights are in the linear."""
        joined, before = self.buffer("joined", self.input.size), self.columns(self.input, *[self.residual.size] * 2)[1]
        if self.config.attends_joined == "after":
            self.normalize("join.hidden_norm", before, self.residual)
        else:
            self.write(Copy(before, self.residual))
        self.normalize_plainly(self.input, joined, 2)
        return joined

    def seen(self) -> list[Place]:
        """Return the columns of the result: the hidden state, and the input of each layer of `config.seen`."""
        return self.columns(self.input, *[self.residual.size] * (1 + len(self.config.seen)))

    def write_seen(self, index: int) -> None:
        """Keep the input of a layer for the result, if it is one that a draft head reads."""
        if index in self.config.seen:
            self.write(Add(self.residual, self.seen()[1 + self.config.seen.index(index)]))

    def end(self, hidden: Place) -> Place:
        """Return the place of the result. hidden: that of the last layer."""
        if not self.config.seen:
            return hidden
        self.write(Add(hidden, self.seen()[0]))
        return self.input

    def deep(self, index: int) -> Place:
        """Return a part of the program's input: 0 the embedding, i the rows added to the residual after i layers."""
        return self.columns(self.input, *[self.residual.size] * (1 + self.config.deep_layers))[index]

    def write_per_layer(self, out: Place) -> None:
        """Write the per-layer embeddings: the token's row and a projection of its embedding, added and scaled."""
        config = self.config
        embedding, given = self.columns(self.input, config.hidden_size, out.size)
        self.write(Copy(embedding, self.residual))
        projected = self.buffer("projected", out.size)
        self.project("per_layer_projection", self.residual, projected)
        self.write(Scale(projected, config.hidden_size**-0.5))
        self.normalize("per_layer_projection_norm", projected, out, config.num_layers)
        self.write(Add(given, out))
        self.write(Scale(out, 0.5**0.5))

    def layer(self, index: int, hidden: Place) -> Place:
        """Write one layer. hidden: the input of its attention. Return the place of the next layer's."""
        config, name, last = self.config, f"layers.{index}.", index == self.config.num_layers - 1
        layer, self.scope = config.layers[index], name
        after = "final_norm" if last else f"layers.{index + 1}.input_norm"
        if layer.aside is not None:
            return self.aside(index, layer, after)
        one_norm = config.branches == "parallel, one norm"
        if layer.mixer is None:
            if last:
                self.write(Keep((self.residual,) if hidden == self.residual else (hidden, self.residual)))
        else:
            mixed = self.mixed(index, layer.mixer, hidden)
            if last:
                also = (hidden,) if one_norm else () if self.per_layer is None else (self.per_layer,)
                self.write(Keep((mixed, self.residual, *also)))
            self.project_mixed(index, mixed)
            self.end_branch(f"{name}output_norm", layer.mixer_scales)
            if layer.mlp is None:
                if last or not config.layers[index + 1].joined:
                    return self.add_branch(after)
                self.write(Add(self.branch, self.residual))
                return hidden
            if config.branches == "in turn":
                hidden = self.add_branch(f"{name}mlp_norm")
            else:
                if not one_norm:
                    hidden = self.normalized_residual(f"{name}mlp_norm")
                self.write(Add(self.branch, self.residual))
        if isinstance(layer.mlp, ExpertsConfig):
            self.experts(name, hidden, layer.mlp, self.branch)
        elif layer.mlp is not None:
            self.mlp(name, hidden, layer.mlp, self.branch)
        if layer.experts is not None:
            self.add_experts(name, layer.experts)
        self.end_branch(f"{name}mlp_output_norm", layer.mlp_scales)
        is_deep = index < config.deep_layers
        if self.per_layer is None and not config.layer_scales and not is_deep:
            return self.add_branch(after)
        self.write(Add(self.branch, self.residual))
        if is_deep:
            self.write(Add(self.deep(1 + index), self.residual))
        if config.per_layer is not None and self.per_layer is not None:
            size = config.per_layer.size
            self.add_own_row(name, Place(self.per_layer.buffer, index * size, size))
        if config.layer_scales:
            self.write(Scale(self.residual, float(tensor(self.weights[f"{name}scale"]))))
        return self.normalized_residual(after)

    def aside(self, index: int, layer: LayerConfig, norm: str) -> Place:
        """Write a block next to the residual. Return the place of the next layer's input, after its norm."""
        name, H = f"layers.{index}.", self.residual.size
        joined = self.buffer("joined", 2 * H)
        self.write(Copy(self.residual, joined, self.buffer("embedding", H)))
        self.normalize(f"{name}joined_norm", joined, joined)
        self.project_mixed(index, self.mixed(index, cast(Mixer, layer.mixer), joined))
        self.normalize(f"{name}mlp_norm", self.branch, self.branch)
        self.mlp(name, self.branch, cast(MlpConfig, layer.mlp), self.branch)
        self.project(f"{name}aside", self.branch, self.hidden)
        self.write(Add(self.residual, self.hidden))
        self.normalize(norm, self.hidden, self.hidden)
        return self.hidden

    def add_experts(self, name: str, config: ExpertsConfig) -> None:
        """Compute experts from the residual and add their result to the branch."""
        self.normalize(f"{name}dense_output_norm", self.branch, self.branch)
        H = self.residual.size
        seen, row, mixed = (self.buffer(name, H) for name in ("seen by router", "row of experts", "mixed"))
        self.normalize(f"{name}router_norm", self.residual, seen)
        self.normalize(f"{name}experts_norm", self.residual, row)
        self.experts(name, row, config, mixed, seen)
        self.normalize(f"{name}experts_output_norm", mixed, mixed)
        self.write(Add(mixed, self.branch))

    def add_own_row(self, name: str, row: Place) -> None:
        """Add a gated projection of the layer's embedding `row` to the residual."""
        gate, opened = self.buffer("gate", row.size), self.buffer("opened", row.size)
        self.project(f"{name}per_layer_gate", self.residual, gate)
        self.write(Activate(gate, opened, Activation("gelu_tanh", gated=False)))
        self.write(Multiply(row, opened))
        self.project(f"{name}per_layer_output", opened, self.branch)
        self.normalize(f"{name}per_layer_norm", self.branch, self.branch)
        self.write(Add(self.branch, self.residual))

    def mixed(self, index: int, config: Mixer, hidden: Place) -> Place:
        """Write a layer's mixer. Return the place of its result, before the output projection."""
        match config:
            case AttentionConfig():
                return self.attention(index, config, hidden)
            case LatentConfig():
                return self.latent_attention(index, config, hidden)
            case GatedDeltaConfig():
                return self.gated_delta(index, config, hidden)
            case StateSpaceConfig():
                return self.state_space(index, config, hidden)
            case ConvolutionConfig():
                return self.convolution(index, config, hidden)
            case LightningConfig():
                return self.lightning(index, config, hidden)
            case KeyDecayConfig():
                return self.key_decay(index, config, hidden)
            case SelectiveConfig():
                return self.selective(index, config, hidden)
            case LinearUnitConfig():
                return self.linear_unit(index, config, hidden)

    def project_mixed(self, index: int, mixed: Place) -> None:
        """Write the output projection of a layer's mixer to the branch."""
        mixed = self.gathered("all mixed", mixed, None if self.shard is None else self.shard.mixed(index))
        output = "state_out" if isinstance(self.config.layers[index].mixer, StateConfig) else "output"
        self.project_parted(f"layers.{index}.{output}", mixed, self.branch)

    def attention(self, index: int, config: AttentionConfig, hidden: Place) -> Place:
        """Project, rotate, store, attend. Return the place of the result."""
        name, D, q_size, kv_size = f"layers.{index}.", config.head_dim, config.q_size, config.kv_size
        qkv = self.buffer("qkv", sum(config.projected))
        by_head = config.qk_norm != "all heads"
        # A norm over all heads needs all of them on each rank.
        (self.project if by_head else self.project_parted)(f"{name}qkv", hidden, qkv)
        q, *parts = self.columns(qkv, *config.projected)
        if config.gated:
            q, gate = self.columns(q, q_size, q_size)
        if config.qk_norm is not None:
            packed, q = q, self.buffer("q", q_size)
            self.normalize_heads(f"{name}q_norm", packed, q, config.num_heads if by_head else 1)
        if config.head_gated:
            *parts, gates = parts
        if config.kv_of is None:
            k, v = parts[0], parts[-1]
            if config.qk_norm is not None:
                k = self.buffer("k", kv_size)
                self.normalize_heads(f"{name}k_norm", parts[0], k, config.num_kv_heads if by_head else 1)
            if config.v_norm:
                packed, v = v, self.buffer("v", kv_size)
                self.normalize_plainly(packed, v, config.num_kv_heads)
        else:
            k = Place(q.buffer, 0, 0)
        if (table := self.tables[index]) is not None:  # a temperature applies to q only
            self.write(Rotate(q, k if config.temperature is None else Place(q.buffer, 0, 0), *table, D))
        if not self.config.causal and (config.window is not None or self.config.relative is not None):
            return self.attention_within(index, config, (q, k, v))
        stored = index if config.kv_of is None else config.kv_of
        if not self.config.causal:
            stored = 0  # all layers share one layer's memory
        group, attended = self.group_of_layer[stored], self.buffer("attended", q_size)
        if config.kv_of is None:
            self.write(Write(k, v, stored, group, D))
        sinks = tensor(self.weights[f"{name}sinks"]) if config.sinks else None
        rule = (config.scale, self.alibi_slopes, config.softcap, sinks, config.chunk)
        self.write(Attend(q, attended, stored, group, D, *rule))
        if config.gated:
            self.write(Gate(gate, attended))
        if config.head_gated:
            self.gate_heads(gates, attended)
        return attended

    def gate_heads(self, gates: Place, x: Place) -> None:
        """Multiply each head of x by the sigmoid of its gate."""
        sizes = [1] * gates.size, [x.size // gates.size] * gates.size
        for gate, head in zip(self.columns(gates, *sizes[0]), self.columns(x, *sizes[1]), strict=True):
            self.write(Gate(gate, head))

    def attention_within(self, index: int, config: AttentionConfig, qkv: tuple[Place, Place, Place]) -> Place:
        """Attend to the keys of the sequence in this batch. Return the place of the result."""
        D, rule = config.head_dim, config.window
        scale = D**-0.5 if config.scale is None else config.scale
        terms = rule if self.distances is None else self.distances.of_layer(f"layers.{index}.", config, self.linear)
        out = self.buffer("attended", config.q_size)
        self.write(AttendWithin(*qkv, out, 0, D, scale, cast(int | Relative, terms)))
        return out

    def latent_attention(self, index: int, config: LatentConfig, hidden: Place) -> Place:
        """Write multi-head latent attention: one latent row per token. Return the place of the result."""
        name, heads, rope = f"layers.{index}.", config.num_heads, config.rope_dim
        q_size = config.q_rank or config.q_size
        qkv = self.buffer("qkv", q_size + config.latent + rope)
        self.project(f"{name}qkv", hidden, qkv)
        q, latent, k_rope = self.columns(qkv, q_size, config.latent, rope)
        if config.q_rank is not None:
            self.normalize(f"{name}q_norm", q, row := self.buffer("q row", q_size), eps=config.norm_eps)
            if config.own_index is not None:
                self.select(index, config.own_index, hidden, row)
            if config.gated:
                self.write(Copy(row, row := self.buffer("q rows", 2 * q_size), q))
            sizes = (config.q_size, heads * config.v_dim * config.gated)
            self.project(f"{name}q", row, whole := self.buffer("q", sum(sizes)))
            q, value_gate = self.columns(whole, *sizes)
        self.normalize(f"{name}latent_norm", latent, latent, eps=config.norm_eps)
        if config.rope_norm:
            self.normalize(f"{name}rope_norm", k_rope, k_rope, eps=config.norm_eps)
        if (table := self.tables[index]) is not None:
            for place, dim in ((q, rope + config.plain_dim), (k_rope, rope)):
                self.write(Rotate(place, Place(place.buffer, 0, 0), *table, dim))
        to_latent, to_value = self.latent_heads(name, config)
        wide_q = self.buffer("latent q", heads * (config.latent + rope))
        self.write(Project(q, to_latent, wide_q))
        group, dim = self.group_of_layer[index], config.latent + rope
        self.write(Write(Place(qkv.buffer, latent.first, dim), latent, index, group, dim))
        mixed = self.buffer("attended", heads * config.latent)
        selected = config.index is not None
        self.write(Attend(wide_q, mixed, index, group, dim, config.scale, None, None, selected=selected))
        values = self.buffer("values", heads * config.v_dim)
        self.write(Project(mixed, to_value, values))
        if config.gated:
            self.write(Gate(value_gate, values))
        if config.head_gated:
            self.project(f"{name}gates", hidden, gates := self.buffer("gates", heads))
            self.gate_heads(gates, values)
        return values

    def select(self, index: int, config: IndexConfig, hidden: Place, row: Place) -> None:
        """Write the indexer: its queries from q's normalised row, a key and a weight of each head from the input."""
        name, q, k = f"layers.{index}.", self.buffer("index q", config.q_size), self.buffer("index k", config.head_dim)
        self.project(f"{name}index_q", row, q)
        self.project(f"{name}index_k", hidden, k)
        self.normalize(f"{name}index_norm", k, k, eps=LATENT_EPS)
        if (table := self.tables[index]) is not None:
            self.write(Rotate(q, k, *table, config.head_dim))
        weights = self.linears.head(matrix(self.weights[f"{name}index_weights.weight"]))
        self.write(Select(q, k, hidden, weights, index, self.group_of_layer[index], config.top_k))

    def latent_heads(self, name: str, config: LatentConfig) -> tuple[Linear, Linear]:
        """Return the linears that project each head's query to the latent, and its attention output to its value."""
        weight = tensor(self.weights[f"{name}kv.weight"]).unflatten(0, (config.num_heads, -1))  # type: ignore[no-untyped-call]
        keys, values = weight[:, : config.plain_dim], weight[:, config.plain_dim :]  # [Hq, dim, latent]
        rope, latent = config.rope_dim, config.latent
        to_latent = weight.new_zeros(config.num_heads, latent + rope, rope + config.plain_dim)
        to_latent[:, :latent, rope:] = keys.transpose(1, 2)
        to_latent[:, latent:, :rope] = torch.eye(rope)  # rotated dimensions pass through unchanged
        return self.linears.heads(to_latent), self.linears.heads(values)

    def gated_delta(self, index: int, config: GatedDeltaConfig, hidden: Place) -> Place:
        """Project, convolve, update and read the state, normalise. Return the place of the result."""
        name, group, H = f"layers.{index}.", self.group_of_layer[index], config.num_heads
        projected = self.buffer("state_in", sum(config.in_rows))
        self.project_parted(f"{name}state_in", hidden, projected)
        x, gate, b_and_a = self.columns(projected, config.width, config.out_size, 2 * H)
        convolved, recalled = self.convolved(index, x, "silu"), self.buffer("recalled", config.out_size)
        rate, dt_bias = -tensor(self.weights[f"{name}A_log"]).exp(), tensor(self.weights[f"{name}dt_bias"])
        self.write(GatedDelta(convolved, b_and_a, recalled, rate, dt_bias, index, group, config.beta_scale))
        weight = tensor(self.weights[f"{name}gate_norm.weight"]).repeat(H)  # the same for each head
        return self.gated_norm(recalled, gate, weight, H, "norm", config.norm_eps)

    def state_space(self, index: int, config: StateSpaceConfig, hidden: Place) -> Place:
        """Project, convolve, update and read the state, normalise. Return the place of the result."""
        name, group = f"layers.{index}.", self.group_of_layer[index]
        projected = self.buffer("state_in", sum(config.in_rows))
        self.project_parted(f"{name}state_in", hidden, projected)
        gate, x, dt = self.columns(projected, *config.in_rows)
        for place, factor in zip(self.columns(projected, *config.in_parts), config.in_scales, strict=False):
            self.scale(place, factor)
        convolved, recalled = self.convolved(index, x, "silu"), self.buffer("recalled", config.out_size)
        rate = -tensor(self.weights[f"{name}A_log"]).exp()
        skip, dt_bias = (tensor(self.weights[f"{name}{part}"]) for part in ("D", "dt_bias"))
        self.write(StateSpace(convolved, dt, recalled, rate, skip, dt_bias, config.dt_limits, index, group))
        if config.norm_groups == 0:
            self.write(Activate(gate, opened := self.buffer("opened", config.out_size), SILU))
            self.write(Multiply(opened, recalled))
            return recalled
        weight = tensor(self.weights[f"{name}gate_norm.weight"])
        return self.gated_norm(recalled, gate, weight, config.norm_groups, config.first)

    def lightning(self, index: int, config: LightningConfig, hidden: Place) -> Place:
        """Project, activate, update and read the state, normalise, gate. Return the place of the result."""
        name, group, H = f"layers.{index}.", self.group_of_layer[index], config.num_heads
        projected = self.buffer("state_in", sum(config.in_rows))
        self.project_parted(f"{name}state_in", hidden, projected)
        x, gate = self.columns(projected, 3 * config.out_size, config.out_size)
        self.write(Activate(x, opened := self.buffer("opened", x.size), SILU))
        recalled, normed = self.buffer("recalled", config.out_size), self.buffer("gated", config.out_size)
        # Mamba-2's recurrence, whose dt the limits set to 1 for any projected number.
        rate, zeros = -torch.tensor(config.slopes, device=self.device), torch.zeros(H, device=self.device)
        dt, limits = Place(opened.buffer, 0, H), (1.0, 1.0)
        self.write(StateSpace(opened, dt, recalled, rate, zeros, zeros, limits, index, group))
        weight = tensor(self.weights[f"{name}gate_norm.weight"])
        self.write(Normalize(recalled, normed, weight, None, config.norm_eps, None, 1))
        self.write(Gate(gate, normed))
        return normed

    def key_decay(self, index: int, config: KeyDecayConfig, hidden: Place) -> Place:
        """Project, convolve, update and read the state, normalise, gate. Return the place of the result."""
        name, H = f"layers.{index}.", config.num_heads
        projected = self.buffer("state_in", sum(config.in_rows))
        self.project_parted(f"{name}state_in", hidden, projected)
        *_, decays, gate, beta = self.columns(projected, *config.in_rows)
        convolved = self.convolved(index, Place(projected.buffer, 0, 3 * config.out_size), "silu")
        if config.rank is not None:
            rows = decays, gate
            decays, gate = (self.buffer(part, config.out_size) for part in ("decays", "opened"))
            self.project(f"{name}state_decay", rows[0], decays)
            self.project(f"{name}state_gate", rows[1], gate)
        recalled, normed = self.buffer("recalled", config.out_size), self.buffer("gated", config.out_size)
        rate, bias = -tensor(self.weights[f"{name}A_log"]).exp(), tensor(self.weights[f"{name}dt_bias"])
        group = self.group_of_layer[index]
        places = convolved, decays, beta, recalled
        self.write(ScanRows(*places, "delta", rate, bias, None, index, group, floor=config.floor))
        weight = tensor(self.weights[f"{name}gate_norm.weight"])
        self.write(Normalize(recalled, normed, weight, None, config.norm_eps, None, H))
        self.write(Gate(gate, normed))
        return normed

    def selective(self, index: int, config: SelectiveConfig, hidden: Place) -> Place:
        """Project, convolve, update and read the state, gate. Return the place of the result."""
        name, size = f"layers.{index}.", config.width
        projected, mixed = self.buffer("state_in", 2 * size), self.buffer("state_x", sum(config.x_parts))
        self.project_parted(f"{name}state_in", hidden, projected)
        x, gate = self.columns(projected, size, size)
        convolved = self.convolved(index, x, "silu")
        self.project(f"{name}state_x", convolved, mixed)
        row, C, B = parts = self.columns(mixed, *config.x_parts)
        for part, norm in zip(parts, ("dt_norm", "C_norm", "B_norm"), strict=True):
            if config.norm_eps is not None:
                ones = torch.ones(part.size, dtype=torch.float32, device=self.device)
                weight = tensor(self.weights[f"{name}{norm}.weight"]) if config.norm_weights else ones
                self.write(Normalize(part, part, weight, None, config.norm_eps))
        dt, recalled, opened = (self.buffer(part, size) for part in ("decays", "recalled", "opened"))
        self.project(f"{name}state_dt", row, dt)
        rate = -tensor(self.weights[f"{name}A_log"]).exp()  # [W, N]
        rate = rate.view(-1, config.head_dim, config.state_dim).transpose(1, 2).contiguous()
        bias, skip = (tensor(self.weights[f"{name}{part}"]) for part in ("dt_bias", "D"))
        places = convolved, dt, Place(mixed.buffer, C.first, C.size + B.size), recalled
        self.write(ScanRows(*places, "selective", rate, bias, skip, index, self.group_of_layer[index]))
        self.write(Activate(gate, opened, SILU))
        self.write(Multiply(opened, recalled))
        return recalled

    def linear_unit(self, index: int, config: LinearUnitConfig, hidden: Place) -> Place:
        """Project, convolve, compute the gates, update the state, gate. Return the place of the result."""
        name, size = f"layers.{index}.", config.width
        projected = self.buffer("state_in", 2 * size)
        self.project_parted(f"{name}state_in", hidden, projected)
        x, gate = self.columns(projected, size, size)
        convolved = self.convolved(index, x, None)
        gates = []
        for part in ("decay", "input"):
            gates.append(out := self.buffer(part, size))
            self.project_heads(tensor(self.weights[f"{name}{part}_heads"]).transpose(1, 2), convolved, out)
        bias = torch.stack([tensor(self.weights[f"{name}{part}_bias"]).flatten() for part in ("decay", "input")])
        rate = -8.0 * torch.nn.functional.softplus(tensor(self.weights[f"{name}A_log"]))
        rate = rate.view(-1, 1, config.head_dim)
        recalled, opened = self.buffer("recalled", size), self.buffer("opened", size)
        places = convolved, gates[0], gates[1], recalled
        self.write(ScanRows(*places, "lru", rate, bias, None, index, self.group_of_layer[index]))
        self.write(Activate(gate, opened, config.activation))
        self.write(Multiply(opened, recalled))
        return recalled

    def convolution(self, index: int, config: ConvolutionConfig, hidden: Place) -> Place:
        """Project, gate, convolve, gate. Return the place of the result."""
        projected = self.buffer("state_in", sum(config.in_rows))
        self.project_parted(f"layers.{index}.state_in", hidden, projected)
        before, after, x = self.columns(projected, *config.in_rows)
        self.write(Multiply(before, x))
        convolved = self.convolved(index, x, None)
        self.write(Multiply(after, convolved))
        return convolved

    def convolved(self, index: int, x: Place, activation: Literal["silu"] | None) -> Place:
        """Write the layer's convolution of x. Return the place of the result."""
        name, out = f"layers.{index}.conv", self.buffer("convolved", x.size)
        weight = tensor(self.weights[f"{name}.weight"])
        self.write(Convolve(x, out, weight, self.bias(name), activation, index, self.group_of_layer[index]))
        return out

    def gated_norm(
        self,
        x: Place,
        gate: Place,
        weight: Tensor,
        heads: int,
        first: Literal["norm", "gate"],
        eps: float | None = None,
    ) -> Place:
        """Normalise x by heads, and multiply it by silu(gate) before or after that. Return the place of the result."""
        out = self.buffer("gated", x.size)
        self.write(GatedNormalize(x, gate, out, weight, eps or self.config.norm_eps, heads, first))
        return out

    def mlp(self, name: str, hidden: Place, config: MlpConfig, out: Place) -> None:
        """Project up, activate, project down."""
        columns = None if self.shard is None else self.shard.columns(config.size)
        size = config.size if columns is None else columns.own
        inner, activated = self.buffer("inner", len(config.in_rows) * size), self.buffer("activated", size)
        self.project(f"{name}mlp_in", hidden, inner)
        if config.activation.gated:
            self.scale(Place(inner.buffer, 0, size), config.gate_scale)
        self.write(Activate(inner, activated, config.activation))
        self.project_parted(f"{name}mlp_out", self.gathered("all activated", activated, columns), out)

    def experts(self, name: str, hidden: Place, config: ExpertsConfig, out: Place, seen: Place | None = None) -> None:
        """Route each row to its experts and mix their results. seen: the router's input; None: `hidden`."""
        # The router is a head, whose logits have the highest precision.
        router = self.linears.head(matrix(self.weights[f"{name}router.weight"]), self.bias(f"{name}router"))
        parts = [f"{name}experts.{i}." for i in range(config.count)]
        mlp_in, mlp_out = ([self.expert(f"{part}{kind}") for part in parts] for kind in ("mlp_in", "mlp_out"))
        choice = Choice(
            num_chosen=config.per_token,
            renormalised=config.renormalised,
            epsilon=config.epsilon,
            scores=config.scores,
            bias=tensor(self.weights[f"{name}correction"]) if config.corrected else None,
            groups=config.groups,
            groups_chosen=config.groups_chosen,
            group_best=config.group_best,
            factor=config.factor,
            scales=tensor(self.weights[f"{name}shares"]) if config.scaled else None,
        )
        rule = (choice, config.mlp.activation, config.weighed)
        if self.shard is None:
            self.write(MixExperts(hidden, ExpertLayer(router, mlp_in, mlp_out, *rule), out, seen))
        else:
            layer = ExpertLayer(router, mlp_in, mlp_out, *rule, self.shard.columns(config.mlp.size))
            columns = self.shard.columns(out.size)
            own = self.buffer("own columns", columns.own)
            self.write(MixExperts(hidden, layer, own, seen))
            self.write(Gather(own, out, columns))
        if config.shared is not None:
            shared = self.buffer("shared", out.size)
            self.mlp(f"{name}shared.", hidden, config.shared, shared)
            if config.shared_gate:
                gate = self.buffer("shared gate", 1)
                self.project(f"{name}shared_gate", hidden, gate)
                self.write(Gate(gate, shared))
            self.write(Add(shared, out))

    # ------------------------------------------------------------------------------------ norms and branches

    def end_branch(self, norm: str, scales: tuple[float, float]) -> None:
        """Normalise the branch before it is added, and scale the residual and the branch, if the family does."""
        if self.has(norm):
            self.normalize(norm, self.branch, self.branch)
        if self.config.branch_scale is not None:
            self.write(Scale(self.branch, self.config.branch_scale))
        self.scale(self.residual, scales[0])
        self.scale(self.branch, scales[1])

    def scale(self, x: Place, factor: float) -> None:
        """Scale x in place, unless the factor is 1."""
        if factor != 1.0:
            self.write(Scale(x, factor))

    def normalized_residual(self, norm: str) -> Place:
        """Normalise the residual. Return the place of the result, or the residual if the family lacks this norm."""
        if not self.has(norm):
            return self.residual
        self.normalize(norm, self.residual, self.normalized)
        return self.normalized

    def add_branch(self, norm: str) -> Place:
        """Add the branch to the residual and normalise it. Return the same as `normalized_residual`."""
        if not self.has(norm):
            self.write(Add(self.branch, self.residual))
            return self.residual
        self.normalize(norm, self.branch, self.normalized, residual=self.residual)
        return self.normalized

    # ------------------------------------------------------------------------------------ operators, buffers

    def has(self, name: str) -> bool:
        """Return whether the model has a weight of that name."""
        return f"{self.config.stored_name(name)}.weight" in self.weights

    def buffer(self, name: str, width: int) -> Place:
        """Return a whole buffer. Layers share buffers of the same name and width."""
        if self.buffers.setdefault(name, width) != width:
            name = f"{name} {width}"
            self.buffers[name] = width
        return Place(name, 0, width)

    def columns(self, place: Place, *sizes: int) -> list[Place]:
        """Split a place into consecutive columns of these sizes."""
        ends = accumulate(sizes, initial=place.first)
        return [Place(place.buffer, first, size) for first, size in zip(ends, sizes, strict=False)]

    def bias(self, name: str) -> Tensor | None:
        """Return a linear's bias; None if it has none."""
        name = self.config.stored_name(name)
        return tensor(self.weights[f"{name}.bias"]) if f"{name}.bias" in self.weights else None

    def expert(self, name: str) -> Linear:
        """Return a linear of an expert."""
        weight = matrix(self.weights[f"{name}.weight"])
        return self.linears.linear(weight, self.bias(name))

    def linear(self, name: str) -> Linear:
        """Return a linear of a layer. It may be read again: by another layer, or for relative positions."""
        name = self.config.stored_name(name)
        if name in self.made:
            return self.made[name]
        weight, bias = self.weights[f"{name}.weight"], self.bias(name)
        if isinstance(weight, StackedWeight):
            self.made[name] = self.linears.joined(weight.parts, bias)
        else:
            self.made[name] = self.linears.linear(weight, bias)
        return self.made[name]

    def project(self, name: str, x: Place, out: Place) -> None:
        """Write out = linear(x), its low-rank part if it has one, and its LoRA adapters if enabled."""
        self.write(Project(x, self.linear(name), out), name)
        if self.has(f"{name}_down"):
            down, up = (self.config.weights[f"{name}_{part}.weight"].shape for part in ("down", "up"))
            row, added = self.buffer("low rank", down[0]), self.buffer("added", out.size)
            self.project(f"{name}_down", x, row)
            heads = tensor(self.weights[f"{name}_up.weight"]).view(down[0] // up[1], -1, up[1])
            self.project_heads(heads, row, added)
            self.write(Add(added, out))
        if self.loras is not None and self.config.holder(name) is None:
            parts = len(self.config.weights[f"{name}.weight"].parts)
            self.write(AddLora(x, self.loras.made(name, x.size, out.size, parts), out))

    def project_heads(self, weight: Tensor, x: Place, out: Place) -> None:
        """Write out = the product of each part of x with its own weight: [heads, out, in]."""
        self.write(Project(x, self.linears.heads(weight.to(self.dtype).contiguous()), out))

    def project_parted(self, name: str, x: Place, out: Place) -> None:
        """Write `project` split between ranks: each rank computes some columns, then all gather all of them."""
        if self.shard is None:
            self.project(name, x, out)
        else:
            columns = self.shard.columns(out.size)
            own = self.buffer("own columns", columns.own)
            self.project(name, x, own)
            self.write(Gather(own, out, columns))

    def gathered(self, name: str, x: Place, columns: Columns | None) -> Place:
        """Gather the columns of all ranks, of which x is this rank's share. If `columns` is missing, x is complete."""
        if columns is None:
            return x
        out = self.buffer(name, sum(columns.sizes))
        self.write(Gather(x, out, columns))
        return out

    def normalize(
        self,
        name: str,
        x: Place,
        out: Place,
        heads: int = 1,
        residual: Place | None = None,
        eps: float | None = None,  # None: that of the model
    ) -> None:
        """Write out = norm(x). With `residual`, add x to it first and normalise the sum."""
        weight, bias = tensor(self.weights[f"{self.config.stored_name(name)}.weight"]), self.bias(name)
        if self.config.norm == "layer" and bias is None:
            bias = torch.zeros_like(weight)  # a bias makes the operator a LayerNorm instead of an RMSNorm
        epsilon = self.config.norm_eps if eps is None else eps
        self.write(Normalize(x, out, weight, bias, epsilon, residual, heads), name)
        if self.has(f"{name}_down"):
            size = cast(int, self.config.norm_gate)
            row, opened, gate = self.buffer("inner", size), self.buffer("opened", size), self.buffer("gate", out.size)
            self.project(f"{name}_down", out, row)
            self.write(Activate(row, opened, SILU))
            self.project(f"{name}_up", opened, gate)
            self.write(Gate(gate, out))

    def normalize_heads(self, name: str, x: Place, out: Place, heads: int) -> None:
        """Write out = x, normalised by heads, with the weight of that name if it exists."""
        if self.has(name):
            self.normalize(name, x, out, heads)
        else:
            self.normalize_plainly(x, out, heads)

    def normalize_plainly(self, x: Place, out: Place, heads: int) -> None:
        """Write out = the RMSNorm of each head of x, without a weight."""
        weight = torch.ones(x.size // heads, dtype=torch.float32, device=self.device)
        self.write(Normalize(x, out, weight, None, self.config.norm_eps, None, heads))

    def write(self, operator: Operator, name: str | None = None) -> None:
        """Append an operator to the program. name: of its weight; None: it is named for its layer and kind."""
        name, number = name or f"{self.scope}{operator.kind}", 1
        while (unique := f"{name}.{number}" if number > 1 else name) in self.names:
            number += 1
        self.names[unique] = None
        self.operators.append(operator)
