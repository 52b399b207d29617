"""CodeGen: GPT-J with one fused QKV projection, stored in four parts because of its original sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.decoder_config import DecoderConfig
from quire.models.families import gptj
from quire.models.families.pairs import pairs_apart
from quire.models.weights import Sources

PARTS = 4


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    decoder = gptj.decoder_config(raw)
    if (num_heads := decoder.attention[0].num_heads) % PARTS:
        raise ModelError(f"config.json: n_head is {num_heads}; a CodeGen has its heads in {PARTS} equal parts")
    return decoder


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = gptj.weight_sources(config, names)
    return replace(theirs, layer={**theirs.layer, "qkv": ("attn.qkv_proj",)}, adapt=partial(_adapt, config))


def _adapt(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Reorder queries, values and keys of each part to all of q, all of k, all of v."""
    if ".qkv." not in name:
        return tensor
    q, v, k = tensor.view(PARTS, 3, -1, *tensor.shape[1:]).unbind(1)
    turned = (pairs_apart(config, name, f".{kind}_proj.", x.flatten(0, 1)) for kind, x in (("q", q), ("k", k)))
    return torch.cat([*turned, v.flatten(0, 1)])
