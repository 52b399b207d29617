"""Models that transformers' code computes one sequence at a time, over keys and values in our blocks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import ops
from quire.errors import ConfigError, Unsupported
from quire.models import choose
from quire.models.adapter.parity_check import check, randomise
from quire.models.adapter.per_sequence import Apart
from quire.models.adapter.toy_model import shrink
from tests.marks import of_long_runs
from tests.models.checkpoints import assert_texts_do_not_depend, engine, probed_logits

pytestmark = pytest.mark.slow

PROMPTS = [[5], [7, 3, 9, 11], list(range(2, 40))]
# Attention of their own, ALiBi, several calls a layer, a mask of their own, positions that begin elsewhere, chunks.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPTJ", {}),
    "falcon": ("Falcon", {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "mpt": ("Mpt", {}),
    "diffllama": ("DiffLlama", {}),
    "doge": ("Doge", {}),
    "roberta": ("Roberta", {"is_decoder": True}),
    "gpt_neo": ("GPTNeo", {}),
}


def save_apart(directory: Path, kind: str) -> Any:
    """A small random model of that kind; the model itself, as transformers has it."""
    name, changes = KINDS[kind]
    config_type = getattr(transformers, f"{name}Config")
    config = config_type.from_dict(shrink(config_type(**changes).to_dict()))
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(directory)
    return model


def adapted_engine(directory: Path, **options: Any) -> Any:
    """Some of these have own decoders, too."""
    return engine(directory, model_impl="transformers", **options)


USUAL = [("falcon", "reference"), ("mpt", "cpu"), ("diffllama", "cpu"), ("roberta", "cpu"), ("doge", "cpu")]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [one if one in USUAL else of_long_runs(*one) for one in product(KINDS, ["cpu", "reference"])],
)
def test_it_agrees_with_whole_sequences(tmp_path: Path, kind: str, backend: str) -> None:
    """In a mixed batch of prompts, chunks and single tokens."""
    model = save_apart(tmp_path, kind)
    assert str(choose(tmp_path, "transformers")).startswith("adapter, one sequence at a time: because ")
    ours = adapted_engine(tmp_path, attention_backend=backend, max_num_batched_tokens=12, block_size=4)
    probe, tokens = probed_logits(ours, PROMPTS, max_tokens=5)
    assert {"prefill", "decode"} in probe.steps
    for i, prompt in enumerate(PROMPTS):
        text = prompt + tokens[f"r{i}"]
        with torch.inference_mode():
            expected = model(torch.tensor([text]), use_cache=False).logits[0]
        found = torch.stack([probe.found[tuple(text[:end])] for end in range(1, len(text))])
        torch.testing.assert_close(found, expected[:-1], rtol=1e-4, atol=1e-4)


def test_prefix_hits_and_preemption_change_nothing(tmp_path: Path) -> None:
    save_apart(tmp_path, "gptj")
    assert_texts_do_not_depend(tmp_path, {}, model_impl="transformers")


def test_a_cache_of_integers(tmp_path: Path) -> None:
    """Keys and values are rounded, and their scales are heeded."""
    model = save_apart(tmp_path, "gptj")
    probe, _ = probed_logits(adapted_engine(tmp_path, kv_cache_dtype="int8"), [PROMPTS[2]], max_tokens=1)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[2]])).logits[0, -1]
    found = probe.found[tuple(PROMPTS[2])]
    assert not torch.equal(found, expected)
    assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_what_it_does_not_promise(tmp_path: Path) -> None:
    save_apart(tmp_path, "gptj")
    ours = adapted_engine(tmp_path)
    assert not ours.runner.model.rows_are_batch_invariant
    assert ours.runner.model.rows_depend == "its attention is computed by transformers"
    with pytest.raises(Unsupported, match="reproducible is True; a row's bits may depend"):
        adapted_engine(tmp_path, reproducible=True)
    with pytest.raises(ConfigError, match="speculative decoding needs batch-invariant results"):
        adapted_engine(tmp_path, num_speculative_tokens=2)


@pytest.mark.parametrize("kind", ["Mamba", "XLNet"])
def test_without_keys_and_values_in_a_cache_none_is_served(kind: str) -> None:
    model = getattr(transformers, {"XLNet": "XLNetLMHeadModel"}.get(kind, f"{kind}ForCausalLM"))
    with pytest.raises(Unsupported):
        check(model, getattr(transformers, f"{kind}Config")(), ops.load(), Apart)
