"""Single linears through the readers: zeros of both versions of GPTQ, sizes at the edges, forms by name."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.quantisation.compressed_tensors import CompressedTensors
from quire.models.quantisation.gptq import Gptq, GptqForm
from quire.models.quantisation.module import Module, unpacked
from quire.models.quantisation.policy import read_scheme
from tests.models.quantisation import writers
from tests.models.quantisation.test_formats import gptq_config, packed_config
from tests.models.quantisation.writers import drawn


@dataclass
class Tensors:
    stored: dict[str, Tensor]

    @property
    def names(self) -> set[str]:
        return set(self.stored)

    def __getitem__(self, name: str) -> Tensor:
        return self.stored[name]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_of_0_carries_in_the_first_version(bits: int) -> None:
    """Its writers take a one of each number at once, from words of the second version."""
    generator = np.random.default_rng(0)
    made = drawn(generator, 64, 256, bits, 32)
    made.zeros = generator.integers(0, 2**bits, made.zeros.shape)
    made.zeros[:, 0] = 0
    stored = writers.gptq("x", made, bits, version=2)
    stored["x.qzeros"] = stored["x.qzeros"] - (0x11111111 if bits == 4 else 0x01010101)  # wraps around
    found = GptqForm(bits, 32, False, "gptq").read(Module(Tensors(stored), "x", 64, 256), torch.float32)
    assert found.zeros is not None
    assert torch.equal(found.zeros, torch.tensor(made.zeros).float())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dim", [0, 1])
def test_unpacking(bits: int, rows: int, dim: int) -> None:
    generator = np.random.default_rng(bits)
    numbers = generator.integers(0, 2**bits, (rows, 3 * 32 // bits))
    words = writers.words_along_rows(numbers, bits) if rows else torch.empty(0, 3, dtype=torch.int32)
    found = unpacked(words, bits, 1) if dim == 1 else unpacked(words.T, bits, 0).T
    assert torch.equal(found, torch.tensor(numbers).to(torch.uint8))


@pytest.mark.parametrize("out_size", [1, 7, 8, 9, 33])
@pytest.mark.parametrize("in_size", [1, 7, 9, 31])
def test_packed_words_may_be_part_full(out_size: int, in_size: int) -> None:
    made = drawn(np.random.default_rng(1), out_size, in_size, 4, -1, zeros=True)
    stored = writers.packed("x", made, 4, zeros=True)
    form = CompressedTensors.of(packed_config(4, -1, False)).form("x")
    assert form is not None
    found = form.read(Module(Tensors(stored), "x", out_size, in_size), torch.float32)
    assert torch.equal(found.dequantised(), made.weight())


def test_large_groups_are_groups_of_128() -> None:
    for group_size in (256, 512, 1024):
        made = drawn(np.random.default_rng(group_size), 16, 2048, 4, group_size, zeros=True)
        stored = writers.gptq("x", made, 4)
        found = GptqForm(4, group_size, False, "gptq").read(Module(Tensors(stored), "x", 16, 2048), torch.bfloat16)
        assert (found.group_size, found.scales.shape) == (128, (16, 16))
        assert torch.equal(found.dequantised(), made.weight())


def test_forms_by_name() -> None:
    """Of compressed-tensors names come before classes; of GPTQ the first pattern decides."""
    few, many = packed_config(4, 64)["config_groups"]["group_0"], packed_config(8, 128)["config_groups"]["group_0"]
    groups = {"all": few, "some": many | {"targets": [r"re:.*down_proj", "model.layers.3"]}}
    scheme = read_scheme({"quantization_config": packed_config(config_groups=groups)})
    assert scheme is not None
    for name, bits in (("a.mlp.down_proj", 8), ("model.layers.3.mlp.up_proj", 8), ("model.layers.30.mlp.up_proj", 4)):
        assert scheme.form(name) is not None
        assert getattr(scheme.form(name), "bits", None) == bits
    assert scheme.excludes("lm_head")
    assert not scheme.excludes("a.mlp.down_proj")
    dynamic = {r"-:.*k_proj": {}, r"+:.*layers\.1\.": {"bits": 8, "group_size": -1}, r".*\.1\..*q_proj": {"bits": 4}}
    gptq = Gptq.of(gptq_config(dynamic=dynamic))
    assert gptq.form("model.layers.1.k_proj") is None
    assert gptq.form("model.layers.1.q_proj") == GptqForm(8, -1, True, "gptq")
    assert gptq.form("model.layers.2.q_proj") == GptqForm(4, 32, True, "gptq")


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(ModelError, match=r"quantization_config: ignore has '\(', which is no pattern"):
        read_scheme({"quantization_config": packed_config(ignore=["re:("])})
