"""The vision part of a multimodal checkpoint: images become rows of a prompt.

The checkpoint's own processor and vision modules of transformers are used, with Quire's linears and attention. Each
image is computed alone, so its rows have the same bits in every prompt.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from quire.errors import ModelError, RequestError, check_installed
from quire.models.files import Files
from quire.models.text_part import UNREAD
from quire.ops import Backend

if TYPE_CHECKING:
    from PIL.Image import Image

# Types of models whose images are served: their image rows have the positions and the causal mask of text.
SERVED = frozenset("idefics3 internvl llava_onevision mistral3 smolvlm".split())
MOST_PIXELS = 2**25  # of one image


class ImageEncoder:
    """Converts images to rows of a prompt."""

    def __init__(self, files: Files, dtype: torch.dtype, backend: Backend, device: str) -> None:
        """Load the processor and the vision part of a checkpoint.

        Raises ModelError if the files of the processor are missing, or weights are missing or superfluous.
        """
        check_installed("images", "PIL")
        import transformers

        self.config = transformers.AutoConfig.from_pretrained(files.path, local_files_only=True)
        self.processor = _processor(files, self.config)
        self.placeholder = int(getattr(self.config, "image_token_id", None) or self.config.image_token_index)
        self._model = _vision_part(files, self.config, dtype, backend).to(device)
        self._takes = inspect.signature(self._model.get_image_features).parameters
        self._device, self._dtype = device, dtype

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

    def rows(self, image: Image) -> Tensor:
        """Return the rows of an image: [N, H], on the host.

        Raises RequestError if the image has more than MOST_PIXELS pixels.
        """
        if image.width * image.height > MOST_PIXELS:
            raise RequestError(
                f"an image has {image.width} x {image.height} pixels; it must have at most {MOST_PIXELS:,}"
            )
        given = self.processor.image_processor(images=[image], return_tensors="pt")
        taken = {
            name: value.to(self._device, self._dtype if value.is_floating_point() else None)
            for name, value in given.items()
            if name in self._takes
        }
        with torch.inference_mode():
            found = self._model.get_image_features(**taken).pooler_output
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in found]).cpu()


def _processor(files: Files, config: Any) -> Any:
    """Return the checkpoint's processor, without its parts for videos and sound."""
    from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Config
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    # SmolVLM's processor differs from that of Idefics3 only in videos, for which it requires a package.
    kind = PROCESSOR_MAPPING[Idefics3Config if config.model_type == "smolvlm" else type(config)]
    where = str(files.path)
    try:
        parts = {
            "image_processor": AutoImageProcessor.from_pretrained(where, local_files_only=True, backend="pil"),
            "tokenizer": AutoTokenizer.from_pretrained(where, local_files_only=True),
        }
        settings, _ = kind.get_processor_dict(where, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"{where}: its image processor cannot be read: {' '.join(str(error).split())[:300]}"
        ) from error
    # A subclass, since transformers' class requires the video processor, which requires torchvision.
    own = {
        "_get_arguments_from_pretrained": classmethod(
            lambda cls, *_, **__: [parts.get(name) for name in cls.get_attributes()]
        ),
        "check_argument_for_proper_class": lambda _, __, argument: type(argument),
    }
    return type(kind.__name__, (kind,), own).from_pretrained(where, local_files_only=True)


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
    config = _without_layers(config)
    with silence():
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: tensors[name] for name in tensors.names if UNREAD.match(name)},
            dtype=dtype,
            attn_implementation={"": "eager", "vision_config": "quire"},
            output_loading_info=True,
        )
    missing = sorted(name for name in report["missing_keys"] if UNREAD.match(name))
    superfluous = sorted(report["unexpected_keys"])
    if missing or superfluous:
        what = f"lacks {missing[0]}" if missing else f"has {superfluous[0]}, which no module takes"
        raise ModelError(f"{files.path}: the vision part {what}")
    model.eval()
    replace_patches(model)
    replace_linears(model, Packing(backend.linears("cpu", False), Quantisation(), dtype, "cpu"), CurrentLora())
    replace_activations(model, backend)
    leave_files(model)
    return model.model


def _without_layers(config: Any) -> Any:
    """Return a copy of a config whose text part has no layers and almost no vocabulary."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 8, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return config


def replace_patches(model: nn.Module) -> None:
    """Replace convolutions over separate patches by linears, which are batch-invariant."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Conv2d and child.kernel_size == child.stride and child.groups == 1:
                setattr(module, name, _Patches(child))


class _Patches(nn.Module):
    """A linear of each patch of an image."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        out_size, channels, self._height, self._width = convolution.weight.shape
        size = channels * self._height * self._width
        self.linear = nn.Linear(size, out_size, convolution.bias is not None, "meta")
        self.linear.weight = nn.Parameter(convolution.weight.detach().reshape(out_size, size), requires_grad=False)
        self.linear.bias = convolution.bias  # type: ignore[assignment]  # None, if it has none
        self.weight = torch.empty(convolution.weight.shape, dtype=convolution.weight.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """Return the patches' values: [N, C, H, W] -> [N, out, H / height, W / width]."""
        n, c = x.shape[:2]
        rows, columns = x.shape[2] // self._height, x.shape[3] // self._width
        x = x[:, :, : rows * self._height, : columns * self._width]
        parts = x.reshape(n, c, rows, self._height, columns, self._width).permute(0, 2, 4, 1, 3, 5)
        found = self.linear(parts.reshape(n * rows * columns, -1))
        return cast(Tensor, found.view(n, rows, columns, -1).permute(0, 3, 1, 2))
