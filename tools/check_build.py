"""Print the size of the compiled kernels and fail if it exceeds its limits: `python tools/check_build.py [BUILD]`.

The number of template instances determines compile time, memory and bytes, so it is limited for each instruction set,
and so is the size. The time that ninja took for each file is printed but not limited. BUILD is CMake's build directory,
by default that of the editable install. Needs binutils, which come with a compiler.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Limits(NamedTuple):
    """Limits of one instruction set, or of the library."""

    size: int  # bytes of code and constants
    functions: int


# By the number of vectors that a panel has: two on AVX2, four elsewhere.
NARROW, WIDE = Limits(900_000, 600), Limits(2_000_000, 900)
LIBRARY = 10_000_000  # bytes of the file, for any number of instruction sets


def sets(build: Path) -> dict[str, list[Path]]:
    """Return the object files of each instruction set."""
    found: dict[str, list[Path]] = {}
    for path in sorted(build.glob("CMakeFiles/*.dir/src/quire/ops/cpu/csrc/*.o")):
        kind, _, isa = path.relative_to(build).parts[1].removesuffix(".dir").partition("_")
        if kind in ("kernels", "linears"):
            found.setdefault(isa, []).append(path)
    return found


def size(path: Path) -> int:
    """Return the bytes of an object file's code and constants."""
    printed = subprocess.run(["size", path], check=True, capture_output=True, text=True).stdout
    return int(printed.splitlines()[1].split()[0])


def functions(path: Path) -> int:
    """Return the number of an object file's functions."""
    listed = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout
    return sum(line.split()[-2] in "tTwW" for line in listed.splitlines())


def seconds(build: Path) -> dict[str, float]:
    """Return the seconds that ninja took for each output, by name. Other steps may have run at the same time."""
    log = build / ".ninja_log"
    lines = [line.split("\t") for line in log.read_text().splitlines()[1:]] if log.exists() else []
    return {name: (int(end) - int(start)) / 1000 for start, end, _, name, *_ in lines}


def check(build: Path) -> list[str]:
    """Print all figures, and return an error message for each limit that is exceeded."""
    faults, taken = [], seconds(build)
    for isa, paths in sets(build).items():
        limits = NARROW if isa == "avx2" else WIDE
        found = Limits(sum(map(size, paths)), sum(map(functions, paths)))
        print(f"{isa}: {found.size:,} of {limits.size:,} bytes, {found.functions} of {limits.functions} functions")
        for path in paths:
            time = taken.get(str(path.relative_to(build)))
            took = f" {time:6.1f} s" if time else ""
            print(f"  {path.name.removesuffix('.cpp.o'):16} {size(path):9,} bytes{took}")
        faults += [
            f"{isa} has {value:,} {name}; {limit:,} are allowed"
            for name, value, limit in zip(("bytes", "functions"), found, limits, strict=True)
            if value > limit
        ]
    return faults


def main() -> int:
    """Check a build and the library of the source tree."""
    build = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "editable"
    if not sets(build):
        print(f"no kernels were compiled in {build}", file=sys.stderr)
        return 2
    faults = check(build)
    [library] = [*build.glob("libquire_cpu.*"), *(ROOT / "src" / "quire" / "ops" / "cpu").glob("libquire_cpu.*")][:1]
    print(f"{library.name}: {library.stat().st_size:,} of {LIBRARY:,} bytes")
    if library.stat().st_size > LIBRARY:
        faults.append(f"{library} has {library.stat().st_size:,} bytes; {LIBRARY:,} are allowed")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
