"""x @ weight.T + bias on a CPU, for weights that were packed once.

A row's bits depend on nothing but the row, the weight and the instruction set: not on the other rows, the threads, or
how the work is cut. Sums are formed in fp32: the bias, and one sum for each stretch of inputs, all in ascending order.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import BadShape, BadValue, Unsupported
from quire.ops import checks
from quire.ops.cpu import native
from quire.ops.linear import Embedding, Linear, Linears
from quire.ops.memory import in_huge_pages

BLOCK = 64 * 2**20  # bytes that weights share, since a small one alone fills no huge page


@dataclass(frozen=True)
class PackedLinear:
    """A weight in the order in which the kernel reads it, and its bias."""

    packed: Tensor  # uint8
    bias: Tensor | None  # fp32 [out]
    out_size: int
    in_size: int
    dtype: torch.dtype  # of the weight
    out_dtype: torch.dtype
    library: native.Library

    def __call__(
        self,
        x: Tensor,  # [T, in], of the weight's dtype
    ) -> Tensor:
        """The projection: [T, out]."""
        if x.shape[1:] != (self.in_size,) or x.dtype is not self.dtype:
            raise BadShape(f"x is {x.dtype} {tuple(x.shape)}; the weight takes {self.dtype} [T, {self.in_size}]")
        _check_host("x", x)
        out = torch.empty(x.shape[0], self.out_size, dtype=self.out_dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        params = self.params()
        params.x, params.x_stride, params.rows = x.data_ptr(), x.stride(0), x.shape[0]
        params.out, params.out_stride, params.threads = out.data_ptr(), self.out_size, torch.get_num_threads()
        copy = torch.empty(self.copy_size(len(x), x.stride(0)), dtype=torch.float32)
        params.copy = copy.data_ptr()
        self.library("linear", byref(params))
        return out

    def weight_rows(
        self,
        places: Tensor,  # int64 [T]
    ) -> Tensor:
        """Those rows of the weight, with the bits that were packed: [T, in]."""
        if places.dtype is not torch.int64 or places.dim() != 1:
            raise BadShape(f"places is {places.dtype} {tuple(places.shape)}; expected torch.int64 [T]")
        _check_host("places", places)
        places = places.contiguous()
        rows = torch.empty(len(places), self.in_size, dtype=self.dtype)
        sizes = (self.out_size, self.in_size)
        dtype = native.DTYPES[self.dtype]
        wrong = self.library(
            "unpack", self.packed.data_ptr(), *sizes, places.data_ptr(), len(places), rows.data_ptr(), dtype
        )
        if wrong >= 0:
            raise BadValue(f"places[{wrong}] is {int(places[wrong])}; the weight has rows 0..{self.out_size - 1}")
        return rows

    def copy_size(self, rows: int, stride: int) -> int:
        """fp32 numbers of room that the kernel needs for rows of x that lie so many numbers apart."""
        return int(self.library("copy_size", rows, self.in_size, stride, native.DTYPES[self.dtype]))

    def copied_lanes(self, stride: int) -> int:
        """The same for each of many rows; 0: they are read where they lie."""
        return self.copy_size(native.MANY_ROWS, stride) // native.MANY_ROWS

    @property
    def stride(self) -> int:
        """How far rows of x should lie apart to be read fast where they lie, in numbers."""
        return int(self.library("row_stride", self.in_size, native.DTYPES[self.dtype]))

    @property
    def lanes(self) -> int:
        """fp32 numbers of the copy of a row of x: each has one of its numbers, or a pair of bf16."""
        return int(self.library("row_lanes", self.in_size, native.DTYPES[self.dtype]))

    def params(self) -> native.LinearParams:
        """What the kernel needs to know of the weight; its rows are the caller's to fill in."""
        return native.LinearParams(
            weight=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            in_size=self.in_size,
            out_size=self.out_size,
            dtype=native.DTYPES[self.dtype],
            out_dtype=native.DTYPES[self.out_dtype],
        )


@dataclass(frozen=True)
class PackedEmbedding:
    """Rows read back out of the weight of the output projection."""

    head: PackedLinear

    def __call__(
        self,
        token_ids: Tensor,  # int64 [T]
    ) -> Tensor:
        """The rows: [T, H]."""
        return self.head.weight_rows(token_ids)


class PackedLinears(Linears):
    """Our own products, which have one order of summation; torch's for dtypes that they do not take."""

    def __init__(self) -> None:
        super().__init__()
        self._pack = Packer()

    def linear(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None = None,  # [out]
    ) -> Linear:
        """The linear of that weight."""
        return self._pack(weight, bias) if self._serves(weight) else super().linear(weight, bias)

    def head(
        self,
        weight: Tensor,  # [V, H]
    ) -> Linear:
        """The linear that makes logits, in fp32."""
        return self._pack(weight, out_dtype=torch.float32) if self._serves(weight) else super().head(weight)

    def tied(
        self,
        weight: Tensor,  # [V, H]
    ) -> tuple[Embedding, Linear]:
        """The embedding and the linear that makes logits, of one packed weight."""
        if not self._serves(weight):
            return super().tied(weight)
        packed = self._pack(weight, out_dtype=torch.float32)
        return PackedEmbedding(packed), packed

    def _serves(self, weight: Tensor) -> bool:
        return weight.is_cpu and weight.dtype in native.DTYPES


class Packer:
    """Packs weights, one after the other, into memory that they share."""

    def __init__(self, library: native.Library | None = None) -> None:
        """library: by default the kernels for this machine. Raises Unsupported where there are none."""
        self._library = library or native.default()
        self._left = torch.empty(0, dtype=torch.uint8)

    def __call__(
        self,
        weight: Tensor,  # [out, in], of a dtype of native.DTYPES
        bias: Tensor | None = None,  # [out]
        out_dtype: torch.dtype | None = None,  # fp32, or the weight's
    ) -> PackedLinear:
        """The linear of that weight. Its results are of `out_dtype`, by default of the weight's."""
        library, dtype = self._library, weight.dtype
        if dtype not in native.DTYPES or out_dtype not in (None, dtype, torch.float32):
            raise Unsupported(f"weight is {dtype} and out_dtype {out_dtype}; the kernel takes {list(native.DTYPES)}")
        if weight.dim() != 2 or weight.numel() == 0 or (bias is not None and bias.shape != weight.shape[:1]):
            shown = None if bias is None else tuple(bias.shape)
            raise BadShape(f"weight has shape {tuple(weight.shape)} and bias {shown}; expected [out, in] and [out]")
        if weight.shape[1] > checks.INT32_MAX:
            raise BadShape(f"weight has shape {tuple(weight.shape)}; its inputs are numbered in an int32")
        _check_host("weight", weight)
        if bias is not None:
            _check_host("bias", bias)
        out_size, in_size = weight.shape
        packed = self._take(library("packed_bytes", out_size, in_size, native.DTYPES[dtype]))
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        library("pack", weight.data_ptr(), weight.stride(0), *weight.shape, packed.data_ptr(), native.DTYPES[dtype])
        return PackedLinear(
            packed,
            None if bias is None else bias.float().contiguous(),
            out_size,
            in_size,
            dtype,
            out_dtype or dtype,
            library,
        )

    def _take(self, size: int) -> Tensor:
        """That many bytes, aligned to a cache line."""
        size = -(-size // 64) * 64
        if size > len(self._left):
            self._left = in_huge_pages((max(size, BLOCK),), torch.uint8)
        taken, self._left = self._left[:size], self._left[size:]
        return taken


def _check_host(name: str, x: Tensor) -> None:
    if not x.is_cpu:
        raise BadValue(f"{name} is on {x.device}; the kernels read memory of the CPU")
