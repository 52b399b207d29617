"""A GGUF file's header, metadata and tensors, mapped into memory. The file's content is untrusted.

Layout: magic, version, counts; metadata as key, type, value; for each tensor its name, sizes, type and offset; then the
tensors, aligned. All numbers are little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.ops.weights.gguf_blocks import SIZES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
MOST_TEXTS = 2**22  # entries of an array of strings, which take more memory as objects than in the file
MOST_DIMS = 4

# The storage format of a tensor, by its code in a file.
KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# Code of a value's type in a file -> its format in struct and numpy.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, TEXT, ARRAY = 7, 8, 9

LENGTH = struct.Struct("<Q")
WORD = struct.Struct("<I")


class TensorInfo(NamedTuple):
    """A tensor of a file."""

    kind: str  # as in SIZES
    shape: tuple[int, ...]  # the last dimension is contiguous: [out, in]
    offset: int  # of its first byte, in its file
    part: int = 0  # index of its file, if there are several

    @property
    def row_bytes(self) -> int:
        """Bytes of the numbers along the last dimension."""
        numbers, size = SIZES[self.kind]
        return self.shape[-1] // numbers * size

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return self.row_bytes * math.prod(self.shape[:-1])


class GgufFile:
    """A GGUF file, which may be split into several files.

    metadata: values by key. Strings are str, arrays of strings are lists, arrays of numbers are numpy arrays.
    tensors: descriptions by the names in the file.
    """

    def __init__(self, path: Path) -> None:
        """Read all but the tensors' numbers. Raises ModelError, with the offset in the file, if it is malformed."""
        self.path = path
        first = _Part(path)
        self.metadata: Mapping[str, Any] = first.metadata
        self.tensors: dict[str, TensorInfo] = {}
        self._parts = [first]
        for number, other in enumerate(_others(path, first.metadata), 1):
            part = _Part(other)
            for key, wanted in (("split.no", number), ("split.count", first.metadata["split.count"])):
                if (found := single(other, part.metadata, key)) != wanted:
                    raise ModelError(f"{other}: {key} is {found!r}; as a part of {path.name} it must be {wanted}")
            self._parts.append(part)
        for number, part in enumerate(self._parts):
            for name, info in part.tensors.items():
                if name in self.tensors:
                    raise ModelError(
                        f"{part.path}: the tensor {name!r} is there, and in {self._parts[self.tensors[name].part].path}"
                    )
                self.tensors[name] = info._replace(part=number)
        total = single(path, first.metadata, "split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise ModelError(
                f"{path}: split.tensors.count is {total!r}, and its parts have {len(self.tensors)} tensors"
            )

    def blocks(self, name: str) -> Tensor:
        """Return a view of a tensor's mapped bytes: uint8 [rows, bytes of a row], one row per index but the last."""
        info = self.tensors[name]
        whole = self._parts[info.part].content
        return whole[info.offset : info.offset + info.nbytes].view(-1, info.row_bytes)

    @property
    def paths(self) -> list[Path]:
        """The paths of all files."""
        return [part.path for part in self._parts]


def single(path: Path, metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return a value of a file's metadata, or the default if it is missing. Raises ModelError for an array."""
    value = metadata.get(key, default)
    if isinstance(value, (list, np.ndarray)):
        raise ModelError(f"{path}: {key} is an array of {len(value)} values; it must be one value")
    return value


def _others(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """Return the other files of a split model, given the first. Raises ModelError if one is missing."""
    count = single(path, metadata, "split.count", 1)
    match = SPLIT.fullmatch(path.name)
    if count in (0, 1) and not isinstance(count, bool):
        return []
    if not isinstance(count, int) or match is None or count != int(match[3]):
        raise ModelError(
            f"{path}: split.count is {count!r}; a model in several files has them as NAME-00001-of-{count:0>5}.gguf"
        )
    if int(match[2]) != 1:
        raise ModelError(f"{path} is one of {count} files; give the first, {match[1]}-00001-of-{match[3]}.gguf")
    found = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(2, count + 1)]
    if missing := [other.name for other in found if not other.is_file()]:
        raise ModelError(f"{path} is one of {count} files, of which {len(missing)} are missing: {missing[0]}")
    return found


class _Part:
    """One file, with a read position `_at`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Copy-on-write, since torch requires writable memory; the pages are still those of the page cache.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
        self.content = torch.frombuffer(mapped, dtype=torch.uint8)
        self._bytes, self._at = memoryview(mapped), 0
        if (magic := bytes(self._bytes[:4])) != MAGIC:
            self._fail(f"found {magic!r}; a GGUF file begins with {MAGIC!r}", 0)
        self._at = 4
        if (version := self._number("I")) not in VERSIONS:
            order = ", as the file is big-endian" if version & 0xFFFF == 0 else ""
            self._fail(f"the version is {version}{order}; served are {', '.join(map(str, VERSIONS))}", 4)
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self.metadata = self._read_metadata(num_values)
        self.tensors = self._read_tensors(num_tensors)

    def _read_metadata(self, count: int) -> dict[str, Any]:
        self._check_room(count, 13, "values of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(count):
            begin, key = self._at, self._text()
            if key in metadata:
                self._fail(f"the key {key!r} is there a second time", begin)
            metadata[key] = self._value(key)
        return metadata

    def _value(self, key: str) -> Any:
        begin, kind = self._at, self._number("I")
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == TEXT:
            return self._text()
        if kind == BOOL:
            return self._bools(1)[0].item()
        if kind != ARRAY:
            self._fail(f"{key} has values of type {kind}; there are types 0 to 12", begin)
        begin, kind, count = self._at, self._number("I"), self._number("Q")
        if kind in NUMBERS:
            dtype = np.dtype("<" + NUMBERS[kind])
            self._check_room(count, dtype.itemsize, f"numbers of {key}")
            return np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind == BOOL:
            return self._bools(count)
        if kind != TEXT:
            self._fail(f"{key} is an array of values of type {kind}; served are arrays of numbers and of texts", begin)
        self._check_room(count, LENGTH.size, f"texts of {key}")
        if count > MOST_TEXTS:
            self._fail(f"{key} has {count} texts; served are up to {MOST_TEXTS}", begin)
        return self._texts(count)

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if (
            isinstance(alignment, bool)
            or not isinstance(alignment, int)
            or alignment not in [8 << i for i in range(18)]
        ):
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}; it must be a power of 2 from 8 on")
        self._check_room(count, 32, "tensors")
        tensors: dict[str, TensorInfo] = {}
        for _ in range(count):
            begin, name = self._at, self._text()
            if name in tensors:
                self._fail(f"the tensor {name!r} is there a second time", begin)
            tensors[name] = self._tensor(name, alignment)
        start = -(-self._at // alignment) * alignment
        tensors = {name: info._replace(offset=start + info.offset) for name, info in tensors.items()}
        self._check_places(tensors)
        return tensors

    def _tensor(self, name: str, alignment: int) -> TensorInfo:
        """Read a tensor's description. Its offset is relative to the first tensor."""
        begin, dims = self._at, self._number("I")
        if not 1 <= dims <= MOST_DIMS:
            self._fail(f"{name} has {dims} dimensions; served are 1 to {MOST_DIMS}", begin)
        sizes = struct.unpack(f"<{dims}Q", self._take(8 * dims))
        at, number = self._at, self._number("I")
        if number not in KINDS:
            self._fail(f"{name} is of type {number}, which is not known; served are {', '.join(SIZES)}", at)
        kind, offset = KINDS[number], self._number("Q")
        if kind not in SIZES:
            raise ModelError(
                f"{self.path}: {name} is {kind}, which is not served; take a file in {', '.join(SIZES)}, such as "
                "the same model's Q4_K_M"
            )
        numbers = SIZES[kind][0]
        if min(sizes) < 1 or sizes[0] % numbers:
            self._fail(
                f"{name} has sizes {sizes}; of {kind} the first is a multiple of {numbers}, all are positive", begin
            )
        if offset % alignment:
            self._fail(f"{name} begins at {offset}, which is no multiple of the alignment {alignment}", self._at - 8)
        return TensorInfo(kind, sizes[::-1], offset)

    def _check_places(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Raise ModelError for tensors that extend beyond the end of the file or overlap."""
        end, before = 0, ""
        for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
            if info.offset + info.nbytes > len(self.content):
                raise ModelError(
                    f"{self.path}: the {info.nbytes} bytes of {name} begin at {info.offset}, and the file ends at "
                    f"{len(self.content)}; it is truncated, or its header is wrong"
                )
            if info.offset < end:
                raise ModelError(f"{self.path}: {name} begins at {info.offset}, within {before}, which ends at {end}")
            end, before = info.offset + info.nbytes, name

    # ------------------------------------------------------------------------------------------- reading at _at

    def _take(self, size: int) -> memoryview:
        taken = self._bytes[self._at : self._at + size]
        if len(taken) < size:
            self._fail(f"{size} bytes should follow, and the file ends at {len(self._bytes)}; it is truncated")
        self._at += size
        return taken

    def _number(self, code: str) -> Any:
        number = struct.Struct("<" + code)
        return number.unpack(self._take(number.size))[0]

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        # A vocabulary with its merges has half a million strings, so this loop makes as few calls as possible.
        content, at, end, length = self._bytes, self._at, len(self._bytes), LENGTH.unpack_from
        texts = []
        try:
            for _ in range(count):
                self._at, start = at, at + 8
                at = start + length(content, at)[0]
                if at > end:
                    self._fail(f"a text of {at - start} bytes begins here, and the file ends at {end}; it is truncated")
                texts.append(str(content[start:at], "utf-8"))
        except struct.error:
            self._fail(f"a text's length should follow, and the file ends at {end}; it is truncated")
        except UnicodeDecodeError as error:
            self._fail(f"a text is no UTF-8: {error}")
        self._at = at
        return texts

    def _bools(self, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        begin = self._at
        self._check_room(count, 1, "truth values")
        found = np.frombuffer(self._take(count), np.uint8)
        if (found > 1).any():
            self._fail(f"a truth value is {found.max()}; it must be 0 or 1", begin)
        return found.view(np.bool_)

    def _check_room(self, count: int, size: int, what: str) -> None:
        """Raise ModelError if the rest of the file is too short for `count` items of at least `size` bytes."""
        if count * size > (rest := len(self._bytes) - self._at):
            self._fail(f"there should be {count} {what}, and {rest} bytes follow, in which there is no room for them")

    def _fail(self, what: str, at: int | None = None) -> NoReturn:
        raise ModelError(f"{self.path}: at offset {self._at if at is None else at}: {what}")
