"""Layers with a recurrent state, in the form of the native library."""

from __future__ import annotations

from ctypes import addressof, byref

import torch
from torch import Tensor

from quire.ops import native
from quire.ops.recurrent.calls import Convolution, Recurrence, Scan
from quire.ops.recurrent.plan import RecurrentPlan, RecurrentStep
from quire.ops.recurrent.records import RecurrentCache, RecurrentSpec


class CpuRecurrentPlan(RecurrentPlan):
    """A plan with the native structure, which points to the plan's tensors."""

    def __init__(self, spec: RecurrentSpec, max_tokens: int, max_seqs: int, max_pieces: int) -> None:
        super().__init__(spec, max_tokens, max_seqs, max_pieces)
        self.step = native.RecurrentStep(
            heads=spec.num_heads,
            k_heads=spec.num_k_heads,
            dim_k=spec.dim_k,
            dim_v=spec.dim_v,
            width=spec.width,
            taps=spec.taps,
            query_starts=self.query_starts.data_ptr(),
            context_lens=self.context_lens.data_ptr(),
            state_tables=self.state_tables.data_ptr(),
            row_tables=self.row_tables.data_ptr(),
            nonfinite=self._nonfinite.data_ptr(),
            table_stride=max_pieces,
        )
        self.view = addressof(self.step)  # address of the structure that kernels read

    def _update(self, step: RecurrentStep) -> None:
        super()._update(step)
        self.step.num_seqs, self.step.num_rows = self.num_seqs, self.num_tokens


def records(cache: RecurrentCache) -> native.RecurrentRecords:
    """Return the native structure of a layer's records, which the caller has checked."""
    tensors = cache.tensors()
    strides = {f"{name}_record": x.stride(0) for name, x in tensors.items()}
    return native.RecurrentRecords(**{name: x.data_ptr() for name, x in tensors.items()}, **strides)


def convolution_params(convolution: Convolution) -> native.ConvolutionParams:
    """Return the parameters of a convolution, without the cache and the rows. Its weight is transposed: [K, W]."""
    weight, bias, activation = convolution
    offset = None if bias is None else bias.data_ptr()
    return native.ConvolutionParams(weight=weight.data_ptr(), bias=offset, silu=activation == "silu")


def recurrence_params(recurrence: Recurrence) -> native.RecurrenceParams:
    """Return the parameters of a recurrence, without the cache and the rows."""
    decay_rate, dt_bias, skip, (low, high), scale = recurrence
    return native.RecurrenceParams(
        decay_rate=decay_rate.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        skip=None if skip is None else skip.data_ptr(),
        dt_low=low,
        dt_high=high,
        scale=scale,
    )


def scan_params(scan: Scan) -> native.ScanParams:
    """Return the parameters of a scan, without the cache and the rows."""
    rule, rate, bias, skip, scale, floor = scan
    return native.ScanParams(
        rate=rate.data_ptr(),
        bias=bias.data_ptr(),
        skip=None if skip is None else skip.data_ptr(),
        scale=scale,
        floor=floor,
        rule=native.SCAN_RULES.index(rule),
    )


def convolve(
    params: native.ConvolutionParams,
    x: Tensor,  # [T, W]
    cache: RecurrentCache,
    plan: CpuRecurrentPlan,
) -> Tensor:
    """Run a convolution and return its result: [T, W]."""
    out = torch.empty(x.shape, dtype=x.dtype)
    params.cache = records(cache)
    params.x, params.x_stride, params.out, params.out_stride = x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)
    native.default()("convolve", byref(plan.step), byref(params), native.DTYPES[x.dtype])
    return out


def recur(
    params: native.RecurrenceParams,
    x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv]
    gates: Tensor,  # [T, 2 * Hv] or [T, Hv]
    cache: RecurrentCache,
    plan: CpuRecurrentPlan,
) -> Tensor:
    """Run a recurrence and return its result: [T, Hv * Dv]."""
    out = torch.empty(len(x), plan.spec.value_width, dtype=x.dtype)
    params.cache, params.threads = records(cache), torch.get_num_threads()
    params.x, params.x_stride, params.out, params.out_stride = x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)
    params.gates, params.gates_stride = gates.data_ptr(), gates.stride(0)
    native.default()("recur", byref(plan.step), byref(params), native.DTYPES[x.dtype])
    return out


def scan(
    params: native.ScanParams,
    x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv] or [T, Hv * Dv]
    gates: Tensor,  # [T, Hv * Dk] or [T, Hv * Dv]
    side: Tensor,  # [T, Hv], [T, 2 * Hk * Dk] or [T, Hv * Dv]
    cache: RecurrentCache,
    plan: CpuRecurrentPlan,
) -> Tensor:
    """Run a scan and return its result: [T, Hv * Dv]."""
    out = torch.empty(len(x), plan.spec.value_width, dtype=x.dtype)
    params.cache, params.threads = records(cache), torch.get_num_threads()
    for name, rows in {"x": x, "gates": gates, "side": side, "out": out}.items():
        setattr(params, name, rows.data_ptr())
        setattr(params, f"{name}_stride", rows.stride(0))
    native.default()("scan", byref(plan.step), byref(params), native.DTYPES[x.dtype])
    return out
