"""What `random_configs` draws of each family: sizes, values of its keys, and how they are spelled."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from tests.models.checkpoints import BASES

LONGEST = 128  # max_position_embeddings
FLAG = (False, True)
EPS = (1e-6, 1e-5, 1e-3, 0.1)
WINDOWS = (1, 2, 3, 5, 9, 17, 64, 4096)
MULTIPLIERS = (0.3, 1.0, 2.5)
Config = dict[str, Any]
Choices = tuple[Any, ...] | Callable[[random.Random, Config], Any]
LAYERS = "num_hidden_layers"


class Family(NamedTuple):
    """What is drawn of a family."""

    sizes: Callable[[random.Random, Family], Config]
    options: Mapping[str, Choices]  # by key, each of which may be left out
    rope: Callable[[random.Random, Config], Config] | None = None
    head_dim: bool = True  # may differ from hidden_size / num_attention_heads
    even: int = 2  # what head_dim is a multiple of
    always: Collection[str] = ()  # options that are never left out


# ------------------------------------------------------------------------------------------------ values


def num_layers(config: Config) -> int:
    return int(config.get(LAYERS) or config.get("n_layer") or config["n_layers"])


def num_heads(config: Config) -> int:
    return int(config.get("num_attention_heads") or config.get("n_head") or config["n_heads"])


def head_dim(config: Config) -> int:
    hidden = config.get("hidden_size") or config.get("n_embed") or config.get("n_embd") or config["d_model"]
    return int(config.get("head_dim") or hidden // num_heads(config))


def divisor(draw: random.Random, number: int) -> int:
    return draw.choice([one for one in range(1, number + 1) if number % one == 0])


def upto(key: str, least: int = 1) -> Choices:
    """A number from `least` up to that of another key."""
    return lambda draw, config: draw.randint(least, config[key])


def some_layers(draw: random.Random, config: Config) -> list[int]:
    return sorted(draw.sample(range(num_layers(config)), draw.randint(0, num_layers(config))))


def of_layers(*kinds: Any) -> Choices:
    """A list with one of these for each layer."""
    return lambda draw, config: [draw.choice(kinds) for _ in range(num_layers(config))]


def windowed(draw: random.Random, config: Config) -> list[str]:
    """Kinds of layers; sliding ones only where there is a window."""
    kinds = ["full_attention"] + ["sliding_attention"] * (config.get("sliding_window") is not None)
    return [draw.choice(kinds) for _ in range(num_layers(config))]


def windowed_if_used(draw: random.Random, config: Config) -> list[str]:
    """The same, of those that have to be asked to use it."""
    return windowed(draw, config if config.get("use_sliding_window") else config | {"sliding_window": None})


def rope(*kinds: str, shares: tuple[float, ...] = (1.0,), names: tuple[str, str] | None = None) -> Any:
    """Draws rope parameters as new or as older configs spell them. names: older keys of theta and share."""
    theta_key, share_key = names or ("rope_theta", "partial_rotary_factor")

    def drawn(draw: random.Random, config: Config) -> Config:
        size = config.get("qk_rope_head_dim") or head_dim(config)
        kind, theta = draw.choice(kinds or ROPES), draw.choice([50, 500.0, 10_000.0, 1e6])
        fit = [share for share in shares if int(size * share) >= 4 and int(size * share) % 2 == 0] or [1.0]
        share = draw.choice(fit)
        own = scaled(draw, kind, int(size * share))
        if draw.random() < 0.5:
            found = {"rope_type": kind, "rope_theta": theta, **own}
            return {"rope_parameters": found if shares == (1.0,) else found | {"partial_rotary_factor": share}}
        old: Config = {theta_key: theta} | ({share_key: share} if shares != (1.0,) else {})
        if "original_max_position_embeddings" in own and draw.random() < 0.3:
            old["original_max_position_embeddings"] = own.pop("original_max_position_embeddings")
        return old | {"rope_scaling": {draw.choice(["type", "rope_type"]): kind, **own} if kind != "default" else None}

    return drawn


def scaled(draw: random.Random, kind: str, dim: int) -> Config:
    """What a type of RoPE has besides what all have."""
    factor = draw.choice([1.5, 2.0, 4, 8.0])
    if kind in ("linear", "dynamic"):
        return {"factor": factor}
    original = {"original_max_position_embeddings": draw.choice([16, 32, 64])}
    if kind == "llama3":
        return {"factor": factor, "low_freq_factor": draw.choice([0.5, 1.0]), "high_freq_factor": 4.0, **original}
    if kind == "yarn":
        more = {"beta_fast": 16.0, "beta_slow": 2, "attention_factor": 1.3, "truncate": False}
        some = {key: value for key, value in more.items() if draw.random() < 0.3}
        original = original if draw.random() < 0.8 else {}
        both = {"mscale": 0.7, "mscale_all_dim": draw.choice([0.7, 1.0])} if draw.random() < 0.3 else {}
        return {"factor": factor, **some, **both, **original}
    if kind == "longrope":  # prompts are longer than 4: transformers takes the long factors, as Quire does
        sides = {
            f"{side}_factor": [round(draw.uniform(1, 4), 2) for _ in range(dim // 2)] for side in ("long", "short")
        }
        return {"factor": factor, "original_max_position_embeddings": 4, **sides}
    return {}


ROPES = ("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope")
SHARES = (0.25, 0.5, 0.75, 1.0, 0.4)


def by_kind(draw: random.Random, config: Config) -> Config:
    """Gemma's: one for each kind of layer."""
    ropes = {}
    for layer in ("full_attention", "sliding_attention"):
        kind = draw.choice(["default", "linear", "llama3"])
        ropes[layer] = {"rope_type": kind, "rope_theta": draw.choice([50.0, 1e4])} | scaled(draw, kind, 0)
    if draw.random() < 0.5:
        return {"rope_parameters": ropes}
    full = {key: value for key, value in ropes["full_attention"].items() if key != "rope_theta"}
    thetas = {"rope_theta": 700.0, "rope_local_base_freq": 30.0}
    return thetas | {"rope_scaling": None if full["rope_type"] == "default" else full}


def gemma4_ropes(draw: random.Random, config: Config) -> Config:
    full = {"rope_type": "proportional", "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]), "rope_theta": 500.0}
    return {"rope_parameters": {
        "full_attention": draw.choice([full, {"rope_type": "default", "rope_theta": 70.0}]),
        "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice([50.0, 1e4])},
    }}  # fmt: skip


# ------------------------------------------------------------------------------------------------ sizes


def llama_sizes(draw: random.Random, family: Family) -> Config:
    heads = draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12])
    size = family.even * draw.choice([2, 3, 4, 5, 6, 8, 10])
    config = {
        "vocab_size": draw.choice([40, 61, 64, 97, 130]),
        "hidden_size": heads * size,
        "intermediate_size": draw.choice([17, 24, 40, 67, 80]),
        LAYERS: draw.choice([1, 2, 3, 4, 5, 7]),
        "num_attention_heads": heads,
        "max_position_embeddings": LONGEST,
    }
    if draw.random() < 0.9:
        config["num_key_value_heads"] = divisor(draw, heads)
    else:
        config |= {"num_attention_heads": 32, "hidden_size": 32 * size}  # which all defaults divide
    if family.head_dim:
        config["head_dim"] = size
        if draw.random() < 0.5:
            config["hidden_size"] = config["num_attention_heads"] * draw.choice([1, 3, 6, 8])
            config["hidden_size"] *= -(-24 // config["hidden_size"])
    return config


def latent_sizes(draw: random.Random, family: Family) -> Config:
    config = llama_sizes(draw, family)
    config["num_key_value_heads"] = config["num_attention_heads"]
    return config | {
        "kv_lora_rank": draw.choice([8, 20, 32]),
        "q_lora_rank": draw.choice([None, 7, 24]),
        "qk_nope_head_dim": draw.choice([4, 10, 12]),
        "qk_rope_head_dim": draw.choice([4, 6, 8, 10]),
        "v_head_dim": draw.choice([4, 6, 12, 16]),
    }


def sparse_sizes(draw: random.Random, family: Family) -> Config:
    """With heads enough that no key has the score 0: transformers breaks ties in any order."""
    return latent_sizes(draw, family) | {"q_lora_rank": draw.choice([7, 24]), "index_n_heads": draw.choice([12, 20])}


def gpt_sizes(draw: random.Random, family: Family) -> Config:
    heads = family.even * draw.choice([1, 2, 3, 5, 6] if family.even == 1 else [1, 2])
    return {
        "vocab_size": draw.choice([40, 61, 64, 97, 130]),
        "n_embd": heads * draw.choice([4, 6, 8, 10, 12]),
        "n_layer": draw.randint(1, 5),
        "n_head": heads,
        "n_positions": LONGEST,
    }


def odd_sizes(draw: random.Random, family: Family) -> Config:
    """Of GPTs without RoPE, whose heads may have any size."""
    config = gpt_sizes(draw, family)
    return config | {"n_embd": config["n_head"] * draw.choice([3, 5, 7, 8, 12, 20])}


def bloom_sizes(draw: random.Random, family: Family) -> Config:
    config = odd_sizes(draw, family)
    del config["n_positions"]
    return config | {draw.choice(["hidden_size", "n_embed"]): config.pop("n_embd")}


def mpt_sizes(draw: random.Random, family: Family) -> Config:
    config = odd_sizes(draw, family)
    names = {"n_embd": "d_model", "n_layer": "n_layers", "n_head": "n_heads", "n_positions": "max_seq_len"}
    return {names.get(key, key): value for key, value in config.items()}


def opt_sizes(draw: random.Random, family: Family) -> Config:
    config = odd_sizes(draw, family)
    names = {"n_embd": "hidden_size", "n_layer": LAYERS, "n_head": "num_attention_heads",
             "n_positions": "max_position_embeddings"}  # fmt: skip
    return {names.get(key, key): value for key, value in config.items()} | {"ffn_dim": draw.choice([17, 40, 80])}


def falcon_sizes(draw: random.Random, family: Family) -> Config:
    config = neox_sizes(draw, family)
    del config["intermediate_size"]
    return config | {draw.choice(["hidden_size", "n_embed"]): config.pop("hidden_size")}


def neox_sizes(draw: random.Random, family: Family) -> Config:
    config = llama_sizes(draw, family)
    config.pop("num_key_value_heads", None)
    return config


def state_sizes(draw: random.Random, family: Family) -> Config:
    """Mamba-2's heads divide what its layers are wide inside."""
    config = llama_sizes(draw, family)
    expand = draw.choice([1, 2, 2, 3])
    inner = expand * config["hidden_size"]
    heads = draw.choice([n for n in range(1, 17) if inner % n == 0 and inner // n <= 1024])  # as operators take them
    return config | {
        "mamba_expand": expand,
        "mamba_n_heads": heads,
        "mamba_d_head": draw.choice(["auto", inner // heads]),
        "mamba_n_groups": divisor(draw, heads),
        "mamba_d_state": draw.choice([4, 10, 16]),
    }


# ------------------------------------------------------------------------------------------------ families

TIED = {"tie_word_embeddings": FLAG}
LLAMA: dict[str, Choices] = TIED | {"rms_norm_eps": EPS}
ATTENTION_BIAS = {"attention_bias": FLAG}
BIASES = ATTENTION_BIAS | {"mlp_bias": FLAG}
QWEN: dict[str, Choices] = LLAMA | {
    "use_sliding_window": FLAG,
    "sliding_window": (None, *WINDOWS),
    "max_window_layers": (0, 1, 2, 5),
    "layer_types": windowed_if_used,
}
GRANITE_SCALES = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
GRANITE: dict[str, Choices] = LLAMA | ATTENTION_BIAS | dict.fromkeys(GRANITE_SCALES, MULTIPLIERS)
GPT: dict[str, Choices] = {
    "layer_norm_epsilon": EPS,
    "n_inner": (None, 17, 40),
    "activation_function": ("gelu_new", "gelu", "gelu_pytorch_tanh"),
}
SPARSE: dict[str, Choices] = {
    "num_experts": (2, 3, 5, 8),
    "num_experts_per_tok": upto("num_experts"),
    "moe_intermediate_size": (12, 21, 36),
}
LOCAL_SPARSE: dict[str, Choices] = {
    "num_local_experts": (1, 2, 3, 5, 8),
    "num_experts_per_tok": upto("num_local_experts"),
}


def grouped(draw: random.Random, config: Config) -> int:
    """Groups of experts, two or more in each."""
    return draw.choice([one for one in (1, 2, 3, 4) if config["n_routed_experts"] % (2 * one) == 0])


def routed(draw: random.Random, config: Config) -> int:
    """No more than there are in the groups that are chosen."""
    chosen = config.get("topk_group") or 1
    return draw.randint(1, config["n_routed_experts"] // (config.get("n_group") or 1) * chosen)


ROUTED: dict[str, Choices] = {
    "n_routed_experts": (4, 6, 8, 12),
    "n_group": grouped,
    "topk_group": upto("n_group"),
    "num_experts_per_tok": routed,
    "moe_intermediate_size": (12, 21, 36),
    "routed_scaling_factor": (1.0, 0.5, 2.5),
    "n_shared_experts": (1, 2, 3),
    "norm_topk_prob": FLAG,
    "first_k_dense_replace": (0, 1, 2, 9),
}
UNGROUPED = {key: value for key, value in ROUTED.items() if key not in ("n_group", "topk_group")}
INDEX: dict[str, Choices] = {"index_head_dim": (10, 16, 20), "index_topk": (1, 3, 8, 15, 2048)}
DELTA: dict[str, Choices] = LLAMA | ATTENTION_BIAS | {
    "linear_num_value_heads": (1, 2, 3, 4, 6),
    "linear_num_key_heads": lambda draw, config: divisor(draw, config["linear_num_value_heads"]),
    "linear_key_head_dim": (4, 6, 8, 12, 16),
    "linear_value_head_dim": (4, 6, 8, 10, 20),
    "linear_conv_kernel_dim": (2, 3, 4, 5),
    "full_attention_interval": (1, 2, 3, 4),
    "layer_types": of_layers("full_attention", "linear_attention"),
}  # fmt: skip
DELTA_SIZES = [key for key in DELTA if key.startswith("linear_") and "kernel" not in key]
SHARED_EXPERT: dict[str, Choices] = SPARSE | {"shared_expert_intermediate_size": (9, 24, 40)}
STATE: dict[str, Choices] = LLAMA | ATTENTION_BIAS | {
    "mamba_conv_bias": FLAG,
    "mamba_proj_bias": FLAG,
    "mamba_d_conv": (2, 3, 4),
    "time_step_limit": ([0.0, float("inf")], [0.05, 0.4]),
}  # fmt: skip
LFM: dict[str, Choices] = {
    "norm_eps": EPS,
    "tie_embedding": FLAG,
    "conv_bias": FLAG,
    "conv_L_cache": (2, 3, 4, 5),
}
LFM_LAYERS: dict[str, Choices] = {"layer_types": of_layers("conv", "full_attention")}


def shared_layers(draw: random.Random, config: Config) -> int:
    """Gemma 4's last layers, of kinds that were there before."""
    kinds = config["layer_types"]
    return draw.choice([n for n in range(len(kinds)) if set(kinds[len(kinds) - n :]) <= set(kinds[: len(kinds) - n])])


def hybrids(draw: random.Random, config: Config, least: int) -> list[str]:
    """Kinds of Zamba's layers, `least` hybrid ones or more: a first block is tied to later ones."""
    kinds = [draw.choice(["mamba", "hybrid"]) for _ in range(num_layers(config))]
    return ["hybrid"] * least + kinds[least:]


def of_base(kind: str) -> Callable[[random.Random, Family], Config]:
    """The sizes of `checkpoints`, of a family with states."""
    return lambda draw, family: BASES[kind] | {"vocab_size": draw.choice([40, 61, 97, 130])}


def kimi_sizes(draw: random.Random, family: Family) -> Config:
    """With the published names of the experts' counts."""
    config = of_base("KimiLinear")(draw, family)
    names = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"}
    return {names.get(key, key): value for key, value in config.items()}


MAMBA: dict[str, Choices] = {
    "layer_norm_epsilon": EPS,
    "use_bias": FLAG,
    "use_conv_bias": FLAG,
    "conv_kernel": (2, 3, 4),
    "state_size": (4, 10, 16),
}
SCANS: dict[str, Choices] = MAMBA | {"expand": (1, 2, 3)}


KINDS: dict[str, Family] = {
    "Llama": Family(llama_sizes, LLAMA | BIASES | {"sliding_window": WINDOWS}, rope()),
    "Mistral": Family(llama_sizes, LLAMA | {"sliding_window": (None, *WINDOWS)}, rope()),
    "Mixtral": Family(
        llama_sizes, LLAMA | LOCAL_SPARSE | {"sliding_window": (None, *WINDOWS)}, rope(), always=LOCAL_SPARSE
    ),
    "Qwen2": Family(llama_sizes, QWEN, rope()),
    "Qwen3": Family(llama_sizes, QWEN | ATTENTION_BIAS, rope()),
    "Qwen3Moe": Family(
        llama_sizes,
        LLAMA | ATTENTION_BIAS | SPARSE | {
            "norm_topk_prob": FLAG, "decoder_sparse_step": (1, 2, 3), "mlp_only_layers": some_layers,
            "use_sliding_window": FLAG, "sliding_window": (None, *WINDOWS),
        },
        rope(),
        always=SPARSE,
    ),
    "Gemma2": Family(
        llama_sizes,
        LLAMA | ATTENTION_BIAS | {
            "sliding_window": WINDOWS, "layer_types": windowed, "query_pre_attn_scalar": (8, 24, 256),
            "attn_logit_softcapping": (None, 2.0, 50.0), "final_logit_softcapping": (None, 3.0, 30.0),
        },
        rope(),
        always=["sliding_window"],
    ),
    "Gemma3": Family(
        llama_sizes,
        LLAMA | ATTENTION_BIAS | {
            "sliding_window": WINDOWS, "sliding_window_pattern": (1, 2, 3), "layer_types": windowed,
            "query_pre_attn_scalar": (8, 24, 256), "final_logit_softcapping": (None, 3.0, 30.0),
        },
        by_kind,
        always=["sliding_window"],
    ),
    "Gemma4": Family(
        llama_sizes,
        LLAMA | ATTENTION_BIAS | {
            "vocab_size_per_layer_input": lambda draw, config: config["vocab_size"],
            "hidden_size_per_layer_input": (0, 5, 8), "global_head_dim": (8, 12, 32),
            "sliding_window": WINDOWS,
            "layer_types": lambda draw, config: [*windowed(draw, config)[:-1], "full_attention"],
            "final_logit_softcapping": (None, 3.0), "attention_k_eq_v": FLAG, "use_double_wide_mlp": FLAG,
            "num_global_key_value_heads": lambda draw, config: divisor(draw, config["num_attention_heads"]),
            "num_kv_shared_layers": shared_layers,
        },
        gemma4_ropes,
        always=["vocab_size_per_layer_input", "hidden_size_per_layer_input", "sliding_window", "layer_types",
                       "num_global_key_value_heads"],
    ),
    "Phi3": Family(
        llama_sizes,
        LLAMA | {"sliding_window": (None, *WINDOWS), "original_max_position_embeddings": (4, 64)},
        rope("default", "default", "longrope", shares=(0.5, 0.75, 1.0)),
        head_dim=False,
    ),
    "Olmo2": Family(llama_sizes, LLAMA | ATTENTION_BIAS, rope()),
    "Granite": Family(llama_sizes, GRANITE | {"mlp_bias": FLAG}, rope()),
    "GraniteMoe": Family(llama_sizes, GRANITE | LOCAL_SPARSE, rope(), always=LOCAL_SPARSE),
    "GraniteMoeShared": Family(
        llama_sizes, GRANITE | LOCAL_SPARSE | {"shared_intermediate_size": (0, 11, 40)}, rope(), always=LOCAL_SPARSE
    ),
    "GraniteMoeHybrid": Family(
        state_sizes,
        GRANITE | STATE | {
            "num_local_experts": (0, 2, 5), "num_experts_per_tok": lambda draw, config: draw.randint(
                0 if not config["num_local_experts"] else 1, config["num_local_experts"]),
            "shared_intermediate_size": (11, 40), "position_embedding_type": (None, "rope", "nope"),
            "layer_types": of_layers("linear_attention", "full_attention"),
            "layers_block_type": of_layers("mamba", "attention"),
        },
        rope(),
        head_dim=False,
        always=[*LOCAL_SPARSE, "shared_intermediate_size"],
    ),
    "Bamba": Family(
        state_sizes, STATE | {"mlp_bias": FLAG, "attn_layer_indices": some_layers}, rope("default"), head_dim=False,
        even=4,
    ),
    "SmolLM3": Family(
        llama_sizes,
        LLAMA | BIASES | {
            "no_rope_layer_interval": (1, 2, 3), "no_rope_layers": of_layers(0, 1, 1), "use_sliding_window": FLAG,
            "sliding_window": (None, *WINDOWS), "layer_types": windowed_if_used,
        },
        rope(),
    ),
    "Starcoder2": Family(
        llama_sizes, TIED | {"use_bias": FLAG, "norm_epsilon": EPS, "sliding_window": (None, *WINDOWS)}, rope()
    ),
    "GPTNeoX": Family(
        neox_sizes,
        TIED | ATTENTION_BIAS | {
            "layer_norm_eps": EPS, "use_parallel_residual": FLAG, "hidden_act": ("gelu", "gelu_new", "gelu_fast"),
        },
        rope(shares=SHARES, names=("rotary_emb_base", "rotary_pct")),
        head_dim=False,
        even=8,
    ),
    "Glm": Family(llama_sizes, LLAMA | ATTENTION_BIAS, rope(shares=SHARES), even=4),
    "Glm4": Family(llama_sizes, LLAMA | ATTENTION_BIAS, rope(shares=SHARES), even=4),
    "Glm4Moe": Family(
        llama_sizes, LLAMA | ATTENTION_BIAS | ROUTED | {"use_qk_norm": FLAG}, rope(shares=SHARES), even=4,
        always=ROUTED,
    ),
    "Ernie4_5": Family(llama_sizes, LLAMA | {"use_bias": FLAG}, rope()),
    "Ernie4_5_Moe": Family(
        llama_sizes,
        LLAMA | {
            "moe_num_experts": (2, 3, 5, 8), "moe_k": upto("moe_num_experts"), "moe_intermediate_size": (12, 21, 36),
            "moe_num_shared_experts": (0, 1, 2), "moe_layer_start_index": (0, 1, 2), "moe_layer_interval": (1, 2),
            "moe_layer_end_index": lambda draw, config: draw.choice([-1, num_layers(config) - 1]),
        },
        rope(),
        always=["moe_num_experts", "moe_k", "moe_intermediate_size"],
    ),
    "Cohere": Family(
        llama_sizes, TIED | ATTENTION_BIAS | {"layer_norm_eps": EPS, "logit_scale": MULTIPLIERS}, rope(), head_dim=False
    ),
    "Cohere2": Family(
        llama_sizes,
        TIED | ATTENTION_BIAS | {
            "layer_norm_eps": EPS, "logit_scale": MULTIPLIERS, "sliding_window": WINDOWS,
            "sliding_window_pattern": (1, 2, 3, 4), "layer_types": windowed,
        },
        rope(),
        head_dim=False,
    ),
    "DeepseekV2": Family(
        latent_sizes,
        TIED | ATTENTION_BIAS | ROUTED
        | {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,)},
        rope("default", "yarn"),
        head_dim=False,
        always=ROUTED,
    ),
    "DeepseekV3": Family(
        latent_sizes, TIED | ATTENTION_BIAS | ROUTED, rope("default", "yarn"), head_dim=False, always=ROUTED
    ),
    "DeepseekV32": Family(
        sparse_sizes,
        TIED | ATTENTION_BIAS | ROUTED | INDEX | {"mlp_layer_types": of_layers("dense", "sparse")},
        rope("default", "yarn"),
        head_dim=False,
        always=[*ROUTED, *INDEX],
    ),
    "GlmMoeDsa": Family(
        sparse_sizes,
        TIED | ATTENTION_BIAS | ROUTED | INDEX
        | {"rms_norm_eps": EPS, "index_topk_freq": (1, 2, 3), "index_skip_topk_offset": (1, 2, 3)},
        rope("default", "yarn"),
        head_dim=False,
        always=[*ROUTED, *INDEX],
    ),
    "Exaone4": Family(
        llama_sizes,
        LLAMA | {"sliding_window": (None, *WINDOWS), "sliding_window_pattern": (1, 2, 3, 4), "layer_types": windowed},
        rope(),
    ),
    "SeedOss": Family(llama_sizes, LLAMA | BIASES | {"attention_out_bias": FLAG}, rope()),
    "Nemotron": Family(llama_sizes, TIED | BIASES | {"norm_eps": EPS}, rope(shares=SHARES), even=4),
    "GptOss": Family(
        llama_sizes,
        LLAMA | ATTENTION_BIAS | LOCAL_SPARSE | {
            "sliding_window": WINDOWS, "layer_types": windowed, "swiglu_limit": (0.5, 7.0),
            "swiglu_alpha": (1.0, 1.702),
        },
        rope(),
        always=[*LOCAL_SPARSE, "sliding_window"],
    ),
    "Llama4": Family(
        llama_sizes,
        LLAMA | ATTENTION_BIAS | LOCAL_SPARSE | {
            "intermediate_size_mlp": (13, 40, 72), "attention_chunk_size": WINDOWS[2:], "floor_scale": (3, 8, 8192),
            "attn_scale": (0.1, 0.5), "interleave_moe_layer_step": (1, 2, 3), "moe_layers": some_layers,
            "use_qk_norm": FLAG, "no_rope_layer_interval": (1, 2, 3, 4), "no_rope_layers": of_layers(0, 1, 1),
            "attn_temperature_tuning": FLAG, "layer_types": of_layers("chunked_attention", "full_attention"),
        },
        rope("default", "linear", "llama3"),
        always=[*LOCAL_SPARSE, "intermediate_size_mlp", "attention_chunk_size"],
    ),
    "Qwen3_5": Family(llama_sizes, DELTA, rope(shares=SHARES), even=8, always=DELTA_SIZES),
    "Qwen3_5Moe": Family(
        llama_sizes, DELTA | SHARED_EXPERT, rope(shares=SHARES), even=8, always=[*DELTA_SIZES, *SHARED_EXPERT]
    ),
    "Qwen3Next": Family(
        llama_sizes,
        DELTA | SHARED_EXPERT | {
            "norm_topk_prob": FLAG, "mlp_only_layers": some_layers, "decoder_sparse_step": (1, 2),
        },
        rope(shares=SHARES),
        even=8,
        always=[*DELTA_SIZES, *SHARED_EXPERT],
    ),
    "Lfm2": Family(
        llama_sizes,
        LFM | {
            "block_multiple_of": (1, 8, 16), "block_ffn_dim_multiplier": (1.0, 0.7, 1.3),
            "block_auto_adjust_ff_dim": FLAG, "full_attn_idxs": some_layers, "block_ff_dim": (24, 67),
        } | LFM_LAYERS,
        rope("default", "linear", "yarn"),
        head_dim=False,
        always=["block_multiple_of"],
    ),
    "Lfm2Moe": Family(
        llama_sizes,
        LFM | SPARSE | LFM_LAYERS | {
            "norm_topk_prob": FLAG, "use_expert_bias": FLAG, "routed_scaling_factor": (1.0, 1.5),
            "num_dense_layers": (0, 1, 2, 9),
        },
        rope("default", "linear", "yarn"),
        head_dim=False,
        always=[*SPARSE, "layer_types"],
    ),
    "GPT2": Family(odd_sizes, GPT | TIED, even=1),
    "GPTJ": Family(gpt_sizes, GPT | {"rotary_dim": (2, 4)}, even=1, always=["rotary_dim"]),
    "CodeGen": Family(gpt_sizes, GPT | {"rotary_dim": (2, 4)}, even=4, always=["rotary_dim"]),
    "Bloom": Family(bloom_sizes, TIED | {"layer_norm_epsilon": EPS}, even=1),
    "Mpt": Family(
        mpt_sizes,
        TIED | {"layer_norm_epsilon": EPS, "attn_config": ({"softmax_scale": 0.3}, {"attn_pdrop": 0}, {})},
        even=1,
    ),
    "OPT": Family(
        opt_sizes,
        TIED | {"enable_bias": FLAG, "activation_function": ("relu", "gelu"), "word_embed_proj_dim": (None,)},
        even=1,
    ),
    "Falcon": Family(
        falcon_sizes,
        TIED | {
            "bias": FLAG, "new_decoder_architecture": FLAG, "multi_query": FLAG, "layer_norm_epsilon": EPS,
            "parallel_attn": lambda draw, config: bool(config.get("new_decoder_architecture")) or draw.choice(FLAG),
            "num_ln_in_parallel_attn": lambda draw, config: draw.choice(
                [1, 2, None] if config.get("new_decoder_architecture") else [None]),
            "num_kv_heads": lambda draw, config: divisor(draw, config["num_attention_heads"]) if config.get(
                "new_decoder_architecture") else None,
            "ffn_hidden_size": (17, 80), "activation": ("gelu", "gelu_new"),
        },
        rope(),
        head_dim=False,
    ),
    "Mamba": Family(of_base("Mamba"), SCANS | {"time_step_rank": (3, 5)}, head_dim=False),
    "FalconMamba": Family(of_base("FalconMamba"), SCANS | {"mixer_rms_eps": EPS}, head_dim=False),
    "Mamba2": Family(of_base("Mamba2"), MAMBA | {"n_groups": (1, 2, 4, 8)}, head_dim=False),
    "Jamba": Family(
        of_base("Jamba"),
        LLAMA | {
            "mamba_d_conv": (2, 3, 4), "mamba_d_state": (4, 10), "mamba_expand": (1, 2, 3), "mamba_conv_bias": FLAG,
            "mamba_proj_bias": FLAG, "num_experts": (2, 5),
        },
        head_dim=False,
    ),
    "NemotronH": Family(
        of_base("NemotronH"),
        {
            "layer_norm_epsilon": EPS, "ssm_state_size": (4, 16), "conv_kernel": (2, 4), "n_groups": (1, 2, 4),
            "use_conv_bias": FLAG, "num_experts_per_tok": (1, 2, 3), "routed_scaling_factor": (0.5, 2.5),
        },
        head_dim=False,
    ),
    "FalconH1": Family(
        of_base("FalconH1"),
        LLAMA | BIASES | dict.fromkeys(("ssm_out_multiplier", "key_multiplier"), MULTIPLIERS)
        | {"mamba_conv_bias": FLAG, "mamba_d_conv": (2, 4), "mamba_rms_norm": FLAG},
        head_dim=False,
    ),
    "KimiLinear": Family(
        kimi_sizes,
        {
            "rms_norm_eps": EPS, "layer_types": of_layers("linear_attention", "full_attention"),
            "first_k_dense_replace": (0, 1, 2),
        },
        head_dim=False,
    ),
    "OlmoHybrid": Family(
        of_base("OlmoHybrid"),
        LLAMA | {
            "linear_value_head_dim": (6, 12, 20), "linear_conv_kernel_dim": (2, 4), "linear_allow_neg_eigval": FLAG,
        },
        head_dim=False,
    ),
    "Zamba": Family(
        of_base("Zamba"),
        {
            "layers_block_type": lambda draw, config: hybrids(draw, config, 2),
            "rms_norm_eps": EPS, "mamba_conv_bias": FLAG, "mamba_proj_bias": FLAG, "n_mamba_heads": (1, 2, 3),
            "mamba_d_conv": (2, 4), "mamba_dt_rank": (3, "auto"),
        },
        head_dim=False,
    ),
    "Zamba2": Family(
        of_base("Zamba2"),
        {
            "layers_block_type": lambda draw, config: hybrids(draw, config, 1), "add_bias_linear": FLAG,
            "use_mem_rope": FLAG, "use_shared_attention_adapter": FLAG, "num_mem_blocks": (1, 2, 3),
            "mamba_ngroups": (1, 2, 4), "mamba_d_conv": (2, 4), "adapter_rank": (3, 8),
        },
        head_dim=False,
        always=["layers_block_type"],
    ),
    "AXK2": Family(
        sparse_sizes,
        TIED | ATTENTION_BIAS | UNGROUPED | INDEX | {
            "mlp_layer_types": of_layers("dense", "sparse"), "rms_norm_eps": EPS, "gated_norm_rank": (3, 16),
        },
        rope("default", "yarn"),
        head_dim=False,
        always=[*UNGROUPED, *INDEX],
    ),
    "RecurrentGemma": Family(
        of_base("RecurrentGemma"),
        {
            "rms_norm_eps": EPS, "conv1d_width": (2, 4), "logits_soft_cap": (3.0, 30.0),
            "attention_window_size": WINDOWS[2:],
        },
        head_dim=False,
    ),
    "MiniMax": Family(
        of_base("MiniMax"),
        LLAMA | LOCAL_SPARSE | {"layer_types": of_layers("linear_attention", "full_attention")},
        head_dim=False,
        always=LOCAL_SPARSE,
    ),
    "Lfm3": Family(
        of_base("Lfm3"),
        {"norm_eps": EPS, "conv_L_cache": (2, 3, 5), "sliding_window": WINDOWS},
        head_dim=False,
    ),
}  # fmt: skip
