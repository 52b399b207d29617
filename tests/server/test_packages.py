"""Which of the server's packages imports which: http knows nothing of the routes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SERVER = Path(__file__).parent.parent.parent / "src" / "quire" / "server"
MAY_IMPORT = {
    "http": {"http", "logs"},
    "protocol": {"protocol", "http"},
    "observability": {"observability", "http"},
    "tools": {"tools"},
    "batch": {"batch", "api", "protocol", "http", "run", "server_config"},
    "api": {"api", "observability", "protocol", "tools", "http", "server_config"},
}


# They are run in a child by their paths, where loading quire would take memory and time.
ALONE = ("child.py", "template_program.py", "grammar_program.py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_those_below(package: str) -> None:
    files = list((SERVER / package).glob("*.py"))
    assert len(files) > 3
    for path in files:
        parts = [name.split(".") for name in imported(path)]
        found = {part[2] for part in parts if part[:2] == ["quire", "server"]}
        assert found <= MAY_IMPORT[package], path


def test_what_a_sandbox_runs_imports_nothing_of_quire() -> None:
    for name in ALONE:
        assert not [one for one in imported(SERVER.parent / "sandbox" / name) if one.startswith("quire")]


@pytest.mark.slow
def test_no_module_of_uvicorn_is_private_or_an_implementation() -> None:
    for path in SERVER.rglob("*.py"):
        for name in imported(path):
            assert not name.startswith(("uvicorn._", "uvicorn.protocols")), path
