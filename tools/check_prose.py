"""Count the phrases that docs/develop/style.md asks to avoid: `python tools/check_prose.py [PATH ...]`.

The tables of that page are the list. Without paths, print their number in each area and fail if one has more than
LIMITS allows. With paths, print where the phrases of those files are. Code, inline code and quoted identifiers do not
count.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "develop" / "style.md"
# The number of phrases left: lower it with every change that removes some.
LIMITS = {"messages": 0, "documents": 0, "source": 0}
NO_VERBS = re.compile(r"(What|Whether|How|Where|Which|Why|Let|As|Of)\b")
COMMENT = re.compile(r"(?<![:\w\"'])//([^\n]*)|/\*(.*?)\*/|<!--(.*?)-->", re.DOTALL)
SCRIPT_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|`(?:[^`\\]|\\.)*`')
CODE = re.compile(r"<(script|style)\b.*?</\1>|<!--.*?-->", re.DOTALL)
SHOWN = re.compile(r">([^<>]+)<")  # text between two tags
SCRIPT_VALUE = re.compile(r"\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")  # code within a template


class Found(NamedTuple):
    """A phrase to avoid."""

    area: str
    path: Path
    line: int
    phrase: str


def phrases() -> re.Pattern[str]:
    """Return the pattern of all phrases in the first columns of the page's tables."""
    cells = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    listed = sorted({phrase for cell in cells for phrase in re.findall("`(.+?)`", cell)}, key=len, reverse=True)
    words = "|".join(phrase.replace(" ", r"\s+") for phrase in listed)  # a phrase may continue on the next line
    return re.compile(rf"(?<![\w`.-])({words})(?![\w`-])", re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the area, the line and the text of each piece of prose in a file."""
    text = path.read_text()
    if path.suffix == ".md":
        without_code = re.sub(
            r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
        )
        yield "documents", 1, re.sub(r"`[^`\n]*`|\]\([^)\n]*\)", "` `", without_code)
    elif path.suffix == ".py":
        yield from python_prose(text)
    else:
        for match in COMMENT.finditer(text):
            yield "source", text.count("\n", 0, match.start()) + 1, next(filter(None, match.groups()), "")
        if path.suffix in (".js", ".html"):
            for match in SCRIPT_STRING.finditer(COMMENT.sub(lambda one: "\n" * one[0].count("\n"), text)):
                if " " in (shown := SCRIPT_VALUE.sub("`x`", match[0][1:-1])).strip():
                    yield "messages", text.count("\n", 0, match.start()) + 1, shown

        if path.suffix == ".html":
            for match in SHOWN.finditer(CODE.sub(lambda one: "\n" * one[0].count("\n"), text)):
                yield "messages", text.count("\n", 0, match.start()) + 1, match[1]


def python_prose(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the prose of Python: docstrings and comments in the area "source", other strings in "messages"."""
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(first.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node in docstrings:
                yield "source", node.lineno, node.value
            elif " " in node.value.strip():
                yield "messages", node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield "source", token.start[0], token.string


def found_in(path: Path, pattern: re.Pattern[str]) -> Iterator[Found]:
    """Yield the phrases of a file, and the first words of docstrings that are not verbs."""
    for area, line, text in prose(path):
        plain = re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), text)
        if area == "source" and not text.startswith("#") and path.suffix == ".py" and (first := NO_VERBS.match(text)):
            yield Found(area, path, line, f"{first[1]} ... (first word)")
            plain = " " * first.end() + plain[first.end() :]
        for match in pattern.finditer(plain):
            if "None" in match[1]:
                continue  # Python's
            yield Found(area, path, line + plain.count("\n", 0, match.start()), " ".join(match[1].lower().split()))


def tracked() -> list[Path]:
    """Return the files whose prose counts."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    source = (".py", ".h", ".cpp", ".js", ".html", ".css")
    return [
        ROOT / name
        for name in listed
        if (name.startswith("src/") and name.endswith((*source, ".md")) and "/vendor/" not in name)
        or (name.endswith(".md") and not name.startswith((".github/", "bench/results/", "tests/")))
        if ROOT / name != PAGE
    ]


def main(paths: list[str]) -> int:
    """Print the numbers or, with paths, the places. Return the exit status."""
    pattern = phrases()
    if paths:
        files = [
            file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.rglob("*.*")))
        ]
        for one in (
            one for path in files if path.resolve() in set(tracked()) for one in found_in(path.resolve(), pattern)
        ):
            print(f"{one.path.relative_to(ROOT)}:{one.line}: {one.phrase}")
        return 0
    found = [one for path in tracked() for one in found_in(path, pattern)]
    status = 0
    for area, limit in LIMITS.items():
        counts = Counter(one.phrase for one in found if one.area == area)
        print(
            f"{area}: {counts.total()} of at most {limit}: "
            + ", ".join(f"{n} {phrase}" for phrase, n in counts.most_common(12))
        )
        if counts.total() > limit:
            status = 1
            print(
                f"{area} has phrases that {PAGE.relative_to(ROOT)} asks to avoid; "
                "`python tools/check_prose.py FILE` lists them"
            )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
