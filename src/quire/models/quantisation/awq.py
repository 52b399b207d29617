"""AWQ checkpoints (Lin et al. 2023) of version gemm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.models.patterns import Patterns
from quire.models.quantisation.module import Form, Module, bytes_read, described, unpacked
from quire.models.quantisation.reader import PLACE, Modules, SchemeReader, unserved
from quire.ops.weights.quantised import QuantisedWeight

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each number of a word
# Keys that do not affect the weights: settings of the quantisation algorithm, and of other programs' kernels.
IMMATERIAL = """
    backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse meta desc_act sym damp_percent pack_dtype
    checkpoint_format true_sequential lm_head
    """.split()


@dataclass(frozen=True)
class AwqForm:
    """A weight (q - z) s, packed into words of eight outputs."""

    group_size: int
    rounds_rows = True
    needs = ("qweight", "qzeros", "scales")
    takes = ()

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Return the bytes that such a weight takes in memory."""
        return bytes_read(out_size, in_size, BITS, self.group_size, has_zeros=True)

    def read(self, module: Module, dtype: torch.dtype) -> QuantisedWeight:
        """Read the weight; dtype: of x. Raises ModelError, with the tensor's name, if it violates the format."""
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
    """One form for all linears except excluded ones."""

    group_size: int
    left_out: Modules

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Awq:
        """Read a quantization_config. Raises ModelError if it is not supported."""
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
        """Return the form of a linear if it is quantised."""
        return AwqForm(self.group_size)

    def excludes(self, name: str) -> bool:
        """Return whether a linear is excluded from quantisation. The output projection always is."""
        return name == "lm_head" or self.left_out.have(name)
