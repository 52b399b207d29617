"""A decoder's layers as a list of operators that the native library runs in one call.

Who calls the operators one by one from Python pays some microseconds for each: with small models and few rows more than
for the work itself. A program is written once for a model. Each of its operators is the one of the same name in this
backend, with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure, addressof, c_int64, c_void_p

import torch
from torch import Tensor

from quire.errors import BadStride, BadValue
from quire.ops import validate
from quire.ops.cpu import native
from quire.ops.cpu.experts import ExpertLinears, ExpertsRoom
from quire.ops.cpu.linear import PackedLinear
from quire.ops.cpu.worklist import Cache, CpuPlan

HOST = torch.device("cpu")

Place = tuple[str, int]  # a buffer, and the first of its columns


class Program:
    """Operators on buffers of rows, one row a token."""

    def __init__(self, dtype: torch.dtype, widths: Mapping[str, int], library: native.Library | None = None) -> None:
        """dtype: of all buffers. widths: their columns, by name; the first two are the caller's, see `run`."""
        if len(widths) > native.MAX_BUFFERS:
            raise BadValue(f"a program has {len(widths)} buffers; {native.MAX_BUFFERS} are the most")
        self._dtype, self._widths = dtype, list(widths.values())
        self._buffers = {name: i for i, name in enumerate(widths)}
        self._own_width = sum(self._widths[2:])
        self._library = library or native.default()
        self._ops: list[native.Op] = []
        self._array = (native.Op * 0)()
        self._kept: list[object] = []  # what the operators point to
        self._caches: list[tuple[native.WriteParams, native.AttentionParams]] = []  # by layer
        self._num_groups, self._bound = 0, False
        self._linears: list[native.LinearParams] = []
        self._copied_lanes = 0  # for each row, of the linear that needs most
        self._experts = ExpertsRoom()
        self._scratch = torch.empty(0, dtype=dtype)
        self._copy = torch.empty(0)

    # ------------------------------------------------------------------------------------------ writing it

    def linear(self, x: Place, packed: PackedLinear, out: Place) -> None:
        """out = x @ weight.T + bias."""
        self._kept.append(packed)
        params = packed.params()
        self._linears.append(params)
        self._copied_lanes = max(self._copied_lanes, packed.copied_lanes(self._widths[self._buffers[x[0]]]))
        self._add("linear", params, x, None, out)

    def norm(
        self,
        x: Place,
        weight: Tensor,  # fp32 [dim]
        bias: Tensor | None,  # fp32 [dim]; None: RMSNorm
        eps: float,
        out: Place,
        residual: Place | None = None,
        heads: int = 1,
    ) -> None:
        """out = the norm of x, or of the residual once it has taken in x. `heads`: rows of each token."""
        self._kept += [weight, bias]
        offset = None if bias is None else bias.data_ptr()
        params = native.NormParams(weight.data_ptr(), offset, heads, len(weight), eps)
        self._add("norm", params, x, residual, out)

    def rope(self, q: Place, k: Place, cos: Tensor, sin: Tensor, heads: tuple[int, int], head_dim: int) -> None:
        """Rotate q and k where they stand."""
        self._kept += [cos, sin]
        self._add("rope", native.RopeParams(cos.data_ptr(), sin.data_ptr(), *cos.shape, *heads, head_dim), q, k)

    def attention(
        self,
        q: Place,
        k: Place,
        v: Place,
        out: Place,
        group: int,
        scale: float,
        alibi_slopes: Tensor | None,  # fp32 [Hq]
        softcap: float | None,
    ) -> None:
        """Store k and v in the layer's cache, and attend to all that stands there."""
        self._kept.append(alibi_slopes)
        write = native.WriteParams()
        attention = native.AttentionParams(
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.data_ptr(), scale=scale, softcap=softcap or 0.0
        )
        self._add("write", write, k, v, group=group)
        self._add("attention", attention, q, None, out, group=group)
        self._caches.append((write, attention))
        self._num_groups = max(self._num_groups, group + 1)

    def swiglu(self, x: Place, out: Place, size: int) -> None:
        """silu(gate) * up; x holds the gate, then up."""
        self._add("swiglu", native.ActivationParams(size), x, None, out)

    def gelu(self, x: Place, out: Place, size: int, tanh: bool) -> None:
        """GELU in its exact or its tanh form."""
        self._add("gelu", native.ActivationParams(size, tanh), x, None, out)

    def multiply(self, x: Place, out: Place, size: int) -> None:
        """out *= x."""
        self._add("multiply", native.ActivationParams(size), x, None, out)

    def add(self, x: Place, out: Place, size: int) -> None:
        """out += x."""
        self._add("add", native.ActivationParams(size), x, None, out)

    def scale(self, x: Place, out: Place, size: int, factor: float) -> None:
        """out = x * factor."""
        self._add("scale", native.ActivationParams(size, factor=factor), x, None, out)

    def experts(self, x: Place, layer: ExpertLinears, out: Place) -> None:
        """out = what each row's own experts say of x, each by its share."""
        self._kept.append(layer)
        params = layer.params()
        self._experts.add(layer, params)
        self._add("experts", params, x, None, out)

    def keep(self, x: Place, y: Place) -> None:
        """Of these two buffers, go on with the rows that `run` is told to keep; the others end here."""
        self._add("keep", native.ActivationParams(), x, y)

    def _add(
        self, kind: str, params: Structure, x: Place, y: Place | None = None, out: Place | None = None, group: int = 0
    ) -> None:
        self._kept.append(params)
        places = (
            native.Columns(-1, 0) if p is None else native.Columns(self._buffers[p[0]], p[1]) for p in (x, y, out)
        )
        self._ops.append(native.Op(native.OPS.index(kind), group, *places, addressof(params)))

    # ------------------------------------------------------------------------------------------ running it

    @property
    def kinds(self) -> list[str]:
        """The operators' names, in order."""
        return [native.OPS[op.kind] for op in self._ops]

    def bind(self, caches: Sequence[Cache]) -> None:
        """Let the layers' attention work on these caches, in order."""
        for pair, cache in zip(self._caches, caches, strict=True):
            for params, home in zip(pair, (cache.write, cache.attention), strict=True):
                for name in ("k", "v", "k_block", "k_head", "k_slot", "v_block", "v_head", "v_slot"):
                    setattr(params, name, getattr(home, name))
        self._bound = True

    def run(
        self,
        first: Tensor,  # [T, width], contiguous: the first buffer
        second: Tensor,  # [T, width], contiguous: the second
        positions: Tensor,  # int64 [T], contiguous
        plans: Sequence[CpuPlan],  # one a cache group, with T tokens each
        kept: Tensor | None = None,  # int64 [R], contiguous, ascending: what `keep` keeps; None: all rows
        seconds: Tensor | None = None,  # fp64 [operators], filled with what each of them took
    ) -> None:
        """Run all operators, the caller holding the plans' locks.

        Raises BadValue for a position that a table does not hold, for rows out of order, and for plans or caches that
        are missing; BadShape, BadDtype, BadStride or BadValue for a tensor that is not as described.
        """
        rows = first.shape[0]
        _check("first", first, (rows, self._widths[0]), self._dtype)
        _check("second", second, (rows, self._widths[1]), self._dtype)
        _check("positions", positions, (rows,), torch.int64)
        if kept is not None:
            _check("kept", kept, (kept.numel(),), torch.int64)
        if seconds is not None:
            _check("seconds", seconds, (len(self._ops),), torch.float64)
        if len(plans) < self._num_groups:
            raise BadValue(f"given are {len(plans)} plans; the program has {self._num_groups} cache groups")
        if self._caches and not self._bound:
            raise BadValue(f"the program has {len(self._caches)} layers of attention; bind their caches first")
        for plan in plans:
            if plan.num_tokens != rows or not plan.writable:
                raise BadValue(f"a plan is for {plan.num_tokens} tokens, the program for {rows}; update it with slots")
        if len(self._array) != len(self._ops):
            self._array = (native.Op * len(self._ops))(*self._ops)
        if rows * self._own_width > len(self._scratch) or rows * self._copied_lanes > len(self._copy):
            self._scratch = self._copy = torch.empty(0)  # freed before there are larger ones
            self._scratch = torch.empty(rows * self._own_width, dtype=self._dtype)
            self._copy = torch.empty(rows * self._copied_lanes)
            for params in self._linears:
                params.copy = self._copy.data_ptr()
        self._experts.reserve(rows)
        address, size = self._scratch.data_ptr(), self._dtype.itemsize
        buffers = [first.data_ptr(), second.data_ptr()]
        for width in self._widths[2:]:
            buffers.append(address)
            address += rows * width * size
        beyond = self._library(
            "program",
            native.ProgramParams(
                ops=self._array,
                num_ops=len(self._ops),
                seconds=None if seconds is None else seconds.data_ptr(),
                positions=positions.data_ptr(),
                plans=(c_void_p * len(plans))(*(plan.view for plan in plans)),
                buffers=(c_void_p * native.MAX_BUFFERS)(*buffers),
                widths=(c_int64 * native.MAX_BUFFERS)(*self._widths),
                rows=rows,
                kept=None if kept is None else kept.data_ptr(),
                num_kept=-1 if kept is None else len(kept),
                dtype=native.DTYPES[self._dtype],
                threads=torch.get_num_threads(),
            ),
        )
        if beyond >= 0 and native.OPS[self._ops[beyond].kind] == "keep":
            raise BadValue(f"rows to keep are {kept}; they must ascend within 0..{rows - 1}")
        if beyond >= 0:
            raise BadValue(f"a position lies beyond its table: {positions.min()} to {positions.max()}")


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    validate.check_tensor(name, x, shape, dtype, HOST)
    if not x.is_contiguous():
        raise BadStride(f"{name} has strides {x.stride()} for shape {shape}; it must be contiguous")
