"""The text part of Llama 3.2 Vision: Llama without the layers of cross-attention, which do nothing without an image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.decoder_config import DecoderConfig
from quire.models.families import llama
from quire.models.hf_config import ConfigReader
from quire.models.weights import Sources

DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 500_000.0, "max_position_embeddings": 131_072}
CROSSED = re.compile(r"model\.layers\.(\d+)\.cross_attn\..*")  # of a layer that is left out


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    config = ConfigReader(raw, "mllama")
    crossed = config.layers("cross_attention_layers", list(range(3, 40, 5)))
    count = config.integer("num_hidden_layers", 40)
    kept = [layer for layer in range(count) if layer not in crossed]
    plain = {key: value for key, value in raw.items() if key not in ("cross_attention_layers", "dropout")}
    return llama.decoder_config({**DEFAULTS, **plain, "architectures": None, "num_hidden_layers": len(kept)})


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    crossed = {int(found[1]) for name in names if (found := CROSSED.fullmatch(name))}
    kept = tuple(layer for layer in range(config.num_layers + len(crossed)) if layer not in crossed)
    ignored = re.compile(rf"model\.layers\.({'|'.join(map(str, crossed))})\..*")
    return replace(llama.weight_sources(config, names), numbers=kept, ignored=ignored, more_tokens=8)
