"""Pairs of dimensions of caches of 8 bits: in the interpreter, and the instructions by a machine of their own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from quire import ops
from quire.ops.triton import tiles, widening
from quire.ops.triton.tiles import choose, pairs_of
from tests.ops.conftest import DEVICES

DEVICE = DEVICES[-1]


def _bytes(x: int) -> list[int]:
    return [x >> 8 * i & 255 for i in range(4)]


def _floats(x: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([x & 65_535, x >> 16], dtype=torch.uint16).view(dtype).double()


def _pack(x: torch.Tensor, dtype: torch.dtype) -> int:
    lower, upper = x.to(dtype).view(torch.uint16).tolist()
    return lower | upper << 16


def _number(word: str, registers: dict[str, int]) -> int:
    return registers[word] if word in registers else int(word, 0)


def run(program: str, pair: int) -> int:
    """What these instructions of integers and of packed numbers leave in $0."""
    registers = {"$1": pair}
    for line in re.findall(r"^(?!\.reg)([a-z].*);$", program, re.MULTILINE):
        name, words = line.split(" ", 1)
        to, *given = words.split(", ")
        x = [_number(word, registers) for word in given]
        kind = torch.bfloat16 if name.endswith("bf16x2") else torch.float16
        if name == "mov.b32":
            registers[to] = x[0]
        elif name == "prmt.b32":
            four = _bytes(x[0]) + _bytes(x[1])
            registers[to] = sum(four[x[2] >> 4 * i & 15] << 8 * i for i in range(4))
        elif name == "and.b32":
            registers[to] = x[0] & x[1]
        elif name == "xor.b32":
            registers[to] = x[0] ^ x[1]
        elif name == "lop3.b32":
            assert x[3] == (0xF0 & 0xCC) ^ 0xAA
            registers[to] = (x[0] & x[1]) ^ x[2]
        elif name == "fma.rn.bf16x2":
            a, b, c = (_floats(one, kind) for one in x)
            registers[to] = _pack(a * b + c, kind)
        else:
            assert name == "add.rn.f16x2"
            registers[to] = _pack(_floats(x[0], kind) + _floats(x[1], kind), kind)
    return registers["$0"]


@pytest.mark.parametrize("bf16", [True, False])
def test_the_instructions_widen_every_integer(bf16: bool) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float16
    for upper in (False, True):
        program = widening._instructions("int8", bf16, upper)
        for value in range(-128, 128):
            other = -value - 1
            both = [[other, value], [value, other]] if upper else [[value, other], [other, value]]
            pair = int.from_bytes(bytes(one & 255 for key in both for one in key), "little")
            assert _floats(run(program, pair), dtype).tolist() == [value, other]


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize(
    ("kv", "dtype"),
    [(torch.int8, torch.bfloat16), (torch.float8_e4m3fn, torch.float16), (torch.float8_e5m2, torch.bfloat16)],
)
def test_decoding_with_pairs(monkeypatch: pytest.MonkeyPatch, kv: torch.dtype, dtype: torch.dtype) -> None:
    """Sequences of a few rows, over blocks of which some end within a tile."""
    monkeypatch.setattr(tiles, "IN_PAIRS", True)
    if DEVICE != "cpu" and kv is not torch.int8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no numbers of 8 bits on this chip")
    spec = ops.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, num_blocks=24, dtype=dtype, kv_dtype=kv, device=DEVICE
    )
    assert pairs_of(spec, choose("sm90", "few", spec), 16) is not None
    generator = torch.Generator().manual_seed(0)
    shape = (24, 2, 16, 32)
    if kv is torch.int8:
        numbers = [torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8) for _ in range(2)]
        scales = [torch.rand(shape[:3], generator=generator) / 64 for _ in range(2)]
    else:
        numbers, scales = [torch.randn(shape, generator=generator).to(kv) for _ in range(2)], [None, None]
    starts, lens = torch.tensor([0, 1, 3]), torch.tensor([190, 77])
    tables = torch.randperm(24, generator=generator)[:24].view(2, 12)
    q = torch.randn(3, 4, 32, generator=generator).to(dtype)
    found = []
    for name, device in (("triton", DEVICE), ("reference", "cpu")):
        backend, own, cache = ops.load(name, device), replace(spec, device=device), numbers
        if name == "reference" and kv is not torch.int8:  # widened beforehand, which is exact
            own, cache = replace(own, kv_dtype=None), [x.to(dtype) for x in numbers]
        kv_cache = ops.PagedKV(*(x if x is None else x.to(device) for x in (*cache, *scales)))
        found.append(backend.attention(q.to(device), kv_cache, backend.plan(own, starts, lens, tables)).cpu().double())
    torch.testing.assert_close(found[0], found[1], atol=2e-2, rtol=2e-2)
