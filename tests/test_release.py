"""What a tag needs before anything of it is published."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import release

ROOT = Path(__file__).parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One that is ready to be tagged v0.1.0."""
    for name in release.VERSIONS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version = release.versions(ROOT)[0][1]
    sections = "# Changelog", "## [Unreleased]", f"## [{version}] - 2026-12-01", "### Added", "- Wheels."
    (tmp_path / "CHANGELOG.md").write_text("\n\n".join([*sections, "## [0.0.1] - 2026-01-01", "- All.\n"]))
    return tmp_path


def test_the_repository_names_one_version() -> None:
    assert len({version for _, version in release.versions(ROOT)}) == 1


def test_the_changelog_has_where_the_next_release_comes_from() -> None:
    found = release.SECTION.findall((ROOT / "CHANGELOG.md").read_text())
    assert found[0] == ("Unreleased", "")
    assert len({name for name, _ in found}) == len(found)
    assert all(date for _, date in found[1:])


def test_the_notes_are_the_section_of_the_tag(repository: Path) -> None:
    version = release.versions(repository)[0][1]
    assert release.notes(f"v{version}", repository) == "### Added\n\n- Wheels."


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("CHANGELOG.md", r"## \[\d\S*\] - 2026-12-01", "## [9.9.9] - 2026-12-01", "has no section"),
        ("CHANGELOG.md", " - 2026-12-01", "", "has no date"),
        ("CHANGELOG.md", "### Added\n\n- Wheels.", "", "is empty"),
        ("src/quire/__init__.py", '__version__ = ".*"', '__version__ = "0.0.9"', "__init__.py has version '0.0.9'"),
        ("bench/pyproject.toml", "quire==", "quire>=", "bench/pyproject.toml has no line"),
    ],
)
def test_what_does_not_agree_stops_the_release(repository: Path, name: str, old: str, new: str, said: str) -> None:
    path = repository / name
    text, count = re.subn(old, new, path.read_text(), count=1)
    assert count == 1
    path.write_text(text)
    with pytest.raises(release.NotReady, match=re.escape(said)):
        release.notes(f"v{release.versions(ROOT)[0][1]}", repository)


@pytest.mark.parametrize("tag", ["0.1.0", "v0.1", "v1.0.0-beta", ""])
def test_a_tag_has_one_form(tag: str, repository: Path) -> None:
    with pytest.raises(release.NotReady, match="must be v and a version"):
        release.notes(tag, repository)


def workflow(name: str) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    return loaded


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def test_only_what_publishes_may_write() -> None:
    """Elsewhere a step that goes wrong can neither publish nor change the repository."""
    for path in WORKFLOWS.glob("*.yml"):
        assert workflow(path.name)["permissions"] == {"contents": "read"}, path
    granted = {
        name: job["permissions"] for name, job in workflow("release.yml")["jobs"].items() if "permissions" in job
    }
    assert granted == {"pypi": {"id-token": "write"}, "github": {"contents": "write"}}


def test_nothing_is_published_that_was_not_tried() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert set(jobs["pypi"]["needs"]) == {"notes", "source", "try"}
    assert jobs["try"]["needs"] == ["wheel"]
    assert jobs["github"]["needs"] == ["pypi"]
    for name in ("notes", "pypi", "github"):
        assert jobs[name]["if"] == "github.ref_type == 'tag'"  # started by hand, it publishes nothing


def test_workflows_call_what_there_is() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = " ".join(step.get("run", "") for path in WORKFLOWS.glob("*.yml") for step in steps(path.name))
    made, scripts = re.findall(r"\bmake ([a-z-]+)", commands), re.findall(r"tools/\w+\.py|\.ci/\w+", commands)
    assert set(made) <= targets
    assert scripts
    assert all((ROOT / name).exists() for name in scripts)


def test_wheels_are_built_for_three_platforms_at_the_floor() -> None:
    assert workflow("release.yml")["jobs"]["wheel"]["strategy"]["matrix"]["runner"] == [
        *("ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"),
    ]
    project = (ROOT / "pyproject.toml").read_text()
    for machine in ("x86_64", "aarch64"):
        assert f'manylinux-{machine}-image = "manylinux_2_28"' in project
