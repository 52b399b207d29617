"""What Quire depends on: each floor is there, is explained in SECURITY.md, and covers all that is imported."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from datetime import date
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import lowest

ROOT = Path(__file__).parent.parent
RUNTIME = lowest.requirements("dependencies")
DEV = lowest.requirements("dev")
MEASURING = lowest.requirements("all", lowest.MEASURING)
# Where one is missing, an error says so: the module, and what is to be installed.
OPTIONAL = {"PIL": "pillow", "msgspec": "msgspec", "opentelemetry": "opentelemetry-sdk", "triton": "triton"} | {
    "zmq": "pyzmq"
}
EXTRAS = {"lm_eval": "eval", "matplotlib": "matplotlib", "ray": "ray"}  # the extra that brings each
COMPARED = {
    "gguf",
    "llama_cpp",
    "mistralrs",
    "nanovllm",
    "openvino",
    "openvino_genai",
    "vllm",
}  # each in an environment of its own
CONSTRAINTS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
ROW = re.compile(r"^\| `([^`]+)` \| ([^ |]+) \| ([^|]+) \| (\d{4}-\d{2}-\d{2}) \|$", re.MULTILINE)


def explained() -> dict[str, re.Match[str]]:
    """SECURITY.md's table, by name: the floor, why it is there, and when that was looked up."""
    return {row[1]: row for row in ROW.finditer((ROOT / "SECURITY.md").read_text())}


def test_the_lists_are_read_as_they_are_written() -> None:
    """They are read without a TOML parser."""
    for path, lists in ((lowest.PRODUCT, (RUNTIME, DEV)), (lowest.MEASURING, (MEASURING,))):
        text = path.read_text()
        for listed in lists:
            assert all(f'"{each.name}>={lowest.floor(each)}' in text for each in listed)
        assert sum(map(len, lists)) == len(re.findall(r'^    "[\w-]+[<>=]', text, re.MULTILINE))


def test_the_measuring_package_is_of_the_same_version() -> None:
    """It uses what is inside Quire, so each wants just that version of the other."""
    [version] = re.findall(r'^version = "(.*)"$', lowest.PRODUCT.read_text(), re.MULTILINE)
    assert f'\nversion = "{version}"\n' in lowest.MEASURING.read_text()
    assert f'\ndependencies = ["quire=={version}"]\n' in lowest.MEASURING.read_text()
    assert f'\nbench = ["quire-bench[all]=={version}"]' in lowest.PRODUCT.read_text()


def test_security_md_explains_the_floor_of_each_dependency() -> None:
    rows = explained()
    assert list(rows) == [each.name for each in RUNTIME]
    for each in RUNTIME:
        row = rows[each.name]
        assert row[2] == lowest.floor(each), f"SECURITY.md gives {each.name} another floor than pyproject.toml"
        assert row[3].strip()
        assert date.fromisoformat(row[4]) >= date(2026, 11, 22)


@pytest.mark.parametrize("requirement", RUNTIME, ids=lambda each: each.name)
def test_what_is_installed_is_allowed(requirement: Requirement) -> None:
    """So the tests say something about it; where `make test-lowest` runs them, they run at the floor."""
    if requirement.marker is not None and not requirement.marker.evaluate():
        pytest.skip(f"not for this platform: {requirement.marker}")
    installed = Version(importlib.metadata.version(requirement.name))
    assert installed in requirement.specifier
    if Path(sys.prefix).name == ".venv-lowest" and requirement.name not in lowest.NOT_LOWERED:
        assert installed == Version(lowest.floor(requirement))


packages_distributions = cache(importlib.metadata.packages_distributions)


def imports(package: Path) -> dict[str, Path]:
    """The outermost names of all that a package imports, each with a file that does."""
    found: dict[str, Path] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0]: path for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found[node.module.partition(".")[0]] = path
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "listed", "others"),
    [
        ("src/quire", RUNTIME, {"quire", *OPTIONAL, *EXTRAS}),
        ("bench/src/quire_bench", RUNTIME + MEASURING, {"quire", "quire_bench"} | COMPARED),
    ],
)
def test_all_that_is_imported_is_a_dependency(package: str, listed: list[Requirement], others: set[str]) -> None:
    """What comes along with a dependency only today may not come tomorrow, and its floor is out of Quire's hands."""
    distributions = packages_distributions()
    declared = {canonicalize_name(each.name) for each in listed}
    for module, path in imports(ROOT / package).items():
        if module not in sys.stdlib_module_names | others:
            names = {canonicalize_name(name) for name in distributions[module]}
            assert names & declared, f"{path.relative_to(ROOT)} imports {module}, which pyproject.toml does not list"
    assert {each.name for each in DEV} >= set(OPTIONAL.values())
    product = lowest.PRODUCT.read_text()
    assert all(re.search(rf'^{extra} = \["{name}\W', product, re.MULTILINE) for name, extra in EXTRAS.items())


@pytest.mark.parametrize("extra", ["events", "traces"])
def test_what_an_extra_brings_is_tested_at_its_floor(extra: str) -> None:
    [listed] = re.findall(rf"^{extra} = (\[.*\])$", lowest.PRODUCT.read_text(), re.MULTILINE)
    assert set(ast.literal_eval(listed)) <= {str(each) for each in DEV}


def test_lowest_versions() -> None:
    def printed(what: str) -> list[str]:
        return subprocess.check_output([sys.executable, "tools/lowest.py", what], cwd=ROOT, text=True).splitlines()

    audited, installed = printed("audit"), printed("install")
    assert "jinja2==3.1.6" in audited
    assert "uvloop==0.21" in audited
    assert len(audited) == len(RUNTIME)
    assert len(installed) == len(RUNTIME) + len(DEV) + len(MEASURING)
    torch = [line for line in CONSTRAINTS if line.startswith("torch==")]
    assert [line for line in installed if line.startswith("torch==")] == torch
    assert f"torch=={lowest.floor(RUNTIME[0])}" in audited


@pytest.mark.parametrize("bad", ["torch", "torch==2.13.0", "torch<3", "torch>=2.6,>=2.11"])
def test_a_requirement_without_one_floor_is_an_error(bad: str) -> None:
    with pytest.raises(ValueError, match="floors; write NAME>=VERSION"):
        lowest.floor(Requirement(bad))


@pytest.mark.parametrize("line", [line for line in CONSTRAINTS if "==" in line])
def test_no_pin_keeps_quire_from_the_oldest_python(line: str) -> None:
    pin, oldest = Requirement(line), "3.10"
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text()
    if pin.marker is not None and not pin.marker.evaluate({"python_version": oldest}):
        return  # that Python gets another release
    found = importlib.metadata.metadata(pin.name)
    if Version(found["Version"]) not in pin.specifier:
        pytest.skip(f"{pin.name} {found['Version']} is installed")
    assert SpecifierSet(found["Requires-Python"] or "").contains(f"{oldest}.0"), f"{pin} is not for Python {oldest}"
