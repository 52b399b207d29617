"""Run the operators' tests on an emulated Arm processor.

`python tools/emulate.py [--cpu NAME] [--optimize=FLAG] [OPTIONS OF PYTEST]` compiles the native kernels with a cross
compiler, and runs the tests in an AArch64 Python under QEMU's user-mode emulation. It needs Debian's packages cmake,
g++-aarch64-linux-gnu, qemu-user and mmdebstrap, and a package index for the wheels. All its files are in build/emulate.
Without options of pytest it runs the operators' tests of the backend `cpu`, which takes more than an hour.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "build" / "emulate"
SYSTEM, PACKAGES, LIBRARY, TREE = (PLACE / name for name in ("system", "packages", "library", "tree"))
PYTHON = PLACE / "python"
SUITE, VERSION = "bookworm", "3.11"  # of Debian, and of its Python
# The last release whose wheel for AArch64 is for CPUs; later ones need CUDA's libraries.
TORCH = "torch==2.10.0"
TOOLS = {
    "cmake": "cmake",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "mmdebstrap": "mmdebstrap",
}
COPIED = ("src", "tests", "bench", "examples", "docs", "conftest.py", "pyproject.toml", "README.md")
# Processors that QEMU emulates and a wheel of torch supports, by the best instruction set that they have.
PROCESSORS = {"neon": "a64fx", "neon_dot": "neoverse-n1", "neon_bf16": "max"}
SHOWN = "from quire.ops import native; print(native.default().isa)"
TESTS = (
    "tests/ops",
    "-k",
    # Without tests of the reference backend: oneDNN's products take minutes in emulation.
    "(cpu or lora or gguf_blocks) and not slow_backend",
    "--numprocesses",
    str(os.cpu_count() or 1),
    "--timeout",
    "1800",
)


def main() -> int:
    """Prepare the missing parts and run the tests. Return their exit status, or 2 if a program is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cpu", default="max", help="a processor that QEMU emulates; the default has all instruction sets"
    )
    parser.add_argument("--optimize", default="-O3", help="--optimize=-O1 compiles in a third of the time")
    options, tests = parser.parse_known_args()
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        print(f"emulate: this machine lacks {', '.join(missing)}; apt-get install {' '.join(missing)}", file=sys.stderr)
        return 2
    PLACE.mkdir(parents=True, exist_ok=True)
    prepare_system()
    prepare_packages()
    build(options.optimize)
    copy_tree()
    write_python()
    for expected, processor in PROCESSORS.items():
        found = run(processor, "-c", SHOWN, capture_output=True, text=True).stdout.strip()
        print(f"{processor:12s} {found}", flush=True)
        if found != expected:
            print(f"emulate: {processor} should run {expected}", file=sys.stderr)
            return 1
    return run(options.cpu, "-m", "pytest", "--quiet", *(tests or TESTS)).returncode


def prepare_system() -> None:
    """Unpack Debian's Python for AArch64 and the libraries that wheels need, without configuring the packages."""
    if SYSTEM.exists():
        return
    command = ["mmdebstrap", "--quiet", "--variant=extract", "--architectures=arm64"]
    with_packages = "--include=python3,libstdc++6,libgomp1,libssl3,libffi8,libsqlite3-0"
    made = SYSTEM.with_suffix(".new")  # renamed once it is complete
    shutil.rmtree(made, ignore_errors=True)
    subprocess.run([*command, with_packages, SUITE, str(made)], check=True)
    made.rename(SYSTEM)


def prepare_packages() -> None:
    """Install torch without its dependencies for GPUs, Quire's dependencies, and the test tools of the operators."""
    if PACKAGES.exists():
        return
    made = PACKAGES.with_suffix(".new")
    shutil.rmtree(made, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(made)]
    pip += ["--only-binary=:all:", "--python-version", VERSION]
    pip += [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 28, 31, 34)] + [
        "--platform=manylinux2014_aarch64"
    ]
    subprocess.run([*pip, "--no-deps", TORCH], check=True)
    of_torch = ("filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")
    of_quire = [one for one in requires("quire") or () if "extra ==" not in one and not one.startswith("torch")]
    of_tests = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "gguf", "psutil")
    subprocess.run([*pip, "--constraint", str(constraints()), *of_torch, *of_quire, *of_tests], check=True)
    made.rename(PACKAGES)


def constraints() -> Path:
    """Write the constraints of CI without torch. Return their path."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path = PLACE / "constraints.txt"
    path.write_text("\n".join(line for line in lines if not line.startswith("torch==")) + "\n")
    return path


def build(optimize: str) -> None:
    """Build the native library for all instruction sets of Arm."""
    toolchain = PLACE / "toolchain.cmake"
    settings = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "CXX_COMPILER": "aarch64-linux-gnu-g++"}
    toolchain.write_text("".join(f"set(CMAKE_{name} {value})\n" for name, value in settings.items()))
    defined = ["-D", f"CMAKE_TOOLCHAIN_FILE={toolchain}", "-D", f"QUIRE_OPTIMIZE={optimize}"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(LIBRARY), *defined], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(LIBRARY), "--parallel"], check=True)


def copy_tree() -> None:
    """Copy the sources and the native library."""
    shutil.rmtree(TREE, ignore_errors=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, TREE / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, TREE)
    shutil.copy(LIBRARY / "libquire_cpu.so", TREE / "src" / "quire" / "ops" / "cpu")


def write_python() -> None:
    """Write the script that starts the emulated Python. It is its `sys.executable`, so that tests can start others."""
    path = os.pathsep.join(map(str, (TREE / "src", TREE, TREE / "bench" / "src", PACKAGES)))
    PYTHON.write_text(
        "#!/bin/sh\n"
        f"export PYTHONHOME={SYSTEM}/usr PYTHONPATH={path} OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}\n"
        f'exec qemu-aarch64 -cpu "$EMULATED_CPU" -L {SYSTEM} -0 "$0" {SYSTEM}/usr/bin/python{VERSION} "$@"\n'
    )
    PYTHON.chmod(PYTHON.stat().st_mode | stat.S_IXUSR)


def run(cpu: str, *arguments: str, **options: bool) -> subprocess.CompletedProcess[str]:
    """Run the emulated Python on a processor."""
    env = os.environ | {"EMULATED_CPU": cpu}
    return subprocess.run([str(PYTHON), *arguments], cwd=TREE, env=env, check=False, **options)  # type: ignore[call-overload,no-any-return]


if __name__ == "__main__":
    raise SystemExit(main())
