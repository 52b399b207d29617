"""quire convert: what is written is what rounding at load makes, in the layout that compressed-tensors documents."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import ConfigError, ModelError
from quire.models import convert as module
from quire.models.convert import convert
from quire.models.weights import INDEX
from quire.ops.weights.quantised import quantised
from tests.marks import of_long_runs
from tests.models.checkpoints import engine, save
from tests.models.quantisation.test_formats import logits
from tests.models.test_text_part import save_whole

# Inputs of 128, 192 and 160, so groups of 128, 64 and 32; and 48 and 96, which are one.
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 40,
         "num_key_value_heads": 1}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "quantization", "changes"),
    [
        ("Llama", "int4", SIZES),
        of_long_runs("Llama", "int8", SIZES),
        of_long_runs("Phi3", "int4", {}),  # rows that are stacked
        ("GPT2", "int4", {"n_embd": 96}),  # weights as [in, out]
        ("Glm4", "int4", SIZES),  # rows in another order
        ("Qwen3Moe", "int4", {}),
        ("DeepseekV3", "int8", {"q_lora_rank": 32}),  # a weight that is needed as numbers
        of_long_runs("Lfm2", "int8", {}),
    ],
)
def test_it_is_what_is_rounded_at_load(tmp_path: Path, kind: str, quantization: str, changes: dict[str, Any]) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    save(plain, kind, torch.bfloat16, **changes)
    written = convert(plain, out, quantization)
    assert written.nbytes == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    for head in ("none", "int8"):
        found = logits(out, quantization_head=head)
        assert torch.equal(found, logits(plain, quantization=quantization, quantization_head=head))


def meant(stored: dict[str, Tensor], name: str, bits: int) -> Tensor:
    """A linear's numbers by the format's documentation: words have consecutive inputs from their lowest bits up."""
    words, scales = stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"]
    rows, columns = stored[f"{name}.weight_shape"].tolist()
    values = torch.stack([words >> shift & 2**bits - 1 for shift in range(0, 32, bits)], -1).view(rows, -1)[:, :columns]
    assert values.shape[1] % scales.shape[1] == 0
    return (values - 2 ** (bits - 1)) * scales.repeat_interleave(columns // scales.shape[1], 1)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_the_layout(tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several files, without a tokenizer's file lost or a weight twice."""
    plain, out = tmp_path / "plain", tmp_path / "out"
    save(plain, "Llama", torch.bfloat16, **SIZES)
    (plain / "tokenizer.json").write_text("{}")
    (plain / "pytorch_model.bin").write_bytes(b"the same again")
    monkeypatch.setattr(module, "SHARD", 200_000)
    convert(plain, out, quantization)
    index = json.loads((out / INDEX).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert [path.name for path in files] == sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    stored = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert stored.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    others = {"config.json", "generation_config.json", "tokenizer.json", INDEX}
    assert {path.name for path in out.iterdir()} - {path.name for path in files} == others
    scheme = json.loads((out / "config.json").read_text())["quantization_config"]
    bits, seen = int(quantization[3:]), set()
    for group in scheme["config_groups"].values():
        weights = group["weights"]
        targets = group["targets"]
        if targets == ["Linear"]:
            targets = [name.removesuffix(".weight_packed") for name in stored if name.endswith("weight_packed")]
        for name in targets:
            original = load_file(plain / "model.safetensors")[f"{name}.weight"]
            size = weights["group_size"] or original.shape[1]
            expected = quantised(original, bits, size, torch.bfloat16)
            assert torch.equal(meant(stored, name, bits), expected.dequantised())
            seen.add((weights["num_bits"], weights["strategy"], weights["group_size"]))
    if bits == 8:
        assert seen == {(8, "channel", None)}
    else:
        assert seen == {(4, "group", 128), (4, "group", 64), (4, "group", 32)}
    assert scheme["ignore"] == ["lm_head", "model.embed_tokens"]


def test_other_sides_of_a_model_stay_as_they_are(tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    save_whole(plain)
    convert(plain, out, "int8")
    seeing = load_file(plain / "vision.safetensors")
    stored = load_file(out / "model.safetensors")
    assert seeing
    assert all(torch.equal(stored[name], tensor) for name, tensor in seeing.items())
    assert torch.equal(logits(out), logits(plain, quantization="int8", quantization_head="none"))


def test_the_command(tmp_path: Path) -> None:
    save(tmp_path / "plain", "Llama", torch.bfloat16, **SIZES)
    arguments = ["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--quantization", "int4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "21 linears in int4" in result.stdout
    assert f"quire serve {tmp_path / 'out'} --quantization-head int8" in result.stdout
    assert engine(tmp_path / "out").runner.model.quantisation.startswith("compressed-tensors int4, groups of 128")
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "is there already and is not an empty directory" in again.stderr


def test_what_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, out, experts, odd = (tmp_path / name for name in ("plain", "out", "experts", "odd"))
    save(plain, "Llama", torch.bfloat16)
    save(experts, "GptOss", torch.bfloat16)
    save(odd, "Llama", torch.bfloat16, intermediate_size=200)
    convert(plain, tmp_path / "twice", "int8")
    for error, match, source, quantization in (
        (ConfigError, "quantization is 'int2'; it must be one of int4, int8", plain, "int2"),
        (ModelError, r"quantised already \(compressed-tensors int8", tmp_path / "twice", "int8"),
        (ModelError, r"experts\.gate_up_proj\[0\] is one of several experts in a tensor", experts, "int4"),
        (ModelError, r"down_proj\.weight has 200 inputs, which groups of 32, 64, 128 do not divide", odd, "int4"),
        (ModelError, "holds no config.json", tmp_path, "int4"),
        (ModelError, "no directory; take the one", odd / "config.json", "int4"),
    ):
        with pytest.raises(error, match=match):
            convert(source, out, quantization)
        assert not out.exists()
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.weight: the weight holds nan at \[3, 5\]"):
        convert(plain, out, "int4")
    assert not any(out.iterdir())  # what was begun is no model
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**30, 2**30, 1000))
    with pytest.raises(ConfigError, match=r"out will take 0\.\d MiB; 0\.0 MiB are free there"):
        convert(plain, out, "int4")
