"""What commands import, and Python's garbage collector, which is as it was after an import."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from quire.frontend import embedding, loglikelihood, outputs
from quire.importing import uncollected


def fail() -> None:
    """Import something that raises."""
    with uncollected():
        assert not gc.isenabled()
        raise ImportError


def test_it_is_off_meanwhile_and_on_again_even_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_importing_a_public_name_leaves_it_on() -> None:
    code = "import gc, quire; quire.SamplingParams; print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


# Each would take a second of a start, or is not asked for.
WHAT_IS_IMPORTED = """
import runpy, sys

def serve():
    print("transformers" in sys.modules, file=sys.stderr)
    from tests.server.serving import serving
    with serving() as server:
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status == 200
    absent = ("transformers", "quire.server.observability.traces", "opentelemetry.exporter")
    print([one for one in absent if one in sys.modules], file=sys.stderr)

try:
    runpy.run_module("quire", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code
serve()
"""


@pytest.mark.slow
def test_neither_generate_nor_a_server_imports_transformers_or_traces() -> None:
    """Others may import what is installed of OpenTelemetry; without its option the server does not."""
    arguments = ["generate", "def fibonacci(", "--max-tokens", "8", "--temperature", "0"]
    command = [sys.executable, "-c", WHAT_IS_IMPORTED, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["False", "[]"]
    assert done.stdout.startswith("def fibonacci(")
    assert len(done.stdout) > len("def fibonacci(") + 4


@pytest.mark.parametrize(
    ("former", "now"), [("text", outputs), ("embedding", embedding), ("loglikelihood", loglikelihood)]
)
def test_former_places_of_public_names_warn(former: str, now: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"quire.{former}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"quire.{former} is now quire.frontend"):
        module = importlib.import_module(f"quire.{former}")
    names = [name for name in vars(module) if name.endswith(("Output", "Sequence", "Logprob"))]
    assert names
    assert all(getattr(module, name) is getattr(now, name) for name in names)
