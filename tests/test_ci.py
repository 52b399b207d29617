"""What CI runs: each file belongs to a part of it, and no test is left out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.parts import PARTS, ROOT, SUITE, changed, matches, touched

TRACKED = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()


def jobs(workflow: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"]
    return loaded


def test_each_file_is_covered_by_a_part_or_by_the_suite() -> None:
    patterns = {pattern for listed in (*PARTS.values(), SUITE) for pattern in listed}
    assert not [path for path in TRACKED if not matches(path, patterns)], "tools/parts.py has no place for these"
    unused = {pattern for pattern in patterns if not any(matches(path, [pattern]) for path in TRACKED)}
    assert not unused, "tools/parts.py has these for no file"


@pytest.mark.parametrize(
    ("paths", "parts"),
    [
        ([], []),
        (["src/quire/engine/scheduler.py", "tests/engine/test_engine.py"], []),
        (["src/quire/server/api/routes.py"], ["clients"]),
        (["README.md"], ["documents"]),
        (["src/quire/ray/app.py", "src/quire/ops/cpu/csrc/linear.h"], ["wheel", "documents", "ray"]),
        (["src/quire/ops/triton/tiles.py"], ["triton"]),
        (["deploy/helm/quire/rules.yml"], ["deploy"]),
        (["src/quire/models/quantisation/awq.py", "docs/cpu.md"], ["documents", "formats"]),
    ],
)
def test_a_change_touches(paths: list[str], parts: list[str]) -> None:
    assert touched(paths) == parts


def test_a_branch_is_compared_with_where_it_left_main(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        subprocess.run(["git", "-C", clone, *author, *arguments], check=True, capture_output=True)

    clone = tmp_path / "origin"
    clone.mkdir()
    git("init")
    for name in ("kept", "renamed", "edited"):
        (clone / name).write_text(f"{name}\n" * 20)
    git("add", ".")
    git("commit", "-m", "first")
    assert changed(clone) == []  # there is no origin/main

    git("clone", ".", str(tmp_path / "clone"))
    (clone / "kept").write_text("main goes on")
    git("commit", "-a", "-m", "second")
    clone = tmp_path / "clone"
    assert changed(clone) == []
    git("checkout", "-b", "branch")
    git("mv", "renamed", "a new name")
    git("commit", "-m", "third")
    (clone / "edited").write_text("not committed")
    git("fetch")
    assert changed(clone) == ["a new name", "edited", "renamed"]


def test_the_script_and_the_nightly_run_have_all_parts() -> None:
    script = (ROOT / ".ci" / "parts").read_text()
    assert re.findall(r"^    (\w+)\)", script, re.MULTILINE) == list(PARTS)
    assert jobs("nightly")["parts"]["strategy"]["matrix"]["part"] == list(PARTS)


def test_a_nightly_run_that_fails_is_reported() -> None:
    report = jobs("nightly")["report"]
    assert set(report["needs"]) == jobs("nightly").keys() - {"report"}
    assert report["permissions"] == {"issues": "write"}


def test_the_shards_leave_no_test_out() -> None:
    *others, rest = [shard["tests"].split() for shard in jobs("check")["tests"]["strategy"]["matrix"]["include"]]
    directories = [directory for shard in others for directory in shard]
    assert rest == [f"--ignore={directory}" for directory in directories]
    assert all((ROOT / directory).is_dir() for directory in directories)
