"""Install a wheel in a new environment and generate a text: `python tools/check_install.py dist/quire-*.whl`.

The environment gets the wheel and its dependencies, in the versions of constraints.txt. No compiler is on the path, and
nothing is built. Prints the time that this takes, and the time to the first token.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROMPT = "class Node:\n    def __init__(self"


def main() -> None:
    """Print the figures of one wheel."""
    parser = argparse.ArgumentParser(description="Install a wheel in a new environment and generate a text with it.")
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory() as directory:
        made, installed, first = check(wheel, Path(directory))
    print(f"wheel              {wheel.stat().st_size / 1e6:.1f} MB")
    print(f"empty environment  {made:.1f} s")
    print(f"pip install        {installed:.1f} s")
    print(f"first token        {first:.1f} s after the start of quire generate")


def check(wheel: Path, directory: Path) -> tuple[float, float, float]:
    """Return the seconds for the environment, for the install, and from `quire generate` to its first token."""
    home = directory / "venv"
    start = time.perf_counter()
    venv.create(home, with_pip=True)
    made = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP"))}
    environment |= {"PATH": str(home / "bin"), "HOME": str(Path.home())}  # no compiler, and pip's cache
    pip = [str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    constraints = f"--constraint={ROOT / 'constraints.txt'}"
    subprocess.run([*pip, constraints, str(wheel)], check=True, env=environment, cwd=directory)
    installed = time.perf_counter()

    quire = str(home / "bin" / "quire")
    shown = subprocess.check_output([quire, "info"], env=environment, cwd=directory, text=True)
    if "backend auto       cpu" not in shown:
        sys.exit(f"the native kernels do not run:\n{shown}")
    began = time.perf_counter()
    command = [quire, "generate", PROMPT, "--temperature", "0", "--max-tokens", "16"]
    with subprocess.Popen(command, env=environment, cwd=directory, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        text = process.stdout.read(len(PROMPT) + 1)  # the first token has at least one byte
        first = time.perf_counter()
        text += process.stdout.read()
    if process.returncode != 0 or not text.decode().startswith(PROMPT) or len(text) <= len(PROMPT) + 16:
        sys.exit(f"quire generate ended with {process.returncode} after {text!r}")
    return made - start, installed - made, first - began


if __name__ == "__main__":
    main()
