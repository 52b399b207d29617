"""The wheel: one for every Python, complete without a compiler, and for old systems; and the source distribution."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.ops import native
from tests.test_library import OPERATORS
from tools.check_install import check

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parent.parent
LARGEST = 25 * 10**6  # bytes of the wheel
# What the wheel may ask of a system: manylinux_2_28.
FLOOR = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built as `make wheel` does it."""
    directory = tmp_path_factory.mktemp("source")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", directory, ROOT)
    [found] = directory.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make wheel` builds it, but out of the source distribution, hardly optimized, and for one instruction set."""
    directory = tmp_path_factory.mktemp("wheel")
    quick = {"build-dir": str(directory / "build"), "cmake.define.QUIRE_OPTIMIZE": "-O1"}
    if native.unavailable() is None:
        quick["cmake.define.QUIRE_ISAS"] = native.default().isa
    settings = [f"--config-settings={name}={value}" for name, value in quick.items()]
    run(sys.executable, "-m", "pip", "wheel", *settings, "--quiet", "--no-deps", "--wheel-dir", directory, source)
    [plain] = directory.glob("*.whl")
    [repair] = [line for line in (ROOT / "Makefile").read_text().splitlines() if "auditwheel repair" in line]
    [platform] = re.findall(r"--plat (\w+)_\$\$\(uname -m\) ", repair)
    run("auditwheel", "repair", "--plat", f"{platform}_{os.uname().machine}", "--wheel-dir", directory / "dist", plain)
    [found] = directory.glob("dist/*.whl")
    return found


def run(*command: str | Path) -> None:
    tools = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([*map(str, command)], check=True, env=environment)


def test_the_source_distribution_is_complete(source: Path) -> None:
    with tarfile.open(source) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    tracked = subprocess.check_output(["git", "ls-files", "src"], cwd=ROOT, text=True).split()
    assert {*tracked, "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith((".venv", "build/"))]


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"quire-[\d.]+-py3-none-(manylinux_2_\d+_\w+\.)?manylinux_2_28_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < LARGEST
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        [described] = [opened.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL")]
    assert "Tag: py3-none-manylinux_2_28_" in described
    assert {"quire/ops/cpu/libquire_cpu.so", "quire/embedded/model.safetensors", "quire/py.typed"} <= set(names)
    vendored = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/quire/server/api/vendor").iterdir()}
    assert len(vendored) == 5  # two libraries of the chat page, their licenses, and the table of their versions
    assert vendored <= set(names)
    assert not [name for name in names if "csrc" in name]
    assert not [name for name in names if ".libs/" in name], "a library of the system was copied into the wheel"
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}


def test_its_library_asks_for_no_more_than_the_floor(wheel: Path) -> None:
    """Read off the library, beside what auditwheel says."""
    with zipfile.ZipFile(wheel) as opened:
        library = opened.read("quire/ops/cpu/libquire_cpu.so")
    asked = dict(versions(library))
    assert asked
    for name, version in asked.items():
        assert version <= FLOOR[name], f"the library needs {name}_{'.'.join(map(str, version))}"


def versions(library: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The newest version of each system library that an ELF file names."""
    newest: dict[str, tuple[int, ...]] = {}
    for name, numbers in re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)(?=\0)", library):
        version = tuple(map(int, numbers.split(b".")))
        newest[name.decode()] = max(newest.get(name.decode(), ()), version)
    return iter(newest.items())


def test_it_is_installed_and_generates_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    seconds = check(wheel, tmp_path)  # fails where the native kernels do not run, or no text comes
    assert all(each > 0 for each in seconds)
    [installed] = tmp_path.glob("venv/lib/python*/site-packages/quire")
    assert (installed / "ops" / "cpu" / "libquire_cpu.so").exists()


def test_its_operators_run_next_to_torch_and_numpy_alone(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    run(*install, f"--constraint={ROOT / 'constraints.txt'}", "torch", "numpy")
    run(*install, "--no-deps", wheel)
    assert "cpu" in subprocess.check_output([python, "-I", "-c", OPERATORS], text=True).split()
