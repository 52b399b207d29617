"""The engine on the Triton backend, padded and replayed, in Triton's interpreter: it draws the CPU backend's tokens.

One small run: its launches take seconds. `test_graphs.py` has the many runs, and those on a GPU.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from quire.ops.cpu import native
from quire.request import Request, SamplingParams
from tests.engine.test_graphs import Twin, graphed, poison, run
from tests.models.checkpoints import engine, save

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU", allow_module_level=True)


def requests() -> list[Request]:
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
    prompts = [array("i", [7 * length + i for i in range(length)]) for length in (1, 5, 12)]
    return [Request(f"{i}", prompt, len(prompt), params) for i, prompt in enumerate(prompts)]


@pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")
def test_the_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    save(tmp_path, "Gemma2", torch.float32, vocab_size=100, num_hidden_layers=2, sliding_window=6,
         query_pre_attn_scalar=16, **sizes)  # fmt: skip
    options = {"dtype": "float32", "num_blocks": 16, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
    twin = Twin()
    found = run(graphed(tmp_path, twin, attention_backend="triton", **options), requests(), poison)
    expected = run(engine(tmp_path, **options), requests())
    assert {name: [one[0] for one in events] for name, events in found.items()} == {
        name: [one[0] for one in events] for name, events in expected.items()
    }
    assert max(twin.replays) == 4
