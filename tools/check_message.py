"""Check the form of a commit message: `area: verb object`, at most 72 characters.

git calls it through pre-commit, with a file. Without one, the messages of all commits of a branch are checked, from the
commit at which it left origin/main; on main itself there are none. The lint job of check.yml does that.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72  # characters of the first line
FORM = re.compile(r"[A-Za-z][\w.+-]*(, [\w.+-]+)*: \S.*[^.\s]")
# A subject with one of these names no change that a reader would look for.
VAGUE = re.compile(r"\b(mend\w*|again|what|as it is)\b", re.IGNORECASE)
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
    if found := VAGUE.search(first):
        return f"the first line is {first!r}; name the change instead of {found[0]!r}"
    if len(lines) > 1 and lines[1].strip():
        return f"the second line is {lines[1]!r}; it must be empty"
    return None


def of_branch(root: Path) -> list[str]:
    """Return the messages of the commits since this branch left origin/main."""
    log = ["git", "-C", str(root), "log", "--format=%B%x00", "origin/main..HEAD"]
    listed = subprocess.run(log, capture_output=True, text=True, check=False).stdout
    return [message.strip() for message in listed.split("\0") if message.strip()]


if __name__ == "__main__":
    given = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]
    problems = [found for message in given or of_branch(Path()) if (found := problem(message))]
    if problems:
        sys.exit("\n".join(f"commit message: {found}" for found in problems))
