"""x @ weight.T + bias on a CPU, for weights that were packed once.

A row's bits depend only on the row, the weight and the instruction set: not on the other rows, the threads, or the
division of the work. Sums are in fp32: the bias, and one sum for each segment of inputs, all in ascending order.
Products with quantised weights are those of `quire.ops.weights.quantised`, with the same bits on every instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from quire.errors import BadShape, BadValue, Unsupported
from quire.ops import native
from quire.ops.checks.tensors import INT32_MAX
from quire.ops.cpu.lora import LoraMemory, PackedLoraTable
from quire.ops.memory import in_huge_pages
from quire.ops.weights.gguf_blocks import FORMATS, BlockWeight
from quire.ops.weights.linear import Embedding, Linear, Linears, LinearWeight
from quire.ops.weights.lora import LoraTable
from quire.ops.weights.narrow import NarrowFormat, NarrowWeight
from quire.ops.weights.quantised import PARTS, QuantisedWeight

BLOCK = 64 * 2**20  # bytes allocated for several weights, since a small one alone fills no huge page


@dataclass(frozen=True)
class PackedIntegers:
    """The properties of a quantised weight, in addition to its packed values."""

    bits: int
    sub_size: int  # inputs that share a sub-scale; 0: no sub-scales
    group_size: int  # inputs that share a scale
    activation_group: int  # inputs of x that share a scale
    has_zeros: bool
    has_halves: bool  # scales and minimums are fp16
    has_minimums: bool
    scales: Tensor | None  # fp32 [out], if each output has one scale; otherwise they are packed with the values
    order: Tensor | None  # int64 [in]: the input of x for each input of the weight

    @property
    def kind(self) -> tuple[int | bool, ...]:
        """The properties that determine the rounding of x and the packing of the weight."""
        return (*(getattr(self, field.name) for field in fields(self)[:-2]), self.scales is None)

    @classmethod
    def of(cls, weight: QuantisedWeight, kept: Callable[[Tensor], Tensor]) -> PackedIntegers:
        """Describe a weight. `kept` copies a tensor to memory that stays allocated."""
        return cls(
            weight.bits,
            weight.sub_size,
            weight.group_size,
            weight.activation_group,
            weight.zeros is not None,
            weight.scales.dtype is torch.float16,
            weight.minimums is not None,
            kept(weight.scales[:, 0]) if weight.by_output else None,
            None if weight.order is None else kept(weight.order),
        )


@dataclass(frozen=True)
class PackedLinear:
    """A weight in the order in which the kernel reads it, and its bias."""

    packed: Tensor  # uint8
    bias: Tensor | None  # fp32 [out]
    out_size: int
    in_size: int
    dtype: torch.dtype  # of x, and of a weight that is not quantised
    out_dtype: torch.dtype
    library: native.Library
    integers: PackedIntegers | None = None  # of a quantised weight
    narrow: NarrowFormat | None = None  # of a weight of narrow numbers

    def __call__(
        self,
        x: Tensor,  # [T, in], of the weight's dtype
    ) -> Tensor:
        """Return the projection: [T, out]."""
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
        """Return rows of the weight, with the bits that were packed: [T, in]."""
        if places.dtype is not torch.int64 or places.dim() != 1:
            raise BadShape(f"places is {places.dtype} {tuple(places.shape)}; expected torch.int64 [T]")
        _check_host("places", places)
        places = places.contiguous()
        rows = torch.empty(len(places), self.in_size, dtype=self.dtype)
        wrong = self.library("unpack", byref(self.params()), places.data_ptr(), len(places), rows.data_ptr())
        if wrong >= 0:
            raise BadValue(f"places[{wrong}] is {int(places[wrong])}; the weight has rows 0..{self.out_size - 1}")
        return rows

    def copy_size(self, rows: int, stride: int) -> int:
        """Return the size of the kernel's copy of `rows` rows of x, in fp32 numbers. `stride` of x is in elements."""
        return int(self.library("copy_size", byref(self.params()), rows, stride))

    def copied_lanes(self, stride: int) -> int:
        """Return the size of the copy per row for many rows, or 0 if they are read in place."""
        return self.copy_size(native.MANY_ROWS, stride) // native.MANY_ROWS

    @property
    def stride(self) -> int:
        """The stride of rows of x, in elements, with which they are read in place at full speed."""
        return int(self.library("row_stride", self.in_size, native.DTYPES[self.dtype]))

    @property
    def lanes(self) -> int:
        """Size of the copy of a row of x in fp32 numbers. Each has one element, a pair of bf16, or four bytes."""
        return int(self.library("row_lanes", byref(self.params())))

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that determine the format of x and the packing of the weight."""
        if self.integers is not None:
            return self.integers.kind
        return (None if self.narrow is None else self.narrow.name,)

    def params(self) -> native.LinearParams:
        """Return the kernel's description of the weight. The caller fills in the rows."""
        params = _params(self.out_size, self.in_size, self.dtype, self.integers, self.narrow)
        params.weight, params.out_dtype = self.packed.data_ptr(), native.DTYPES[self.out_dtype]
        params.bias = None if self.bias is None else self.bias.data_ptr()
        return params


@dataclass(frozen=True)
class PackedEmbedding:
    """An embedding that reads rows from the packed weight of the output projection."""

    head: PackedLinear

    def __call__(
        self,
        token_ids: Tensor,  # int64 [T]
    ) -> Tensor:
        """Return the rows: [T, H]."""
        return self.head.weight_rows(token_ids)


class PackedLinears(Linears):
    """Native products, which have one order of summation, and torch's for dtypes that they do not support."""

    def __init__(self) -> None:
        super().__init__()
        self._pack = Packer()
        self._loras = LoraMemory()

    def _own(self, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Linear | None:
        return self._pack(weight, bias, out_dtype) if self._serves(weight) else None

    def embedding(
        self,
        weight: LinearWeight,  # [V, H]
    ) -> Embedding:
        """Return the embedding of a weight that is not used in a product. A quantised one stays packed."""
        if isinstance(weight, QuantisedWeight | BlockWeight) and self._serves(weight):
            return PackedEmbedding(self._pack(weight))
        return super().embedding(weight)

    def tied(
        self,
        weight: LinearWeight,  # [V, H]
    ) -> tuple[Embedding, Linear]:
        """Return the embedding and the linear that computes logits, which share one packed weight."""
        if not self._serves(weight) or isinstance(weight, NarrowWeight):
            return super().tied(weight)
        packed = self._pack(weight, out_dtype=torch.float32)
        return PackedEmbedding(packed), packed

    def lora(self, in_size: int, out_size: int, dtype: torch.dtype, num_slots: int, most_rank: int) -> LoraTable:
        """Return an empty table of the adapters of a linear."""
        if dtype not in native.DTYPES:
            return super().lora(in_size, out_size, dtype, num_slots, most_rank)
        return PackedLoraTable(in_size, out_size, dtype, num_slots, most_rank, self._loras, native.default())

    def _serves(self, weight: LinearWeight) -> bool:
        return weight.is_cpu and weight.dtype in native.DTYPES


class Packer:
    """Packs weights, one after the other, into shared allocations."""

    def __init__(self, library: native.Library | None = None) -> None:
        """Use a library, by default the one for this machine. Raises Unsupported if it cannot be used."""
        self._library = library or native.default()
        self._left = torch.empty(0, dtype=torch.uint8)

    def __call__(
        self,
        weight: LinearWeight,  # [out, in], of a dtype of native.DTYPES
        bias: Tensor | None = None,  # [out]
        out_dtype: torch.dtype | None = None,  # fp32, or the weight's
    ) -> PackedLinear:
        """Pack a weight. The results of the linear are in `out_dtype`, by default the weight's dtype."""
        dtype = weight.dtype
        if dtype not in native.DTYPES or out_dtype not in (None, dtype, torch.float32):
            raise Unsupported(f"weight is {dtype} and out_dtype {out_dtype}; the kernel takes {list(native.DTYPES)}")
        out_size, in_size = _sizes(weight)
        if out_size * in_size == 0 or (bias is not None and bias.shape != (out_size,)):
            shown = None if bias is None else tuple(bias.shape)
            raise BadShape(f"weight has shape {(out_size, in_size)} and bias {shown}; expected [out, in] and [out]")
        if in_size > INT32_MAX:
            raise BadShape(f"weight has shape {(out_size, in_size)}; its inputs are numbered in an int32")
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                _check_host(name, tensor)
        sample = weight.rows(torch.zeros(1, dtype=torch.int64)) if isinstance(weight, BlockWeight) else weight
        integers = PackedIntegers.of(sample, self._kept) if isinstance(sample, QuantisedWeight) else None
        narrow = weight.format if isinstance(weight, NarrowWeight) else None
        params = _params(out_size, in_size, dtype, integers, narrow)
        packed = self._take(self._library("packed_bytes", byref(params)))
        if isinstance(weight, QuantisedWeight):
            self._pack_values(params, weight, packed)
        elif isinstance(weight, BlockWeight):
            kind, rows = list(FORMATS).index(weight.kind), weight.addresses
            self._library("pack_blocks", byref(params), kind, rows.data_ptr(), packed.data_ptr())
        elif isinstance(weight, NarrowWeight):
            codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
            self._library("pack_narrow", byref(params), codes.data_ptr(), scales.data_ptr(), packed.data_ptr())
        else:
            self._pack_numbers(params, weight, packed)
        return PackedLinear(
            packed,
            None if bias is None else self._kept(bias.float()),
            out_size,
            in_size,
            dtype,
            out_dtype or dtype,
            self._library,
            integers,
            narrow,
        )

    def _pack_numbers(self, params: native.LinearParams, weight: Tensor, packed: Tensor) -> None:
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        self._library("pack", byref(params), weight.data_ptr(), weight.stride(0), packed.data_ptr())

    def _pack_values(self, params: native.LinearParams, weight: QuantisedWeight, packed: Tensor) -> None:
        given = {name: getattr(weight, name) for name in PARTS}
        parts = {name: part.contiguous() for name, part in given.items() if part is not None}
        addresses = native.IntegerParts(**{name: part.data_ptr() for name, part in parts.items()})
        self._library("pack_values", byref(params), byref(addresses), packed.data_ptr())

    def _kept(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the weights' memory, since on the heap it would fragment the space for temporary tensors."""
        copy = self._take(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    def _take(self, size: int) -> Tensor:
        """Allocate `size` bytes, aligned to a cache line."""
        size = -(-size // 64) * 64
        if size > len(self._left):
            self._left = in_huge_pages((max(size, BLOCK),), torch.uint8)
        taken, self._left = self._left[:size], self._left[size:]
        return taken


def _sizes(weight: LinearWeight) -> tuple[int, int]:
    """Return the numbers of outputs and inputs."""
    if not isinstance(weight, Tensor):
        return weight.out_size, weight.in_size
    if weight.dim() != 2:
        raise BadShape(f"weight has shape {tuple(weight.shape)}; expected [out, in]")
    return weight.shape[0], weight.shape[1]


def _params(
    out_size: int,
    in_size: int,
    dtype: torch.dtype,
    integers: PackedIntegers | None,
    narrow: NarrowFormat | None,
) -> native.LinearParams:
    """Return the parameters that determine the packing of a weight."""
    params = native.LinearParams(in_size=in_size, out_size=out_size, dtype=native.DTYPES[dtype])
    if narrow is not None:
        params.bits, params.narrow = narrow.bits, True
    if integers is not None:
        params.bits, params.sub, params.zeros = integers.bits, integers.sub_size, integers.has_zeros
        params.group, params.activation_group = integers.group_size, integers.activation_group
        params.halves, params.minimums = integers.has_halves, integers.has_minimums
        params.scales = None if integers.scales is None else integers.scales.data_ptr()
        params.order = None if integers.order is None else integers.order.data_ptr()
    return params


def _check_host(name: str, x: LinearWeight) -> None:
    if not x.is_cpu:
        raise BadValue(f"{name} is on {x.device}; the kernels read memory of the CPU")
