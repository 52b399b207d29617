"""The files of a checkpoint that describe its pooling: those of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from quire.errors import ModelError
from quire.models.decoder_config import DecoderConfig
from quire.models.files import Files
from quire.models.hf_config import ConfigReader, shown
from quire.models.pooling import Dense, Pooler
from quire.models.pooling_config import DenseConfig, Pooling
from quire.models.weights import Checkpoint, read_json
from quire.ops import Backend
from quire.ops.activation import Function

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
MODES: dict[str, Pooling] = {
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
    "max": "max",
    "max_tokens": "max",
    "mean": "mean",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted",
    "weightedmean_tokens": "weighted",
}
FUNCTIONS: dict[str, Function | None] = {
    "GELU": "gelu",
    "Identity": None,
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
SCORES = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}


@dataclass(frozen=True)
class Module:
    """A module of modules.json after the transformer."""

    path: Path
    kind: str

    def config(self) -> ConfigReader:
        """Read its config.json."""
        return ConfigReader(read_json(self.path / "config.json"), self.kind, "module", str(self.path / "config.json"))


def read_pooler(
    files: Files, raw: Mapping[str, Any], decoder: DecoderConfig, pooler: Pooler, backend: Backend, device: str
) -> Pooler:
    """Return a model's pooler with the settings of its files. pooler: the one that its weights determine.

    Raises ModelError for a module, a pooling or an activation that is not understood.
    """
    offset = decoder.vocab_size if decoder.token_types > 1 else 0
    writes = decoder.causal and decoder.has_head and not decoder.classifier
    config = replace(pooler.config, encodes=not decoder.causal, writes=writes, second_offset=offset)
    if decoder.classifier:
        return Pooler(replace(config, **_classifier(raw, decoder)), pooler.dense)
    config = replace(config, size=decoder.hidden_size)
    mode = files.pooling_mode()
    if mode is not None:
        config = replace(config, mode=mode, source=files.path.name)
    elif not decoder.causal:
        config = replace(config, mode="mean")
    modules = modules_of(files.path) if files.path.is_dir() else None
    if modules is None:
        return Pooler(config)
    config = replace(config, normalized=False, source=MODULES, **_prompts(files.path))
    dense: list[Dense] = []
    pooled = False
    for module in modules:
        match module.kind:
            case "Pooling" if not pooled:
                config, pooled = replace(config, mode=_mode(module)), True
            case "Dense" if pooled:
                weights = Checkpoint(module.path)
                dense.append(_dense(module, weights, backend, device))
                parts = (weights[name].contiguous().view(torch.uint8).numpy() for name in sorted(weights.names))
                digest = config.digest.encode() + b"".join(part.tobytes() for part in parts)
                config = replace(config, size=dense[-1].config.out_size, digest=sha256(digest).hexdigest())
            case "Normalize" if pooled and module is modules[-1]:
                config = replace(config, normalized=True)
            case _:
                raise ModelError(
                    f"{files.path / MODULES} has the module {module.kind}; understood are a Transformer, a Pooling, "
                    "Dense layers and a Normalize at the end, in this order"
                )
    if not pooled:
        raise ModelError(f"{files.path / MODULES} has no Pooling; without it a text has no vector")
    return Pooler(config, dense)


def longest_text(files: Files) -> int | None:
    """Return the tokens at which sentence-transformers cuts a text by default; None if the files do not have it."""
    path = files.path / LENGTHS
    if not path.is_file():
        return None
    found = read_json(path).get("max_seq_length")
    if found is not None and (type(found) is not int or found < 1):
        raise ModelError(f"{path}: max_seq_length is {shown(found)}; it must be a positive integer")
    return found


def modules_of(directory: Path) -> list[Module] | None:
    """Return the modules after the transformer; None if the checkpoint lists none."""
    path = directory / MODULES
    if not path.is_file():
        return None
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        modules = [(str(one["path"]), str(one["type"]).rpartition(".")[2]) for one in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read as a list of modules with a path and a type: {error!r}") from error
    if not modules or modules[0] != ("", "Transformer"):
        raise ModelError(
            f"{path} begins with {shown(modules[:1])}; the first module must be a Transformer in the directory"
        )
    for name, _ in modules[1:]:
        if not name or name != Path(name).name:
            raise ModelError(f"{path} has a module at {shown(name)}; it must be the name of a directory next to it")
    return [Module(directory / name, kind) for name, kind in modules[1:]]


def _mode(module: Module) -> Pooling:
    """Return the mode of a Pooling, in the old format or the new one."""
    raw = read_json(module.path / "config.json")
    named = raw.get("pooling_mode")
    names = [named] if isinstance(named, str) else list(named or ())
    names += [
        key.removeprefix("pooling_mode_") for key, value in raw.items() if key.startswith("pooling_mode_") and value
    ]
    if raw.get("include_prompt", True) is not True:
        raise ModelError(f"{module.path}: include_prompt is False; served is the pooling of all tokens")
    if len(names) != 1 or names[0] not in MODES:
        raise ModelError(
            f"{module.path / 'config.json'}: the pooling is {', '.join(map(shown, names)) or 'missing'}; it must be "
            f"one of {', '.join(sorted(set(MODES)))}"
        )
    return MODES[names[0]]


def _dense(module: Module, tensors: Checkpoint, backend: Backend, device: str) -> Dense:
    config = module.config()
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name != "Tanh" and name not in FUNCTIONS:
        raise config.error("activation_function", f"one of torch's {', '.join(['Tanh', *FUNCTIONS])}", name)
    for key in ("module_input_name", "module_output_name"):
        config.only(key, "sentence_embedding")
    made = DenseConfig(
        in_size=config.integer("in_features"),
        out_size=config.integer("out_features"),
        bias=config.flag("bias", True),
        function="tanh" if name == "Tanh" else FUNCTIONS[name],
    )
    config.finish()
    weights = {}
    for kind, shape in (("weight", (made.out_size, made.in_size)), ("bias", (made.out_size,))):
        if kind == "bias" and not made.bias:
            continue
        theirs = f"linear.{kind}"
        if theirs not in tensors.names or tensors[theirs].shape != shape:
            raise ModelError(f"{module.path} lacks {theirs} of shape {shape}, which its config.json asks for")
        weights[f"dense.{kind}"] = tensors[theirs].to(device, torch.float32).contiguous()
    return Dense.of(made, weights, "dense", backend.linears(device, True))


def _prompts(directory: Path) -> dict[str, Any]:
    """Return the prompts of a model as fields of PoolingConfig."""
    path = directory / SETTINGS
    if not path.is_file():
        return {}
    raw = read_json(path)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts is {shown(prompts)}; it must be an object of texts")
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name is {shown(default)}; prompts has {', '.join(prompts) or 'none'}")
    return {"prompts": prompts, "default_prompt": default}


def _classifier(raw: Mapping[str, Any], decoder: DecoderConfig) -> dict[str, Any]:
    """Return a classifier's labels and the activation of its logits as fields of PoolingConfig."""
    count = decoder.classifier[-1].out_size
    named = raw.get("id2label")
    named = named if isinstance(named, dict) else {}
    labels = tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(count))
    settings = raw.get("sentence_transformers")
    given = (
        settings.get("activation_fn") if isinstance(settings, dict) else raw.get("sbert_ce_default_activation_function")
    )
    if given is not None:
        name = str(given).rpartition(".")[2]
        if name not in SCORES:
            raise ModelError(
                f"config.json: the activation of scores is {shown(given)}; it must be torch's {', '.join(SCORES)}"
            )
        activation = SCORES[name]
    elif raw.get("problem_type") == "regression" and count > 1:
        activation = "identity"
    else:
        activation = "sigmoid" if count == 1 or raw.get("problem_type") == "multi_label_classification" else "softmax"
    return {"labels": labels, "activation": activation, "size": count, "source": "its classifier"}
