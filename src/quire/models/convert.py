"""Writing a quantised checkpoint in the layout of compressed-tensors, which other engines also read.

Its integers and scales equal those of quantisation at load. Words are packed as the format specifies, not for a CPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ConfigError, ModelError
from quire.models import Own, choose
from quire.models.pooling_files import modules_of
from quire.models.quantisation.module import WHOLE
from quire.models.quantisation.policy import ROUNDINGS, Quantisation
from quire.models.weights import INDEX, Checkpoint, RoundedPart, Weights
from quire.ops.weights.quantised import GROUPS, QuantisedWeight
from quire.progress import progress_bar

SHARD = 2**31  # bytes of a file, which also bounds the memory; a larger tensor has a separate file
WEIGHTS = frozenset(".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .onnx".split())  # files not to be copied
WIDEST = 8  # bytes of a number of weight_shape


@dataclass(frozen=True)
class Written:
    """The result of a conversion."""

    nbytes: int
    rounded: int  # tensors


def convert(directory: Path, out: Path, quantization: str) -> Written:
    """Write the model of a directory to another one, with its linears rounded as the option `quantization` does.

    The output projection and routers are not rounded. Raises ConfigError if `out` is not empty or the disk is too
    small, ModelError for a model that is quantised already, or that compressed-tensors has no layout for.
    """
    if quantization not in ROUNDINGS:
        raise ConfigError(f"quantization is {quantization!r}; it must be one of {', '.join(ROUNDINGS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already and is not an empty directory; name a new one")
    model = _Source(directory, quantization)
    _check_room(out, sum(map(model.nbytes, model.names)))
    out.mkdir(parents=True, exist_ok=True)
    try:
        files = _write_weights(model, out)
        _copy_others(directory, out)
        # config.json is written last, so that an incomplete directory is not mistaken for a model.
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        raw["quantization_config"] = model.scheme()
        (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        for path in out.iterdir():  # `out` was empty, so all of its files were written here
            path.unlink()
        raise
    return Written(sum(path.stat().st_size for path in files), len(model.rounded))


class _Source:
    """A checkpoint, and the form in which each of its tensors is written."""

    def __init__(self, directory: Path, quantization: str) -> None:
        if not directory.is_dir():
            raise ModelError(f"{directory} is no directory; take the one of the checkpoint that the file was made from")
        choice = choose(directory)
        if choice.scheme is not None:
            raise ModelError(
                f"{directory} is quantised already ({choice.scheme.description}); take the model's 16-bit checkpoint"
            )
        if not isinstance(choice, Own):
            raise ModelError(
                f"{directory} is served by {choice}; only models of Quire's own decoder can be converted: serve it "
                f"with --quantization {quantization}"
            )
        self.tensors, part = Checkpoint(directory), choice.part
        checkpoint = self.tensors if part is None else Checkpoint(directory, part)
        sources = choice.family.weight_sources(choice.config, checkpoint.names)
        quantisation = Quantisation(linears=ROUNDINGS[quantization])
        if not choice.config.causal:
            quantisation = quantisation.for_encoder()
        self._weights = Weights(checkpoint, sources, choice.config, choice.dtype, "cpu", quantisation)
        self.names = sorted(self.tensors.names)
        own = {name: name if part is None else part.name(name) for name in self.names}  # in the text part
        rounded = self._weights.rounded_parts()
        for name, about in rounded.items():
            _check_layout(name, about)
        self._own = {name: ours for name, ours in own.items() if ours in rounded}
        self.rounded = {name: rounded[ours] for name, ours in self._own.items()}

    def nbytes(self, name: str) -> int:
        """Return the bytes that a tensor takes in the written files."""
        if name not in self.rounded:
            return self.tensors[name].nbytes
        about = self.rounded[name]
        words = -(-about.in_size * about.rounding.bits // 32)
        scales = about.in_size // about.rounding.group(about.in_size)
        return about.out_size * (words + scales) * 4 + 2 * WIDEST

    def written(self, name: str) -> dict[str, Tensor]:
        """Return the tensors that are written for a tensor."""
        if name in self.rounded:
            return packed(name.removesuffix(".weight"), self._weights.rounded(self._own[name], self.rounded[name]))
        return {name: self.tensors[name].clone(memory_format=torch.contiguous_format)}  # two may share memory

    def scheme(self) -> dict[str, Any]:
        """Return the quantization_config of config.json."""
        kinds: dict[tuple[int, int], list[str]] = {}
        for name, about in self.rounded.items():
            size = about.rounding.group(about.in_size)
            group = size if size in GROUPS and about.rounding.group_size != WHOLE else 0
            kinds.setdefault((about.rounding.bits, group), []).append(name.removesuffix(".weight"))
        groups = {}
        for i, ((bits, size), names) in enumerate(sorted(kinds.items(), reverse=True)):
            # Engines that fuse linears match a class before names, so use the class only if all are alike.
            groups[f"group_{i}"] = _group(bits, size, ["Linear"] if len(kinds) == 1 else names)
        kept = [name for name in self.names if name not in self.rounded and name.endswith(".weight")]
        linears = {name.removesuffix(".weight") for name in kept if self.tensors[name].dim() == 2}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(linears | {"lm_head"}),
            "kv_cache_scheme": None,
        }


def packed(module: str, weight: QuantisedWeight) -> dict[str, Tensor]:
    """Return the tensors of a linear: words of consecutive inputs, the first in the lowest bits."""
    numbers = torch.nn.functional.pad(weight.values, (0, -weight.in_size % (32 // weight.bits)))
    if weight.bits == 4:
        numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
    return {
        f"{module}.weight_packed": numbers.contiguous().view(torch.int32),
        f"{module}.weight_scale": weight.scales,
        f"{module}.weight_shape": torch.tensor([weight.out_size, weight.in_size]),
    }


def _group(bits: int, size: int, targets: list[str]) -> dict[str, Any]:
    """Return the config group of linears with one format. size: inputs that share a scale, 0: all."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if size else "channel",
        "group_size": size or None,
        "dynamic": False,
        "actorder": None,
    }
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}


def _check_layout(name: str, about: RoundedPart) -> None:
    """Raise ModelError for a tensor that compressed-tensors has no layout for."""
    if not name.endswith(".weight"):
        raise ModelError(
            f"{name} is one of several experts in a tensor, for which compressed-tensors has no layout; serve the "
            "model with --quantization instead"
        )
    size = about.rounding.group(about.in_size)
    if about.in_size % size:
        raise ModelError(
            f"{name} has {about.in_size} inputs, which groups of {', '.join(map(str, GROUPS))} do not divide; "
            "compressed-tensors has whole groups only: take int8, or serve the model with --quantization instead"
        )


def _check_room(out: Path, needed: int) -> None:
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(f"{out} will take {needed / 2**20:,.1f} MiB; {free / 2**20:,.1f} MiB are free there")


def _write_weights(model: _Source, out: Path) -> list[Path]:
    """Write the weights one file after the other. Return the files."""
    shards = _shards((name, model.nbytes(name)) for name in model.names)
    paths: list[Path] = []
    places: dict[str, str] = {}
    with progress_bar("tensors", len(model.names)) as advance:
        for number, names in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for name in names:
                tensors |= model.written(name)
                advance()
            save_file(tensors, out / file, {"format": "pt"})
            paths.append(out / file)
            places |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(model.nbytes, model.names))}, "weight_map": places}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def _shards(sizes: Iterable[tuple[str, int]]) -> list[list[str]]:
    """Split names into files of up to SHARD bytes."""
    shards: list[list[str]] = []
    taken = SHARD
    for name, size in sizes:
        if not shards or taken + size > SHARD:
            shards.append([])
            taken = 0
        shards[-1].append(name)
        taken += size
    return shards


def _copy_others(directory: Path, out: Path) -> None:
    """Copy all files but weights and config.json, and the modules after the layers, such as 1_Pooling."""
    for module in modules_of(directory) or ():
        if module.path.is_dir():  # one without settings may have no directory
            shutil.copytree(module.path, out / module.path.name)
    for path in sorted(directory.iterdir()):
        weights = path.suffix in WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, out / path.name)
