"""The vision part of a model in GGUF: a separate file, which llama.cpp calls mmproj.

Its metadata and tensors become those of a checkpoint of transformers, whose image processor and modules compute images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.gguf.file import GgufFile
from quire.models.gguf.metadata import Metadata
from quire.ops.weights.gguf_blocks import FLOATS, weight_of

ARCHITECTURE = "clip"
IN_LAYER = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}  # names in files of llama.cpp's first converters
# Keys that every file may have, without effect here.
UNUSED = ("has_vision_encoder", "has_text_encoder", "has_llava_projector", "vision.image_size")
MOST_PIXELS = 2**24  # of an image, after it is resized
LARGEST_WINDOW = 2**12  # pixels


class Vision(NamedTuple):
    """The configuration of a vision part."""

    whole: Mapping[str, Any]  # keys of the whole model's config.json
    vision: Mapping[str, Any]  # keys of its vision_config
    pixels: Mapping[str, Any]  # settings of the image processor
    shapes: Mapping[str, tuple[int, ...]]  # of the projector's weights


@dataclass(frozen=True, kw_only=True)
class Projector:
    """The conversion of a kind of vision part."""

    model_type: str  # of the whole model in a config.json
    text_type: str  # of its text part
    text_architecture: str  # of the text part's GGUF file
    processor: str  # transformers' image processor
    read: Callable[[Metadata, dict[str, Any]], Vision]  # takes the metadata and the vision part's usual sizes
    prefix: str  # of the names in `layer`
    layer: Mapping[str, str]  # names of a layer's tensors, without .weight and .bias
    ends: Mapping[str, str]  # names outside the layers, without .weight and .bias unless these differ
    # Part of a name -> those of the tensors that are one tensor in other checkpoints.
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    less_one: frozenset[str] = frozenset()  # tensors of which 1 must be subtracted
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys -> the only value that each may have
    image_token: str  # of each row of an image
    tokens: Mapping[str, str]  # keys of config.json -> special tokens
    named: Mapping[str, str] = field(default_factory=dict)  # attributes of the tokenizer -> special tokens


def _qwen(metadata: Metadata, sizes: dict[str, Any]) -> Vision:
    heads, depth, patch = sizes["num_attention_heads"], sizes["num_hidden_layers"], sizes["patch_size"]
    if sizes["hidden_size"] % (4 * heads):
        raise metadata.error("vision.attention.head_count", heads, "of heads with a multiple of 4 values")
    merge = metadata.integer("vision.spatial_merge_size", 2)
    window, every = metadata.integer("vision.window_size", 112), metadata.count("vision.n_wa_pattern")
    if not merge * patch <= window <= LARGEST_WINDOW:
        raise metadata.error("vision.window_size", window, f"pixels from {merge * patch} to {LARGEST_WINDOW}")
    # Converters do not store the limits of the published checkpoints.
    most = metadata.integer("vision.image_max_pixels", 16384 * 28 * 28)
    least = metadata.integer("vision.image_min_pixels", min(most, 4 * 28 * 28))
    if not least <= most <= MOST_PIXELS:
        raise metadata.error("vision.image_max_pixels", most, f"from image_min_pixels, {least}, to {MOST_PIXELS}")
    vision = {
        "depth": depth,
        "num_heads": heads,
        "out_hidden_size": metadata.integer("vision.projection_dim"),
        "spatial_merge_size": merge,
        "window_size": window,
        "fullatt_block_indexes": list(range(every - 1, depth, every) if every else range(depth)),
    }
    pixels = {"patch_size": patch, "merge_size": merge, "size": {"shortest_edge": least, "longest_edge": most}}
    joined = sizes["hidden_size"] * merge**2
    shapes = {"mm.0.weight": (joined, joined), "mm.2.weight": (vision["out_hidden_size"], joined)}
    return Vision({}, sizes | vision, pixels, shapes)


def _gemma(metadata: Metadata, sizes: dict[str, Any]) -> Vision:
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise metadata.error("vision.attention.head_count", sizes["num_attention_heads"], "a divisor of the width")
    size, scale = metadata.integer("vision.image_size"), metadata.integer("vision.projector.scale_factor", 4)
    side = size // sizes["patch_size"]
    positions = metadata.file.tensors.get("v.position_embd.weight")
    if positions is None or positions.shape[0] != side**2 or side % scale:
        raise metadata.error("vision.image_size", size, f"a multiple of {scale} patches, for v.position_embd.weight")
    rows = (side // scale) ** 2
    vision = {
        "model_type": "siglip_vision_model",
        "image_size": size,
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon", 1e-6),
        "vision_use_head": False,
    }
    pixels = {"size": {"height": size, "width": size}, "image_seq_length": rows}
    shapes = {"mm.input_projection.weight": (sizes["hidden_size"], metadata.integer("vision.projection_dim"))}
    return Vision({"mm_tokens_per_image": rows}, sizes | vision, pixels, shapes)


PROJECTORS = {
    "qwen2.5vl_merger": Projector(
        model_type="qwen2_5_vl",
        text_type="qwen2_5_vl_text",
        text_architecture="qwen2vl",
        processor="Qwen2VLImageProcessor",
        read=_qwen,
        prefix="visual.blocks.{}.",
        layer={
            "ln1": "norm1",
            "ln2": "norm2",
            "attn_q": "attn.qkv",
            "attn_out": "attn.proj",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        ends={
            "v.patch_embd": "visual.patch_embed.proj",
            "v.post_ln": "visual.merger.ln_q",
            "mm.0": "visual.merger.mlp.0",
            "mm.2": "visual.merger.mlp.2",
        },
        joined={
            ".attn_q.": (".attn_q.", ".attn_k.", ".attn_v."),
            "v.patch_embd.weight": ("v.patch_embd.weight", "v.patch_embd.weight.1"),  # of two frames
        },
        fixed={"use_silu": True, "vision.attention.layer_norm_epsilon": 1e-6},
        image_token="<|image_pad|>",
        tokens={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
    ),
    "gemma3": Projector(
        model_type="gemma3",
        text_type="gemma3_text",
        text_architecture="gemma3",
        processor="Gemma3ImageProcessor",
        read=_gemma,
        prefix="vision_tower.vision_model.encoder.layers.{}.",
        layer={
            "ln1": "layer_norm1",
            "ln2": "layer_norm2",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_out": "self_attn.out_proj",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        ends={
            "v.patch_embd": "vision_tower.vision_model.embeddings.patch_embedding",
            "v.position_embd": "vision_tower.vision_model.embeddings.position_embedding",
            "v.post_ln": "vision_tower.vision_model.post_layernorm",
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        less_one=frozenset({"mm.soft_emb_norm.weight"}),
        fixed={"use_gelu": True},
        image_token="<image_soft_token>",
        tokens={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
}
TEXT_ARCHITECTURES = frozenset(projector.text_architecture for projector in PROJECTORS.values())


class Mmproj:
    """The file of a vision part."""

    def __init__(self, path: Path, text: Metadata) -> None:
        """Open a file. text: the metadata of the text part's file.

        Raises ModelError if it is malformed, if its projector is not supported, or if it belongs to another text part.
        """
        self.path, self._file = path, GgufFile(path)
        metadata = Metadata(self._file)
        if metadata.architecture != ARCHITECTURE:
            raise ModelError(
                f"{path} has the architecture {metadata.architecture!r}; the file of a vision part has {ARCHITECTURE!r}"
            )
        name = metadata.get("projector_type", metadata.get("vision.projector_type"))
        if not isinstance(name, str) or name not in PROJECTORS:
            raise metadata.error("projector_type", name, f"one of {', '.join(PROJECTORS)}, of which images are served")
        self.projector = PROJECTORS[name]
        if text.architecture != self.projector.text_architecture:
            raise ModelError(
                f"{path} has the projector {name!r}, for the architecture {self.projector.text_architecture!r}, and "
                f"{text.file.path} has {text.architecture!r}; give the vision part of the same model"
            )
        width, wanted = metadata.integer("vision.projection_dim"), text.integer("embedding_length")
        if width != wanted:
            raise ModelError(
                f"{path} has rows of {width} values, and {text.file.path} {wanted}; give the vision part of the same "
                "model"
            )
        for key, value in self.projector.fixed.items():
            if metadata.get(key, value) != value:
                raise metadata.error(key, metadata.get(key), f"{value} with the projector {name!r}")
        for key in UNUSED:
            metadata.get(key)
        sizes = _sizes(metadata)
        self.vision = self.projector.read(metadata, sizes)
        _check_shapes(self._file, sizes, self.vision.shapes)
        self._colours = {f"image_{key}": _colours(metadata, f"vision.image_{key}") for key in ("mean", "std")}
        metadata.finish()
        self._sources = dict(self._placed(sizes["hidden_size"]))

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors in other checkpoints."""
        return frozenset(self._sources)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor's numbers, dequantised."""
        first, *rest = self._sources[name]
        if missing := [one for one in rest if one not in self._file.tensors]:
            raise ModelError(f"{self.path} has {first}, and no {missing[0]}")
        parts = [self._numbers(one) for one in (first, *rest)]
        if not rest:
            return parts[0] - 1.0 if first in self.projector.less_one else parts[0]
        if len({part.shape for part in parts}) > 1:
            raise ModelError(f"{self.path}: {first} is {list(parts[0].shape)}; {' and '.join(rest)} must be as large")
        return torch.stack(parts, 2) if parts[0].dim() == 4 else torch.cat(parts)

    def whole(self, text: Mapping[str, Any], sections: list[int]) -> dict[str, Any]:
        """Return the config.json of the whole model.

        Args:
            text: that of the text part. Its dtype and its weight format are those of the whole.
            sections: the pairs of dimensions that each axis of an image's position rotates; empty: there are no axes.
        """
        part = {**text, "model_type": self.projector.text_type}
        if sections:
            part["rope_parameters"] = {**(text.get("rope_parameters") or {}), "mrope_section": sections}
        shared: dict[str, Any] = {key: part.pop(key) for key in ("dtype", "quantization_config") if key in part}
        return {
            "model_type": self.projector.model_type,
            "text_config": part,
            "vision_config": dict(self.vision.vision),
            **self.vision.whole,
            **shared,
        }

    def preprocessor(self) -> dict[str, Any]:
        """Return the settings of the image processor in the form of a preprocessor_config.json."""
        return {"image_processor_type": self.projector.processor, **self._colours, **self.vision.pixels}

    def _placed(self, width: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the name of each tensor in other checkpoints, and the tensors of the file that it consists of."""
        projector = self.projector
        parts = {name: values for key, values in projector.joined.items() for name in values[1:]}
        for name in self._file.tensors:
            if any(part in name for part in parts):
                continue
            key = next((key for key in projector.joined if key in name), "")
            sources = tuple(name.replace(key, part) for part in projector.joined[key]) if key else (name,)
            match = IN_LAYER.fullmatch(name)
            if match is not None:
                base = match[2]
                if base in SWAPPED and self._is_swapped(match[1], width):
                    base = SWAPPED[base]
                found, suffix = projector.layer.get(base), f".{match[3]}"
                prefix = projector.prefix.format(match[1])
            else:
                base, _, kind = name.rpartition(".")
                prefix, found, suffix = "", projector.ends.get(base), f".{kind}"
                if name in projector.ends:
                    found, suffix = projector.ends[name], ""
            if found is None:
                raise ModelError(f"{self.path} has a tensor {name!r}, which is not understood of this projector")
            yield f"{prefix}{found}{suffix}", sources

    def _is_swapped(self, layer: str, width: int) -> bool:
        """Return whether a layer's ffn_down takes rows of the model's width, as ffn_up should."""
        down = self._file.tensors.get(f"v.blk.{layer}.ffn_down.weight")
        return down is not None and down.shape[-1] == width != down.shape[0]

    def _numbers(self, name: str) -> Tensor:
        info, rows = self._file.tensors[name], self._file.blocks(name)
        if info.kind in FLOATS:
            return rows.view(FLOATS[info.kind]).view(info.shape)
        found = weight_of(info.kind, rows, info.shape[-1], torch.float32)
        return (found if isinstance(found, Tensor) else found.dequantised()).view(info.shape)


def _sizes(metadata: Metadata) -> dict[str, Any]:
    """Return the sizes of a vision part, by their names in config.json."""
    tensors = metadata.file.tensors
    largest = max(max(info.shape) for info in tensors.values()) if tensors else 0
    keys = {
        "hidden_size": ("vision.embedding_length", largest),
        "intermediate_size": ("vision.feed_forward_length", largest),
        "num_hidden_layers": ("vision.block_count", len(tensors)),
        "num_attention_heads": ("vision.attention.head_count", largest),
        "patch_size": ("vision.patch_size", largest),
    }
    found = {name: metadata.integer(key) for name, (key, _) in keys.items()}
    for name, (key, most) in keys.items():
        if found[name] > most:
            raise metadata.error(key, found[name], f"at most {most}")
    return found


def _check_shapes(file: GgufFile, sizes: Mapping[str, int], ends: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError for a large weight that does not have its size, before anything of that size is allocated.

    Two dimensions may be in any order: see SWAPPED.
    """
    width, inner, side = sizes["hidden_size"], sizes["intermediate_size"], sizes["patch_size"]
    wanted = {"v.patch_embd.weight": (width, 3, side, side), **ends}
    for i in range(sizes["num_hidden_layers"]):
        wanted |= {f"v.blk.{i}.attn_out.weight": (width, width), f"v.blk.{i}.ffn_up.weight": (inner, width)}
    for name, shape in wanted.items():
        info = file.tensors.get(name)
        if info is None or sorted(info.shape) != sorted(shape):
            raise ModelError(f"{file.path}: {name} is {info and list(info.shape)}; it must be {list(shape)}")


def _colours(metadata: Metadata, key: str) -> list[float]:
    """Return a number for each of red, green and blue: the decimal numbers from before they were rounded to fp32."""
    value = metadata.get(key)
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3 or not all(isinstance(one, float) and abs(one) < 100 for one in values):
        raise metadata.error(key, value, "three numbers")
    return [float(str(np.float32(one))) for one in values]
