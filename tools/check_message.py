"""Check the form of a commit message: `area: verb object`, at most 72 characters. git calls it through pre-commit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72  # characters of the first line
FORM = re.compile(r"[A-Za-z][\w.+-]*(, [\w.+-]+)*: \S.*[^.\s]")
MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ")


def problem(message: str) -> str | None:
    """Return the fault of a message, or None."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    first = lines[0] if lines else ""
    if first.startswith(MADE_BY_GIT):
        return None
    if len(first) > LONGEST:
        return f"the first line has {len(first)} characters; it may have {LONGEST}: {first!r}"
    if not FORM.fullmatch(first):
        return f"the first line is {first!r}; it must be 'area: verb object', without a full stop"
    if len(lines) > 1 and lines[1].strip():
        return f"the second line is {lines[1]!r}; it must be empty"
    return None


if __name__ == "__main__":
    if found := problem(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.exit(f"commit message: {found}")
