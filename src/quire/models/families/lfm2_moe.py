"""LFM2 with experts in all but the first layers, chosen by corrected sigmoids."""

from __future__ import annotations

from quire.models.decoder_config import DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families import lfm2, llama
from quire.models.families.lfm2 import read_lfm2_sizes, read_mixers
from quire.models.hf_config import ConfigReader, reads

LAYER = {
    "router": ("feed_forward.gate",),
    "correction": ("feed_forward.expert_bias",),
    "experts.mlp_in": ("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    "experts.mlp_out": ("feed_forward.experts.{}.w2",),
}


@reads("lfm2_moe")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_lfm2_sizes(config)
    dense = MlpConfig(size=sizes.inner)
    experts = ExpertsConfig(
        count=config.integer("num_experts", 32),
        per_token=config.integer("num_experts_per_tok", 4),
        mlp=MlpConfig(size=config.integer("moe_intermediate_size", 1792)),
        renormalised=config.flag("norm_topk_prob", True),
        epsilon=1e-6,
        scores="sigmoid",
        corrected=config.flag("use_expert_bias", True),
        factor=config.number("routed_scaling_factor", 1.0),
    )
    first = config.count("num_dense_layers", 2)
    mixers = read_mixers(config, sizes, config.texts("layer_types"))
    layers = tuple(LayerConfig(mixer=mixer, mlp=dense if i < first else experts) for i, mixer in enumerate(mixers))
    return DecoderConfig(**sizes.decoder, layers=layers)


weight_sources = llama.sources_with(lfm2.weight_sources, LAYER)
