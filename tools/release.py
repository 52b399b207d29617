"""Print the notes of a release from CHANGELOG.md: `python tools/release.py v0.1.0`.

Fails if the tag, the versions in the repository and the changelog differ, so that nothing is published.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Every place that states the version.
VERSIONS = {
    "pyproject.toml": (r'^version = "(.*)"$', r'^bench = \["quire-bench\[all\]==(.*?)"\]'),
    "bench/pyproject.toml": (r'^version = "(.*)"$', r'^dependencies = \["quire==(.*?)"\]'),
    "src/quire/__init__.py": (r'^__version__ = "(.*)"$',),
}
SECTION = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


class NotReady(Exception):
    """The repository is not ready for the release."""


def main() -> int:
    """Print the notes of a tag."""
    if len(sys.argv) != 2:
        print("the tag is missing: python tools/release.py v0.1.0", file=sys.stderr)
        return 2
    try:
        print(notes(sys.argv[1], ROOT))
    except NotReady as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def notes(tag: str, root: Path) -> str:
    """Return the section of CHANGELOG.md for a tag. Raises NotReady if the tag and the repository differ."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+(rc\d+)?", tag):
        raise NotReady(f"the tag is {tag!r}; it must be v and a version, as v0.1.0 or v0.1.0rc1")
    version = tag[1:]
    for place, found in versions(root):
        if found != version:
            raise NotReady(f"the tag is {tag!r}, but {place} has version {found!r}")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = list(SECTION.finditer(changes))
    for here, after in zip(sections, [*sections[1:], None], strict=True):
        if here[1] == version:
            if here[2] is None:
                raise NotReady(f"CHANGELOG.md: the section [{version}] has no date; write ## [{version}] - YYYY-MM-DD")
            text = changes[here.end() : after.start() if after else len(changes)].strip()
            if not text:
                raise NotReady(f"CHANGELOG.md: the section [{version}] is empty")
            return text
    raise NotReady(f"CHANGELOG.md has no section [{version}]; it has {', '.join(each[1] for each in sections)}")


def versions(root: Path) -> list[tuple[str, str]]:
    """Return each place with the version that it states."""
    found = []
    for name, patterns in VERSIONS.items():
        text = (root / name).read_text(encoding="utf-8")
        for pattern in patterns:
            match = re.search(pattern, text, re.MULTILINE)
            if match is None:
                raise NotReady(f"{name} has no line {pattern}")
            found.append((name, match[1]))
    return found


if __name__ == "__main__":
    sys.exit(main())
