"""A bf16 checkpoint of Llama's shape as a GGUF file without a tokenizer, for llama.cpp.

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

OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(source: Path, target: Path) -> None:
    """Write the file. Ends with a message for a checkpoint of another kind."""
    config = json.loads((source / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if config["model_type"] != "llama" or config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise SystemExit(f"{source}: only models of Llama's shape with plain rotary embeddings")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads

    out = gguf.GGUFWriter(target, "llama")
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
    out.add_rope_dimension_count(head_dim)
    out.add_rope_freq_base(rope["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, weight in tensors(source):
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbours, transformers the halves
            weight = weight.reshape(-1, 2, head_dim // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        if weight.ndim == 1:
            out.add_tensor(renamed(name), (weight.astype(np.uint32) << 16).view(np.float32))
        else:
            rows = np.ascontiguousarray(weight).view(np.uint8)
            out.add_tensor(renamed(name), rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def renamed(name: str) -> str:
    """What GGUF calls a weight."""
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return OUTER[stem] + ".weight"
    layer, _, inner = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{INNER[inner]}.weight"


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
