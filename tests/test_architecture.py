"""The rules of the house, read off the syntax trees: who imports whom, what stays free of torch, how long a file is."""

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "quire"
FILES = sorted(SRC.rglob("*.py"))
MEASURING = sorted((SRC.parent.parent / "bench" / "src" / "quire_bench").rglob("*.py"))
MAX_LINES = 500

# Room -> the rooms it may import. A room is the first part of a module's path below quire.
MAY_IMPORT = {
    "errors": set(),
    "progress": set(),
    "request": {"errors"},
    "config": {"errors"},
    "ops": {"errors"},
    "integrations": {"errors", "ops"},
    "batch": {"errors", "request", "config"},
    "cache": {"errors", "request", "config", "ops"},
    "models": {"errors", "request", "config", "ops", "batch", "cache", "integrations"},
    "engine": {"errors", "request", "config", "ops", "batch", "cache", "models"},
    "text": {"errors", "request", "config", "ops", "batch", "cache", "models", "engine"},
    "embedding": {"errors", "request", "text"},
    "scoring": {"errors", "request", "text"},
    "llm": {
        *("errors", "request", "config", "ops", "batch", "cache", "models", "engine", "text", "progress"),
        *("embedding", "scoring"),
    },
}
FACES = {"cli", "server", "__init__", "__main__"}  # may import everything

NO_TORCH = ("errors.py", "request.py", "config.py", "cache/__init__.py", "cache/pool.py", "cache/prefix.py",
            "cache/manager.py", "cache/events.py", "cache/usage.py", "cache/audit.py", "engine/__init__.py",
            "engine/scheduler.py", "engine/plan.py", "engine/order.py", "engine/queue.py", "engine/sharing.py",
            "engine/beam.py", "engine/trace.py", "engine/workloads.py")  # fmt: skip

SHAPED = ("batch.py", "ops/spec.py", "ops/backend.py")


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> set[str]:
    """All modules that a file imports at run time or for its types, wherever the import stands."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from quire import ops` imports the module quire.ops
            modules |= {
                f"{node.module}.{alias.name}" if node.module == "quire" else node.module for alias in node.names
            }
    return modules


def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
class TestEachFile:
    def test_imports_only_rooms_below(self, path: Path) -> None:
        here = room(path)
        if here in FACES or here == "embedded":
            return
        assert here in MAY_IMPORT, f"{path} stands in a room that DESIGN does not know"
        for module in imported_modules(ast.parse(path.read_text())):
            if module.startswith("quire."):
                there = module.split(".")[1]
                assert there == here or there in MAY_IMPORT[here], f"{path} imports {module}"

    def test_is_short(self, path: Path) -> None:
        assert len(path.read_text().splitlines()) <= MAX_LINES

    def test_does_not_read_the_environment(self, path: Path) -> None:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in {"environ", "environb", "getenv"}, f"{path}:{node.lineno} reads the environment"

    def test_guards_with_errors_not_asserts(self, path: Path) -> None:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}: an assert is gone under -O"

    def test_has_no_mutable_module_state(self, path: Path) -> None:
        """Module-level lists, dicts and sets are tables: in capitals, and never changed by a `global` statement."""
        tree = ast.parse(path.read_text())
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree))
        for node in tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for target in targets:
                if isinstance(node.value, (ast.List, ast.Dict, ast.Set)):
                    assert target.id.isupper() or target.id == "__all__", f"{path}:{node.lineno}"

    def test_only_the_server_knows_asyncio(self, path: Path) -> None:
        known = {"asyncio", "fastapi", "uvicorn", "starlette", "http"}
        assert (
            room(path) == "server"
            or not {m.split(".")[0] for m in imported_modules(ast.parse(path.read_text()))} & known
        )

    def test_only_text_knows_strings(self, path: Path) -> None:
        modules = imported_modules(ast.parse(path.read_text()))
        assert room(path) in {"text", *FACES} or not any(module.startswith("tokenizers") for module in modules)


@pytest.mark.parametrize("name", NO_TORCH)
def test_is_free_of_torch(name: str) -> None:
    """Not even through what it imports, type annotations aside."""
    pending, seen = [SRC / name], set()
    while pending:
        path = pending.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for module in imported_modules(ast.parse(path.read_text())):
            assert module.split(".")[0] not in {"torch", "safetensors", "tokenizers"}, (
                f"{name}: {path} imports {module}"
            )
            if module.startswith("quire."):
                inner = SRC.joinpath(*module.split(".")[1:])
                pending += [inner.with_suffix(".py"), inner / "__init__.py"]
                pending += [parent / "__init__.py" for parent in inner.parents if SRC in parent.parents]


def test_rooms_without_torch_stand_in_the_design() -> None:
    assert all((SRC / name).exists() for name in NO_TORCH if name != "cache/prefix.py")


@pytest.mark.parametrize("name", SHAPED)
def test_every_tensor_says_its_shape(name: str) -> None:
    """In these files each parameter and field that is a tensor has its shape in brackets on its line."""
    path = SRC / name
    lines = path.read_text().splitlines()
    shape = re.compile(r"#.*\[[A-Za-z0-9+*/., _-]+\]")
    found = 0
    for node in ast.walk(ast.parse(path.read_text())):
        annotation = node.annotation if isinstance(node, (ast.arg, ast.AnnAssign)) else None
        if annotation is not None and re.search(r"\bTensor\b", ast.unparse(annotation)):
            found += 1
            assert shape.search(lines[node.lineno - 1]), f"{path}:{node.lineno} has a tensor without a shape"
    assert found > 5


def test_measuring_code_imports_the_product_and_never_the_reverse() -> None:
    """Of the product only the command line has its name, to call `quire bench` where that is installed."""
    assert [str(path.relative_to(SRC)) for path in FILES if "quire_bench" in path.read_text()] == ["cli/__init__.py"]
    for path in FILES:
        assert not any(module.startswith("quire_bench") for module in imported_modules(ast.parse(path.read_text())))
    assert any(
        module.startswith("quire.") for path in MEASURING for module in imported_modules(ast.parse(path.read_text()))
    )


def test_measuring_code_keeps_the_rules_of_any_file() -> None:
    rules = TestEachFile()
    for path in MEASURING:
        rules.test_is_short(path)
        rules.test_guards_with_errors_not_asserts(path)
        rules.test_has_no_mutable_module_state(path)
