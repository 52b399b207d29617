"""Digest of a model's weights, from a sample of its files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.fingerprint.fingerprint import short_digest
from quire.models.files import Where, files_of
from quire.models.replaced import ReplacedFiles

PAGE = 4096  # bytes
MAX_PAGES = 64  # pages read of each file of weights
LENGTH = 8  # bytes at the start of a safetensors file that contain the length of its header


def weights_digest(where: Where) -> str:
    """Return 16 hexadecimal digits for a model's weights.

    They depend, for each file, on its name, its size, the header that names its tensors (safetensors), and MAX_PAGES
    pages at even distances from the first to the last; links are followed. Of weights that were replaced from memory
    they depend on each tensor in the same way. Two trainings of a model differ in all of these pages. A change of
    single bytes between the pages is not detected.

    Raises ModelError if there are no weights, or a file cannot be read.
    """
    files = files_of(where)
    paths, given = files.weight_files(), files.given if isinstance(files, ReplacedFiles) else {}
    if not paths and not given:
        raise ModelError(f"{files.path} holds no weights; a replica is known by the files that its model was read from")
    tensors = (_sampled_tensor(name, tensor) for name, tensor in sorted(given.items()))
    return short_digest(b"".join([*map(_sampled, paths), *tensors]))


def _sampled_tensor(name: str, tensor: Tensor) -> bytes:
    """Return the sampled contents of a tensor in memory, like those of a file."""
    data = tensor.reshape(-1).view(torch.uint8)
    found = [name.encode(errors="surrogateescape"), f"{tensor.dtype} {tuple(tensor.shape)}".encode()]
    found += [data[page * PAGE : (page + 1) * PAGE].numpy().tobytes() for page in sampled_pages(-(-len(data) // PAGE))]
    return b"".join(len(part).to_bytes(8, "little") + part for part in found)


def _sampled(path: Path) -> bytes:
    """Return the sampled contents of a file of weights, each part preceded by its length."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = [path.name.encode(errors="surrogateescape"), str(size).encode()]
            if path.suffix == ".safetensors":
                length = int.from_bytes(file.read(LENGTH), "little")
                if length > size - LENGTH:
                    raise ModelError(f"{path} has {size} bytes, but its header has a length of {length}")
                found.append(file.read(length))
            for page in sampled_pages(-(-size // PAGE)):
                file.seek(page * PAGE)
                found.append(file.read(PAGE))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return b"".join(len(part).to_bytes(8, "little") + part for part in found)


def sampled_pages(count: int) -> list[int]:
    """Return the pages to read of a file with `count` pages: all, or MAX_PAGES from the first to the last."""
    if count <= MAX_PAGES:
        return list(range(count))
    return [i * (count - 1) // (MAX_PAGES - 1) for i in range(MAX_PAGES)]
