"""GPTQ checkpoints (Frantar et al. 2022), of both versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.hf_config import shown
from quire.models.patterns import Pattern, Patterns
from quire.models.quantisation.module import Form, Module, bytes_read, described, unpacked
from quire.models.quantisation.reader import PLACE, Modules, SchemeReader, unserved
from quire.ops.weights.quantised import QuantisedWeight

VERSIONS = ("gptq", "gptq_v2")
# Keys that do not affect the weights: settings of the quantisation algorithm, and of other programs' kernels.
IMMATERIAL = """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs checkpoint_format damp_auto_increment
    damp_percent dataset desc_act disable_exllama exllama_config failsafe format hessian lm_head max_input_length
    meta model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
    modules_in_block_to_quantize mse
    offload_to_disk offload_to_disk_path pad_token_id parallel_packing quantizer static_groups tokenizer
    true_sequential use_cuda_fp16 use_exllama uuid vram_strategy gptaq gptaq_alpha
    """.split()  # fmt: skip


@dataclass(frozen=True)
class GptqForm:
    """A weight s[g] (q - z[g]), with g the group of an input, packed into words of consecutive inputs."""

    bits: int
    group_size: int
    symmetric: bool
    version: str  # from the config; only used for weights with zeros
    rounds_rows = True
    needs = ("qweight", "qzeros", "scales")
    takes = ("g_idx",)

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Return the bytes that such a weight takes in memory."""
        return bytes_read(out_size, in_size, self.bits, self.group_size, not self.symmetric)

    def read(self, module: Module, dtype: torch.dtype) -> QuantisedWeight:
        """Read the weight; dtype: of x. Raises ModelError, with the tensor's name, if it violates the format."""
        factor = 32 // self.bits
        module.check_multiple("inputs", module.in_size, factor)
        module.check_multiple("outputs", module.out_size, factor)
        groups = module.groups_begun(self.group_size)
        words = module.tensor("qweight", (module.in_size // factor, module.out_size), torch.int32)
        zeros = self._zeros(module, module.tensor("qzeros", (groups, module.out_size // factor), torch.int32))
        scales = module.scales("scales", (groups, module.out_size))
        group_of = module.tensor("g_idx", (module.in_size,), torch.int32, torch.int64) if module.has("g_idx") else None
        values = unpacked(words, self.bits, 0)  # [in, out]
        return module.weight(
            values.T, scales.T, None if zeros is None else zeros.T, self.bits, self.group_size, dtype, group_of, "g_idx"
        )

    def _zeros(
        self,
        module: Module,
        words: Tensor,  # int32 [groups, out * bits / 32]
    ) -> Tensor | None:
        """Return the zeros, uint8 [groups, out]; None: the weight is symmetric.

        Version 1 stores zeros minus one. Some tools write version 1 in the config and store version 2, so the version
        is ignored where the tensors show it.
        """
        middle = 2 ** (self.bits - 1)
        if self.symmetric:
            stored = unpacked(words, self.bits, 1)
            if not ((stored == middle).all() or (stored == middle - 1).all()):
                wrong = stored[(stored != middle) & (stored != middle - 1)]
                found = f"holds the zero {int(wrong[0])}" if len(wrong) else f"holds both {middle - 1} and {middle}"
                served = f"{middle - 1} (version 1) or {middle} (version 2) only"
                raise module.error("qzeros", f"{found}; a symmetric weight of {self.bits} bits has {served}")
            return None
        if self.version == VERSIONS[0]:
            # A zero of 0 borrows from the next number: writers subtract the ones of a whole word at once, and readers
            # add them at once (GPTQModel, gptqmodel/utils/model.py: convert_gptq_v2_to_v1_format_module and its
            # inverse; AutoGPTQ's last version, auto_gptq/modeling/_utils.py). AutoGPTQ's older `pack`
            # (qlinear_cuda.py) sets all bits from such a zero on, which cannot be undone. Without such a zero, both
            # write the same.
            ones = sum(1 << i for i in range(0, 32, self.bits))
            words = words + ones  # int32 wraps around
        return unpacked(words, self.bits, 1)


@dataclass(frozen=True)
class Gptq:
    """One form for most linears, others by the patterns of `dynamic`."""

    usual: GptqForm
    ordered: bool  # desc_act in the config
    dynamic: tuple[tuple[Pattern, GptqForm | None], ...]  # None: not quantised
    left_out: Modules
    head: bool = False  # the output projection is quantised

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Gptq:
        """Read a quantization_config. Raises ModelError if it is not supported."""
        config = SchemeReader(raw, "gptq", IMMATERIAL)
        version = str(config.get("checkpoint_format", config.get("format", VERSIONS[0])))
        if version not in VERSIONS or config.get("is_marlin_format", False):
            raise unserved(f"GPTQ in the format {version if version not in VERSIONS else 'marlin'!r}")
        config.only("pack_dtype", "int32")
        usual = _form(config, version)
        dynamic, patterns = [], Patterns(PLACE)
        for text, changes in config.mapping("dynamic").items():
            form = None if text.startswith("-:") else _changed(usual, changes, text)
            dynamic.append((patterns.compiled("dynamic", text.removeprefix("-:").removeprefix("+:")), form))
        left_out = config.modules("modules_to_not_convert", patterns)
        gptq = cls(usual, config.flag("desc_act"), tuple(dynamic), left_out, config.flag("lm_head"))
        config.finish()
        return gptq

    @property
    def description(self) -> str:
        """The format of most linears."""
        extras = {"zeros": not self.usual.symmetric, "act-order": self.ordered, "some otherwise": bool(self.dynamic)}
        return described("gptq", self.usual.bits, self.usual.group_size, extras)

    def form(self, name: str) -> Form | None:
        """Return the form of a linear if it is quantised. The first pattern that matches its beginning decides."""
        return next((form for pattern, form in self.dynamic if pattern.begins(name)), self.usual)

    def excludes(self, name: str) -> bool:
        """Return whether a linear is excluded from quantisation. The output projection usually is."""
        return (name == "lm_head" and not self.head) or self.left_out.have(name)


def _form(config: SchemeReader, version: str) -> GptqForm:
    config.only("bits", 4, 8)
    return GptqForm(config.integer("bits"), config.group_size(), config.flag("sym", True), version)


def _changed(usual: GptqForm, changes: Any, pattern: str) -> GptqForm:
    """Return the form with the changes of a pattern of `dynamic`."""
    if not isinstance(changes, dict):
        raise ModelError(f"{PLACE}: dynamic's {shown(pattern)} is {shown(changes)}; it must be an object")
    fields = {"bits": usual.bits, "group_size": usual.group_size, "sym": usual.symmetric}
    config = SchemeReader(fields | changes, "gptq", IMMATERIAL)
    form = _form(config, usual.version)
    config.finish()
    return form
