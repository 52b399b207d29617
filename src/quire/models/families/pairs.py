"""RoPE of neighbouring pairs, implemented by reordering the rows of the weights."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig
from quire.models.rope import rotated_share

ROTATED = re.compile(r"\.[qk]_(proj|norm)\.")


def pairs_apart(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Reorder the rotated rows of each head of q and k.

    These families rotate the pairs (2 i, 2 i + 1), Quire rotates (i, i + D_rot / 2). Scores do not depend on the order.
    """
    if not ROTATED.search(part):
        return tensor
    attention = config.layers[int(name.split(".")[1])].mixer
    if not isinstance(attention, AttentionConfig) or attention.rope is None:
        return tensor
    heads = tensor.unflatten(0, (-1, attention.head_dim))  # type: ignore[no-untyped-call]
    size = int(attention.head_dim * rotated_share(attention.rope))
    turned, rest = heads[:, :size], heads[:, size:]
    return torch.cat([turned[:, ::2], turned[:, 1::2], rest], 1).flatten(0, 1)
