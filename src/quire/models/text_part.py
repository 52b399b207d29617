"""The text part of a multimodal checkpoint: its config.json and its tensors in the form of a standalone model.

The vision and audio parts are ignored: their keys are skipped, their tensors are never read, and a file that holds
nothing else is not opened. Without an image they add nothing, so the text part alone computes the logits of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ModelError
from quire.models.hf_config import IMMATERIAL, SCHEMES, SHOWN_KEYS, model_type, shown

# Model types whose text part alone is known to compute the same logits: `python -m tests.models.sweep` compares each.
WHOLES = frozenset(
    """
    deepseek_vl deepseek_vl_hybrid dots3_note emu3 exaone4_5 fuyu gemma3 gemma3n gemma4 gemma4_unified got_ocr2
    hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next
    llava_next_video llava_onevision minicpmv4_6 mistral3 mllama moss_transcribe_diarize nemotron_h_omni
    phi4_multimodal qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen4_exp smolvlm video_llama_3 video_llava
    vipllava
    """.split()
)
# Types of text parts that equal an ordinary type but for image positions: in text, all positions of a token are equal.
ORDINARY = {
    "emu3_text_model": "llama",
    "phi4_multimodal_text": "phi3",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_5_moe_text": "qwen3_5_moe_text",
    "qwen3_5_text": "qwen3_5_text",
    "qwen3_vl_text": "qwen3",
}
# Their default values of missing keys that differ from those of the ordinary type.
QWEN2_VL = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80}
DEFAULTS: dict[str | None, Mapping[str, Any]] = {
    "emu3_text_model": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "phi4_multimodal_text": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen2_vl_text": QWEN2_VL,
    "qwen3_vl_text": {"rope_theta": 500_000.0, "max_position_embeddings": 128_000},
}
# Their published configs have the text part's keys at the top level.
FLAT = ("qwen2_vl", "qwen2_5_vl", "phi4_multimodal")
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")  # of a rope
# Architecture of a standalone model, by the type of the text part.
ARCHITECTURES = {
    "dots3_note_text": "Dots3NoteForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Keys of the whole that also apply to its text part, if present.
SHARED = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings", *SCHEMES)
# Keys of the whole that configure its other modalities.
OTHER_SIDES = re.compile(
    r"\w*(image|video|vision|visual|audio|speech|speaker|projector|projection|alignment|adapter|boi|eoi|boa|eoa|mm_|"
    r"spatial|patch|pixel|downsample|merge|insert_layer|grid|tile|frame|qformer|perceiver|_config$)\w*|scale_factor"
    r"|_pad_token_id|num_channels|vocabulary_map"
)
# Prefix of the text part's tensors in the files -> in a standalone model. The first match applies.
PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("text_model.lm_head.", "lm_head."),
    ("text_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("language_model.", "model."),
)
LONGEST_NAME = 1000  # characters
# Prefixes of the tensors of other modalities.
UNREAD = re.compile(
    r"(model\.)?(\w*(vision|visual|video|audio|image|projector|perceiver|qformer|merger)\w*|vit|connector|aligner|vqmodel|"
    r"embed_tokens_extend|generation_\w+|high_res_\w+)(\.|$)"
)


@dataclass(frozen=True)
class TextPart:
    """The text part of a model, with the names of its tensors."""

    whole: str  # the type of the whole model

    def name(self, tensor: str) -> str | None:
        """Return a tensor's name in a standalone model; None: it does not belong to the text part.

        Raises ModelError for a name longer than LONGEST_NAME.
        """
        _check_length("a tensor", tensor)
        for theirs, ours in PREFIXES:
            if tensor.startswith(theirs):
                return ours + tensor.removeprefix(theirs)
        return None if UNREAD.match(tensor) else tensor

    def __str__(self) -> str:
        return f"text part of {self.whole}"


def text_part(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], TextPart | None]:
    """Return the config.json of the served part of a model, and that part; None: the whole model is served.

    raw: the model's config.json. Raises ModelError for an unknown key of the whole, one that neither configures
    another modality nor is known to be immaterial: it may change the logits of a text.
    """
    whole = model_type(raw)
    if whole is None or whole not in WHOLES:
        return raw, None
    part = TextPart(whole)
    for key in raw:
        _check_length("config.json: a key", key)
    text = raw.get("text_config")
    if text is None and whole in FLAT:
        text = {key: value for key, value in raw.items() if not OTHER_SIDES.fullmatch(key)}
        text |= {"model_type": f"{whole}_text"}
    elif not isinstance(text, dict):
        raise ModelError(f"config.json: text_config is {shown(text)}; a {whole} has an object there")
    else:
        _check_keys(raw, text, whole)
    return _alone(raw, text), part


def _check_length(what: str, name: str) -> None:
    """Raise ModelError for a name that is too long: the patterns here take quadratic time."""
    if len(name) > LONGEST_NAME:
        raise ModelError(f"{what} has a name of {len(name)} characters; it must have at most {LONGEST_NAME}")


def _check_keys(raw: Mapping[str, Any], text: Mapping[str, Any], whole: str) -> None:
    """Raise ModelError for an unknown key of the whole."""
    unknown = {
        key: value
        for key, value in raw.items()
        if value is not None
        and key not in IMMATERIAL
        and key not in SHARED
        and not OTHER_SIDES.fullmatch(key)
        and value != text.get(key)  # some configs repeat the text part's keys
    }
    if unknown:
        listed = ", ".join(f"{key}={shown(value)}" for key, value in sorted(unknown.items())[:SHOWN_KEYS])
        raise ModelError(
            f"config.json has keys that are not known of a {whole}: {listed}. Keys of its text part belong in "
            "text_config"
        )


def _alone(raw: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text part as a standalone model."""
    kind = model_type(text)
    alone = {**DEFAULTS.get(kind, {}), **text, **{key: raw[key] for key in SHARED if raw.get(key) is not None}}
    if kind in ORDINARY:
        kind = alone["model_type"] = ORDINARY[kind]
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(rope := alone.get(key), dict):
                alone[key] = _ordinary_rope(rope)
    alone["architectures"] = [ARCHITECTURES[kind]] if kind in ARCHITECTURES else None
    return alone


def _ordinary_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the RoPE parameters of image positions to those of text."""
    kept = {key: value for key, value in rope.items() if key not in IMAGE_POSITIONS}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in kept.items()
    }
