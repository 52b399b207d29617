"""Configurations as they were published: each is understood, and means what its authors meant."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.errors import ModelError
from quire.models import read_config
from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, MlpConfig
from quire.models.state_config import ConvolutionConfig, GatedDeltaConfig, StateConfig, StateSpaceConfig
from tests.models.published import (
    BAMBA,
    BLOOM,
    DISTILGPT2,
    GEMMA2,
    GEMMA2_9B,
    GEMMA3_1B,
    GPT2,
    GRANITE_3,
    GRANITE_4_H,
    GRANITE_4_H_1B,
    GRANITE_4_H_MICRO,
    LFM2,
    LFM2_350M,
    LLAMA_3_2,
    LLAMA_4_SCOUT,
    MISTRAL,
    MIXTRAL,
    NEMOTRON_H,
    NEOX_20B,
    OLMO2_1B,
    PHI3_MINI,
    PHI4_MINI,
    PYTHIA,
    QWEN2_5,
    QWEN3,
    QWEN3_5,
    QWEN3_MOE,
    QWEN3_NEXT,
    REPOSITORIES,
    SMOLLM,
    SMOLLM2,
    SMOLLM3,
    STARCODER2,
)

NAMED = {name: raw for some in REPOSITORIES.values() for name, raw in some.items()}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PUBLISHED = {
    "SmolLM": (SMOLLM, (3, 64, 10_000.0, 2048, None), BF16),
    "SmolLM2": (SMOLLM2, (3, 64, 100_000, 8192, None), BF16),
    "Llama 3.2": (LLAMA_3_2, (8, 64, 500_000.0, 131_072, None), BF16),
    "Mistral": (MISTRAL, (8, 128, 10_000.0, 32_768, 4096), BF16),
    "GPT-2": (GPT2, (12, 64, None, 1024, None), F32),
    "DistilGPT2": (DISTILGPT2, (12, 64, None, 1024, None), F32),
    "BLOOM": (BLOOM, (16, 64, None, 2048, None), F32),
    "Qwen 2.5": (QWEN2_5, (2, 64, 1_000_000.0, 32_768, None), BF16),
    "Qwen3": (QWEN3, (8, 128, 1_000_000, 40_960, None), BF16),
    "Mixtral": (MIXTRAL, (8, 128, 1_000_000.0, 32_768, None), BF16),
    "Qwen3-MoE": (QWEN3_MOE, (4, 128, 1_000_000.0, 40_960, None), BF16),
    "Gemma 2 9B": (GEMMA2_9B, (8, 256, 10_000.0, 8192, 4096), F32),
    "Gemma 2": (GEMMA2, (4, 256, 10_000.0, 8192, 4096), F32),
    "Gemma 3 1B": (GEMMA3_1B, (1, 256, 10_000.0, 32_768, 512), BF16),
    "Phi-3 mini": (PHI3_MINI, (32, 96, 10_000.0, 4096, 2047), BF16),
    "Phi-4 mini": (PHI4_MINI, (8, 128, 10_000.0, 131_072, 262_144), BF16),
    "OLMo 2": (OLMO2_1B, (16, 128, 500_000, 4096, None), F32),
    "Granite 3": (GRANITE_3, (8, 64, 10_000_000.0, 131_072, None), BF16),
    "SmolLM3": (SMOLLM3, (4, 128, 5_000_000.0, 65_536, None), BF16),
    "StarCoder 2": (STARCODER2, (2, 128, 999999.4420358813, 16_384, 4096), F32),
    "Pythia": (PYTHIA, (12, 64, 10_000, 2048, None), F16),
    "GPT-NeoX 20B": (NEOX_20B, (64, 96, 10_000, 2048, None), F16),
}


@pytest.mark.parametrize(("text", "expected", "dtype"), PUBLISHED.values(), ids=PUBLISHED)
def test_published(tmp_path: Path, text: str, expected: tuple[object, ...], dtype: torch.dtype) -> None:
    (tmp_path / "config.json").write_text(text)
    decoder, found_dtype = read_config(tmp_path)
    rope = next((rope["rope_theta"] for rope in decoder.ropes if rope is not None), None)
    heads = decoder.layers[0].mixer.heads
    found = (heads.num_kv_heads, heads.head_dim, rope, decoder.max_position_embeddings, decoder.windows[0])
    assert found == expected
    assert found_dtype is dtype
    assert len(decoder.windows) == decoder.num_layers


def test_what_each_layer_does_in_the_published_configs(tmp_path: Path) -> None:
    """Gemma 3's layers with and without windows have different RoPE; SmolLM3's fourth layers have none."""
    (tmp_path / "config.json").write_text(GEMMA3_1B)
    decoder, _ = read_config(tmp_path)
    assert [i for i, window in enumerate(decoder.windows) if window is None] == [5, 11, 17, 23]
    thetas = [None if rope is None else rope["rope_theta"] for rope in decoder.ropes]
    assert thetas == [10_000.0 if window else 1_000_000.0 for window in decoder.windows]
    (tmp_path / "config.json").write_text(SMOLLM3)
    assert [rope is None for rope in read_config(tmp_path)[0].ropes] == [False, False, False, True]


def test_what_a_missing_key_means_depends_on_the_architecture(tmp_path: Path) -> None:
    raw = json.loads(MISTRAL)
    del raw["sliding_window"], raw["num_key_value_heads"]
    for architecture, window, num_kv_heads in (("MistralForCausalLM", 4096, 8), ("LlamaForCausalLM", None, 32)):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
        decoder, _ = read_config(tmp_path)
        assert (decoder.windows[0], decoder.layers[0].mixer.num_kv_heads) == (window, num_kv_heads)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"sliding_window": None}))
    assert read_config(tmp_path)[0].windows[0] is None


def test_llama_4(tmp_path: Path) -> None:
    """Every fourth layer sees everything, without RoPE; the others their chunk. All have experts."""
    raw = json.loads(json.dumps(LLAMA_4_SCOUT))
    for changes in (
        {},
        {"attn_temperature_tuning": 4, "no_rope_layers": [1, 1, 1, 0] * 12, "moe_layers": [*range(48)]},
    ):
        raw["text_config"] |= changes
        (tmp_path / "config.json").write_text(json.dumps(raw))
        decoder, _ = read_config(tmp_path)
        mixers = [layer.mixer for layer in decoder.layers]
        assert [mixer.chunk for mixer in mixers] == [8192, 8192, 8192, None] * 12
        assert [mixer.temperature for mixer in mixers] == [None, None, None, (0.1, 8192)] * 12
        assert [mixer.rope is None for mixer in mixers] == [False, False, False, True] * 12
        assert [len(group.layers) for group in decoder.groups] == [36, 12]
        assert {(one.count, one.per_token, one.mlp.size) for one in decoder.experts} == {(16, 1, 8192)}
        assert len(decoder.experts) == 48
    raw["text_config"] |= {"interleave_moe_layer_step": 2, "moe_layers": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    sizes = [getattr(layer.mlp, "size", "experts") for layer in read_config(tmp_path)[0].layers]
    assert sizes == [16_384, "experts"] * 24
    for changes, shown in (
        ({"attention_chunk_size": None}, "attention in chunks needs their length"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is"),
        ({"moe_layers": ["48"]}, "moe_layers is"),
        ({"attn_temperature_tuning": 7}, "attn_temperature_tuning is 7"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"text_config": raw["text_config"] | changes}))
        with pytest.raises(ModelError, match=shown):
            read_config(tmp_path)


@pytest.mark.parametrize("name", NAMED)
def test_what_is_said_twice_agrees(name: str) -> None:
    """Lists have an entry for each layer, heads share evenly, and numbers of layers are of layers that there are."""
    raw = NAMED[name]
    raw = raw.get("text_config", raw)
    layers, heads = raw.get("num_hidden_layers", raw.get("n_layer")), raw.get("num_attention_heads", raw.get("n_head"))
    for key in ("layer_types", "no_rope_layers", "activation_sparsity_pattern"):
        assert len(raw.get(key) or []) in (0, layers), key
    for key in ("attn_layer_indices", "full_attn_idxs", "mlp_only_layers"):
        assert set(raw.get(key) or []) <= set(range(layers or 0)), key
    if heads is not None:
        assert heads % raw.get("num_key_value_heads", heads) == 0
        if "head_dim" not in raw and "qk_rope_head_dim" not in raw:
            assert raw.get("hidden_size", raw.get("n_embd", raw.get("n_embed"))) % heads == 0
    if "mamba_n_heads" in raw:
        assert raw["mamba_n_heads"] * raw["mamba_d_head"] == raw["mamba_expand"] * raw["hidden_size"]
    if "linear_num_value_heads" in raw:
        assert raw["linear_num_value_heads"] % raw["linear_num_key_heads"] == 0


DELTA = GatedDeltaConfig(num_heads=16, num_k_heads=16, dim_k=128, dim_v=128, taps=4)
SPACE = StateSpaceConfig(
    num_heads=48, num_groups=1, head_dim=64, state_dim=128, taps=4, bias=False, conv_bias=True,
    dt_limits=(0.0, math.inf), norm_groups=1,
)  # fmt: skip
SHORT = ConvolutionConfig(width=2048, taps=3, bias=False, conv_bias=False)
WITH_STATES = {
    "Qwen 3.5 0.8B": (QWEN3_5, DELTA, [3, 7, 11, 15, 19, 23], 3584),
    "Qwen3-Next": (QWEN3_NEXT, replace(DELTA, num_heads=32, in_pairs=True), list(range(3, 48, 4)), 512),
    "LFM2 1.2B": (LFM2, SHORT, [2, 5, 8, 10, 12, 14], 8192),
    "LFM2 350M": (LFM2_350M, replace(SHORT, width=1024), [2, 5, 8, 10, 12, 14], 4608),
    "Granite 4 H Tiny": (GRANITE_4_H, SPACE, [5, 15, 25, 35], 512),
    "Granite 4 H Micro": (GRANITE_4_H_MICRO, replace(SPACE, num_heads=64), [5, 15, 25, 35], 8192),
    "Granite 4 H 1B": (GRANITE_4_H_1B, SPACE, [5, 15, 25, 35], 4096),
    "Nemotron-H 8B": (
        NEMOTRON_H,
        replace(SPACE, num_heads=128, num_groups=8, norm_groups=8, dt_limits=(0.001, math.inf)),
        [7, 18, 29, 40],
        21504,
    ),
    "Bamba 9B": (BAMBA, replace(SPACE, num_heads=128), [9, 18, 27], 14336),
}


@pytest.mark.parametrize(("raw", "state", "attention", "inner"), WITH_STATES.values(), ids=WITH_STATES)
def test_layers_that_keep_a_state(
    tmp_path: Path, raw: dict[str, object], state: StateConfig, attention: list[int], inner: int
) -> None:
    """Which layers have attention, what the others keep, and the size of their MLPs."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    decoder, dtype = read_config(tmp_path)
    mixers = [layer.mixer for layer in decoder.layers]
    assert [i for i, mixer in enumerate(mixers) if isinstance(mixer, AttentionConfig)] == attention
    assert {mixer for i, mixer in enumerate(mixers) if i not in attention} - {None} == {state}
    mlps = [layer.mlp for layer in decoder.layers if layer.mlp is not None]
    sizes = {mlp.mlp.size if isinstance(mlp, ExpertsConfig) else mlp.size for mlp in mlps}
    assert sizes == {inner}
    assert dtype is BF16


def test_experts(tmp_path: Path) -> None:
    """Which layers have them, how many, and their sizes; what missing keys mean is transformers' matter."""

    def read(text: str, **changes: object) -> DecoderConfig:
        raw = {key: value for key, value in (json.loads(text) | changes).items() if value != "DELETE"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_config(tmp_path)[0]

    some = ExpertsConfig(count=8, per_token=2, mlp=MlpConfig(size=14336), renormalised=True)
    assert read(MIXTRAL).experts == [some] * 32
    found = read(MIXTRAL, **dict.fromkeys(("rope_theta", "rms_norm_eps", "max_position_embeddings"), "DELETE"))
    assert (found.ropes[0], found.norm_eps) == ({"rope_theta": 1e6}, 1e-5)
    assert found.max_position_embeddings == 131_072
    whole = ExpertsConfig(count=128, per_token=8, mlp=MlpConfig(size=768), renormalised=True)
    assert read(QWEN3_MOE).experts == [whole] * 48
    assert read(QWEN3_MOE, num_experts="DELETE", num_local_experts=128).experts == [whole] * 48
    found = read(QWEN3_MOE, decoder_sparse_step=3, mlp_only_layers=[2, 8], norm_topk_prob=False)
    sparse = {i for i, layer in enumerate(found.layers) if isinstance(layer.mlp, ExpertsConfig)}
    assert sparse == set(range(5, 48, 3)) - {8}
    assert found.experts == [replace(whole, renormalised=False)] * len(sparse)
    assert not read(QWEN3_MOE, mlp_only_layers=list(range(48))).experts
    assert read(QWEN3_MOE, use_sliding_window=True, sliding_window=64, max_window_layers="DELETE").windows == (64,) * 48
    for changes, shown in (
        ({"use_sliding_window": True, "sliding_window": 64}, "does not understand: max_window_layers=48"),
        ({"num_local_experts": 64}, "num_local_experts is 64; family 'qwen3_moe' serves 128 only"),
        ({"num_experts": 0}, "num_experts is 0; it must be a positive integer"),
        ({"num_experts_per_tok": 129}, "129 experts a token cannot be chosen of 128"),
        ({"mlp_only_layers": [True]}, "it must be a list of layers' numbers"),
        ({"shared_expert_intermediate_size": 64}, "does not understand: shared_expert_intermediate_size=64"),
    ):
        with pytest.raises(ModelError, match=shown):
            read(QWEN3_MOE, **changes)
