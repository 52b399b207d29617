"""BERT, RoBERTa, XLM-R, DistilBERT, MPNet, NomicBERT, DeBERTa-v2/v3, ModernBERT: encoders with one description.

They differ in the names of their tensors, in their positions, and in the layers of a classifier.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import ModelError
from quire.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MlpConfig,
    RelativeConfig,
    layers_with,
)
from quire.models.families.llama import rope_parameters
from quire.models.hf_config import ConfigReader, architectures, num_labels
from quire.models.pooling_config import DenseConfig, Pooling
from quire.models.rope import check_rope
from quire.models.weights import Sources
from quire.ops.activation import Activation, Function

ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification")  # of architectures; a head for masks is not used
FUNCTIONS: dict[str, Function] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
SELF = "attention.self."
BERT_LAYER = {
    "qkv": (f"{SELF}query", f"{SELF}key", f"{SELF}value"),
    "output": ("attention.output.dense",),
    "mlp_norm": ("attention.output.LayerNorm",),
    "mlp_in": ("intermediate.dense",),
    "mlp_out": ("output.dense",),
}
NOMIC_LAYER = {
    "qkv": ("attn.Wqkv",),
    "output": ("attn.out_proj",),
    "mlp_norm": ("norm1",),
    "mlp_in": ("mlp.fc12", "mlp.fc11"),
    "mlp_out": ("mlp.fc2",),
}
MODERN_LAYER = {
    "input_norm": ("attn_norm",),
    "qkv": ("attn.Wqkv",),
    "output": ("attn.Wo",),
    "mlp_norm": ("mlp_norm",),
    "mlp_in": ("mlp.Wi",),
    "mlp_out": ("mlp.Wo",),
}


@dataclass(frozen=True)
class Names:
    """The names of a family's tensors. "{}" is the number of a layer."""

    prefix: str  # of all tensors but a classifier's; checkpoints of the bare model go without it
    layers: str = "encoder.layer.{}."
    layer: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: BERT_LAYER)
    words: str = "embeddings.word_embeddings"
    first_norm: str = "embeddings.LayerNorm"
    last_norm: str | None = "output.LayerNorm"  # the norm at the end of a layer; None: `final_norm` ends the model
    head: tuple[str, ...] = ("classifier.dense", "classifier.out_proj")  # a classifier's layers


NAMES = {
    "Bert": Names("bert.", head=("bert.pooler.dense", "classifier")),
    "Roberta": Names("roberta."),
    "XLMRoberta": Names("roberta."),
    "Camembert": Names("roberta."),
    "DistilBert": Names(
        "distilbert.",
        "transformer.layer.{}.",
        {
            "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            "output": ("attention.out_lin",),
            "mlp_norm": ("sa_layer_norm",),
            "mlp_in": ("ffn.lin1",),
            "mlp_out": ("ffn.lin2",),
        },
        last_norm="output_layer_norm",
        head=("pre_classifier", "classifier"),
    ),
    "MPNet": Names(
        "mpnet.",
        layer=BERT_LAYER
        | {
            "qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
            "output": ("attention.attn.o",),
            "mlp_norm": ("attention.LayerNorm",),
        },
    ),
    "NomicBert": Names(
        "nomic_bert.",
        "encoder.layers.{}.",
        NOMIC_LAYER,
        first_norm="emb_ln",
        last_norm="norm2",
        head=("nomic_bert.pooler.dense", "classifier"),
    ),
    "DebertaV2": Names(
        "deberta.",
        layer=BERT_LAYER
        | {
            "qkv": (f"{SELF}query_proj", f"{SELF}key_proj", f"{SELF}value_proj"),
            "distance_keys": (f"{SELF}pos_key_proj",),
            "distance_queries": (f"{SELF}pos_query_proj",),
        },
        head=("pooler.dense", "classifier"),
    ),
    "ModernBert": Names(
        "model.",
        "layers.{}.",
        MODERN_LAYER,
        words="embeddings.tok_embeddings",
        first_norm="embeddings.norm",
        last_norm=None,
        head=("head.dense", "classifier"),
    ),
}
PUBLISHED_NOMIC = {  # keys of the first published checkpoints, before transformers had the family
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}


# Beginnings of keys that do not change the result: heads that are not used, and how kernels compute.
MODERN_UNUSED = (
    "classifier_activation classifier_bias cls_token_id decoder_bias deterministic_flash_attn "
    "initializer_cutoff_factor layer_norm_eps reference_compile repad_logits_with_grad sparse_pred_ignore_index "
    "sparse_prediction"
).split()
UNUSED = tuple(
    "auto_map dense_seq fused_ max_trained pad_vocab reorder rotary_scaling summary_ use_flash use_xentropy".split()
)


def kind_of(raw: Mapping[str, Any]) -> str:
    """Return the key of NAMES of a config.json."""
    kinds = (name.removesuffix(ending) for name in architectures(raw) for ending in ENDINGS if name.endswith(ending))
    return next(kind for kind in kinds if kind in NAMES)


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the encoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    kind = kind_of(raw)
    if kind == "DistilBert":
        raw = {**DISTIL, **raw}
    elif kind == "NomicBert":
        raw = {**NOMIC, **{PUBLISHED_NOMIC.get(key, key): value for key, value in raw.items()}}
        if raw.get("rotary_scaling_factor") is not None:  # RoPE changes beyond this length
            raw["max_position_embeddings"] = raw.get("max_trained_positions") or NOMIC["max_position_embeddings"]
    config = ConfigReader(raw, kind)
    for key in ("classifier_dropout", "position_embedding_type", "tie_weights_", "tie_word_embeddings"):
        config.get(key)
    config.only("embedding_size", config.get("hidden_size"))  # no projection follows the embedding
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    for key in raw:
        if key.endswith(("dropout", "dropout_prob", "_pdrop", "drop_rate")) or key.startswith((*UNUSED, "summary_")):
            config.get(key)
    encoder = replace(_modern(config) if kind == "ModernBert" else _post_norm(config, kind), family=kind)
    if any(name.endswith("ForSequenceClassification") for name in architectures(raw)):
        encoder = replace(encoder, classifier=_classifier(config, kind, encoder.hidden_size, num_labels(raw)))
    for key in ("pooler_hidden_act", "pooler_hidden_size"):
        config.get(key)
    config.finish()
    return encoder


DISTIL = {"type_vocab_size": 0, "layer_norm_eps": 1e-12}
NOMIC = {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "max_position_embeddings": 2048}


def _function(config: ConfigReader, key: str, default: str = "gelu") -> Function:
    name = config.get(key, default)
    config.only(key, *FUNCTIONS)
    return FUNCTIONS[name]


def _post_norm(config: ConfigReader, kind: str) -> DecoderConfig:
    """Read an encoder whose norms come after the branches."""
    distil, nomic, deberta = kind == "DistilBert", kind == "NomicBert", kind == "DebertaV2"
    hidden_size = config.integer("dim" if distil else "hidden_size")
    num_heads = config.heads("n_heads" if distil else "num_attention_heads", hidden_size)
    longest = config.integer("max_position_embeddings", 512)
    offset = 0
    if kind in ("Roberta", "XLMRoberta", "Camembert", "MPNet"):  # positions follow the padding token's row
        offset = config.count("pad_token_id", 1) + 1
        if longest <= offset:
            raise config.error("max_position_embeddings", f"more than the {offset} rows before position 0", longest)
    bias = not nomic
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        bias=bias,
        output_bias=bias,
        rope=_nomic_rope(config) if nomic else None,
    )
    function = _function(config, "activation" if distil else "hidden_act", "silu" if nomic else "gelu")
    size = config.integer("hidden_dim" if distil else "intermediate_size")
    mlp = MlpConfig(size=size, activation=Activation(function, gated=nomic), bias=bias)
    relative, learned = None, not nomic
    types = config.count("type_vocab_size", 0 if deberta else 2)
    if kind == "MPNet":
        config.get("max_distance")
        types = 0
        relative = RelativeConfig(
            size=config.integer("relative_attention_num_buckets", 32), bias=True, buckets="log, halves"
        )
    if distil:
        config.get("sinusoidal_pos_embds")  # only the initial values of a table that is in the checkpoint
    if deberta:
        learned = config.flag("position_biased_input", True)
        relative, factor = _disentangled(config, longest)
        attention = replace(attention, scale=(attention.head_dim * factor) ** -0.5)
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=longest - offset,
        tied_embeddings=False,
        layers=(LayerConfig(mixer=attention, mlp=mlp),) * config.integer("n_layers" if distil else "num_hidden_layers"),
        learned_positions=learned,
        first_position=offset,
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-7 if deberta else 1e-12),
        norms_residual=True,
        causal=False,
        has_head=False,
        token_types=types,
        relative=relative,
    )


def _nomic_rope(config: ConfigReader) -> dict[str, Any]:
    """Read the RoPE of NomicBERT, and refuse the variants of published checkpoints that are not served."""
    for key, served in {
        "prenorm": False,
        "causal": False,
        "parallel_block": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "use_rms_norm": False,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_emb_fraction": 1.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "parallel_block_tied_norm": False,
        "activation_function": "swiglu",
        "num_experts": 0,
        "moe_every_n_layers": 0,
    }.items():
        config.only(key, served)
    config.get("head_dim")
    rope = rope_parameters(config)
    rope.setdefault("rope_theta", 1000.0)
    return rope


def _disentangled(config: ConfigReader, longest: int) -> tuple[RelativeConfig | None, int]:
    """Return DeBERTa's relative positions, and the number of terms of a score."""
    if not config.flag("relative_attention"):
        raise ModelError("config.json: relative_attention is False; DeBERTa is served with relative positions only")
    given = config.get("pos_att_type", [])
    kinds = given.lower().split("|") if isinstance(given, str) else list(given)
    if not set(kinds) <= {"c2p", "p2c"}:
        raise config.error("pos_att_type", "a list with c2p, p2c or both", given)
    most = config.get("max_relative_positions", -1)
    config.only("max_relative_positions", -1, *([most] if isinstance(most, int) and most > 0 else []))
    most = longest if most < 1 else most
    buckets = config.get("position_buckets", -1)
    norm = config.get("norm_rel_ebd", "none")
    config.only("norm_rel_ebd", "none", "layer_norm")
    config.get("legacy")
    half = buckets if buckets > 0 else most
    relative = RelativeConfig(
        size=2 * half,
        keys="c2p" in kinds,
        queries="p2c" in kinds,
        shared=config.flag("share_att_key"),
        normed=norm == "layer_norm",
        buckets="log, symmetric" if buckets > 0 else None,
        most=most,
    )
    return relative, 1 + len(kinds)


def _modern(config: ConfigReader) -> DecoderConfig:
    """Read ModernBERT: norms before the branches, and windows to both sides in most layers."""
    hidden_size, num_layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    num_heads = config.heads("num_attention_heads", hidden_size)
    bias = config.flag("attention_bias")
    every = config.integer("global_attn_every_n_layers", 3)
    usual = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
    kinds = config.texts("layer_types", usual)
    window = config.integer("local_attention", 128) // 2 + 1
    windows = config.windows(kinds, window, num_layers)
    nested = config.mapping("rope_parameters")
    thetas = {
        "full_attention": config.number("global_rope_theta", 160_000.0),
        "sliding_attention": config.optional_number("local_rope_theta") or 10_000.0,
    }
    ropes = {kind: {"rope_theta": theta} | (nested.get(kind) or {}) for kind, theta in thetas.items()}
    for rope in ropes.values():
        check_rope(rope)
    attention = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=hidden_size // num_heads, bias=bias, output_bias=bias
    )
    for key in MODERN_UNUSED:
        config.get(key)
    pooling: Pooling = config.get("classifier_pooling", "cls")
    config.only("classifier_pooling", "cls", "mean")
    activation = Activation(_function(config, "hidden_activation"))
    mlp = MlpConfig(size=config.integer("intermediate_size"), activation=activation, bias=config.flag("mlp_bias"))
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings", 8192),
        tied_embeddings=False,
        layers=layers_with(attention, mlp, windows, [ropes[kind] for kind in kinds]),
        norm="layer",
        norm_bias=config.flag("norm_bias"),
        norm_eps=config.number("norm_eps", 1e-5),
        embedding_norm=True,
        first_norm=False,
        causal=False,
        has_head=False,
        classifier_pooling=pooling,
    )


def _classifier(config: ConfigReader, kind: str, size: int, labels: int) -> tuple[DenseConfig, ...]:
    """Return the layers of a classifier, which pools the first token."""
    last = DenseConfig(in_size=size, out_size=labels)
    if kind == "ModernBert":
        function = _function(config, "classifier_activation")
        eps, norm_bias = config.number("norm_eps", 1e-5), config.flag("norm_bias")
        bias = config.flag("classifier_bias")
        first = DenseConfig(
            in_size=size, out_size=size, bias=bias, function=function, norm_eps=eps, norm_bias=norm_bias
        )
    elif kind == "DistilBert":
        first = DenseConfig(in_size=size, out_size=size, function="relu")
    elif kind == "DebertaV2":
        first = DenseConfig(in_size=size, out_size=size, function=_function(config, "pooler_hidden_act"))
    else:
        first = DenseConfig(in_size=size, out_size=size, function="tanh")
    return first, last


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the encoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = NAMES[config.family]
    prefix = theirs.prefix if any(name.startswith(theirs.prefix) for name in names) else ""
    layers = f"{prefix}{theirs.layers}"
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    norms = {"layers.0.input_norm" if config.norms_residual else "embedding_norm": f"{prefix}{theirs.first_norm}"}
    if theirs.last_norm is None:
        norms["final_norm"] = f"{prefix}final_norm"
    else:
        for i in range(config.num_layers):
            after = "final_norm" if i == config.num_layers - 1 else f"layers.{i + 1}.input_norm"
            norms[after] = f"{layers.format(i)}{theirs.last_norm}"
    norms["distances_norm"] = f"{prefix}encoder.LayerNorm"
    ends = {f"{ours}.{kind}": f"{name}.{kind}" for ours, name in norms.items() for kind in kinds}
    ends |= {
        "embedding": f"{prefix}{theirs.words}.weight",
        "positions": f"{prefix}embeddings.position_embeddings.weight",
        "token_types": f"{prefix}embeddings.token_type_embeddings.weight",
        "relative_bias": f"{prefix}encoder.relative_attention_bias.weight",
        "distances": f"{prefix}encoder.rel_embeddings.weight",
    }
    for i, name in enumerate(theirs.head if config.classifier else ()):
        ends |= {f"classifier.{i}.{kind}": f"{name}.{kind}" for kind in ("weight", "bias")}
        ends |= {f"classifier.{i}.norm.{kind}": f"head.norm.{kind}" for kind in ("weight", "bias")}
    ignored = re.compile(
        rf"({re.escape(prefix)})?(pooler\..*|embeddings\.position_ids|rotary_emb\..*)|(cls|lm_head|lm_predictions|decoder|"
        r"vocab_\w+|mask_predictions|predictions)\..*" + ("" if config.classifier else r"|(head|classifier)\..*")
    )
    return Sources(ends, layers, theirs.layer, ignored)
