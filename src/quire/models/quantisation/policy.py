"""The quantisation policy: weights that are quantised in the checkpoint, and weights that are rounded at load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError, ModelError, QuireError
from quire.models.hf_config import SCHEMES, shown
from quire.models.quantisation.awq import Awq
from quire.models.quantisation.compressed_tensors import CompressedTensors
from quire.models.quantisation.fp8 import Fp8
from quire.models.quantisation.gguf import Gguf
from quire.models.quantisation.gptq import Gptq
from quire.models.quantisation.module import WHOLE, Scheme
from quire.models.quantisation.mxfp4 import Mxfp4
from quire.models.quantisation.reader import unserved
from quire.ops.memory import mapped
from quire.ops.weights.gguf_blocks import BlockWeight
from quire.ops.weights.linear import LinearWeight
from quire.ops.weights.narrow import NarrowWeight
from quire.ops.weights.quantised import BLOCK, GROUPS, QuantisedWeight, quantised

METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": Awq.of,
    "compressed-tensors": CompressedTensors.of,
    "fp8": Fp8.of,
    "gguf": Gguf.of,
    "gptq": Gptq.of,
    "mxfp4": Mxfp4.of,
}
CHUNK = 2**22  # numbers of a weight that are dequantised at a time, which bounds the temporary memory


def read_scheme(raw: Mapping[str, Any]) -> Scheme | None:
    """Return the quantisation scheme in a config.json; None: the checkpoint is not quantised.

    Raises ModelError for a format that is not supported, or has an unknown key.
    """
    given = [raw[key] for key in SCHEMES if raw.get(key) is not None]
    for config in given:
        if not isinstance(config, dict):
            raise ModelError(f"config.json: quantization_config is {shown(config)}; it must be an object")
    config = next(filter(None, given), None)
    if config is None:
        return None
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise unserved(f"quant_method {str(method)[:50]}")
    return METHODS[method](config)


@dataclass(frozen=True)
class Rounding:
    """Rounding to the nearest integers of `bits` bits."""

    bits: int
    group_size: int  # inputs that share a scale, at most; WHOLE: all

    def __str__(self) -> str:
        return f"int{self.bits}"

    def group(self, in_size: int) -> int:
        """Return the group size for `in_size` inputs. It divides them if possible: other engines need whole groups."""
        if self.group_size == WHOLE or in_size <= self.group_size:
            return in_size
        whole = [size for size in GROUPS if size <= self.group_size and in_size % size == 0]
        return max(whole, default=self.group_size if self.bits == 4 else in_size)

    def of(
        self,
        weight: Tensor,  # [out, in]
        dtype: torch.dtype,  # of x
        name: str,
    ) -> QuantisedWeight:
        """Round a weight. Raises ModelError, with its name, if it is not finite."""
        try:
            return quantised(weight, self.bits, self.group(weight.shape[1]), dtype)
        except QuireError as error:
            raise ModelError(f"{name}: {error}") from error


ROUNDINGS = {"int4": Rounding(4, 128), "int8": Rounding(8, WHOLE)}
# Of an encoder's linears. Embeddings are compared with each other, and a whole output's scale, or one of 128 numbers
# of x, moves them too far: 96 % of the ten nearest texts stay the same in all-MiniLM-L6-v2.
ENCODER_ROUNDINGS = ROUNDINGS | {"int8": Rounding(8, BLOCK)}


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of a model's weights."""

    scheme: Scheme | None = None  # of the checkpoint
    linears: Rounding | None = None  # of the layers, at load
    head: Rounding | None = None  # of the output projection, at load
    rounds_activations: bool = True  # else weights are dequantised at load and multiplied in the model's dtype
    is_encoder: bool = False
    for_head: bool = False  # of a draft head: an output projection that is quantised already is not rounded again

    @classmethod
    def of(cls, config: EngineConfig, scheme: Scheme | None) -> Quantisation:
        """Combine the options and a checkpoint's scheme. Raises ConfigError if they contradict each other."""
        if scheme is not None and config.quantization is not None:
            raise ConfigError(
                f"quantization is {config.quantization!r}, and the checkpoint is quantised already "
                f"({scheme.description}); leave it out, or take the model's 16-bit checkpoint"
            )
        linears = None if config.quantization is None else ROUNDINGS[config.quantization]
        head = config.quantization_head or ("none" if linears is None else "int8")
        found = cls(scheme, linears, ROUNDINGS.get(head), config.quantization_activations == "int8")
        if not found.rounds_activations and found == cls(rounds_activations=False):
            raise ConfigError(
                f"quantization_activations is {config.quantization_activations!r}, and no weight is quantised; give "
                "quantization too, or leave it out"
            )
        return found

    def for_encoder(self) -> Quantisation:
        """Return the quantisation of an encoder, whose int8 weights and rows have scales of 32 inputs."""
        linears = None if self.linears is None else ENCODER_ROUNDINGS[str(self.linears)]
        return replace(self, linears=linears, head=None, is_encoder=True)

    def kept(self, name: str) -> int:
        """Return the number of tensors, the last ones of this weight, that are not rounded at load.

        That is an encoder's projection to values: a small share of the work, but most of the error of int8.
        """
        return int(self.linears == ENCODER_ROUNDINGS["int8"] and name.endswith(".qkv.weight"))

    def for_drafts(self) -> Quantisation:
        """Return the quantisation of a draft head: to int4, so that drafting reads little. No token depends on it."""
        rounding = ROUNDINGS["int4"]
        return replace(self, linears=rounding if self.scheme is None else None, head=rounding, for_head=True)

    @property
    def description(self) -> str | None:
        """The format of quantised weights, such as "awq int4, groups of 128, zeros" or "int4 at load"; else None."""
        parts = [] if self.scheme is None else [self.scheme.description]
        if self.linears is not None:
            size = self.linears.group_size
            parts.append(f"{self.linears} at load" + ("" if size == WHOLE else f", groups of {size}"))
        if self.head is not None:
            parts.append(f"output projection {self.head} at load")
        if not self.rounds_activations:
            parts.append("multiplied unrounded")
        return "; ".join(parts) if parts else None

    def linear(
        self,
        weight: Tensor,  # [out, in]
        dtype: torch.dtype,  # of x
        name: str,
        is_head: bool,
    ) -> LinearWeight:
        """Return a linear's weight, rounded if the policy asks for it.

        Raises ModelError, with its name, if it must be rounded and is not finite.
        """
        rounding = self.head if is_head else self.linears
        return weight if rounding is None else self.multiplied(rounding.of(weight, dtype, name))

    def multiplied(self, weight: QuantisedWeight | BlockWeight) -> LinearWeight:
        """Return a quantised weight in the form in which it is multiplied: dequantised if rows are not rounded."""
        if self.rounds_activations:
            return in_blocks(weight) if self.is_encoder and isinstance(weight, QuantisedWeight) else weight
        shape = (weight.out_size, weight.in_size)
        home = (
            mapped(shape, weight.dtype)
            if weight.is_cpu
            else torch.empty(shape, dtype=weight.dtype, device=weight.device)
        )
        dequantised_into(home, weight)
        return home


def in_blocks(weight: QuantisedWeight) -> QuantisedWeight:
    """Return symmetric int8 in groups of 32 as blocks, with which rows of x have a scale for each 32 inputs, too."""
    groups = (weight.bits, weight.group_size, weight.scales.dtype) == (8, BLOCK, torch.float32)
    if not groups or weight.zeros is not None or weight.in_size % BLOCK:
        return weight
    return replace(weight, scales=weight.scales.half(), activation_group=BLOCK)


def dequantised_into(
    home: Tensor,  # [out, in]
    weight: QuantisedWeight | BlockWeight | NarrowWeight,
) -> None:
    """Dequantise a weight into `home`, some rows at a time."""
    step = max(1, CHUNK // weight.in_size)
    for start in range(0, weight.out_size, step):
        rows = torch.arange(start, min(start + step, weight.out_size))
        home[start : start + step] = weight.rows(rows).dequantised().to(home.dtype)
