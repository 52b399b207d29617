"""Checks of the small operators' arguments, for every backend."""

from __future__ import annotations

import torch

from quire.errors import BadDtype, BadShape, BadValue, check_integer, check_number
from quire.ops.activation import Activation
from quire.ops.checks.tensors import INT32_MAX, check_beside, check_float, check_integers, check_tensor, check_written
from quire.ops.choice import Choice


def check_residual(
    x: torch.Tensor,  # [T, H]
    residual: torch.Tensor,  # [T, H], written
    weight: torch.Tensor,  # [H]
) -> None:
    """Check the tensors that are added before a norm."""
    if x.dim() != 2:
        raise BadShape(f"x has shape {tuple(x.shape)}; expected [T, H]")
    check_tensor("residual", residual, tuple(x.shape), x.dtype, x.device)
    check_written({"residual": residual}, {"x": x, "weight": weight})


def check_norm(x: torch.Tensor, eps: float, **weights: torch.Tensor | None) -> None:
    """Check the arguments of a normalisation over the last dimension of x. Weights must have its size."""
    _check_rows("x", x)
    for name, weight in weights.items():
        if weight is not None and weight.shape != x.shape[-1:]:
            raise BadShape(
                f"{name} has shape {tuple(weight.shape)}; x of shape {tuple(x.shape)} needs {tuple(x.shape[-1:])}"
            )
    check_beside(x, **weights)
    check_number(BadValue, "eps", eps, 0.0)


def check_gated_norm(
    x: torch.Tensor,  # [T, H]
    gate: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    eps: float,
    heads: int,
    first: str,
) -> None:
    """Check the arguments of gated_norm."""
    if x.dim() != 2:
        raise BadShape(f"x has shape {tuple(x.shape)}; expected [T, H]")
    check_norm(x, eps, weight=weight)
    for name, rows in (("x", x), ("gate", gate)):
        check_tensor(name, rows, tuple(x.shape), x.dtype, x.device)
    check_integer(BadValue, "heads", heads, 1)
    if x.shape[1] % heads:
        raise BadShape(f"x has shape {tuple(x.shape)}; {heads} heads of one size do not make {x.shape[1]} numbers")
    if first not in ("norm", "gate"):
        raise BadValue(f"first is {first!r}; it must be 'norm' or 'gate'")


def check_gate(
    x: torch.Tensor,  # [T, H], written
    gate: torch.Tensor,  # [T, H] or [T, 1]
) -> None:
    """Check the arguments of gate."""
    if x.dim() != 2:
        raise BadShape(f"x has shape {tuple(x.shape)}; expected [T, H]")
    check_float("x", x)
    alone = gate.dim() == 2 and gate.shape[1] == 1
    for name, rows, width in (("x", x, x.shape[1]), ("gate", gate, 1 if alone else x.shape[1])):
        check_tensor(name, rows, (len(x), width), x.dtype, x.device)
    check_written({"x": x}, {"gate": gate})


def check_rope(
    q: torch.Tensor,  # [T, Hq, D], written
    k: torch.Tensor,  # [T, Hkv, D], written
    positions: torch.Tensor,  # int32 or int64 [T]
    cos: torch.Tensor,  # fp32 [P, D_rot / 2]
    sin: torch.Tensor,  # fp32 [P, D_rot / 2]
) -> None:
    """Check rope's arguments, except for the values of the positions: `check_positions` checks these."""
    if q.dim() != 3 or k.dim() != 3 or q.shape[::2] != k.shape[::2]:
        raise BadShape(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; expected [T, Hq, D] and [T, Hkv, D]")
    check_float("q", q)
    if k.dtype != q.dtype:
        raise BadDtype(f"k has dtype {k.dtype} and q {q.dtype}; they must be the same")
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x, tuple(x.shape), q.dtype, q.device)
    if tuple(positions.shape) != (len(q),):
        raise BadShape(f"positions has shape {tuple(positions.shape)}; expected ({len(q)},)")
    check_integers("positions", positions, 1)
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[2]:
        raise BadShape(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; both must be [P, D_rot / 2], with D_rot at "
            f"most {q.shape[2]}"
        )
    check_float("cos", cos)
    check_float("sin", sin)
    check_beside(q, positions=None if positions.is_cpu else positions, cos=cos, sin=sin)
    check_written({"q": q, "k": k}, {"positions": positions, "cos": cos, "sin": sin})


def check_positions(
    positions: torch.Tensor,  # int32 or int64 [T], host
    length: int,  # P
) -> None:
    """Raise BadValue for a position outside 0..length - 1."""
    beyond = torch.nonzero((positions < 0) | (positions >= length)).flatten().tolist()
    if beyond:
        raise bad_position(positions, beyond[0], length)


def bad_position(positions: torch.Tensor, t: int, length: int) -> BadValue:
    """Return the error for positions[t] being outside 0..length - 1."""
    return BadValue(f"positions[{t}] is {int(positions[t])}; cos and sin hold the positions 0..{length - 1}")


def check_swiglu(
    gate_up: torch.Tensor,  # [T, 2 * I]
) -> None:
    """Check the argument of swiglu."""
    _check_rows("gate_up", gate_up)
    if gate_up.shape[-1] % 2:
        raise BadShape(f"gate_up has shape {tuple(gate_up.shape)}; its last dimension, gates and ups, must be even")


def check_gelu(
    x: torch.Tensor,  # [..., I]
    approximate: str,
) -> None:
    """Check the arguments of gelu."""
    _check_rows("x", x)
    if approximate not in ("none", "tanh"):
        raise BadValue(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")


def check_activation(
    x: torch.Tensor,  # [T, 2 I] or [T, I]
    activation: Activation,
) -> None:
    """Check the arguments of activate."""
    _check_rows("x", x)
    if x.dim() != 2 or (activation.gated and x.shape[1] % 2):
        raise BadShape(f"x has shape {tuple(x.shape)}; expected [T, {'2 I' if activation.gated else 'I'}]")


def _check_rows(name: str, x: torch.Tensor) -> None:
    if x.dim() == 0:
        raise BadShape(f"{name} has shape (); it must have one dimension at least")
    check_float(name, x)


def check_logits(
    logits: torch.Tensor,  # fp32 [R, V]
    k: int = 0,
) -> None:
    """Check the arguments of the sampler's operators."""
    if logits.dim() != 2 or logits.shape[1] > INT32_MAX:
        raise BadShape(f"logits has shape {tuple(logits.shape)}; expected [R, V], with V at most {INT32_MAX}")
    check_tensor("logits", logits, tuple(logits.shape), torch.float32, logits.device)
    check_integer(BadValue, "k", k, 0, logits.shape[1])


def check_choice(
    logits: torch.Tensor,  # fp32 [T, E]
    choice: Choice,
) -> None:
    """Check the arguments of choose."""
    check_logits(logits)
    choice.check(logits.shape[1])
    check_beside(logits, **{"choice.bias": choice.bias, "choice.scales": choice.scales})
