"""The lowest versions that the two pyproject.toml allow, one line each: `python tools/lowest.py install|audit`.

install: constraints for an environment in which the tests run, as `make test-lowest` makes it. All direct dependencies
are at their floors, those of the measuring package and the tools for development too; torch is the one of
constraints.txt, since only some of its releases are to be had as a build without CUDA.
audit: what `make audit` looks up: the direct dependencies of whom installs Quire.
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
    """Print what is asked for."""
    asked = {"install": install, "audit": audit}.get(" ".join(sys.argv[1:]))
    if asked is None:
        print("say what the lines are for: install or audit", file=sys.stderr)
        return 2
    print("\n".join(asked()))
    return 0


def install() -> list[str]:
    """Constraints for the tests' environment."""
    direct = requirements("dependencies") + requirements("dev") + requirements("all", MEASURING)
    lowered = [each for each in direct if each.name not in NOT_LOWERED]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in pinned if line.partition("==")[0] in NOT_LOWERED] + [at_floor(each) for each in lowered]


def audit() -> list[str]:
    """Pinned requirements, those of the tests left out."""
    return [at_floor(each) for each in requirements("dependencies")]


def requirements(key: str, project: Path = PRODUCT) -> list[Requirement]:
    """What a pyproject.toml lists there, in its order. Such a list is Python, too; Python 3.10 has no TOML parser."""
    found = re.search(rf"^{key} = (\[.*?^\])", project.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{project} has no list {key!r}")
    return [Requirement(each) for each in ast.literal_eval(found[1])]


def floor(requirement: Requirement) -> str:
    """The lowest version that is allowed. Raises ValueError where there is not one of them."""
    floors = [each.version for each in requirement.specifier if each.operator == ">="]
    if len(floors) != 1:
        raise ValueError(f"pyproject.toml: {requirement} has {len(floors)} floors; write NAME>=VERSION")
    return floors[0]


def at_floor(requirement: Requirement) -> str:
    """The requirement of just that version."""
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{canonicalize_name(requirement.name)}=={floor(requirement)}{marker}"


if __name__ == "__main__":
    sys.exit(main())
