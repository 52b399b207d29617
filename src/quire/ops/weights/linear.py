"""Batch-invariant linear layers, and embeddings that may be tied to one.

A backend packs a model's weights once (`Backend.linears`). This module uses torch's products: on a CPU, oneDNN's. Its
order of summation is the same for all numbers of rows except one, so a single row is padded to two. This is verified at
load for every shape of weight. If it does not hold, rows are multiplied one by one, which is slow but batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import pad

from quire.ops.weights.gguf_blocks import BlockWeight
from quire.ops.weights.lora import LoraTable, PlainLoraTable
from quire.ops.weights.narrow import NarrowLinear, NarrowWeight
from quire.ops.weights.quantised import QuantisedEmbedding, QuantisedLinear, QuantisedWeight

PROBED_ROWS = (2, 3, 16, 17, 64, 512)
PROBE_NUMBERS = 2**24  # elements of a probe's output: for a large vocabulary it has fewer rows

LinearWeight: TypeAlias = Tensor | QuantisedWeight | BlockWeight | NarrowWeight  # [out, in]


class Linear(Protocol):
    """x @ weight.T + bias. Several projections of the same input are one Linear, their weights stacked."""

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:
        """Return the projection: [T, out]."""


class Embedding(Protocol):
    """A row of the embedding for each token."""

    def __call__(
        self,
        token_ids: Tensor,  # int64 [T]
    ) -> Tensor:
        """Return the rows, in separate memory: [T, H]."""


@dataclass(frozen=True)
class PlainEmbedding:
    """Rows of a matrix."""

    weight: Tensor  # [V, H]; of a wider dtype if the output projection needs it
    dtype: torch.dtype  # of the rows

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids].to(self.dtype)


@dataclass(frozen=True)
class PlainLinear:
    """torch's product, used on a GPU."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class CutLinear:
    """A linear whose last outputs are padding."""

    padded: Linear
    out_size: int  # without padding

    def __call__(self, x: Tensor) -> Tensor:
        return self.padded(x)[:, : self.out_size]


@dataclass(frozen=True)
class RowLinear:
    """A linear that multiplies one row at a time."""

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

    weight: Tensor  # [out, in], in oneDNN's layout or in rows
    bias: Tensor | None  # [out]
    dtype: torch.dtype  # of the product

    def __call__(self, x: Tensor) -> Tensor:
        count, size = x.shape[0], padded_rows(x.shape[0])
        if count == 0:
            return x.new_empty(0, self.weight.shape[0])
        rows = x.to(self.dtype)
        if size > count:
            rows = torch.cat([rows, rows.new_zeros(size - count, x.shape[1])])
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return out[:count].to(x.dtype)


@dataclass(frozen=True)
class JoinedLinear:
    """Several projections of the same input whose weights cannot be stacked. Their outputs are concatenated."""

    parts: Sequence[Linear]
    sizes: Sequence[int]  # outputs of each

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


@dataclass(frozen=True)
class HeadsLinear:
    """A projection of each head by a separate weight. Rows of x and of the result are concatenated heads."""

    parts: Sequence[Linear]  # [heads]
    in_size: int  # of each head
    out_size: int

    def __call__(self, x: Tensor) -> Tensor:
        pairs = zip(self.parts, torch.split(x, self.in_size, 1), strict=True)
        return torch.cat([part(head) for part, head in pairs], 1)


def padded_rows(count: int) -> int:
    """Return the number of rows to pad `count` rows to for oneDNN: above 64 rows at most an eighth more.

    A single row would use another kernel, with another order of summation. And oneDNN compiles and keeps a kernel for
    each number of rows: half a millisecond and half a MiB for each shape of weight.
    """
    if count <= 8:
        return max(2, count)
    step = 8 if count <= 64 else 1 << (count - 1).bit_length() - 4
    return -(-count // step) * step


class Linears:
    """Packs the weights of one model, and caches which shapes of weight were verified to be batch-invariant.

    This class uses torch's products: on a CPU oneDNN's, which are batch-invariant, elsewhere torch's default.
    """

    def __init__(self) -> None:
        self._proved: dict[tuple[object, ...], bool] = {}

    def linear(
        self,
        weight: LinearWeight,  # [out, in]
        bias: Tensor | None = None,  # [out]
    ) -> Linear:
        """Return the linear of a weight."""
        if (own := self._own(weight, bias, weight.dtype)) is not None:
            return own
        if isinstance(weight, BlockWeight):
            weight = weight.whole()
        if isinstance(weight, QuantisedWeight):
            return QuantisedLinear(weight, bias, weight.dtype)
        if isinstance(weight, NarrowWeight):
            if weight.is_cpu:
                return NarrowLinear(weight, bias, weight.dtype)
            return self.linear(weight.dequantised().to(weight.dtype), bias)
        if not weight.is_cpu:
            return PlainLinear(weight, bias)
        dtype = product_dtype(weight.dtype)
        if dtype is None:
            return RowLinear(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), PROBED_ROWS[-1])
        return self._one_dnn(packed, dtype, weight, bias)

    def joined(
        self,
        weights: Sequence[LinearWeight],  # [out, in] each
        bias: Tensor | None = None,  # [all out]
    ) -> Linear:
        """Return one linear for weights that differ in kind, or in the order of their inputs."""
        sizes = [len(w) if isinstance(w, Tensor) else w.out_size for w in weights]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        return JoinedLinear([self.linear(w, b) for w, b in zip(weights, biases, strict=True)], sizes)

    def heads(
        self,
        weights: Tensor,  # [heads, out, in]
    ) -> HeadsLinear:
        """Return the projection of each head by its own weight."""
        return HeadsLinear([self.linear(weight) for weight in weights], weights.shape[2], weights.shape[1])

    def head(
        self,
        weight: LinearWeight,  # [V, H]
        bias: Tensor | None = None,  # [V]
    ) -> Linear:
        """Return the linear that computes logits: in fp32 if the product supports it, else in the weight's dtype."""
        if (own := self._own(weight, bias, torch.float32)) is not None:
            return own
        if isinstance(weight, BlockWeight):
            weight = weight.whole()
        if isinstance(weight, QuantisedWeight):
            return QuantisedLinear(weight, bias, torch.float32)
        if isinstance(weight, NarrowWeight) and weight.is_cpu:
            return NarrowLinear(weight, bias, torch.float32)
        if isinstance(weight, NarrowWeight):
            weight = weight.dequantised().to(weight.dtype)
        return self._cut(aligned(weight), bias, len(weight))

    def embedding(
        self,
        weight: LinearWeight,  # [V, H]
    ) -> Embedding:
        """Return the embedding of a weight that is not used in a product."""
        if isinstance(weight, BlockWeight):
            weight = weight.whole()
        if isinstance(weight, QuantisedWeight):
            return QuantisedEmbedding(weight)
        if isinstance(weight, NarrowWeight):
            return PlainEmbedding(weight.dequantised().to(weight.dtype), weight.dtype)
        return PlainEmbedding(weight, weight.dtype)

    def tied(
        self,
        weight: LinearWeight,  # [V, H]
    ) -> tuple[Embedding, Linear]:
        """Return the embedding and the linear that computes logits, which share one weight.

        Rows cannot be read from oneDNN's layout, so its product takes the weight in rows here: a single row of logits
        of a large vocabulary then takes two to three times as long.
        """
        if not isinstance(weight, Tensor):
            return self.embedding(weight), self.head(weight)
        if not weight.is_cpu:
            padded = aligned(weight)
            return self.embedding(padded), self._cut(padded, None, len(weight))
        dtype = product_dtype(weight.dtype)
        kept = weight.to(dtype or weight.dtype, copy=True)
        if dtype is None:
            return PlainEmbedding(kept, kept.dtype), RowLinear(kept, None)
        head = self._one_dnn(kept, dtype, weight, None)
        return PlainEmbedding(head.weight, weight.dtype), head

    def lora(self, in_size: int, out_size: int, dtype: torch.dtype, num_slots: int, most_rank: int) -> LoraTable:
        """Return an empty table of the adapters of a linear [out, in].

        `dtype` is that of the linear's inputs and results, `num_slots` the largest number of adapters, and `most_rank`
        the largest sum of the ranks of an adapter's parts, each rounded up to an even number.
        """
        return PlainLoraTable(self.linear, in_size, out_size)

    def _own(self, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Linear | None:
        """Return the backend's product with a weight, whose results have that dtype; None: torch computes it."""
        return None

    def _cut(
        self,
        padded: Tensor,  # [V or more, H]
        bias: Tensor | None,  # [V]
        size: int,  # V
    ) -> Linear:
        """Return the linear of a weight with padding after its rows. The padding is cut off the result."""
        if len(padded) == size:
            return self.linear(padded, bias)
        return CutLinear(self.linear(padded, None if bias is None else pad(bias, (0, len(padded) - size))), size)

    def _one_dnn(
        self,
        ready: Tensor,  # the weight [out, in] in the layout for oneDNN
        dtype: torch.dtype,  # of the product
        weight: Tensor,  # [out, in]
        bias: Tensor | None,  # [out]
    ) -> OneDnnLinear | RowLinear:
        made = OneDnnLinear(ready, None if bias is None else bias.to(dtype), dtype)
        key = (*weight.shape, weight.dtype, bias is None, ready.layout)
        if key not in self._proved:
            self._proved[key] = rows_are_independent(made, made, weight)
        return made if self._proved[key] else RowLinear(weight, bias)


def aligned(
    weight: Tensor,  # [V, H]
) -> Tensor:
    """Pad the weight with rows of zeros on a GPU, so that rows of its product begin at multiples of 16 bytes.

    cuBLAS has no fast kernel for other sizes: GPT-2's 50,257 outputs take three times as long without padding.
    """
    missing = -len(weight) % (16 // weight.itemsize)
    return weight if weight.is_cpu or missing == 0 else pad(weight, (0, 0, 0, missing))


def product_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which oneDNN multiplies numbers of `dtype` on this CPU, or None if it does not support them.

    Half types without hardware support are widened to fp32, which takes twice the memory but is many times as fast as
    emulation.
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
    weight: Tensor,  # [out, in], of both linears
) -> bool:
    """Return True if `linear` gives a row, for any number of rows in the batch, the bits that `like` gives it.

    On a CPU this holds for the current number of threads.
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
