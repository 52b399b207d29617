"""LoRA: one batch with rows of two adapters and of the model alone.

The adapters are random, in PEFT's format; with real ones, pass their directories.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams


def write_adapter(directory: Path, size: int, seed: int) -> None:
    """Write an adapter of rank 4 for the output projections of attention in the first two layers."""
    directory.mkdir()
    random = torch.Generator().manual_seed(seed)
    matrices = {}
    for layer in range(2):
        module = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        matrices[f"{module}.lora_A.weight"] = torch.randn(4, size, generator=random)
        matrices[f"{module}.lora_B.weight"] = torch.randn(size, 4, generator=random) / 4
    save_file(matrices, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": [0, 1]}))


def main() -> None:
    """Load two adapters, and continue the same prompt with each and without one."""
    llm = LLM(enable_lora=True)
    with TemporaryDirectory() as directory:
        for seed, name in enumerate(("first", "second")):
            write_adapter(Path(directory, name), llm.hidden_size, seed)
            llm.load_lora(name, Path(directory, name))
    adapters = ["first", "second", None, "first"]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    texts = [output.outputs[0].text for output in llm.generate(["def read("] * 4, greedy, lora=adapters)]
    for adapter, text in zip(adapters, texts, strict=True):
        print(f"{adapter or 'no adapter'}: {text!r}")
    print(f"rows of one adapter agree: {texts[0] == texts[3]}; texts that differ: {len(set(texts))}")


if __name__ == "__main__":
    main()
