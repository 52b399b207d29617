"""The interface of a decoder's operators other than linears and attention, and of a sampler. `Backend` inherits it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from quire.ops import in_graph
from quire.ops.activation import Activation
from quire.ops.checks.small import (
    check_activation,
    check_choice,
    check_gelu,
    check_logits,
    check_norm,
    check_residual,
    check_rope,
    check_swiglu,
)
from quire.ops.choice import Choice, chosen_experts
from quire.ops.experts import ExpertLayer, weighted_experts


class DecoderOperators(ABC):
    """Norms, RoPE, activations, experts, and operators on logits."""

    @in_graph.operator()
    def rms_norm(
        self,
        x: Tensor,  # [..., H]
        weight: Tensor,  # [H]
        eps: float,  # added to the mean of squares
    ) -> Tensor:
        """Compute RMSNorm over the last dimension (Zhang & Sennrich 2019).

        Returns:
            x / sqrt(mean(x²) + eps) * weight, [..., H].
        """
        check_norm(x, eps, weight=weight)
        return self._rms_norm(x, weight, eps)

    @abstractmethod
    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @in_graph.operator(in_graph.add_rms_norm)
    def add_rms_norm(
        self,
        x: Tensor,  # [T, H]
        residual: Tensor,  # [T, H], becomes x + residual in place; no memory shared with x or weight
        weight: Tensor,  # [H]
        eps: float,  # added to the mean of squares
    ) -> Tensor:
        """Add x to the residual in place, and compute RMSNorm of the sum.

        Returns:
            rms_norm(residual, weight, eps), [T, H].
        """
        check_residual(x, residual, weight)
        check_norm(x, eps, weight=weight)
        return self._add_rms_norm(x, residual, weight, eps)

    @abstractmethod
    def _add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @in_graph.operator()
    def layer_norm(
        self,
        x: Tensor,  # [..., H]
        weight: Tensor,  # [H]
        bias: Tensor | None,  # [H]
        eps: float,  # added to the variance
    ) -> Tensor:
        """Compute LayerNorm over the last dimension (Ba et al. 2016).

        Returns:
            (x - mean) / sqrt(var + eps) * weight + bias, [..., H].
        """
        check_norm(x, eps, weight=weight, bias=bias)
        return self._layer_norm(x, weight, bias, eps)

    @abstractmethod
    def _layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    @in_graph.operator(in_graph.rope)
    def rope(
        self,
        q: Tensor,  # [T, Hq, D], rotated in place
        k: Tensor,  # [T, Hkv, D], rotated in place; no memory shared with q
        positions: Tensor,  # int32 or int64 [T], in 0..P - 1
        cos: Tensor,  # fp32 [P, D_rot / 2]
        sin: Tensor,  # fp32 [P, D_rot / 2]
    ) -> None:
        """Rotate q and k in place by the angles of their positions (RoPE, Su et al. 2021).

        The pairs are (i, i + D_rot/2) of the first D_rot dimensions, as in GPT-NeoX.

        Raises:
            BadValue: also for a position outside the tables. Positions on a GPU are not checked.
        """
        check_rope(q, k, positions, cos, sin)
        self._rope(q, k, positions, cos, sin)

    @abstractmethod
    def _rope(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    @in_graph.operator()
    def swiglu(
        self,
        gate_up: Tensor,  # [T, 2 * I]: gates, then ups
    ) -> Tensor:
        """Compute SwiGLU (Shazeer 2020).

        Returns:
            silu(gate) * up, [T, I].
        """
        check_swiglu(gate_up)
        return self._swiglu(gate_up)

    @abstractmethod
    def _swiglu(self, gate_up: Tensor) -> Tensor: ...

    @in_graph.operator()
    def gelu(
        self,
        x: Tensor,  # [..., I]
        approximate: Literal["none", "tanh"],  # the exact form with erf, or the one with tanh
    ) -> Tensor:
        """Compute GELU (Hendrycks & Gimpel 2016).

        Returns:
            gelu(x), [..., I].
        """
        check_gelu(x, approximate)
        return self._gelu(x, approximate)

    @abstractmethod
    def _gelu(self, x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor: ...

    def activate(
        self,
        x: Tensor,  # [T, 2 I] with a gate, else [T, I]
        activation: Activation,  # the function and its parameters
    ) -> Tensor:
        """Compute the activation between the linears of an MLP, in fp32.

        Returns:
            The activation in the dtype of x, [T, I].
        """
        check_activation(x, activation)
        return self._activate(x, activation)

    @abstractmethod
    def _activate(self, x: Tensor, activation: Activation) -> Tensor: ...

    def choose(
        self,
        logits: Tensor,  # fp32 [T, E], no NaN
        choice: Choice,  # the rule of the router
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row from its router's logits.

        Returns:
            The experts, int64 [T, k], most preferred first and ties by the lower id, and their shares, fp32 [T, k].
        """
        check_choice(logits, choice)
        return self._choose(logits, choice)

    def _choose(self, logits: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        return chosen_experts(logits, choice, self.top_k_softmax, self.top_k)

    def experts(
        self,
        x: Tensor,  # [T, H]
        layer: ExpertLayer,  # the router and its experts
        seen: Tensor | None = None,  # [T, H], the router's input; None: x
    ) -> Tensor:
        """Compute a mixture of experts: each row's experts, weighted by the router (Shazeer et al. 2017).

        Rows are gathered by expert, so that a weight is read once for all rows of its expert. Their number has to be
        known on the host, so this synchronises with a GPU. The sum is computed in fp32, the preferred expert first.

        Returns:
            The weighted sum, [T, H].
        """
        return weighted_experts(x, layer, self.choose, self.activate, seen)

    # -------------------------------------------------------------------------- for a sampler, and for a router

    @in_graph.operator()
    def logsumexp(
        self,
        logits: Tensor,  # fp32 [R, V]
    ) -> Tensor:
        """Compute log(sum(exp(logits))) of each row.

        Returns:
            fp32 [R].
        """
        check_logits(logits)
        return self._logsumexp(logits)

    @abstractmethod
    def _logsumexp(self, logits: Tensor) -> Tensor: ...

    @in_graph.operator()
    def top_k(
        self,
        logits: Tensor,  # fp32 [R, V], no NaN
        k: int,  # in 0..V
    ) -> Tensor:
        """Find the k largest logits of each row.

        Returns:
            Their ids, int64 [R, k], largest first and ties by the lower id.
        """
        check_logits(logits, k)
        return self._top_k(logits, k)

    @abstractmethod
    def _top_k(self, logits: Tensor, k: int) -> Tensor: ...

    @in_graph.operator()
    def top_k_softmax(
        self,
        logits: Tensor,  # fp32 [R, V], no NaN, the largest of a row finite
        k: int,  # in 0..V
    ) -> tuple[Tensor, Tensor]:
        """Find the k largest logits of each row and their probabilities, as a router chooses experts.

        Returns:
            The ids of `top_k`, int64 [R, k], and each one's value of the row's softmax, fp32 [R, k].
        """
        check_logits(logits, k)
        return self._top_k_softmax(logits, k)

    @abstractmethod
    def _top_k_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]: ...
