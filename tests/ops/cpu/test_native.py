"""Which kernels run here, and what is said where none do."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import LLM, ops
from quire.cli import app
from quire.errors import BadValue, Unsupported
from quire.ops import native
from tests.ops.cases import Case, Step

BUILT = ", ".join(native.built(native.library_path())) if native.library_path().exists() else ""


def test_auto_takes_the_native_kernels_and_their_best_instruction_set(backend):
    served = native.runnable(native.library_path())
    assert ops.load("auto").name == "cpu"
    assert served
    assert served == tuple(isa for isa in native.ISAS if isa in served)
    assert native.load().isa == served[0]
    assert {"avx2", "neon"} & set(served)  # the least of x86-64 and of Arm
    assert served[0] != "amx_emulated"


def test_an_instruction_set_that_the_library_lacks_says_how_to_build_it(backend, monkeypatch):
    best, path = native.load().isa, native.library_path()
    monkeypatch.setattr(native, "built", lambda path: ("another",))
    monkeypatch.setattr(native, "runnable", lambda path: ("another",))
    built = rf"without the kernels for '{best}'; it has those for another\. .*QUIRE_ISAS=another;{best}' \.$"
    with pytest.raises(Unsupported, match=built):
        native.load(best)
    monkeypatch.undo()
    runs = ", ".join(native.runnable(path))
    with pytest.raises(Unsupported, match=rf"^this machine does not run the kernels for 'neo'; it runs {runs}$"):
        native.load("neo")
    listed = f"{best}; the library has {BUILT}, of which this machine runs {runs}"
    assert f"native kernels     {listed}" in CliRunner().invoke(app, ["info"]).output.splitlines()


@pytest.fixture
def _without_triton(monkeypatch):
    """Its interpreter, which these tests run in, serves a CPU too."""
    monkeypatch.delitem(ops.BACKENDS, "triton")


@pytest.mark.usefixtures("_without_triton")
@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ("x86_64", "this CPU lacks AVX2, which the native kernels need"),
        ("aarch64", f"this CPU lacks the instruction sets that the library was built for: {BUILT}"),
    ],
)
def test_a_cpu_without_instructions_gets_the_reference_and_one_line_that_says_so(backend, monkeypatch, machine, reason):
    monkeypatch.setattr(native, "runnable", lambda path: ())
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert ops.load("auto").name == "reference"
    with pytest.raises(Unsupported, match=f"cpu: {reason}"):
        ops.load("cpu")
    shown = CliRunner().invoke(app, ["info"]).output.splitlines()
    assert [line.split() for line in shown if "this CPU lacks" in line and "AMX" not in line] == [
        f"backend cpu not available: {reason}".split()
    ]
    assert "backend auto       reference" in shown


@pytest.mark.usefixtures("_without_triton")
def test_an_installation_without_the_library_says_so(backend, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "libquire_cpu.so")
    assert ops.load("auto").name == "reference"
    assert "was not built for this platform" in str(ops.unavailable("cpu"))


@pytest.mark.usefixtures("_without_triton")
def test_a_system_that_is_too_old_is_told_what_is_needed(backend, monkeypatch, tmp_path: Path):
    """As if it were built for a glibc that is yet to come: the loader refuses it."""
    path = tmp_path / "libquire_cpu.so"
    names = native.library_path().read_bytes()
    path.write_bytes(names.replace(b"\0GLIBC_2.27\0", b"\0GLIBC_9.27\0").replace(b"\0GLIBC_2.14\0", b"\0GLIBC_9.14\0"))
    monkeypatch.setattr(native, "library_path", lambda: path)
    reason = str(ops.unavailable("cpu"))
    assert re.search(r"GLIBC_9\.\d+' not found", reason)
    assert "need glibc 2.28 and the libstdc++ of GCC 8" in reason
    assert "from its source here, which needs a C++ compiler, or take a newer system" in reason
    assert ops.load("auto").name == "reference"
    shown = CliRunner().invoke(app, ["info"])
    assert shown.exit_code == 0
    assert "need glibc 2.28" in shown.output


@pytest.mark.usefixtures("_without_triton")
def test_a_library_that_is_none_is_named(backend, monkeypatch, tmp_path: Path):
    path = tmp_path / "libquire_cpu.so"
    path.write_bytes(b"half a download")
    monkeypatch.setattr(native, "library_path", lambda: path)
    assert str(ops.unavailable("cpu")).startswith(f"the native library {path} cannot be loaded: ")


@pytest.mark.usefixtures("_without_triton")
def test_the_slow_backend_is_never_taken_silently(backend, monkeypatch, caplog):
    LLM()
    assert not caplog.messages
    monkeypatch.setattr(native, "runnable", lambda path: ())
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    LLM(attention_backend="reference")  # as asked
    assert not caplog.messages
    result = CliRunner().invoke(app, ["generate", "import os", "--max-tokens", "2"])
    assert result.exit_code == 0
    assert result.stdout.startswith("import os")
    assert caplog.messages == [
        "the slow backend 'reference' is used, since 'cpu' is not available: this CPU lacks AVX2, which the native "
        "kernels need"
    ]


def test_it_serves_no_gpu(backend):
    assert "not 'cuda'" in str(ops.unavailable("cpu", "cuda"))


def test_a_plan_of_another_backend_is_refused(backend):
    step = Step(Case(query_lens=(2,), context_lens=(5,)))
    plan = step.write(ops.load("reference"))
    with pytest.raises(BadValue, match=r"the plan is of another backend \(a AttentionPlan\)"):
        backend.attention(step.q, step.kv, plan)
    with pytest.raises(BadValue, match="of another backend"):
        backend.write_kv(step.k_new, step.v_new, step.kv, plan)


def test_a_plan_remembers_caches_but_not_without_end(backend, monkeypatch):
    monkeypatch.setattr("quire.ops.cpu.worklist.MAX_CACHES", 3)
    step = Step(Case(query_lens=(2,), context_lens=(5,)))
    plan = step.write(backend)
    expected = backend.attention(step.q, step.kv, plan)
    for _ in range(10):
        other = ops.PagedKV(step.kv.k.clone(), step.kv.v.clone())
        assert backend.attention(step.q, other, plan).equal(expected)
        assert len(plan._caches) <= 3


FREEING = """
import dataclasses
import torch
from quire.ops import AttentionSpec
from quire.ops import native
from quire.ops.cpu.worklist import CpuPlan

library = dataclasses.replace(native.default(), plan_free=lambda handle: print("freed", flush=True))
spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, block_size=4, num_blocks=1, dtype=torch.float32)
given_up, kept = (CpuPlan(spec, 1, 1, 1, library) for _ in range(2))
del given_up
print("the end", flush=True)
"""


@pytest.mark.slow
def test_a_plan_is_freed_when_it_is_given_up_but_not_at_the_exit_when_a_thread_may_still_read_it():
    done = subprocess.run([sys.executable, "-c", FREEING], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "freed\nthe end\n"
