"""Every command and every piece of Python in the documents runs."""

import inspect
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import ops
from quire.cli import app

ROOT = Path(__file__).parent.parent
SERVED = "serving.md"  # wants a running server, so tests/server/test_serving_page.py runs what is in it
DOCUMENTS = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name != SERVED]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    found = [
        (path.name, body) for path in DOCUMENTS for kind, body in BLOCK.findall(path.read_text()) if kind == language
    ]
    return [(f"{name}-{i}", body) for i, (name, body) in enumerate(found)]


COMMANDS = [(name, line[2:]) for name, body in blocks("console") for line in body.splitlines() if line.startswith("$ ")]


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for _, command in COMMANDS], ids=[f"{n}: {c}" for n, c in COMMANDS])
def test_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command.removeprefix(".venv/bin/"))
    if program == "make":  # these tests run inside one of them: ask what would be done
        if shutil.which("make") is None:
            pytest.skip("this machine has no make")
        assert subprocess.check_output(["make", "--dry-run", *arguments])
        return
    assert program == "quire"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python(path: Path) -> None:
    """A page's pieces of Python, from top to bottom."""
    names: dict[str, object] = {"__name__": "document"}
    text = path.read_text()
    for match in BLOCK.finditer(text):
        if match[1] == "python":
            above = text[: match.start()].count("\n") + 1
            exec(compile("\n" * above + match[2], path.name, "exec"), names)


def test_every_public_operator_has_its_place_on_the_page() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    shown = "".join(body for kind, body in BLOCK.findall(page) if kind == "python")
    for name in ops.__all__:
        if callable(getattr(ops, name)) and name not in ("AttentionPlan", "Limits", "Ops", "PagedPrefillInfo"):
            assert f"{name}(" in shown or f"{name}.create(" in shown, f"no example calls {name}"
        assert f"`{name}`" in page or name in shown, f"docs/operators.md does not name {name}"
    for name, _ in inspect.getmembers(ops.Ops, inspect.isfunction):
        assert name.startswith("_") or f"{name}(" in shown, f"no example calls {name}"


def test_the_readme_draws_the_tree_as_it_is() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "src" / "quire").rglob("*.py")):
        if path.name not in ("__main__.py", "__init__.py"):
            assert path.name in readme, f"README's tree lacks {path.relative_to(ROOT)}"


def test_the_lineage_names_tests_that_exist() -> None:
    page, named, path = (ROOT / "docs" / "lineage.md").read_text(), 0, None
    for reference in re.findall(r"`([a-z_/]*\.py(?:::\w+)?|::test_\w+)`", page):
        file, _, name = reference.partition("::")
        if file and not (ROOT / "tests" / file).exists():  # a file of the library
            assert (ROOT / file).exists() or (ROOT / "src" / "quire" / "ops" / file).exists(), reference
            continue
        path = ROOT / "tests" / file if file else path
        assert not name or f"def {name}(" in path.read_text(), f"{path} has no {name}"
        named += 1
    assert named > 60
