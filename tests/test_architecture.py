"""The rules of the house, read off the syntax trees: who imports whom, what stays free of torch, how long a file is."""

import ast
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "quire"
FILES = sorted(SRC.rglob("*.py"))
MEASURING = sorted((SRC.parent.parent / "bench" / "src" / "quire_bench").rglob("*.py"))
LONG = 600  # lines: from here on a file deserves a second look

# Package or module below quire -> those that it may import. Each has a place here.
BASE = {"errors", "request", "config", "progress", "importing"}
ENGINE = BASE | {"ops", "cache", "models", "engine", "fingerprint"}
MAY_IMPORT = {
    "errors": set(),
    "progress": set(),
    "importing": set(),
    "embedded": set(),
    "request": {"errors"},
    "config": {"errors"},
    "ops": {"errors"},
    "integrations": {"errors", "ops", "__init__"},
    "cache": {"errors", "request", "config", "ops"},
    "models": {"errors", "request", "config", "ops", "cache", "integrations", "progress"},
    "engine": {"errors", "request", "config", "ops", "cache", "models"},
    "fingerprint": {"errors", "request", "config", "ops", "cache", "models", "engine"},
    "parallel": {"errors", "config", "ops", "cache", "models", "engine", "fingerprint"},
    "sandbox": {"errors", "request", "models"},
    "frontend": ENGINE | {"parallel", "sandbox", "lora"},
    "lora": {"errors"},  # this and the next four are public names at vLLM's paths
    "inputs": set(),
    "metrics": {"frontend"},
    "outputs": {"frontend"},
    "sampling_params": {"request", "engine"},
    "text": {"frontend"},  # this and the next two are the former places of public names
    "embedding": {"frontend"},
    "loglikelihood": {"frontend"},
    "server": ENGINE - {"ops"} | {"parallel", "sandbox", "frontend", "__init__"},
    "fleet": ENGINE - {"ops"} | {"sandbox", "frontend", "server", "__init__"},
    "ray": {"errors", "config", "server", "fleet"},
    "router": {"errors", "config", "server", "fleet"},
    "simulate": {"errors", "request", "config", "cache", "models", "engine", "frontend", "fleet"},
    "terminal": {"errors", "request", "config", "sandbox", "frontend", "server"},
    "diff": ENGINE | {"frontend"},
    "cli": ENGINE | {"diff", "frontend", "server", "fleet", "router", "simulate", "terminal", "__init__"},
    "__init__": {"importing", "ops", "request", "config", "inputs", "engine", "frontend"},
    "__main__": {"cli"},
}

NO_TORCH = ("errors.py", "request.py", "config.py", "cache/__init__.py", "cache/pool.py", "cache/prefix.py",
            "cache/manager.py", "cache/events.py", "cache/usage.py", "cache/audit.py", "engine/__init__.py",
            "engine/scheduler.py", "engine/plan.py", "engine/policy.py", "engine/queue.py",
            "engine/inflight_prefixes.py", "engine/beam.py", "engine/trace.py", "fleet/__init__.py", "fleet/state.py",
            "fleet/index.py", "fleet/score.py", "fleet/rates.py", "fleet/membership.py", "fleet/process.py",
            "ray/membership.py", "ray/scaling.py", "fleet/scaling.py", "fleet/averages.py")  # fmt: skip

SHAPED = (
    "models/batch.py",
    "ops/backend.py",
    "ops/decoder_operators.py",
    "ops/program.py",
    "ops/recurrent/operators.py",
)

# Lines of Python, C++, JavaScript, HTML and CSS that a package may have. Lower a number when a package has become
# smaller; raise one only for a feature that is worth it. A directory `vendor` has unchanged files of others, which are
# maintained there, so their lines do not count.
MOST_LINES = {
    "cache": 3_945,
    "cli": 2_200,
    "engine": 7_175,
    "diff": 1_170,
    "fingerprint": 715,
    "fleet": 6_080,
    "frontend": 6_210,
    "integrations": 910,
    "models": 17_675,
    "ops": 25_615,
    "parallel": 585,
    "ray": 415,
    "router": 625,
    "sandbox": 1_410,
    "server": 19_575,
    "lora": 45,
    "simulate": 4_250,
    "terminal": 1_295,
    "modules": 1_875,  # those that are in no package
}


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@cache
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


@cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of each file."""
    gc.disable()
    try:
        found = {path: ast.parse(path.read_text()) for path in FILES}
    finally:
        gc.enable()
    gc.freeze()  # else every collection of later tests looks through a million nodes, for a second
    return found


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Drop the trees after these tests: the garbage collector would scan them in all later ones."""
    yield
    imported_modules.cache_clear()
    trees.cache_clear()


def violations(find: Callable[[Path, ast.Module], Iterator[str]]) -> str:
    """What breaks one rule in all files, a line each; empty if nothing does."""
    return "\n".join(f"{path.relative_to(SRC)}{found}" for path, tree in trees().items() for found in find(path, tree))


def modules_of(path: Path, known: set[str]) -> set[str]:
    """Those of the known modules that a file imports, packages by their own names."""
    found = set()
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return (found & known) - {name_of(path)}


def public_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those within functions and classes that are private."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and re.match("_(?!_)", node.name)):
            yield node
            yield from public_nodes(node)


def name_of(path: Path) -> str:
    """The module's dotted name."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_circle_of_imports() -> None:
    """Imports for types count, and so do those within functions."""
    known = {name_of(path) for path in FILES}
    below = {name_of(path): modules_of(path, known) for path in FILES}
    while leaves := [name for name, modules in below.items() if not modules & below.keys()]:
        for name in leaves:
            del below[name]
    assert not below, f"these import one another: {', '.join(sorted(below))}"


def test_only_the_backend_object_leads_to_a_device() -> None:
    """What stands above the operators asks `ops.load` for a backend, and never for its modules."""

    def find(path: Path, tree: ast.Module) -> Iterator[str]:
        if room(path) in {"models", "cache", "engine", "server", "frontend", "integrations"}:
            for module in sorted(imported_modules(tree)):
                if re.match(r"quire\.ops\.(cpu|native|triton)\b", module):
                    yield f" imports {module}; a Backend has what it needs"

    found = violations(find)
    assert not found, found


def test_backends_stand_on_the_other_rooms_of_the_operators() -> None:
    """Weights, layers with a state, and checks are below all backends, and below the interface of these."""
    below = {SRC / "ops" / name for name in ("checks", "recurrent", "weights")}

    def find(path: Path, tree: ast.Module) -> Iterator[str]:
        if path.parent in below:
            for module in sorted(imported_modules(tree)):
                if re.match(r"quire\.ops\.(backends?|compat|cpu|program|registry|triton)\b", module):
                    yield f" imports {module}, which is above it"

    found = violations(find)
    assert not found, found


def test_measuring_code_imports_the_product_and_never_the_reverse() -> None:
    """Of the product only the command line has its name, to call `quire bench` where that is installed."""
    assert [str(path.relative_to(SRC)) for path in FILES if "quire_bench" in path.read_text()] == ["cli/__init__.py"]
    assert not any(module.startswith("quire_bench") for tree in trees().values() for module in imported_modules(tree))
    measuring = [imported_modules(ast.parse(path.read_text())) for path in MEASURING]
    assert any(module.startswith("quire.") for modules in measuring for module in modules)


def test_only_one_room_knows_ray() -> None:
    """The fleet works without it: `quire.ray` can be left out, and nothing else imports it."""

    def find(path: Path, tree: ast.Module) -> Iterator[str]:
        if room(path) != "ray":
            for module in sorted(imported_modules(tree)):
                if re.match(r"(quire\.)?ray\b", module):
                    yield f" imports {module}"

    found = violations(find)
    assert not found, found


def test_files_import_only_rooms_below() -> None:
    def find(path: Path, tree: ast.Module) -> Iterator[str]:
        here = room(path)
        if here not in MAY_IMPORT:
            yield f" is in {here}, which has no place in MAY_IMPORT"
            return
        for module in sorted(imported_modules(tree)):
            if module.startswith("quire."):
                there = module.split(".")[1]
                if not any((SRC / there).with_suffix(suffix).exists() for suffix in ("", ".py")):
                    there = "__init__"  # a name of the package itself
                if there != here and there not in MAY_IMPORT[here]:
                    yield f" imports {module}; {here} may import {', '.join(sorted(MAY_IMPORT[here])) or 'nothing'}"

    found = violations(find)
    assert not found, found


def test_long_files_are_warned_of() -> None:
    """Advice, no rule: a long file is often two."""
    long = {path: count for path in FILES if (count := len(path.read_text().splitlines())) > LONG}
    if long:
        lines = ", ".join(f"{path.relative_to(SRC)} ({count})" for path, count in long.items())
        warnings.warn(f"files of more than {LONG} lines: {lines}", stacklevel=1)
    assert len(long) < len(FILES) // 10, f"a tenth of all files has more than {LONG} lines"


def test_no_package_has_more_lines_than_its_budget() -> None:
    lines = dict.fromkeys(MOST_LINES, 0)
    for path in SRC.rglob("*.*"):
        if path.suffix in (".py", ".cpp", ".h", ".js", ".html", ".css") and path.parent.name != "vendor":
            within = path.relative_to(SRC).parts
            lines[within[0] if len(within) > 1 else "modules"] += path.read_text().count("\n")
    print(*(f"{package:12} {count:6} of {MOST_LINES[package]:6} lines" for package, count in lines.items()), sep="\n")
    over = {package: count for package, count in lines.items() if count > MOST_LINES[package]}
    assert not over, f"these packages have more lines than MOST_LINES allows: {over}"


def test_all_requests_are_made_by_the_factory() -> None:
    """`make_requests` and its like are called by `RequestFactory` alone."""
    made = {"make_requests", "embedding_request", "loglikelihood_request", "constraints_for", "truncated"}

    def find(path: Path, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (names := made & {alias.name for alias in node.names}):
                yield f":{node.lineno} imports {', '.join(sorted(names))}; RequestFactory makes requests"

    own = {SRC / "frontend" / name for name in ("request_factory.py", "embedding.py", "loglikelihood.py")}
    found = "\n".join(
        f"{path.relative_to(SRC)}{problem}"
        for path, tree in trees().items()
        if path not in own
        for problem in find(path, tree)
    )
    assert not found, found


def test_no_file_reads_the_environment() -> None:
    def find(path: Path, tree: ast.Module) -> Iterator[str]:
        if path == SRC / "parallel" / "launch.py":  # launchers of ranks speak through it
            return
        if path == SRC / "sandbox" / "process.py":  # it hands on what its processes need of it
            return
        if path == SRC / "cli" / "environment.py":  # it warns of unknown variables, and reads the port
            return
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in {"environ", "environb", "getenv"}:
                yield f":{node.lineno} reads the environment"

    found = violations(find)
    assert not found, found


def test_guards_are_errors_not_asserts() -> None:
    def find(path: Path, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                yield f":{node.lineno} asserts; an assert is gone under -O"

    found = violations(find)
    assert not found, found


def test_no_module_keeps_mutable_state() -> None:
    """Module-level lists, dicts and sets are tables: in capitals, and never changed by a `global` statement."""

    def find(path: Path, tree: ast.Module) -> Iterator[str]:
        yield from (f":{node.lineno} has a global" for node in ast.walk(tree) if isinstance(node, ast.Global))
        for node in tree.body:
            named = isinstance(node, ast.Assign), isinstance(node, ast.AnnAssign)
            targets = node.targets if named[0] else [node.target] if named[1] else []
            for target in targets:
                if isinstance(node.value, (ast.List, ast.Dict, ast.Set)):
                    name = ast.unparse(target)
                    if not name.isupper() and name != "__all__":
                        yield f":{node.lineno} keeps {name}; a table is written in capitals"

    found = violations(find)
    assert not found, found


def test_asyncio_http_and_tokenizers_stay_in_their_packages() -> None:
    """Only servers and their clients know HTTP. Event loops are theirs, and those of two files of the front end."""
    asynchronous = {SRC / "frontend" / "async_llm.py", SRC / "frontend" / "jobs.py"}
    tokenizing = {SRC / "frontend" / "tokenizer.py", SRC / "models" / "files.py"}

    def find(path: Path, tree: ast.Module) -> Iterator[str]:
        modules = {module.split(".")[0] for module in imported_modules(tree)}
        if room(path) not in {"server", "fleet", "router", "ray", "terminal"}:
            for module in sorted(modules & {"asyncio", "fastapi", "uvicorn", "starlette", "http"}):
                if module != "asyncio" or path not in asynchronous:
                    yield f" imports {module}, which is for servers and their clients"
        if "tokenizers" in modules and path not in tokenizing and path.parent != SRC / "models" / "gguf":
            yield " imports tokenizers, which is for the tokenizer and the readers of checkpoints"

    found = violations(find)
    assert not found, found


def test_bookkeeping_is_free_of_torch() -> None:
    """Not even through what it imports, type annotations aside."""
    found = []
    for name in NO_TORCH:
        pending, seen = [SRC / name], set()
        if not pending[0].exists():
            found.append(f"{name}: there is no such file")
        while pending:
            path = pending.pop()
            if path in seen or not path.exists():
                continue
            seen.add(path)
            for module in imported_modules(trees()[path]):
                if module.split(".")[0] in {"torch", "safetensors", "tokenizers"}:
                    found.append(f"{name}: {path.relative_to(SRC)} imports {module}")
                if module.startswith("quire."):
                    inner = SRC.joinpath(*module.split(".")[1:])
                    pending += [inner.with_suffix(".py"), inner / "__init__.py"]
                    pending += [parent / "__init__.py" for parent in inner.parents if SRC in parent.parents]
    assert not found, "\n".join(found)


def test_every_tensor_says_its_shape() -> None:
    """In these files each parameter and field that is a tensor has its shape in brackets on its line."""
    shape = re.compile(r"#.*\[[A-Za-z0-9+*/., _-]+\]")
    found = []
    for name in SHAPED:
        lines = (SRC / name).read_text().splitlines()
        tensors = 0
        for node in public_nodes(trees()[SRC / name]):
            annotation = node.annotation if isinstance(node, (ast.arg, ast.AnnAssign)) else None
            if annotation is not None and re.search(r"\bTensor\b", ast.unparse(annotation)):
                tensors += 1
                if not shape.search(lines[node.lineno - 1]):
                    found.append(f"{name}:{node.lineno} has a tensor without a shape")
        assert tensors > 5, f"{name} has {tensors} tensors; it is not the file that this test is about"
    assert not found, "\n".join(found)
