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


BERT_BASE = {
    "attention_probs_dropout_prob": 0.1, "classifier_dropout": None, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12,
    "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute", "torch_dtype": "float32",
    "transformers_version": "4.30.0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
XLM_R = BERT_BASE | {
    "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "output_past": True,
    "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 250002,
}  # fmt: skip
NO_TYPES = {key: value for key, value in XLM_R.items() if key not in ("type_vocab_size", "position_embedding_type")}
# The keys of published checkpoints, and the longest sequence of each.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "BAAI/bge-base-en-v1.5": (
        BERT_BASE | {"architectures": ["BertModel"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}, 512,
    ),
    "intfloat/multilingual-e5-base": (XLM_R | {"architectures": ["XLMRobertaModel"]}, 512),
    "BAAI/bge-reranker-v2-m3": (
        XLM_R | {"architectures": ["XLMRobertaForSequenceClassification"], "max_position_embeddings": 8194}, 8192,
    ),
    "cross-encoder/ms-marco-MiniLM-L6-v2": (
        BERT_BASE | {
            "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"},
            "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        }, 512,
    ),
    "sentence-transformers/all-mpnet-base-v2": (
        NO_TYPES | {"architectures": ["MPNetForMaskedLM"], "relative_attention_num_buckets": 32}, 512,
    ),
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": (
        {
            "activation": "gelu", "architectures": ["DistilBertForSequenceClassification"], "attention_dropout": 0.1,
            "dim": 768, "dropout": 0.1, "finetuning_task": "sst-2", "hidden_dim": 3072, "initializer_range": 0.02,
            "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "max_position_embeddings": 512, "model_type": "distilbert",
            "n_heads": 12, "n_layers": 6, "output_past": True, "pad_token_id": 0, "qa_dropout": 0.1,
            "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
        }, 512,
    ),
    "cross-encoder/nli-deberta-v3-base": (
        {
            "architectures": ["DebertaV2ForSequenceClassification"], "attention_probs_dropout_prob": 0.1,
            "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
            "id2label": {"0": "contradiction", "1": "entailment", "2": "neutral"}, "intermediate_size": 3072,
            "layer_norm_eps": 1e-7, "max_position_embeddings": 512, "max_relative_positions": -1,
            "model_type": "deberta-v2", "norm_rel_ebd": "layer_norm", "num_attention_heads": 12,
            "num_hidden_layers": 12, "pad_token_id": 0, "pooler_dropout": 0, "pooler_hidden_act": "gelu",
            "pooler_hidden_size": 768, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
            "position_buckets": 256, "relative_attention": True, "share_att_key": True, "type_vocab_size": 0,
            "vocab_size": 128100,
        }, 512,
    ),
    "Alibaba-NLP/gte-modernbert-base": (
        {
            "architectures": ["ModernBertModel"], "attention_bias": False, "attention_dropout": 0.0,
            "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
            "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True,
            "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
            "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
            "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
            "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-5, "local_attention": 128,
            "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0,
            "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-5, "num_attention_heads": 12,
            "num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute",
            "reference_compile": False, "repad_logits_with_grad": False, "sep_token_id": 50282,
            "sparse_pred_ignore_index": -100, "sparse_prediction": False, "torch_dtype": "float16", "vocab_size": 50368,
        }, 8192,
    ),
    "nomic-ai/nomic-embed-text-v1": (
        {
            "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0,
            "auto_map": {"AutoModel": "x"}, "causal": False, "dense_seq_output": True, "embd_pdrop": 0.0,
            "fused_bias_fc": True, "fused_dropout_add_ln": True, "initializer_range": 0.02, "layer_norm_epsilon": 1e-12,
            "max_trained_positions": 2048, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "model_type": "nomic_bert",
            "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192,
            "pad_vocab_size_multiple": 64, "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
            "qkv_proj_bias": False, "reorder_and_upcast_attn": False, "resid_pdrop": 0.0, "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
            "rotary_scaling_factor": 2, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
            "summary_type": "cls_index", "summary_use_proj": True, "torch_dtype": "float32", "type_vocab_size": 2,
            "use_cache": True, "use_flash_attn": True, "use_rms_norm": False, "use_xentropy": True, "vocab_size": 30528,
        }, 2048,
    ),
    "Qwen/Qwen3-Embedding-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 32768,
            "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
            "use_sliding_window": False, "vocab_size": 151669,
        }, 32768,
    ),
    "google/embeddinggemma-300m": (
        {
            "_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": False,
            "attn_logit_softcapping": None, "dtype": "float32", "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 1152,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 4, "max_position_embeddings": 2048,
            "model_type": "gemma3_text", "num_attention_heads": 3, "num_hidden_layers": 24, "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0, "rope_scaling": None,
            "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": True, "vocab_size": 262144,
        }, 2048,
    ),
}  # fmt: skip
