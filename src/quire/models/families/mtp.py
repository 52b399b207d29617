"""The published layouts of draft heads, which predict the tokens after the next one (multi-token prediction)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig
from quire.models.weights import Sources

WeightSources: TypeAlias = Callable[[DecoderConfig, frozenset[str]], Sources]
Adapt: TypeAlias = Callable[[DecoderConfig, str, str, Tensor], Tensor]
NORMS = ("join", "join.embedding_norm.weight", "join.hidden_norm.weight", "final_norm.weight")


class HeadFormat(NamedTuple):
    """A draft head in a checkpoint."""

    config: DecoderConfig
    sources: Sources


# Given config.json, the decoder and the names of a checkpoint's tensors: its draft head, None if it has none.
ReadHead: TypeAlias = Callable[[Mapping[str, Any], DecoderConfig, frozenset[str]], HeadFormat | None]


def own_tensors(weight_sources: WeightSources, adapt: Adapt | None = None) -> ReadHead:
    """Return the reader of heads in tensors "mtp.*" (Qwen3-Next, Qwen3.5), whose layer is like one with attention.

    weight_sources, adapt: those of the family, which describe the layer.
    """
    theirs = "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"

    def read(raw: Mapping[str, Any], config: DecoderConfig, names: frozenset[str]) -> HeadFormat | None:
        layer = next((one for one in reversed(config.layers) if isinstance(one.mixer, AttentionConfig)), None)
        if layer is None or "mtp.fc.weight" not in names:
            return None
        size = raw.get("mtp_intermediate_size")
        if size is not None and layer.mlp is not None:
            layer = replace(layer, mlp=replace(layer.mlp, size=size))
        return _head(replace(config, layers=(layer,)), weight_sources, names, theirs, "mtp.", "mtp.layers.0.", adapt)

    return read


def layer_after(weight_sources: WeightSources, adapt: Adapt | None = None) -> ReadHead:
    """Return the reader of heads in the layer after a model's last one (DeepSeek-V3, GLM-4.5), which is like that one.

    weight_sources, adapt: those of the family, which describe the layer.
    """

    def read(_: Mapping[str, Any], config: DecoderConfig, names: frozenset[str]) -> HeadFormat | None:
        prefix = f"model.layers.{config.num_layers}."
        theirs = [f"{prefix}{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
        if f"{prefix}eh_proj.weight" not in names:
            return None
        return _head(replace(config, layers=config.layers[-1:]), weight_sources, names, theirs, prefix, prefix, adapt)

    return read


def dense_block(weight_sources: WeightSources, adapt: Adapt) -> ReadHead:
    """Return the reader of heads in tensors "model.mtp_*" (ERNIE 4.5), whose layer is like one with an MLP.

    The model's final norm is the head's, too. weight_sources, adapt: those of the family, which describe the layer.
    """
    theirs = "model.mtp_linear_proj.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.norm"

    def read(_: Mapping[str, Any], config: DecoderConfig, names: frozenset[str]) -> HeadFormat | None:
        layer = next((one for one in config.layers if isinstance(one.mlp, MlpConfig)), None)
        if layer is None or f"{theirs[0]}.weight" not in names:
            return None
        head = replace(config, layers=(layer,))
        return _head(head, weight_sources, names, theirs, "model.mtp_", "model.mtp_block.0.", adapt)

    return read


def _head(
    config: DecoderConfig,
    weight_sources: WeightSources,
    names: frozenset[str],
    theirs: Sequence[str],  # modules in the order of NORMS
    own: str,  # prefix of all of the head's tensors
    prefix: str,  # of those of its layer
    adapt: Adapt | None,
) -> HeadFormat:
    head = replace(config, joins_hidden=True, embedding_norm=False, tied_embeddings=False)
    sources = weight_sources(head, frozenset(name for name in names if name.startswith(own)))
    return HeadFormat(
        head,
        replace(
            sources,
            ends={ours: f"{name}.weight" for ours, name in zip(NORMS, theirs, strict=True)}
            | {"lm_head": sources.ends["embedding" if config.tied_embeddings else "lm_head"]}
            | ({"lm_head.bias": sources.ends["lm_head.bias"]} if config.head_bias else {}),
            layer_prefix=prefix,
            # The rest of the model, and copies of its embedding and its output projection.
            ignored=re.compile(rf"(?!{re.escape(own)}).*|{re.escape(prefix)}(embed_tokens|shared_head\.head)\..*"),
            adapt=sources.adapt if adapt is None else partial(adapt, head),
        ),
    )
