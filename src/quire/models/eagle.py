"""EAGLE-3 checkpoints: one layer that predicts draft tokens from hidden states of three layers (Li et al. 2025).

Row i joins the embedding of token i and the model's hidden states at token i - 1: the inputs of three of its layers,
projected together. Both are normalised, and the attention reads them side by side. For further tokens the layer's own
result takes the place of the projected states. The output projection has a vocabulary of frequent tokens: token t of it
is token t + d2t[t] of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.decoder import Decoder
from quire.models.decoder_config import DecoderConfig, MlpConfig
from quire.models.draft_head import DraftHead
from quire.models.families import llama
from quire.models.files import Files
from quire.models.hf_config import shown
from quire.models.quantisation.module import Tensors
from quire.models.quantisation.policy import Rounding
from quire.models.quantisation.stacking import Weight
from quire.ops.weights.linear import Embedding, LinearWeight

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYERS = "eagle_aux_hidden_state_layer_ids"
KEYS = ("draft_vocab_size", "eagle_config", LAYERS, "norm_before_residual", "target_hidden_size")
NUM_SEEN = 3  # layers of the model


@dataclass(frozen=True)
class Eagle:
    """An EAGLE-3 checkpoint that fits a model."""

    config: DecoderConfig  # of its layer
    seen: tuple[int, ...]  # layers of the model whose inputs it reads, ascending
    tensors: Tensors
    prefix: str  # of the tensors of its layer


def is_eagle(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a checkpoint of the EAGLE methods, of any version."""
    named = [str(name).lower() for name in raw.get("architectures") or ()]
    return any("eagle" in name for name in named) or "speculators_model_type" in raw


def read_eagle(files: Files, model: DecoderConfig) -> Eagle:
    """Return a checkpoint's layer. Raises ModelError for another layout, and for one of another model."""
    raw, path = files.config(), files.path
    if not any(name in ARCHITECTURES for name in raw.get("architectures") or ()):
        found = ", ".join(map(str, raw.get("architectures") or ["a config.json without architectures"]))
        raise ModelError(f"{path} is {found}; of the EAGLE layouts, Quire reads {' and '.join(ARCHITECTURES)}")
    if raw.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"{path}: num_hidden_layers is {raw['num_hidden_layers']!r}; an EAGLE-3 layout has one layer")
    plain = {key: value for key, value in raw.items() if key not in KEYS}
    base = llama.decoder_config({**plain, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})
    if base.vocab_size != model.vocab_size:
        raise ModelError(
            f"{path} is for a vocabulary of {base.vocab_size:,} tokens; the model has {model.vocab_size:,}"
        )
    count, own = model.num_layers, raw.get("eagle_config")
    seen = (own.get(LAYERS) if isinstance(own, dict) else None) or raw.get(LAYERS) or [2, count // 2, count - 3]
    numbers = {i for i in seen if type(i) is int and 0 <= i < count} if isinstance(seen, list) else set[int]()
    if len(numbers) != NUM_SEEN:
        raise ModelError(f"{path} reads the inputs of layers {shown(seen)}; it must be three of the model's {count}")
    if model.per_layer is not None:
        raise ModelError(f"{path} is EAGLE-3, which is not served for models with per-layer embeddings")
    tensors = files.tensors()
    prefix = "layers.0." if "layers.0.hidden_norm.weight" in tensors.names else "midlayer."
    config = replace(
        base,
        joins_hidden=True,
        attends_joined="after" if raw.get("norm_before_residual") else "before",
        tied_embeddings=False,
    )
    eagle = Eagle(config, tuple(sorted(numbers)), tensors, prefix)
    _check_shapes(eagle, raw, model)
    return eagle


def _check_shapes(eagle: Eagle, raw: Mapping[str, Any], model: DecoderConfig) -> None:
    """Raise ModelError for tensors that are missing, superfluous, or of another size than those of the model."""
    tensors, H, V = eagle.tensors, eagle.config.hidden_size, model.vocab_size
    heads, inner = eagle.config.attention[0].heads, cast(MlpConfig, eagle.config.layers[0].mlp).size
    q, kv = (count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads))
    Vd = raw.get("draft_vocab_size") or V
    own: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (q, 2 * H), "self_attn.o_proj": (H, q)}
    own |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv, 2 * H))
    own |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, H)) | {"mlp.down_proj": (H, inner)}
    own |= dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (H,))
    needed = {f"{eagle.prefix}{name}.weight": shape for name, shape in own.items()}
    needed |= {"fc.weight": (H, NUM_SEEN * model.hidden_size), "norm.weight": (H,), "lm_head.weight": (Vd, H)}
    if Vd != V:
        needed["d2t"] = (Vd,)
    if model.hidden_size != H:
        needed["embed_tokens.weight"] = (V, H)
    also = {"d2t": (Vd,), "t2d": (V,), "embed_tokens.weight": (V, H)}
    wrong = [f"lacks {name}" for name in needed.keys() - tensors.names]
    wrong += [f"has {name}, which that layout has not" for name in tensors.names - needed.keys() - also.keys()]
    wrong += [
        f"has {name} of shape {tuple(tensors[name].shape)}, and for this model it must be {shape}"
        for name, shape in (also | needed).items()
        if name in tensors.names and tuple(tensors[name].shape) != shape
    ]
    if wrong:
        more = f" ({len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ModelError(f"{tensors.path} is not EAGLE-3 for this model: it {min(wrong)}{more}")


class EagleHead(DraftHead):
    """The layer of an EAGLE-3 checkpoint."""

    def __init__(
        self, eagle: Eagle, model: Decoder, rounding: Rounding | None, embedding: Callable[[], Embedding]
    ) -> None:
        """Read the weights.

        rounding: of its matrices; None: they stay in the model's dtype. embedding: returns the model's.
        """
        tensors, prefix, dtype = eagle.tensors, eagle.prefix, model.dtype

        def exact(name: str) -> Tensor:
            return tensors[name].float()

        def weight(name: str, *parts: Tensor) -> LinearWeight:
            whole = torch.cat(parts)
            return whole.to(dtype) if rounding is None else rounding.of(whole, dtype, name)

        def linear(*names: str) -> LinearWeight:
            return weight(names[0], *(exact(f"{prefix}{name}.weight") for name in names))

        # The norms' weights are folded into the matrices that read their results. Those of the final norm are, too: its
        # other factor is the same for all tokens, and only the largest logit counts.
        norms = torch.cat([exact(f"{prefix}{name}.weight") for name in ("input_layernorm", "hidden_norm")])
        joined = [exact(f"{prefix}self_attn.{name}_proj.weight") * norms for name in "qkv"]
        weights: dict[str, Weight] = {
            "layers.0.qkv.weight": weight("qkv", *joined),
            "layers.0.output.weight": linear("self_attn.o_proj"),
            "layers.0.mlp_norm.weight": exact(f"{prefix}post_attention_layernorm.weight"),
            "layers.0.mlp_in.weight": linear("mlp.gate_proj", "mlp.up_proj"),
            "layers.0.mlp_out.weight": linear("mlp.down_proj"),
            "join.hidden_norm.weight": exact(f"{prefix}hidden_norm.weight"),
            "lm_head": weight("lm_head", exact("lm_head.weight") * exact("norm.weight")),
        }
        linears, own = model.backend.linears(str(model.device), False), "embed_tokens.weight"
        self._embeds = own in tensors.names
        table = linears.embedding(tensors[own].to(dtype)) if self._embeds else embedding()
        super().__init__(eagle.config, weights, model, table)
        self._hidden_size = model.config.hidden_size
        self._project = linears.linear(weight("fc", exact("fc.weight")))
        count = tensors["lm_head.weight"].shape[0]
        self._targets = torch.arange(count) + (tensors["d2t"].long() if "d2t" in tensors.names else 0)
        if not bool(((self._targets >= 0) & (self._targets < model.config.vocab_size)).all()):
            raise ModelError(f"{tensors.path}: d2t names tokens outside of the model's vocabulary")
        if self._embeds or model.embeds_plainly:
            self.use_chain(self._targets)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings of the checkpoint, else those of the model: [T, H]."""
        return self.embedding(token_ids) if self._embeds else super().embed(token_ids, positions)

    def joined(self, token_ids: Tensor, positions: Tensor, before: Tensor) -> Tensor:
        """Return the input of the layer: [T, 2 H]."""
        if before.shape[1] == NUM_SEEN * self._hidden_size:  # the model's
            before = self._project(before)
        return super().joined(token_ids, positions, before)

    def split(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states after the final norm, and the inputs of three layers."""
        return found[:, : self._hidden_size].contiguous(), found[:, self._hidden_size :]

    def choose(self, hidden: Tensor) -> Tensor:
        """Return the most likely next token of each row: int64 [R]."""
        return self._targets[super().choose(hidden)]
