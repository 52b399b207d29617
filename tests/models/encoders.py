"""Random encoders as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 96,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DISTIL = {"vocab_size": 97, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 3, "max_position_embeddings": 96}
DISENTANGLED = SIZES | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
V3 = {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
MODERN = {key: value for key, value in SIZES.items() if key != "type_vocab_size"} | {"local_attention": 12}
DECODER = {key: value for key, value in SIZES.items() if key != "type_vocab_size"} | {"num_key_value_heads": 1}
GEMMA = DECODER | {
    "head_dim": 16,
    "use_bidirectional_attention": True,
    "sliding_window": 11,
    "query_pre_attn_scalar": 16,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", SIZES | {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", SIZES | {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", DISTIL),
    "mpnet": ("MPNet", SIZES | {"pad_token_id": 1}),
    "nomic": ("NomicBert", SIZES),
    "deberta-v2": ("DebertaV2", DISENTANGLED | {"type_vocab_size": 2}),
    "deberta-v3": ("DebertaV2", DISENTANGLED | V3),
    "deberta, one term": ("DebertaV2", DISENTANGLED | {"pos_att_type": ["c2p"], "max_relative_positions": 9}),
    "modernbert": ("ModernBert", MODERN),
    "gemma": ("Gemma3Text", GEMMA),
    "qwen3": ("Qwen3", DECODER),
    "mistral": ("Mistral", DECODER | {"sliding_window": 9}),
    "modernbert, biases": ("ModernBert", MODERN | {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
}


def saved(directory: Path, kind: str, ending: str = "Model", **changes: Any) -> Any:
    """A random encoder, as transformers has it, saved to a directory."""
    family, sizes = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(sizes | changes), attn_implementation="eager")
    model = getattr(transformers, f"{family}{ending}")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2) if parameter.dim() > 1 else parameter.data.normal_(1, 0.1)
    model.save_pretrained(directory)
    return model


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer of letters in BERT's format."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*"[PAD] [UNK] [CLS] [SEP] [MASK]".split(), *letters, *(f"##{one}" for one in letters)]
    words += "0123456789.,?!-"
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=1000))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    tokenizer.post_processor = BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    tokenizer.add_special_tokens(words[:5])
    tokenizer.save(str(directory / "tokenizer.json"))


def save_embedder(directory: Path, **changes: Any) -> None:
    """Save an embedding model with a tokenizer, prompts, and mean pooling without normalisation."""
    saved(directory, "bert", **changes)
    save_tokenizer(directory)
    prompts = {"prompts": {"query": "find ", "document": ""}, "default_prompt_name": None}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    pooling = directory / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (directory / "modules.json").write_text(json.dumps([{"path": path, "type": f"x.{kind}"} for path, kind in kinds]))
