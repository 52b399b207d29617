"""Rotary position embedding: the table of angles, with the scaling variants that Llama-like checkpoints use.

The angles of a position depend only on the configuration at load, never on the batch. Two variants depend on the length
of a sequence; here all sequences have the angles of one with max_model_len tokens. longrope selects its short or long
factors by max_model_len. Dynamic NTK is plain RoPE up to max_position_embeddings, and rotates slower beyond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.hf_config import LARGEST, NUMBER, is_number, shown

THETA = 10_000.0  # the default
ORIGINAL = "original_max_position_embeddings"
COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# The required and the optional keys of each variant, in addition to the common keys. Any other key would change the
# angles in a way that is not implemented here.
VARIANTS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        set(),
        {"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
        | {"original_max_position_embeddings"},
    ),
    # Covers the whole head, but the slowest rotations have frequency 0.
    "proportional": (set(), {"factor"}),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor", "original_max_position_embeddings"}),
}

SCALED = ("linear", "dynamic", "yarn")  # variants that multiply the length by their factor
NUMBERS = {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"} | {
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor"
}  # fmt: skip

FACTORS = ("short_factor", "long_factor")


class Temperature(NamedTuple):
    """Queries grow with their position p, by 1 + scale log(1 + floor((p + 1) / floor)) (Llama 4)."""

    scale: float
    floor: float


def check_rope(parameters: Mapping[str, Any]) -> None:
    """Raise ModelError for an unknown variant, an unknown or missing key, or an invalid value."""
    kind = rope_type(parameters)
    if kind not in VARIANTS:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(VARIANTS)}")
    required, optional = VARIANTS[kind]
    given = {key for key, value in parameters.items() if value is not None}
    for key in sorted(given & NUMBERS):
        if not is_number(value := parameters[key]):
            raise ModelError(f"rope's {key} is {shown(value)}; it must be {NUMBER}")
    check_factors(parameters)
    if kind == "yarn" and not is_number(theta := parameters.get("rope_theta") or THETA, 2.0):
        raise ModelError(
            f"rope's rope_theta is {theta!r}; rope type 'yarn' divides by its logarithm, and needs 2 or more"
        )
    original = parameters.get(ORIGINAL)
    if original is not None and not is_number(original, 2.0, LARGEST):
        raise ModelError(f"rope's {ORIGINAL} is {shown(original)}; it must be in 2..{LARGEST}")
    if not isinstance(truncate := parameters.get("truncate", True), bool):
        raise ModelError(f"rope's truncate is {shown(truncate)}; it must be true or false")
    if missing := required - given:
        raise ModelError(f"rope type {kind!r} lacks {', '.join(sorted(missing))}")
    if unknown := given - COMMON_KEYS - required - optional:
        raise ModelError(f"rope type {kind!r} has keys that are not understood: {', '.join(sorted(unknown))}")
    if (share := rotated_share(parameters)) > 1.0:
        raise ModelError(f"rope's partial_rotary_factor is {share!r}; it must be at most 1")


def check_factors(parameters: Mapping[str, Any]) -> None:
    """Raise ModelError for factors of longrope that are not numbers."""
    for key in FACTORS:
        value = parameters.get(key)
        if value is not None and not (isinstance(value, list) and all(map(is_number, value))):
            raise ModelError(f"rope's {key} is {shown(value)}; it must be a list, each entry {NUMBER}")


def rope_type(parameters: Mapping[str, Any]) -> str:
    """Return the variant's name. Older checkpoints have the key `type`, and call longrope "su"."""
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    return "longrope" if kind == "su" else kind


def longest_rotated(parameters: Mapping[str, Any], max_position_embeddings: int) -> int:
    """Return the longest sequence that the angles support, in tokens.

    For linear, dynamic NTK and yarn, max_position_embeddings is the length of the original training, which their
    factor extends, as in vLLM. For llama3 and longrope, max_position_embeddings is the extended length.
    """
    kind, original = rope_type(parameters), max_position_embeddings
    if kind not in SCALED:
        return max_position_embeddings
    if kind == "yarn":
        original = int(parameters.get(ORIGINAL) or original)
    return max(max_position_embeddings, int(original * (parameters.get("factor") or 1.0)))


def extension(parameters: Mapping[str, Any], max_position_embeddings: int) -> float:
    """Return the factor by which yarn or longrope extends the context of the original training."""
    original = parameters.get("original_max_position_embeddings") or max_position_embeddings
    return float(parameters.get("factor") or max_position_embeddings / original)


def takes_original(parameters: Mapping[str, Any]) -> bool:
    """Return whether the variant uses the context length of the original training."""
    return "original_max_position_embeddings" in VARIANTS.get(rope_type(parameters), ((), ()))[1]


def rotated_share(parameters: Mapping[str, Any]) -> float:
    """Return the share of each head's dimensions that is rotated, from the first on."""
    share = parameters.get("partial_rotary_factor")
    return 1.0 if share is None or rope_type(parameters) == "proportional" else float(share)


def share_of(rotated: int, head_dim: int) -> float:
    """Return the partial_rotary_factor that rotates `rotated` dimensions of a head. Raises ModelError for too many."""
    if rotated > head_dim:
        raise ModelError(f"{rotated} dimensions of a head of {head_dim} are to be rotated; it must be at most all")
    return (rotated + 0.5) / head_dim if rotated < head_dim else 1.0  # its product with head_dim is rounded down


def rope_tables(
    ropes: Sequence[tuple[Mapping[str, Any] | Temperature | None, int]],  # of each layer, with its head_dim
    max_position_embeddings: int,
    max_model_len: int,
    device: torch.device,
) -> list[tuple[Tensor, Tensor] | None]:
    """Return each layer's table; None for a layer without rotation. Layers with the same parameters share a table.

    A temperature is a rotation by angle 0 with a cosine of 1 or more.
    """
    tables: dict[str, tuple[Tensor, Tensor]] = {}
    for parameters, head_dim in ropes:
        if parameters is not None and repr((parameters, head_dim)) not in tables:
            if isinstance(parameters, Temperature):
                cos, sin = temperature_table(parameters, head_dim, max_model_len)
            else:
                cos, sin = rope_table(parameters, head_dim, max_position_embeddings, max_model_len)
            tables[repr((parameters, head_dim))] = cos.to(device), sin.to(device)
    return [tables.get(repr(rope)) for rope in ropes]


def rope_table(
    parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int, max_model_len: int
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of every position's angles: fp32 [max_model_len, D_rot / 2] each.

    max_position_embeddings: the longest sequence that the checkpoint was trained for.
    """
    check_rope(parameters)
    kind = rope_type(parameters)
    dim = int(head_dim * rotated_share(parameters))  # D_rot
    if dim % 2 or dim == 0:
        raise ModelError(f"RoPE rotates pairs of dimensions, and of a head of {head_dim} it is to rotate {dim}")
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    base = float(parameters.get("rope_theta") or THETA)
    if kind == "dynamic" and max_model_len > max_position_embeddings:
        base = _dynamic_base(base, parameters["factor"], dim, max_model_len / max_position_embeddings)
    frequencies = 1.0 / base**exponents
    attention_factor = 1.0  # multiplies q and k, so its square scales the scores
    original = int(parameters.get("original_max_position_embeddings") or max_position_embeddings)
    if kind == "linear":
        frequencies = frequencies / parameters["factor"]
    elif kind == "proportional":
        turning = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0) // 2)
        frequencies = frequencies / (parameters.get("factor") or 1.0)
        frequencies[turning:] = 0.0
    elif kind == "llama3":
        frequencies = _llama3(frequencies, parameters, original)
    elif kind == "yarn":
        factor = extension(parameters, max_position_embeddings)
        frequencies = _yarn(frequencies, parameters, factor, dim, original)
        attention_factor = _yarn_attention_factor(parameters, factor)
    elif kind == "longrope":
        factor = extension(parameters, max_position_embeddings)
        side = "long_factor" if max_model_len > original else "short_factor"
        if len(parameters[side]) != dim // 2:
            raise ModelError(f"rope's {side} has {len(parameters[side])} factors; {dim} dimensions need {dim // 2}")
        frequencies = frequencies / torch.tensor(parameters[side], dtype=torch.float32)
        if original < 2:
            raise ModelError(f"max_position_embeddings is {original}; of rope type 'longrope' it must be at least 2")
        attention_factor = parameters.get("attention_factor") or (
            1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    if not angles[-1].isfinite().all():
        raise ModelError(
            f"rope's angles of position {max_model_len - 1} are beyond all fp32 numbers: {shown(parameters)}"
        )
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def temperature_table(temperature: Temperature, head_dim: int, max_model_len: int) -> tuple[Tensor, Tensor]:
    """Return the factors of queries in the format of `rope_table`: fp32 [max_model_len, D / 2] each, the sines 0."""
    if head_dim % 2:
        raise ModelError(f"a temperature of positions is served for heads of even sizes; head_dim is {head_dim}")
    positions = torch.arange(max_model_len, dtype=torch.float32)
    factors = torch.log1p(torch.floor((positions + 1) / temperature.floor)) * temperature.scale + 1
    whole = factors[:, None].repeat(1, head_dim // 2)
    return whole, torch.zeros_like(whole)


def _dynamic_base(base: float, factor: float, dim: int, longer: float) -> float:
    """Return the NTK base for a context that is `longer` times as long. It slows all rotations except the fastest."""
    if dim < 4:
        raise ModelError(f"dynamic RoPE needs 4 rotated dimensions of a head or more; it has {dim}")
    return base * math.pow(factor * longer - (factor - 1), dim / (dim - 2))


def _llama3(
    frequencies: Tensor,  # fp32 [D_rot / 2]
    parameters: Mapping[str, Any],
    original: int,
) -> Tensor:
    """Slow down slow rotations by `factor`, keep fast ones, and blend those between (Llama 3.1)."""
    factor, low, high = (float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = original * frequencies / (2 * math.pi)  # full rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / factor + keep * frequencies


def _yarn(
    frequencies: Tensor,  # fp32 [D_rot / 2]
    parameters: Mapping[str, Any],
    factor: float,
    dim: int,
    original: int,
) -> Tensor:
    """Scale frequencies like llama3, but blend by dimension index between two rotation counts (Peng et al. 2023)."""
    base = float(parameters.get("rope_theta") or THETA)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(parameters.get("beta_fast") or 32), dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0.0, 1.0)
    return frequencies / factor * (1 - keep) + frequencies * keep


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given, mscale, mscale_all = (parameters.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if mscale and mscale_all:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return the factor of q and k for a context that is `factor` times as long (Peng et al. 2023)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
