"""A sandbox's program: decode images with Pillow.

Files of images are untrusted, and their decoders are C code that may use any time and memory. The sandbox loads this
file by its path, so it imports nothing from quire.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from io import BytesIO
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_ERROR = 300  # characters of an error


def prepare(max_pixels: int) -> Callable[[str], dict[str, Any]]:
    """Return the function that decodes: a request is the base64 of a file of an image.

    The answer has "size", the width and height in pixels, and "rgb", the base64 of the pixels; or "error".
    """
    Image.MAX_IMAGE_PIXELS = None  # the size is checked here, before anything is decoded

    def decode(data: str) -> dict[str, Any]:
        try:
            with Image.open(BytesIO(b64decode(data)), formats=FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels:
                    return {"error": f"it has {width} x {height} pixels; it must have at most {max_pixels:,}"}
                rgb = opaque(ImageOps.exif_transpose(image))
        except MemoryError:
            raise
        except Exception as error:  # decoders raise errors of many kinds
            message = " ".join(str(error).split())[:MAX_ERROR]
            if isinstance(error, UnidentifiedImageError):
                message = f"it must be one of {', '.join(FORMATS)}"
            return {"error": message or type(error).__name__}
        return {"size": rgb.size, "rgb": b64encode(rgb.tobytes()).decode()}

    return decode


def opaque(image: Image.Image) -> Image.Image:
    """Return an image's first frame in RGB, on a white background where it is transparent."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels are of the mode {image.mode}; it must have 8 bits a channel")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA"):
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(background, image).convert("RGB")
    return image.convert("RGB")
