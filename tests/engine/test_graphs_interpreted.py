"""The engine on the Triton backend, padded and replayed, in Triton's interpreter: it draws the CPU backend's tokens.

Small runs: their launches take seconds. `test_graphs.py` has the many runs, and those on a GPU.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from quire.models.lora.fitting import prepare
from quire.ops import native
from quire.request import Request, SamplingParams
from tests.engine.runs import poison
from tests.engine.test_graphs import Found, Twin, graphed, run
from tests.models.adapters import linears, save_adapter
from tests.models.checkpoints import engine, save

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU", allow_module_level=True)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")]

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
OPTIONS = {"dtype": "float32", "num_blocks": 16, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4}


def requests(loras: tuple[str | None, ...] = (None,)) -> list[Request]:
    """With these adapters in turn."""
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
    prompts = [array("i", [7 * length + i for i in range(length)]) for length in (1, 5, 12)]
    return [
        Request(f"{i}", prompt, len(prompt), params, lora=loras[i % len(loras)]) for i, prompt in enumerate(prompts)
    ]


def tokens(found: Found) -> dict[str, list[int]]:
    return {name: [one[0] for one in events] for name, events in found.items()}


def test_the_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    save(tmp_path, "Gemma2", torch.float32, vocab_size=100, num_hidden_layers=2, sliding_window=6,
         query_pre_attn_scalar=16, **SIZES)  # fmt: skip
    twin = Twin()
    found = run(graphed(tmp_path, twin, attention_backend="triton", **OPTIONS), requests(), poison)
    assert tokens(found) == tokens(run(engine(tmp_path, **OPTIONS), requests()))
    assert max(twin.replays) == 4


def test_adapters_have_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """A step with adapters is not replayed; one without any is."""
    model = save(tmp_path / "model", "Llama", torch.float32, vocab_size=100, num_hidden_layers=1, **SIZES)
    save_adapter(tmp_path / "one", linears(model), 1, r=4)
    twin = Twin()
    replayed = graphed(tmp_path / "model", twin, attention_backend="triton", enable_lora=True, **OPTIONS)
    plain = engine(tmp_path / "model", enable_lora=True, **OPTIONS)
    found = []
    for served in (replayed, plain):
        served.load_lora("one", prepare(served.known_loras(), tmp_path / "one"))
        found.append([tokens(run(served, requests(loras))) for loras in (("one", None), (None,))])
        assert found[-1][0] != found[-1][1]
    assert found[0] == found[1]
    assert twin.replays
