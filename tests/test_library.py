"""Quire next to torch and numpy alone: the operators run, and the rest says which packages are missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

SRC = Path(__file__).parent.parent / "src"
# Decoding over a paged cache, compared with dense attention in float64 on the same keys.
OPERATORS = """
import torch
from quire import ops

torch.manual_seed(0)
q, (k_cache, v_cache) = torch.randn(2, 4, 32), torch.randn(2, 8, 2, 16, 32)
tables, lengths = torch.tensor([[5, 3], [1, -1]]), torch.tensor([20, 3])
for name in ops.BACKENDS:
    if ops.unavailable(name) is None:
        out = ops.paged_decode(q, k_cache, v_cache, tables, lengths, backend=name)
        for row, table, length, found in zip(q, tables, lengths, out):
            k, v = (x[table].double().transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(2, 0)
                    for x in (k_cache, v_cache))
            scores = torch.einsum("hd,hkd->hk", row.double(), k) / 32**0.5
            expected = torch.einsum("hk,hkd->hd", scores.softmax(-1), v)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
        print(name)
"""
EVERY_MODULE = """
import importlib, json, pkgutil
import quire
from quire.errors import MissingPackage

names = [module.name for module in pkgutil.walk_packages(quire.__path__, "quire.", onerror=lambda name: None)]
said = {}
for name in [*names, "LLM", "AsyncLLM"]:
    try:
        importlib.import_module(name) if name in names else getattr(quire, name)
        said[name] = []
    except MissingPackage as error:
        said[name] = str(error).partition(" needs packages that are not installed: ")[2].partition(". ")[0].split(", ")
    except ImportError as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""
# A model's logits with Quire's attention, compared with eager attention.
INTEGRATION = """
import torch
import transformers
import quire.integrations.transformers

torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, intermediate_size=64)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
ids = torch.randint(97, (2, 9))
with torch.no_grad():
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("quire")
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)
"""


def needed(name: str) -> dict[str, Distribution]:
    """A distribution, and all that it depends on here."""
    found: dict[str, Distribution] = {}
    pending = [name]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # an option of a build for GPUs, say
            continue
        for line in found[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return found


def link(directory: Path, *names: str) -> Path:
    """Make a directory of which these distributions, and all that they depend on, can be imported."""
    directory.mkdir(exist_ok=True)
    for one in (one for name in names for one in needed(name).values()):
        for path in {path.parts[0] for path in one.files or ()} - {"..", "__pycache__"}:
            if not (directory / path).exists():
                (directory / path).symlink_to(str(one.locate_file(path)))
    return directory


def run(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where only torch, numpy, what they depend on, and Quire's sources can be imported."""
    path = f"import sys; sys.path[:0] = [{str(link(directory, 'torch', 'numpy'))!r}, {str(SRC)!r}]\n"
    # Neither this environment's packages nor variables.
    return subprocess.run([sys.executable, "-I", "-S", "-c", path + code], check=False, capture_output=True, text=True)


@pytest.mark.slow
def test_the_operators_need_torch_and_numpy_alone(tmp_path: Path) -> None:
    """And what the other packages lack is named. With transformers the integration runs, too.

    Each module can be imported, or the error says what is missing. Packages of extras are named by their callers.
    """
    more = f"sys.path.append({str(link(tmp_path / 'more', 'transformers'))!r})"
    done = run(tmp_path / "least", OPERATORS + EVERY_MODULE + more + INTEGRATION)
    assert done.returncode == 0, done.stderr
    *backends, modules = done.stdout.splitlines()
    assert {"reference", "gather"} <= set(backends)
    said = json.loads(modules)
    assert said.pop("quire.ops.cpu.libquire_cpu").startswith("ImportError: dynamic module does not define")
    assert not said["quire.ops.compat.flash"]
    assert not said["quire.integrations.gate"]
    assert {"fastapi", "uvicorn"} <= set(said["quire.server"]) & set(said["quire.fleet"])
    models = {"huggingface_hub", "regex", "safetensors", "tokenizers", "transformers"}
    assert set(said["quire.models"]) == set(said["LLM"]) == set(said["AsyncLLM"]) == models
    assert said["quire.integrations.transformers"] == ["transformers"]
    others = {name: error for name, error in said.items() if isinstance(error, str)}
    assert all(
        re.search(r"No module named '(ray|triton)'|the package lm_eval is missing", error) for error in others.values()
    ), others


def test_the_command_says_what_it_lacks(tmp_path: Path) -> None:
    done = run(tmp_path, "import runpy; runpy.run_module('quire', run_name='__main__')")
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last == (
        "quire.errors.MissingPackage: quire.cli needs packages that are not installed: rich, typer, yaml. Install "
        "these, or all that Quire needs: pip install quire"
    )
