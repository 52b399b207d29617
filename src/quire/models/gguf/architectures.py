"""What GGUF's architectures are elsewhere: their configuration as a config.json has it, and the names of tensors.

An architecture is a table. Its tensors keep their numbers but for what writers change: rows of q and k in the order of
a RoPE of neighbouring pairs, norms as 1 + weight, projections that others store as [in, out], and of the gated delta
rule the order of the heads of values, and decays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from quire.errors import ModelError
from quire.models.gguf.metadata import Metadata
from quire.models.rope import share_of

LONGEST = 2**26  # tokens of a sequence: angles are computed for each position
IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
# A file's names of tensors, without what the names of several architectures have in common -> those of others.
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
LAYER = ATTENTION | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GATED_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
SHORT_CONVOLUTION = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
NOT_NEEDED = {FACTORS, LONG, SHORT}  # among the weights: the configuration has them


class Tiles(NamedTuple):
    """Heads of values that share heads of keys: a file has the first one of each head of keys, then the second ones.

    Others have all that share the first head of keys, then all that share the second one.
    """

    keys: int  # heads of keys
    size: int  # rows of a head of values
    first: int = 0  # rows before these heads

    def order(self, count: int) -> torch.Tensor:
        """The place in a file of each of so many rows. Raises ModelError where they are no such heads."""
        if count <= self.first or (count - self.first) % (self.keys * self.size):
            raise ModelError(
                f"{count} rows are no heads of {self.size} that share {self.keys} after {self.first} others"
            )
        heads = torch.arange(self.first, count).view(-1, self.keys, self.size).transpose(0, 1)
        return torch.cat([torch.arange(self.first), heads.flatten()])


class Place(NamedTuple):
    """Where a tensor of ours stands in a file."""

    tensor: str  # its name there
    entry: int | None = None  # of its first dimension; None: all
    heads: int | None = None  # its rows are in pairs of neighbours, within each of so many heads
    less_one: bool = False  # 1 is to be subtracted
    log: bool = False  # it holds -exp of the numbers
    tiles: Tiles | None = None  # its rows are in this order
    column_tiles: Tiles | None = None  # its columns are
    transposed: bool = False  # if it is not quantised


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One of GGUF's architectures."""

    name: str  # what a config.json calls it, in `architectures`
    model_type: str
    layer: Mapping[str, str]  # a file's tensors of a layer -> those of others, {} for the number of an expert
    prefix: str = "model.layers.{}."  # of these
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)  # the same outside the layers
    keys: Mapping[str, str] = field(default_factory=dict)  # metadata -> keys of a config.json, besides the usual ones
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys of a config.json that all have alike
    more: Callable[[Metadata, dict[str, Any]], Mapping[str, Any]] | None = None  # what else its config.json would say
    pairs: bool = False  # q and k have their rows in pairs
    norms_plus_one: bool = False
    tiles: Callable[[Metadata], Mapping[str, Tiles]] | None = None  # of tensors of a layer
    column_tiles: Mapping[str, str] = field(
        default_factory=dict
    )  # a tensor whose columns are in the order of another's rows
    transposed: frozenset[str] = frozenset()  # tensors of a layer that others store as [in, out]

    def config(self, metadata: Metadata) -> dict[str, Any]:
        """As a config.json says it. Raises ModelError for a key that is missing or has a wrong value."""
        config = _usual(metadata) | {"architectures": [self.name], "model_type": self.model_type, **self.fixed}
        for theirs, ours in self.keys.items():
            if (value := metadata.get(theirs)) is not None:
                config[ours] = value
        if self.more is not None:
            config |= self.more(metadata, config)
        return config

    def places(self, metadata: Metadata) -> dict[str, Place]:
        """Where each tensor stands, by its name in other checkpoints; one without such a name keeps its own."""
        heads = {"attn_q": metadata.integer("attention.head_count"), "attn_k": _num_kv_heads(metadata)}
        tiles = {} if self.tiles is None else self.tiles(metadata)
        ahead = range(_num_layers(metadata), metadata.integer("block_count"))  # layers that guess tokens ahead
        places: dict[str, Place] = {}
        for name, info in metadata.file.tensors.items():
            if name in NOT_NEEDED:
                continue
            if (match := IN_LAYER.fullmatch(name)) is not None and int(match[1]) in ahead:
                continue
            if match is None:
                prefix, rest, table = "", name, self.ends
            else:
                prefix, rest, table = self.prefix.format(match[1]), match[2], self.layer
            base, _, kind = rest.rpartition(".")
            theirs = table.get(rest) or (f"{table[base]}.{kind}" if base in table else name)
            place = Place(
                name,
                heads=heads.get(base) if self.pairs else None,
                less_one=self.norms_plus_one and base.endswith("norm") and base != "ssm_norm",
                log=rest == "ssm_a",
                tiles=tiles.get(base or rest),
                column_tiles=tiles.get(self.column_tiles.get(base, "")),
                transposed=base in self.transposed and kind == "weight",
            )
            whole = theirs if theirs == name else prefix + theirs
            if "{}" in whole:
                places |= {whole.format(i): place._replace(entry=i) for i in range(info.shape[0])}
            else:
                places[whole] = place
        return places


def _usual(metadata: Metadata) -> dict[str, Any]:
    """The keys that nearly all architectures have."""
    file = metadata.file
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; it is no language model, or a part of one")
    if metadata.get("attention.causal", True) is not True:
        raise metadata.error("attention.causal", metadata.get("attention.causal"), "true")
    _check_sizes(metadata)
    num_heads, hidden_size = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", max(1, hidden_size // num_heads))
    if (other := metadata.integer("attention.value_length", head_dim)) != head_dim:
        raise metadata.error("attention.value_length", other, f"attention.key_length, {head_dim}")
    config = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_size": hidden_size,
        "num_hidden_layers": _num_layers(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
        "intermediate_size": metadata.get("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(metadata),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
    }
    rope = _rope(metadata, head_dim)
    return config | ({"rope_parameters": rope} if rope else {})


def _num_layers(metadata: Metadata) -> int:
    """Layers, without those at the end that guess tokens ahead."""
    count, ahead = metadata.integer("block_count"), metadata.get("nextn_predict_layers", 0)
    if not isinstance(ahead, int) or not 0 <= ahead < count:
        raise metadata.error("nextn_predict_layers", ahead, f"below block_count, {count}")
    return count - ahead


def _num_kv_heads(metadata: Metadata) -> int:
    """Heads of keys in each layer with attention: a layer without it has 0."""
    found = metadata.get("attention.head_count_kv", metadata.integer("attention.head_count"))
    heads = {count for count in found if count} if isinstance(found, list) else {found}
    if len(heads) != 1 or not all(type(count) is int and count > 0 for count in heads):
        raise metadata.error(
            "attention.head_count_kv", found, "a positive integer, the same in all layers with attention"
        )
    return int(heads.pop())


def _check_sizes(metadata: Metadata) -> None:
    """Raise ModelError for a size that no tensor has, before anything of that size is made."""
    tensors = metadata.file.tensors
    largest = max(max(info.shape) for info in tensors.values())
    for key, most in (
        ("block_count", len(tensors)),
        ("attention.head_count", largest),
        ("attention.key_length", largest),
        ("embedding_length", largest),
        ("expert_count", largest),
        ("expert_feed_forward_length", largest),
        *(
            (f"ssm.{key}", largest)
            for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
        ),
        ("shortconv.l_cache", largest),
        ("context_length", LONGEST),
    ):
        value = metadata.file.metadata.get(f"{metadata.architecture}.{key}")
        if isinstance(value, int) and value > most:
            raise metadata.error(key, value, f"at most {most}")


def _rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """The rope parameters; empty where the metadata have none."""
    rope: dict[str, Any] = {}
    if (theta := metadata.get("rope.freq_base")) is not None:
        rope["rope_theta"] = metadata.number("rope.freq_base", theta)
    rotated = metadata.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = share_of(rotated, head_dim)
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))
    original = metadata.get("rope.scaling.original_context_length")
    metadata.get("rope.scaling.finetuned")  # how it was made
    metadata.get("rope.scaling.attn_factor")  # longrope's, which its lengths say
    if metadata.has(FACTORS):
        return rope | _longrope(metadata, FACTORS, FACTORS) | {"attention_factor": 1.0}
    if metadata.has(LONG):
        return rope | _longrope(metadata, SHORT, LONG)
    if kind == "linear" or (kind == "none" and factor not in (None, 0.0, 1.0)):
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        yarn = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": metadata.get("rope.scaling.yarn_attn_factor"),
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow"),
        }
        return rope | {key: value for key, value in yarn.items() if value is not None}
    if kind != "none":
        raise metadata.error("rope.scaling.type", kind, "none, linear or yarn, or longrope with its factors")
    return rope


def _longrope(metadata: Metadata, short: str, long: str) -> dict[str, Any]:
    """A RoPE whose frequencies are divided by factors, as they are for short sequences and for long ones."""
    return {
        "rope_type": "longrope",
        "short_factor": _numbers(metadata, short),
        "long_factor": _numbers(metadata, long),
    }


def _numbers(metadata: Metadata, name: str) -> list[float]:
    info = metadata.file.tensors.get(name)
    if info is None or info.kind != "F32" or len(info.shape) != 1:
        raise ModelError(f"{metadata.file.path}: {name} is {info}; it must be fp32 numbers")
    found = metadata.file.blocks(name).view(torch.float32).flatten().tolist()
    return [float(value) for value in found]


def _attention_bias(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias")}


def _llama(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return _attention_bias(metadata, config) | {"mlp_bias": metadata.has("blk.0.ffn_gate.bias")}


def _gemma(deepest: int, _: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The largest model of a generation, known by its number of layers, scales scores by the width of all heads."""
    width = config["hidden_size"] // config["num_attention_heads"]
    is_largest = config["num_hidden_layers"] == deepest
    return {"query_pre_attn_scalar": width if is_largest else config["head_dim"]}


def _gemma3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters", {})
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    found = _gemma(62, metadata, config) | {
        "rope_theta": rope.get("rope_theta", 1e6),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10_000.0),
        "rope_scaling": scaling or None,
        "rope_parameters": None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }
    windows = metadata.get("attention.sliding_window_pattern")
    if isinstance(windows, list):
        found["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in windows]
    elif windows is not None:
        found["sliding_window_pattern"] = windows
    return found


def _phi3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    original = metadata.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = metadata.get("attention.sliding_window")
    return {"original_max_position_embeddings": original, "sliding_window": window or None}


def _exaone4(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    """A window that not all layers have; all see everything where there is none."""
    window, slides = metadata.get("attention.sliding_window"), metadata.get("attention.sliding_window_pattern")
    found: dict[str, Any] = {"sliding_window": window or None}
    if isinstance(slides, list):
        found["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    elif slides is not None:
        raise metadata.error("attention.sliding_window_pattern", slides, "an array with layers of both kinds")
    return found


def _ernie(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": metadata.has("blk.0.attn_q.bias")}


def _gpt2(_: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are called otherwise, or are not there."""
    renamed = {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
    }  # fmt: skip
    gone = (*renamed.values(), "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters")
    return {ours: config[usual] for ours, usual in renamed.items()} | dict.fromkeys(gone)


def _starcoder2(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": metadata.has("blk.0.attn_q.bias"), "rms_norm_eps": None}


def _qwen3_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return _attention_bias(metadata, config) | {"intermediate_size": config["intermediate_size"] or 1}


def _qwen35(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata.get("rope.dimension_sections")  # of pictures: text has one position in all of them
    num_layers, every = config["num_hidden_layers"], metadata.integer("full_attention_interval", 4)
    linear = metadata.get("attention.recurrent_layers", [(i + 1) % every != 0 for i in range(num_layers)])
    if not isinstance(linear, list) or len(linear) < num_layers:
        raise metadata.error("attention.recurrent_layers", linear, f"an array with both kinds of {num_layers} layers")
    num_heads = metadata.integer("ssm.time_step_rank")
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear[:num_layers]],
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // num_heads,
    }


def _qwen35_tiles(metadata: Metadata) -> dict[str, Tiles]:
    """The heads of values, alone and after q and k."""
    keys, num_heads = metadata.integer("ssm.group_count"), metadata.integer("ssm.time_step_rank")
    size = metadata.integer("ssm.inner_size") // num_heads
    after = Tiles(keys, size, 2 * keys * metadata.integer("ssm.state_size"))
    by_head = dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), Tiles(keys, 1))
    return by_head | {"attn_gate": Tiles(keys, size), "attn_qkv": after, "ssm_conv1d": after}


def _gpt_oss(_: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Its RoPE, of which a file does not say that it has no whole steps."""
    rope = config.get("rope_parameters", {})
    return {"rope_parameters": rope | ({"truncate": False} if rope.get("rope_type") == "yarn" else {})}


def _lfm2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = metadata.get("attention.head_count_kv")
    kinds = heads if isinstance(heads, list) else [heads] * config["num_hidden_layers"]
    return {
        "layer_types": ["full_attention" if count else "conv" for count in kinds],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "block_auto_adjust_ff_dim": False,  # the file has the size that comes of it
    }


LLAMA = Architecture(name="LlamaForCausalLM", model_type="llama", layer=LAYER, more=_llama, pairs=True)
MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    layer=ATTENTION | MIXTRAL_EXPERTS,
    keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    pairs=True,
)
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
COHERE = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture(name="Qwen2ForCausalLM", model_type="qwen2", layer=LAYER),
    "qwen3": Architecture(name="Qwen3ForCausalLM", model_type="qwen3", layer=LAYER, more=_attention_bias),
    "qwen3moe": Architecture(
        name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layer=LAYER | EXPERTS,
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fixed={"norm_topk_prob": True},
        more=_qwen3_moe,
    ),
    "gemma2": Architecture(
        name="Gemma2ForCausalLM",
        model_type="gemma2",
        layer=LAYER | GEMMA_NORMS,
        keys=WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        more=partial(_gemma, 46),
        norms_plus_one=True,
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer=LAYER | GEMMA_NORMS,
        keys=WINDOW,
        more=_gemma3,
        norms_plus_one=True,
    ),
    "phi3": Architecture(
        name="Phi3ForCausalLM",
        model_type="phi3",
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        more=_phi3,
    ),
    "gpt2": Architecture(
        name="GPT2LMHeadModel",
        model_type="gpt2",
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        prefix="transformer.h.{}.",
        ends={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        keys={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        more=_gpt2,
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    "starcoder2": Architecture(
        name="Starcoder2ForCausalLM",
        model_type="starcoder2",
        layer=LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        more=_starcoder2,
    ),
    "granite": Architecture(
        name="GraniteForCausalLM", model_type="granite", layer=LAYER, keys=SCALES, more=_llama, pairs=True
    ),
    "olmo2": Architecture(
        name="Olmo2ForCausalLM",
        model_type="olmo2",
        layer=LAYER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        more=_attention_bias,
    ),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", model_type="smollm3", layer=LAYER, more=_llama, pairs=True),
    "command-r": Architecture(name="CohereForCausalLM", model_type="cohere", layer=LAYER, keys=COHERE),
    "cohere2": Architecture(name="Cohere2ForCausalLM", model_type="cohere2", layer=LAYER, keys=COHERE | WINDOW),
    "glm4": Architecture(
        name="Glm4ForCausalLM",
        model_type="glm4",
        layer=LAYER
        | {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        more=_attention_bias,
    ),
    "exaone4": Architecture(
        name="Exaone4ForCausalLM",
        model_type="exaone4",
        layer=LAYER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        more=_exaone4,
    ),
    "ernie4_5": Architecture(name="Ernie4_5ForCausalLM", model_type="ernie4_5", layer=LAYER, more=_ernie),
    "qwen35": Architecture(
        name="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        layer=LAYER | GATED_DELTA | {"post_attention_norm": "post_attention_layernorm"},
        more=_qwen35,
        norms_plus_one=True,
        tiles=_qwen35_tiles,
        column_tiles={"ssm_out": "attn_gate"},
    ),
    "gpt-oss": Architecture(
        name="GptOssForCausalLM",
        model_type="gpt_oss",
        layer=LAYER
        | EXPERTS
        | {
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        keys=WINDOW
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        more=_gpt_oss,
    ),
    "lfm2": Architecture(
        name="Lfm2ForCausalLM",
        model_type="lfm2",
        layer=SHORT_CONVOLUTION,
        ends={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        more=_lfm2,
    ),
    "seed_oss": Architecture(
        name="SeedOssForCausalLM",
        model_type="seed_oss",
        layer=LAYER | {"post_attention_norm": "post_attention_layernorm"},
    ),
}


def architecture_of(metadata: Metadata) -> Architecture:
    """The architecture that a file says it has. Raises ModelError for one that is not served."""
    name = metadata.architecture
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{metadata.file.path} has the architecture {name!r}, of which no GGUF files are served; served are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return MIXTRAL if name == "llama" and metadata.get("expert_count", 0) else ARCHITECTURES[name]
