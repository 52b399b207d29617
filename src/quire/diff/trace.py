"""Trace: the output of every operator for some prompts, with a file of bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import torch
from torch import Tensor

from quire.errors import ConfigError

VERSION = 1
MOST_FETCHED = 2**32  # bytes of a trace at a URL
TIMEOUT = 30.0  # s without a byte from a URL
MARK = "quire_trace"  # the key of the version in the file's metadata
SAMPLED = 16  # columns of an output that is not kept whole


@dataclass(frozen=True)
class Output:
    """The output of an operator for one prompt. It is whole, or has some columns and a digest of each row."""

    values: Tensor  # [T, width], or [T, SAMPLED]
    columns: Tensor | None = None  # int64 [SAMPLED]; None: all
    digests: Tensor | None = None  # int64 [T]; None: it is whole

    def reduced(self) -> Output:
        """Return some columns, and digests of the values in fp32, so that runs of different dtypes compare."""
        if self.columns is not None:
            return self
        rows = (self.values.float() + 0.0).contiguous().cpu()  # -0.0 becomes 0.0
        found = [int.from_bytes(blake2b(row.numpy(), digest_size=8).digest(), "little", signed=True) for row in rows]
        columns = sampled_columns(self.values.shape[1])
        return Output(self.values[:, columns].clone(), columns, torch.tensor(found))


def sampled_columns(width: int) -> Tensor:
    """Return the columns of a reduced output: up to SAMPLED, at even distances from the first to the last."""
    return torch.linspace(0, width - 1, min(width, SAMPLED)).round().long()


@dataclass
class Prompt:
    """The run of one prompt."""

    tokens: list[int]
    outputs: dict[str, Output] = field(default_factory=dict)  # by name, in the order of computation
    best: list[int] = field(default_factory=list)  # of each row: the most probable next token
    greedy: list[int] = field(default_factory=list)  # tokens that continue it

    @property
    def is_whole(self) -> bool:
        """True if all values of all outputs are kept."""
        return all(output.columns is None for output in self.outputs.values())


@dataclass(frozen=True)
class About:
    """The description of a run."""

    model: str
    settings: str  # of the run, for people
    formats: str  # dtypes and quantisation: two runs with the same ones compute with the same numbers
    widths: Mapping[str, int]  # of each output, in the order of computation
    ends: Mapping[str, str]  # embedding, each layer, final_norm, logits: the name of the output after it
    operators: Mapping[str, str]  # of each output: its operator
    unit: float  # the relative rounding error of the dtype, half the distance between 1 and the next number

    @property
    def granularity(self) -> str:
        """The parts of the model that have outputs: operators, or only layers."""
        return "operators" if any(name != end for name, end in self.ends.items()) else "layers"


@dataclass
class Trace:
    """The outputs of one run for all prompts."""

    about: About
    prompts: list[Prompt] = field(default_factory=list)

    def by_layer(self) -> Trace:
        """Return the outputs after each layer alone."""
        ends = self.about.ends
        about = asdict(self.about) | {
            "widths": {name: self.about.widths[end] for name, end in ends.items()},
            "ends": dict(zip(ends, ends, strict=True)),
            "operators": dict(zip(ends, ends, strict=True)),
        }
        prompts = [
            Prompt(one.tokens, {name: one.outputs[end] for name, end in ends.items()}, one.best, one.greedy)
            for one in self.prompts
        ]
        return Trace(About(**about), prompts)

    def save(self, path: Path) -> None:
        """Write the trace as a safetensors file. Raises ConfigError if that is not possible."""
        from safetensors.torch import save

        tensors = {}
        for index, prompt in enumerate(self.prompts):
            for name, output in prompt.outputs.items():
                tensors[f"{index}/{name}"] = output.values.contiguous()
                if output.digests is not None:
                    tensors[f"{index}/{name}/digests"] = output.digests
        runs = [{"tokens": one.tokens, "best": one.best, "greedy": one.greedy} for one in self.prompts]
        described = json.dumps({"about": asdict(self.about), "prompts": runs})
        try:
            path.write_bytes(save(tensors, {MARK: str(VERSION), "trace": described}))
        except OSError as error:
            raise ConfigError(f"the trace {path} cannot be written: {error}") from error

    @classmethod
    def fetch(cls, url: str) -> Trace:
        """Read a trace from a URL. Raises ConfigError if it cannot be read, and the errors of `load`."""
        with TemporaryDirectory(prefix="quire-diff-") as directory:
            path = Path(directory, "trace")
            try:
                with urlopen(url, timeout=TIMEOUT) as answer, path.open("wb") as file:
                    size = answer.headers.get("Content-Length")
                    while piece := answer.read(2**20):
                        file.write(piece)
                        if file.tell() > MOST_FETCHED:
                            raise ConfigError(
                                f"{url} has more than {MOST_FETCHED / 2**30:g} GiB; fetch the trace with another "
                                "program and give its file, or save it with a smaller --size"
                            )
                    if size is not None and file.tell() != int(size):
                        raise ConfigError(f"the trace at {url} ended after {file.tell()} of {size} bytes; try again")
            except ConfigError:
                raise
            except Exception as error:  # of the network, the protocol or the disk
                raise ConfigError(f"the trace at {url} cannot be fetched: {error}") from error
            return cls.load(path, url)

    @classmethod
    def load(cls, path: Path, name: str = "") -> Trace:
        """Read a trace. Raises ConfigError for a file that is not one, or is one of another version.

        name: of the file, for errors; its path if empty.
        """
        from safetensors import SafetensorError, safe_open

        shown = name or path
        about = "a trace is a file that quire diff --save TRACE MODEL has written"
        try:
            with safe_open(path, "pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                if MARK not in metadata:
                    raise ConfigError(f"{shown} is a safetensors file, but not a trace; {about}")
                if metadata[MARK] != str(VERSION):
                    raise ConfigError(
                        f"{shown} is a trace of version {metadata[MARK][:20]}, and this quire reads version {VERSION}; "
                        "write it again with a quire whose traces have this version"
                    )
                described = json.loads(metadata["trace"])
                trace = cls(About(**described["about"]), [Prompt(**one) for one in described["prompts"]])
                kept = set(file.keys())
                for index, prompt in enumerate(trace.prompts):
                    for name, width in trace.about.widths.items():
                        values, digests = file.get_tensor(f"{index}/{name}"), None
                        if f"{index}/{name}/digests" in kept:
                            digests = file.get_tensor(f"{index}/{name}/digests")
                        columns = None if digests is None else sampled_columns(width)
                        shape = (len(prompt.tokens), width if columns is None else len(columns))
                        if values.shape != shape:
                            raise ValueError(f"{index}/{name} has shape {tuple(values.shape)}, not {shape}")
                        prompt.outputs[name] = Output(values, columns, digests)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{shown} is not a trace ({error}); {about}") from error
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{shown} is a damaged trace ({error}); write it again") from error
        return trace
