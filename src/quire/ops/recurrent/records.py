"""The sizes of a state kind, and the records of a layer. The formulas are in the package's docstring."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import BadDtype, BadStride, BadValue, check_integer
from quire.ops.checks.tensors import FLOATS, INT32_MAX, check_tensor
from quire.ops.memory import in_huge_pages

PIECE = 32  # C
MAX_DIM = 1024  # of keys and values


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """The properties that are constant over all steps for the layers of one state kind. Validated on construction.

    With num_heads 0 the layers are convolutions only.

    Raises:
        BadValue, BadDtype: naming the field that no backend could serve.
    """

    num_heads: int  # Hv, a multiple of num_k_heads; 0: no state
    num_k_heads: int  # Hk
    dim_k: int  # Dk, 0..1024
    dim_v: int  # Dv, 0..1024
    width: int  # W; 0: no convolution
    taps: int  # K, 1..C + 1
    dim_decay: int = 0  # decays of a head: 0 (one for all of its state), Dk or Dv
    num_states: int  # Ns
    num_rows: int  # Nr
    dtype: torch.dtype  # of inputs and results; the records are fp32, except for the convolution's inputs
    device: str = "cpu"  # a device of torch

    def __post_init__(self) -> None:
        _check_spec(self)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of sums and states: fp32, or float64 for float64."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def key_width(self) -> int:
        """Hk · Dk, the number of elements of a token's keys."""
        return self.num_k_heads * self.dim_k

    @property
    def value_width(self) -> int:
        """Hv · Dv, the number of elements of a token's values."""
        return self.num_heads * self.dim_v

    @property
    def state_record(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of a state record."""
        return {
            "state": ((self.num_heads, self.dim_k, self.dim_v), self.state_dtype),
            "tail": ((self.taps - 1, self.width), self.dtype),
        }

    @property
    def row_record(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of a row record."""
        return {
            "keys": ((self.num_k_heads, PIECE, self.dim_k), self.state_dtype),
            "updates": ((self.num_heads, PIECE, self.dim_v), self.state_dtype),
            "decays": ((self.num_heads, PIECE, *(self.dim_decay,) * (self.dim_decay > 0)), self.state_dtype),
            "inputs": ((PIECE, self.width), self.dtype),
        }

    @property
    def state_bytes(self) -> int:
        """Size of a state record in bytes."""
        return _bytes(self.state_record)

    @property
    def row_bytes(self) -> int:
        """Size of a row record in bytes."""
        return _bytes(self.row_record)


def _bytes(record: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in record.values())


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class RecurrentCache:
    """One layer's records. Each record of a tensor is contiguous; the stride between records is arbitrary.

    Records that no sequence owns may have any value, NaN included: they never affect a result.
    """

    # State records: the state and the last inputs before a piece.
    state: Tensor  # fp32 [Ns, Hv, Dk, Dv]
    tail: Tensor  # dtype [Ns, K - 1, W]: the inputs of the convolution
    # Row records: the rows of a piece.
    keys: Tensor  # fp32 [Nr, Hk, C, Dk], normalised if the layer normalises them
    updates: Tensor  # fp32 [Nr, Hv, C, Dv]: u
    decays: Tensor  # fp32 [Nr, Hv, C]: G; or [Nr, Hv, C, dim_decay]: of a scan, e^g or dt
    inputs: Tensor  # dtype [Nr, C, W]: of the convolution

    @classmethod
    def allocate(cls, spec: RecurrentSpec) -> RecurrentCache:
        """Allocate the records of a layer, uninitialised. On a CPU they are in huge pages if the system has them.

        Args:
            spec: of the layer.
        """
        parts = (spec.num_states, spec.state_record), (spec.num_rows, spec.row_record)
        sizes = {name: ((count, *shape), dtype) for count, record in parts for name, (shape, dtype) in record.items()}
        if torch.device(spec.device).type == "cpu":
            return cls(**{name: in_huge_pages(*size) for name, size in sizes.items()})
        return cls(**{name: torch.empty(size[0], dtype=size[1], device=spec.device) for name, size in sizes.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return dict(vars(self))


def check_cache(cache: RecurrentCache, spec: RecurrentSpec) -> None:
    """Check a layer's records against the spec. Raises BadShape, BadDtype, BadStride or BadValue."""
    device = torch.device(spec.device)
    for count, record in ((spec.num_states, spec.state_record), (spec.num_rows, spec.row_record)):
        for name, (shape, dtype) in record.items():
            tensor = getattr(cache, name)
            check_tensor(f"cache.{name}", tensor, (count, *shape), dtype, device)
            if tensor.numel() and not tensor[0].is_contiguous():
                raise BadStride(
                    f"cache.{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; each record must be "
                    f"contiguous"
                )


def _check_spec(spec: RecurrentSpec) -> None:
    """Raise BadValue or BadDtype for a field that no backend could serve."""
    for name, lower, upper in (
        ("num_heads", 0, INT32_MAX),
        ("num_k_heads", 0, INT32_MAX),
        ("dim_k", 0, MAX_DIM),
        ("dim_v", 0, MAX_DIM),
        ("width", 0, INT32_MAX),
        ("taps", 1, PIECE + 1),
        ("num_states", 0, INT32_MAX),
        ("num_rows", 0, INT32_MAX),
    ):
        check_integer(BadValue, f"spec.{name}", getattr(spec, name), lower, upper)
    heads = {"num_k_heads": spec.num_k_heads, "dim_k": spec.dim_k, "dim_v": spec.dim_v}
    for name, value in heads.items():
        if spec.num_heads > 0 and value == 0:
            raise BadValue(f"spec.{name} is 0 with num_heads={spec.num_heads}; a state needs keys and values")
        if spec.num_heads == 0 and value > 0:
            raise BadValue(f"spec.{name} is {value} with num_heads=0; without a state it must be 0")
    if spec.num_heads and spec.num_heads % spec.num_k_heads:
        raise BadValue(f"spec.num_heads is {spec.num_heads}, no multiple of spec.num_k_heads, {spec.num_k_heads}")
    if spec.dim_decay not in (0, spec.dim_k, spec.dim_v):
        wanted = f"0, dim_k ({spec.dim_k}) or dim_v ({spec.dim_v})"
        raise BadValue(f"spec.dim_decay is {spec.dim_decay!r}; it must be {wanted}")
    if spec.dtype not in FLOATS:
        raise BadDtype(f"spec.dtype is {spec.dtype!r}; it must be one of {', '.join(map(str, FLOATS))}")
    try:
        torch.device(spec.device)
    except (RuntimeError, TypeError):
        raise BadValue(f"spec.device is {spec.device!r}; it must name a device of torch, as 'cpu' does") from None
