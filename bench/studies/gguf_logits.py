"""Measure how far Quire's and llama.cpp's next tokens are from those of the model that a GGUF file means.

    python bench/studies/gguf_logits.py --llama-cpp PYTHON FILE ...

That model has the file's weights dequantised, and is computed in fp32 without rounding what they are multiplied with.
The distance is the Kullback-Leibler divergence in nats, the mean over all tokens of a few prompts of random tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.frontend.llm import LLM
from quire_bench.engine.quantisation import divergence, logits_of
from quire_bench.peers.process import runners_in
from quire_bench.proc import num_cores
from quire_bench.workloads import workload

PROMPTS, TOKENS = 4, 256
RUNNER = "quire_bench.peers.runners.llama_logits"
DTYPES = ("float32", "float16", "bfloat16")
EXACT: Mapping[str, Any] = {"dtype": "float32", "quantization_activations": "bf16"}


def prompts() -> list[list[int]]:
    """Random tokens, the same every time."""
    return [prompt[:TOKENS] for prompt in workload("rose").prompts[:PROMPTS]]


def theirs(python: Path, model: Path, asked: Sequence[Sequence[int]]) -> list[Tensor]:
    """llama.cpp's logits: of each prompt [T - 1, V]."""
    with TemporaryDirectory() as made:
        folder = runners_in(Path(made))
        (folder / "prompts.json").write_text(json.dumps(asked))
        command: list[str | Path] = [python.absolute(), "-m", RUNNER, model.absolute()]
        command += [folder / "prompts.json", folder / "logits.npy"]
        environment = os.environ | {"OMP_NUM_THREADS": str(num_cores())}
        subprocess.run(command, check=True, cwd=folder, env=environment)
        return [torch.from_numpy(logits[:-1]) for logits in np.load(folder / "logits.npy")]


def ours(model: Path, asked: Sequence[list[int]], options: Mapping[str, Any]) -> list[Tensor]:
    """Quire's, with these options."""
    plain = {"num_speculative_tokens": 0, "enable_prefix_caching": False, "max_model_len": len(asked[0]) + 1}
    with LLM(str(model), **plain | dict(options)) as llm:
        return logits_of(llm, asked)


def main(given: Sequence[str] | None = None) -> None:
    """Print a line a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a GGUF file with a vocabulary")
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="PYTHON", help="of llama.cpp's environment")
    options = parser.parse_args(given)
    asked = prompts()
    for model in options.files:
        exact = ours(model, asked, EXACT)
        found = {"llama.cpp": theirs(options.llama_cpp, model, asked)}
        found |= {f"Quire in {dtype}": ours(model, asked, {"dtype": dtype}) for dtype in DTYPES}
        far = {name: divergence(exact, logits, asked).mean for name, logits in found.items()}
        print(f"{model.name}: {', '.join(f'{name} {mean:.2e}' for name, mean in far.items())}", flush=True)


if __name__ == "__main__":
    main()
