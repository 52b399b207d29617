"""Configs that say something unusual: what transformers makes of it, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import engine_config
from quire.engine.cost import model_cost
from quire.engine.engine import working_memory
from quire.errors import ConfigError, ModelError
from quire.models import load_model, read_config
from quire.models.rope import longest_rotated
from quire.ops import load
from quire_bench.engine import loading
from tests.models.checkpoints import TINY, engine, probed_logits, save
from tests.models.test_loading import change_config

PROMPT = list(range(2, 20))


def refused(directory: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        load_model(directory, engine_config(model_impl="quire"), load())


@torch.no_grad()
def assert_as_transformers(directory: Path, model: Any, **options: Any) -> None:
    probe, _ = probed_logits(engine(directory, **options), [PROMPT], max_tokens=1)
    expected = model(torch.tensor([PROMPT])).logits[0].float()
    for end in range(1, len(PROMPT) + 1):
        torch.testing.assert_close(probe.found[tuple(PROMPT[:end])], expected[end - 1], rtol=1e-4, atol=1e-4)


def test_starcoder2_rotates_whole_heads(tmp_path: Path) -> None:
    """Transformers passes over the share, and yet nobody can know whether the checkpoint meant it."""
    save(tmp_path, "Starcoder2")
    change_config(tmp_path, partial_rotary_factor=0.5, rope_parameters="DELETE")
    refused(tmp_path, r"partial_rotary_factor is 0\.5; family 'starcoder2' serves 1\.0 only")


@pytest.mark.parametrize(
    ("kind", "changes", "written"),
    [
        ("Cohere", {}, {"rope_parameters": "DELETE"}),
        ("GptOss", {}, {"rope_parameters": "DELETE", "rope_scaling": None}),
        ("Falcon", {"multi_query": False}, {"multi_query": None}),
        ("Llama4", {"head_dim": 128}, {"head_dim": "DELETE"}),
        ("Lfm2", {"block_ff_dim": 40}, {"block_ff_dim": 40, "intermediate_size": 80}),
    ],
)
def test_what_a_config_says_twice_or_leaves_out(
    tmp_path: Path, kind: str, changes: dict[str, Any], written: dict[str, Any]
) -> None:
    model = save(tmp_path, kind, **changes)
    change_config(tmp_path, **written)
    assert_as_transformers(tmp_path, model)


def test_rope_parameters_that_are_null_are_missing(tmp_path: Path) -> None:
    model = save(tmp_path)
    change_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": None})
    assert_as_transformers(tmp_path, model)


@pytest.mark.parametrize("factors", ["12345678", [1.0] * 7 + [0.0], [1.0] * 7 + ["x"], 2.0])
def test_factors_of_longrope(tmp_path: Path, factors: object) -> None:
    save(tmp_path)
    rope = {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": factors}
    change_config(tmp_path, rope_parameters=rope)
    refused(tmp_path, "rope's short_factor is .*; it must be a list, each entry a positive number")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_granites_multiplier_is_not_rounded(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save(tmp_path, "Granite", dtype, embedding_multiplier=5.1)
    ours = load_model(tmp_path, engine_config(), load())
    tokens = torch.arange(90)
    embedded = ours.embed(tokens, tokens)  # type: ignore[attr-defined]
    assert torch.equal(embedded, model.get_input_embeddings()(tokens) * 5.1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not loading.STATUS.exists(), reason="only Linux tells how much memory is anonymous")
def test_a_model_that_is_mostly_its_embedding(tmp_path: Path) -> None:
    """The embedding goes from its file into its packed form."""
    shape = {"vocab_size": 60_000, "hidden_size": 480, "num_hidden_layers": 2, "intermediate_size": 1024}
    save(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=True, **shape)
    found = loading.measure(str(tmp_path))
    assert found is not None
    assert found.peak <= 1.15 * found.resident


def test_layers_of_both_kinds_have_room(tmp_path: Path) -> None:
    """The native library keeps what dense layers and what layers of experts compute."""
    dense = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 400, "intermediate_size": 2000}
    raw = TINY | dense | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    rules = []
    for dense_layers in ([], [1]):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"mlp_only_layers": dense_layers}), encoding="utf-8")
        rules.append(working_memory(read_config(tmp_path)[0], 2, 1000))
    assert rules[1] - rules[0] >= 1000 * 2 * 5 * 2000


@torch.no_grad()
def test_linear_rope_reaches_as_far_as_its_factor(tmp_path: Path) -> None:
    """As in vLLM; what is usual stays what config.json says."""
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
    model = save(tmp_path, max_position_embeddings=8, rope_parameters=rope)
    assert load_model(tmp_path, engine_config(), load()).max_model_len == 8
    assert model_cost(*read_config(tmp_path)).max_model_len == 20
    with pytest.raises(ConfigError, match=r"max_model_len is 21; .* was made for sequences of up to 20"):
        load_model(tmp_path, engine_config(max_model_len=21), load())
    assert_as_transformers(tmp_path, model, max_model_len=20)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({}, 100),
        ({"type": "linear", "factor": 4.0}, 400),
        ({"rope_type": "dynamic", "factor": 2.0}, 200),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}, 100),
        ({"rope_type": "yarn", "factor": 3.0}, 300),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 50}, 100),
        ({"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 50}, 100),
        ({"rope_type": "proportional", "factor": 8.0}, 100),
    ],
)
def test_which_ropes_reach_farther(rope: dict[str, Any], longest: int) -> None:
    assert longest_rotated(rope, 100) == longest
