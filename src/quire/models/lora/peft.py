"""Adapters in PEFT's format: adapter_config.json, and adapter_model.safetensors with two matrices for each module."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import ModelError
from quire.models.hf_config import NUMBER, is_number, shown
from quire.models.patterns import Pattern, Patterns
from quire.models.weights import read_json

log = logging.getLogger("quire.models")

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ALL = "all-linear"  # as target_modules
MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
DIGEST_SIZE = 16  # bytes
# Keys about training, or without effect on the computation.
IMMATERIAL = frozenset(
    """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config fan_in_fan_out inference_mode
    lora_dropout lora_ga_config megatron_config megatron_core peft_version qalora_group_size revision runtime_config
    """.split()
)
READ = frozenset(
    """
    alpha_pattern bias exclude_modules init_lora_weights layers_pattern layers_to_transform lora_alpha peft_type r
    rank_pattern target_modules task_type use_rslora
    """.split()
)
# Keys that ask for more than two matrices per linear -> their effect.
NOT_SERVED = {
    "use_dora": "DoRA scales the columns of the weights",
    "modules_to_save": "whole modules are replaced",
    "trainable_token_indices": "rows of the embedding are replaced",
    "target_parameters": "parameters that are no linear's weight have adapters",
    "layer_replication": "layers are repeated",
    "lora_bias": "adapters have biases",
    "use_qalora": "inputs are pooled by groups",
    "alora_invocation_tokens": "the adapter begins within a prompt",
    "arrow_config": "a router mixes adapters",
    "loftq_config": "the weights of the model are changed",
}
INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")  # initialisations that do not change the model's weights


@dataclass(frozen=True)
class LowRank:
    """An adapter of one module. It adds scale * (x @ a.T) @ b.T to the module's results."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read from its files."""

    directory: Path
    modules: Mapping[str, LowRank]  # by the module's name within the model
    digest: str  # of all numbers, which identifies the weights
    config: Mapping[str, Any]
    patterns: Mapping[str, Pattern]  # by the keys that name modules by a pattern for whole names

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(len(one.a) for one in self.modules.values())

    def is_meant_for(self, module: str) -> bool:
        """Return whether the adapter's target_modules name that linear of the model."""
        config = self.config
        if self._names("exclude_modules", module):
            return False
        is_linear = config.get("target_modules") == ALL and not module.endswith(("lm_head", "embed_out"))
        if not (is_linear or self._names("target_modules", module)):
            return False
        chosen = config.get("layers_to_transform")
        if chosen is None:
            return True
        patterns = config.get("layers_pattern") or r"[^.]+"
        patterns = [patterns] if isinstance(patterns, str) else patterns
        found = (re.match(rf".*\.(?:{pattern})\.(\d{{1,9}})\.", module) for pattern in patterns)
        layer = next((int(one[1]) for one in found if one is not None), None)
        return layer is not None and layer in ([chosen] if isinstance(chosen, int) else chosen)

    def _names(self, key: str, module: str) -> bool:
        """Return whether a key names a module: by a pattern for whole names, or a list of suffixes."""
        if key in self.patterns:
            return self.patterns[key].begins(module)
        names = self.config.get(key)
        return isinstance(names, list) and any(module == name or module.endswith(f".{name}") for name in names)


def read_adapter(directory: Path) -> PeftAdapter:
    """Read the adapter of a directory.

    Raises ModelError for files that are missing or malformed, and for anything but two matrices per linear.
    """
    path = directory / TENSORS
    try:
        path.open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: the path is invalid
        # The caller may be a remote client, so the directory's contents only go to the log.
        log.warning("no adapter: %s; the directory holds %s", error, _listed(directory))
        raise ModelError(f"{directory} is no PEFT adapter: it has no {TENSORS} that can be read") from error
    config = read_json(directory / CONFIG)
    _check_config(directory, config)
    patterns = Patterns(f"{directory / CONFIG}")
    named = {key: config.get(key) for key in ("target_modules", "exclude_modules")}
    whole = {
        key: patterns.compiled(key, value, "(?:", r")\Z")
        for key, value in named.items()
        if isinstance(value, str) and value not in ("", ALL)
    }
    try:
        file = safe_open(path, framework="pt")
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read as weights: {error}") from error
    modules = _modules(directory, config, tensors, patterns)
    digest = blake2b(digest_size=DIGEST_SIZE, person=b"quire lora")
    for name, one in modules.items():
        for part in (one.a, one.b):
            digest.update(f"{name}\0{part.dtype}\0{tuple(part.shape)}\0{one.scale!r}\0".encode())
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return PeftAdapter(directory, modules, digest.hexdigest(), config, whole)


def _listed(directory: Path) -> str:
    """Return the names of a directory's files, only some of them if there are many."""
    try:
        return shown(sorted(path.name for path in directory.iterdir()))
    except (OSError, ValueError):
        return "nothing that can be listed"


def _check_config(directory: Path, config: Mapping[str, Any]) -> None:
    where = f"{directory / CONFIG}"
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{where}: peft_type is {shown(config.get('peft_type'))}; adapters of the type 'LORA' are served"
        )
    for key, why in NOT_SERVED.items():
        if config.get(key):
            raise ModelError(f"{where}: {key} is {shown(config[key])}: {why}, which is not served")
    for key, served in (("bias", ("none", None)), ("task_type", ("CAUSAL_LM", None)), ("init_lora_weights", INITIAL)):
        if (value := config.get(key)) not in served:
            known = ", ".join(repr(one) for one in served if one is not None)
            raise ModelError(f"{where}: {key} is {shown(value)}; served is {known}")
    for key, value in config.items():
        if key not in READ and key not in IMMATERIAL and key not in NOT_SERVED and value:
            raise ModelError(f"{where}: {key} is {shown(value)}, which is not understood")
    for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        if not isinstance(own := config.get(pattern) or {}, Mapping):
            raise ModelError(f"{where}: {pattern} is {shown(own)}; it must be an object of patterns and numbers")
        what = "an integer above 0" if key == "r" else NUMBER
        named = {key: config.get(key)} | {f"{pattern}[{one!r}]": value for one, value in own.items()}
        for name, value in named.items():
            if not is_number(value) or (key == "r" and type(value) is not int):
                raise ModelError(f"{where}: {name} is {shown(value)}; it must be {what}")
    _check_modules(where, config)


def _check_modules(where: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for keys that do not contain names of modules or indices of layers."""
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        if not isinstance(given := config.get(key) or "", (str, list)) or not all(
            isinstance(one, str) for one in given
        ):
            raise ModelError(f"{where}: {key} is {shown(given)}; it must be a text or a list of texts")
    given = config.get("layers_pattern") or []
    for name in [given] if isinstance(given, str) else given:
        if not re.fullmatch(r"\w+(\.\w+)*", name):
            raise ModelError(f"{where}: layers_pattern has {shown(name)}; it must be the name of the list of layers")
    chosen = config.get("layers_to_transform")
    for layer in [] if chosen is None else chosen if isinstance(chosen, list) else [chosen]:
        if type(layer) is not int:
            raise ModelError(
                f"{where}: layers_to_transform is {shown(chosen)}; it must be a number of a layer or a list of these"
            )


def _modules(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], patterns: Patterns
) -> dict[str, LowRank]:
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = MATRIX.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{directory / TENSORS} holds {name}, which is no matrix of a linear's adapter{_hint(name)}"
            )
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ModelError(
                f"{directory / TENSORS}: {name} is {tensor.dtype} {tuple(tensor.shape)}; expected a matrix"
            )
        halves.setdefault(match[1], {})[match[2]] = tensor
    if not halves:
        raise ModelError(f"{directory / TENSORS} holds no tensor")
    ranks, alphas = (
        [
            (patterns.compiled(key, text, r"(?:.*\.)?(?:", ")$"), value)
            for text, value in (config.get(key) or {}).items()
        ]
        for key in ("rank_pattern", "alpha_pattern")
    )
    found = {}
    for module, own in halves.items():
        if missing := {"A", "B"} - own.keys():
            raise ModelError(f"{directory / TENSORS} lacks lora_{min(missing)} of {module}")
        a, b = own["A"], own["B"]
        rank = next((value for pattern, value in ranks if pattern.begins(module)), config["r"])
        alpha = next((value for pattern, value in alphas if pattern.begins(module)), config["lora_alpha"])
        if not len(a) == b.shape[1] == rank:
            raise ModelError(
                f"{directory}: lora_A and lora_B of {module} have shapes {tuple(a.shape)} and {tuple(b.shape)}; its "
                f"rank is {rank} by {CONFIG}"
            )
        found[module] = LowRank(a, b, alpha / (rank**0.5 if config.get("use_rslora") else rank))
    return found


def _hint(name: str) -> str:
    if "lora_embedding" in name:
        return ": adapters of embeddings are not served"
    if "magnitude" in name:
        return ": DoRA is not served"
    if name.endswith(".bias"):
        return ": biases are not served"
    return ": modules_to_save are not served" if "lora_" not in name else ""
