"""Print the lowest versions that the two pyproject.toml allow, one per line: `python tools/lowest.py install|audit`.

install: constraints for the test environment of `make test-lowest`. All direct dependencies are at their lowest
versions, also those of the package for measurements and the development tools. Only torch has the version of
constraints.txt, since not all of its releases have a build without CUDA.
audit: the direct dependencies of an installation of Quire, which `make audit` looks up.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PRODUCT, MEASURING = ROOT / "pyproject.toml", ROOT / "bench" / "pyproject.toml"
NOT_LOWERED = frozenset({"torch"})


def main() -> int:
    """Print the requested lines."""
    asked = {"install": install, "audit": audit}.get(" ".join(sys.argv[1:]))
    if asked is None:
        print("the purpose of the lines is missing: give install or audit", file=sys.stderr)
        return 2
    print("\n".join(asked()))
    return 0


def install() -> list[str]:
    """Return constraints for the test environment."""
    direct = requirements("dependencies") + requirements("dev") + requirements("all", MEASURING)
    lowered = [each for each in direct if each.name not in NOT_LOWERED]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in pinned if line.partition("==")[0] in NOT_LOWERED] + [at_floor(each) for each in lowered]


def audit() -> list[str]:
    """Return pinned requirements, without those of the tests."""
    return [at_floor(each) for each in requirements("dependencies")]


def requirements(key: str, project: Path = PRODUCT) -> list[Requirement]:
    """Return a list of a pyproject.toml, in its order. It is parsed as Python, since Python 3.10 has no TOML parser."""
    found = re.search(rf"^{key} = (\[.*?^\])", project.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{project} has no list {key!r}")
    return [Requirement(each) for each in ast.literal_eval(found[1])]


def floor(requirement: Requirement) -> str:
    """Return the lowest version that is allowed. Raises ValueError unless there is exactly one floor."""
    floors = [each.version for each in requirement.specifier if each.operator == ">="]
    if len(floors) != 1:
        raise ValueError(f"pyproject.toml: {requirement} has {len(floors)} floors; write NAME>=VERSION")
    return floors[0]


def at_floor(requirement: Requirement) -> str:
    """Return the requirement pinned to its lowest version."""
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{canonicalize_name(requirement.name)}=={floor(requirement)}{marker}"


if __name__ == "__main__":
    sys.exit(main())
