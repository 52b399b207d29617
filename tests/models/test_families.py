"""Every family against transformers' own forward, on random checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from quire.models.families import codegen
from tests.marks import spread
from tests.models.checkpoints import assert_texts_do_not_depend, engine, probed_logits, save

pytestmark = pytest.mark.slow

# Other values of a family's keys are drawn by `tests.models.random_configs`.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped query": ("Llama", {}),
    "multi query, odd group": ("Llama", {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "rope llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "rope yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            }
        },
    ),
    "mistral, sliding window": ("Mistral", {"sliding_window": 9}),
    "gpt2": ("GPT2", {}),
    "bloom": ("Bloom", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "llama4": ("Llama4", {}),
    "llama4, three experts, no norms of q and k, listed layers": (
        "Llama4",
        {
            "num_experts_per_tok": 3,
            "use_qk_norm": False,
            "attention_bias": True,
            "moe_layers": [0, 4],
            "no_rope_layers": [0, 1, 1, 0, 1],
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"] + ["full_attention"] * 2,
            "attn_temperature_tuning": False,
        },
    ),
    "falcon": ("Falcon", {}),
    "falcon, groups of heads, two norms": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, groups of heads, one norm": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80},
    ),
    "falcon, branches in turn": (
        "Falcon",
        {"parallel_attn": False, "multi_query": False, "bias": True, "tie_word_embeddings": False},
    ),
    "gptj": ("GPTJ", {}),
    "codegen": ("CodeGen", {}),
    "opt": ("OPT", {}),
    "mpt": ("Mpt", {}),
    "granitemoe": (
        "GraniteMoe",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "granitemoe, shared": ("GraniteMoeShared", {"num_experts_per_tok": 3, "attention_bias": True}),
    "mixtral": ("Mixtral", {}),
    "qwen3 moe": ("Qwen3Moe", {}),
    "qwen3 moe, some layers dense": (
        "Qwen3Moe",
        {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
    ),
    "qwen3 moe, all experts": (
        "Qwen3Moe",
        {"num_experts_per_tok": 5, "attention_bias": True, "use_sliding_window": True, "sliding_window": 9},
    ),
    "gemma2": ("Gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3", {"sliding_window": 9, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2}),
    "gemma3, a rope for each kind of layer": (
        "Gemma3",
        {
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3, window, part of each head": (
        "Phi3",
        {"sliding_window": 9, "rope_parameters": {"partial_rotary_factor": 0.75}, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "smollm3, every second layer without rope": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3, listed layers without rope, which have windows": (
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox, branches in turn": (
        "GPTNeoX",
        {"use_parallel_residual": False, "rotary_pct": 0.5, "rotary_emb_base": 500, "hidden_act": "gelu_new"},
    ),
    "gemma4": ("Gemma4", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4, v is k, no rows of layers": (
        "Gemma4",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4, heads of one size": ("Gemma4", {"global_head_dim": 16}),  # saved with a per_layer_config of {}
    "gemma4, experts": (
        "Gemma4",
        {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "glm4": ("Glm4", {}),
    "glm": ("Glm", {"tie_word_embeddings": True}),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5 moe": ("Ernie4_5_Moe", {}),
    "glm4 moe": ("Glm4Moe", {"routed_scaling_factor": 1.5}),
    "glm4 moe, groups": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "use_qk_norm": False,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
        },
    ),
    "cohere2": ("Cohere2", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "cohere": ("Cohere", {}),
    "deepseek v2": ("DeepseekV2", {"q_lora_rank": None}),
    "deepseek v2, groups, yarn": (
        "DeepseekV2",
        {
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
            },
        },
    ),
    "deepseek v3": ("DeepseekV3", {"q_lora_rank": 24, "n_group": 4, "topk_group": 2}),
    "deepseek v3.2": ("DeepseekV32", {"n_group": 4, "topk_group": 2}),
    "deepseek v3.2, yarn, biases, listed mlps": (
        "DeepseekV32",
        {
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "index_topk": 20,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "glm 5": ("GlmMoeDsa", {"rms_norm_eps": 1e-3}),
    "glm 5, shared indexers": (
        "GlmMoeDsa",
        {"num_hidden_layers": 5, "index_topk_freq": 2, "index_skip_topk_offset": 1, "index_topk": 12},
    ),
    "exaone4": ("Exaone4", {"sliding_window": 9, "sliding_window_pattern": 3}),
    "seed oss": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "nemotron": ("Nemotron", {}),
    "gpt oss": ("GptOss", {}),
    "qwen3_5": ("Qwen3_5", {}),
    "qwen3_5, biases, as many heads of keys": (
        "Qwen3_5",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 8,
            "linear_conv_kernel_dim": 2,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3_5, one head of keys, other share": (
        "Qwen3_5",
        {
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 20,
            "full_attention_interval": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "lfm2": ("Lfm2", {}),
    "bamba": ("Bamba", {}),
    "granitemoehybrid, no experts": ("GraniteMoeHybrid", {}),
    "granitemoehybrid, rope, multipliers": (
        "GraniteMoeHybrid",
        {
            "position_embedding_type": "rope",
            "residual_multiplier": 0.3,
            "logits_scaling": 2.0,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_n_groups": 4,
            "mamba_expand": 1,
        },
    ),
    "granitemoehybrid, experts": ("GraniteMoeHybrid", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen3_5 moe": ("Qwen3_5Moe", {}),
    "qwen3 next": ("Qwen3Next", {}),
    "lfm2 moe": ("Lfm2Moe", {}),
    "mamba2": ("Mamba2", {}),
    "nemotron h": ("NemotronH", {}),
    "nemotron h, biases, experts last but one": (
        "NemotronH",
        {
            "layers_block_type": ["moe", "full_attention", "mlp", "moe", "linear_attention"],
            "mlp_bias": True,
            "use_bias": True,
            "n_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "falcon h1": ("FalconH1", {}),
    "mamba": ("Mamba", {}),
    "mamba, biases": ("Mamba", {"use_bias": True, "use_conv_bias": False, "expand": 3, "tie_word_embeddings": False}),
    "falcon mamba": ("FalconMamba", {}),
    "jamba": ("Jamba", {}),
    "jamba, no experts": ("Jamba", {"num_experts": 1, "attn_layer_offset": 0, "mamba_proj_bias": True}),
    "olmo hybrid": ("OlmoHybrid", {}),
    "olmo hybrid, attention first, no positions": (
        "OlmoHybrid",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "kimi linear": ("KimiLinear", {}),
    "ling": ("BailingHybrid", {}),
    "dots.note": ("Dots3Note", {}),
    "llama with layers of cross-attention": ("Mllama", {}),
    "recurrent gemma": ("RecurrentGemma", {}),
    "a.x k2": ("AXK2", {}),
    "zamba": ("Zamba", {}),
    "zamba2": ("Zamba2", {}),
    "zamba2, shared heads, biases, no positions, no low-rank parts of q, k and v": (
        "Zamba2",
        {
            "num_key_value_heads": 2,
            "add_bias_linear": True,
            "use_mem_rope": False,
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": False,
        },
    ),
    "minimax": ("MiniMax", {}),
    "minimax, factors": (
        "MiniMax",
        {
            "full_attn_alpha_factor": 3.5,
            "full_attn_beta_factor": 0.7,
            "linear_attn_alpha_factor": 2.5,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 1.5,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "lfm3": ("Lfm3", {}),
    "lfm3, no gates, no norms after": (
        "Lfm3",
        {"use_attention_gate": False, "use_sandwich_norm": False, "conv_bias": True, "tie_word_embeddings": False},
    ),
    "falcon h1, multipliers, norm": (
        "FalconH1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_d_ssm": None,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.6,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.4,
            "lm_head_multiplier": 0.3,
            "mlp_multipliers": [0.7, 1.4],
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.3, 0.6, 1.2, 0.8, 1.7],
            "ssm_out_multiplier": 0.5,
        },
    ),
}
FAMILIES = {kind: (kind, changes) for kind, changes in reversed(VARIANTS.values())}  # the first variant of each
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 50)


@pytest.fixture(params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    kind, changes = VARIANTS[request.param]
    return tmp_path, save(tmp_path, kind, **changes)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 97, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@torch.no_grad()
def test_logits_and_greedy_tokens_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    """Seven sequences, prompts in chunks of at most 24 tokens a step mixed with decoding, blocks of 4."""
    directory, theirs = checkpoint
    # All sequences together would need 51 blocks: some are preempted, and blocks reused.
    ours = engine(
        directory,
        block_size=4,
        num_blocks=32,
        max_num_batched_tokens=24,
        dtype="float32",
        model_impl="quire",
    )
    probe, generated = probed_logits(ours, prompts(), max_tokens=8)
    only_states = not probe.model.config.attention  # for which there is room
    assert probe.preempted or only_states or ours.scheduler.manager.groups[0].window
    assert {"prefill", "decode"} in probe.steps
    rows = [prompt + generated[f"r{i}"] for i, prompt in enumerate(prompts())]
    padded = torch.tensor([tokens + [0] * (len(rows[-1]) - len(tokens)) for tokens in rows])  # no row sees what follows
    single = theirs.float()(padded).logits
    for i, (prompt, tokens) in enumerate(zip(prompts(), rows, strict=True)):
        expected = single[i, : len(tokens)]
        close = max(1e-4, 1e-4 * float(expected.abs().max()))
        found = torch.stack([probe.found[tuple(tokens[:n])] for n in range(1, len(tokens))])
        if not (found - expected[:-1]).abs().max() <= close:
            # Theirs and ours lie on either side of the exact logits. Where a recurrence is steep, that shows.
            double = theirs.double()(padded).logits[i, : len(tokens)]
            close = max(close, 2.5 * float((double - expected).abs().max()))
        torch.testing.assert_close(found, expected[:-1], atol=close, rtol=0)
        for n in range(len(prompt), len(tokens)):  # each of our 8 tokens, given ours before it
            best, second = expected[n - 1].topk(2).values
            if best - second < 2 * close:
                break
            assert tokens[n] == expected[n - 1].argmax()
        assert len(tokens) == len(prompt) + 8


@torch.no_grad()
@pytest.mark.parametrize(("kind", "share"), [("Llama", 1.0), ("Phi3", 1.0), ("Phi3", 0.75)])
def test_longrope_takes_its_side_from_max_model_len(tmp_path: Path, kind: str, share: float) -> None:
    """Not from the batch: a short request in an engine for long ones sees the long factors."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": share,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7][: int(8 * share)],
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0][: int(8 * share)],
        "original_max_position_embeddings": 64,
    }
    theirs = save(tmp_path, kind, rope_parameters=rope)
    long = torch.arange(2, 92).tolist()
    short = long[:20]
    expected = theirs(torch.tensor([long])).logits[0, -1]
    probe, _ = probed_logits(engine(tmp_path, max_model_len=128), [long, short], max_tokens=1)
    torch.testing.assert_close(probe.found[tuple(long)], expected, atol=1e-4, rtol=0)
    expected = theirs(torch.tensor([short])).logits[0, -1]
    probe, _ = probed_logits(engine(tmp_path, max_model_len=64), [short], max_tokens=1)
    torch.testing.assert_close(probe.found[tuple(short)], expected, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "share"), [("Llama", 1.0), ("Glm4", 0.5)])
def test_dynamic_rope_is_that_of_a_sequence_of_max_model_len(tmp_path: Path, kind: str, share: float) -> None:
    """Rows of a short request, too; up to max_position_embeddings it is plain."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0, "partial_rotary_factor": share}
    theirs = save(tmp_path, kind, rope_parameters=rope, max_position_embeddings=40)
    whole = torch.randint(2, 97, (120,), generator=torch.Generator().manual_seed(5)).tolist()
    for max_model_len in (40, 120):  # in this order: transformers keeps the angles of the longest sequence it has seen
        expected = theirs(torch.tensor([whole[:max_model_len]])).logits[0]
        prompts = [whole[: max_model_len - 1], whole[:11]]
        probe, _ = probed_logits(engine(tmp_path, max_model_len=max_model_len), prompts, max_tokens=1)
        for prompt in prompts:
            torch.testing.assert_close(probe.found[tuple(prompt)], expected[len(prompt) - 1], atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="was made for sequences of up to 160"):
        engine(tmp_path, max_model_len=161)


@torch.no_grad()
@pytest.mark.parametrize(("family", "dtype"), spread(8, FAMILIES, [torch.bfloat16, torch.float16]))
def test_low_precision_checkpoints_stay_close(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Or at most twice as far off as transformers in that dtype: some of these random models magnify rounding."""
    kind, changes = FAMILIES[family]
    theirs = save(tmp_path, kind, dtype=dtype, **changes)
    ours = engine(tmp_path, block_size=8)
    assert ours.runner.model.dtype == dtype
    prompt = torch.arange(2, 60).tolist()
    probe, _ = probed_logits(ours, [prompt], max_tokens=2)
    rounded = theirs(torch.tensor([prompt])).logits[0, -1].float()
    expected = theirs.float()(torch.tensor([prompt])).logits[0, -1]
    their_error, error = (
        (logits - expected).abs().max() / expected.abs().max() for logits in (rounded, probe.found[tuple(prompt)])
    )
    assert error < max(0.05 if dtype is torch.bfloat16 else 0.01, 2 * their_error)


@pytest.mark.parametrize("family", spread(9, FAMILIES))
def test_the_reference_backend_finds_the_same(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    save(tmp_path, kind, **changes)
    some = [p for p in prompts() if len(p) < 18]
    (native, tokens), (plain, same_tokens) = (
        probed_logits(
            engine(tmp_path, block_size=4, max_num_batched_tokens=24, attention_backend=backend), some, max_tokens=8
        )
        for backend in ("cpu", "reference")
    )
    assert tokens == same_tokens
    assert native.found.keys() == plain.found.keys()
    for row, logits in native.found.items():
        torch.testing.assert_close(logits, plain.found[row], atol=1e-4 * max(1.0, float(logits.abs().max())), rtol=0)


def test_preemption_does_not_change_the_tokens(tmp_path: Path) -> None:
    save(tmp_path)
    some = [p for p in prompts() if len(p) > 10]
    _, roomy = probed_logits(engine(tmp_path, block_size=4, num_blocks=300), some, max_tokens=40)
    probe, cramped = probed_logits(engine(tmp_path, block_size=4, num_blocks=24), some, max_tokens=40)
    assert probe.preempted
    assert cramped == roomy


@pytest.mark.parametrize("kind", ["KimiLinear", "Jamba", "RecurrentGemma", "Mamba2", "FalconH1", "Zamba"])
def test_drafts_and_swaps_do_not_change_the_tokens(tmp_path: Path, kind: str) -> None:
    """Rejected drafts are rows of a scan that the next step writes again."""
    save(tmp_path, kind)
    drafts = {"num_blocks": 200, "num_speculative_tokens": 4}
    assert_texts_do_not_depend(tmp_path, {"num_speculative_tokens": 0}, drafts)


def test_rows_of_codegen_move_as_a_bias_does(tmp_path: Path) -> None:
    """It has none, but the rows of integers are moved so."""
    save(tmp_path, "CodeGen")
    config = engine(tmp_path).runner.model.config
    weight = torch.randn(3 * config.hidden_size, 5)
    name, part = "layers.0.qkv.weight", "transformer.h.0.attn.qkv_proj.weight"
    moved = codegen._adapt(config, name, part, torch.arange(len(weight)))
    torch.testing.assert_close(weight[moved], codegen._adapt(config, name, part, weight), rtol=0, atol=0)
