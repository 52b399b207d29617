"""Reading the weights of a checkpoint's files into aligned tensors."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import ConfigError, ModelError
from quire.models.decoder_config import DecoderConfig, weight_shapes, weight_use
from quire.models.hf_config import shown
from quire.models.model import WeightBytes
from quire.models.quantisation.gguf import Gguf
from quire.models.quantisation.module import Form, Module, Scheme, Tensors, form_of, tensor_name
from quire.models.quantisation.policy import Quantisation, Rounding, dequantised_into, in_blocks
from quire.models.quantisation.stacking import StackedWeight, Weight, stacked
from quire.models.text_part import TextPart
from quire.ops.memory import mapped
from quire.ops.weights.gguf_blocks import BlockWeight
from quire.ops.weights.linear import LinearWeight
from quire.ops.weights.narrow import NarrowWeight
from quire.ops.weights.quantised import QuantisedWeight

INDEX = "model.safetensors.index.json"
MARKS = ("qweight", "weight_packed")  # tensors of quantised linears
NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of a weight that is not quantised
EXACT = re.compile(
    r"^classifier\.|^relative_bias|norm\.|\.conv\.|\.(sinks|correction|shares|scale|A_log|D|dt_bias|(decay|input)_(heads|bias))$"
)  # fp32, by our names
TABLES = ("embedding", "per_layer_embedding")  # one row per token
OWN_FILE = re.compile(r"[^/\\\0]+\.safetensors")  # a valid file name in an index
LARGEST_JSON = 2**26  # bytes
SINGLE_FILES = ("model.safetensors", "*.safetensors", "pytorch_model*.bin", "model.pt", "*.pt")


class Checkpoint:
    """The named tensors of a directory: one or several safetensors files, or an old state dict."""

    def __init__(self, directory: Path, part: TextPart | None = None) -> None:
        """Open the files. Raises ModelError if there are no files, or one is unreadable.

        part: read only this part, under the names of a standalone model; None: read everything.
        """
        self.path = directory
        self._reader_of: dict[str, Callable[[int | None], Tensor]] = {}
        paths = weight_files(directory, part)
        if not paths:
            others = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
            raise ModelError(f"{directory} holds no weights ({', '.join(SINGLE_FILES)}); it holds {others}")
        for path in paths:
            try:
                names: Iterable[str]
                read: Callable[[str, int | None], Tensor]
                if path.suffix == ".safetensors":
                    file = safe_open(path, framework="pt")
                    names, read = file.keys(), partial(_stored, file)  # type: ignore[no-untyped-call]
                else:
                    tensors = _state_dict(path)
                    names, read = tensors, partial(_held, tensors)
                for theirs in names:
                    if (name := theirs if part is None else part.name(theirs)) is not None:
                        self._reader_of[name] = partial(read, theirs)
            except ModelError:
                raise
            except Exception as error:  # a bad pickle raises many types of errors
                raise ModelError(f"{path} cannot be read as weights: {error}") from error

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._reader_of)

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor. A name such as "x[3]" reads only that entry of the tensor x."""
        whole, _, entry = name.partition("[")
        read = self._reader_of[whole]
        try:
            return read(int(entry[:-1]) if entry else None)
        except (OSError, SafetensorError, IndexError, RuntimeError) as error:
            raise ModelError(f"{self.path}: {name} cannot be read: {error}") from error


def _stored(file: Any, name: str, entry: int | None) -> Tensor:
    tensor: Tensor = file.get_tensor(name) if entry is None else file.get_slice(name)[entry]
    return tensor


def _held(tensors: Mapping[str, Tensor], name: str, entry: int | None) -> Tensor:
    return tensors[name] if entry is None else tensors[name][entry]


def read_index(directory: Path) -> dict[str, str] | None:
    """Return the file of each tensor in a directory, from its index; None if there is no index.

    Raises ModelError for a malformed index, or one with a file that is not a .safetensors file of the same directory.
    """
    path = directory / INDEX
    if not path.exists():
        return None
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict):
        raise ModelError(f"{path}: weight_map is {shown(files)}; it must be an object of tensors and their files")
    for file in files.values():
        if not isinstance(file, str) or not OWN_FILE.fullmatch(file):
            raise ModelError(
                f"{path}: weight_map has the file {shown(file)}; it must be the name of a .safetensors file of the "
                "same directory"
            )
    return files


def weight_files(directory: Path, part: TextPart | None = None) -> list[Path]:
    """Return the files of the weights. If there are several forms, the first of SINGLE_FILES is chosen.

    The result is empty if the directory has no weights.

    part: read only this part; files in which the index has only tensors of other parts are left out.
    """
    if (files := read_index(directory)) is not None:
        wanted = {file for name, file in files.items() if part is None or part.name(name) is not None}
        return [directory / name for name in sorted(wanted)]
    for pattern in SINGLE_FILES:
        if found := sorted(directory.glob(pattern)):
            return found
    return []


def _state_dict(path: Path) -> dict[str, Tensor]:
    """Load a pickled state dict, bare or under "model" or "state_dict". Only tensors are unpickled, never code."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided
        for name, value in content.items()
    ):
        raise ModelError(f"{path} holds no state dict: its entries are not all names and dense tensors")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises ModelError if the file is missing or malformed."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_JSON + 1)
        if len(data) > LARGEST_JSON:
            raise ModelError(f"{path} has more than {LARGEST_JSON} bytes; no such file of a model has as many")
        content = json.loads(data.decode(), object_hook=_infinite)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} holds no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def _infinite(found: dict[str, Any]) -> Any:
    """Convert an infinity or NaN as transformers writes it to JSON. Raises ValueError if it is not a number."""
    return float(str(found["__float__"])) if found.keys() == {"__float__"} else found


@dataclass(frozen=True)
class Sources:
    """The mapping from the decoder's weights to the tensors in a family's checkpoints.

    "Ours" are names of `weight_shapes`, "theirs" those of a checkpoint.
    """

    ends: Mapping[str, str]  # ours -> theirs, outside the layers
    layer_prefix: str  # of their tensors of layer {}
    # Ours -> theirs within a layer, with {} for the index of an expert; several are stacked in this order. Ours may
    # end with a kind, as in "mlp_in.bias": then theirs does, too, and may be one entry of a tensor, as in "down[{}]".
    layer: Mapping[str, tuple[str, ...]]
    ignored: re.Pattern[str] | None = None  # their tensors that are known not to be needed
    # Our name, their name and their tensor -> the tensor in our layout.
    adapt: Callable[[str, str, Tensor], Tensor] | None = None
    # Our layer and part -> theirs, if these depend on the layer; None: use `layer`.
    parts: Callable[[int, str], tuple[str, ...] | None] | None = None
    zeros: re.Pattern[str] | None = None  # parts of a weight that are zero and never in a checkpoint
    numbers: Sequence[int | str] | None = None  # their layer of each of ours; None: the same
    # Parts of their tensors' names -> those of the modules in transformers, by which adapters name them.
    renamed: Mapping[str, str] = field(default_factory=dict)
    more_tokens: int = 0  # last rows of their embedding, of tokens that are not in the vocabulary

    def module(self, name: str) -> str:
        """Return the name in transformers of a module that a checkpoint or an adapter may name otherwise."""
        for theirs, new in self.renamed.items():
            name = name.replace(theirs, new)
        return name

    def of(self, name: str) -> tuple[str, ...]:
        """Return the checkpoint's tensors that make up our weight of that name, as in `weight_shapes`."""
        if name in self.ends:
            return (self.ends[name],)
        layer, part, expert, kind = _within_layer(name)
        prefix = self.layer_prefix.format(layer if self.numbers is None else self.numbers[int(layer)])
        if (whole := f"{part}.{kind}".removeprefix(".")) in self.layer:
            return tuple(f"{prefix}{theirs.format(*expert)}" for theirs in self.layer[whole])
        own = None if self.parts is None else self.parts(int(layer), part)
        return tuple(f"{prefix}{theirs.format(*expert)}.{kind}" for theirs in own or self.layer[part])


class Family(Protocol):
    """A module that reads the checkpoints of one model family."""

    def decoder_config(self, raw: Mapping[str, Any]) -> DecoderConfig:
        """Return the decoder that a config.json describes. Raises ModelError for keys or values it does not know."""

    def weight_sources(self, config: DecoderConfig, names: frozenset[str]) -> Sources:
        """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""


@dataclass(frozen=True)
class RoundedPart:
    """A tensor of a checkpoint that is rounded at load."""

    name: str  # our weight that consists of it, or contains it
    out_size: int
    in_size: int
    rounding: Rounding


class Weights(Mapping[str, Weight]):
    """A decoder's weights in a checkpoint, under the names of `weight_shapes`.

    Each weight except a tied embedding is copied when it is read, so that a caller that packs the weights has only one
    of them in memory twice. The copies are aligned and stay resident; weights in a mapped file are neither.
    """

    def __init__(
        self,
        checkpoint: Tensors,
        sources: Sources,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: str,
        quantisation: Quantisation = Quantisation(),  # noqa: B008  # frozen
    ) -> None:
        """Check the tensors. dtype: of all weights except EXACT ones, which are fp32.

        Raises ModelError for a tensor that is missing or superfluous, ConfigError if the output projection is to be
        rounded and is quantised already.
        """
        self._checkpoint, self._sources, self._dtype, self._device = checkpoint, sources, dtype, device
        self._shapes = weight_shapes(config)
        self._parts = {name: weight.parts for name, weight in config.weights.items()}  # rows of each
        self._tied, self._quantisation = config.tied_embeddings, quantisation
        self._uses = {name: weight_use(config, name) for name in self._shapes}
        self._bytes: Counter[str] = Counter()
        self.on_read: Callable[[], None] = lambda: None  # called for each weight that is read
        self._forms = self._quantised_modules()
        self._check_names()

    def _quantised_modules(self) -> dict[str, Form]:
        """Return the format of each quantised weight, by the name of its tensor if it were not quantised."""
        scheme, forms = self._quantisation.scheme, {}
        if scheme is None:
            return {}
        for name in self._shapes:
            if not _may_be_quantised(name, scheme):
                continue
            for part in self._sources.of(name):
                if (form := form_of(scheme, _module(part), self._checkpoint.names)) is not None:
                    forms[part] = form
        head, own = "embedding" if self._tied else "lm_head", self._quantisation
        if own.head is not None and not own.for_head and self._sources.ends[head] in forms:
            raise ConfigError(
                f"quantization_head is 'int{own.head.bits}', and the checkpoint's output projection is "
                "quantised already; leave it out"
            )
        return forms

    def _check_names(self) -> None:
        """Raise ModelError for missing or superfluous tensors."""
        checkpoint, forms = self._checkpoint, self._forms
        parts = {part for name in self._shapes for part in self._sources.of(name)}
        needed = {_whole(part) for part in parts if not self._is_zero(part)}
        allowed: set[str] = set()
        for part, form in forms.items():
            module = _module(part)
            needed.discard(_whole(part))
            needed |= {_whole(tensor_name(module, kind)) for kind in form.needs}
            allowed |= {_whole(tensor_name(module, kind)) for kind in form.takes}
        if missing := needed - checkpoint.names:
            lacking = f"{checkpoint.path} lacks {len(missing)} tensors, among them {_first(missing)}"
            marks = (f"{_module(name)}.{mark}" for name in missing for mark in MARKS)
            if not forms and (found := set(marks) & checkpoint.names):
                lacking += f"; {_first(found)} is there, and config.json has no quantization_config that describes it"
            raise ModelError(lacking)
        superfluous = set(checkpoint.names - needed - allowed)
        if self._tied:
            superfluous -= {self._sources.ends.get("lm_head", "")}
        if self._sources.ignored is not None:
            superfluous = {name for name in superfluous if not self._sources.ignored.fullmatch(name)}
        # Some tools write a bias of zeros for every quantised linear.
        empty = {name for name in superfluous if name.endswith(".bias") and f"{_module(name)}.weight" in forms}
        superfluous -= {name for name in empty if not checkpoint[name].any()}
        if superfluous:
            raise ModelError(
                f"{checkpoint.path} has {len(superfluous)} tensors that this family does not use, among them "
                f"{_first(superfluous)}; without them it would be a different model"
            )

    def __getitem__(self, name: str) -> Weight:
        """Return a copy of the weight. Raises ModelError if its shape in the checkpoint is wrong.

        A tied embedding, which may be most of a model, is mapped from the file if it needs no conversion.
        """
        parts, rounding = self._sources.of(name), self._rounding(name)
        self.on_read()
        weight: Weight
        if any(part in self._forms for part in parts):
            weight = self._quantised(name, parts)
        elif rounding is None:
            weight = self._plain(name, parts)
        else:
            weight = self._rounded(name, parts, rounding)
        if isinstance(weight, StackedWeight):
            weight = StackedWeight(tuple(part.to(self._device) for part in weight.parts))
            self._bytes[self._uses[name]] += sum(part.nbytes for part in weight.parts)
        else:
            weight = weight.to(self._device)
            self._bytes[self._uses[name]] += weight.nbytes
        return weight

    @property
    def nbytes(self) -> WeightBytes:
        """Bytes of the weights that were read."""
        return WeightBytes(**self._bytes)

    def _rounding(self, name: str) -> Rounding | None:
        """Return how a weight is rounded at load; None: it is not rounded.

        Routers, gates of shared experts and an indexer's weights of heads are not: they are small and affect the whole
        result.
        """
        if name == ("embedding" if self._tied else "lm_head"):
            return self._quantisation.head
        kept = _is_needed_as_numbers(name) or any(
            part in name for part in (".router.", ".shared_gate.", ".index_weights.")
        )
        return self._quantisation.linears if _is_projection(name) and not kept else None

    def _rounded(self, name: str, parts: Sequence[str], rounding: Rounding) -> Weight:
        """Return a weight that is rounded at load, except parts that are kept."""
        plain, kept = self._plain(name, parts), self._quantisation.kept(name)
        if kept == len(parts):
            return plain
        rows = sum(self._lengths(name, parts)[: len(parts) - kept])
        weight = self._quantisation.multiplied(rounding.of(plain[:rows], self._dtype, name))
        return StackedWeight((weight, plain[rows:])) if kept else weight

    def _plain(self, name: str, parts: Sequence[str]) -> Tensor:
        """Return a weight that is not quantised in the checkpoint."""
        shape = self._shapes[name]
        dtype = _dtype_of(name, self._dtype)
        if name == "embedding" and self._tied and self._device == "cpu":
            tensor = self._checkpoint[parts[0]]
            if tensor.dtype == dtype and tensor.shape == shape:
                return tensor
        weight = self._empty(shape, dtype)
        for part, home in zip(parts, torch.split(weight, self._lengths(name, parts)), strict=True):
            self._copy(name, part, home)
        return weight

    def _copy(self, name: str, part: str, home: Tensor) -> None:
        """Copy a part of a weight that is not quantised to `home`. Raises ModelError for a wrong shape or dtype."""
        if self._is_zero(part):
            home.zero_()
            return
        tensor = self._checkpoint[part]
        if name == "embedding" and self._sources.more_tokens:
            tensor = tensor[: -self._sources.more_tokens]
        ours = tensor
        if self._sources.adapt is not None and (tensor.numel() == home.numel() or tensor.dim() > home.dim()):
            ours = self._sources.adapt(name, part, tensor)
        if ours.shape != home.shape:
            raise ModelError(
                f"{self._checkpoint.path}: {part} has shape {tuple(tensor.shape)}; config.json asks for "
                f"{tuple(home.shape)}"
            )
        if tensor.dtype not in NUMBERS:
            raise ModelError(
                f"{self._checkpoint.path}: {part} is {str(tensor.dtype).removeprefix('torch.')}, without scales "
                "to convert it with; a weight that is not quantised is bfloat16, float16 or float32"
            )
        home.copy_(ours)

    def _is_zero(self, part: str) -> bool:
        """Return whether the family's checkpoints omit the tensor because it is zero."""
        zeros = self._sources.zeros
        return zeros is not None and zeros.fullmatch(part) is not None

    def _quantised(self, name: str, parts: Sequence[str]) -> Weight:
        """Return a weight that is quantised in the checkpoint, all or some parts. Dequantise it if that is needed."""
        lengths, columns = self._lengths(name, parts), self._shapes[name][1]
        rounds_rows = any(part in self._forms and self._forms[part].rounds_rows for part in parts)
        if _is_needed_as_numbers(name) or (rounds_rows and not self._quantisation.rounds_activations):
            weight = self._empty(self._shapes[name])
            for part, home in zip(parts, torch.split(weight, lengths), strict=True):
                if part in self._forms:
                    dequantised_into(home, self._read(name, part, len(home), columns))
                else:
                    self._copy(name, part, home)
            return weight
        found: list[LinearWeight] = []
        for part, rows in zip(parts, lengths, strict=True):
            if part in self._forms:
                found.append(self._read(name, part, rows, columns))
            else:
                home = self._empty((rows, columns))
                self._copy(name, part, home)
                found.append(home)
        return stacked(found)

    def _read(self, name: str, part: str, rows: int, columns: int) -> QuantisedWeight | BlockWeight | NarrowWeight:
        """Read a quantised part of a weight, with its rows in our order."""
        weight = self._forms[part].read(Module(self._checkpoint, _module(part), rows, columns), self._dtype)
        if self._quantisation.is_encoder and isinstance(weight, QuantisedWeight):
            weight = in_blocks(weight)
        order = self._row_order(name, part, rows)
        return weight if order is None else weight.rows(order)

    def _row_order(self, name: str, part: str, rows: int) -> Tensor | None:
        """Return the stored row for each of our rows of a part; None: the order is the same.

        Rows move as a bias does. All formats store [out, in], even if the family's plain weight is [in, out].
        """
        if self._sources.adapt is None:
            return None
        usual = torch.arange(rows)
        moved = self._sources.adapt(name.removesuffix("weight") + "bias", part, usual)
        return None if torch.equal(moved, usual) else moved

    def rounded_parts(self) -> dict[str, RoundedPart]:
        """Return the checkpoint's tensors that are rounded at load, except the output projection."""
        found = {}
        for name in self._shapes:
            rounding = self._rounding(name) if _is_projection(name) else None
            if rounding is not None:
                parts, columns = self._sources.of(name), self._shapes[name][1]
                lengths = list(zip(parts, self._lengths(name, parts), strict=True))
                for part, rows in lengths[: len(parts) - self._quantisation.kept(name)]:
                    found[part] = RoundedPart(name, rows, columns, rounding)
        return found

    def rounded(self, part: str, about: RoundedPart) -> QuantisedWeight:
        """Return one of `rounded_parts` with its rows in stored order. Raises ModelError for a wrong shape or dtype."""
        home = self._empty((about.out_size, about.in_size))
        self._copy(about.name, part, home)
        weight = about.rounding.of(home, self._dtype, part)
        order = self._row_order(about.name, part, about.out_size)
        return weight if order is None else weight.rows(order.argsort())

    def _lengths(self, name: str, parts: Sequence[str]) -> list[int]:
        """Return the number of rows of each part of a weight. Raises ModelError if a convolution's have other sums."""
        if name.endswith(".conv.weight") and len(parts) > 1:  # tools divide its channels differently
            lengths, count = [len(self._checkpoint[part]) for part in parts], self._shapes[name][0]
            if sum(lengths) == count:
                return lengths
            listed = " + ".join(map(str, lengths))
            raise ModelError(
                f"{self._checkpoint.path}: {', '.join(parts)} have {listed} channels; config.json asks for {count}"
            )
        return list(self._parts[name] if len(parts) > 1 else self._shapes[name][:1])

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a tensor, by default of the model's dtype. Raises ModelError if there is no memory for it."""
        dtype = dtype or self._dtype
        on_cpu = self._device == "cpu"
        try:
            return mapped(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=self._device)
        except (OSError, OverflowError, MemoryError, RuntimeError) as error:
            raise ModelError(f"there is no memory for a weight of {shape} in {dtype}: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def expected_bytes(config: DecoderConfig, sources: Sources, dtype: torch.dtype, scheme: Scheme | None) -> WeightBytes:
    """Return `Weights.nbytes` of the loaded model, computed from its config without reading files."""
    found: Counter[str] = Counter()
    for name, (shape, rows) in config.weights.items():
        parts = sources.of(name)
        lengths = rows if len(parts) > 1 else shape[:1]
        for part, length in zip(parts, lengths, strict=True):
            module = _module(part)
            form = None
            if scheme is not None and _may_be_quantised(name, scheme) and not scheme.excludes(module):
                form = scheme.form(module)
            if form is not None and not _is_needed_as_numbers(name):
                size = form.nbytes(length, shape[1])
            else:
                size = length * math.prod(shape[1:]) * _dtype_of(name, dtype).itemsize
            found[weight_use(config, name)] += size
    return WeightBytes(**found)


def _within_layer(name: str) -> tuple[str, str, list[str], str]:
    """Split a name into layer, part, expert if any, and kind: layers.3.experts.5.mlp_in.weight has experts.mlp_in."""
    _, layer, *path, kind = name.split(".")
    return layer, ".".join(p for p in path if not p.isdigit()), [p for p in path if p.isdigit()], kind


def _is_projection(name: str) -> bool:
    """Return whether a weight is a linear's within a layer."""
    return name.startswith("layers.") and name.endswith(".weight") and not EXACT.search(name)


def _may_be_quantised(name: str, scheme: Scheme) -> bool:
    """Return whether the format may quantise a weight: linears and, in GGUF files, also TABLES."""
    return _is_projection(name) or name == "lm_head" or (name in TABLES and isinstance(scheme, Gguf))


def _is_needed_as_numbers(name: str) -> bool:
    """Return whether a weight must be dequantised: the projection of a latent to keys and values.

    It is absorbed into the projections of query and output, and is small compared to a layer's other weights.
    """
    return name.endswith(".kv.weight")


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight that is not quantised. Small weights that affect the whole result stay in fp32."""
    return torch.float32 if EXACT.search(name) else dtype


def _whole(part: str) -> str:
    """Return the name of a tensor, given it or one of its entries."""
    return part.partition("[")[0]


def _module(tensor: str) -> str:
    """Return the module that a tensor of the checkpoint belongs to. An entry of a tensor is a separate module."""
    return tensor if tensor.endswith("]") else tensor.rpartition(".")[0]


def _first(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)[:3])
