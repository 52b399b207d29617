"""The first GPT: GPT-2 with a norm after each branch, which replaces the residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.decoder_config import DecoderConfig
from quire.models.families import gpt2
from quire.models.hf_config import ConfigReader
from quire.models.weights import Sources


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    ConfigReader(raw, "openai_gpt").only("afn", "gelu")  # its name of gelu_new
    theirs = {"n_positions": 512} | {key: value for key, value in raw.items() if key not in ("afn", "n_inner")}
    config = gpt2.decoder_config({**theirs, "activation_function": "gelu_new"})
    return replace(config, norms_residual=True, first_norm=False)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = gpt2.weight_sources(config, names)
    prefix = theirs.layer_prefix.removesuffix("h.{}.")
    ends = {"embedding": f"{prefix}tokens_embed.weight", "positions": f"{prefix}positions_embed.weight"}
    for layer in range(config.num_layers):
        after = "final_norm" if layer == config.num_layers - 1 else f"layers.{layer + 1}.input_norm"
        ends |= {f"{after}.{kind}": f"{prefix}h.{layer}.ln_2.{kind}" for kind in ("weight", "bias")}
    return replace(theirs, ends={**theirs.ends, **ends}, layer={**theirs.layer, "mlp_norm": ("ln_1",)})
