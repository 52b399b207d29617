"""The layout of quantised weights for the kernels of `quantised`, and its requirements on x.

Values that a program reads together are contiguous. 4-bit numbers are stored two per byte: for each pair of parts of
the inputs, where a part is the depth of one dot product, a byte's lower half belongs to the first part and its upper
half to the second. Both become int8 by a mask alone, since shifts of single bytes are slow: the lower half is the
value; the upper half, with its highest bit flipped, is 16 * (value - 8). Other numbers are stored one per byte, minus
an offset that makes them fit an int8. Zeros and these offsets contribute multiples of the sum of a part of x, which is
computed when x is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from quire.ops.weights.quantised import ACTIVATION_GROUP, PARTS, QuantisedWeight

RUN = 512  # inputs: the rows of weights and of rounded x are padded to a multiple
BLOCK = tl.constexpr(32)  # outputs whose values of a part are contiguous; no tile has fewer


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class PackedWeight:
    """A quantised weight in the layout of the kernel."""

    kind: QuantisedWeight  # the weight without outputs
    values: Tensor  # int8 [blocks, parts, outputs of a block, inputs of a part]; half as many parts for 4 bits
    scales: Tensor  # fp32 or fp16 [groups, out], like all other parts, so that neighbours read contiguous numbers
    zeros: Tensor | None = None  # int16: subtracted from the values for 4 bits, otherwise from the stored numbers
    minimums: Tensor | None = None  # fp16
    sub_scales: Tensor | None = None  # int8
    sub_minimums: Tensor | None = None  # int8

    @classmethod
    def of(cls, weight: QuantisedWeight) -> PackedWeight:
        """Pack a weight, in separate memory."""
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
        """Return these outputs, unpacked, in this order, in separate memory."""
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
        """Number of outputs."""
        return self.scales.shape[1]

    @property
    def in_size(self) -> int:
        """Number of inputs."""
        return self.kind.in_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x."""
        return self.kind.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self.values.device


def padded_size(kind: QuantisedWeight) -> int:
    """Return the inputs of a stored row. The padding is multiplied by zeros."""
    return -(-kind.in_size // RUN) * RUN


def part_size(kind: QuantisedWeight) -> int:
    """Return the inputs of a part, the depth of a dot product.

    A pair of parts, which share bytes, must not span two groups. A part has one sub-scale, unless `is_apart`.
    """
    return 64 if (kind.by_output or kind.segment == 128) and not kind.sub_size else 32


def is_whole(kind: QuantisedWeight) -> bool:
    """Return True if a row of x has one scale."""
    return kind.by_output and kind.activation_group != ACTIVATION_GROUP


def is_apart(kind: QuantisedWeight) -> bool:
    """Return True if a part has two sub-scales, so that its halves are multiplied separately."""
    return kind.sub_size == part_size(kind) // 2


def has_sums(kind: QuantisedWeight) -> bool:
    """Return True if the product needs sums of parts of x: for zeros, minimums, or the packing of 4 bits."""
    return kind.bits == 4 or kind.zeros is not None or kind.minimums is not None


def _base(kind: QuantisedWeight) -> int:
    """Return the offset that is subtracted from values before they are stored."""
    return 0 if kind.bits == 4 else kind.zero


def _padded(
    part: Tensor,  # [out, n]
    size: int,
) -> Tensor:
    """Pad each row with zeros: [out, size]."""
    return torch.nn.functional.pad(part, (0, size - part.shape[1]))
