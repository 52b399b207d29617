"""GGUF files of random models, written with llama.cpp's package as its converter writes them."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from tests.models.checkpoints import save
from tests.models.gguf.vocabularies import metadata_of

ARCHITECTURES = {
    "Llama": "llama", "Mistral": "llama", "Mixtral": "llama", "Qwen2": "qwen2", "Qwen2VL": "qwen2vl", "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3moe", "Gemma2": "gemma2", "Gemma3": "gemma3", "Phi3": "phi3", "GPT2": "gpt2",
    "Starcoder2": "starcoder2", "Granite": "granite", "Olmo2": "olmo2", "SmolLM3": "smollm3", "SeedOss": "seed_oss",
    "Cohere": "command-r", "Cohere2": "cohere2", "Glm4": "glm4", "Exaone4": "exaone4", "Ernie4_5": "ernie4_5",
    "Qwen3_5": "qwen35", "Lfm2": "lfm2", "GptOss": "gpt-oss", "Qwen3_5Moe": "qwen35moe", "Qwen3Next": "qwen3next",
    "Lfm2Moe": "lfm2moe", "GraniteMoe": "granitemoe", "GraniteMoeShared": "granitemoe",
    "GraniteMoeHybrid": "granitehybrid", "DeepseekV2": "deepseek2", "DeepseekV3": "deepseek2", "Gemma4": "gemma4",
    "Glm4Moe": "glm4moe", "Ernie4_5_Moe": "ernie4_5-moe", "FalconH1": "falcon-h1",
    "NemotronH": "nemotron_h", "Mamba2": "mamba2", "Mamba": "mamba", "FalconMamba": "mamba",
    "Jamba": "jamba",
}  # fmt: skip
GRANITES = ("Granite", "GraniteMoe", "GraniteMoeShared", "GraniteMoeHybrid")
PAIRS = ("Llama", "Mistral", "Mixtral", "SmolLM3", *GRANITES)  # whose q and k are turned in pairs of neighbours
FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
# Which llama.cpp leaves alone.
EXACT = re.compile(r"gate_inp|\.conv|conv1d|\.bias$|ssm_[ad]$|norm|_scale|\.scale$|position_embd|per_layer_model_proj")
MAMBAS = ("GraniteMoeHybrid", "FalconH1")  # whose keys of states begin with mamba_
MAMBAS_ALONE = ("Mamba2", "Mamba", "FalconMamba")
SELECTIVE = ("Mamba", "FalconMamba", "Jamba")
DELTAS = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next")
DELTA = {
    "conv_kernel": "conv_kernel_dim", "state_size": "key_head_dim", "group_count": "num_key_heads",
    "time_step_rank": "num_value_heads",
}  # fmt: skip
SPACE = {"conv_kernel": "d_conv", "state_size": "d_state", "group_count": "n_groups", "time_step_rank": "n_heads"}
JOINED = re.compile(r"(.*\.experts)\.(?:gate_up|down)_proj(_bias)?")
HEAD = {  # a draft head's own tensors -> theirs in the layer after the last one
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}
OF_HEAD = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def write_gguf(
    directory: Path,
    path: Path,
    kind: str,
    kind_of: Callable[[str], Kind] = lambda _: Kind.F32,  # of a file's matrix, by its name
    numbers: Mapping[str, np.ndarray[Any, Any]] | None = None,  # in place of the checkpoint's
    **metadata: Any,
) -> dict[str, np.ndarray[Any, Any]]:
    """Write the checkpoint of that directory to a GGUF file; what its tensors mean, by their names in the file."""
    config = json.loads((directory / "config.json").read_text())
    architecture = _architecture(kind, config)
    writer = gguf.GGUFWriter(path, architecture)
    weights = load_file(directory / "model.safetensors")
    given = _metadata(kind, config, weights) | metadata
    if any(name == "mtp.fc.weight" or OF_HEAD.fullmatch(name) for name in weights):
        given |= {"block_count": given["block_count"] + 1, "nextn_predict_layers": 1}
    for key, value in given.items():
        add(writer, key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}", value)
    meant = {}
    for name, tensor in _tensors(weights, kind, config):
        if numbers is not None:
            tensor = torch.from_numpy(numbers[name])
        exact = tensor.dim() == 1 or EXACT.search(name)
        wanted = Kind.F32 if exact else kind_of(name)
        if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
            wanted = Kind.BF16
        meant[name] = add_tensor(writer, name, tensor, wanted)
    finish(writer)
    return meant


def _architecture(kind: str, config: Mapping[str, Any]) -> str:
    return ARCHITECTURES[kind] + "_moe" * ("moe" in config.get("layers_block_type", ()))


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: Kind) -> np.ndarray[Any, Any]:
    """Add a tensor; what it means."""
    if kind in FLOATS:
        stored = tensor.to(FLOATS[kind]).contiguous()
        raw = stored.view(torch.uint8 if kind is Kind.BF16 else stored.dtype).numpy()
        writer.add_tensor(name, raw, raw_dtype=kind)
        return stored.float().numpy()
    blocks = quantised(tensor.float().numpy(), kind)
    writer.add_tensor(name, blocks, raw_dtype=kind)
    return gguf.quants.dequantize(blocks, kind)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path) -> Path:
    """Write a random llama of Q8_0 with a tokenizer and a chat template; the path."""
    vocabulary = metadata_of("gpt-2") | {"tokenizer.chat_template": "{{ messages[0].content }}:"}
    size = len(vocabulary["tokenizer.ggml.tokens"])
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory), vocab_size=size, hidden_size=64, num_attention_heads=4, intermediate_size=96)
        write_gguf(Path(directory), path, "Llama", lambda _: Kind.Q8_0, **_without("general.architecture", vocabulary))
    return path


def _without(key: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name != key}


def quantised(numbers: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """Blocks of that kind; of those that the package cannot make, random ones of about that size around zero."""
    try:
        return gguf.quants.quantize(numbers, kind)
    except NotImplementedError:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*numbers.shape[:-1], numbers.shape[-1] // size, nbytes)
        blocks = np.random.default_rng(len(numbers)).integers(0, 256, shape, dtype=np.uint8)
        middle = {Kind.Q4_K: 7.5, Kind.Q5_K: 15.5, Kind.Q6_K: None}[kind]  # of a number's integers; None: zero
        scales = {208: 1.0} if middle is None else {0: 1.0, 2: middle}
        for at, factor in scales.items():
            half = np.full(shape[:-1], factor * 0.2 / (32 * 16), np.float16)
            blocks[..., at : at + 2] = half[..., None].view(np.uint8)
        if middle is not None:  # each group of 32 has the same number of 6 bits for its scale and its minimum
            blocks[..., 8:12] = blocks[..., 4:8]
            blocks[..., 12:16] = blocks[..., 12:16] % 16 * 17
        return blocks.reshape(*numbers.shape[:-1], -1)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)


def _metadata(kind: str, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What the converter writes of a config.json."""

    if kind in MAMBAS_ALONE:
        return _mamba(kind, config)

    def first(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    inner = first("intermediate_size", "n_inner") or 4 * first("n_embd", "hidden_size")
    found = {
        "block_count": first("num_hidden_layers", "n_layer"),
        "context_length": first("max_position_embeddings", "n_positions"),
        "embedding_length": first("hidden_size", "n_embd"),
        "feed_forward_length": inner,
        "attention.head_count": first("num_attention_heads", "n_head"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": first("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": rope.get("rope_theta"),
        "expert_count": first("num_local_experts", "num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "general.file_type": 0,
        "general.quantization_version": 2,
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found |= {f"rope.scaling.yarn_{key}": rope[key] for key in ("beta_fast", "beta_slow") if rope.get(key)}
    if kind in PAIRS:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        found |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}
    if kind in GRANITES:
        scales = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
        scales |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
        found |= {theirs: float(config[ours]) for theirs, ours in scales.items()}
        found["expert_shared_feed_forward_length"] = config.get("shared_intermediate_size")
    if kind == "GraniteMoeHybrid":
        found |= {f"ssm.{theirs}": config[f"mamba_{ours}"] for theirs, ours in SPACE.items()}
        found["ssm.inner_size"] = config["mamba_expand"] * config["hidden_size"]
        found["attention.head_count_kv"] = [
            config["num_key_value_heads"] if each == "full_attention" else 0 for each in config["layer_types"]
        ]
        found |= {"rope.scaling.finetuned": False, "context_length": 2**20}
        if not config["num_local_experts"]:
            found["feed_forward_length"] = config["shared_intermediate_size"]
    if kind == "FalconH1":
        found |= {f"ssm.{theirs}": config[f"mamba_{ours}"] for theirs, ours in SPACE.items()}
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        found |= {"ssm.inner_size": config["mamba_d_ssm"], "vocab_size": config["vocab_size"]}
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind == "Jamba":
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        found |= {
            "attention.head_count_kv": [
                config["num_key_value_heads"] if i % period == offset else 0 for i in range(config["num_hidden_layers"])
            ],
            "ssm.conv_kernel": config["mamba_d_conv"], "ssm.state_size": config["mamba_d_state"],
            "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
            "ssm.time_step_rank": config["mamba_dt_rank"],
        }  # fmt: skip
    if kind == "NemotronH":
        found |= _nemotron_h(config)
    if kind == "Gemma2":
        found |= {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}
        found |= {"attention.sliding_window": config["sliding_window"]}
        found.pop("rope.freq_base")
    if kind == "Gemma3":
        found |= {"attention.sliding_window": config["sliding_window"]}
        found["rope.freq_base_swa"] = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    if kind in ("Cohere", "Cohere2"):
        found |= {"logit_scale": float(config["logit_scale"]), "rope.scaling.type": "none"}
        found |= {"vocab_size": config["vocab_size"], "rope.dimension_count": 16}
    if kind == "Glm4":
        found["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
    if kind in ("Cohere2", "Exaone4"):
        found["attention.sliding_window"] = config["sliding_window"]
    if kind == "Exaone4" and config["sliding_window"]:
        found["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if kind == "Phi3":
        share = rope.get("partial_rotary_factor", 1.0)
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        found |= {
            "rope.dimension_count": int(share * config["hidden_size"]) // config["num_attention_heads"],
            "attention.sliding_window": config.get("sliding_window") or 0,
            "rope.scaling.original_context_length": config["original_max_position_embeddings"],
        }
    if kind in DELTAS:
        found |= {f"ssm.{theirs}": config[f"linear_{ours}"] for theirs, ours in DELTA.items()}
        found["ssm.inner_size"] = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        found["full_attention_interval"] = 4
        found["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
        if kind != "Qwen3Next":
            found["rope.dimension_sections"] = [11, 11, 10, 0]
        found["expert_shared_feed_forward_length"] = config.get("shared_expert_intermediate_size")
    if kind in ("Lfm2", "Lfm2Moe"):
        found["attention.layer_norm_rms_epsilon"] = config["norm_eps"]
        found["attention.head_count_kv"] = [
            config["num_key_value_heads"] if layer == "full_attention" else 0 for layer in config["layer_types"]
        ]
        found |= {"shortconv.l_cache": config["conv_L_cache"], "vocab_size": config["vocab_size"]}
        found["feed_forward_length"] = next(
            len(tensor) for name, tensor in weights.items() if name.endswith("feed_forward.w1.weight")
        )
    if kind == "GptOss":
        found |= {"attention.sliding_window": config["sliding_window"], "expert_feed_forward_length": inner}
    if kind == "Lfm2Moe":
        found |= {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    if kind in ("DeepseekV2", "DeepseekV3"):
        found |= _latent(kind, config, rope)
    if kind == "Glm4Moe":
        found |= _routed(config) | {"expert_gating_func": 2}
        found["rope.dimension_count"] = int(config["head_dim"] * rope.get("partial_rotary_factor", 0.5))
    if kind == "Ernie4_5_Moe":
        found |= {
            "expert_count": config["moe_num_experts"], "expert_used_count": config["moe_k"],
            "interleave_moe_layer_step": config["moe_layer_interval"],
            "leading_dense_block_count": config["moe_layer_start_index"],
            "expert_shared_count": config["moe_num_shared_experts"],
            "expert_shared_feed_forward_length": inner // config["num_key_value_heads"],
        }  # fmt: skip
    if kind == "Gemma4":
        found |= _gemma4(config)
    if kind not in ("GptOss", *GRANITES):
        found["expert_feed_forward_length"] = config.get("moe_intermediate_size")
    return {key: value for key, value in found.items() if value is not None}


def _latent(kind: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    latent, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    found = {
        "attention.head_count_kv": 1, "rope.dimension_count": rope_dim,
        "attention.kv_lora_rank": latent, "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": latent + rope_dim, "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": config["v_head_dim"], "expert_gating_func": 2 if kind == "DeepseekV3" else 1,
    } | _routed(config)  # fmt: skip
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def _mamba(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "block_count": config["num_hidden_layers"], "context_length": 2**20, "feed_forward_length": 0,
        "embedding_length": config["hidden_size"], "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"], "general.file_type": 0,
        "ssm.conv_kernel": config["conv_kernel"], "ssm.state_size": config["state_size"],
        "ssm.inner_size": 2 * config["hidden_size"],
    }  # fmt: skip
    if kind == "Mamba2":
        return found | {"ssm.time_step_rank": config["num_heads"], "ssm.group_count": config["n_groups"]}
    return found | {"ssm.time_step_rank": config["time_step_rank"], "ssm.dt_b_c_rms": kind == "FalconMamba"}


def _nemotron_h(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds, has_experts = config["layers_block_type"], "moe" in config["layers_block_type"]
    inner = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    found = {
        "block_count": len(kinds), "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.head_count_kv": [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [inner if kind in ("mlp", "moe") else 0 for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"], "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"], "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": False, "context_length": 2**20, "vocab_size": config["vocab_size"],
    }  # fmt: skip
    if has_experts:
        found |= _routed(config | {"first_k_dense_replace": None})
        found["expert_shared_feed_forward_length"] = config["moe_shared_expert_intermediate_size"]
    else:
        found |= {"expert_count": None, "expert_used_count": None}
    return found


def _routed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "expert_count": config["n_routed_experts"], "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"], "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config.get("norm_topk_prob") or None,
    }  # fmt: skip


def _gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    own_of = next(iter(config["per_layer_config"].values()))  # of the layers of full attention
    full, count = own_of["head_dim"], config["num_hidden_layers"]
    slides = [each == "sliding_attention" for each in config["layer_types"]]
    first_sharing = count - config["num_kv_shared_layers"]
    own = own_of.get("num_key_value_heads") or config["num_key_value_heads"]
    inner = config["intermediate_size"]
    return {
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": slides,
        "attention.key_length": full, "attention.value_length": full, "rope.dimension_count": full,
        **{f"attention.{each}_length_swa": config["head_dim"] for each in ("key", "value")},
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.head_count_kv": [config["num_key_value_heads"] if one else own for one in slides],
        "feed_forward_length": [inner * (2 if i >= first_sharing else 1) for i in range(count)]
        if config["use_double_wide_mlp"] else inner,
        "expert_used_count": config.get("top_k_experts"),
    }  # fmt: skip


def _tensors(
    weights: Mapping[str, torch.Tensor], kind: str, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A file's tensors, by their names there."""
    wanted = _architecture(kind, config)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)
    layers = config.get("num_hidden_layers") or config.get("n_layer") or len(config["layers_block_type"])
    names = gguf.get_tensor_name_map(architecture, layers + 1)
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        for own, there in HEAD.items():
            name = name.replace(own, f"model.layers.{layers}.{there}")
        if match := EXPERT.fullmatch(name.replace("backbone", "model").replace("mixer.experts", "mlp.experts")):
            experts.setdefault(f"{match[1]}.{match[3]}", []).append(tensor)
            continue
        if found := _in_parts(kind, name, tensor, config):
            for theirs, part in found:
                yield _name(names, theirs), part.contiguous()
            continue
        if match := JOINED.fullmatch(name):  # gates and ups of all experts take turns
            both = tensor if match[2] else tensor.swapaxes(1, 2)
            for part, rows in zip(("gate", "up") if "gate_up" in name else ("down",), _turns(name, both), strict=True):
                yield _name(names, f"{match[1]}.{part}_proj.{'bias' if match[2] else 'weight'}"), rows.contiguous()
            continue
        yield _name(names, name), _changed(kind, name, tensor, config)
    for name, parts in experts.items():
        yield _name(names, name.removeprefix("model.") if kind == "Lfm2Moe" else name), torch.stack(parts)
    rope = config.get("rope_parameters") or {}
    if kind == "Gemma4":
        pairs = _gemma4(config)["attention.key_length"] // 2
        turned = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * (pairs - turned))
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config, rope)
    for side in ("long", "short"):
        if rope.get(f"{side}_factor"):
            yield f"rope_factors_{side}.weight", torch.tensor(rope[f"{side}_factor"])


def _in_parts(kind: str, name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """What the converter takes apart; none: nothing of this tensor."""
    base, _, last = name.rpartition(".experts.")
    if kind in ("Qwen3_5Moe", "Qwen3Next") and last == "gate_up_proj":
        gate, up = tensor.chunk(2, 1)
        return [(f"{base}.experts.gate_proj.weight", gate), (f"{base}.experts.up_proj.weight", up)]
    if kind in ("Qwen3_5Moe", "Qwen3Next", "Gemma4") and last in ("gate_up_proj", "down_proj"):
        return [(f"{name}.weight", tensor)]
    base = name.rpartition(".input_linear.")[0]
    if kind in GRANITES and base:
        gate, up = tensor.chunk(2, -2)
        at, end = (
            name.split(".")[2],
            "exps" if "block_sparse" in name else "shexp" if config["num_local_experts"] else "",
        )
        end = f"_{end}" if end else ""
        return [(f"blk.{at}.ffn_gate{end}.weight", gate), (f"blk.{at}.ffn_up{end}.weight", up)]
    if kind == "GraniteMoeHybrid" and "shared_mlp.output_linear" in name and not config["num_local_experts"]:
        return [(f"blk.{name.split('.')[2]}.ffn_down.weight", tensor)]
    if name.endswith("in_proj_qkvz.weight"):
        keys, share = config["linear_num_key_heads"], config["linear_num_value_heads"]
        values = share // keys * config["linear_value_head_dim"]
        sizes = [config["linear_key_head_dim"]] * 2 + [values] * 2
        q, k, v, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split(sizes, 1))
        at = name.split(".")[2]
        return [(f"blk.{at}.attn_qkv.weight", torch.cat([q, k, v])), (f"blk.{at}.attn_gate.weight", z)]
    if name.endswith("kv_b_proj.weight"):
        by_head = tensor.unflatten(0, (config["num_attention_heads"], -1))
        k, v = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
        return [(name.replace("kv_b", "k_b"), k.transpose(1, 2)), (name.replace("kv_b", "v_b"), v)]
    return []


def _turns(name: str, rows: torch.Tensor) -> list[torch.Tensor]:
    return [rows[:, ::2], rows[:, 1::2]] if "gate_up" in name else [rows]


def _name(names: gguf.TensorNameMap, theirs: str) -> str:
    if theirs.startswith("blk."):
        return theirs
    if match := OF_HEAD.fullmatch(theirs):
        return f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight"
    theirs = theirs.replace(".sinks", ".sinks.weight").replace(".dt_bias", ".dt_proj.bias")
    theirs = theirs.replace("expert_bias", "expert_bias.bias").replace("correction_bias", "correction.bias")
    theirs = theirs.replace("layer_scalar", "layer_scalar.weight")
    if theirs.endswith("router.scale"):
        return f"blk.{theirs.split('.')[2]}.ffn_gate_inp.scale"
    if theirs.endswith("per_expert_scale"):
        return f"blk.{theirs.split('.')[2]}.ffn_down_exps.scale"
    found = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
    assert found is not None, theirs
    return found


def _changed(kind: str, name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    if kind in PAIRS and re.search(r"[qk]_proj\.", name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if kind in ("Gemma2", "Gemma3") and name.endswith("norm.weight"):
        return tensor.float() + 1
    if kind in DELTAS and (".linear_attn." in name or name.endswith("norm.weight")):
        return _delta(name, tensor, config, 1 if kind == "Qwen3Next" else config["linear_num_key_heads"])
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return tensor.squeeze(1)
    if re.search(r"\.(mamba|mixer)\.", name) and tensor.dim() == 1:
        if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            return tensor.view(config["mamba_n_groups" if kind in MAMBAS else "n_groups"], -1)
        column = kind not in SELECTIVE and name.endswith(("A_log", "D"))
        return (-tensor.exp() if name.endswith("A_log") else tensor)[:, None] if column else tensor
    if name.endswith("A_log") and kind in SELECTIVE:
        return -tensor.exp()
    if kind == "FalconH1":
        return tensor * _multiplier(name, config)
    if kind == "GPT2" and re.search(r"c_(attn|proj|fc)\.weight", name):
        return tensor.T
    return tensor


def _multiplier(name: str, config: Mapping[str, Any]) -> torch.Tensor | float:
    """By what the converter multiplies a weight of Falcon-H1."""
    into = config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1], "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * into, "q_proj": into, "v_proj": into,
        "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    if name.endswith("in_proj.weight"):
        inner, part = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = torch.tensor([inner, inner, part, part, config["mamba_n_heads"]])
        scales = torch.tensor(config["ssm_multipliers"]) * config["ssm_in_multiplier"]
        return scales.repeat_interleave(sizes)[:, None]
    return float(factors.get(name.split(".")[-2], 1.0))


def _delta(name: str, tensor: torch.Tensor, config: Mapping[str, Any], keys: int) -> torch.Tensor:
    """A norm, or a tensor of the gated delta rule: heads of values by their place among those with the same keys.

    keys: heads of keys; 1 leaves the heads of values where they are.
    """
    size = config["linear_value_head_dim"]

    def tiled(rows: torch.Tensor, size: int) -> torch.Tensor:
        return rows.reshape(keys, -1, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if name.endswith("norm.weight"):
        return tensor if "linear_attn" in name else tensor.float() + 1
    if name.endswith("A_log"):
        return tiled(-tensor.float().exp(), 1)
    if name.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return tiled(tensor, 1)
    if name.endswith("in_proj_z.weight"):
        return tiled(tensor, size)
    if name.endswith("out_proj.weight"):
        return tiled(tensor.T, size).T
    rows = tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor
    if name.endswith("in_proj_ba.weight"):
        return tensor
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return torch.cat([rows[:first], tiled(rows[first:], size)])


def _llama3_factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> torch.Tensor:
    """By how much each frequency is divided (Llama 3.1)."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(0, dim, 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-i / dim) / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - keep) / rope["factor"] + keep))
    return torch.tensor(factors)
