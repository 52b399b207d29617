"""GGUF files, split files, and files that are none."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire.errors import ModelError
from quire.models.gguf.file import GgufFile
from tests.models.fuzz_gguf import fuzz
from tests.models.gguf.hostile import METADATA, TENSORS, read, text, uint32, whole, words

WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read as a GGUF file"),
    "magic": (b"GGML" + whole()[4:], "at offset 0: found b'GGML'; a GGUF file begins with b'GGUF'"),
    "version": (whole(version=1), "at offset 4: the version is 1; served are 2, 3"),
    "bytes in the other order": (whole(version=3 << 24), "as the file is big-endian"),
    "a header's half": (whole()[:13], "8 bytes should follow, and the file ends at 13; it is truncated"),
    "2^60 values": (whole(counts=(2, 2**60)), f"at offset 24: there should be {2**60} values of metadata, and"),
    "2^60 tensors": (whole(counts=(2**60, len(METADATA))), f"there should be {2**60} tensors, and"),
    "a text of 2^63 bytes": (
        whole({b"x": (8, struct.pack("<Q", 2**63))}), f"a text of {2**63} bytes begins here, and the file ends at"
    ),
    "2^60 numbers": (whole({"x": (9, struct.pack("<IQ", 10, 2**60))}), f"there should be {2**60} numbers of x, and"),
    "2^60 texts": (whole({"x": (9, struct.pack("<IQ", 8, 2**60))}), f"there should be {2**60} texts of x, and"),
    "arrays of arrays": (
        whole({"x": (9, struct.pack("<IQIQ", 9, 1, 4, 0))}), "x is an array of values of type 9; served are arrays of"
    ),
    "a type of value": (whole({"x": (13, b"")}), "x has values of type 13; there are types 0 to 12"),
    "a truth value": (whole({"x": (7, b"\2")}), "a truth value is 2; it must be 0 or 1"),
    "a key twice": (whole({"x": uint32(1), b"x": uint32(2)}), "the key 'x' is there a second time"),
    "no UTF-8": (whole({"x": (8, text(b"\xff\xfe"))}), "a text is no UTF-8"),
    "no UTF-8 in an array": (whole({"x": (9, struct.pack("<IQ", 8, 1) + text(b"\xc3"))}), "a text is no UTF-8"),
    "alignment": (whole(METADATA | {"general.alignment": uint32(7)}), "alignment is 7; it must be a power of 2"),
    "a tensor twice": (whole(tensors=[TENSORS[0], TENSORS[0]]), "'token_embd.weight' is there a second time"),
    "five dimensions": (whole(tensors=[("x", (1,) * 5, 0, 0)]), "x has 5 dimensions; served are 1 to 4"),
    "no numbers": (whole(tensors=[("x", (0, 4), 0, 0)]), "x has sizes (0, 4)"),
    "a row of no whole blocks": (whole(tensors=[("x", (8, 4), 8, 0)]), "of Q8_0 the first is a multiple of 32"),
    "a type of tensor": (whole(tensors=[("x", (8, 4), 99, 0)]), "x is of type 99, which is not known; served are F32"),
    "IQ2_XS": (whole(tensors=[("x", (256, 4), 17, 0)]), "x is IQ2_XS, which is not served; take a file in F32"),
    "TQ1_0": (whole(tensors=[("x", (256, 4), 34, 0)]), "x is TQ1_0, which is not served"),
    "an offset": (whole(tensors=[("x", (8, 4), 0, 4)]), "x begins at 4, which is no multiple of the alignment 32"),
    "an offset of 2^63": (whole(tensors=[("x", (8, 4), 0, 2**63)]), "it is truncated, or its header is wrong"),
    "sizes of 2^60": (whole(tensors=[("x", (2**60, 2**60), 0, 0)]), "it is truncated, or its header is wrong"),
    "truncated": (whole()[:-1], "the 32 bytes of output_norm.weight begin at"),
    "overlapping": (
        whole(tensors=[TENSORS[0], ("output_norm.weight", (8,), 0, 96)]), "within token_embd.weight, which ends at"
    ),
    "no architecture": (whole({}), "general.architecture is None; it must be a text"),
    "another architecture": (
        whole(METADATA | {"general.architecture": (8, text("rwkv7"))}), "of which no GGUF files are served; served are"
    ),
    "a key that may matter": (
        whole(METADATA | {"llama.attention.clamp_kqv": uint32(3)}), "has 1 keys that are not understood of the arch"
    ),
    "a number that is a text": (
        whole(METADATA | {"llama.block_count": words("1")}), "llama.block_count is ['1']; it must be a positive integer"
    ),
    "2^32 layers": (whole(METADATA | {"llama.block_count": uint32(2**32 - 1)}), "4294967295; it must be at most 2"),
    "no embedding": (whole(tensors=[]), "has no tensor token_embd.weight"),
    "old blocks": (whole(METADATA | {"general.quantization_version": uint32(1)}), "version is 1; served is"),
    "tokens that are numbers": (
        whole(METADATA | {"tokenizer.ggml.tokens": uint32(3)}), "tokenizer.ggml.tokens is no array of texts"
    ),
    **{
        f"{key} of no values": (whole(METADATA | {key: words()}), f"{key} is an array of 0 values; it must be one")
        for key in ("general.quantization_version", "split.count", "split.tensors.count", "tokenizer.ggml.model")
    },
    "2^32 layers in an array": (
        whole(METADATA | {"llama.block_count": (9, struct.pack("<IQI", 4, 1, 2**32 - 1))}), "it must be at most 2"
    ),
    "a part of several": (whole(METADATA | {"split.count": uint32(2)}), "has them as NAME-00001-of-00002.gguf"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_none_are_refused_by_a_sentence(tmp_path: Path, name: str) -> None:
    content, expected = WRONG[name]
    (tmp_path / "model.gguf").write_bytes(content)
    said = read(tmp_path / "model.gguf")
    assert expected in str(said)
    assert "model.gguf" in str(said)


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(whole())
    assert read(tmp_path / "model.gguf") is None
    outcome = fuzz(tmp_path, 300, seed=5)
    assert min(outcome["refused"], outcome["read"]) > 5


def test_a_file_is_what_its_writer_wrote(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(3), tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a", 2**32 - 1)
    writer.add_float32("b", 0.1)
    writer.add_bool("c", True)
    writer.add_array("d", [3, 1, 2])
    writer.add_array("e", ["x", "äöü", ""])
    writer.add_array("f", [True, False])
    numbers = rng.standard_normal((3, 5, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("numbers", numbers)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    found = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.metadata.items()}
    assert found == {
        "general.architecture": "llama", "a": 2**32 - 1, "b": np.float32(0.1), "c": True, "d": [3, 1, 2],
        "e": ["x", "äöü", ""], "f": [True, False],
    }  # fmt: skip
    assert (file.tensors["numbers"].kind, file.tensors["numbers"].shape) == ("F32", (3, 5, 64))
    assert torch.equal(file.blocks("numbers").view(torch.float32), torch.from_numpy(numbers).flatten(0, 1))
    assert file.tensors["blocks"].shape == (3, 5, 64)
    assert torch.equal(file.blocks("blocks"), torch.from_numpy(blocks).flatten(0, 1))


def test_a_model_in_several_files(tmp_path: Path) -> None:
    def part(number: int, count: int, tensors: int, metadata: dict[str | bytes, tuple[int, bytes]]) -> bytes:
        split = {"split.no": uint32(number), "split.count": uint32(count), "split.tensors.count": uint32(tensors)}
        entry = (*TENSORS[number][:3], 0)
        return whole(metadata | dict(split), [entry], data=128)

    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(part(0, 2, 2, METADATA))
    with pytest.raises(ModelError, match=re.escape("is one of 2 files, of which 1 are missing: m-00002-of-00002.gguf")):
        GgufFile(first)
    second.write_bytes(part(1, 2, 2, {}))
    file = GgufFile(first)
    assert file.paths == [first, second]
    assert [file.tensors[name].part for name in ("token_embd.weight", "output_norm.weight")] == [0, 1]
    assert file.blocks("output_norm.weight").shape == (1, 32)
    with pytest.raises(ModelError, match=re.escape("is one of 2 files; give the first, m-00001-of-00002.gguf")):
        GgufFile(second)
    for wrong, said in (
        (part(0, 2, 2, {}), "split.no is 0; as a part of m-00001-of-00002.gguf it must be 1"),
        (part(1, 3, 2, {}), "split.count is 3; as a part of m-00001-of-00002.gguf it must be 2"),
        (part(1, 2, 2, {})[:-100], "it is truncated"),
    ):
        second.write_bytes(wrong)
        with pytest.raises(ModelError, match=re.escape(said)):
            GgufFile(first)
    second.write_bytes(part(1, 2, 2, {}))
    first.write_bytes(part(0, 2, 3, METADATA))
    with pytest.raises(ModelError, match=re.escape("split.tensors.count is 3, and its parts have 2 tensors")):
        GgufFile(first)
