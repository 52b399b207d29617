"""Shrinking a model's config for a trial: the same kinds of layers, each with a few dozen numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HEAD_DIM, ROPE_DIM, HIDDEN, INNER, VOCAB, EXPERTS, WINDOW = 16, 8, 64, 48, 96, 4, 5
LAYERS = 4

# Pattern of a key -> its new value. The first match applies. Sizes that are null stay null.
SIZES: tuple[tuple[str, int], ...] = (
    (r"qk_rope_head_dim|index_head_dim|rotary_dim|attn_rotary_emb", ROPE_DIM),
    (r"(global_|swa_|cross_|attention_|v_|qk_nope_|kv_)*(head_dim|head_size|kv_channels)(_v)?|v_head_dim", HEAD_DIM),
    (r"qk_head_dim", HEAD_DIM + ROPE_DIM),
    (r"num_experts_per_tok\w*|moe_k|moe_top_?k|top_?k_experts|num_experts_per_token|experts_per_token|moe_topk", 2),
    (r"mamba_d_head|mamba_d_state", HEAD_DIM),
    (r"(num|n|moe_num)_(local_|routed_)?experts|num_local_experts", EXPERTS),
    (r"zero_expert_num", 1),
    (r"n_group|topk_group|num_expert_group\w*|n_shared_experts|num_shared_experts?|moe_num_shared_experts", 1),
    (r"q_lora_rank|kv_lora_rank|\w+_lora_rank|attention_rank|laurel_rank|altup_\w*rank", 16),
    (r"hidden_size_per_layer_input", 8),
    (r"vocab_size(_per_layer_input)?", VOCAB),
    (r"max_position_embeddings", 2**20),  # limited because tables of angles have a row for each
    (
        r"(sliding_window|window_size|attention_window|local_attention|sliding_window_size|keep_window_size|attention_chunk_size|index_topk)",
        WINDOW,
    ),
    (r"embedding_size|hidden_size|d_model|n_embd|word_embed_proj_dim|dim_model|block_dim|conv_dim(_out)?", HIDDEN),
    (
        r"\w*(intermediate|ffn_hidden|expert|mlp)_(size|dim)|(block_)?ff_dim|ffn_dim|d_ff|n_inner|\w*expert_ff_size",
        INNER,
    ),
    (r"first_k_dense_replace|num_dense_layers", 1),
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model")
KV_HEADS = ("num_key_value_heads", "multi_query_group_num", "num_kv_heads", "n_head_kv", "kv_n_heads")
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
LISTED = ("attn_layer_indices", "full_attn_idxs", "mlp_only_layers", "moe_layers")  # indices of layers of one kind
PATTERN = "hybrid_override_pattern"  # a letter for each layer
TOKENS = re.compile(r"\w+_token_ids?")
FACTORS = ("short_factor", "long_factor")  # of longrope, one per rotated pair


def shrink(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small version of a config.json's content.

    It keeps layers of every kind that its lists distinguish, and at least four layers if the model has them.
    """
    depth = next((raw[key] for key in DEPTH if isinstance(raw.get(key), int)), 0)
    chosen = _chosen_layers(raw, depth)
    return {key: _small(key, value, raw, depth, chosen) for key, value in raw.items()}


def _chosen_layers(raw: Mapping[str, Any], depth: int) -> list[int]:
    lists = [list(raw[PATTERN])] if isinstance(raw.get(PATTERN), str) else []
    lists += [value for value in raw.values() if isinstance(value, list) and len(value) == depth]
    if own := raw.get("per_layer_config"):
        lists.append([own.get(layer, own.get(str(layer))) for layer in range(depth)])
    lists += [[layer in raw[key] for layer in range(depth)] for key in LISTED if isinstance(raw.get(key), list)]
    kinds = [tuple(str(values[layer]) for values in lists) for layer in range(depth)]
    # Keep the first and the last of each kind, as late layers may share the keys of early ones.
    backwards = kinds[::-1]
    chosen = {layer for kind in set(kinds) for layer in (kinds.index(kind), depth - 1 - backwards.index(kind))}
    for layer in range(depth):
        if len(chosen) >= LAYERS:
            break
        chosen.add(layer)
    return sorted(chosen)


def _small(key: str, value: Any, raw: Mapping[str, Any], depth: int, chosen: list[int]) -> Any:
    if key == "per_layer_config":
        by_layer = {int(layer): content for layer, content in value.items()}
        return {
            i: {name: _small(name, size, {**raw, **by_layer[layer]}, 0, []) for name, size in by_layer[layer].items()}
            for i, layer in enumerate(chosen)
            if layer in by_layer
        }
    if isinstance(value, dict):
        return {inner: _small(str(inner), content, {**raw, **value}, depth, chosen) for inner, content in value.items()}
    if key in FACTORS and isinstance(value, list):
        rotated = ROPE_DIM if "qk_rope_head_dim" in raw else HEAD_DIM
        pairs = int(rotated * (raw.get("partial_rotary_factor") or 1.0)) // 2
        return (value * pairs)[:pairs]
    if key == "mrope_section" and isinstance(value, list):
        pairs = int(HEAD_DIM * (raw.get("partial_rotary_factor") or 1.0)) // 2
        return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    if key in LISTED and isinstance(value, list):
        return [i for i, layer in enumerate(chosen) if layer in value]
    if isinstance(value, list) and depth and len(value) == depth:
        return [_small(key, value[layer], raw, 0, chosen) for layer in chosen]
    if key == PATTERN and isinstance(value, str):
        return "".join(value[layer] for layer in chosen)
    if key == "attention_head_dim":  # of Nemotron-H, whose code has it under another name
        return value
    if TOKENS.fullmatch(key):
        ids = value if isinstance(value, list) else [value]
        small = [token % VOCAB if isinstance(token, int) else token for token in ids]
        return small if isinstance(value, list) else small[0]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if key in DEPTH:
        return len(chosen)
    if key == "num_kv_shared_layers":
        return sum(layer >= depth - value for layer in chosen)
    if key == "head_dim" and "qk_rope_head_dim" in raw:  # in DeepSeek-like models, head_dim is the rotated part
        return HEAD_DIM + ROPE_DIM if "shared_experts_intermediate_size" in raw else ROPE_DIM  # of dots.note: all
    if key == "mamba_d_head":
        return HEAD_DIM
    if key == "mamba_d_ssm":
        return int(raw.get("mamba_expand", 2) * HIDDEN)
    if key == "mamba_n_heads" or (key == "num_heads" and "expand" in raw):  # the heads must fill the mixer's width
        return int(raw.get("mamba_expand", raw.get("expand", 2)) * HIDDEN) // HEAD_DIM
    if key in (*HEADS, *KV_HEADS) and any(raw.get(width, HIDDEN) < HIDDEN for width in WIDTHS):
        return value  # the heads divide a width that is not changed
    if key in HEADS:
        return HIDDEN // HEAD_DIM
    if key in KV_HEADS:
        heads = next((raw[name] for name in HEADS if isinstance(raw.get(name), int)), value)
        return HIDDEN // HEAD_DIM if value >= heads else 1 if value == 1 else 2
    found = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), value)
    if found == WINDOW and value >= (raw.get("max_position_embeddings") or value + 1):
        return value  # a window that no sequence exceeds stays without effect
    if found == HEAD_DIM and value != raw.get("head_dim", value) and "v_head_dim" not in raw:
        found *= 2  # head sizes that differ between layers stay different
    return min(value, found)
