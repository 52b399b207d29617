"""A layer of experts in the form of the native library: its linears and its working memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from quire.errors import BadShape, Unsupported
from quire.ops import native
from quire.ops.activation import Activation
from quire.ops.choice import Choice
from quire.ops.collectives import Columns
from quire.ops.cpu.exchange import gather_params
from quire.ops.cpu.linear import PackedLinear
from quire.ops.experts import ExpertLayer


@dataclass(frozen=True)
class ExpertLinears:
    """A router and E MLPs of one shape, dtype and quantisation; each row is processed by k of them."""

    router: PackedLinear  # H -> E, with results in fp32
    mlp_in: Sequence[PackedLinear]  # [E]: H -> 2 I, gates and ups
    mlp_out: Sequence[PackedLinear]  # [E]: I -> H
    choice: Choice
    activation: Activation
    weighed: Literal["results", "inputs"]
    inner: Columns | None = None  # as in ExpertLayer

    @classmethod
    def of(cls, layer: ExpertLayer) -> ExpertLinears:
        """Convert a layer whose linears are all packed.

        Raises BadShape or Unsupported if one does not fit the others.
        """
        return cls(
            cast(PackedLinear, layer.router),
            cast(Sequence[PackedLinear], layer.mlp_in),
            cast(Sequence[PackedLinear], layer.mlp_out),
            layer.choice,
            layer.activation,
            layer.weighed,
            layer.inner,
        )

    def __post_init__(self) -> None:
        count = len(self.mlp_in)
        hidden, inner, dtype = self.router.in_size, self.mlp_out[0].in_size, self.router.dtype
        own, out = inner, hidden
        if self.inner is not None:
            own, out = self.inner.own, self.mlp_out[0].out_size
        both = 2 * own if self.activation.gated else own
        for name, linear, expected in (
            ("router", self.router, (hidden, count, dtype, torch.float32)),
            *(("mlp_in", linear, (hidden, both, dtype, dtype)) for linear in self.mlp_in),
            *(("mlp_out", linear, (inner, out, dtype, dtype)) for linear in self.mlp_out),
        ):
            found = (linear.in_size, linear.out_size, linear.dtype, linear.out_dtype)
            if found != expected:
                raise BadShape(f"{name} has sizes, dtype and dtype of its results {found}; expected {expected}")
        kinds = [{linear.kind for linear in part} for part in (self.mlp_in, self.mlp_out)]
        if len(kinds[0]) > 1 or len(kinds[1]) > 1:
            raise Unsupported(f"the experts' weights are quantised in different ways: {kinds}; a layer has one of each")
        if any(linear.integers and linear.integers.order is not None for linear in (*self.mlp_in, *self.mlp_out)):
            raise Unsupported("an expert's weight permutes its inputs; experts share their rows, so none may do so")

    def params(self) -> native.ExpertsParams:
        """Return the kernel's description of the layer. An ExpertsRoom fills in the working memory."""
        count = len(self.mlp_in)
        return native.ExpertsParams(
            router=(native.LinearParams * 1)(self.router.params()),
            mlp_in=(native.LinearParams * count)(*(linear.params() for linear in self.mlp_in)),
            mlp_out=(native.LinearParams * count)(*(linear.params() for linear in self.mlp_out)),
            choice=native.ChoiceParams.of(self.choice, count),
            activation=native.ActivationParams.of(
                self.activation, self.mlp_in[0].out_size // (2 if self.activation.gated else 1)
            ),
            weighs_inputs=self.weighed == "inputs",
            inner_columns=native.GatherParams() if self.inner is None else gather_params(self.inner),
        )


class ExpertsRoom:
    """Working memory that is shared by all layers of experts."""

    def __init__(self) -> None:
        self._params: list[native.ExpertsParams] = []
        self._widths: dict[tuple[str, torch.dtype], int] = {}  # elements per row, for the layer that needs most
        self._tensors: list[Tensor] = []
        self._rows = 0

    def add(self, layer: ExpertLinears, params: native.ExpertsParams) -> None:
        """Make a layer use this memory."""
        self._params.append(params)
        hidden, inner, k = layer.router.in_size, layer.mlp_in[0].out_size, layer.choice.num_chosen
        dtype, stride = layer.router.dtype, layer.mlp_out[0].stride
        for name, kind, width in (
            *((name, torch.float32, len(layer.mlp_in)) for name in ("logits", "scores")),
            ("heaps", torch.int64, max(k, layer.choice.groups)),
            *((name, torch.int64, k) for name in ("chosen", "places")),
            ("shares", torch.float32, k),
            ("gathered", torch.float32, max(layer.router.lanes, k * layer.mlp_in[0].lanes)),
            ("inner", dtype, k * inner),
            ("activated", dtype, k * stride),
            ("copy", torch.float32, k * layer.mlp_out[0].copied_lanes(stride)),
            ("results", dtype, k * hidden),
        ):
            self._widths[name, kind] = max(width, self._widths.get((name, kind), 0))

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` rows."""
        if rows <= self._rows or not self._params:
            return
        self._tensors.clear()  # freed before larger ones are allocated
        self._rows = rows
        for (name, dtype), width in self._widths.items():
            self._tensors.append(torch.empty(native.copied_rows(rows) * width, dtype=dtype))
            for params in self._params:
                setattr(params, name, self._tensors[-1].data_ptr())
