"""All layers of a decoder as one call of the native CPU library: what `Decoder` computes, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from quire.cache.storage import KVCache
from quire.errors import BadValue
from quire.models.experts import Experts, Mlp
from quire.models.linear import Linear
from quire.models.norm import LayerNorm, NoNorm, Norm, RMSNorm
from quire.ops import AttentionPlan
from quire.ops.cpu.experts import ExpertLinears
from quire.ops.cpu.linear import PackedLinear
from quire.ops.cpu.program import Place, Program
from quire.ops.cpu.worklist import CpuPlan
from quire.ops.plan import locked

if TYPE_CHECKING:
    from quire.models.decoder import Decoder, DecoderConfig, Layer

RESIDUAL, HIDDEN, BRANCH = ("residual", 0), ("hidden", 0), ("branch", 0)


class NativeLayers:
    """A decoder's layers, from the embedded tokens to the final norm."""

    def __init__(self, decoder: Decoder) -> None:
        """Write the program. The decoder's linears are all `PackedLinear`."""
        config = decoder.config
        self._groups, self._hidden_size = decoder.group_of_layer, config.hidden_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size if any(isinstance(layer.mlp, Mlp) for layer in decoder.layers) else 0
        widths = {
            **{"residual": config.hidden_size, "hidden": config.hidden_size, "branch": config.hidden_size},
            **{"qkv": q + 2 * kv, "attended": q},
            **{"inner": (2 if config.gated_mlp else 1) * inner, "activated": inner},
            **({} if config.qk_norm is None else {"q": q, "k": kv}),
        }
        self._program = Program(decoder.dtype, widths)
        self._heads = (decoder.dtype, config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim)
        self._lock = Lock()
        self._bound: weakref.ref[KVCache] | None = None
        norms_after = [*(layer.input_norm for layer in decoder.layers[1:]), decoder.final_norm]
        hidden = self._norm(decoder.layers[0].input_norm, RESIDUAL, HIDDEN)
        for i, (layer, norm_after) in enumerate(zip(decoder.layers, norms_after, strict=True)):
            self._attention(decoder, layer, i, hidden)
            self._end_branch(config, layer.output_norm)
            if config.parallel_branches:
                hidden = self._norm(layer.mlp_norm, RESIDUAL, HIDDEN)
                self._program.add(BRANCH, RESIDUAL, config.hidden_size)
            else:
                hidden = self._norm(layer.mlp_norm, BRANCH, HIDDEN, RESIDUAL)
            if isinstance(layer.mlp, Experts):
                self._experts(layer.mlp, hidden)
            else:
                self._mlp(decoder, layer.mlp, hidden)
            self._end_branch(config, layer.mlp_output_norm)
            hidden = self._norm(norm_after, BRANCH, HIDDEN, RESIDUAL)

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Whether this backend and these linears can be called so."""
        linears = (linear for layer in decoder.layers for linear in (layer.qkv, layer.output, *_mlp_linears(layer.mlp)))
        return decoder.ops.NAME == "cpu" and all(isinstance(linear, PackedLinear) for linear in linears)

    def __call__(
        self,
        residual: Tensor,  # [T, H], the embedded tokens; overwritten
        positions: Tensor,  # int64 [T]
        cache: KVCache,
        plans: Sequence[AttentionPlan],  # one a cache group
        rows: Tensor | None,  # int64 [R], ascending: those that are wanted; None: all
        seconds: Tensor | None = None,  # fp64 [operators], filled with what each of them took
    ) -> Tensor:
        """Hidden states after the final norm: [T, H], or [R, H]."""
        own = cast(Sequence[CpuPlan], plans)
        for plan in own:
            spec = plan.spec
            if (spec.dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dim_v) != self._heads:
                raise BadValue(f"a plan is for {spec}; the model has dtype, heads and dimensions {self._heads}")
        hidden = torch.empty_like(residual)
        with self._lock, locked(own):  # engines on several threads may share the model
            if self._bound is None or self._bound() is not cache:
                self._program.bind([own[group].cache(cache.layer(i)) for i, group in enumerate(self._groups)])
                self._bound = weakref.ref(cache)
            self._program.run(residual, hidden, positions, own, rows, seconds)
        return hidden if rows is None else hidden[: len(rows)]

    @property
    def kinds(self) -> list[str]:
        """The operators' names, in order."""
        return self._program.kinds

    def _norm(self, norm: Norm, x: Place, out: Place, residual: Place | None = None, heads: int = 1) -> Place:
        """Where the normalised x, or the normalised new residual, then stands."""
        if isinstance(norm, RMSNorm):
            self._program.norm(x, norm.weight, None, norm.eps, out, residual, heads)
        elif isinstance(norm, LayerNorm):
            self._program.norm(x, norm.weight, norm.bias, norm.eps, out, residual, heads)
        elif isinstance(norm, NoNorm) and residual is not None:
            self._program.add(x, residual, self._hidden_size)
            return residual
        elif isinstance(norm, NoNorm):
            return x
        else:
            raise BadValue(f"there is no operator for a {type(norm).__name__}")
        return out

    def _linear(self, linear: object, x: Place, out: str) -> None:
        self._program.linear(x, cast(PackedLinear, linear), (out, 0))

    def _attention(self, decoder: Decoder, layer: Layer, index: int, hidden: Place) -> None:
        config, program = decoder.config, self._program
        heads, dim = (config.num_heads, config.num_kv_heads), config.head_dim
        self._linear(layer.qkv, hidden, "qkv")
        q, k, v = ("qkv", 0), ("qkv", heads[0] * dim), ("qkv", sum(heads) * dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            rows = heads if config.qk_norm == "head" else (1, 1)
            q = self._norm(layer.q_norm, q, ("q", 0), heads=rows[0])
            k = self._norm(layer.k_norm, k, ("k", 0), heads=rows[1])
        if (rotation := decoder.rotations[index]) is not None:
            program.rope(q, k, *rotation, heads, dim)
        scale = dim**-0.5 if config.attention_scale is None else config.attention_scale
        group = self._groups[index]
        program.attention(q, k, v, ("attended", 0), group, scale, decoder.alibi_slopes, config.attention_softcap)
        if index == len(decoder.layers) - 1:
            program.keep(("attended", 0), RESIDUAL)
        self._linear(layer.output, ("attended", 0), "branch")

    def _end_branch(self, config: DecoderConfig, norm: Norm | None) -> None:
        if norm is not None:
            self._norm(norm, BRANCH, BRANCH)
        if config.branch_scale is not None:
            self._program.scale(BRANCH, BRANCH, config.hidden_size, config.branch_scale)

    def _experts(self, layer: Experts, hidden: Place) -> None:
        linears = ExpertLinears(
            cast(PackedLinear, layer.router),
            [cast(PackedLinear, expert.mlp_in) for expert in layer.experts],
            [cast(PackedLinear, expert.mlp_out) for expert in layer.experts],
            layer.per_token,
            layer.renormalised,
        )
        self._program.experts(hidden, linears, BRANCH)

    def _mlp(self, decoder: Decoder, mlp: Mlp, hidden: Place) -> None:
        config, program, inner = decoder.config, self._program, decoder.config.intermediate_size
        self._linear(mlp.mlp_in, hidden, "inner")
        if config.activation == "silu":
            program.swiglu(("inner", 0), ("activated", 0), inner)
        else:
            program.gelu(("inner", 0), ("activated", 0), inner, config.activation == "gelu_tanh")
            if config.gated_mlp:
                program.multiply(("inner", inner), ("activated", 0), inner)
        self._linear(mlp.mlp_out, ("activated", 0), "branch")


def _mlp_linears(mlp: Mlp | Experts) -> list[Linear]:
    if isinstance(mlp, Mlp):
        return [mlp.mlp_in, mlp.mlp_out]
    return [mlp.router, *(linear for expert in mlp.experts for linear in (expert.mlp_in, expert.mlp_out))]
