"""A device file: the times of a model's steps and requests on a machine, measured by `quire bench calibrate`."""

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
LONG = 256  # rows of a step with a long prompt, at about the lowest time per row
EXPONENTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True)
class StepFit:
    """Seconds of a step, fitted: a fixed part, and parts for rows, sequences, draws, linears and attention.

    t = (step + token * T + linears) * factor(T) + sequence * S + drawn * R + attention + moved. Here linears is
    (reading^p + multiplying^p)^(1/p), and attention is reading + multiplying: reading for a decoding sequence does not
    overlap with multiplying for another one's prompt. Products with keys of earlier steps have a separate part. All
    are seconds per unit. Raises ConfigError for a number that is negative or not finite.
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
    rows: tuple[tuple[float, float], ...] = ()  # numbers of rows, ascending, each with the factor of the first part

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name not in ("exponent", "rows"):
                check_number(ConfigError, one.name, getattr(self, one.name), 0.0)
        object.__setattr__(self, "rows", _pairs(self.rows))
        if self.exponent not in EXPONENTS:
            raise ConfigError(f"exponent is {self.exponent!r}; it must be one of {', '.join(map(str, EXPONENTS))}")

    def factor(self, num_rows: int) -> float:
        """Return the factor of the first part for a number of rows, since kernels compute several rows together.

        Interpolates linearly between known numbers of rows.
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
    """Return pairs of rows and factors. Raises ConfigError for invalid ones."""
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
    """Changes of step times by the load of a host, compared with an idle host."""

    reading: float = 1.0  # factor of the time of reading, since others on the host read, too
    slowness: float = 1.0  # factor of all times
    full: bool = False  # no core is free


@dataclass(frozen=True, kw_only=True)
class ServerFit:
    """Seconds that a server adds to the steps of its engine and to requests. Raises ConfigError like StepFit."""

    step: float = 0.0  # for each step
    drawn: float = 0.0  # for each token that a step draws
    request: float = 0.0  # from a request's arrival to its entry into the engine, and from a token to the client
    prompt_token: float = 0.0  # the same, for each token of the prompt
    gateway: float = 0.0  # for a request through a gateway
    peer_byte: float = 0.0  # for each byte of blocks read from another replica; 0: it reads none
    arrival: float = 0.0  # for the step that computes a request's first tokens while others decode
    mixed_row: float = 0.0  # for each row of prompts in a step in which others decode
    loaded: float = 0.0  # for each token that a step draws, while requests arrive and end
    # CPU time of event loops, gateway and clients. If no core is free, steps wait for it.
    host_request: float = 0.0
    host_step: float = 0.0  # for each step of a replica
    host_token: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            check_number(ConfigError, one.name, getattr(self, one.name), 0.0)

    def of_step(self, rates: Rates) -> tuple[float, float]:
        """Return the seconds that are added to a step, and for each token that it draws."""
        drawn = self.drawn + self.loaded
        return (self.step + self.host_step, drawn + self.host_token) if rates.full else (self.step, drawn)


@dataclass(frozen=True, kw_only=True)
class DeviceFile:
    """The measurements of a model on a machine. `kind` is a readable name of them."""

    kind: str
    model: str  # digest of the sizes that steps read and multiply
    model_name: str
    block_size: int  # tokens
    bytes_per_second: float  # read by one replica, weights and cache together
    host_bytes_per_second: float  # read by all replicas on the machine together
    per_neighbour: float = 0.0  # share by which steps take longer for each other replica that computes there
    per_machine: int = 0  # replicas, two or more, that use all of its cores when they compute; 0: some cores are free
    step: StepFit
    server: ServerFit = field(default_factory=ServerFit)
    machine: dict[str, Any] = field(default_factory=dict)  # the machine and the time of the measurement
    residuals: dict[str, Any] = field(default_factory=dict)  # of the fit

    def __post_init__(self) -> None:
        check_integer(ConfigError, "block_size", self.block_size, 1)
        for name in ("bytes_per_second", "host_bytes_per_second"):
            check_number(ConfigError, name, getattr(self, name), 1.0)
        check_number(ConfigError, "per_neighbour", self.per_neighbour, 0.0, 100.0)
        check_integer(ConfigError, "per_machine", self.per_machine, 0)

    def check_model(self, path: Path | str, model: ModelCost) -> None:
        """Raise ConfigError if the file is for another model. path: of the file."""
        if self.model != model_digest(model):
            raise ConfigError(
                f"{path} was measured with another model, {self.model_name}: calibrate with the one that is simulated"
            )


def model_digest(model: ModelCost) -> str:
    """Return a digest of everything that the time of a step depends on. The longest sequence is no part of it."""
    parts = (model.groups, model.layer_params, model.head_params, model.number_bytes, model.weights,
             model.expert_params, round(model.expert_share, 9))  # fmt: skip
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def write_device(path: Path, device: DeviceFile) -> None:
    """Write the file. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(json.dumps({"format": FORMAT} | asdict(device), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def read_device(path: Path) -> DeviceFile:
    """Read a device file. Raises ConfigError, with the path, for an invalid one."""
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


NO_DEVICE = Device("fitted", 1.0, 1.0, 1.0)  # placeholder for fitted costs


class ReplicaCost(CostModel):
    """Seconds of a replica's steps, at the current rates of its host."""

    def __init__(
        self, model: ModelCost, device: Device | StepFit, block_size: int, server: ServerFit | None = None
    ) -> None:
        """device: rates for `CostModel`, or a fit. server: the time that the server adds."""
        super().__init__(model, NO_DEVICE if isinstance(device, StepFit) else device, block_size)
        self.fit = device if isinstance(device, StepFit) else _roofline(device)
        self.server = server or ServerFit()
        self.rates = Rates()

    def time_of(self, work: StepWork) -> float:
        """Return the seconds of a step with that work."""
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
        """Return `time_of` for steps that decode `num_sequences`, as a function of the number of keys.

        It is valid until the host's rates change.
        """
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
        """Seconds per token of a long prompt, without attention."""
        fit = self.fit
        a_token = fit.token + self.model.linear_flops(1, 0) * fit.linear_flop
        return a_token * fit.factor(LONG) * self.rates.slowness


def _computing(
    exponent: int, weights: float, linears: float, longer: float, *, many: bool
) -> Callable[[Any, Any], Any]:  # fmt: skip
    """Return a function from the seconds of attention's reading and multiplying to those of linears and attention.

    weights, linears: seconds of the linears' reading and multiplying. longer: factor of linears; 1.0 if the exponent
    is 0. many: the function is for arrays.
    """
    if exponent == 0:  # as in a data sheet: the longer of all reading and all multiplying
        longest = np.maximum if many else max
        return lambda read, attended: longest(weights + read, linears + attended)
    both = power_sum(exponent, weights, linears) * longer
    return lambda read, attended: both + (read + attended)


def power_sum(exponent: int, reading: float, multiplying: float) -> float:
    """Return (reading^p + multiplying^p)^(1/p)."""
    return float((reading**exponent + multiplying**exponent) ** (1.0 / exponent))


@dataclass(frozen=True, kw_only=True)
class _Roofline(StepFit):
    """The longer of reading and multiplying: an infinite exponent, written as 0."""

    exponent: int = 0

    def __post_init__(self) -> None:
        pass


def _roofline(device: Device) -> StepFit:
    byte, flop = 1.0 / device.bytes_per_second, 1.0 / device.flops_per_second
    return _Roofline(
        step=0.0, sequence=0.0, token=0.0, drawn=0.0, weight_byte=byte, cache_byte=byte, linear_flop=flop,
        attention_flop=flop, context_flop=flop, moved_byte=1.0 / device.link_bytes_per_second,
    )  # fmt: skip
