"""The words of each `simd_*.h`, lane by lane, and what the library finds on an Arm processor, which is emulated.

`make emulate` runs the operators' tests on Arm; this is what takes seconds.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.ops import native
from tests.marks import of_long_runs

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parent / "words.cpp"
CSRC = Path(native.__file__).parent / "cpu" / "csrc"
OPTIONS = ("-std=gnu++20", "-O1", "-ffp-contract=off", "-Wno-psabi", "-Wno-ignored-attributes", f"-I{CSRC}")
X86 = {
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4",),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
}
ARM = {
    "neon": ("-march=armv8-a",),
    "neon_dot": ("-march=armv8.2-a+dotprod",),
    "neon_bf16": ("-march=armv8.2-a+dotprod+bf16+i8mm",),
}
# Processors that QEMU knows, and which of these they run.
PROCESSORS = {"cortex-a57": "1 0 0", "a64fx": "1 0 0", "neoverse-n1": "1 1 0", "max": "1 1 1"}
HERE = () if native.unavailable() else native.runnable(native.library_path())


def compiled(to: Path, compiler: str, *options: str) -> Path:
    subprocess.run([compiler, *OPTIONS, *options, str(SOURCE), "-o", str(to)], check=True)
    return to


def for_arm(to: Path, *options: str) -> Path:
    """Skips where a tool is missing."""
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        if shutil.which(tool) is None:
            pytest.skip(f"this machine has no {tool}; Debian's g++-aarch64-linux-gnu and qemu-user have what it takes")
    return compiled(to, "aarch64-linux-gnu-g++", "-static", *options, str(CSRC / "machine_arm.cpp"))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("isa", ARM)
def test_words_on_arm(isa: str, tmp_path: Path) -> None:
    program = for_arm(tmp_path / "words", *ARM[isa])
    assert run("qemu-aarch64", "-cpu", "max", str(program)) == "4 lanes, 0 failures\n"


# Of the words for 16 lanes, avx512_bf16 has all but those that round to bf16.
@pytest.mark.parametrize("isa", [of_long_runs(isa) if isa == "avx512" else isa for isa in X86 if isa in HERE])
def test_words_on_x86(isa: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("this machine has no g++")
    lanes = 8 if isa == "avx2" else 16
    assert run(str(compiled(tmp_path / "words", "g++", *X86[isa]))) == f"{lanes} lanes, 0 failures\n"


def test_what_is_found_on_arm(tmp_path: Path) -> None:
    program = for_arm(tmp_path / "words")
    found = {name: run("qemu-aarch64", "-cpu", name, str(program), "found").strip() for name in PROCESSORS}
    assert found == PROCESSORS
