"""Reading a config.json's quantization_config so that no key that matters is overlooked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import ModelError
from quire.models.hf_config import ConfigReader
from quire.models.quantisation.module import WHOLE
from quire.ops.quantised import GROUPS


class SchemeReader(ConfigReader):
    """Hands out the keys of a quantization_config, or of a part of it."""

    def __init__(self, raw: Mapping[str, Any], method: str, immaterial: Collection[str] = ()) -> None:
        """immaterial: keys that say nothing about the weights."""
        super().__init__(raw, method, "format")
        for key in ("quant_method", *immaterial):
            self.get(key)

    def group_size(self) -> int:
        """Inputs that share a scale, or WHOLE. Raises ModelError where it is not served."""
        size = self.get("group_size", WHOLE)
        whole = isinstance(size, int) and not isinstance(size, bool)
        if not whole or (size != WHOLE and size not in GROUPS and (size < 1 or size % GROUPS[-1])):
            raise ModelError(
                f"config.json: group_size is {size!r}; it must be one of {', '.join(map(str, GROUPS))}, a multiple of "
                f"{GROUPS[-1]}, or {WHOLE} for all inputs"
            )
        return int(size)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names or patterns of modules, empty where it is missing."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ModelError(f"config.json: {key} is {value!r}; it must be a list of modules' names")
        return tuple(value)


def unserved(what: str) -> ModelError:
    """That a checkpoint is quantised in a way that is not served, and what would be."""
    return ModelError(
        f"config.json: the weights are stored as {what}, which is not served; take the model's 16-bit checkpoint with "
        "--quantization int4 or int8, or one in awq (gemm), gptq, fp8 (e4m3), mxfp4, or "
        "compressed-tensors (pack-quantized, int-quantized, float-quantized)"
    )


def names_module(pattern: str, name: str) -> bool:
    """Whether a pattern of a list of modules means this one: by its name, a part of it, or "re:" and an expression."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise ModelError(f"config.json: the list of modules has {pattern!r}: {error}") from error
    return f".{pattern}." in f".{name}."
