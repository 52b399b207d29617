"""Malformed descriptions of models: each is refused by an error that names the file, the key and the value."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import engine_config
from quire.errors import ModelError
from quire.models import choose, load_model, read_config, weights
from quire.models.hf_config import LARGEST
from quire.models.hub import missing_files
from quire.models.rope import rope_table
from quire.models.template import default_template
from quire.models.text_part import TextPart, text_part
from quire.models.weights import weight_files
from quire.ops import load
from tests.models.checkpoints import BASES as GIVEN
from tests.models.checkpoints import DEEPSEEK, GEMMA4, LLAMA4, MAMBA, QWEN3_MOE, SHORT, SPARSE, TINY, save
from tests.models.test_loading import change_config

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "factor": 4.0}
BASES = {
    "Bamba": MAMBA,
    **{
        kind: GIVEN[kind]
        for kind in ("AXK2", "FalconH1", "Jamba", "Mamba2", "NemotronH", "RecurrentGemma", "Zamba", "Zamba2")
    },
    "KimiLinear": {
        key: value for key, value in GIVEN["KimiLinear"].items() if not key.startswith(("num_local_e", "num_experts"))
    },
    "DeepseekV3": DEEPSEEK,
    "DeepseekV32": SPARSE,
    "GlmMoeDsa": SPARSE,
    "Exaone4": TINY,
    "Gemma3": TINY,
    "Gemma4": GEMMA4,
    "Lfm2": SHORT,
    "Llama": TINY,
    "Llama4": LLAMA4,
    "Mpt": {"vocab_size": 97, "d_model": 48, "n_heads": 6, "n_layers": 3},
    "Qwen3Moe": QWEN3_MOE,
    "SmolLM3": TINY,
}


def described(directory: Path, kind: str, **changes: Any) -> Path:
    """Write the config.json of a small model of that kind with these changes, and nothing else."""
    raw = BASES[kind] | {"architectures": [f"{kind}ForCausalLM"]} | changes
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return directory


def refused(directory: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match) as found:
        choose(directory, "quire").dtype  # noqa: B018
    assert len(str(found.value)) < 2000


def test_the_configs_are_right_but_for_the_changes(tmp_path: Path) -> None:
    for kind in BASES:
        read_config(described(tmp_path, kind))


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("Llama", {"architectures": 5}, "architectures is 5; it must be a list of texts"),
        ("Llama", {"architectures": [["a"]]}, r"architectures is \[\['a'\]\]; it must be a list of texts"),
        ("Llama", {"model_type": ["a"]}, r"model_type is \['a'\]; it must be a text"),
        ("Llama", {"vocab_size": 10**4000}, r"vocab_size is 10+\.\.\.0+; it must be a positive integer, at most"),
        ("Llama", {"hidden_size": LARGEST + 1}, "hidden_size is 2147483648; it must be a positive integer, at most"),
        ("Llama", {"hidden_size": 0}, "hidden_size is 0; it must be a positive integer"),
        ("Llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 4096"),
        ("Llama", {"num_attention_heads": 2**17}, "num_attention_heads is 131072; it must be at most 65536"),
        ("Llama", {"text_config": {"a": [{"n_layer": 5000}]}}, "n_layer is 5000; it must be at most 4096"),
        ("Llama", {"rms_norm_eps": math.inf}, "rms_norm_eps is inf; it must be a positive number"),
        ("Llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 10+.*; it must be a positive number"),
        ("Llama", {"rms_norm_eps": "x" * 10**6}, r"rms_norm_eps is 'x+\.\.\.x+'; it must be a positive number"),
        (
            "Llama",
            {"rms_norm_eps": [[[[[[1]]]]]] * 10**3},
            r"rms_norm_eps is \[.*\.\.\.\]; it must be a positive number",
        ),
        ("Llama", {f"key{i}": 1 for i in range(5000)}, "keys that family 'llama' does not understand: key0=1"),
        ("Llama", {"dtype": ["x"]}, r"dtype is .*; it must be one of float32"),
        ("Llama", {"quantization_config": [1]}, r"quantization_config is \[1\]; it must be an object"),
        ("Llama", {"rope_parameters": []}, r"rope_parameters is \[\]; it must be an object"),
        ("Llama", {"rope_parameters": {"rope_type": ["a"]}}, "rope type .* is not supported"),
        ("Llama", {"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta is 1.0; .* needs 2 or more"),
        ("Llama", {"rope_parameters": YARN | {"truncate": "x"}}, "truncate is 'x'; it must be true or false"),
        ("Llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 1}}, "is 1; it must be in 2.."),
        (
            "Llama",
            {"rope_parameters": LONGROPE | {"long_factor": [math.inf] * 8}},
            "long_factor is .*inf.* must be a list",
        ),
        (
            "Llama",
            {"rope_parameters": LONGROPE | {"short_factor": [True] * 8}},
            "short_factor is .*True.* must be a list",
        ),
        (
            "DeepseekV3",
            {"rope_parameters": YARN | {"mscale_all_dim": 1e38, "mscale": 1e39}},
            "mscale is 1e.39; it must be",
        ),
        ("DeepseekV32", {"index_head_dim": 6}, "index_head_dim is 6; it must be at least qk_rope_head_dim, 8"),
        ("DeepseekV32", {"q_lora_rank": None}, "q_lora_rank is null; it must be a size"),
        ("DeepseekV32", {"index_topk": 0}, "index_topk is 0; it must be a positive integer"),
        ("DeepseekV32", {"indexer_rope_interleave": True}, "indexer_rope_interleave is True; .* serves False only"),
        ("GlmMoeDsa", {"indexer_types": ["shared"] * 3}, "layer 0 takes the keys that an earlier layer chose"),
        (
            "GlmMoeDsa",
            {"indexer_types": ["full"]},
            "indexer_types is .*; it must be a list with full or shared for each",
        ),
        ("GlmMoeDsa", {"mlp_layer_types": ["x"] * 3}, "mlp_layer_types is .*; it must be dense or sparse"),
        ("Exaone4", {"sliding_window_pattern": ""}, "sliding_window_pattern is ''; it must be a number, or letters"),
        ("Gemma3", {"rope_parameters": {"full_attention": 5}}, "full_attention is 5; it must be an object"),
        (
            "Gemma4",
            {"vocab_size_per_layer_input": 96},
            "vocab_size_per_layer_input is 96; it must be at least vocab_size, which is 97",
        ),
        ("Gemma4", {"layer_types": 5}, "layer_types is 5; it must be a list of texts"),
        ("Gemma4", {"layer_types": [[]]}, r"layer_types is \[\[\]\]; it must be a list of texts"),
        ("Gemma4", {"per_layer_config": {"0": {"head_dim": "x"}}}, "per_layer_config: 0: head_dim is 'x'; it must be"),
        ("Gemma4", {"per_layer_config": {"0": {"num_key_value_heads": 0}}}, "0: num_key_value_heads is 0; it must be"),
        ("Gemma4", {"per_layer_config": {"9": {"head_dim": 8}}}, "per_layer_config has keys .* not understand: 9="),
        ("Gemma4", {"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7; layer 0 .* would read"),
        ("Lfm2", {"full_attn_idxs": 5}, r"full_attn_idxs is 5; it must be a list of layers' numbers"),
        ("Llama4", {"moe_layers": [[1]]}, r"moe_layers is \[\[1\]\]; it must be a list of layers' numbers"),
        ("Llama4", {"no_rope_layers": 5}, "no_rope_layers is 5; it must be a list"),
        ("Bamba", {"attn_layer_indices": [True]}, r"attn_layer_indices is \[True\]; it must be a list"),
        ("Bamba", {"time_step_limit": [0, "x"]}, "time_step_limit is .*; it must be two numbers"),
        ("Bamba", {"time_step_limit": [math.nan, 1]}, "time_step_limit is .*; it must be two numbers"),
        (
            "Mpt",
            {"attn_config": {"softmax_scale": "x"}},
            "attn_config: softmax_scale is 'x'; it must be a positive number",
        ),
        ("Qwen3Moe", {"mlp_only_layers": "0"}, "mlp_only_layers is '0'; it must be a list of layers' numbers"),
        ("Qwen3Moe", {"num_hidden_layers": 4096, "num_experts": 4096}, "16777216 experts .*; it must be at most"),
        (
            "NemotronH",
            {"layers_block_type": ["mlp", "x"]},
            r"layer_types is \['mlp', 'x'\]; it must be a list with mamba",
        ),
        (
            "NemotronH",
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "it must be a letter of M . - E for",
        ),
        (
            "NemotronH",
            {"layers_block_type": None, "hybrid_override_pattern": "M-", "num_hidden_layers": 3},
            "num_hidden_layers is 3; family 'nemotron_h' serves 2 only",
        ),
        ("NemotronH", {"moe_latent_size": 8}, "moe_latent_size is 8; it must be null"),
        ("NemotronH", {"n_groups": 3}, "8 heads of a state cannot form 3 groups evenly"),
        ("FalconH1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers is \[1.0\]; it must be 5 positive numbers"),
        ("FalconH1", {"mamba_n_heads": 7}, "mamba_n_heads is 7, which does not divide the 64 inner channels"),
        ("FalconH1", {"attention_bias": True, "attention_in_multiplier": 2.0}, "it must be 1.0 with attention_bias"),
        ("Mamba2", {"num_heads": 7}, "num_heads is 7 and head_dim 12; their product must be .* 96"),
        ("Jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms is False; .* serves True only"),
        ("KimiLinear", {"mlp_layer_types": ["sparse"]}, r"mlp_layer_types is \['sparse'\]; it must be dense or sparse"),
        ("KimiLinear", {"linear_attn_config": {"rank": 2}}, "linear_attn_config has keys .* not understand: rank=2"),
        ("RecurrentGemma", {"lru_width": 70}, "6 heads cannot share 70 channels of a recurrent unit evenly"),
        ("AXK2", {"n_group": 2}, "n_group is 2; .* serves 1 only"),
        ("Zamba", {"tie_word_embeddings": False}, "tie_word_embeddings is False; .* serves True only"),
        ("Zamba", {"n_mamba_heads": 5}, "n_mamba_heads is 5, which does not divide the 192 inner channels"),
        ("Zamba", {"layers_block_type": ["mamba"]}, r"layer_types is \['mamba'\]; .* for each of 4 layers"),
        ("Zamba", {"attention_hidden_size": 96}, "attention_hidden_size is 96; family 'zamba' serves 192 only"),
        ("Zamba2", {"n_mamba_heads": 5}, "n_mamba_heads is 5, which does not divide the 192 inner channels"),
        ("Zamba2", {"num_key_value_heads": 3}, "num_key_value_heads is 3; with use_shared_attention_adapter .* 6"),
        ("Zamba2", {"use_long_context": True}, "use_long_context is True; family 'zamba2' serves False only"),
        ("SmolLM3", {"no_rope_layers": {}}, r"no_rope_layers is \{\}; it must be a list"),
    ],
)
def test_configs(tmp_path: Path, kind: str, changes: dict[str, Any], match: str) -> None:
    refused(described(tmp_path, kind, **changes), match)


def test_the_type_of_a_text_part() -> None:
    with pytest.raises(ModelError, match=r"model_type is \{\}; it must be a text"):
        text_part({"model_type": "llava", "text_config": {"model_type": {}}})


def test_yarn_without_a_factor_has_it_from_the_lengths(tmp_path: Path) -> None:
    """The magnitude of a longer context counts once for q, and once for k."""
    described(tmp_path, "DeepseekV3", rope_parameters=YARN | {"mscale_all_dim": 1.0})
    mixer = read_config(tmp_path)[0].layers[0].mixer
    assert mixer.scale == pytest.approx(20**-0.5 * (0.1 * math.log(256 / 16) + 1) ** 2)  # type: ignore[union-attr]


def test_factors_of_a_model_of_transformers_code(tmp_path: Path) -> None:
    rope = LONGROPE | {"long_factor": [math.inf] * 8}
    described(tmp_path, "Llama", model_type="llama", architectures=["OtherForCausalLM"], rope_parameters=rope)
    with pytest.raises(ModelError, match=r"long_factor is .*inf.*; it must be a list"):
        choose(tmp_path, "transformers")


def test_angles_that_are_no_numbers() -> None:
    with pytest.raises(ModelError, match="angles of position 9 are beyond all fp32 numbers"):
        rope_table({"rope_theta": 1e-30, "rope_type": "linear", "factor": 1e-30}, 16, 10, 10)
    with pytest.raises(ModelError, match="max_position_embeddings is 1; of rope type 'longrope'"):
        rope_table(LONGROPE, 16, 1, 1)


# ------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({}, "weight_map is None; it must be an object"),
        ({"weight_map": None}, "weight_map is None; it must be an object"),
        ({"weight_map": ["a"]}, r"weight_map is \['a'\]; it must be an object"),
        ({"weight_map": {"a": 5}}, "weight_map has the file 5; it must be the name"),
        *(
            ({"weight_map": {"a": name}}, "weight_map has the file .*; it must be the name of a .safetensors file")
            for name in (".", "a\0.safetensors", "../m/model.safetensors", r"..\model.safetensors", "model.bin")
        ),
        ([], "holds a list; expected a JSON object"),
        ("{" * 10, "cannot be read as JSON"),
        ('{"a":' * 10**5 + "1" + "}" * 10**5, "cannot be read as JSON"),
        ('{"a": {"__float__": []}}', "cannot be read as JSON"),
        ("9" * 5000, "cannot be read as JSON"),
    ],
)
def test_an_index(tmp_path: Path, content: object, match: str) -> None:
    """Nothing outside of the directory is opened, whatever the index says."""
    (tmp_path / "m").mkdir()
    for name in ("m/config.json", "m/model.safetensors"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    for read in (weight_files, missing_files):
        with pytest.raises(ModelError, match=match) as found:
            read(tmp_path / "m")
        assert index.name in str(found.value)


def test_an_index_of_links(tmp_path: Path) -> None:
    """As the hub's cache has them."""
    (tmp_path / "blob").write_bytes(b"")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.safetensors").symlink_to("../blob")
    (tmp_path / "m" / "config.json").write_text("{}", encoding="utf-8")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert weight_files(tmp_path / "m") == [tmp_path / "m" / name for name in ("a.safetensors", "b.safetensors")]
    assert missing_files(tmp_path / "m") == ["b.safetensors"]


def test_a_json_file_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LARGEST_JSON", 10)
    (tmp_path / "config.json").write_text('{"a": "12"}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"config.json has more than 10 bytes"):
        weights.read_json(tmp_path / "config.json")


def test_a_name_that_tells_of_many_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for name in ("model-1-of-99999999999.safetensors", "a-2-of-3.safetensors"):
        (tmp_path / name).write_bytes(b"")
    missing = missing_files(tmp_path)
    assert len(missing) == 1000
    assert missing[:3] == ["a-1-of-3.safetensors", "a-3-of-3.safetensors", "model-10-of-99999999999.safetensors"]


def test_a_weight_that_fits_no_memory(tmp_path: Path) -> None:
    save(tmp_path)
    change_config(tmp_path, vocab_size=LARGEST)
    with pytest.raises(ModelError, match=r"no memory for a weight of .2147483647, 48.|embed_tokens.weight has shape"):
        load_model(tmp_path, engine_config(), load())


@pytest.mark.parametrize("content", [{1: torch.ones(1)}, {"a": torch.eye(2).to_sparse()}, [torch.ones(1)]])
def test_a_state_dict(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(ModelError, match="holds no state dict"):
        weights.Checkpoint(tmp_path)


def test_experts_that_are_too_few(tmp_path: Path) -> None:
    """A tensor of all experts has an entry for each."""
    save(tmp_path, "GptOss", num_local_experts=4)
    checkpoint = weights.Checkpoint(tmp_path)
    assert checkpoint["model.layers.0.mlp.experts.down_proj[3]"].shape == (80, 48)
    with pytest.raises(ModelError, match=r"down_proj\[4\] cannot be read"):
        checkpoint["model.layers.0.mlp.experts.down_proj[4]"]


@pytest.mark.parametrize("token", ["x", [None], True, {}])
def test_the_end_of_a_text(tmp_path: Path, token: object) -> None:
    save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": token}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"eos_token_id is .*; it must be a token's number"):
        load_model(tmp_path, engine_config(), load())


def test_long_names_of_a_whole() -> None:
    """The patterns that tell its sides apart take a time that grows with the square of a name."""
    with pytest.raises(ModelError, match=r"config.json: a key has a name of 500001 characters; it must have at most"):
        text_part({"model_type": "llava", "image" * 100_000 + "-": 1})
    with pytest.raises(ModelError, match="a tensor has a name of 600001 characters; it must have at most 1000"):
        TextPart("llava").name("vision" * 100_000 + "-")


@pytest.mark.parametrize(
    ("found", "template"),
    [
        (5, None),
        ([5, {"name": ["default"], "template": "a"}, {"name": "default", "template": "b"}], "b"),
        ([{"name": "default", "template": []}], None),
    ],
)
def test_templates_of_a_tokenizer_config(found: object, template: str | None) -> None:
    assert default_template({"chat_template": found}) == template
