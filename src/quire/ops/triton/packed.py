"""Quantised weights as the kernels of `quantised` read them, and what that layout says of x.

What a program reads at a time lies together. Numbers of 4 bits lie two a byte: of two parts of the inputs, each
multiplied by one dot product, a byte's lower half belongs to the first one and its upper half to the second. Both
become int8 by a mask and nothing else, since shifts of single bytes are slow: the lower half is the value, the upper
one, whose highest bit is turned, is 16 * (value - 8). Others lie one a byte, less what makes them fit an int8. What
zeros add to a sum, and these offsets, is a multiple of the sum of a part of x, which is made where x is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from quire.ops.quantised import ACTIVATION_GROUP, PARTS, QuantisedWeight

RUN = 512  # inputs: rows of weights and of rounded x are as many, or a multiple
BLOCK = tl.constexpr(32)  # outputs whose values of a part lie together; no tile has fewer


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class PackedWeight:
    """A quantised weight as the kernel reads it."""

    kind: QuantisedWeight  # the same without outputs
    values: Tensor  # int8 [blocks, parts, outputs of a block, inputs of a part]; of 4 bits half as many parts
    scales: Tensor  # fp32 or fp16 [groups, out], as are all others: what neighbours read lies together
    zeros: Tensor | None = None  # int16: of 4 bits they are subtracted from values, else from what is stored
    minimums: Tensor | None = None  # fp16
    sub_scales: Tensor | None = None  # int8
    sub_minimums: Tensor | None = None  # int8

    @classmethod
    def of(cls, weight: QuantisedWeight) -> PackedWeight:
        """That weight, in memory of its own."""
        kind = weight.rows(torch.empty(0, dtype=torch.int64, device=weight.device))
        size, part = padded_size(kind), part_size(kind)
        values = torch.nn.functional.pad(weight.values, (0, size - kind.in_size, 0, -weight.out_size % BLOCK.value))
        values = values.reshape(-1, BLOCK.value, size // part, part).transpose(1, 2)
        if kind.bits == 4:
            values = values[:, ::2] | (values[:, 1::2] ^ 8) << 4
        else:
            values = values - _base(kind)  # modulo 256
        parts = {name: part for name in PARTS[1:] if (part := getattr(weight, name)) is not None}
        if "zeros" in parts:
            parts["zeros"] = (parts["zeros"] - _base(kind)).to(torch.int16)
        for name, part in parts.items():
            inputs = kind.sub_size if name in ("sub_scales", "sub_minimums") else kind.group_size
            parts[name] = (part if kind.by_output else _padded(part, size // inputs)).T.contiguous()
        return cls(kind, values.contiguous().view(torch.int8), **parts)

    def rows(
        self,
        index: Tensor,  # int64 [N]
    ) -> QuantisedWeight:
        """These outputs, in this order, in memory of their own, unpacked."""
        kind = self.kind
        values = self.values[index // BLOCK.value, :, index % BLOCK.value].view(torch.uint8)  # [N, parts, part]
        if kind.bits == 4:
            values = torch.stack([values & 15, (values >> 4) ^ 8], 2)
        else:
            values = values + _base(kind)
        values = values.flatten(1)
        parts = {"values": values[:, : kind.in_size]}
        for name in PARTS[1:]:
            if (part := getattr(self, name)) is not None:
                parts[name] = part.T[index, : getattr(kind, name).shape[1]]
        if "zeros" in parts:
            parts["zeros"] = parts["zeros"].float() + _base(kind)
        return kind.derived(**parts)

    @property
    def out_size(self) -> int:
        """Outputs."""
        return self.scales.shape[1]

    @property
    def in_size(self) -> int:
        """Inputs."""
        return self.kind.in_size

    @property
    def dtype(self) -> torch.dtype:
        """Of x."""
        return self.kind.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device


def padded_size(kind: QuantisedWeight) -> int:
    """Inputs of a row as it is stored: the last ones are multiplied with zeros."""
    return -(-kind.in_size // RUN) * RUN


def part_size(kind: QuantisedWeight) -> int:
    """Inputs of a dot product. Two parts lie in the same bytes; neither may span two groups, nor two sub-scales."""
    return 64 if (kind.by_output or kind.segment == 128) and not kind.sub_size else 32


def is_whole(kind: QuantisedWeight) -> bool:
    """Whether a row of x has one scale."""
    return kind.by_output and kind.activation_group != ACTIVATION_GROUP


def is_apart(kind: QuantisedWeight) -> bool:
    """Whether a part has two sub-scales, so that its halves are multiplied one by one."""
    return kind.sub_size == part_size(kind) // 2


def has_sums(kind: QuantisedWeight) -> bool:
    """Whether sums of parts of x are asked for: by zeros, by minimums, and by how 4 bits are packed."""
    return kind.bits == 4 or kind.zeros is not None or kind.minimums is not None


def _base(kind: QuantisedWeight) -> int:
    """What is subtracted from values before they are stored."""
    return 0 if kind.bits == 4 else kind.zero


def _padded(
    part: Tensor,  # [out, n]
    size: int,
) -> Tensor:
    """The same with zeros after each row: [out, size]."""
    return torch.nn.functional.pad(part, (0, size - part.shape[1]))
