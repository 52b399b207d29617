"""The layer of a decoder, once, top to bottom: a configuration and its weights to a program of operators.

Every layer adds two branches to the residual, attention and an MLP (or experts), and each branch sees the residual
normalised. A branch is added where the next norm is computed: one operator does both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, MlpConfig
from quire.models.quantisation.stacking import StackedWeight, Weight, matrix, tensor
from quire.ops.experts import Choice, ExpertLayer
from quire.ops.linear import Linear, Linears
from quire.ops.program import (
    Activate,
    Add,
    Attend,
    Keep,
    MixExperts,
    Normalize,
    Operator,
    Place,
    Program,
    Project,
    Rotate,
    Scale,
    Write,
)

Table = tuple[Tensor, Tensor]  # cos and sin: fp32 [max_model_len, D_rot / 2] each


def write_program(
    config: DecoderConfig,
    weights: Mapping[str, Weight],
    linears: Linears,
    tables: Sequence[Table | None],  # of each layer
    alibi_slopes: Tensor | None,  # fp32 [Hq]
    dtype: torch.dtype,  # of the hidden states
) -> Program:
    """All layers, from the embedded tokens to the final norm. Takes the weights one after the other."""
    writer = _Writer(config, weights, linears, tables, alibi_slopes)
    hidden = writer.begin()
    for index in range(config.num_layers):
        hidden = writer.layer(index, hidden)
    return Program(dtype, writer.residual, hidden, writer.buffers, writer.operators)


class _Writer:
    """Writes the operators, in order, and knows where what they compute stands."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        linears: Linears,
        tables: Sequence[Table | None],
        alibi_slopes: Tensor | None,
    ) -> None:
        self.config, self.weights, self.linears = config, weights, linears
        self.tables, self.alibi_slopes = tables, alibi_slopes
        self.operators: list[Operator] = []
        self.buffers: dict[str, int] = {}  # widths
        H = config.hidden_size
        self.residual, self.hidden, self.branch = (self.buffer(name, H) for name in ("residual", "hidden", "branch"))
        self.group_of_layer = {layer: g for g, group in enumerate(config.groups) for layer in group.layers}

    # ------------------------------------------------------------------------------------------- the layer

    def begin(self) -> Place:
        """What comes before the first layer. Returns where the first attention's input stands."""
        if self.has("embedding_norm"):
            self.normalize("embedding_norm", self.residual, self.residual)
        return self.normalized_residual("layers.0.input_norm")

    def layer(self, index: int, hidden: Place) -> Place:
        """One layer. hidden: its attention's input. Returns where that of the next layer stands."""
        config, name, last = self.config, f"layers.{index}.", index == self.config.num_layers - 1
        layer = config.layers[index]
        attended = self.attention(index, layer.mixer, hidden)
        if last:
            self.write(Keep((attended, self.residual)))
        self.project(f"{name}output", attended, self.branch)
        self.end_branch(f"{name}output_norm")
        if config.parallel_branches:
            hidden = self.normalized_residual(f"{name}mlp_norm")
            self.write(Add(self.branch, self.residual))
        else:
            hidden = self.add_branch(f"{name}mlp_norm")
        if isinstance(layer.mlp, ExpertsConfig):
            self.experts(name, hidden, layer.mlp)
        else:
            self.mlp(name, hidden, layer.mlp)
        self.end_branch(f"{name}mlp_output_norm")
        if last:
            self.normalize("final_norm", self.branch, self.hidden, residual=self.residual)
            return self.hidden
        return self.add_branch(f"layers.{index + 1}.input_norm")

    def attention(self, index: int, config: AttentionConfig, hidden: Place) -> Place:
        """Project, rotate, store, attend. Returns where the result stands."""
        name, D, q_size, kv_size = f"layers.{index}.", config.head_dim, config.q_size, config.kv_size
        qkv = self.buffer("qkv", q_size + 2 * kv_size)
        self.project(f"{name}qkv", hidden, qkv)
        q, k, v = self.columns(qkv, q_size, kv_size, kv_size)
        if config.qk_norm is not None:
            by_head = config.qk_norm == "head"
            packed_q, packed_k = q, k
            q, k = self.buffer("q", q_size), self.buffer("k", kv_size)
            self.normalize(f"{name}q_norm", packed_q, q, config.num_heads if by_head else 1)
            self.normalize(f"{name}k_norm", packed_k, k, config.num_kv_heads if by_head else 1)
        if (table := self.tables[index]) is not None:
            self.write(Rotate(q, k, *table, D))
        group, attended = self.group_of_layer[index], self.buffer("attended", q_size)
        self.write(Write(k, v, index, group, D))
        sinks = tensor(self.weights[f"{name}sinks"]).float() if config.sinks else None
        self.write(Attend(q, attended, index, group, D, config.scale, self.alibi_slopes, config.softcap, sinks))
        return attended

    def mlp(self, name: str, hidden: Place, config: MlpConfig) -> None:
        """Project up, activate, project down."""
        inner, activated = self.buffer("inner", sum(config.in_rows)), self.buffer("activated", config.size)
        self.project(f"{name}mlp_in", hidden, inner)
        self.write(Activate(inner, activated, config.activation))
        self.project(f"{name}mlp_out", activated, self.branch)

    def experts(self, name: str, hidden: Place, config: ExpertsConfig) -> None:
        """Each row through the few of many MLPs that the router prefers."""
        # A head, so that its logits are as exact as they can be.
        router = self.linears.head(matrix(self.weights[f"{name}router.weight"]))
        parts = [f"{name}experts.{i}." for i in range(config.count)]
        mlp_in, mlp_out = ([self.expert(f"{part}{kind}") for part in parts] for kind in ("mlp_in", "mlp_out"))
        choice = Choice(num_chosen=config.per_token, renormalised=config.renormalised)
        layer = ExpertLayer(router, mlp_in, mlp_out, choice, config.mlp.activation)
        self.write(MixExperts(hidden, layer, self.branch))

    # ------------------------------------------------------------------------------------ norms and branches

    def end_branch(self, norm: str) -> None:
        """What a family does to a branch before it is added."""
        if self.has(norm):
            self.normalize(norm, self.branch, self.branch)
        if self.config.branch_scale is not None:
            self.write(Scale(self.branch, self.config.branch_scale))

    def normalized_residual(self, norm: str) -> Place:
        """Where the normalised residual stands; the residual itself where the family lacks this norm."""
        if not self.has(norm):
            return self.residual
        self.normalize(norm, self.residual, self.hidden)
        return self.hidden

    def add_branch(self, norm: str) -> Place:
        """Add the branch to the residual. Returns where the normalised residual stands, as above."""
        if not self.has(norm):
            self.write(Add(self.branch, self.residual))
            return self.residual
        self.normalize(norm, self.branch, self.hidden, residual=self.residual)
        return self.hidden

    # ------------------------------------------------------------------------------------ operators, buffers

    def has(self, name: str) -> bool:
        """Whether there is such a weight."""
        return f"{name}.weight" in self.weights

    def buffer(self, name: str, width: int) -> Place:
        """A whole buffer. Layers whose rows are as wide share theirs."""
        if self.buffers.setdefault(name, width) != width:
            name = f"{name} {width}"
            self.buffers[name] = width
        return Place(name, 0, width)

    def columns(self, place: Place, *sizes: int) -> list[Place]:
        """So many columns each, one after the other."""
        ends = accumulate(sizes, initial=place.first)
        return [Place(place.buffer, first, size) for first, size in zip(ends, sizes, strict=False)]

    def bias(self, name: str) -> Tensor | None:
        """The bias of that linear, where it has one."""
        return tensor(self.weights[f"{name}.bias"]) if f"{name}.bias" in self.weights else None

    def expert(self, name: str) -> Linear:
        """A linear of an expert."""
        weight = matrix(self.weights[f"{name}.weight"])
        return self.linears.linear(weight, self.bias(name))

    def project(self, name: str, x: Place, out: Place) -> None:
        """out = the linear of that name of x."""
        weight, bias = self.weights[f"{name}.weight"], self.bias(name)
        if isinstance(weight, StackedWeight):
            linear = self.linears.joined(weight.parts, bias)
        else:
            linear = self.linears.linear(weight, bias)
        self.write(Project(x, linear, out))

    def normalize(self, name: str, x: Place, out: Place, heads: int = 1, residual: Place | None = None) -> None:
        """out = the norm of that name of x, or of the residual once x was added to it."""
        bias = None if self.config.norm == "rms" else tensor(self.weights[f"{name}.bias"])
        weight = tensor(self.weights[f"{name}.weight"])
        self.write(Normalize(x, out, weight, bias, self.config.norm_eps, residual, heads))

    def write(self, operator: Operator) -> None:
        """The next operator."""
        self.operators.append(operator)
