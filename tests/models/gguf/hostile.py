"""GGUF files that are none: written byte by byte, and mutated."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from quire.errors import QuireError
from quire.models import choose
from quire.models.files import files_of

Value = tuple[int, bytes]  # a type's number, and the bytes of the value


def text(content: str | bytes) -> bytes:
    """As a file has it."""
    data = content if isinstance(content, bytes) else content.encode()
    return struct.pack("<Q", len(data)) + data


def uint32(number: int) -> Value:
    """A number of metadata."""
    return 4, struct.pack("<I", number)


def words(*content: str) -> Value:
    """An array of texts."""
    return 9, struct.pack("<IQ", 8, len(content)) + b"".join(map(text, content))


METADATA: dict[str | bytes, Value] = {
    "general.architecture": (8, text("llama")),
    "llama.block_count": uint32(1),
    "llama.context_length": uint32(64),
    "llama.embedding_length": uint32(8),
    "llama.feed_forward_length": uint32(4),
    "llama.attention.head_count": uint32(2),
    "llama.attention.layer_norm_rms_epsilon": (6, struct.pack("<f", 1e-5)),
    "tokenizer.ggml.model": (8, text("gpt2")),
    "tokenizer.ggml.pre": (8, text("gpt-2")),
    "tokenizer.ggml.tokens": words("a", "b", "ab"),
    "tokenizer.ggml.token_type": (9, struct.pack("<IQ3i", 5, 3, 1, 1, 1)),
    "tokenizer.ggml.merges": words("a b"),
}
Entry = tuple[str, tuple[int, ...], int, int]  # a tensor's name, its sizes, its type, its offset
TENSORS: list[Entry] = [("token_embd.weight", (8, 4), 0, 0), ("output_norm.weight", (8,), 0, 128)]


def whole(
    metadata: dict[str | bytes, Value] = METADATA,
    tensors: list[Entry] = TENSORS,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,  # of tensors, of values
    data: int = 160,  # bytes of all tensors
) -> bytes:
    """A file."""
    header = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(metadata))))
    header += b"".join(text(key) + struct.pack("<I", kind) + value for key, (kind, value) in metadata.items())
    for name, sizes, kind, offset in tensors:
        header += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return header + b"\0" * (-len(header) % 32) + b"\1" * data


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The same with a few bytes that are wrong, missing or too many, or with a number that is very large."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(max(1, len(changed)))
        match draw.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                changed[at : at + 8] = struct.pack("<Q", draw.choice([2**60, 2**63, 2**64 - 1, 2**32, 0, 1, 255]))
            case 2:
                changed[at : at + 4] = struct.pack("<I", draw.choice([2**31, 2**32 - 1, 0, 9, 40, 77]))
            case 3:
                del changed[at : at + draw.randint(1, 40)]
            case 4:
                changed[at:at] = draw.randbytes(draw.randint(1, 40))
            case _:
                del changed[at:]
    return bytes(changed)


def read(path: Path) -> str | None:
    """Read all that a file has; what an error says of it, None where it could be read.

    Anything but an error of Quire's own is let through.
    """
    try:
        files = files_of(path)
        choose(files, "quire")
        tensors = files.tensors()
        for name in tensors.names:
            tensors[name].sum()
        if files.has_tokenizer:
            files.tokenizer()
        files.generation(), files.tokenizer_settings(), files.template()
    except QuireError as error:
        return str(error)
    return None
