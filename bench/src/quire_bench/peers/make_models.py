"""The checkpoints that engines are compared on: real shapes, random weights in bf16, on which speed does not depend.

python -m quire_bench.peers.make_models DIRECTORY [gpt2] [smol135] [llama1b] [qwen35_08b] [qwen35_2b]
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig

SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
LLAMA = {"max_position_embeddings": 8192, "tie_word_embeddings": True} | SPECIAL
QWEN35: dict[str, Any] = {  # three layers of four keep a state
    "vocab_size": 248320,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
} | LLAMA
CONFIGS = {
    "gpt2": GPT2Config(**SPECIAL),
    "smol135": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_theta=100000,
        **LLAMA,
    ),
    "llama1b": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=500000,
        **LLAMA,
    ),
    "qwen35_08b": Qwen3_5TextConfig(hidden_size=1024, intermediate_size=3584, **QWEN35),
    "qwen35_2b": Qwen3_5TextConfig(hidden_size=2048, intermediate_size=6144, **QWEN35),
}


def tokenizer() -> Any:
    """A small one, trained on the standard library; engines want to find one."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train([str(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def main() -> None:
    """Write those that are named, or all."""
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(CONFIGS):
        raise SystemExit((__doc__ or "").strip())
    for name in sys.argv[2:] or CONFIGS:
        directory = Path(sys.argv[1]) / name
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).save_pretrained(directory)
        tokenizer().save_pretrained(directory)
        print(directory)


if __name__ == "__main__":
    main()
