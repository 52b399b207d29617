"""Reading a config.json's quantization_config without overlooking any key that matters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from quire.errors import ModelError
from quire.models.hf_config import ConfigReader, shown
from quire.models.patterns import Pattern, Patterns
from quire.models.quantisation.module import WHOLE
from quire.ops.weights.quantised import GROUPS

PLACE = "config.json: quantization_config"


class Modules(NamedTuple):
    """A list of modules."""

    names: tuple[str, ...]  # whole names, or parts between dots
    patterns: tuple[Pattern, ...]

    def have(self, name: str) -> bool:
        """Return whether the list contains the module of that name."""
        return any(f".{one}." in f".{name}." for one in self.names) or any(one.begins(name) for one in self.patterns)


class SchemeReader(ConfigReader):
    """A reader of a quantization_config, or of a part of it, that records which keys were read."""

    def __init__(self, raw: Mapping[str, Any], method: str, immaterial: Collection[str] = ()) -> None:
        """Read a config. immaterial: keys that do not affect the weights."""
        super().__init__(raw, method, "format", PLACE)
        for key in ("quant_method", *immaterial):
            self.get(key)

    def group_size(self) -> int:
        """Return the number of inputs that share a scale, or WHOLE. Raises ModelError if it is not supported."""
        size = self.get("group_size", WHOLE)
        whole = isinstance(size, int) and not isinstance(size, bool)
        if not whole or (size != WHOLE and size not in GROUPS and (size < 1 or size % GROUPS[-1])):
            raise ModelError(
                f"{PLACE}: group_size is {shown(size)}; it must be one of {', '.join(map(str, GROUPS))}, a multiple of "
                f"{GROUPS[-1]}, or {WHOLE} for all inputs"
            )
        return int(size)

    def modules(self, key: str, patterns: Patterns) -> Modules:
        """Return a list of modules, empty if it is missing. Raises ModelError for any other value."""
        given = self.texts(key)
        expressions = [name.removeprefix("re:") for name in given if name.startswith("re:")]
        names = tuple(name for name in given if not name.startswith("re:"))
        return Modules(names, tuple(patterns.compiled(key, text) for text in expressions))


def unserved(what: str) -> ModelError:
    """Return the error for an unsupported format, with the supported ones."""
    return ModelError(
        f"config.json: the weights are stored as {what}, which is not served; take the model's 16-bit checkpoint with "
        "--quantization int4 or int8, or one in awq (gemm), gptq, fp8 (e4m3), mxfp4, or "
        "compressed-tensors (pack-quantized, int-quantized, float-quantized)"
    )
