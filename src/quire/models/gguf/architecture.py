"""The conversion of a GGUF architecture: its configuration as a config.json, and the names of its tensors.

Tensors are converted where a GGUF file differs from other checkpoints: rows of q and k for a RoPE of neighbouring
pairs, norms as 1 + weight, projections that others store as [in, out], the projection of a latent to keys and values,
decays, and the order of the value heads of a gated delta rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.errors import ModelError
from quire.models.gguf.metadata import Metadata
from quire.models.gguf.names import ENDS, JOIN, HeadNames, Names
from quire.models.rope import share_of

LONGEST = 2**26  # tokens of a sequence, limited because angles are computed for each position
IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
NOT_NEEDED = {FACTORS, LONG, SHORT}  # among the weights, since the configuration contains them
SIZES = (  # keys that each equal a dimension of some tensor
    "attention.head_count",
    "attention.key_length",
    "attention.key_length_mla",
    "attention.key_length_swa",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "attention.value_length_mla",
    "embedding_length",
    "embedding_length_per_layer_input",
    "expert_count",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "rope.dimension_count",
    "shortconv.l_cache",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)
KEYS_OF_LATENT, VALUES_OF_LATENT = "attn_k_b", "attn_v_b"
VECTORS = ("ssm_a", "ssm_d")  # some converters write them as columns; Mamba-1 has a matrix of decays


class Turns(NamedTuple):
    """Groups of rows, interleaved in a file: `size` rows of each group, then the next ones. In Quire, not interleaved.

    Value heads that share key heads are stored so: the first value head of each key head, then the second ones.
    """

    groups: int
    size: int  # consecutive rows of a group
    first: int = 0  # rows before these groups

    def order(self, count: int) -> torch.Tensor:
        """Return the index in the file of each of `count` rows. Raises ModelError if the groups do not divide them."""
        if count <= self.first or (count - self.first) % (self.groups * self.size):
            raise ModelError(
                f"{count} rows are no {self.groups} groups that take turns of {self.size} after {self.first} others"
            )
        turns = torch.arange(self.first, count).view(-1, self.groups, self.size).transpose(0, 1)
        return torch.cat([torch.arange(self.first), turns.flatten()])


class TensorPlace(NamedTuple):
    """The location of a tensor in a file, and the conversion to our layout."""

    tensor: str  # its name in the file
    entry: int | None = None  # index in its first dimension; None: all
    heads: int | None = None  # its rows are pairs of neighbours within each of this number of heads
    less_one: bool = False  # 1 must be subtracted
    log: bool = False  # the file has -exp of our numbers
    turns: Turns | None = None  # its rows are in this order
    column_turns: Turns | None = None  # its columns are in this order
    part: tuple[int, int] | None = None  # index and number of equal parts of its rows, split after the reordering
    transposed: bool = False  # if it is not quantised
    flat: bool = False  # to be flattened: further dimensions have no meaning
    values: str | None = None  # this tensor projects a latent to keys, that one to values
    dequantised: bool = False  # if it is quantised: only its numbers are of use


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A GGUF architecture."""

    name: str  # the architecture in a config.json
    model_type: str
    layer: Names  # names of a layer's tensors
    prefix: str = "model.layers.{}."  # of the names in `layer`
    ends: Names = field(default_factory=lambda: ENDS)  # names outside the layers
    keys: Mapping[str, str] = field(default_factory=dict)  # metadata -> config.json, in addition to the usual keys
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json that are the same in all files
    more: Callable[[Metadata, dict[str, Any]], Mapping[str, Any]] | None = None  # computes further keys of config.json
    pairs: bool = False  # rows of q and k are in pairs of neighbours
    norms_plus_one: bool = False
    turns: Callable[[Metadata], Mapping[str, Turns]] | None = None  # of a layer's tensors
    # A tensor whose columns are in the order of another tensor's rows -> that tensor.
    column_turns: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()  # tensors of a layer that others store as [in, out]
    causal: bool = True  # False: an encoder
    attends: bool = True  # False: no layer has attention
    head: HeadNames | None = None  # of its draft head; None: layers after the last one are left out

    def config(self, metadata: Metadata) -> dict[str, Any]:
        """Return the model's config.json. Raises ModelError for a key that is missing or has a wrong value."""
        config = _usual(metadata, self.causal, self.attends) | {
            "architectures": [self.name],
            "model_type": self.model_type,
            **self.fixed,
        }
        for theirs, ours in self.keys.items():
            if (value := metadata.get(theirs)) is not None:
                config[ours] = value
        if self.more is not None:
            config |= self.more(metadata, config)
        return config

    def places(self, metadata: Metadata) -> dict[str, TensorPlace]:
        """Return the place of each tensor by its name in other checkpoints, or by its GGUF name if it has no other."""
        turns = {} if self.turns is None else self.turns(metadata)
        heads: dict[str, int] = {}
        if self.pairs:
            heads = {"attn_q": metadata.integer("attention.head_count"), "attn_k": _num_kv_heads(metadata)}
        ahead = range(_num_layers(metadata), metadata.integer("block_count"))  # layers that predict draft tokens
        places: dict[str, TensorPlace] = {}
        for name, info in metadata.file.tensors.items():
            if name in NOT_NEEDED:
                continue
            match = IN_LAYER.fullmatch(name)
            table: Names
            if match is None:
                prefix, rest, table = "", name, self.ends
            elif int(match[1]) in ahead:
                if self.head is None or int(match[1]) > ahead[0]:
                    continue
                rest, is_end = match[2], match[2].rpartition(".")[0] in self.head.ends
                table = self.head.ends if is_end else self.layer
                prefix = (self.head.prefix if is_end else self.head.layer_prefix).format(match[1])
            else:
                prefix, rest, table = self.prefix.format(match[1]), match[2], self.layer
            base, _, kind = rest.rpartition(".")
            if base == VALUES_OF_LATENT:
                continue  # it is read with the keys
            place = TensorPlace(
                name,
                heads=heads.get(base),
                less_one=self.norms_plus_one and base.endswith("norm") and base != "ssm_norm",
                log=rest == "ssm_a",
                turns=turns.get(base or rest),
                column_turns=turns.get(self.column_turns.get(base, "")),
                transposed=base in self.transposed and kind == "weight",
                flat=base == "ssm_norm" or (rest in VECTORS and info.shape[-1] == 1),
                values=name.replace(KEYS_OF_LATENT, VALUES_OF_LATENT) if base == KEYS_OF_LATENT else None,
                dequantised=base == JOIN,
            )
            found, suffix = (table[rest], "") if rest in table else (table.get(base), f".{kind}")
            if found is None:
                places[name] = place
                continue
            parts = (found,) if isinstance(found, str) else found
            for i, theirs in enumerate(parts):
                own = place._replace(part=(i, len(parts))) if len(parts) > 1 else place
                whole = f"{prefix}{theirs}{suffix}"
                if "{}" in whole:
                    places |= {whole.format(entry): own._replace(entry=entry) for entry in range(info.shape[0])}
                else:
                    places[whole] = own
        return places


def _usual(metadata: Metadata, causal: bool, attends: bool) -> dict[str, Any]:
    """Return the keys of config.json that nearly all architectures have."""
    file = metadata.file
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; it is no language model, or a part of one")
    if metadata.get("attention.causal", True) is not causal:
        raise metadata.error("attention.causal", metadata.get("attention.causal"), str(causal).lower())
    _check_sizes(metadata)
    hidden_size = metadata.integer("embedding_length")
    config = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_size": hidden_size,
        "num_hidden_layers": _num_layers(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
        "intermediate_size": metadata.get("feed_forward_length"),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
    }
    if not attends:
        if (count := metadata.count("attention.head_count")) != 0:
            raise metadata.error("attention.head_count", count, "0 with this architecture")
        return config
    num_heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", max(1, hidden_size // num_heads))
    other = metadata.integer("attention.value_length", head_dim)
    if other != head_dim and metadata.get("attention.kv_lora_rank") is None:
        raise metadata.error("attention.value_length", other, f"attention.key_length, {head_dim}")
    config |= {
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(metadata),
        "head_dim": head_dim,
    }
    rope = _rope(metadata, head_dim)
    return config | ({"rope_parameters": rope} if rope else {})


def _num_layers(metadata: Metadata) -> int:
    """Return the number of layers, without those at the end that predict draft tokens."""
    count, ahead = metadata.integer("block_count"), metadata.get("nextn_predict_layers", 0)
    if not isinstance(ahead, int) or not 0 <= ahead < count:
        raise metadata.error("nextn_predict_layers", ahead, f"below block_count, {count}")
    return count - ahead


def _num_kv_heads(metadata: Metadata) -> int:
    """Return the number of KV heads in each attention layer. Layers without attention have 0 and are skipped.

    If layers with a window have another number than full-attention layers, return that of the layers with a window.
    """
    found = metadata.get("attention.head_count_kv", metadata.integer("attention.head_count"))
    slides = metadata.get("attention.sliding_window_pattern")
    if isinstance(found, list) and isinstance(slides, list):
        found = [count for count, one in zip(found, slides, strict=False) if one]
    heads = {count for count in found if count} if isinstance(found, list) else {found}
    if len(heads) != 1 or not all(type(count) is int and count > 0 for count in heads):
        raise metadata.error(
            "attention.head_count_kv", found, "a positive integer, the same in all layers with attention"
        )
    return int(heads.pop())


def _check_sizes(metadata: Metadata) -> None:
    """Raise ModelError for a size larger than any tensor's, before anything of that size is allocated."""
    tensors = metadata.file.tensors
    largest = max(max(info.shape) for info in tensors.values())
    bounds = {"block_count": len(tensors), "context_length": LONGEST} | dict.fromkeys(SIZES, largest)
    for key, most in bounds.items():
        value = metadata.file.metadata.get(f"{metadata.architecture}.{key}", 0)
        if any(isinstance(one, int) and one > most for one in np.ravel(value).tolist()):
            raise metadata.error(key, value, f"at most {most}")


def _rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Return the RoPE parameters; empty if the metadata has none."""
    rope: dict[str, Any] = {}
    if (theta := metadata.get("rope.freq_base")) is not None:
        rope["rope_theta"] = metadata.number("rope.freq_base", theta)
    rotated = metadata.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = share_of(rotated, head_dim)
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))
    original = metadata.get("rope.scaling.original_context_length")
    # Read only so that `finish` accepts them: the first does not matter, the second follows from longrope's lengths.
    metadata.get("rope.scaling.finetuned")
    metadata.get("rope.scaling.attn_factor")
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
    """Return RoPE parameters with factors that divide the frequencies, for short and for long sequences."""
    return {
        "rope_type": "longrope",
        "short_factor": numbers_of(metadata, short),
        "long_factor": numbers_of(metadata, long),
    }


def numbers_of(metadata: Metadata, name: str) -> list[float]:
    """Read a tensor's numbers. Raises ModelError if it is missing, or not one-dimensional fp32."""
    info = metadata.file.tensors.get(name)
    if info is None or info.kind != "F32" or len(info.shape) != 1:
        raise ModelError(f"{metadata.file.path}: {name} is {info}; it must be fp32 numbers")
    found = metadata.file.blocks(name).view(torch.float32).flatten().tolist()
    return [float(value) for value in found]
