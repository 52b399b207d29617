"""The order of sums of matrix tiles: as documented, the same emulated and in hardware, and the same for any rows."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops import native
from quire.ops.cpu.linear import Packer
from tests.ops.cases import Case, Step
from tests.ops.integers import as_bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.unavailable() is not None, reason=native.unavailable() or ""),
    pytest.mark.skipif(
        native.unavailable() is None and "amx_emulated" not in native.runnable(native.library_path()),
        reason="tiles are emulated with AVX-512, which this machine lacks",
    ),
]
ROWS = (*range(1, 41), 64, 96, 512)
SHAPES = ((1, 1), (16, 32), (40, 100), (70, 640), (208, 1536))  # out, in


def hardware() -> native.Library:
    """The library on the processor's own tiles."""
    if reason := native.amx_refusal():
        pytest.skip(reason)
    return native.load("amx")


def numbers(rows: int, size: int, spread: int, seed: int) -> Tensor:
    """Of many sizes, some zero and some denormal."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=gen)
    x *= 2.0 ** torch.randint(-spread, spread + 1, x.shape, generator=gen)
    return torch.where(torch.rand(x.shape, generator=gen) < 0.02, 0.0, x).bfloat16()


def documented(x: Tensor, weight: Tensor) -> Tensor:
    """Intel's description of TDPBF16PS, number by number. A product of two bf16 is exact in fp32."""
    pad = -x.shape[1] % 32
    x, weight = (torch.nn.functional.pad(t.float(), (0, pad)) for t in (x, weight))
    total = torch.zeros(len(x), len(weight))
    for start in range(0, x.shape[1], 32):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(start, start + 32, 2):
            even = even + x[:, None, k] * weight[None, :, k]
            odd = odd + x[:, None, k + 1] * weight[None, :, k + 1]
        total = total + (even + odd)
    return total


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [0, 8])
def test_a_linear_adds_in_the_documented_order(shape: tuple[int, int], spread: int) -> None:
    out_size, in_size = shape
    x, weight = numbers(40, in_size, spread, 1), numbers(out_size, in_size, spread, 2)
    made = Packer(native.load("amx_emulated"))(weight, out_dtype=torch.float32)
    assert torch.equal(as_bits(made(x)), as_bits(documented(x, weight)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rows_of_a_linear_are_the_same_alone_and_together(shape: tuple[int, int]) -> None:
    out_size, in_size = shape
    x, weight = numbers(520, in_size, 4, 1), numbers(out_size, in_size, 4, 2)
    made = Packer(native.load("amx_emulated"))(weight, torch.arange(out_size).bfloat16())
    whole = as_bits(made(x))
    for rows in ROWS:
        for first in (0, 5):
            assert torch.equal(as_bits(made(x[first : first + rows])), whole[first : first + rows])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [0, 6, 40, 70])
def test_hardware_and_emulation_have_the_same_bits(shape: tuple[int, int], spread: int) -> None:
    """Those of infinities and of numbers that underflow, too, and NaN in the same places, of any sign."""
    library = hardware()
    out_size, in_size = shape
    x, weight = numbers(520, in_size, spread, 1), numbers(out_size, in_size, spread, 2)
    x[3, 0], x[7, -1], weight[0, 0] = torch.inf, torch.nan, -torch.inf
    made, emulated = (Packer(one)(weight, out_dtype=torch.float32) for one in (library, native.load("amx_emulated")))
    for rows in ROWS:
        found, expected = (
            one(x[:rows]).nan_to_num(nan=123.0, posinf=torch.inf, neginf=-torch.inf) for one in (made, emulated)
        )
        assert torch.equal(as_bits(found), as_bits(expected))


CASES = {
    "decode": Case(query_lens=(1, 1, 1, 1), context_lens=(1, 31, 257, 1_500), return_lse=True),
    "prefill": Case(query_lens=(70, 1, 300), context_lens=(70, 40, 700), return_lse=True),
    "window, cap and slopes": Case(
        query_lens=(40, 1), context_lens=(900, 800), window=300, softcap=3.0, alibi=True, sinks=True
    ),
    "odd sizes": Case(query_lens=(5, 90), context_lens=(130, 90), head_dim=80, block_size=7),
    "a shared prefix": Case(
        query_lens=(1, 3, 1, 1), context_lens=(2_300, 2_290, 2_110, 2_200), shared_prefix=True, num_kv_heads=1
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block_size", [16, 32, None])
def test_attention_has_the_same_bits_in_hardware_and_emulated(name: str, block_size: int | None, monkeypatch) -> None:
    library = hardware()
    case = replace(CASES[name], dtype=torch.bfloat16)
    step = Step(case if block_size is None else replace(case, block_size=block_size))
    found = []
    for one in (library, native.load("amx_emulated")):
        monkeypatch.setattr(native, "default", lambda one=one: one)
        backend = ops.load("cpu")
        found.append([as_bits(x) for x in step.attend(backend, step.write(backend)) if x is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("options", [{}, {"window": 40}], ids=str)
@pytest.mark.parametrize("history", [0, 100, 300])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_value_that_some_rows_do_not_see_changes_no_bit_of_theirs(
    options, history: int, bad: float, monkeypatch
) -> None:
    """Many rows at a time, and the same rows a few at a time; the value lies in the first tile of keys or another."""
    emulated = native.load("amx_emulated")
    monkeypatch.setattr(native, "default", lambda: emulated)
    backend, rows, at = ops.load("cpu"), 100, history + 50
    gen = torch.Generator().manual_seed(history)
    spec = ops.AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=64, block_size=16, num_blocks=32, dtype=torch.bfloat16, **options
    )
    k, v = (torch.randn(32, 1, 16, 64, generator=gen).bfloat16() for _ in range(2))
    q = torch.randn(rows, 2, 64, generator=gen).bfloat16()

    def attend(first: int, last: int) -> Tensor:
        starts, lens = (torch.tensor(values, dtype=torch.int32) for values in ([0, last - first], [history + last]))
        plan = backend.plan(spec, starts, lens, torch.arange(32, dtype=torch.int32)[None])
        return as_bits(backend.attention(q[first:last], ops.PagedKV(k, v), plan))

    before = attend(0, rows)
    v[at // 16, 0, at % 16, 3] = bad
    after = attend(0, rows)
    seen = torch.arange(rows) + history >= at
    if "window" in options:
        seen &= torch.arange(rows) + history < at + options["window"]
    assert torch.equal(after[~seen], before[~seen])
    others = torch.arange(64) != 3
    assert torch.equal(after[:, :, others], before[:, :, others])
    for first in range(0, rows, 7):
        assert torch.equal(attend(first, min(first + 7, rows)), after[first : first + 7])


REFUSED = """
import ctypes, struct
ALLOW, REFUSE = 0x7fff0000, 0x00050001  # the call fails with EPERM
def instruction(code, true, false, value):
    return struct.pack("=HBBI", code, true, false, value)
program = b"".join((
    instruction(0x20, 0, 0, 0), instruction(0x15, 0, 3, 158),  # arch_prctl
    instruction(0x20, 0, 0, 16), instruction(0x15, 0, 1, 0x1023),  # that asks for a feature of the processor
    instruction(0x06, 0, 0, REFUSE), instruction(0x06, 0, 0, ALLOW),
))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
wanted = Filter(len(program) // 8, program)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(wanted), 0, 0):
    raise SystemExit("no filter of system calls")

import torch
from quire.cli import main
from quire.ops import native
from quire.ops.cpu.linear import Packer

assert "amx" not in native.runnable(native.library_path())
print(native.load().isa, native.amx_refusal())
x = torch.ones(3, 64, dtype=torch.bfloat16)
assert (Packer()(x)(x) == 64).all()
"""


def test_a_process_without_permission_runs_the_next_best() -> None:
    """The system call that asks for it is refused by a filter."""
    hardware()
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=120, check=False)
    if "no filter of system calls" in done.stderr:
        pytest.skip("this system installs no filter of system calls")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "avx512_bf16 the operating system does not permit this process to use AMX tiles\n"


@pytest.mark.parametrize("number", range(1, len(native.AMX_REFUSALS)))
def test_what_is_said_where_tiles_are_refused(number: int, monkeypatch) -> None:
    """Whatever the reason: `quire info` has it, and the next best kernels run."""
    from typer.testing import CliRunner

    from quire.cli import app

    class Refusing:
        def __init__(self, path: str) -> None:
            self._library = real(path)

        def __getattr__(self, name: str) -> object:
            if name == "quire_amx_refusal":
                return lambda: number
            return getattr(self._library, name)

    real = ctypes.CDLL
    monkeypatch.setattr(native.ctypes, "CDLL", Refusing)
    shown = CliRunner().invoke(app, ["info"]).output
    monkeypatch.undo()
    assert f"not used: {native.AMX_REFUSALS[number]}" in shown
