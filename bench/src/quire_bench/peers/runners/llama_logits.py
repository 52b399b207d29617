"""Logits of llama.cpp for every token of some prompts: llama_logits FILE PROMPTS OUT. Its environment: see llama_cpp.

PROMPTS: a JSON list of equally long lists of tokens. OUT: a NumPy file, [prompts, tokens, vocabulary].
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np


def main(model: str, prompts: Path, target: Path) -> None:
    """Write the logits."""
    from llama_cpp import Llama

    asked = json.loads(prompts.read_text())
    size, threads = len(asked[0]), int(os.environ["OMP_NUM_THREADS"])
    llama = Llama(model, n_ctx=size, n_batch=size, n_ubatch=size, n_threads=threads, logits_all=True, verbose=False)
    found = []
    for prompt in asked:
        llama.reset()
        llama.eval(prompt)
        found.append(np.array(llama.scores[:size]))
    np.save(target, np.stack(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
