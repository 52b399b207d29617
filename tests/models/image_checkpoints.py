"""Small random checkpoints of models that read images, with the files of their processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

EMBEDDED = Path(__file__).parents[2] / "src" / "quire" / "embedded" / "tokenizer.json"
END = "<|endoftext|>"
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
SIGLIP = {"model_type": "siglip_vision_model", **VISION, "image_size": 32, "patch_size": 8}
SQUARE = {"height": 32, "width": 32}
GRID = [[32, 32], [32, 64], [64, 32], [64, 64]]
QWEN_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "depth": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
}
QWEN_PIXELS = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
PIXTRAL = {"model_type": "pixtral", **VISION, "head_dim": 16, "image_size": 64, "patch_size": 8}
PIXTRAL_PIXELS = {"patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 64}}
PART = "{{ p.text if p.type == 'text' else 'MARK' }}"
TEMPLATE = "{% for m in messages %}{% for p in m.content %}" + PART + "{% endfor %}{% endfor %}"
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}

# Model type -> its mark of an image, further special tokens, the text part's type, the rest of config.json, settings of
# the image processor, and those of the processor.
Family = tuple[str, list[str], str, dict[str, Any], dict[str, Any], dict[str, Any]]
FAMILIES: dict[str, Family] = {
    "idefics3": (
        "<image>",
        ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
        + [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)],
        "llama",
        {"scale_factor": 2, "vision_config": {**VISION, "image_size": 32, "patch_size": 8}},
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        {"image_seq_len": 4},
    ),
    "internvl": (
        "<IMG_CONTEXT>",
        ["<img>", "</img>", "<video>"],
        "qwen2",
        {
            "vision_config": {**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
            "image_seq_length": 4,
        },
        {"size": SQUARE, "max_patches": 4},
        {"image_seq_length": 4},
    ),
    "llava_onevision": (
        "<image>",
        ["<video>"],
        "qwen2",
        {"vision_config": SIGLIP, "image_grid_pinpoints": GRID, "vision_feature_layer": -1},
        {"size": SQUARE, "image_grid_pinpoints": GRID},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "llava": (
        "<image>",
        [],
        "llama",
        {"vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": 32, "patch_size": 8}},
        {"size": {"shortest_edge": 32}, "crop_size": SQUARE},
        {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "pixtral": (
        "[IMG]",
        ["[IMG_BREAK]", "[IMG_END]"],
        "mistral",
        {"vision_config": PIXTRAL, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        PIXTRAL_PIXELS,
        {"patch_size": 8},
    ),
    "mistral3": (
        "[IMG]",
        ["[IMG_BREAK]", "[IMG_END]"],
        "mistral",
        {"vision_config": PIXTRAL, "spatial_merge_size": 2},
        PIXTRAL_PIXELS,
        {"patch_size": 8, "spatial_merge_size": 2},
    ),
    "gemma3": (
        "<start_of_image>",
        ["<image_soft_token>", "<end_of_image>"],
        "gemma3_text",
        {"vision_config": SIGLIP, "mm_tokens_per_image": 16},
        {"size": SQUARE, "image_seq_length": 16},
        {"image_seq_length": 16},
    ),
    "gemma4": (
        "<|image|>",
        ["<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"],
        "gemma4_text",
        {
            "vision_config": {
                **VISION,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "audio_config": None,
        },
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        {},
    ),
    "qwen2_5_vl": (
        "<|image_pad|>",
        ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
        "qwen2_5_vl_text",
        {"vision_config": {**QWEN_VISION, "out_hidden_size": 64, "window_size": 32, "fullatt_block_indexes": [1]}},
        QWEN_PIXELS,
        {},
    ),
    "qwen3_vl": (
        "<|image_pad|>",
        ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
        "qwen3_vl_text",
        {
            "vision_config": {
                **QWEN_VISION,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            }
        },
        QWEN_PIXELS,
        {},
    ),
    "qwen3_5": (
        "<|image_pad|>",
        ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
        "qwen3_5_text",
        {"vision_config": {**QWEN_VISION, "out_hidden_size": 64, "num_position_embeddings": 16}},
        QWEN_PIXELS,
        {},
    ),
}
mark, others, _, *rest = FAMILIES["qwen3_5"]
FAMILIES["qwen3_5_moe"] = (mark, others, "qwen3_5_moe_text", *rest)  # type: ignore[assignment]
FAMILIES["smolvlm"] = FAMILIES["idefics3"]
OWN_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"rope_parameters": MROPE},
    "qwen3_vl": {"rope_parameters": {**MROPE, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}},
    "gemma3": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4": {
        "sliding_window": 50,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_bidirectional_attention": "vision",
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "pad_token_id": 0,
    },
    "qwen3_5": {
        "rope_parameters": {
            **MROPE,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
        },
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36} | {
    "shared_expert_intermediate_size": 40
}
OWN_TEXT["qwen3_5_moe"] = OWN_TEXT["qwen3_5"] | EXPERTS

# Model type -> names of its tokens, if they are not the usual ones.
NAMED = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    },
    "gemma4": {
        "boi_token": "<|image>",
        "image_token": "<|image|>",
        "eoi_token": "<image|>",
        "boa_token": "<|audio>",
        "audio_token": "<|audio|>",
        "eoa_token": "<audio|>",
    },
}


def save_images_model(directory: Path, kind: str) -> str:
    """Save a small random model of a type. Return its mark of an image."""
    mark, others, text, own, pixels, processor = FAMILIES[kind]
    named = NAMED.get(kind, {"image_token": mark, "video_token": "<video>"})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(EMBEDDED), eos_token=END, pad_token=END, extra_special_tokens=named
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [mark, *others]})
    tokenizer.save_pretrained(directory)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (mark, *others)}
    more = {} if "<|vision_start|>" not in ids else {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "video_token_id": ids["<|video_pad|>"],
    }  # fmt: skip
    text_config = {"model_type": text, **TEXT, "vocab_size": len(tokenizer), **OWN_TEXT.get(kind, {})}
    if kind == "gemma4":
        text_config["vocab_size_per_layer_input"] = len(tokenizer)
    config = AutoConfig.for_model(
        "llava" if kind == "pixtral" else kind,
        text_config=text_config,
        image_token_id=ids[named.get("image_token", mark)],
        **more,
        **own,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.1)
    model.save_pretrained(directory)
    names = IMAGE_PROCESSOR_MAPPING_NAMES[kind]
    name = names["pil"] if isinstance(names, dict) else names[0]
    image = getattr(transformers, name)(**pixels)
    image.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", mark), encoding="utf-8")
    return mark


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    """Return random images of several sizes."""
    random = np.random.default_rng(seed)
    sizes = [(64, 64), (40, 70), (90, 30), (33, 33)]
    return [Image.fromarray(random.integers(0, 256, (*sizes[i % len(sizes)], 3), dtype=np.uint8)) for i in range(count)]
