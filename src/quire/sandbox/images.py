"""Images in untrusted files, decoded in a separate process with limits."""

from __future__ import annotations

import stat
from base64 import b64decode, b64encode
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import RequestError
from quire.sandbox.process import Died, Limits, OutOfTime, Sandbox

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 2**24  # of an image
MAX_BYTES = 2**25  # of a file
MAX_SECONDS = 10.0  # of CPU time; a photo of MAX_PIXELS takes one
MAX_WAIT = 5  # factor of MAX_SECONDS for the wall time, if the machine has other work
MEMORY = 2**29  # bytes: an image of MAX_PIXELS in RGBA, three times, and its base64
PROGRAM = Path(__file__).with_name("image_program.py")  # imports Pillow


class ImageDecoder:
    """Decodes images. Any number of threads may use it; the process starts with the first image."""

    def __init__(self) -> None:
        limits = Limits(
            seconds=MAX_WAIT * MAX_SECONDS,
            cpu_seconds=MAX_SECONDS,
            memory=MEMORY,
            stack=2**23,
            answer=4 * MAX_PIXELS + 4096,  # base64 of three bytes per pixel
        )
        self._sandbox = Sandbox(1, PROGRAM, limits, MAX_PIXELS)

    def decode(self, data: bytes) -> Image:
        """Return an image in RGB, upright, on a white background where it is transparent.

        Args:
            data: a file in a format of `image_program.FORMATS`, at most MAX_BYTES long.

        Raises:
            RequestError: the file is too long, broken, no image, or has too many pixels.
        """
        from PIL import Image

        if len(data) > MAX_BYTES:
            raise RequestError(f"an image has {len(data):,} bytes; it must have at most {MAX_BYTES:,}")
        try:
            found = self._sandbox.ask(b64encode(data).decode())
        except (OutOfTime, Died) as error:
            raise RequestError(f"an image cannot be decoded: {error}") from error
        if "error" in found:
            raise RequestError(f"an image cannot be decoded: {found['error']}")
        return Image.frombytes("RGB", tuple(found["size"]), b64decode(found["rgb"]))

    def close(self) -> None:
        """End the process."""
        self._sandbox.close()


def read_file(path: Path) -> bytes:
    """Return the bytes of an image's file. Raises RequestError if it is no regular file, or longer than MAX_BYTES."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise RequestError(f"the image {str(path)[:200]!r} is no regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except RequestError:
        raise
    except (OSError, ValueError) as error:
        raise RequestError(f"the image {str(path)[:200]!r} cannot be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise RequestError(f"the image {str(path)[:200]!r} has more than {MAX_BYTES:,} bytes, which is the most")
    return data
