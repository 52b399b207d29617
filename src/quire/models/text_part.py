"""The text part of a checkpoint of several sides: its config.json and its tensors as if it were a model of its own.

What sees or hears is left alone: its keys are passed over, its tensors are never read, and a file with nothing else is
not even opened. Without an image the other sides add nothing, so the text part alone gives the logits of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ModelError
from quire.models.hf_config import IMMATERIAL, SCHEMES, SHOWN_KEYS, model_type, shown

# Types of models whose text part is known to compute the same alone: `python -m tests.models.sweep` compares each.
WHOLES = frozenset(
    """
    deepseek_vl deepseek_vl_hybrid exaone4_5 fuyu gemma3 gemma3n gemma4 gemma4_unified got_ocr2
    hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next
    llava_next_video llava_onevision minicpmv4_6 mistral3 nemotron_h_omni qwen2_5_vl qwen2_vl qwen3_5
    qwen3_5_moe qwen3_vl qwen4_exp smolvlm video_llama_3 video_llava vipllava
    """.split()
)
# Types of text parts that are an ordinary type but for positions in an image: in a text all of a token's are the same.
ORDINARY = {
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_5_moe_text": "qwen3_5_moe_text",
    "qwen3_5_text": "qwen3_5_text",
    "qwen3_vl_text": "qwen3",
}
# What a missing key means to these, where it is not what it means to the ordinary type.
QWEN2_VL = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80}
DEFAULTS: dict[str | None, Mapping[str, Any]] = {
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen2_vl_text": QWEN2_VL,
    "qwen3_vl_text": {"rope_theta": 500_000.0, "max_position_embeddings": 128_000},
}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # their published configs have the text's keys among their own
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")  # of a rope
# What a text part would call its architecture if it were published alone, by type.
ARCHITECTURES = {
    "exaone4": "Exaone4ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Keys of the whole that also hold for its text part, where they are given.
SHARED = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings", *SCHEMES)
# Keys of the whole that speak of its other sides.
OTHER_SIDES = re.compile(
    r"\w*(image|video|vision|visual|audio|speech|speaker|projector|projection|alignment|adapter|boi|eoi|boa|eoa|mm_|"
    r"spatial|patch|pixel|downsample|merge|insert_layer|grid|tile|frame|qformer|perceiver|_config$)\w*|scale_factor"
    r"|_pad_token_id|num_channels"
)
# How tensors of the text part begin in the files -> in a model of its own, the first that fits.
PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("language_model.", "model."),
)
LONGEST_NAME = 1000  # characters
# How tensors of the other sides begin.
UNREAD = re.compile(
    r"(model\.)?(\w*(vision|visual|video|audio|image|projector|perceiver|qformer|merger)\w*|vit|connector|aligner|vqmodel|"
    r"generation_\w+|high_res_\w+)(\.|$)"
)


@dataclass(frozen=True)
class TextPart:
    """Where it stands in its checkpoint."""

    whole: str  # the type of the whole

    def name(self, tensor: str) -> str | None:
        """Return a tensor's name in a model of its own; None: it is not of the text part.

        Raises ModelError for a name that is longer than any.
        """
        _check_length("a tensor", tensor)
        for theirs, ours in PREFIXES:
            if tensor.startswith(theirs):
                return ours + tensor.removeprefix(theirs)
        return None if UNREAD.match(tensor) else tensor

    def __str__(self) -> str:
        return f"text part of {self.whole}"


def text_part(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], TextPart | None]:
    """The config.json of what is served of a model, and where that stands; None: it is the whole.

    raw: the model's config.json. Raises ModelError for a key of the whole that neither speaks of its other sides nor
    is known to say nothing: the text may not be what it is alone.
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
    """Raise ModelError for a name that is too long for the patterns here, whose time grows with its square."""
    if len(name) > LONGEST_NAME:
        raise ModelError(f"{what} has a name of {len(name)} characters; it must have at most {LONGEST_NAME}")


def _check_keys(raw: Mapping[str, Any], text: Mapping[str, Any], whole: str) -> None:
    """Raise ModelError for a key of the whole of which nothing is known."""
    unknown = {
        key: value
        for key, value in raw.items()
        if value is not None
        and key not in IMMATERIAL
        and key not in SHARED
        and not OTHER_SIDES.fullmatch(key)
        and value != text.get(key)  # some say it twice
    }
    if unknown:
        listed = ", ".join(f"{key}={shown(value)}" for key, value in sorted(unknown.items())[:SHOWN_KEYS])
        raise ModelError(
            f"config.json has keys that are not known of a {whole}: {listed}. What concerns its text belongs into "
            "text_config"
        )


def _alone(raw: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that a text part would have if it were a model of its own."""
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
    """A rope of positions in an image, as it is for text."""
    kept = {key: value for key, value in rope.items() if key not in IMAGE_POSITIONS}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in kept.items()
    }
