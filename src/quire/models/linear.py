"""Linear layers whose rows have the same bits whatever stands beside them.

On a CPU the weight is packed once, for our own kernels, which have one order of summation.

Where those do not run it is packed for oneDNN's. Their order of summation is known to be the same for all numbers of
rows but one, which is padded to two; whether it really is, is tried out at load for every shape of weight. Where it is
not, rows are multiplied one by one: slow, and still reproducible.

On a GPU the framework's product takes another kernel for other numbers of rows. Who asks for reproducibility there gets
our own product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.models.embedding import Embedding, PackedEmbedding, PlainEmbedding
from quire.ops.cpu import native
from quire.ops.cpu.linear import PackedLinear, Packer

PROBED_ROWS = (2, 3, 16, 17, 64, 512)
FEW_ROWS = 256  # on a GPU: rows that are multiplied in the time that reading the weight takes
PROBE_NUMBERS = 2**24  # of an output: the probe of a large vocabulary has fewer rows


class Linear(Protocol):
    """x @ weight.T + bias. Several projections of the same input are one Linear, their weights stacked."""

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:
        """The projection: [T, out]."""


@dataclass(frozen=True)
class PlainLinear:
    """The framework's own product: on a GPU."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


# x [T, in], weight [out, in], bias [out] -> [T, out]
Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class TritonLinear:
    """Our own product on a GPU, in tiles of one shape."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    product: Product

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


@dataclass(frozen=True)
class TwoLinears:
    """The same product in two ways that give a row the same bits, each where it is the faster one."""

    few: Linear
    many: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return (self.few if len(x) <= FEW_ROWS else self.many)(x)


@dataclass(frozen=True)
class RowLinear:
    """One row at a time."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(self.weight))
        for i in range(len(x)):
            out[i] = F.linear(x[i : i + 1], self.weight, self.bias)[0]
        return out


@dataclass(frozen=True)
class OneDnnLinear:
    """oneDNN's product, computed in the weight's dtype."""

    weight: Tensor  # [out, in], in oneDNN's own layout or in rows
    bias: Tensor | None  # [out]
    dtype: torch.dtype  # that products are formed in

    def __call__(self, x: Tensor) -> Tensor:
        count, size = x.shape[0], padded_rows(x.shape[0])
        if count == 0:
            return x.new_empty(0, self.weight.shape[0])
        rows = x.to(self.dtype)
        if size > count:
            rows = torch.cat([rows, rows.new_zeros(size - count, x.shape[1])])
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return out[:count].to(x.dtype)


def padded_rows(count: int) -> int:
    """Rows that oneDNN multiplies where there are so many: beyond the first 64 at most an eighth more.

    A single row takes another kernel, with another order of summation. And for each number of rows oneDNN makes a
    kernel when it first comes, and keeps it: half a millisecond and half a MiB for each shape of weight.
    """
    if count <= 8:
        return max(2, count)
    step = 8 if count <= 64 else 1 << (count - 1).bit_length() - 4
    return -(-count // step) * step


class LinearFactory:
    """Makes the linears of one model, and remembers which shapes of weight were proved reproducible."""

    def __init__(self, reproducible: bool = False) -> None:
        """reproducible: on a GPU too."""
        self._reproducible = reproducible
        self._proved: dict[tuple[object, ...], bool] = {}
        self._pack = Packer() if native.unavailable() is None else None

    def __call__(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None = None,  # [out]
    ) -> Linear:
        """The linear of that weight, the fastest that is reproducible on its device."""
        if weight.device.type != "cpu":
            return self._triton(weight, bias) if self._reproducible else PlainLinear(weight, bias)
        if self._pack is not None and weight.dtype in native.DTYPES:
            return self._pack(weight, bias)
        dtype = product_dtype(weight.dtype)
        if dtype is None:
            return RowLinear(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), PROBED_ROWS[-1])
        return self._one_dnn(packed, dtype, weight, bias)

    def head(
        self,
        weight: Tensor,  # [V, H]
    ) -> Linear:
        """The linear that makes logits: in fp32 where the product has them so, rounded to its dtype elsewhere."""
        return self._packed_head(weight) or self(weight)

    def tied(
        self,
        weight: Tensor,  # [V, H]
    ) -> tuple[Embedding, Linear]:
        """The embedding, and the linear that makes logits with the same weight, which is held once, in other memory.

        oneDNN's own layout does not give rows back, so there its product takes the weight in rows: a single row of
        logits of a large vocabulary then takes two to three times as long.
        """
        if packed := self._packed_head(weight):
            return PackedEmbedding(packed), packed
        if not weight.is_cpu:
            return PlainEmbedding(weight, weight.dtype), self(weight)
        dtype = product_dtype(weight.dtype)
        kept = weight.to(dtype or weight.dtype, copy=True)
        if dtype is None:
            return PlainEmbedding(kept, kept.dtype), self(kept)
        head = self._one_dnn(kept, dtype, weight, None)
        return PlainEmbedding(head.weight, weight.dtype), head

    def _packed_head(self, weight: Tensor) -> PackedLinear | None:
        if self._pack is None or not weight.is_cpu or weight.dtype not in native.DTYPES:
            return None
        return self._pack(weight, out_dtype=torch.float32)

    def _one_dnn(
        self,
        ready: Tensor,  # the weight as oneDNN is to have it
        dtype: torch.dtype,  # that products are formed in
        weight: Tensor,  # [out, in]
        bias: Tensor | None,  # [out]
    ) -> OneDnnLinear | RowLinear:
        made = OneDnnLinear(ready, None if bias is None else bias.to(dtype), dtype)
        key = (*weight.shape, weight.dtype, bias is None, ready.layout)
        if key not in self._proved:
            self._proved[key] = rows_are_independent(made, made, weight)
        return made if self._proved[key] else RowLinear(weight, bias)

    def _triton(self, weight: Tensor, bias: Tensor | None) -> Linear:
        from quire.ops.triton import linear  # who needs no GPU needs no Triton

        few, many = (
            TritonLinear(weight, bias, partial(linear.linear, tile=tile))
            for tile in (linear.FEW_ROWS, linear.MANY_ROWS)
        )
        # One shape of tile gives a row the same bits wherever it stands; two do as far as a probe finds, one with
        # random weights: zeros would prove anything.
        key = (*weight.shape, weight.dtype, bias is None)
        if key not in self._proved:
            probe = torch.randn_like(weight)
            self._proved[key] = rows_are_independent(replace(many, weight=probe), replace(few, weight=probe), probe)
        return TwoLinears(few, many) if self._proved[key] else few


def product_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that oneDNN forms products of such numbers in here; None where it forms none.

    Half types that the CPU does not multiply are widened to fp32, which takes twice the memory and is many times as
    fast as their emulation.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    native = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    if dtype not in native:
        return None
    return dtype if native[dtype] else torch.float32


def rows_are_independent(
    linear: Linear,
    like: Linear,
    weight: Tensor,  # [out, in], what both are made of
) -> bool:
    """Whether a row's bits from `linear`, alone and among any number of others, are those that `like` gives to all.

    On a CPU: at the number of threads in use.
    """
    out_size, in_size = weight.shape
    generator = torch.Generator().manual_seed(0)
    most = max(2, min(PROBED_ROWS[-1], PROBE_NUMBERS // out_size))
    x = torch.randn(most, in_size, generator=generator).to(weight)
    together = like(x)
    for rows in (1, *(n for n in PROBED_ROWS if n < most), *([] if linear is like else [most])):
        for first in (0, most - rows):
            if not torch.equal(linear(x[first : first + rows]), together[first : first + rows]):
                return False
    return True
