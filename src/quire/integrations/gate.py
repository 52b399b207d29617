"""Known reasons why a transformers model cannot run over a paged cache, found before it is run."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

# Arguments of an attention function that do not change its result.
HARMLESS = frozenset(
    "cache_position deterministic logits_to_keep max_length_k max_length_q num_items_in_batch output_hidden_states "
    "output_router_logits position_embeddings return_dict use_cache".split()
)
# Kinds of layers whose rows see all earlier keys, or a window of them.
SERVED_LAYERS = {"full_attention", "sliding_attention"}
# Kinds of layers whose rows see some earlier keys, by a mask of transformers.
MASKED_LAYERS = {"chunked_attention"}
# Models of several parts whose class of a causal language model computes a text without the others.
WRITES_ALONE = {"git", "moshi"}
# Descriptions of other kinds, if clearer than their names.
OTHER_LAYERS = {
    "chunked_attention": "chunked attention, whose rows see only the keys in the same chunk",
    "compressed_sparse_attention": "sparse attention over compressed keys",
    "heavily_compressed_attention": "attention over compressed keys",
    "minimax_m3_sparse": "sparse attention over chosen blocks",
    "indexed_attention": "sparse attention over chosen keys",
    "linear_attention": "linear attention, which keeps a state",
    "conv": "convolutions, which keep a state",
    "hybrid": "attention and a part that keeps a state",
    "hybrid_sliding": "attention and a part that keeps a state",
}


def attention_refusal(model: type, config: Any, served: set[str] | None = None) -> str | None:
    """Return the reason why a model would not use an attention function that is registered, or None if it would.

    Args:
        model: the class of a transformers model.
        config: its configuration.
        served: the kinds of layers that the function supports; None: all that OTHER_LAYERS does not name.
    """
    for kind in getattr(config.get_text_config(), "layer_types", None) or ():
        if kind in OTHER_LAYERS if served is None else kind not in served:
            return f"it has layers of {OTHER_LAYERS.get(kind, kind)}"
    try:
        source = inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):
        return (
            f"the source of its module {model.__module__} cannot be read, so it is not known whether its attention "
            "goes through transformers' AttentionInterface"
        )
    if re.search(r"_CLASSES\[(self\.)?config\._attn_implementation\]", source):
        return "its module picks one of several attention classes by the name of the implementation"
    # A module without its own attention class is composed of other models, which are checked separately.
    own = re.search(r"^class (\w*Attention\w*)\(", source, re.MULTILINE)
    if own and "ALL_ATTENTION_FUNCTIONS" not in source:
        return f"its {own[1]} computes attention itself and never calls transformers' AttentionInterface"
    return None


def refusal(model: type, config: Any) -> str | None:
    """Return the reason why a causal language model of transformers cannot be served, or None if no reason is known.

    Args:
        model: the class of the model.
        config: its configuration.
    """
    if getattr(config, "quantization_config", None):
        return "its weights are quantised"
    if getattr(config, "is_encoder_decoder", False):
        return "it is the decoder of an encoder-decoder model"
    towers = [name for name in getattr(config, "sub_configs", {}) if re.search("vision|audio|vq|depth|text", name)]
    if towers and config.model_type not in WRITES_ALONE:
        return f"it is made of several models ({', '.join(towers)}); only text models are served"
    if getattr(model, "_is_stateful", False):
        return "it keeps a state in addition to keys and values"
    if getattr(config, "attention_type", None) == "block_sparse":
        return "its attention is sparse in long sequences; 'original_full' would be served as its attention_type"
    for kind in getattr(config.get_text_config(), "layer_types", None) or ():
        if kind not in SERVED_LAYERS and kind not in MASKED_LAYERS:
            return f"it has layers of {OTHER_LAYERS.get(kind, kind)}"
    return None


def together_refusal(model: type, config: Any) -> str | None:
    """Return the reason why a model cannot process the sequences of a step in one call, or None if no reason is known.

    Args:
        model: the class of a model for which `refusal` returned None.
        config: its configuration.
    """
    if not getattr(model, "_supports_attention_backend", False):
        return "transformers does not let its attention be replaced"
    if "position_ids" not in inspect.signature(model.forward).parameters:  # type: ignore[attr-defined]
        return "it cannot be given the positions of its tokens"
    return attention_refusal(model, config, SERVED_LAYERS)
