"""A quantised linear's tensors in a checkpoint, and functions that all readers share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import ModelError, QuireError
from quire.ops.memory import mapped
from quire.ops.weights.gguf_blocks import BlockWeight
from quire.ops.weights.narrow import NarrowWeight
from quire.ops.weights.quantised import ACTIVATION_GROUP, GROUPS, QuantisedWeight, number_bytes

SCALES = (torch.float16, torch.bfloat16, torch.float32)
WHOLE = -1  # a group size: all inputs of an output share a scale


class Tensors(Protocol):
    """The named tensors of a checkpoint."""

    @property
    def path(self) -> Path:
        """The path of the checkpoint, for error messages."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor. A name such as "x[3]" reads only that entry of the tensor x."""


@dataclass(frozen=True)
class Module:
    """A linear in a checkpoint, by the prefix of its tensors' names. "x[3]" is entry 3 of each of its tensors."""

    tensors: Tensors
    name: str
    out_size: int
    in_size: int

    def has(self, kind: str) -> bool:
        """Return whether the linear has a tensor of that kind."""
        return tensor_name(self.name, kind).partition("[")[0] in self.tensors.names

    def shape(self, kind: str) -> torch.Size:
        """Return the shape of the linear's tensor of that kind."""
        return self._stored(kind).shape

    def tensor(self, kind: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """Read the linear's tensor of that kind. Raises ModelError for any other shape or dtype."""
        tensor = self._stored(kind)
        if tensor.shape != shape:
            raise self.error(kind, f"has shape {tuple(tensor.shape)}; its format and config.json ask for {shape}")
        if tensor.dtype not in dtypes:
            served = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(kind, f"is {str(tensor.dtype).removeprefix('torch.')}; its format has {served}")
        return tensor

    def _stored(self, kind: str) -> Tensor:
        return self.tensors[tensor_name(self.name, kind)]

    def scales(self, kind: str, shape: tuple[int, ...]) -> Tensor:
        """Read the linear's scales, converted to fp32 exactly. Raises ModelError if one is not finite."""
        scales = self.tensor(kind, shape, *SCALES).float()
        if not scales.isfinite().all():
            place = (~scales.isfinite()).nonzero()[0].tolist()
            raise self.error(kind, f"holds {float(scales[tuple(place)])} at {place}; all scales must be finite")
        return scales

    def groups(self, group_size: int) -> int:
        """Return the number of groups of inputs. Raises ModelError if the last group would be incomplete."""
        if group_size != WHOLE and self.in_size > group_size and self.in_size % group_size:
            raise ModelError(
                f"{self.name} has {self.in_size} inputs, which groups of {group_size} do not divide; its format has "
                "whole groups only"
            )
        return self.groups_begun(group_size)

    def groups_begun(self, group_size: int) -> int:
        """Return the number of groups of inputs. The last group may be incomplete."""
        return 1 if group_size == WHOLE else -(-self.in_size // group_size)

    def check_multiple(self, what: str, size: int, factor: int) -> None:
        """Raise ModelError unless a word holds numbers of one row or column only."""
        if size % factor:
            raise ModelError(f"{self.name} has {size} {what}; its format packs {factor} of them into a word")

    def weight(
        self,
        values: Tensor,  # uint8 [out, in], or a transposed view
        scales: Tensor,  # fp32 [out, groups]
        zeros: Tensor | None,  # uint8 [out, groups]
        bits: int,
        group_size: int,  # in the format's notation
        dtype: torch.dtype,  # of x
        group_of: Tensor | None = None,  # integers [in]: the group of each input; None: consecutive groups
        group_kind: str = "",  # the kind of tensor that group_of is
        activation_group: int = ACTIVATION_GROUP,
    ) -> QuantisedWeight:
        """Build the weight. Raises ModelError, with the module's name, if no kernel supports it."""
        order = None if group_of is None else self._order(group_kind, group_of, group_size, scales.shape[1])
        stored = mapped((self.out_size, self.in_size), torch.uint8)
        stored.copy_(values if order is None else values[:, order])
        if group_size == WHOLE or group_size >= self.in_size:
            group_size = self.in_size
        elif group_size > GROUPS[-1]:
            groups, repeats = -(-self.in_size // GROUPS[-1]), group_size // GROUPS[-1]
            scales = scales.repeat_interleave(repeats, 1)[:, :groups]
            zeros = None if zeros is None else zeros.repeat_interleave(repeats, 1)[:, :groups]
            group_size = GROUPS[-1]
        wide = None if zeros is None else zeros.float().contiguous()
        try:
            return QuantisedWeight(stored, scales.contiguous(), wide, bits, group_size, dtype, order, activation_group)
        except QuireError as error:
            raise ModelError(f"{self.name}: {error}") from error

    def _order(self, kind: str, group_of: Tensor, group_size: int, groups: int) -> Tensor | None:
        """Return the inputs sorted by group; None if they are sorted already, or all in one group."""
        if groups == 1 and not group_of.any():
            return None
        if (group_of < 0).any() or (group_of >= groups).any():
            place = int(((group_of < 0) | (group_of >= groups)).nonzero()[0, 0])
            raise self.error(kind, f"holds {int(group_of[place])} at [{place}]; its groups are 0..{groups - 1}")
        order = group_of.argsort(stable=True)
        expected = torch.arange(self.in_size) // group_size
        if not torch.equal(group_of[order].long(), expected):
            counts = torch.bincount(group_of, minlength=groups)
            group = int((counts != torch.bincount(expected, minlength=groups)).nonzero()[0, 0])
            raise self.error(
                kind, f"puts {int(counts[group])} inputs into group {group}; groups of {group_size} are served"
            )
        return None if torch.equal(order, torch.arange(self.in_size)) else order

    def error(self, kind: str, what: str) -> ModelError:
        """Return the error for an invalid tensor of the linear."""
        return ModelError(f"{tensor_name(self.name, kind)} {what}")


class Form(Protocol):
    """The form in which a format stores one linear."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The kinds of tensors that are required."""

    @property
    def rounds_rows(self) -> bool:
        """True if rows of x are rounded before they are multiplied with the weight."""

    @property
    def takes(self) -> tuple[str, ...]:
        """The kinds of tensors that are optional."""

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Return the bytes that such a weight takes in memory."""

    def read(self, module: Module, dtype: torch.dtype) -> QuantisedWeight | BlockWeight | NarrowWeight:
        """Read the weight; dtype: of x. Raises ModelError, with the tensor's name, if it violates the format."""


def tensor_name(module: str, kind: str) -> str:
    """Return the name of a linear's tensor. The weight of an entry "x[3]" is x[3], its weight_scale is x_scale[3]."""
    whole, bracket, entry = module.partition("[")
    if not bracket:
        return f"{module}.{kind}"
    return module if kind == "weight" else f"{whole}_{kind.removeprefix('weight_')}[{entry}"


class Scheme(Protocol):
    """The description of quantised linears in a checkpoint's config.json."""

    @property
    def description(self) -> str:
        """The format, such as "awq int4, groups of 128, zeros"."""

    def form(self, name: str) -> Form | None:
        """Return the form of a linear if it is quantised; None: the scheme has no form for it."""

    def excludes(self, name: str) -> bool:
        """Return whether the config excludes a linear from quantisation."""


def form_of(scheme: Scheme, name: str, names: Collection[str]) -> Form | None:
    """Return the form of a linear in a checkpoint with tensors of these names; None: it is not quantised.

    The tensors in the files decide, since the lists of excluded modules are patterns that tools interpret in various
    ways. The lists decide only if the files have neither form.
    """
    form = scheme.form(name)
    if form is None:
        return None
    own = [kind for kind in (*form.needs, *form.takes) if kind != "weight"]
    found = [kind for kind in ("weight", *own) if tensor_name(name, kind).partition("[")[0] in names]
    if any(kind != "weight" for kind in found):
        return form
    return None if found or scheme.excludes(name) else form


def bytes_read(out_size: int, in_size: int, bits: int, group_size: int, has_zeros: bool) -> int:
    """Return the bytes of a weight that `Module.weight` builds."""
    size = in_size if group_size == WHOLE or group_size >= in_size else min(group_size, GROUPS[-1])
    return number_bytes(out_size, in_size, bits, size, has_zeros)


def unpacked(
    words: Tensor,  # int32 [rows, columns]
    bits: int,
    dim: int,  # along which a word's numbers are consecutive
    order: tuple[int, ...] = (),  # the index, within its word, of the i-th number; (): i
) -> Tensor:
    """Unpack the unsigned numbers of words, from the lowest bits up: uint8, that dimension 32 / bits times as long."""
    factor = 32 // bits
    shape = [*words.shape]
    shape.insert(dim + 1, factor)
    numbers = torch.empty(shape, dtype=torch.uint8)
    for i, place in enumerate(order or range(factor)):
        numbers.select(dim + 1, place).copy_((words >> (bits * i)) & (2**bits - 1))
    return numbers.flatten(dim, dim + 1)


def nibbles(
    pairs: Tensor,  # uint8 [..., n]: two numbers each, the first in the lower four bits
) -> Tensor:
    """Unpack pairs of numbers: uint8 [..., 2 n]."""
    numbers = mapped((*pairs.shape, 2), torch.uint8)
    torch.bitwise_and(pairs, 15, out=numbers[..., 0])
    torch.bitwise_right_shift(pairs, 4, out=numbers[..., 1])
    return numbers.flatten(-2)


def described(name: str, bits: int, group_size: int, extras: Mapping[str, bool]) -> str:
    """Return a scheme's description. extras: optional properties, and whether it has them."""
    groups = "a scale an output" if group_size == WHOLE else f"groups of {group_size}"
    return ", ".join([f"{name} int{bits}", groups, *(extra for extra, has in extras.items() if has)])
