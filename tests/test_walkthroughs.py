"""The walk-throughs under docs/develop are followed to their end: their Python runs, their C++ is compiled."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from quire import ops
from quire.errors import Unsupported
from quire.ops import native
from tests.forks import Spawner

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "develop"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall((PAGES / page).read_text()) if kind == language]


@pytest.mark.parametrize("page", ["add-a-model.md", "add-a-backend.md"])
def test_the_python_of(page: str, tmp_path: Path, forks: Spawner) -> None:
    """In a process of its own, since it adds to the package's tables."""
    process = forks.start(page, program="\n".join([f"import os; os.chdir({str(tmp_path)!r})", *blocks(page, "python")]))
    status = process.wait(120)
    assert status == 0, process.log.read_text()[-3000:]


def test_every_walkthrough_is_followed() -> None:
    followed = {"add-a-model.md", "add-a-backend.md", "add-an-instruction-set.md"}
    assert {path.name for path in PAGES.glob("add-*.md")} == followed
    assert {path.name for path in PAGES.glob("*.md") if blocks(path.name, "python")} <= followed


@pytest.mark.long
def test_an_instruction_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's changes to a copy of the sources, compiled. What takes long is left out: other sets, optimizing."""
    if reason := native.unavailable():
        pytest.skip(reason)
    if shutil.which("cmake") is None:
        pytest.skip("this machine has no cmake; building Quire brings one along for itself only")
    csrc, binding = Path("src", "quire", "ops", "cpu", "csrc"), Path("src", "quire", "ops", "native.py")
    shutil.copytree(ROOT / csrc, tmp_path / csrc)
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    shutil.copy(ROOT / binding, tmp_path / binding)
    [header] = blocks("add-an-instruction-set.md", "cpp")
    (tmp_path / csrc / "simd_avx2_vnni.h").write_text(header)
    for diff in blocks("add-an-instruction-set.md", "diff"):
        follow(diff, tmp_path)
    listed = re.search(r"^ISAS = (\(.*?\))", (tmp_path / binding).read_text(), re.MULTILINE)
    assert listed
    quick = ["-D", "QUIRE_OPTIMIZE=-O1", "-D", "QUIRE_ISAS=avx2_vnni"]
    for command in (["cmake", "-S", ".", "-B", "build", *quick], ["cmake", "--build", "build"]):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    library = tmp_path / "build" / "libquire_cpu.so"
    monkeypatch.setattr(native, "ISAS", tuple(re.findall(r"\w+", listed[1])))
    if "avx2_vnni" not in native.runnable(library):
        with pytest.raises(Unsupported, match="does not run"):
            native.load("avx2_vnni", library)
        return
    loaded = native.load("avx2_vnni", library)
    monkeypatch.setattr(native, "default", lambda: loaded)
    spec = ops.AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=40, block_size=8, num_blocks=64, dtype=torch.float32)
    step = torch.tensor([0, 70, 71]), torch.tensor([90, 300]), torch.randperm(64)[None].expand(2, 64)
    kv = ops.PagedKV(*torch.randn(2, 64, 2, 8, 40))
    q = torch.randn(71, 6, 40)
    found, expected = (
        each.attention(q, kv, each.plan(spec, *step), return_lse=True)
        for each in (ops.load("cpu"), ops.load("reference"))
    )
    torch.testing.assert_close(found, expected)


def follow(diff: str, root: Path) -> None:
    """Make the change that a block of the page shows: lines with - become the lines with +."""
    head, *lines = diff.splitlines()
    path = root / head.removeprefix("--- ")
    old, new = ("\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
    text = path.read_text()
    assert text.count(old + "\n") == 1, f"{head}: {old!r} does not stand there once"
    path.write_text(text.replace(old, new))
