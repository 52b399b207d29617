"""The vision part of a multimodal checkpoint: images become rows of a prompt.

The checkpoint's own processor and vision modules of transformers are used, with Quire's linears and attention. Each
image is computed alone, so its rows have the same bits in every prompt.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from quire.errors import ModelError, RequestError, check_installed
from quire.models.files import Files
from quire.models.image_turns import image_axes
from quire.models.text_part import UNREAD
from quire.ops import Backend

if TYPE_CHECKING:
    from PIL.Image import Image

# Types of models whose images are served. Image rows of the first have the positions and the causal mask of text.
PLAIN = frozenset("idefics3 internvl llava llava_onevision mistral3 smolvlm".split())
TURNED = frozenset("qwen2_5_vl qwen3_5 qwen3_5_moe qwen3_vl".split())  # image rows have positions in two dimensions
BOTH_WAYS = frozenset("gemma3 gemma4".split())  # rows of an image see one another, in some or in all layers
SERVED = PLAIN | TURNED | BOTH_WAYS
AUDIO = re.compile(r"(model\.)?\w*audio")  # of tensors' names


class EncodedImage(NamedTuple):
    """An image as rows of a prompt."""

    values: Tensor  # [N, H], on the host; see `quire.request.ImageRows`
    grid: tuple[int, int, int] | None  # N as frames, rows and columns, if rows have positions in two dimensions


def image_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of DecoderConfig that serve a model's images, given its config.json.

    Raises ModelError for settings of the images' positions that are not understood, and for too many deep layers.
    """
    if raw.get("model_type") not in TURNED:
        return {}
    text = raw.get("text_config") or raw
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    deep = (raw.get("vision_config") or {}).get("deepstack_visual_indexes") or ()
    if len(deep) >= (count := text.get("num_hidden_layers", math.inf)):
        raise ModelError(f"deepstack_visual_indexes has {len(deep)} entries, and the text part has {count} layers")
    return {"image_axes": image_axes(rope), "deep_layers": len(deep)}


class ImageEncoder:
    """Converts images to rows of a prompt."""

    def __init__(self, files: Files, dtype: torch.dtype, backend: Backend) -> None:
        """Load the processor and the vision part of a checkpoint. backend: one of a CPU, which computes it.

        Raises ModelError if the files of the processor are missing, or weights are missing or superfluous.
        """
        check_installed("images", "PIL")
        import transformers

        with files.for_transformers() as where:
            self.config = transformers.AutoConfig.from_pretrained(where, local_files_only=True)
            self.processor = _processor(files, where, self.config)
        self.placeholder = int(getattr(self.config, "image_token_id", None) or self.config.image_token_index)
        self._model = _vision_part(files, self.config, dtype, backend)
        self._takes = inspect.signature(self._model.get_image_features).parameters
        # A prompt's only image is divided into more rows than one of several.
        self.depends_on_count = "batch_num_images" in self._takes
        self._dtype = dtype
        # The layers in which rows of an image see one another.
        text = self.config.get_text_config()
        self.both_ways: Literal["no", "windowed", "all"] = "no"
        if self.config.model_type == "gemma3":
            self.both_ways = "all"
        elif getattr(text, "use_bidirectional_attention", None) == "vision":
            self.both_ways = "windowed"
        if getattr(text, "hidden_size_per_layer_input", 0) and text.pad_token_id != 0:
            raise ModelError(
                f"{files.path}: pad_token_id is {text.pad_token_id}; it must be 0, the token of which an image row has "
                "the per-layer embedding"
            )

    def tokenize(self, text: str, images: Sequence[Image]) -> list[int]:
        """Return the token ids of a rendered text, in which each image has a placeholder per row.

        Args:
            text: contains the model's mark of an image once for each of them.
            images: in the order of their marks.

        Raises:
            RequestError: the text has another number of marks, or the processor refuses an image.
        """
        try:
            found = self.processor(text=[text], images=[list(images)], add_special_tokens=False)
        except Exception as error:  # processors raise errors of many kinds
            raise RequestError(f"the images do not fit the prompt: {' '.join(str(error).split())[:300]}") from error
        return [int(token) for token in found["input_ids"][0]]

    def encode(self, image: Image, is_alone: bool) -> EncodedImage:
        """Compute the rows of an image.

        Args:
            image: the image, in RGB.
            is_alone: whether the prompt has no other image. Only some models use it, see `depends_on_count`.
        """
        images = [image] if is_alone or not self.depends_on_count else [image, image]
        given = self.processor(text=[self.processor.image_token * len(images)], images=[images], return_tensors="pt")
        taken = {
            name: value.to(self._dtype) if value.is_floating_point() else value
            for name, value in given.items()
            if name in self._takes
        }
        with torch.inference_mode():
            found = self._model.get_image_features(**taken)
        values = _joined(found.pooler_output[: 1 if len(images) > 1 else None])
        for deep in getattr(found, "deepstack_features", None) or ():
            values = torch.cat([values, _joined(deep)], 1)
        grid = None
        if self.config.model_type in TURNED:
            frames, height, width = given["image_grid_thw"][0].tolist()
            merged = self.config.vision_config.spatial_merge_size
            grid = frames, height // merged, width // merged
        return EncodedImage(values, grid)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts: [N, H]."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _processor(files: Files, where: Path, config: Any) -> Any:
    """Return the checkpoint's processor, without its parts for videos and sound. where: the files of its settings."""
    from transformers import AutoImageProcessor, AutoTokenizer

    kind = _processor_class(config)
    try:
        parts = {
            "image_processor": AutoImageProcessor.from_pretrained(where, local_files_only=True, backend="pil"),
            "tokenizer": AutoTokenizer.from_pretrained(where, local_files_only=True),
        }
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"{files.path}: its image processor cannot be read: {' '.join(str(error).split())[:300]}"
        ) from error
    # A subclass, since transformers' class requires the video processor, which requires torchvision.
    own = {
        "_get_arguments_from_pretrained": classmethod(
            lambda cls, *_, **__: [parts.get(name) for name in cls.get_attributes()]
        ),
        "check_argument_for_proper_class": lambda _, __, argument: type(argument),
    }
    processor: Any = type(kind.__name__, (kind,), own)
    return processor.from_pretrained(where, local_files_only=True)


def _processor_class(config: Any) -> Any:
    from transformers import Idefics3Config
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if config.vision_config.model_type != "pixtral":
        # SmolVLM's processor differs from that of Idefics3 only in videos, for which it requires a package.
        return PROCESSOR_MAPPING[Idefics3Config if config.model_type == "smolvlm" else type(config)]
    # Its module imports a function from one that requires torchvision. The module for Pillow has it, too.
    import transformers.models.pixtral.image_processing_pil_pixtral as same

    name = "transformers.models.pixtral.image_processing_pixtral"
    try:
        sys.modules.setdefault(name, same)
        return import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    finally:
        if sys.modules[name] is same:
            del sys.modules[name]


def _vision_part(files: Files, config: Any, dtype: torch.dtype, backend: Backend) -> Any:
    """Load the modules that compute image rows, without the text part."""
    from transformers import AutoModelForImageTextToText

    import quire.integrations.transformers  # noqa: F401  # registers the attention
    from quire.models.adapter.load import silence
    from quire.models.adapter.lora import CurrentLora
    from quire.models.adapter.modules import Packing, leave_files, replace_activations, replace_linears
    from quire.models.quantisation.policy import Quantisation

    kind = AutoModelForImageTextToText._model_mapping[type(config)]
    tensors = files.tensors()
    names = [name for name in tensors.names if UNREAD.match(name) and not AUDIO.match(name)]
    config = _without_layers(config)
    with silence():
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: tensors[name] for name in names},
            dtype=dtype,
            attn_implementation={"": "eager", "vision_config": "quire"},
            ignore_mismatched_sizes=True,  # the report has them
            output_loading_info=True,
        )
    faults = {
        "lacks {}": [name for name in report["missing_keys"] if UNREAD.match(name)],
        "has {}, which no module takes": report["unexpected_keys"],
        "has {}, not in the shape of its configuration": [name for name, *_ in report["mismatched_keys"]],
    }
    for what, names in faults.items():
        if names:
            raise ModelError(f"{files.path}: the vision part {what.format(min(names))}")
    model.eval()
    replace_patches(model)
    if config.model_type == "gemma3":
        _replace_product(model.model.multi_modal_projector)
    if config.vision_config.model_type == "pixtral":  # an image is computed alone, and none of its rows are hidden
        model.model.vision_tower.transformer.register_forward_pre_hook(
            lambda _, args, given: (args, given | {"attention_mask": None}), with_kwargs=True
        )
    replace_linears(model, Packing(backend.linears("cpu", False), Quantisation(), dtype, "cpu"), CurrentLora())
    replace_activations(model, backend)
    leave_files(model)
    return model.model


def _without_layers(config: Any) -> Any:
    """Return a copy of a config whose text part has no layers and almost no vocabulary."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 8, None
    if config.model_type == "gemma4":
        text.hidden_size_per_layer_input, config.audio_config = 0, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return config


def _replace_product(projector: Any) -> None:
    """Compute Gemma 3's product with a parameter by a linear, after one with the identity, which changes no number."""
    weight = projector.mm_input_projection_weight.detach()  # [hidden size of the vision part, H]
    projector.linear = nn.Linear(len(weight), weight.shape[1], bias=False, device="meta")
    projector.linear.weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
    projector.mm_input_projection_weight = nn.Parameter(torch.eye(len(weight), dtype=weight.dtype), requires_grad=False)
    projector.register_forward_hook(lambda module, _, found: module.linear(found))


def replace_patches(model: nn.Module) -> None:
    """Replace convolutions over separate patches by linears, which are batch-invariant."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in (nn.Conv2d, nn.Conv3d) and child.kernel_size == child.stride and child.groups == 1:
                setattr(module, name, _Patches(child))


class _Patches(nn.Module):
    """A linear of each patch of an image, or of several frames."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        weight = convolution.weight.detach()  # [out, C, *sides]
        self._sides = weight.shape[2:]
        self.linear = nn.Linear(weight[0].numel(), len(weight), device="meta")
        self.linear.weight = nn.Parameter(weight.flatten(1), requires_grad=False)
        self.linear.bias = convolution.bias
        self.weight = torch.empty_like(weight, device="meta")  # modules read its dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return the patches' values: [N, C, *sizes] -> [N, out, *(size / side)]."""
        n, c = x.shape[:2]
        counts = [size // side for size, side in zip(x.shape[2:], self._sides, strict=True)]
        for dim, (count, side) in enumerate(zip(counts, self._sides, strict=True), 2):
            x = x.narrow(dim, 0, count * side)
        split = [n, c, *(part for pair in zip(counts, self._sides, strict=True) for part in pair)]
        dims = range(len(counts))
        order = [0, *(2 + 2 * dim for dim in dims), 1, *(3 + 2 * dim for dim in dims)]
        patches = x.reshape(split).permute(order).reshape(n * math.prod(counts), -1)
        return cast(Tensor, self.linear(patches).view(n, *counts, -1).movedim(-1, 1))
