"""What an architecture of GGUF is elsewhere: its configuration as a config.json has it, and the names of its tensors.

Tensors keep their numbers but for what writers change: rows of q and k in the order of a RoPE of neighbouring pairs,
norms as 1 + weight, projections that others store as [in, out], what makes keys and values of a latent, decays, and
the order of the heads of values of a gated delta rule.
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
from quire.models.gguf.names import ENDS, Names
from quire.models.rope import share_of

LONGEST = 2**26  # tokens of a sequence: angles are computed for each position
IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
NOT_NEEDED = {FACTORS, LONG, SHORT}  # among the weights: the configuration has them
SIZES = (  # that some tensor has
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
VECTORS = ("ssm_a", "ssm_d", "ssm_norm")  # that some writers give further dimensions


class Turns(NamedTuple):
    """Groups of rows that take turns in a file: some rows of each group, then the next ones. Ours stand together.

    So heads of values are stored that share heads of keys: the first one of each head of keys, then the second ones.
    """

    groups: int
    size: int  # rows of a turn
    first: int = 0  # rows before these groups

    def order(self, count: int) -> torch.Tensor:
        """The place in a file of each of so many rows. Raises ModelError where they are no such groups."""
        if count <= self.first or (count - self.first) % (self.groups * self.size):
            raise ModelError(
                f"{count} rows are no {self.groups} groups that take turns of {self.size} after {self.first} others"
            )
        turns = torch.arange(self.first, count).view(-1, self.groups, self.size).transpose(0, 1)
        return torch.cat([torch.arange(self.first), turns.flatten()])


class Place(NamedTuple):
    """Where a tensor of ours stands in a file."""

    tensor: str  # its name there
    entry: int | None = None  # of its first dimension; None: all
    heads: int | None = None  # its rows are in pairs of neighbours, within each of so many heads
    less_one: bool = False  # 1 is to be subtracted
    log: bool = False  # it holds -exp of the numbers
    turns: Turns | None = None  # its rows are in this order
    column_turns: Turns | None = None  # its columns are
    part: tuple[int, int] | None = None  # the number of a part of its rows, after that, and how many parts there are
    transposed: bool = False  # if it is not quantised
    flat: bool = False  # further dimensions mean nothing
    values: str | None = None  # its heads make keys of a latent, and those of that tensor values


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One of GGUF's architectures."""

    name: str  # what a config.json calls it, in `architectures`
    model_type: str
    layer: Names  # of its tensors
    prefix: str = "model.layers.{}."  # of these
    ends: Names = field(default_factory=lambda: ENDS)  # the same outside the layers
    keys: Mapping[str, str] = field(default_factory=dict)  # metadata -> keys of a config.json, besides the usual ones
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys of a config.json that all have alike
    more: Callable[[Metadata, dict[str, Any]], Mapping[str, Any]] | None = None  # what else its config.json would say
    pairs: bool = False  # q and k have their rows in pairs
    norms_plus_one: bool = False
    turns: Callable[[Metadata], Mapping[str, Turns]] | None = None  # of tensors of a layer
    # A tensor whose columns are in the order of another's rows -> that one.
    column_turns: Mapping[str, str] = field(default_factory=dict)
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
        turns = {} if self.turns is None else self.turns(metadata)
        heads = {"attn_q": metadata.integer("attention.head_count"), "attn_k": _num_kv_heads(metadata)}
        ahead = range(_num_layers(metadata), metadata.integer("block_count"))  # layers that guess tokens ahead
        places: dict[str, Place] = {}
        for name, info in metadata.file.tensors.items():
            if name in NOT_NEEDED:
                continue
            if (match := IN_LAYER.fullmatch(name)) is not None and int(match[1]) in ahead:
                continue
            table: Names
            if match is None:
                prefix, rest, table = "", name, self.ends
            else:
                prefix, rest, table = self.prefix.format(match[1]), match[2], self.layer
            base, _, kind = rest.rpartition(".")
            if base == VALUES_OF_LATENT:
                continue  # it comes with the keys
            place = Place(
                name,
                heads=heads.get(base) if self.pairs else None,
                less_one=self.norms_plus_one and base.endswith("norm") and base != "ssm_norm",
                log=rest == "ssm_a",
                turns=turns.get(base or rest),
                column_turns=turns.get(self.column_turns.get(base, "")),
                transposed=base in self.transposed and kind == "weight",
                flat=(base or rest) in VECTORS,
                values=name.replace(KEYS_OF_LATENT, VALUES_OF_LATENT) if base == KEYS_OF_LATENT else None,
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
    other = metadata.integer("attention.value_length", head_dim)
    if other != head_dim and metadata.get("attention.kv_lora_rank") is None:
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
    """Heads of keys in each layer with attention: a layer without it has 0.

    Of layers with a window where these have others than layers without.
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
    """Raise ModelError for a size that no tensor has, before anything of that size is made."""
    tensors = metadata.file.tensors
    largest = max(max(info.shape) for info in tensors.values())
    bounds = {"block_count": len(tensors), "context_length": LONGEST} | dict.fromkeys(SIZES, largest)
    for key, most in bounds.items():
        value = metadata.file.metadata.get(f"{metadata.architecture}.{key}", 0)
        if any(isinstance(one, int) and one > most for one in np.ravel(value).tolist()):
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
        "short_factor": numbers_of(metadata, short),
        "long_factor": numbers_of(metadata, long),
    }


def numbers_of(metadata: Metadata, name: str) -> list[float]:
    """A tensor's numbers. Raises ModelError where it has none, or others than fp32."""
    info = metadata.file.tensors.get(name)
    if info is None or info.kind != "F32" or len(info.shape) != 1:
        raise ModelError(f"{metadata.file.path}: {name} is {info}; it must be fp32 numbers")
    found = metadata.file.blocks(name).view(torch.float32).flatten().tolist()
    return [float(value) for value in found]
