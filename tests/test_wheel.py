"""The wheel: one for every Python, and complete without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from quire.ops.cpu import native

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parent.parent


def test_the_wheel_is_complete_without_a_compiler(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    assert "-py3-none-manylinux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert {"quire/ops/cpu/libquire_cpu.so", "quire/embedded/model.safetensors", "quire/py.typed"} <= set(names)
    assert not [name for name in names if "csrc" in name]
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}
    runs_the_demo(wheel, tmp_path)


def build(directory: Path) -> Path:
    """The wheel, built as `make wheel` does it, but hardly optimized, and for one instruction set alone."""
    tools = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}

    def run(*command: str | Path) -> None:
        subprocess.run([*map(str, command)], check=True, env=environment, cwd=directory)

    quick = {"build-dir": "build", "cmake.define.QUIRE_OPTIMIZE": "-O1"}
    if native.unavailable() is None:
        quick["cmake.define.QUIRE_ISAS"] = native.default().isa
    settings = [f"--config-settings={name}={value}" for name, value in quick.items()]
    run(sys.executable, "-m", "pip", "wheel", *settings, "--quiet", "--no-deps", "--wheel-dir", "plain", ROOT)
    [plain] = directory.glob("plain/*.whl")
    run(tools / "auditwheel", "repair", "--wheel-dir", "dist", plain)
    [wheel] = directory.glob("dist/*.whl")
    return wheel


def runs_the_demo(wheel: Path, directory: Path) -> None:
    """In a fresh environment: what Quire depends on is lent to it, the editable install beside that is not."""
    home = directory / "venv"
    venv.create(home)
    python, [site] = home / "bin" / "python", home.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))
    environment = {"PATH": str(home / "bin"), "HOME": str(directory), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str | Path) -> str:
        command = [str(python), *map(str, arguments)]
        done = subprocess.run(command, check=True, env=environment, cwd=directory, capture_output=True, text=True)
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, env=environment, cwd=directory)
    where, backend = run("-c", "import quire; print(quire.__file__); print(quire.ops.load().name)").split()
    assert Path(where).is_relative_to(site)
    assert backend == "cpu"
    assert "tokens/s" in run(ROOT / "examples" / "demo.py")
