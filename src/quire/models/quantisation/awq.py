"""AWQ's checkpoints (Lin et al. 2023), of version gemm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.models.patterns import Patterns
from quire.models.quantisation.module import Form, Module, bytes_read, described, unpacked
from quire.models.quantisation.reader import PLACE, Modules, SchemeReader, unserved
from quire.ops.quantised import QuantisedWeight

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each number of a word
# What says nothing about the weights: how they were found, how another program computes with them.
IMMATERIAL = """
    backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse meta desc_act sym damp_percent pack_dtype
    checkpoint_format true_sequential lm_head
    """.split()


@dataclass(frozen=True)
class AwqForm:
    """(q - z) s: words of eight outputs."""

    group_size: int
    rounds_rows = True
    needs = ("qweight", "qzeros", "scales")
    takes = ()

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Bytes that such a weight takes, once it was read."""
        return bytes_read(out_size, in_size, BITS, self.group_size, has_zeros=True)

    def read(self, module: Module, dtype: torch.dtype) -> QuantisedWeight:
        """The weight; dtype: of x. Raises ModelError, with the tensor's name, for what the format does not allow."""
        factor = 32 // BITS
        module.check_multiple("outputs", module.out_size, factor)
        groups = module.groups(self.group_size)
        words = module.tensor("qweight", (module.in_size, module.out_size // factor), torch.int32)
        zero_words = module.tensor("qzeros", (groups, module.out_size // factor), torch.int32)
        scales = module.scales("scales", (groups, module.out_size))
        zeros = unpacked(zero_words, BITS, 1, ORDER)  # [groups, out]
        values = unpacked(words, BITS, 1, ORDER)  # [in, out]
        return module.weight(values.T, scales.T, zeros.T, BITS, self.group_size, dtype)


@dataclass(frozen=True)
class Awq:
    """One form for all linears but those that are left out."""

    group_size: int
    left_out: Modules

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Awq:
        """What the quantization_config says. Raises ModelError for what is not served."""
        config = SchemeReader(raw, "awq", IMMATERIAL)
        version = str(config.get("version", config.get("format", "gemm"))).lower()
        if version != "gemm":
            raise unserved(f"AWQ version {version!r}")
        config.only("bits", BITS)
        config.only("zero_point", True)
        awq = cls(config.group_size(), config.modules("modules_to_not_convert", Patterns(PLACE)))
        config.finish()
        return awq

    @property
    def description(self) -> str:
        """The format."""
        return described("awq", BITS, self.group_size, {"zeros": True})

    def form(self, name: str) -> Form | None:  # noqa: ARG002  # all are alike
        """How the linear of that name is stored if it is quantised."""
        return AwqForm(self.group_size)

    def excludes(self, name: str) -> bool:
        """Whether it is left out: the output projection always is."""
        return name == "lm_head" or self.left_out.have(name)
