"""What commands import, and Python's garbage collector, which is as it was after an import."""

from __future__ import annotations

import gc
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import pytest

import quire
from quire.config import CacheConfig, EngineConfig, options_of
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


def test_a_notebook_finds_every_name_and_argument() -> None:
    """`dir`, `inspect.signature` and `help`, from the fields that the arguments are made of."""
    assert dir(quire) == sorted(quire.__all__)
    assert all(getattr(quire, name) for name in quire.__all__)
    for kind in (quire.LLM, quire.AsyncLLM):
        found, text = inspect.signature(kind).parameters, " ".join(pydoc.getdoc(kind).split())
        for config in (EngineConfig, CacheConfig):
            hints = get_type_hints(config)
            for name, about in options_of(config).items():
                assert found[name].default == getattr(config, name)
                assert found[name].annotation == hints[name], name
                assert name == "model" or f"{name}: {' '.join(about.help.split())}" in text
        assert list(found)[:2] == ["model", "lora"]
    for made in (quire.SamplingParams, quire.BeamSearchParams, quire.StructuredOutputsParams):
        parameters, text = inspect.signature(made).parameters, pydoc.render_doc(made, renderer=pydoc.plaintext)
        assert list(parameters) == [one.name for one in fields(made)]
        for one in fields(made):
            assert one.default in (MISSING, parameters[one.name].default)
            assert not isinstance(parameters[one.name].annotation, str)
            assert re.search(rf"^ \|      {one.name}: \w", text, re.MULTILINE), one.name


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
