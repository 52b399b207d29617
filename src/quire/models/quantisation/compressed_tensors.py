"""Checkpoints of the library compressed-tensors: words of packed integers, int8 with activations in int8, or e4m3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch

from quire.errors import ModelError
from quire.models.hf_config import shown
from quire.models.patterns import Patterns
from quire.models.quantisation.fp8 import Fp8Form, block_size, fp8_description
from quire.models.quantisation.module import WHOLE, Form, Module, bytes_read, described, nibbles, unpacked
from quire.models.quantisation.reader import PLACE, Modules, SchemeReader, unserved
from quire.ops.weights.quantised import ACTIVATION_GROUP, QuantisedWeight

FORMATS = ("pack-quantized", "int-quantized")
FLOATS = ("float-quantized", "naive-quantized")  # e4m3, with and without quantised activations
LINEAR = "Linear"  # a target: all linears
TOP = "global_compression_ratio quantization_status version".split()
ARGUMENTS = "block_structure observer observer_kwargs scale_dtype zp_dtype".split()


@dataclass(frozen=True)
class _Form:
    """The common part of both forms."""

    bits: int
    group_size: int
    symmetric: bool
    whole_rows: bool  # activations have one scale per row
    rounds_rows: ClassVar[bool] = True
    values: ClassVar[str]  # the kind of tensor that has the integers

    @property
    def needs(self) -> tuple[str, ...]:
        """The kinds of tensors that are required."""
        return (self.values, "weight_scale", *(() if self.symmetric else ("weight_zero_point",)))

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Return the bytes that such a weight takes in memory."""
        return bytes_read(out_size, in_size, self.bits, self.group_size, not self.symmetric)

    def _rounding(self, in_size: int) -> int:
        """Return the number of inputs of a row of x that share a scale."""
        return in_size if self.whole_rows else ACTIVATION_GROUP


@dataclass(frozen=True)
class PackedForm(_Form):
    """A weight (q - z) s, packed into words of consecutive inputs."""

    values = "weight_packed"
    takes = ("weight_shape", "weight_g_idx")

    def read(self, module: Module, dtype: torch.dtype) -> QuantisedWeight:
        """Read the weight; dtype: of x. Raises ModelError, with the tensor's name, if it violates the format."""
        rows, columns, factor = module.out_size, module.in_size, 32 // self.bits
        groups = module.groups(self.group_size)
        if module.has("weight_shape"):
            shape = module.tensor("weight_shape", (2,), torch.int32, torch.int64).tolist()
            if shape != [rows, columns]:
                raise module.error("weight_shape", f"is {shape}; config.json asks for {[rows, columns]}")
        words = module.tensor("weight_packed", (rows, -(-columns // factor)), torch.int32)
        scales = module.scales("weight_scale", (rows, groups))
        zeros = group_of = None
        if not self.symmetric:
            zero_words = module.tensor("weight_zero_point", (-(-rows // factor), groups), torch.int32)
            zeros = unpacked(zero_words, self.bits, 0)[:rows]
        if module.has("weight_g_idx"):
            group_of = module.tensor("weight_g_idx", (columns,), torch.int32, torch.int64)
            group_of = None if (group_of == -1).all() else group_of  # all -1 means that it was never set
        whole = words.contiguous().view(torch.uint8)
        values = (whole if self.bits == 8 else nibbles(whole))[:, :columns]
        return module.weight(
            values, scales, zeros, self.bits, self.group_size, dtype, group_of, "weight_g_idx", self._rounding(columns)
        )


@dataclass(frozen=True)
class BytesForm(_Form):
    """A weight (q - z) s, with one byte per integer."""

    values = "weight"
    takes = ()

    def read(self, module: Module, dtype: torch.dtype) -> QuantisedWeight:
        """Read the weight; dtype: of x. Raises ModelError, with the tensor's name, if it violates the format."""
        groups = module.groups(self.group_size)
        scales = module.scales("weight_scale", (module.out_size, groups))
        zeros = None
        if not self.symmetric:
            zeros = self._unsigned(module, "weight_zero_point", (module.out_size, groups))
        values = self._unsigned(module, "weight", (module.out_size, module.in_size))
        group = self._rounding(module.in_size)
        return module.weight(values, scales, zeros, self.bits, self.group_size, dtype, activation_group=group)

    def _unsigned(self, module: Module, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        signed, half = module.tensor(kind, shape, torch.int8), 2 ** (self.bits - 1)
        low, high = (int(x) for x in signed.aminmax())
        if low < -half or high >= half:
            wrong = low if low < -half else high
            raise module.error(kind, f"holds {wrong}; integers of {self.bits} bits lie in {-half}..{half - 1}")
        return signed.view(torch.uint8).add(half)  # the addition relies on wrapping around


@dataclass(frozen=True)
class CompressedTensors:
    """A form for each group of linears. Names take precedence over classes."""

    forms: tuple[tuple[Modules, PackedForm | BytesForm | Fp8Form], ...]  # targets, form
    ignored: Modules

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> CompressedTensors:
        """Read a quantization_config. Raises ModelError if it is not supported."""
        config = SchemeReader(raw, "compressed-tensors", TOP)
        usual = config.get("format")
        for key in ("kv_cache_scheme", "transform_config"):
            if config.get(key):
                raise unserved(f"compressed-tensors with a {key}")
        sparsity = config.mapping("sparsity_config")
        if sparsity.get("format", "dense") != "dense":
            raise unserved(f"compressed-tensors with sparsity of the format {shown(sparsity['format'])}")
        groups = config.mapping("config_groups")
        if not groups:
            raise ModelError(
                "config.json: quantization_config has no config_groups, which list the quantised modules and formats"
            )
        forms, patterns = [], Patterns(PLACE)
        for name, group in groups.items():
            if not isinstance(group, dict):
                raise ModelError(f"{PLACE}: config_groups' {name} is {shown(group)}; it must be an object")
            own = SchemeReader(group, "compressed-tensors")
            targets, stored = own.modules("targets", patterns), own.get("format", usual)
            forms.append((targets, _form(own, stored)))
            own.finish()
        ignored = config.modules("ignore", patterns)
        config.finish()
        return cls(tuple(forms), ignored)

    @property
    def description(self) -> str:
        """The format of the first group of linears."""
        form = self.forms[0][1]
        if isinstance(form, Fp8Form):
            return fp8_description("compressed-tensors", form)
        extras = {
            "zeros": not form.symmetric,
            "activations int8": form.whole_rows,
            "some otherwise": len(self.forms) > 1,
        }
        return described("compressed-tensors", form.bits, form.group_size, extras)

    def form(self, name: str) -> Form | None:
        """Return the form of a linear if it is quantised."""
        named = (form for targets, form in self.forms if targets.have(name))
        return next(chain(named, (form for targets, form in self.forms if LINEAR in targets.names)), None)

    def excludes(self, name: str) -> bool:
        """Return whether a linear is excluded from quantisation."""
        return self.ignored.have(name)


def _form(group: SchemeReader, stored: object) -> PackedForm | BytesForm | Fp8Form:
    """Return the form of a group of linears."""
    if stored in FLOATS and group.mapping("weights").get("type") == "float":
        return _fp8_form(group)
    if stored not in FORMATS:
        raise unserved(f"compressed-tensors in the format {shown(stored)}")
    weights = SchemeReader(group.mapping("weights"), "compressed-tensors", ARGUMENTS)
    if weights.get("type", "int") != "int" or weights.get("num_bits") not in (4, 8):
        found = [shown(weights.get(key)) for key in ("num_bits", "type")]
        raise unserved(f"compressed-tensors with weights of {found[0]} bits of type {found[1]}")
    weights.only("dynamic", False)
    actorder = weights.get("actorder")
    if actorder not in (None, True, False, "group", "weight", "static", "dynamic"):
        raise unserved(f"compressed-tensors with actorder {shown(actorder)}")
    weights.only("strategy", "group", "channel")
    grouped = weights.get("strategy") == "group"
    group_size = weights.group_size()
    whole_rows = _rounds_rows(group)
    form = PackedForm if stored == FORMATS[0] else BytesForm
    made = form(
        weights.integer("num_bits"), group_size if grouped else WHOLE, weights.flag("symmetric", True), whole_rows
    )
    weights.finish()
    if whole_rows and (grouped or not made.symmetric):
        raise unserved("compressed-tensors with int8 activations and weights that have zeros or groups")
    return made


def _fp8_form(group: SchemeReader) -> Fp8Form:
    """Return the form of a group of e4m3 weights. Settings of activations are ignored, see fp8.py."""
    weights = SchemeReader(group.mapping("weights"), "compressed-tensors", [*ARGUMENTS, "actorder"])
    weights.only("num_bits", 8)
    weights.only("type", "float")
    weights.only("dynamic", False)
    weights.only("symmetric", True)
    weights.only("strategy", "tensor", "channel", "block", "group")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    weights.finish()
    if group.get("output_activations"):
        raise unserved("compressed-tensors with quantised output_activations")
    group.get("input_activations")
    if strategy == "group":
        group_block = SchemeReader({"group_size": [1, size]}, "compressed-tensors")
        return Fp8Form(block_size(group_block, "group_size"))
    block = SchemeReader({"block_structure": group.mapping("weights").get("block_structure")}, "compressed-tensors")
    return Fp8Form(block_size(block, "block_structure") if strategy == "block" else None)


def _rounds_rows(group: SchemeReader) -> bool:
    """Return whether the config asks for activations in int8 with one scale per row. Otherwise it asks for none."""
    if group.get("output_activations"):
        raise unserved("compressed-tensors with quantised output_activations")
    if not group.get("input_activations"):
        return False
    config = SchemeReader(
        group.mapping("input_activations"), "compressed-tensors", [*ARGUMENTS, "actorder", "group_size"]
    )
    asked = {key: config.get(key) for key in ("num_bits", "type", "strategy", "dynamic", "symmetric")}
    if asked != {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}:
        raise unserved(f"compressed-tensors with input_activations of {shown(asked)}")
    config.finish()
    return True
