"""The attention function that a transformers model calls, and its implementation by paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.cache.groups import Heads
from quire.cache.storage import KVCache
from quire.errors import Unsupported
from quire.integrations.gate import HARMLESS
from quire.models.adapter.lora import CurrentLora
from quire.ops import AttentionPlan, Backend
from quire.ops.weights.lora import LoraRows

NAME = "quire_paged"  # the name of the attn_implementation

SCORES = frozenset("scaling softcap s_aux sliding_window dropout is_causal position_ids".split())


@dataclass(frozen=True)
class LayerCall:
    """The sizes of one attention layer's call."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    head_dim_v: int  # Dv
    window: int | None

    @property
    def heads(self) -> Heads:
        """The heads in the cache, where K and V are padded with zeros to one width."""
        return Heads(self.num_heads, self.num_kv_heads, max(self.head_dim, self.head_dim_v))


@dataclass(frozen=True)
class AttentionStep:
    """The inputs of a step."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    cache: KVCache
    plans: Sequence[AttentionPlan]  # one per layer
    current_lora: CurrentLora = field(default_factory=CurrentLora)  # of the model's linears
    lora_rows: LoraRows | None = None  # None: no row has an adapter


class Pass(Protocol):
    """The attention of all layers in one forward pass of the model."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute the next layer's attention: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv]."""


@dataclass
class Recorder:
    """A pass that records the layers' calls and returns zeros."""

    calls: list[LayerCall] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Record the call. Return zeros."""
        self.calls.append(LayerCall(q.shape[1], k.shape[1], q.shape[2], v.shape[2], options.get("sliding_window")))
        return q.new_zeros(*q.shape[:2], v.shape[2])


@dataclass
class PagedPass:
    """A pass over the paged cache, in which the i-th call is layer i."""

    backend: Backend
    step: AttentionStep
    layers: Sequence[LayerCall]  # as recorded when the model was loaded
    dtype: torch.dtype  # of the model
    done: int = 0  # layers

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Store K and V in the layer's cache, and attend to all of the cache."""
        index, self.done = self.done, self.done + 1
        if index == len(self.layers):
            raise Unsupported(f"the model called attention more than {index} times, and did not when it was loaded")
        asked = LayerCall(q.shape[1], k.shape[1], q.shape[2], v.shape[2], options.get("sliding_window"))
        if asked != self.layers[index]:
            raise Unsupported(f"layer {index} asks for {asked}; when the model was loaded it was {self.layers[index]}")
        plan, kv = self.step.plans[index], self.step.cache.kv(index)
        scale = options.get("scaling")
        sinks = options.get("s_aux")
        q_wide, k_wide, v_wide = (self._filled(x, asked.heads.head_dim) for x in (q, k, v))
        self.backend.write_kv(k_wide, v_wide, kv, plan)
        out = self.backend.attention(
            q_wide,
            kv,
            plan,
            scale=asked.head_dim**-0.5 if scale is None else float(scale),
            softcap=options.get("softcap"),
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
        )
        return out[..., : asked.head_dim_v].to(q.dtype)

    def _filled(self, x: Tensor, width: int) -> Tensor:
        x = x.to(self.dtype)
        if x.shape[2] < width:
            return F.pad(x, (0, width - x.shape[2]))
        return x if x.stride(2) == 1 else x.contiguous()


@dataclass
class Passes:
    """The current pass of a model. All of the model's modules refer to this object."""

    current: Pass | None = None


def attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' AttentionInterface: return out [1, T, Hq, Dv], and None for the weights.

    Raises Unsupported for an unknown option, for a mask, and for tokens that are not one row.
    """
    passes = getattr(module, "quire_passes", None)
    if passes is None or passes.current is None:
        raise Unsupported(f"{NAME!r} is the attention of models that Quire's engine has loaded")
    if attention_mask is not None:
        raise Unsupported(f"{type(module).__name__} makes its own mask, of shape {tuple(attention_mask.shape)}")
    for name, option in options.items():
        if name not in HARMLESS and name not in SCORES and option is not None and option is not False:
            raise Unsupported(f"{type(module).__name__} gives {name} to its attention, which is not known")
    if options.get("dropout") or options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise Unsupported(f"{type(module).__name__} asks for dropout, or for attention that is not causal")
    if len(query) != 1 or not query.shape[2] == key.shape[2] == value.shape[2]:
        raise Unsupported(f"{type(module).__name__} attends from {tuple(query.shape)} to {tuple(key.shape)}")
    out = passes.current.attend(*(x[0].transpose(0, 1) for x in (query, key, value)), options)
    return out[None], None
