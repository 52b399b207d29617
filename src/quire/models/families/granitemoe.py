"""Granite 3 with experts: Granite's multipliers, the experts of Granite 4."""

from __future__ import annotations

from dataclasses import replace

from quire.models.decoder_config import DecoderConfig, ExpertsConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.granite import read_decoder
from quire.models.families.granitemoehybrid import experts_sources
from quire.models.families.llama import read_sizes
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources


@reads("granitemoe")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    config.get("router_aux_loss_coef")  # for training
    sizes, shared = read_sizes(config), config.count("shared_intermediate_size", 0)
    experts = ExpertsConfig(
        count=config.integer("num_local_experts", 8),
        per_token=config.integer("num_experts_per_tok", 2),
        mlp=MlpConfig(size=sizes.inner),
        renormalised=True,
        shared=MlpConfig(size=shared) if shared else None,
    )
    return read_decoder(config, sizes, experts)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    return replace(theirs, layer={**theirs.layer, **experts_sources(names)})
