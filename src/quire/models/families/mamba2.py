"""Mamba-2: layers that are a state space alone, without an MLP and without attention."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.decoder_config import DecoderConfig, LayerConfig
from quire.models.families.bamba import adapted, read_limits
from quire.models.hf_config import ConfigReader, reads
from quire.models.state_config import StateSpaceConfig
from quire.models.weights import Sources

LONGEST = 2**20  # tokens of a sequence: a state has no limit
MIXER = {
    "input_norm": ("norm",),
    "state_in": ("mixer.in_proj",),
    "conv": ("mixer.conv1d",),
    "": ("mixer",),  # vectors of the state
    "gate_norm": ("mixer.norm",),
    "state_out": ("mixer.out_proj",),
}


@reads("mamba2")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    hidden_size, num_layers = config.integer("hidden_size", 4096), config.integer("num_hidden_layers", 64)
    groups = config.integer("n_groups", 8)
    num_heads, head_dim = config.integer("num_heads", 128), config.integer("head_dim", 64)
    inner = int(config.number("expand", 2) * hidden_size)
    if num_heads * head_dim != inner:
        raise ModelError(
            f"config.json: num_heads is {num_heads} and head_dim {head_dim}; their product must be expand times "
            f"hidden_size, {inner}"
        )
    config.only("hidden_act", "silu")
    for key in ("chunk_size", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm", "norm_before_gate"):
        config.get(key)  # for a kernel, initial weights, training; transformers' code reads neither of the last two
    state = StateSpaceConfig(
        num_heads=num_heads,
        num_groups=groups,
        head_dim=head_dim,
        state_dim=config.integer("state_size", 128),
        taps=config.integer("conv_kernel", 4),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias", True),
        dt_limits=read_limits(config),
        norm_groups=groups,
    )
    return DecoderConfig(
        vocab_size=config.integer("vocab_size", 32768),
        hidden_size=hidden_size,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        max_position_embeddings=LONGEST,
        tied_embeddings=config.flag("tie_word_embeddings"),
        layers=(LayerConfig(mixer=state, mlp=None),) * num_layers,
    )


def ends(names: frozenset[str]) -> dict[str, str]:
    """Return the names outside the layers in a checkpoint with tensors of these names."""
    base = "model" if "model.norm_f.weight" in names else "backbone"
    embeddings = f"{base}.embedding.weight" if f"{base}.embedding.weight" in names else f"{base}.embeddings.weight"
    return {"embedding": embeddings, "final_norm.weight": f"{base}.norm_f.weight", "lm_head": "lm_head.weight"}


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    found = ends(names)
    return Sources(found, found["embedding"].split(".")[0] + ".layers.{}.", MIXER, adapt=adapted)
