"""The operators' tests on an emulated Arm processor.

`python tools/emulate.py [--cpu NAME] [--optimize=FLAG] [OPTIONS OF PYTEST]` compiles the native kernels with a cross
compiler, and runs the tests in an AArch64 Python under QEMU's emulation of a process. It needs Debian's packages cmake,
g++-aarch64-linux-gnu, qemu-user and mmdebstrap, and a package index for the wheels. All it makes lies in build/emulate.
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
# The last release whose wheel for AArch64 is one for CPUs; later ones want CUDA's libraries.
TORCH = "torch==2.10.0"
TOOLS = {
    "cmake": "cmake",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "mmdebstrap": "mmdebstrap",
}
COPIED = ("src", "tests", "bench", "examples", "docs", "conftest.py", "pyproject.toml", "README.md")
# Processors that QEMU knows and a wheel of torch runs on, by the best instruction set that they run.
PROCESSORS = {"neon": "a64fx", "neon_dot": "neoverse-n1", "neon_bf16": "max"}
SHOWN = "from quire.ops.cpu import native; print(native.default().isa)"
TESTS = (
    "tests/ops",
    "-k",
    # Without a test of the reference backend: oneDNN's products take minutes in emulation.
    "(cpu or lora or gguf_blocks) and not slow_backend",
    "--numprocesses",
    str(os.cpu_count() or 1),
    "--timeout",
    "1800",
)


def main() -> int:
    """Prepare what is not there yet, and run the tests; their exit status, or 2 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cpu", default="max", help="a processor that QEMU knows; the default has all instruction sets"
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
    """Debian's Python for AArch64 and what wheels need of the system, unpacked and not configured: nothing runs yet."""
    if SYSTEM.exists():
        return
    command = ["mmdebstrap", "--quiet", "--variant=extract", "--architectures=arm64"]
    with_packages = "--include=python3,libstdc++6,libgomp1,libssl3,libffi8,libsqlite3-0"
    made = SYSTEM.with_suffix(".new")  # renamed once it is whole
    shutil.rmtree(made, ignore_errors=True)
    subprocess.run([*command, with_packages, SUITE, str(made)], check=True)
    made.rename(SYSTEM)


def prepare_packages() -> None:
    """Torch without what it depends on for GPUs, what Quire depends on, and the test tools that the operators need."""
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
    """Those of CI, less torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path = PLACE / "constraints.txt"
    path.write_text("\n".join(line for line in lines if not line.startswith("torch==")) + "\n")
    return path


def build(optimize: str) -> None:
    """The native library, for all instruction sets of Arm."""
    toolchain = PLACE / "toolchain.cmake"
    settings = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "CXX_COMPILER": "aarch64-linux-gnu-g++"}
    toolchain.write_text("".join(f"set(CMAKE_{name} {value})\n" for name, value in settings.items()))
    defined = ["-D", f"CMAKE_TOOLCHAIN_FILE={toolchain}", "-D", f"QUIRE_OPTIMIZE={optimize}"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(LIBRARY), *defined], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(LIBRARY), "--parallel"], check=True)


def copy_tree() -> None:
    """The sources, with that library beside them."""
    shutil.rmtree(TREE, ignore_errors=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, TREE / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, TREE)
    shutil.copy(LIBRARY / "libquire_cpu.so", TREE / "src" / "quire" / "ops" / "cpu")


def write_python() -> None:
    """What starts the emulated Python, and is its `sys.executable`, so that tests start others."""
    path = os.pathsep.join(map(str, (TREE / "src", TREE, TREE / "bench" / "src", PACKAGES)))
    PYTHON.write_text(
        "#!/bin/sh\n"
        f"export PYTHONHOME={SYSTEM}/usr PYTHONPATH={path} OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}\n"
        f'exec qemu-aarch64 -cpu "$EMULATED_CPU" -L {SYSTEM} -0 "$0" {SYSTEM}/usr/bin/python{VERSION} "$@"\n'
    )
    PYTHON.chmod(PYTHON.stat().st_mode | stat.S_IXUSR)


def run(cpu: str, *arguments: str, **options: bool) -> subprocess.CompletedProcess[str]:
    """The emulated Python on that processor."""
    env = os.environ | {"EMULATED_CPU": cpu}
    return subprocess.run([str(PYTHON), *arguments], cwd=TREE, env=env, check=False, **options)  # type: ignore[call-overload,no-any-return]


if __name__ == "__main__":
    raise SystemExit(main())
