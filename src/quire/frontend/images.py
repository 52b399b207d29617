"""Images of prompts: from the parts of messages to rows of the model's input."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b, shake_256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from quire.errors import MissingPackage, ModelError, PromptTooLong, RequestError, check_installed
from quire.models.images import EncodedImage, ImageEncoder
from quire.request import ImageRows, ImageTurns
from quire.sandbox.images import MAX_PIXELS, ImageDecoder, read_file

if TYPE_CHECKING:
    from PIL.Image import Image

Source: TypeAlias = "str | Path | bytes | Image"  # a data URL, a path, a file's bytes, or an image

MAX_IMAGES = 64  # of a prompt
CACHE_BYTES = 2**28  # of rows of images that were encoded before
IMAGE_KEYS = {"image_url": "image_url", "input_image": "image_url", "image": "image", "image_pil": "image_pil"}


class PromptImages:
    """Tokenizes prompts with images. It is thread-safe.

    Args:
        load: loads the encoder, which the first image does.
        longest: the most tokens of a prompt.
    """

    def __init__(self, load: Callable[[], ImageEncoder], longest: int) -> None:
        self._load, self._longest = load, longest
        self._encoder: ImageEncoder | None = None
        self._decoder = ImageDecoder()
        self._rows: OrderedDict[bytes, EncodedImage] = OrderedDict()  # by the image's digest, the last used one last
        self._lock = threading.Lock()  # one image at a time is encoded

    def use(self, load: Callable[[], ImageEncoder]) -> None:
        """Compute images with another encoder from now on, and forget the rows of the one before. load: loads it."""
        with self._lock:
            self._load, self._encoder = load, None
            self._rows.clear()

    def tokenize(self, text: str, sources: Sequence[Source]) -> tuple[list[int], ImageRows]:
        """Return the tokens of a prompt, with a placeholder for each row of an image, and these rows.

        Args:
            text: contains the model's mark of an image once for each of them.
            sources: the images.

        Raises:
            RequestError: an image is invalid, or the number of marks differs from that of images.
            PromptTooLong: the prompt does not fit the model.
        """
        check_count(len(sources))
        try:
            images = [self._image(source) for source in sources]
        except MissingPackage as error:
            raise RequestError(f"images cannot be read: {error}") from error
        with self._lock:
            if self._encoder is None:
                try:
                    self._encoder = self._load()
                except (ModelError, MissingPackage) as error:
                    raise RequestError(f"this model's images cannot be read: {error}") from error
            tokens, both_ways = self._encoder.tokenize(text, images), self._encoder.both_ways
            if len(tokens) > self._longest:
                raise PromptTooLong(
                    f"the prompt has {len(tokens)} tokens with its images; it must have at most {self._longest}",
                    "prompt",
                )
            is_alone = len(images) == 1 or not self._encoder.depends_on_count
            parts = [self._encoded(self._encoder, image, is_alone) for image in images]
            [positions] = np.nonzero(np.array(tokens) == self._encoder.placeholder)
        values = parts[0].values if len(parts) == 1 else torch.cat([part.values for part in parts])
        if len(positions) != len(values):
            raise RequestError(
                f"the prompt has places for {len(positions)} rows of images, and the {len(images)} images have "
                f"{len(values)}; the mark of an image must not be written in a text"
            )
        digests = [_digest(part) for part in parts]
        counts = [len(part.values) for part in parts]
        first = positions[np.cumsum([0, *counts[:-1]])].tolist()
        rows = image_rows(tokens, self._encoder.placeholder, list(zip(first, digests, strict=True)))
        runs = () if both_ways == "no" else _runs(positions)
        turns = _turns(len(tokens), positions, parts)
        return tokens, rows._replace(values=values, turns=turns, runs=runs, only_windowed=both_ways == "windowed")

    def close(self) -> None:
        """End the process that decodes."""
        self._decoder.close()

    def _image(self, source: Source) -> Image:
        check_installed("images", "PIL")
        from PIL import Image

        if isinstance(source, Image.Image):
            if source.width * source.height > MAX_PIXELS:
                raise RequestError(
                    f"an image has {source.width} x {source.height} pixels; it must have at most {MAX_PIXELS:,}"
                )
            return source if source.mode == "RGB" else source.convert("RGB")
        if isinstance(source, bytes):
            return self._decoder.decode(source)
        if isinstance(source, str) and source.startswith("data:"):
            return self._decoder.decode(_data(source))
        if isinstance(source, (str, Path)) and "://" not in str(source):
            return self._decoder.decode(read_file(Path(source)))
        raise RequestError(f"an image is {str(source)[:80]!r}; give a path, a data URL or an image of Pillow")

    def _encoded(self, encoder: ImageEncoder, image: Image, is_alone: bool) -> EncodedImage:
        """Return an image's rows, computed or kept from an earlier prompt."""
        digest = blake2b(f"{image.size} {is_alone}".encode() + image.tobytes(), digest_size=32).digest()
        rows = self._rows.pop(digest, None)
        if rows is None:
            rows = encoder.encode(image, is_alone)
        self._rows[digest] = rows
        while sum(one.values.nbytes for one in self._rows.values()) > CACHE_BYTES and len(self._rows) > 1:
            self._rows.popitem(last=False)
        return rows


def image_rows(tokens: Sequence[int], placeholder: int, starts: Sequence[tuple[int, bytes]]) -> ImageRows:
    """Return the rows of images in a prompt, without their values.

    Args:
        tokens: the prompt, with placeholders.
        placeholder: the token in place of each row.
        starts: of each image, the position of its first row and the digest of its rows.
    """
    [positions] = np.nonzero(np.array(tokens) == placeholder)
    bounds = [*positions.searchsorted([first for first, _ in starts]), len(positions)]
    ids = [_ids(digest, int(end - start)) for (_, digest), start, end in zip(starts, bounds, bounds[1:], strict=False)]
    return ImageRows(positions, np.concatenate(ids), starts, None, None, placeholder)


def check_count(count: int) -> None:
    """Raise RequestError if a prompt has this many images, and may not."""
    if count > MAX_IMAGES:
        raise RequestError(f"a prompt has {count} images; it may have at most {MAX_IMAGES}")


def split_images(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], list[Source]]:
    """Return messages whose images are marks for the chat template, and the images in their order.

    A message with an image has a list of parts; all others are returned unchanged. Raises RequestError for a part
    without an image.
    """
    sources: list[Source] = []
    changed: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)) and any(_is_image(part) for part in content):
            parts = []
            for j, part in enumerate(content):
                if _is_image(part):
                    sources.append(_source(part, f"messages[{i}].content[{j}]"))
                    parts.append({"type": "image"})
                else:
                    parts.append(part)
            message = {**message, "content": parts}
        changed.append(message)
    return (changed, sources) if sources else (messages, [])


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_KEYS


def _source(part: Mapping[str, Any], place: str) -> Source:
    key = IMAGE_KEYS[part["type"]]
    found = part.get(key, part.get("path") if key == "image" else None)
    if isinstance(found, Mapping):
        found = found.get("url")
    if found is None:
        raise RequestError(f"{place} has no {key}; it must have the image")
    if key == "image_url" and not str(found).startswith("data:"):  # clients' messages must not name files
        raise RequestError(f"{place}.{key} is {str(found)[:80]!r}; it must be a data URL")
    return found  # type: ignore[no-any-return]  # checked when it is read


def _data(url: str) -> bytes:
    """Return the bytes in a data URL. Raises RequestError if it is not in base64."""
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError(f"an image has the URL {head[:80]!r}; a data URL begins with data:image/png;base64,")
    try:
        return b64decode(data, validate=True)
    except ValueError as error:
        raise RequestError(f"the data URL of an image is not valid base64: {error}") from error


def _turns(num_prompt: int, positions: NDArray[np.int64], parts: Sequence[EncodedImage]) -> ImageTurns | None:
    """Return the positions by which a prompt is rotated; None: by those of its tokens.

    A row of an image begins at the position after the token before it, and is as many positions long as the longer
    side of the image.
    """
    of_tokens = np.arange(num_prompt + 1)  # the last one is that of the first generated token
    of_images: list[NDArray[np.int64]] = []
    first = 0  # rows of images before this one
    for part in parts:
        if part.grid is None:
            return None
        count = len(part.values)
        start, end = int(positions[first]), int(positions[first + count - 1]) + 1
        of_images.append(np.indices(part.grid).reshape(3, -1).T + of_tokens[start])
        of_tokens[end:] += max(part.grid[1:]) - count
        first += count
    return ImageTurns(of_tokens[:-1], np.concatenate(of_images), num_prompt - int(of_tokens[-1]))


def _runs(positions: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return from and to which position rows of images follow one another."""
    cuts = np.flatnonzero(np.diff(positions) > 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts)]


def _digest(image: EncodedImage) -> bytes:
    """Return a digest of everything that the K and V of an image depend on."""
    rows = image.values.contiguous()
    digest = blake2b(f"{image.grid} {rows.dtype} {rows.shape}".encode(), digest_size=32)
    digest.update(rows.view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _ids(digest: bytes, count: int) -> NDArray[np.int32]:
    """Return negative ids for the rows of an image, which depend on all of them: int32 [count]."""
    ids: NDArray[np.int32] = np.frombuffer(shake_256(digest).digest(4 * count), np.int32) | np.int32(-(2**31))
    return ids
