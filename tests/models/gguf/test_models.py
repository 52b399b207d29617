"""Models in GGUF files against the same models in safetensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quire.errors import ModelError
from quire.models.gguf.file import GgufFile
from quire.models.gguf.model import GgufModel
from tests.marks import of_long_runs, quick
from tests.models.checkpoints import engine, probed_logits, save
from tests.models.gguf.hostile import read
from tests.models.gguf.writer import ARCHITECTURES, write_gguf

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
}
MLA_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}  # fmt: skip
FALCON_H1 = {
    "attention_in_multiplier": 0.7, "attention_out_multiplier": 1.3, "key_multiplier": 0.6, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8], "mlp_multipliers": [0.9, 1.4],
    "embedding_multiplier": 2.5, "lm_head_multiplier": 0.5, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
}  # fmt: skip
NEMOTRON_H = ["linear_attention", "mlp", "full_attention", "linear_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, biases, derived head": (
        "Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": None},
    ),
    "llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mixtral": ("Mixtral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3moe": ("Qwen3Moe", {}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 9}),
    "gemma3": ("Gemma3", {"query_pre_attn_scalar": 16, "sliding_window": 9, "num_hidden_layers": 6}),
    "phi3": ("Phi3", {}),
    "phi3, longrope": ("Phi3", {"rope_parameters": LONG}),
    "gpt2": ("GPT2", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "seed-oss": ("SeedOss", {}),
    "command-r": ("Cohere", {"logit_scale": 0.5}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 9}),
    "glm4": ("Glm4", {}),
    "glm4, biases": ("Glm4", {"attention_bias": True}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4, windows": ("Exaone4", {"num_hidden_layers": 5, "sliding_window": 9, "sliding_window_pattern": 4}),
    "ernie4_5": ("Ernie4_5", {}),
    "qwen35": ("Qwen3_5", {}),
    "lfm2": ("Lfm2", {}),
    "gpt-oss": ("GptOss", {}),
    "qwen35moe": ("Qwen3_5Moe", {}),
    "qwen3next": ("Qwen3Next", {}),
    "lfm2moe": ("Lfm2Moe", {}),
    "granitemoe": ("GraniteMoe", {}),
    "granitemoe, shared": ("GraniteMoeShared", {}),
    "granitehybrid": ("GraniteMoeHybrid", {}),
    "granitehybrid, experts": ("GraniteMoeHybrid", {"num_local_experts": 4, "mamba_n_groups": 2}),
    "falcon-h1": ("FalconH1", {}),
    "falcon-h1, scaled": ("FalconH1", FALCON_H1),
    "nemotron_h": ("NemotronH", {"layers_block_type": [*NEMOTRON_H, "mlp"]}),
    "nemotron_h_moe": ("NemotronH", {"layers_block_type": [*NEMOTRON_H[2:], "moe"], "routed_scaling_factor": 2.5}),
    "mamba2": ("Mamba2", {}),
    "mamba2, tied": ("Mamba2", {"tie_word_embeddings": True, "n_groups": 1, "use_conv_bias": False}),
    "mamba": ("Mamba", {}),
    "falcon mamba": ("FalconMamba", {}),
    "jamba": ("Jamba", {}),
    "jamba, one expert": ("Jamba", {"num_experts": 1, "num_hidden_layers": 3}),
    "deepseek2": ("DeepseekV2", {}),
    "deepseek2, one projection of q, yarn": ("DeepseekV2", {"q_lora_rank": None, "rope_parameters": MLA_YARN}),
    "deepseek2, V3": ("DeepseekV3", {"n_group": 2, "topk_group": 1}),
    "glm4moe": ("Glm4Moe", {}),
    "ernie4_5-moe": ("Ernie4_5_Moe", {}),
    "gemma4": ("Gemma4", {"num_kv_shared_layers": 0}),
    "gemma4, shared keys": ("Gemma4", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4, experts": ("Gemma4", {
        "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 36, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    }),
}  # fmt: skip
# Whose frequencies or decays come out of numbers that were rounded to fp32.
NEARLY = (
    "llama3",
    "qwen35",
    "granitehybrid",
    "granitehybrid, experts",
    "falcon-h1",
    "falcon-h1, scaled",
    "nemotron_h",
    "nemotron_h_moe",
    "mamba2",
    "mamba2, tied",
    "mamba",
    "falcon mamba",
    "jamba",
    "jamba, one expert",
)


def logits(model: Path, max_tokens: int = 1, **options: Any) -> torch.Tensor:
    """Of each row of two prompts and of what follows them."""
    prompts = [[(7 * i + 3) % 97 for i in range(21)], [5, 96, 11]]
    probe, _ = probed_logits(engine(model, max_model_len=64, **options), prompts, max_tokens)
    return torch.stack([probe.found[key] for key in sorted(probe.found)])


@pytest.mark.parametrize("name", quick(MODELS, 8))
def test_the_same_logits_as_from_safetensors(tmp_path: Path, name: str) -> None:
    """To the bit where numbers are stored as they were."""
    kind, changes = MODELS[name]
    dtype = torch.bfloat16 if name == "qwen3" else torch.float16 if name == "mixtral" else torch.float32
    save(tmp_path, kind, dtype, **changes)
    stored = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16, torch.float16: Kind.F16}[dtype]
    write_gguf(tmp_path, tmp_path / "model.gguf", kind, lambda _: stored)
    found, expected = logits(tmp_path / "model.gguf", 3, model_impl="quire"), logits(tmp_path, 3)
    if name in NEARLY:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(found, expected)


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": None}
EXPERTS = {"moe_intermediate_size": 64}


def mixed(architecture: str, name: str) -> Kind:
    """As writers mix them: values and the tables in more bits, and the experts of gpt-oss in theirs."""
    if "_exps" in name and architecture == "GptOss":
        return Kind.MXFP4
    return Kind.Q8_0 if "attn_v" in name or name in ("token_embd.weight", "output.weight") else Kind.Q4_0


QUANTISED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", WIDE),
    "llama, tied": ("Llama", WIDE | {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", WIDE),
    "gpt2": ("GPT2", {"n_embd": 64, "n_head": 4}),
    "gemma3": ("Gemma3", WIDE | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9}),
    "phi3": ("Phi3", {"hidden_size": 96, "intermediate_size": 96}),
    "qwen35": ("Qwen3_5", WIDE | {"head_dim": 16}),
    "gpt-oss": ("GptOss", WIDE | {"head_dim": 16}),
    "lfm2": ("Lfm2", {"intermediate_size": 96, "block_auto_adjust_ff_dim": False}),
    "qwen3next": ("Qwen3Next", WIDE | EXPERTS | {"head_dim": 16, "shared_expert_intermediate_size": 64}),
    "granitehybrid": ("GraniteMoeHybrid", {"shared_intermediate_size": 64}),
    "falcon-h1": ("FalconH1", {"intermediate_size": 96}),
    "mamba2": ("Mamba2", {"hidden_size": 64, "head_dim": 16}),
    "mamba": ("Mamba", {"hidden_size": 64, "time_step_rank": 32}),
    "jamba": ("Jamba", {"intermediate_size": 96, "mamba_dt_rank": 32}),
    "nemotron_h_moe": ("NemotronH", WIDE | EXPERTS | {
        "mamba_head_dim": 16, "head_dim": 16, "layers_block_type": [*NEMOTRON_H[2:], "moe"],
        "moe_shared_expert_intermediate_size": 64,
    }),
    "deepseek2": ("DeepseekV2", WIDE | EXPERTS | {"qk_nope_head_dim": 32, "q_lora_rank": 64, "num_key_value_heads": 4}),
    "gemma4": ("Gemma4", WIDE | {
        "head_dim": 16, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2,
    }),
    "gemma4, experts": ("Gemma4", WIDE | EXPERTS | {
        "head_dim": 16, "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
    }),
}  # fmt: skip


# Between them these have tied tables, columns, experts of both kinds, states, a latent, and rows of each layer.
USUAL = ("llama, tied", "gpt2", "gpt-oss", "qwen3next", "granitehybrid", "deepseek2", "gemma4")


@pytest.mark.parametrize("name", [*quick(USUAL, 2), *(of_long_runs(name) for name in QUANTISED if name not in USUAL)])
def test_quantised_tensors_are_multiplied_as_they_stand(tmp_path: Path, name: str) -> None:
    """Against the same model with what its tensors mean."""
    kind, changes = QUANTISED[name]
    save(tmp_path, kind, **changes)
    meant = write_gguf(tmp_path, tmp_path / "model.gguf", kind, partial(mixed, kind))
    write_gguf(tmp_path, tmp_path / "meant.gguf", kind, numbers=meant)
    expected = logits(tmp_path / "meant.gguf")
    exact = logits(tmp_path / "model.gguf", dtype="float32", quantization_activations="bf16")
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)
    found = logits(tmp_path / "model.gguf", dtype="float32")
    assert not torch.equal(found, expected)
    # Where a router chooses others than it would of exact rows, logits differ by more.
    assert divergence(found, expected) < (0.1 if "moe_intermediate_size" in changes else 0.03)


def test_mxfp4_where_columns_are_in_another_order(tmp_path: Path) -> None:
    save(tmp_path, "Qwen3_5", **WIDE | {"head_dim": 16})
    write_gguf(tmp_path, tmp_path / "model.gguf", "Qwen3_5", lambda name: Kind.MXFP4 if "ssm_out" in name else Kind.F32)
    with pytest.raises(ModelError, match=r"linear_attn\.out_proj\.blocks cannot be read: MXFP4 has no order of inputs"):
        engine(tmp_path / "model.gguf", max_model_len=64)


def test_experts_of_jamba_in_layers_without_a_period(tmp_path: Path) -> None:
    save(tmp_path, "Jamba", num_hidden_layers=6)
    write_gguf(tmp_path, tmp_path / "model.gguf", "Jamba")
    model = GgufModel(tmp_path / "model.gguf")
    del model.file.tensors["blk.1.ffn_gate_inp.weight"]
    with pytest.raises(ModelError, match=r"the layers \[3, 5\] have ffn_gate_inp\.weight; they must be at the"):
        model.config()


HOSTILE_MODELS = ["granitehybrid", "nemotron_h", "mamba", "deepseek2, one projection of q, yarn", "gemma4, shared keys"]
HOSTILE: list[Any] = [0, 2**31, "x", True, -1.5, float("nan"), [1, 2, 3], ["a"], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE_MODELS)
def test_metadata_of_another_value_or_type(tmp_path: Path, name: str, long: bool) -> None:
    """Of each key in turn: the file is read, or refused by a sentence."""
    kind, changes = MODELS[name]
    save(tmp_path, kind, **changes)
    path, architecture, refused, step = tmp_path / "model.gguf", ARCHITECTURES[kind], 0, 2 if long else 6
    write_gguf(tmp_path, path, kind)
    keys = [key.partition(".")[2] for key in GgufFile(path).metadata if key.startswith(f"{architecture}.")]
    for i, key in enumerate(keys):
        for value in HOSTILE[i % step :: step]:
            write_gguf(tmp_path, path, kind, **{key: value})
            refused += read(path) is not None
    assert refused > 6 * len(keys) / step


def divergence(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Kullback and Leibler's, of the distributions over the next token: the mean of all rows."""
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
