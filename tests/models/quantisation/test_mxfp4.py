"""gpt-oss checkpoints as they are published: experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import engine_config
from quire.errors import ConfigError, ModelError
from quire.models import load_model
from quire.ops import load
from tests.models.checkpoints import engine, probed_logits, save

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3}
LADDER = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def published(directory: Path) -> Path:
    """The same model twice: as it was saved, with experts that MXFP4 can hold, and with these as blocks."""
    save(directory, "GptOss", dtype=torch.bfloat16, **SIZES)
    plain, packed = load_file(directory / "model.safetensors"), directory / "packed"
    stored = {name: tensor for name, tensor in plain.items() if not name.endswith(("_up_proj", "down_proj"))}
    generator = torch.Generator().manual_seed(5)
    for name in plain.keys() - stored.keys():
        experts, inputs, outputs = plain[name].shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=generator)
        exponents = torch.randint(120, 127, (experts, outputs, inputs // 32), generator=generator)
        numbers = (
            torch.tensor(LADDER)[codes % 8] * torch.where(codes < 8, 1.0, -1.0) * 2.0 ** (exponents[..., None] - 127)
        )
        plain[name] = numbers.flatten(2).transpose(1, 2).contiguous().bfloat16()
        stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = exponents.to(torch.uint8)
    save_file(plain, directory / "model.safetensors")
    packed.mkdir()
    save_file(stored, packed / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    scheme = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (packed / "config.json").write_text(json.dumps(raw | {"quantization_config": scheme}))
    return packed


def test_blocks_mean_what_the_plain_checkpoint_has(tmp_path: Path) -> None:
    packed = published(tmp_path)
    prompts = [list(range(2, 40)), [5, 6, 7]]
    (plain, tokens), (blocks, same) = (
        probed_logits(engine(path, dtype="float32"), prompts, 6) for path in (tmp_path, packed)
    )
    assert tokens == same
    assert plain.found.keys() == blocks.found.keys()
    for row, logits in plain.found.items():  # scales are applied to sums, so the last bits differ
        torch.testing.assert_close(blocks.found[row], logits, rtol=1e-3, atol=1e-3)
    model = load_model(packed, engine_config(), load())
    assert model.quantisation == "mxfp4, multiplied in 16 bits"
    wide = load_model(tmp_path, engine_config(), load()).weight_bytes.experts
    assert 0.26 < model.weight_bytes.experts / wide < 0.28
    with pytest.raises(ConfigError, match=r"the checkpoint is quantised already \(mxfp4"):
        load_model(packed, engine_config(quantization="int4"), load())


def test_blocks_that_are_none_are_refused(tmp_path: Path) -> None:
    packed = published(tmp_path)
    path = packed / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.1.mlp.experts.down_proj"
    for changes, shown in (
        ({f"{name}_scales": torch.full_like(stored[f"{name}_scales"], 255)}, r"down_proj_scales\[0\] holds 255"),
        ({f"{name}_blocks": stored[f"{name}_blocks"][..., :8].contiguous()}, r"_blocks\[0\] has shape \(64, 3, 8\)"),
    ):
        save_file(stored | changes, path)
        with pytest.raises(ModelError, match=shown):
            engine(packed)
    save_file({key: tensor for key, tensor in stored.items() if key != f"{name}_scales"}, path)
    with pytest.raises(ModelError, match=r"lacks 1 tensors, among them .*experts\.down_proj_scales"):
        engine(packed)
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"]["group"] = 16
    (packed / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="group"):
        engine(packed)
