"""Random checkpoints as transformers saves them, and the logits that Quire gives for a packed batch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from quire import LLM
from quire.config import EngineConfig, engine_config
from quire.engine.engine import Engine, build_engine
from quire.models import load_model
from quire.ops import load
from quire.request import Request, SamplingParams

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


GPT2 = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "bos_token_id": 0}
BLOOM = {"vocab_size": 97, "hidden_size": 48, "n_layer": 3, "n_head": 6, "bos_token_id": 0, "eos_token_id": 1}
SHORT = {key: value for key, value in TINY.items() if key != "head_dim"} | {"hidden_size": 96}  # heads of 16 too
NEOX = {key: value for key, value in SHORT.items() if key != "num_key_value_heads"}
PHI3 = SHORT | {"original_max_position_embeddings": 64}
MIXTRAL = TINY | {"num_local_experts": 4}
QWEN3_MOE = TINY | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "norm_topk_prob": True}
BASES = {"GPT2": GPT2, "Bloom": BLOOM, "Phi3": PHI3, "GPTNeoX": NEOX, "Mixtral": MIXTRAL, "Qwen3Moe": QWEN3_MOE}
GLM4_MOE = TINY | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "use_qk_norm": True}
ERNIE_MOE = TINY | {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 36}
LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK = {key: value for key, value in TINY.items() if key != "head_dim"} | LATENT
# With as many heads, no key has the score 0, and no two the same one.
SPARSE = DEEPSEEK | {"q_lora_rank": 24, "index_n_heads": 16, "index_head_dim": 20, "index_topk": 9}
GEMMA4 = TINY | {
    "num_hidden_layers": 6, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 9,
}  # fmt: skip
GPT_OSS = TINY | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}
BASES |= {
    "Glm4Moe": GLM4_MOE,
    "Ernie4_5_Moe": ERNIE_MOE,
    "GptOss": GPT_OSS,
    "Cohere": SHORT,
    "Cohere2": SHORT,
    "DeepseekV2": DEEPSEEK,
    "DeepseekV3": DEEPSEEK,
    "DeepseekV32": SPARSE,
    "GlmMoeDsa": SPARSE,
    "AXK2": SPARSE | {"gated_norm_rank": 4},
    "Gemma4": GEMMA4,
}
LLAMA4 = TINY | {
    "num_hidden_layers": 5, "num_local_experts": 4, "intermediate_size_mlp": 72, "attention_chunk_size": 11,
    "floor_scale": 5, "attn_scale": 0.5, "interleave_moe_layer_step": 2,
}  # fmt: skip
GPTJ = GPT2 | {"rotary_dim": 4, "eos_token_id": 1}
FALCON = {key: value for key, value in NEOX.items() if key != "intermediate_size"}
BASES |= {
    "Llama4": LLAMA4,
    "GPTJ": GPTJ,
    "CodeGen": GPTJ | {"n_embd": 64, "n_head": 8},
    "Falcon": FALCON,
    "OPT": FALCON | {"ffn_dim": 80, "pad_token_id": 1},
    "Mpt": {"vocab_size": 97, "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 256},
    "GraniteMoe": MIXTRAL,
    "GraniteMoeShared": MIXTRAL | {"shared_intermediate_size": 40},
}
DELTA = TINY | {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = SHORT | {"num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10}
BASES |= {
    "Qwen3_5": DELTA,
    "Lfm2": SHORT | {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": MAMBA | {
        "num_local_experts": 0, "shared_intermediate_size": 56, "mamba_n_groups": 1,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    },
}  # fmt: skip
GATED_EXPERTS = DELTA | {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 40,
}  # fmt: skip
BASES |= {
    "Qwen3_5Moe": GATED_EXPERTS,
    "Qwen3Next": GATED_EXPERTS,
    "Lfm2Moe": SHORT | {
        "layer_types": ["conv", "full_attention", "conv"], "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 36, "num_dense_layers": 1,
    },
}  # fmt: skip
BASES |= {
    "Mamba2": {
        "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 12, "n_groups": 2,
        "state_size": 10,
    },
    "NemotronH": {key: value for key, value in TINY.items() if key != "num_hidden_layers"} | {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 10, "n_routed_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 36, "moe_shared_expert_intermediate_size": 40,
    },
    "Mamba": {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 10, "time_step_rank": 5},
    "FalconMamba": {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 10},
    "Jamba": SHORT | {
        "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 5,
        "mamba_d_state": 6,
    },
    "OlmoHybrid": SHORT | {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_key_head_dim": 12,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "KimiLinear": {key: value for key, value in DEEPSEEK.items() if key != "n_routed_experts"} | {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 8,
        "linear_head_dim": 12, "linear_num_heads": 3,
    },
    "BailingHybrid": {key: value for key, value in DEEPSEEK.items() if key != "n_routed_experts"} | {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 8,
        "n_group": 1, "topk_group": 1, "head_dim": 12,
    },
    "Dots3Note": SPARSE | {
        "num_hidden_layers": 4, "layer_types": ["indexed_attention", "sliding_attention"] * 2, "sliding_window": 9,
        "shared_experts_intermediate_size": 24,
        "head_dim": 24, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 24, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 12,
    },
    "Mllama": SHORT | {"num_hidden_layers": 4, "cross_attention_layers": [1]},
    "RecurrentGemma": SHORT | {
        "num_hidden_layers": 4, "block_types": ["recurrent", "attention"], "lru_width": 72, "attention_window_size": 9,
    },
    "MiniMax": MIXTRAL | {"num_hidden_layers": 4, "num_key_value_heads": 3, "block_size": 16},
    "Lfm3": TINY | {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        "sliding_window": 9,
    },
    "Zamba": {key: value for key, value in SHORT.items() if key != "num_key_value_heads"} | {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4, "num_key_value_heads": 6,
        "mamba_d_state": 6,
    },
    "Zamba2": SHORT | {
        "num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
        "num_key_value_heads": 6, "num_mem_blocks": 2, "adapter_rank": 4, "mamba_ngroups": 2, "mamba_d_state": 10,
        "use_shared_attention_adapter": True, "use_mem_rope": True,
    },
    "FalconH1": MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64},
}  # fmt: skip
CONFIGS = {
    "Mllama": "MllamaTextConfig",
    "Dots3Note": "Dots3NoteTextConfig",
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Llama4": "Llama4TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}


def save(directory: Path, kind: str = "Llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a random model of that family; the model itself, as transformers has it."""
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**(BASES.get(kind, TINY) | changes))
    model = made(kind, config)
    model.to(dtype).save_pretrained(directory)
    return model


def made(kind: str, config: Any, seed: int = 0) -> Any:
    """A random model of that family, as transformers has it."""
    torch.manual_seed(seed)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()
    config._attn_implementation = "eager"  # the one that knows about softcaps
    config._experts_implementation = "eager"  # the one that takes experts of every size
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):  # so that states remember hundreds of tokens, and some a few
            parameter.data.normal_(-2, 1.5)
        else:  # the usual initialisation is so small that attention would hardly matter
            parameter.data.normal_(0, 0.2) if parameter.dim() > 1 else parameter.data.normal_(1, 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(0, 0.2)
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    return model


def engine(directory: Path, **options: Any) -> Engine:
    config: EngineConfig = engine_config(**({"num_blocks": 64, "num_speculative_tokens": 0} | options))
    ops = load(config.attention_backend, config.device)
    return build_engine(load_model(directory, config, ops), ops, config)


@dataclass
class LogitsProbe:
    """Stands in for an engine's model and keeps the logits of every row of every step."""

    model: Any
    plan: Any = None  # of the step that runs
    found: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # tokens up to a row -> its logits
    preempted: list[str] = field(default_factory=list)
    parts: int = 0  # steps in which only some rows were wanted
    alike: int = 0  # of these, those in which they had the same bits as among all
    steps: list[set[str]] = field(default_factory=list)  # what each step had: "prefill", "decode"

    def forward(self, batch: Any, cache: Any, plans: Any, rows: Any = None) -> torch.Tensor:
        hidden = self.model.forward(batch, cache, plans)
        if rows is not None:
            wanted = self.model.forward(batch, cache, plans, rows)
            self.alike += torch.equal(wanted, hidden[rows])
            torch.testing.assert_close(wanted, hidden[rows])
            self.parts += 1
        logits = self.model.logits(hidden)
        starts = batch.query_starts.tolist()
        self.steps.append(set())
        for item, (start, stop) in zip(self.plan.items, pairwise(starts), strict=True):
            request, tokens = item.request, item.request.tokens
            self.steps[-1].add("prefill" if request.cache.num_computed < request.num_prompt else "decode")
            for row in range(start, stop):
                self.found[tuple(tokens[: int(batch.positions[row]) + 1])] = logits[row].clone()
        return hidden if rows is None else hidden[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)


def probed_logits(
    engine: Engine, prompts: list[list[int]], max_tokens: int, lora: str | None = None
) -> tuple[LogitsProbe, dict[str, list[int]]]:
    """Run the prompts greedily together: logits of every row, and the tokens of each request. lora: of all of them."""
    engine.runner = getattr(engine.runner, "runner", engine.runner)  # a captured graph would not ask the probe
    probe = LogitsProbe(engine.runner.model)
    engine.runner.model = probe
    plan = engine.scheduler.plan

    def watched() -> Any:
        probe.plan = plan()
        probe.preempted += [request.id for request in probe.plan.preempted]
        return probe.plan

    engine.scheduler.plan = watched
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        request = Request(f"r{i}", array("i", prompt), len(prompt), params, lora=lora)
        engine.add(request)
    generated: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            if event.token is not None:
                generated[event.request_id].append(event.token)
    return probe, generated


def assert_texts_do_not_depend(directory: Path, plain: dict[str, Any], *others: dict[str, Any], **options: Any) -> None:
    """With each of these options, prompts that share a beginning get the tokens that they get with the plain ones.

    All of them come twice, so that the second time their prefixes are in the cache.
    """
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [7, 8, 9] * 12 + [i]} for i in range(6)]

    def texts(own: dict[str, Any]) -> list[list[int]]:
        llm = LLM(str(directory), max_model_len=64, block_size=4, **options, **own)
        return [out.outputs[0].token_ids for _ in range(2) for out in llm.generate(prompts, params, use_tqdm=False)]

    expected = texts(plain | {"enable_prefix_caching": False, "num_blocks": 200})
    for own in ({"num_blocks": 200}, {"num_blocks": 30, "preemption": "swap", "swap_space": "1MiB"}, *others):
        assert texts(own) == expected, own
