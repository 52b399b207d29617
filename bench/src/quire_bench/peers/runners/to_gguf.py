"""A bf16 checkpoint of Llama's or Qwen3.5's shape as a GGUF file without a tokenizer, for llama.cpp.

python -m quire_bench.peers.runners.to_gguf DIRECTORY FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3_5_text": gguf.MODEL_ARCH.QWEN35}
NAMED = {"linear_attn.dt_bias": "linear_attn.dt_proj.bias"}  # as other models call what gguf knows
QWEN35_SECTIONS = [11, 11, 10, 0]  # rotated pairs of text, height and width; text alone has the same position in all


def main(source: Path, target: Path) -> None:
    """Write the file. Ends with a message for a checkpoint of another kind."""
    config = json.loads((source / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    kind = config["model_type"]
    if kind not in ARCHITECTURES or config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise SystemExit(f"{source}: only models of Llama's or Qwen3.5's shape with plain rotary embeddings")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads

    out = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]])
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    out.add_tokenizer_model("none")
    out.add_vocab_size(config["vocab_size"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    out.add_rope_freq_base(rope["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if kind == "qwen3_5_text":
        out.add_rope_dimension_sections(QWEN35_SECTIONS)
        out.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        out.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        out.add_ssm_state_size(config["linear_key_head_dim"])
        out.add_ssm_group_count(config["linear_num_key_heads"])
        out.add_ssm_time_step_rank(config["linear_num_value_heads"])
        out.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    for name, bits in tensors(source):
        weight = bits
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates neighbours there, transformers the halves.
            weight = bits.reshape(-1, 2, head_dim // 2, bits.shape[1]).swapaxes(1, 2).reshape(bits.shape)
        if weight.ndim == 2:
            rows = np.ascontiguousarray(weight).view(np.uint8)
            out.add_tensor(renamed(name, names), rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            numbers = (weight.astype(np.uint32) << 16).view(np.float32)
            out.add_tensor(renamed(name, names), numbers if kind == "llama" else qwen35(name, numbers))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def qwen35(name: str, numbers: Any) -> Any:
    """A small weight of Qwen3.5 as llama.cpp takes it."""
    if name.endswith("A_log"):
        return -np.exp(numbers)
    if name.endswith("conv1d.weight"):
        return numbers.squeeze(1)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return numbers + 1  # which transformers adds to each but that one
    return numbers


def renamed(name: str, names: Any) -> str:
    """Return the name of a weight in GGUF."""
    for ours, known in NAMED.items():
        name = name.replace(ours, known)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise SystemExit(f"GGUF has no name for {name}")
    return str(found)


def tensors(source: Path) -> Iterator[tuple[str, Any]]:
    """The names and bits of the weights, as uint16: NumPy knows no bf16."""
    for path in sorted(source.glob("*.safetensors")):
        data = np.memmap(path, mode="r")
        begin = 8 + int(data[:8].view(np.uint64)[0])
        for name, entry in json.loads(bytes(data[8:begin])).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}; only BF16")
            first, last = entry["data_offsets"]
            yield name, data[begin + first : begin + last].view(np.uint16).reshape(entry["shape"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
