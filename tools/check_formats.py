"""Test that Quire reads checkpoints of the library compressed-tensors as the library itself does.

`python tools/check_formats.py [DIRECTORY]` installs the library into the virtual environment DIRECTORY, which is
.venv-formats by default. Its newest version does not write g_idx any more, so an older one is used too, which in turn
cannot read its own zeros back. Everything else is local: the models are tiny and random.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.models import choose
from quire.models.quantisation.module import Module
from quire.models.weights import Checkpoint

ROOT = Path(__file__).parent.parent
PACKAGE, OLDER = "compressed-tensors==0.20.0", "compressed-tensors==0.10.2"
NEW_CASES = ("W4A16 symmetric", "W4A16 asymmetric", "W8A16, a scale an output", "W8A8")
OLD_CASES = ("W4A16 symmetric", "W4A16 with g_idx", "W8A8")
PROMPT = list(range(2, 60))
LARGEST_ERROR = 1e-4  # mean difference of logprobs, if only weights are integers
LARGEST_ROUNDING = 0.2  # the same if activations are integers too; a wrong layout gives several units


class Failed(Exception):
    """Quire does not read a checkpoint as its library does."""


def main() -> int:
    """Write and read all cases. Return 1 if one of them failed."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-formats").absolute()
    install(directory)
    failed = False
    for package, cases in ((PACKAGE, NEW_CASES), (OLDER, OLD_CASES)):
        print(package)
        with TemporaryDirectory() as made:
            try:
                write(directory, package, Path(made), cases)
            except Failed as error:
                print(f"    FAILED: {error}", flush=True)
                failed = True
                continue
            for case in cases:
                try:
                    shown = check(Path(made) / case)
                except (Failed, QuireError) as error:
                    shown, failed = f"FAILED: {error}", True
                print(f"    {case:26s} {shown}", flush=True)
    return int(failed)


def install(directory: Path) -> None:
    """Install both versions into an environment, the older one in a separate directory."""
    if not (directory / "bin").exists():
        venv.create(directory, with_pip=True)
    pip = [str(directory / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), PACKAGE], check=True)
    if not (directory / "older").exists():
        fetched = directory / "fetched"  # renamed once it is complete
        shutil.rmtree(fetched, ignore_errors=True)
        subprocess.run([*pip, "--no-deps", "--target", str(fetched), OLDER], check=True)
        fetched.rename(directory / "older")


def write(directory: Path, package: str, made: Path, cases: tuple[str, ...]) -> None:
    """Write the cases with a version of the library. Raises Failed with the end of its output."""
    found = {"PYTHONPATH": str(directory / "older")} if package == OLDER else {}
    command = [str(directory / "bin" / "python"), str(ROOT / "tools" / "write_formats.py"), str(made), *cases]
    done = subprocess.run(command, env=os.environ | found, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{package} wrote nothing: {done.stderr[-2000:]}")


def check(directory: Path) -> str:
    """Compare a case. Return a description of the comparison. Raises Failed if the results differ."""
    quantised, plain = directory / "quantised", directory / "plain"
    count = check_weights(quantised, Checkpoint(plain))
    truth = logprobs(plain)
    exact = difference(logprobs(quantised, quantization_activations="bf16"), truth, LARGEST_ERROR)
    rounded = difference(logprobs(quantised), truth, LARGEST_ROUNDING)
    return (
        f"{count} weights equal to the bit; logprobs differ by {exact:.1g}, with rounded activations by {rounded:.1g}"
    )


def check_weights(directory: Path, plain: Checkpoint) -> int:
    """Compare all quantised linears with the library's weights. Return their number. Raises Failed on a difference."""
    scheme, checkpoint, count = choose(directory).scheme, Checkpoint(directory), 0
    if scheme is None:
        raise Failed("config.json has no quantisation")
    for name in sorted(plain.names):
        module, form = name.removesuffix(".weight"), scheme.form(name.removesuffix(".weight"))
        if "_proj" not in name or form is None:
            continue
        expected = plain[name]
        found = form.read(Module(checkpoint, module, *expected.shape), torch.float32).dequantised()
        if not torch.equal(found, expected.float()):
            raise Failed(f"{module} differs by {(found - expected).abs().max():.3g} from the library's weights")
        count += 1
    if count == 0:
        raise Failed("no linear is quantised")
    return count


def logprobs(directory: Path, **options: Any) -> Tensor:
    """Return the logprobs of a prompt's tokens, without the first."""
    llm = LLM(str(directory), model_impl="quire", dtype="float32", num_blocks=64, **options)
    [output] = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = zip(PROMPT, output.prompt_logprobs or [], strict=True)
    return torch.tensor([each[token].logprob for token, each in found if each is not None])


def difference(found: Tensor, truth: Tensor, most: float) -> float:
    """Return the mean difference of the logprobs. Raises Failed if it is too large."""
    mean = float((found - truth).abs().mean())
    if not mean <= most:
        raise Failed(f"logprobs differ by {mean:.3g} from those of the plain weights; expected at most {most:g}")
    return mean


if __name__ == "__main__":
    sys.exit(main())
