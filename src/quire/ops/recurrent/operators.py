"""The interface of the operators for layers with a recurrent state. `Backend` inherits it.

`quire.ops.recurrent.reference` defines each result; `quire.ops.recurrent` defines the records and dimensions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from quire.errors import BadValue, Unsupported, check_number
from quire.ops.checks.small import check_gate, check_gated_norm
from quire.ops.checks.tensors import check_tensor
from quire.ops.recurrent.calls import Convolution, GatedNorm, Recurrence, Scan
from quire.ops.recurrent.plan import RecurrentPlan, step_sizes
from quire.ops.recurrent.records import RecurrentCache, RecurrentSpec, check_cache
from quire.ops.spec import Limits


class RecurrentOperators(ABC):
    """Convolutions and recurrences over the records of a `RecurrentCache`.

    An operator reads and writes the records that the plan names, so each layer calls it once per step.
    """

    name: str
    limits: Limits
    device_type: str | None = None  # of the only devices that its plans serve; None: those of the specs
    recurrent_plan_type: type[RecurrentPlan] = RecurrentPlan  # of the plans that its operators take

    # --------------------------------------------------------------------------------------------------- plans

    def make_recurrent_plan(
        self, spec: RecurrentSpec, max_tokens: int, max_seqs: int, max_pieces: int
    ) -> RecurrentPlan:
        """Make an empty plan for the largest step. Call its `update` before each step.

        Args:
            spec: of the layers that use the plan.
            max_tokens: largest T of an update.
            max_seqs: largest S of an update.
            max_pieces: largest P of an update, pieces per sequence.

        Raises:
            Unsupported: for a dtype that the backend does not serve.
            BadValue: for a size that does not fit an int32.
        """
        if spec.dtype not in self.limits.kv_dtypes:
            served = ", ".join(sorted(map(str, self.limits.kv_dtypes)))
            raise Unsupported(f"backend {self.name!r} does not serve dtype {spec.dtype}; it serves {served}")
        self._check_device(spec.device)
        return self.recurrent_plan_type(spec, max_tokens, max_seqs, max_pieces)

    def _check_device(self, device: str) -> None:
        if self.device_type not in (None, torch.device(device).type):
            raise Unsupported(f"backend {self.name!r} does not serve device {device!r}; it serves {self.device_type!r}")

    def recurrent_plan(
        self,
        spec: RecurrentSpec,  # of the layers that use the plan
        query_starts: Tensor,  # int32 [S+1], host: sequence s has the query rows query_starts[s]:[s+1]
        context_lens: Tensor,  # int32 [S], host: tokens of each sequence, including this step's
        state_tables: Tensor,  # int32 [S, P], host: record of the state before each piece, -1: none
        row_tables: Tensor,  # int32 [S, P], host: record of the rows of each piece, -1: none
    ) -> RecurrentPlan:
        """Make a plan of exactly the size of one step, and update it with that step. See `RecurrentPlan.update`.

        Raises:
            Unsupported: for a dtype that the backend does not serve.
            BadShape, BadDtype, BadValue: naming the argument, the sequence and the value.
        """
        plan = self.make_recurrent_plan(spec, *step_sizes(query_starts, state_tables))
        plan.update(query_starts, context_lens, state_tables, row_tables)
        return plan

    # ----------------------------------------------------------------------------------------------- operators

    def convolve(
        self,
        x: Tensor,  # [T, W]
        weight: Tensor,  # fp32 [W, K]
        bias: Tensor | None,  # fp32 [W]
        activation: Literal["silu"] | None,  # applied to the result
        cache: RecurrentCache,  # the layer's records, written
        plan: RecurrentPlan,  # updated for this step
    ) -> Tensor:
        """Compute the causal convolution of each channel over its last K inputs, including those of earlier steps.

        Returns:
            activation(bias + Σ_i weight[:, i] · x[p − K + 1 + i]) for each position p, summed in the order of the
            taps: [T, W].

        Raises:
            BadValue: also for a spec with width 0.
        """
        with _plan(plan).lock:
            spec = _checked(cache, plan)
            if spec.width == 0:
                raise BadValue("the plan's spec has width 0: its layers have no convolution")
            _check_rows(plan, x=(x, spec.width))
            _check_weights(spec, (spec.width, spec.taps), weight=weight)
            _check_weights(spec, (spec.width,), bias=bias)
            if activation not in ("silu", None):
                raise BadValue(f"activation is {activation!r}; it must be 'silu' or None")
            return self._convolve(x, Convolution(weight, bias, activation), cache, plan)

    @abstractmethod
    def _convolve(
        self,
        x: Tensor,  # [T, W]
        convolution: Convolution,
        cache: RecurrentCache,
        plan: Any,  # RecurrentPlan, of recurrent_plan_type; locked
    ) -> Tensor: ...

    def gated_delta(
        self,
        qkv: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv]: queries, keys, values
        gates: Tensor,  # [T, 2 * Hv]: b, then a
        decay_rate: Tensor,  # fp32 [Hv], at most 0: -exp(A_log)
        dt_bias: Tensor,  # fp32 [Hv]
        cache: RecurrentCache,  # the layer's records, written
        plan: RecurrentPlan,  # updated for this step
        beta_scale: float = 1.0,
    ) -> Tensor:
        """Compute the gated delta rule (Yang et al. 2024). `quire.ops.recurrent` has the formulas.

        g = decay_rate · softplus(a + dt_bias) and beta = beta_scale · sigmoid(b). Queries and keys are divided by
        sqrt(Σx² + 1e-6), queries also by sqrt(Dk). Key head h belongs to the heads h·Hv/Hk .. (h + 1)·Hv/Hk - 1.

        Returns:
            o, [T, Hv * Dv].

        Raises:
            BadValue: also for a spec without a state.
        """
        with _plan(plan).lock:
            spec = _with_state(_checked(cache, plan))
            _check_rows(plan, qkv=(qkv, 2 * spec.key_width + spec.value_width), gates=(gates, 2 * spec.num_heads))
            _check_weights(spec, (spec.num_heads,), decay_rate=decay_rate, dt_bias=dt_bias)
            check_number(BadValue, "beta_scale", beta_scale, 0.0)
            recurrence = Recurrence(decay_rate, dt_bias, beta_scale=beta_scale)
            return self._recur(qkv, gates, recurrence, cache, plan)

    def state_space(
        self,
        xbc: Tensor,  # [T, Hv * Dv + 2 * Hk * Dk]: values x, keys B, queries C
        dt: Tensor,  # [T, Hv]
        decay_rate: Tensor,  # fp32 [Hv], at most 0: -exp(A_log)
        skip: Tensor,  # fp32 [Hv]: D
        dt_bias: Tensor,  # fp32 [Hv]
        dt_limits: tuple[float, float],  # 0 <= low <= high; high may be infinite
        cache: RecurrentCache,  # the layer's records, written
        plan: RecurrentPlan,  # updated for this step
    ) -> Tensor:
        """Compute Mamba-2's recurrence (Dao & Gu 2024). `quire.ops.recurrent` has the formulas.

        dt becomes softplus(dt + dt_bias), clamped to dt_limits, and g = decay_rate · dt.

        Returns:
            o + skip · x, [T, Hv * Dv].

        Raises:
            BadValue: also for a spec without a state.
        """
        with _plan(plan).lock:
            spec = _with_state(_checked(cache, plan))
            _check_rows(plan, xbc=(xbc, 2 * spec.key_width + spec.value_width), dt=(dt, spec.num_heads))
            _check_weights(spec, (spec.num_heads,), decay_rate=decay_rate, skip=skip, dt_bias=dt_bias)
            check_dt_limits(dt_limits)
            return self._recur(xbc, dt, Recurrence(decay_rate, dt_bias, skip, dt_limits), cache, plan)

    @abstractmethod
    def _recur(
        self,
        x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv]: qkv or xbc
        gates: Tensor,  # [T, 2 * Hv], or dt: [T, Hv]
        recurrence: Recurrence,  # without a skip: the gated delta rule
        cache: RecurrentCache,
        plan: Any,  # RecurrentPlan, of recurrent_plan_type; locked
    ) -> Tensor: ...

    def scan(
        self,
        x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv]: queries, keys, values of "delta"; else [T, Hv * Dv]: values
        gates: Tensor,  # [T, Hv * Dk] of "delta"; else [T, Hv * Dv]
        side: Tensor,  # [T, Hv]: beta of "delta"; [T, 2 * Hk * Dk]: queries, keys of "selective"; [T, Hv * Dv] of "lru"
        scan: Scan,  # the layer's weights
        cache: RecurrentCache,  # the layer's records, written
        plan: RecurrentPlan,  # updated for this step
    ) -> Tensor:
        """Compute a recurrence whose decay differs between the elements of a state. The package has the formulas.

        "delta": KDA (Kimi Team 2025). g = rate · softplus(gates + bias), or floor · sigmoid(-rate · (gates + bias))
        with a negative floor; beta = beta_scale · sigmoid(side). Queries and keys are normalised as in `gated_delta`.

        "selective": Mamba-1 (Gu & Dao 2023). dt = softplus(gates + bias).

        "lru": RG-LRU (De et al. 2024). dt = sigmoid(gates + bias[0]), i = sigmoid(side + bias[1]).

        Returns:
            o, plus skip · values if there is a skip: [T, Hv * Dv].

        Raises:
            BadValue: also for a spec without a state, or whose dim_decay is not Dk for "delta", else Dv.
        """
        with _plan(plan).lock:
            spec = _with_state(_checked(cache, plan))
            rule, rate, bias, skip, beta_scale, floor = scan
            if rule not in ("delta", "selective", "lru"):
                raise BadValue(f"the rule is {rule!r}; it must be 'delta', 'selective' or 'lru'")
            delta, values = rule == "delta", spec.value_width
            if spec.dim_decay != (spec.dim_k if delta else spec.dim_v):
                wanted = f"dim_k, {spec.dim_k}" if delta else f"dim_v, {spec.dim_v}"
                raise BadValue(f"the plan's spec has dim_decay {spec.dim_decay}; for {rule!r} it must be {wanted}")
            if rule == "lru" and (spec.dim_k, spec.num_k_heads) != (1, 1):
                found = f"dim_k {spec.dim_k} and num_k_heads {spec.num_k_heads}"
                raise BadValue(f"the plan's spec has {found}; for 'lru' both must be 1")
            widths = Scan.widths(rule, spec)
            _check_rows(plan, x=(x, widths[0]), gates=(gates, widths[1]), side=(side, widths[2]))
            heads, dim_k, dim_v = spec.num_heads, spec.dim_k, spec.dim_v
            _check_weights(spec, (heads,) if delta else (heads, dim_k, dim_v), rate=rate)
            _check_weights(spec, {"delta": (heads * dim_k,), "lru": (2, values)}.get(rule, (values,)), bias=bias)
            _check_weights(spec, (values,), skip=skip)
            check_number(BadValue, "beta_scale", beta_scale, 0.0)
            if not -math.inf < floor <= 0.0:
                raise BadValue(f"floor is {floor!r}; it must be a negative number, or 0 for none")
            return self._scan(x, gates, side, scan, cache, plan)

    @abstractmethod
    def _scan(
        self,
        x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv] or [T, Hv * Dv]
        gates: Tensor,  # [T, Hv * Dk] or [T, Hv * Dv]
        side: Tensor,  # [T, Hv], [T, 2 * Hk * Dk] or [T, Hv * Dv]
        weights: Scan,
        cache: RecurrentCache,
        plan: Any,  # RecurrentPlan, of recurrent_plan_type; locked
    ) -> Tensor: ...

    def gated_norm(
        self,
        x: Tensor,  # [T, H]
        gate: Tensor,  # [T, H]
        weight: Tensor,  # [H]
        eps: float,  # added to the mean of squares
        heads: int,  # number of equal parts of a row; divides H
        first: Literal["norm", "gate"],  # the operation that is applied first
    ) -> Tensor:
        """Compute RMSNorm of each of `heads` equal parts of x, multiplied by silu(gate).

        Returns:
            rms_norm(x) * silu(gate) for "norm", as in Qwen3.5, or rms_norm(x * silu(gate)) for "gate", as in Mamba-2:
            [T, H].
        """
        check_gated_norm(x, gate, weight, eps, heads, first)
        return self._gated_norm(x, gate, GatedNorm(weight, eps, heads, first))

    @abstractmethod
    def _gated_norm(self, x: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor: ...

    def gate(
        self,
        x: Tensor,  # [T, H], changed in place; no memory shared with gate
        gate: Tensor,  # [T, H], or [T, 1]: one for all of a row
    ) -> None:
        """Multiply x by sigmoid(gate) in place."""
        check_gate(x, gate)
        self._gate(x, gate)

    @abstractmethod
    def _gate(self, x: Tensor, gate: Tensor) -> None: ...


def check_dt_limits(limits: tuple[float, float]) -> None:
    """Raise BadValue unless 0 <= low <= high and low is finite."""
    if len(limits) != 2:
        raise BadValue(f"dt_limits is {limits!r}; it must be a pair")
    low, high = limits
    check_number(BadValue, "dt_limits[0]", low, 0.0)
    if high != math.inf:
        check_number(BadValue, "dt_limits[1]", high, low)


def _plan(plan: RecurrentPlan) -> RecurrentPlan:
    if isinstance(plan, RecurrentPlan):
        return plan
    found = type(plan).__name__
    raise BadValue(f"plan is a {found}; make it with recurrent_plan or make_recurrent_plan")


def _checked(cache: RecurrentCache, plan: RecurrentPlan) -> RecurrentSpec:
    """Check the cache against the plan's spec, and return the spec."""
    check_cache(cache, plan.spec)
    return plan.spec


def _with_state(spec: RecurrentSpec) -> RecurrentSpec:
    if spec.num_heads == 0:
        raise BadValue("the plan's spec has num_heads 0: its layers are convolutions alone")
    return spec


def _check_rows(plan: RecurrentPlan, **inputs: tuple[Tensor, int]) -> None:
    """Check inputs, given by name with their widths."""
    device = torch.device(plan.spec.device)
    for name, (x, width) in inputs.items():
        check_tensor(name, x, (plan.num_tokens, width), plan.spec.dtype, device)


def _check_weights(spec: RecurrentSpec, shape: tuple[int, ...], **weights: Tensor | None) -> None:
    for name, weight in weights.items():
        if weight is not None:
            check_tensor(name, weight, shape, spec.state_dtype, torch.device(spec.device))
