"""Every study imports, and says how it is run: whatever it measures with may have moved."""

import runpy
from pathlib import Path

import pytest

STUDIES = sorted((Path(__file__).parents[1] / "studies").glob("*.py"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_imports_and_names_its_command(path: Path) -> None:
    found = runpy.run_path(str(path))
    assert f"python bench/studies/{path.name}" in found["__doc__"]
