"""BLOOM: ALiBi instead of position embeddings, normalised embeddings, QKV interleaved by head."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = {
    "input_norm": ("input_layernorm",),
    "qkv": ("self_attention.query_key_value",),
    "output": ("self_attention.dense",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp_in": ("mlp.dense_h_to_4h",),
    "mlp_out": ("mlp.dense_4h_to_h",),
}
LONGEST = 2048  # tokens in the training of the released models; ALiBi itself has no limit


@reads("bloom")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    hidden_size = config.integer("n_embed", config.get("hidden_size"))
    num_heads = config.heads("n_head" if config.has("n_head") else "num_attention_heads", hidden_size)
    config.only("apply_residual_connection_post_layernorm", False)
    for key in ("slow_but_exact", "masked_softmax_fusion", "bias_dropout_fusion", "offset_alibi", "skip_bias_add",
                "skip_bias_add_qkv", "attention_softmax_in_fp32"):  # fmt: skip
        config.get(key)  # settings of the original implementation, without effect on the result
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        bias=True,
        output_bias=True,
    )
    mlp = MlpConfig(size=4 * hidden_size, activation=Activation("gelu_tanh", gated=False), bias=True)
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("seq_length", LONGEST),
        layers=(LayerConfig(mixer=attention, mlp=mlp),) * config.integer("n_layer"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        alibi_slopes=alibi_slopes(num_heads),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        embedding_norm=True,
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return a slope per head (Press et al. 2022): powers of 2^(-8/n), interpolated if n is not a power of two."""
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    between = [2.0 ** (-4.0 * (i + 1) / n) for i in range(0, 2 * (num_heads - n), 2)]
    return tuple(slopes + between)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in names) else ""
    ends = {"embedding": f"{prefix}word_embeddings.weight", "lm_head": "lm_head.weight"}
    for kind in ("weight", "bias"):
        ends[f"embedding_norm.{kind}"] = f"{prefix}word_embeddings_layernorm.{kind}"
        ends[f"final_norm.{kind}"] = f"{prefix}ln_f.{kind}"
    return Sources(ends, f"{prefix}h.{{}}.", LAYER, adapt=partial(apart, config))


def apart(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Reorder q, k and v of one head after the other to all of q, all of k, all of v."""
    if ".qkv." not in name:
        return tensor
    heads = tensor.view(config.attention[0].num_heads, 3, -1, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)
