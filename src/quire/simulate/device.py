"""A device file: how long a model's steps and requests take on a machine, as `quire bench calibrate` measured it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.engine.cost import CostModel, Device, ModelCost, StepWork
from quire.errors import ConfigError, check_integer, check_number

FORMAT = 6
LONG = 256  # rows of a step that computes a long prompt: about where each takes least
EXPONENTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True)
class StepFit:
    """Seconds of a step, fitted: a fixed part, parts for rows, sequences and draws, for linears and for attention.

    t = (step + token * T + linears) * factor(T) + sequence * S + drawn * R + attention + moved, linears being
    (reading^p + multiplying^p)^(1/p), and attention reading + multiplying: what a sequence that decodes reads does not
    overlap with what another one's prompt multiplies. Products with keys of earlier steps have a part of their own. All
    are seconds a unit. Raises ConfigError for a number that is negative or not finite.
    """

    step: float
    sequence: float
    token: float
    drawn: float
    weight_byte: float
    cache_byte: float
    linear_flop: float
    attention_flop: float  # with keys of the same step
    context_flop: float  # with keys of earlier ones
    moved_byte: float = 0.0  # to the host and back
    exponent: int = 1
    rows: tuple[
        tuple[float, float], ...
    ] = ()  # rows, ascending, and the factor of the first part of steps with so many

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name not in ("exponent", "rows"):
                check_number(ConfigError, one.name, getattr(self, one.name), 0.0)
        object.__setattr__(self, "rows", _pairs(self.rows))
        if self.exponent not in EXPONENTS:
            raise ConfigError(f"exponent is {self.exponent!r}; it must be one of {', '.join(map(str, EXPONENTS))}")

    def factor(self, num_rows: int) -> float:
        """How many times as long the first part takes with so many rows: kernels compute rows by the dozen.

        Between two numbers of rows that are known, a line.
        """
        known = self.rows
        if not known:
            return 1.0
        at = bisect_left(known, (num_rows,))
        if at == 0 or at == len(known):
            return known[min(at, len(known) - 1)][1]
        (low, before), (high, after) = known[at - 1 : at + 1]
        return before + (after - before) * (num_rows - low) / (high - low)


def _pairs(given: Any) -> tuple[tuple[float, float], ...]:
    """Rows and factors. Raises ConfigError for what is none."""
    try:
        found = tuple((float(rows), float(factor)) for rows, factor in given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rows is {given!r}; it must be pairs of a number of rows and a factor") from error
    for rows, factor in found:
        check_number(ConfigError, "rows", rows, 1.0)
        check_number(ConfigError, f"the factor of {rows:g} rows", factor, 1e-3)
    if any(after[0] <= before[0] for before, after in pairwise(found)):
        raise ConfigError(f"rows is {given!r}; its numbers of rows must ascend")
    return found


class Rates(NamedTuple):
    """How steps next to others differ from those on a machine that has nothing else to do."""

    reading: float = 1.0  # so many times as long does it take, as others on the host read, too
    slowness: float = 1.0  # so many times as long does everything take
    full: bool = False  # there is no core to spare


@dataclass(frozen=True, kw_only=True)
class ServerFit:
    """What a server adds to the steps of its engine and to requests, in seconds. Raises ConfigError as StepFit."""

    step: float = 0.0  # to each step
    drawn: float = 0.0  # to it, for each token that it draws
    request: float = 0.0  # from a request's arrival to its place in the engine, and from a token to the client
    prompt_token: float = 0.0  # the same, for each token of the prompt
    gateway: float = 0.0  # of a request, that comes through a gateway
    peer_byte: float = 0.0  # of blocks that it reads from another replica; 0: it reads none
    arrival: float = 0.0  # to the step that computes a request's first tokens while others decode
    mixed_row: float = 0.0  # to a step in which others decode, for each row of its prompts
    loaded: float = 0.0  # to a step, for each token that it draws, where requests come and go
    # CPU time of event loops, gateway and clients. Where no core is free steps wait for it.
    host_request: float = 0.0
    host_step: float = 0.0  # of a replica
    host_token: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            check_number(ConfigError, one.name, getattr(self, one.name), 0.0)

    def of_step(self, rates: Rates) -> tuple[float, float]:
        """What is added to a step, and for each token that it draws."""
        drawn = self.drawn + self.loaded
        return (self.step + self.host_step, drawn + self.host_token) if rates.full else (self.step, drawn)


@dataclass(frozen=True, kw_only=True)
class DeviceFile:
    """A machine and a model. `kind` names what was measured, for people."""

    kind: str
    model: str  # digest of what steps read and multiply
    model_name: str
    block_size: int  # tokens
    bytes_per_second: float  # that one replica reads, weights and cache together
    host_bytes_per_second: float  # that all replicas on the machine read together
    per_neighbour: float = 0.0  # how much longer steps take for each other replica that computes there, as a share
    per_machine: int = 0  # replicas, two or more, that have all of its cores when they compute; 0: some are free
    step: StepFit
    server: ServerFit = field(default_factory=ServerFit)
    machine: dict[str, Any] = field(default_factory=dict)  # what was measured on, and when
    residuals: dict[str, Any] = field(default_factory=dict)  # of the fit

    def __post_init__(self) -> None:
        check_integer(ConfigError, "block_size", self.block_size, 1)
        for name in ("bytes_per_second", "host_bytes_per_second"):
            check_number(ConfigError, name, getattr(self, name), 1.0)
        check_number(ConfigError, "per_neighbour", self.per_neighbour, 0.0, 100.0)
        check_integer(ConfigError, "per_machine", self.per_machine, 0)

    def check_model(self, path: Path | str, model: ModelCost) -> None:
        """Raise ConfigError where it is of another model. path: of the file."""
        if self.model != model_digest(model):
            raise ConfigError(
                f"{path} was measured with another model, {self.model_name}: calibrate with the one that is simulated"
            )


def model_digest(model: ModelCost) -> str:
    """A name for all that the time of a step depends on; longer or shorter sequences are the same model."""
    parts = (model.groups, model.layer_params, model.head_params, model.number_bytes, model.weights,
             model.expert_params, round(model.expert_share, 9))  # fmt: skip
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def write_device(path: Path, device: DeviceFile) -> None:
    """Write the file. Raises ConfigError where it cannot be written."""
    try:
        path.write_text(json.dumps({"format": FORMAT} | asdict(device), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def read_device(path: Path) -> DeviceFile:
    """A device file. Raises ConfigError, with the file, where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no device file {path}; quire bench calibrate writes one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a device file: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path} is no device file of format {FORMAT}; quire bench calibrate writes one")
    try:
        made = {name: value for name, value in found.items() if name != "format"}
        made["step"] = StepFit(**_mapping(made, "step"))
        made["server"] = ServerFit(**_mapping(made, "server"))
        return DeviceFile(**made)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _mapping(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = found.get(name)
    if not isinstance(part, dict):
        raise ConfigError(f"{name} is {part!r}; it must be an object of numbers")
    return part


NO_DEVICE = Device("fitted", 1.0, 1.0, 1.0)  # of a cost that is fitted


class ReplicaCost(CostModel):
    """Seconds of a replica's steps, at the rates that a host has at the time."""

    def __init__(
        self, model: ModelCost, device: Device | StepFit, block_size: int, server: ServerFit | None = None
    ) -> None:
        """device: its rates, of which steps take what `CostModel` says, or a fit. server: what it adds."""
        super().__init__(model, NO_DEVICE if isinstance(device, StepFit) else device, block_size)
        self.fit = device if isinstance(device, StepFit) else _roofline(device)
        self.server = server or ServerFit()
        self.rates = Rates()

    def time_of(self, work: StepWork) -> float:
        """Seconds of a step with that much work."""
        fit, server, rates = self.fit, self.server, self.rates
        longer = fit.factor(work.num_tokens)
        weights, linears = fit.weight_byte * work.weight_bytes * rates.reading, fit.linear_flop * work.linear_flops
        within = work.attention_flops - work.context_flops
        both = _computing(fit.exponent, weights, linears, longer, many=False)(
            fit.cache_byte * work.cache_bytes * rates.reading,
            fit.attention_flop * within + fit.context_flop * work.context_flops,
        )
        own = (fit.step + fit.token * work.num_tokens) * longer
        own += fit.sequence * work.num_sequences + fit.drawn * work.num_drawn + fit.moved_byte * work.moved_bytes
        if work.num_decoding:
            own += server.arrival * work.num_begun + server.mixed_row * (work.num_tokens - work.num_decoding)
        step, drawn = server.of_step(rates)
        return float((own + both + step + drawn * work.num_drawn) * rates.slowness)

    def decoder(self, num_sequences: int, *, many: bool = False) -> Callable[[Any], Any]:
        """As `time_of` for steps in which so many sequences decode, for each number of keys. Until a host changes."""
        weight_bytes, linear_flops = self.decode_work(num_sequences)
        fit, server, kv_bytes, pair_flops = self.fit, self.server, self.kv_bytes, self.pair_flops
        longer = fit.factor(num_sequences)
        fixed = (fit.step + fit.token * num_sequences) * longer
        fixed += fit.sequence * num_sequences + fit.drawn * num_sequences
        step, drawn = server.of_step(self.rates)
        drawn, factor, slowness = drawn * num_sequences, self.rates.reading, self.rates.slowness
        weights, linears = fit.weight_byte * weight_bytes * factor, fit.linear_flop * linear_flops
        cache_byte, context_flop = fit.cache_byte, fit.context_flop
        within = fit.attention_flop * (num_sequences * pair_flops)
        computing = _computing(fit.exponent, weights, linears, longer, many=many)

        def seconds(keys: Any) -> Any:
            read = cache_byte * ((keys + num_sequences) * kv_bytes) * factor
            both = computing(read, within + context_flop * ((keys - num_sequences) * pair_flops))
            return (fixed + both + step + drawn) * slowness

        return seconds

    @property
    def seconds_a_prompt_token(self) -> float:
        """Of a long prompt, its attention left out."""
        fit = self.fit
        a_token = fit.token + self.model.linear_flops(1, 0) * fit.linear_flop
        return a_token * fit.factor(LONG) * self.rates.slowness


def _computing(
    exponent: int, weights: float, linears: float, longer: float, *, many: bool
) -> Callable[[Any, Any], Any]:  # fmt: skip
    """Seconds of linears, which read and multiply that long, and of what attention reads and multiplies; or of arrays.

    longer: the factor of linears; 1.0 where the exponent is 0.
    """
    if exponent == 0:  # as a data sheet has it: all that is read, or all that is multiplied
        longest = np.maximum if many else max
        return lambda read, attended: longest(weights + read, linears + attended)
    both = power_sum(exponent, weights, linears) * longer
    return lambda read, attended: both + (read + attended)


def power_sum(exponent: int, reading: float, multiplying: float) -> float:
    """(reading^p + multiplying^p)^(1/p)."""
    return float((reading**exponent + multiplying**exponent) ** (1.0 / exponent))


@dataclass(frozen=True, kw_only=True)
class _Roofline(StepFit):
    """The longer of reading and multiplying: the exponent without end, written as 0."""

    exponent: int = 0

    def __post_init__(self) -> None:
        pass


def _roofline(device: Device) -> StepFit:
    byte, flop = 1.0 / device.bytes_per_second, 1.0 / device.flops_per_second
    return _Roofline(
        step=0.0, sequence=0.0, token=0.0, drawn=0.0, weight_byte=byte, cache_byte=byte, linear_flop=flop,
        attention_flop=flop, context_flop=flop, moved_byte=1.0 / device.link_bytes_per_second,
    )  # fmt: skip
