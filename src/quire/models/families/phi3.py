"""Phi-3, Phi-4: Llama with its projections stacked in the checkpoint, a RoPE of a part of each head, and longrope."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import read_sizes, rope_parameters
from quire.models.hf_config import ConfigReader, reads
from quire.models.rope import rope_type

LAYER = {"qkv": ("self_attn.qkv_proj",), "mlp_in": ("mlp.gate_up_proj",)}
ROPES = ("default", "longrope")
# Custom code of the first checkpoints, which is now part of transformers.
CODE = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}


@reads("phi3", max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config)
    rope = rope_parameters(config)
    if rope_type(rope) not in ROPES:
        raise ModelError(f"rope type is {rope_type(rope)!r}; family 'phi3' serves {', '.join(ROPES)} only")
    code = config.mapping("auto_map")
    if any(str(code.get(key, known)).rpartition("--")[2] != known for key, known in CODE.items()):
        raise ModelError(f"config.json: auto_map is {code!r}; family 'phi3' implements the code of {CODE!r} only")
    config.only("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.only(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):  # in Phi-4's configs, 1 means without effect
        config.only(key, 1)
    attention = AttentionConfig(**sizes.heads, window=config.window("sliding_window"), rope=rope)
    layer = LayerConfig(mixer=attention, mlp=MlpConfig(size=sizes.inner))
    return DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers)


weight_sources = llama.sources_with(llama.weight_sources, LAYER)
