"""The loss of accuracy by rounding weights and caches, and the gain in speed.

The measure of accuracy is that of llama.cpp's tables: the Kullback-Leibler divergence of the next token's distribution
from that of the model as it is, in nats, over all positions of a text. A quantised model differs from the one it was
made of twice: by the rounding of its weights, which is the format's loss, and by the rounding of what they are
multiplied with, which is the engine's. The model with exactly those weights, computed in fp32, stands between the two.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import ConfigError, ModelError
from quire.frontend.llm import LLM
from quire.models.decoder import Decoder
from quire.request import SamplingParams
from quire_bench.engine.throughput import measure
from quire_bench.plot import drawn
from quire_bench.workloads import workload

# Modules of the standard library that the embedded model was not trained on.
HELD_OUT = (
    "_markupbase",
    "_py_abc",
    "base64",
    "colorsys",
    "copy",
    "email/errors",
    "fileinput",
    "http/cookies",
    "importlib/_abc",
    "json/__init__",
    "multiprocessing/spawn",
    "secrets",
    "stringprep",
    "unittest/main",
    "urllib/response",
)
WEIGHTS: Mapping[str, Mapping[str, Any]] = {"int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
CACHE: Mapping[str, Any] = {"kv_cache_dtype": "int8"}
CONTEXTS = (256, 1024)  # tokens
WORKLOADS = ("single", "decode")


@dataclass(frozen=True)
class Divergence:
    """The distance of a model's next tokens from those of another one, over all positions."""

    mean: float  # Kullback-Leibler divergence, nats
    p99: float  # of the positions
    same_top: float  # share of positions with the same most probable token
    perplexity: float  # times the other one's


@dataclass(frozen=True)
class Accuracy:
    """The loss by one way of rounding."""

    name: str
    context: int  # tokens of each window
    windows: int
    whole: Divergence  # from the model as it is
    format: Divergence | None = None  # the exact weights from the model as it is, both in fp32; None: a cache's
    engine: Divergence | None = None  # from the exact weights in fp32

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self)

    def cells(self) -> list[str]:
        """A row of the table."""
        whole, parts = self.whole, [self.format, self.engine]
        return [
            self.name,
            f"{self.context:,}",
            *(f"{number:.1e}" for number in (whole.mean, whole.p99)),
            f"{100 * whole.same_top:.1f} %",
            f"{whole.perplexity:.5f}",
            *("" if part is None else f"{part.mean:.1e}" for part in parts),
        ]


HEAD = ("rounded", "context", "KLD", "p99", "same top", "perplexity", "format's loss", "engine's loss")


@dataclass(frozen=True)
class Speed:
    """New tokens a second of the workloads."""

    name: str
    tokens_per_second: Mapping[str, float]

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self)


# ------------------------------------------------------------------------------------------------- accuracy


def windows(llm: LLM, texts: Sequence[Path], context: int, most: int) -> list[list[int]]:
    """Stretches of the texts of that many tokens, at most `most`. Raises ConfigError where none is as long."""
    if llm.tokenizer is None:
        raise ConfigError(f"{llm.files.path} has no tokenizer, without which there are no texts to compare")
    found: list[list[int]] = []
    for path in texts or standard_texts():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a text: {error}") from error
        ids = llm.tokenizer.encode(text)
        found += [ids[first : first + context] for first in range(0, len(ids) - context + 1, context)]
    if not found:
        raise ConfigError(f"no text has {context} tokens; give longer ones by --text")
    return found[:most]


def standard_texts() -> list[Path]:
    """Modules of this Python's standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [path for name in HELD_OUT if (path := library / f"{name}.py").exists()]


def measure_accuracy(
    model: str | None, texts: Sequence[Path], most: int, options: Mapping[str, Any]
) -> Iterator[Accuracy]:
    """Yield the accuracy of each way of rounding."""
    common = {"num_speculative_tokens": 0, "enable_prefix_caching": False} | dict(options)
    exact = common | {"dtype": "float32"}
    for context in CONTEXTS:
        plain = LLM(model, **common)
        stretches = windows(plain, texts, context - 1, most)  # and the token that is drawn
        as_it_is, in_fp32 = logits_of(plain, stretches), logits_of(LLM(model, **exact), stretches)
        for name, rounded in WEIGHTS.items() if context == CONTEXTS[0] else ():
            found = logits_of(LLM(model, **common, **rounded), stretches)
            twin = logits_of(LLM(model, **exact, **rounded, quantization_activations="bf16"), stretches)
            yield Accuracy(
                name,
                context,
                len(stretches),
                divergence(as_it_is, found, stretches),
                divergence(in_fp32, twin, stretches),
                divergence(twin, found, stretches),
            )
        found = logits_of(LLM(model, **common, **CACHE), stretches)
        yield Accuracy("int8 cache", context, len(stretches), divergence(as_it_is, found, stretches))


def logits_of(llm: LLM, stretches: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits of every token after the first one: of each stretch [T - 1, V]."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    found = []
    for stretch in stretches:
        with recorded_logits(llm) as calls:
            llm.generate([list(stretch)], params)
        logits = torch.cat(calls[1:])  # the first call is for the token that is drawn
        if len(logits) != len(stretch) - 1:
            raise ModelError(f"{len(logits)} rows of logits were computed for the last {len(stretch) - 1} tokens")
        found.append(logits)
    return found


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[Tensor]]:
    """While this is open, the logits that the model computes are collected.

    Raises ConfigError for a model that transformers computes.
    """
    decoder = llm.decoder
    if not isinstance(decoder, Decoder):
        raise ConfigError("accuracy is measured of models of Quire's own decoder; this one is transformers'")
    compute, calls = decoder.logits, list[Tensor]()

    def logits(hidden: Tensor) -> Tensor:
        calls.append(compute(hidden).clone())
        return calls[-1].clone()  # the sampler may change it

    decoder.logits = logits  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        del decoder.logits  # the method again


def divergence(
    wanted: Sequence[Tensor],  # of each stretch [T - 1, V]
    found: Sequence[Tensor],  # of each stretch [T - 1, V]
    stretches: Sequence[Sequence[int]],
) -> Divergence:
    """Return the distance of `found` from `wanted`."""
    distances, same, losses = [], [], [0.0, 0.0]
    for ours, theirs, ids in zip(found, wanted, stretches, strict=True):
        p, q = (torch.log_softmax(logits.double(), -1) for logits in (theirs, ours))
        distances.append((p.exp() * (p - q)).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).double())
        for i, logs in enumerate((p, q)):
            losses[i] += F.nll_loss(logs, torch.tensor(ids[1:]), reduction="sum").item()
    every = torch.cat(distances)
    return Divergence(
        float(every.mean()),
        float(every.quantile(0.99)),
        float(torch.cat(same).mean()),
        math.exp((losses[1] - losses[0]) / len(every)),
    )


# ---------------------------------------------------------------------------------------------------- speed


def measure_speed(model: str | None, runs: int, options: Mapping[str, Any]) -> list[Speed]:
    """Return the speed of the model unchanged and with each way of rounding, in alternation."""
    ways: dict[str, Mapping[str, Any]] = {"as it is": {}, **WEIGHTS, "int8 cache": CACHE}
    seconds: dict[str, dict[str, list[float]]] = {name: {each: [] for each in WORKLOADS} for name in ways}
    engines = {name: LLM(model, num_speculative_tokens=0, **options, **way) for name, way in ways.items()}
    for turn in range(runs + 1):
        for name, llm in engines.items():
            for each in WORKLOADS:
                took = measure(llm, workload(each), warmup=0, runs=1).median
                if turn:  # the first one does not count
                    seconds[name][each].append(took)
    new_tokens = {each: workload(each).num_new_tokens for each in WORKLOADS}
    return [
        Speed(name, {each: new_tokens[each] / statistics.median(took) for each, took in of.items()})
        for name, of in seconds.items()
    ]


def plot(path: Path, accuracies: Sequence[Accuracy], speeds: Sequence[Speed]) -> None:
    """Divergence against the speed of a single stream. Raises ConfigError where that cannot be drawn."""
    rate = {speed.name: speed.tokens_per_second["single"] for speed in speeds}
    with drawn(path, 1, 1, (7, 5)) as (_, [[panel]]):
        for one in accuracies:
            panel.plot(rate[one.name], one.whole.mean, "o")
            panel.annotate(f" {one.name}, {one.context:,} tokens", (rate[one.name], one.whole.mean))
        panel.axvline(rate["as it is"], linestyle=":", label="as it is")
        panel.set_yscale("log")
        panel.set_xlim(left=0)
        panel.set_xlabel("new tokens a second, single stream")
        panel.set_ylabel("mean KL divergence, nats")
        panel.legend()
