"""The specification of a simulation: a fleet, its load and its faults, from a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, check_integer, check_known, check_number

ARRIVALS = ("poisson", "gamma", "bursts", "trace")
HAPPENINGS = ("kill", "hang", "slow", "partition")
GOALS = ("ttft", "itl", "e2e")
LEVELS = ("mean", "p50", "p90", "p99", "max")
CELL = 64  # replicas
MAX_REPLICAS = 100_000


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Numbers of tokens of prompts or answers: log-normal, within bounds. With a spread of 0, all are equal."""

    median: float
    spread: float = 0.0  # standard deviation of the logarithm
    least: int = 1
    most: int = 2**20

    def __post_init__(self) -> None:
        check_number(ConfigError, "median", self.median, 1.0)
        check_number(ConfigError, "spread", self.spread, 0.0, 10.0)
        check_integer(ConfigError, "least", self.least, 1)
        check_integer(ConfigError, "most", self.most, self.least)


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """Arrivals and lengths of requests. Raises ConfigError for invalid values."""

    arrivals: str = "poisson"
    rate: float = 1.0  # requests a second to the whole fleet; with several turns, new conversations a second
    duration: float = 600.0  # seconds in which they begin
    prompt_tokens: Lengths = field(default_factory=lambda: Lengths(median=256))  # the new part of a prompt
    new_tokens: Lengths = field(default_factory=lambda: Lengths(median=128))
    variation: float = 2.0  # gamma: coefficient of variation of the time between two arrivals
    burst_factor: float = 5.0  # bursts: multiple of the usual rate
    burst_seconds: float = 10.0  # average duration of a burst
    burst_every: float = 60.0  # average seconds from one burst to the next
    prefixes: int = 0  # number of different prefixes, the n-th drawn with a weight of 1 / n; 0: none
    prefix_tokens: int = 0
    turns: int = 1  # of a conversation: each prompt is the whole conversation and a new part
    think: float = 5.0  # average seconds from an answer to the next turn
    trace: str = ""  # a file
    speed: float = 1.0  # factor by which a trace is replayed faster than it was recorded

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"arrivals is {self.arrivals!r}; it must be one of {', '.join(ARRIVALS)}")
        if (self.arrivals == "trace") != bool(self.trace):
            raise ConfigError(
                f"arrivals is {self.arrivals!r} and trace is {self.trace!r}; a trace has its own arrivals"
            )
        for name in ("rate", "duration", "variation", "burst_factor", "burst_seconds", "burst_every", "speed"):
            check_number(ConfigError, name, getattr(self, name), 1e-9)
        check_number(ConfigError, "think", self.think, 0.0)
        check_integer(ConfigError, "prefixes", self.prefixes, 0)
        check_integer(ConfigError, "prefix_tokens", self.prefix_tokens, 0)
        check_integer(ConfigError, "turns", self.turns, 1, 1000)
        if bool(self.prefixes) != bool(self.prefix_tokens):
            raise ConfigError(
                f"prefixes is {self.prefixes} and prefix_tokens is {self.prefix_tokens}; give both or neither"
            )


@dataclass(frozen=True, kw_only=True)
class KindSpec:
    """Replicas of one kind. Raises ConfigError for invalid values."""

    kind: str
    device: str  # a device file, or a name of DEVICES
    count: int = 1
    blocks: int = 1024  # of each replica's cache
    per_host: int = 1  # replicas on each machine
    host_bytes_per_second: float = 0.0  # read by all replicas of a machine together; 0: the device file's number
    # Share by which steps take longer for each other computing replica of the machine. None: the device file's.
    per_neighbour: float | None = None
    # Replicas that use all cores of a machine, so they wait for event loops, gateway and clients. None: the device's.
    per_machine: int | None = None
    bits: str = "same"  # answers move only among replicas with the same value
    queue: int = 1024  # most waiting requests: further ones are refused
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine: max_num_seqs, block_size, ...

    def __post_init__(self) -> None:
        for name in ("kind", "device"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a text")
        check_integer(ConfigError, "count", self.count, 1, MAX_REPLICAS)
        check_integer(ConfigError, "blocks", self.blocks, 1)
        check_integer(ConfigError, "per_host", self.per_host, 1)
        check_integer(ConfigError, "queue", self.queue, 0)
        check_number(ConfigError, "host_bytes_per_second", self.host_bytes_per_second, 0.0)
        if self.per_neighbour is not None:
            check_number(ConfigError, "per_neighbour", self.per_neighbour, 0.0, 100.0)
        if self.per_machine is not None:
            check_integer(ConfigError, "per_machine", self.per_machine, 0)
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options is {self.options!r}; it must be options of the engine with their values")


@dataclass(frozen=True, kw_only=True)
class GatewaySpec:
    """Gateways. Without any, requests go to the replicas in turns. Raises ConfigError for invalid values."""

    count: int = 1
    seconds: float = 0.0015  # time of a request in a gateway
    lag: float = 0.001  # seconds until a replica's report is known

    def __post_init__(self) -> None:
        check_integer(ConfigError, "count", self.count, 0, 1024)
        check_number(ConfigError, "seconds", self.seconds, 0.0)
        check_number(ConfigError, "lag", self.lag, 0.0)


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """Latencies in seconds. Raises ConfigError for negative values."""

    to_gateway: float = 0.0002
    to_replica: float = 0.0002
    jitter: float = 0.0  # average addition to a latency, as a share of it

    def __post_init__(self) -> None:
        for one in fields(self):
            check_number(ConfigError, one.name, getattr(self, one.name), 0.0)


@dataclass(frozen=True, kw_only=True)
class ClientSpec:
    """Timeout and retries of clients. Raises ConfigError for invalid values."""

    timeout: float = 0.0  # seconds that an answer may take; 0: no limit
    retries: int = 2  # after an error or a timeout
    backoff: float = 0.5  # seconds before the first retry, doubled for each further one

    def __post_init__(self) -> None:
        check_number(ConfigError, "timeout", self.timeout, 0.0)
        check_number(ConfigError, "backoff", self.backoff, 0.0)
        check_integer(ConfigError, "retries", self.retries, 0, 100)


@dataclass(frozen=True, kw_only=True)
class AutoscalingSpec:
    """Autoscaling of the first kind of replicas. Raises ConfigError for invalid values."""

    least: int = 1
    most: int
    every: float = 10.0  # seconds from one decision to the next
    start_seconds: float = 5.0  # until a new replica serves

    def __post_init__(self) -> None:
        check_integer(ConfigError, "least", self.least, 1, MAX_REPLICAS)
        check_integer(ConfigError, "most", self.most, self.least, MAX_REPLICAS)
        check_number(ConfigError, "every", self.every, 0.01)
        check_number(ConfigError, "start_seconds", self.start_seconds, 0.0)

    def share(self, number: int, count: int) -> AutoscalingSpec:
        """Return the spec of cell `number` of `count`: the bounds are divided among the cells."""
        least, most = (whole // count + (number < whole % count) for whole in (self.least, self.most))
        return replace(self, least=least, most=most)


@dataclass(frozen=True, kw_only=True)
class Happening:
    """A fault. Raises ConfigError for invalid values."""

    what: str
    target: str  # the name of a replica (KIND-N), a host (KIND-host-N) or a kind
    at: float  # seconds
    duration: float = 5.0  # seconds until it is over; a killed replica restarts then, with an empty cache
    factor: float = 2.0  # slow: factor of the time of steps

    def __post_init__(self) -> None:
        check_number(ConfigError, "at", self.at, 0.0)
        check_number(ConfigError, "for", self.duration, 0.0)
        check_number(ConfigError, "factor", self.factor, 1.0)


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    """A fleet, its load and its faults. Raises ConfigError for invalid values."""

    replicas: tuple[KindSpec, ...]
    load: LoadSpec = field(default_factory=LoadSpec)
    gateways: GatewaySpec = field(default_factory=GatewaySpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    clients: ClientSpec = field(default_factory=ClientSpec)
    autoscaling: AutoscalingSpec | None = None
    events: tuple[Happening, ...] = ()
    goal: Mapping[str, float] = field(default_factory=dict)  # seconds, by figure such as ttft_p90
    model: str = ""  # a config.json or its directory; empty: the embedded model
    cell: int = CELL  # most replicas that gateways choose among; larger fleets have several cells
    seed: int = 0
    directory: Path = Path()  # base of relative paths

    def __post_init__(self) -> None:
        check_integer(ConfigError, "cell", self.cell, 1, 256)
        check_integer(ConfigError, "seed", self.seed, 0)
        check_goals(self.goal)
        names = [one.kind for one in self.replicas]
        if len(set(names)) < len(names):
            raise ConfigError(f"kinds of replicas are {', '.join(names)}; each name must be unique")

    @property
    def num_replicas(self) -> int:
        """The number of replicas of all kinds at the start."""
        return sum(one.count for one in self.replicas)

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas of all kinds."""
        first, scaling = self.replicas[0].count, self.autoscaling
        return self.num_replicas - first + (first if scaling is None else max(first, scaling.most))


def check_goals(goals: Mapping[str, float]) -> None:
    """Raise ConfigError for an invalid goal."""
    for name, value in goals.items():
        what, _, level = name.partition("_")
        if what not in GOALS or level not in LEVELS:
            raise ConfigError(f"goal {name!r} is unknown; it must be one such as ttft_p90, of {', '.join(GOALS)} and "
                              f"{', '.join(LEVELS)}")  # fmt: skip
        check_number(ConfigError, f"goal {name}", value, 1e-9)


# ------------------------------------------------------------------------------------------------------------ YAML


def read_spec(path: Path) -> FleetSpec:
    """Read a fleet from a YAML file. Raises ConfigError, with the file and the entry, for invalid values."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    try:
        return make_spec(found, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def make_spec(found: Any, directory: Path = Path()) -> FleetSpec:
    """Make a fleet from parsed YAML. directory: base of relative paths. Raises ConfigError."""
    if not isinstance(found, Mapping) or not isinstance(found.get("replicas"), list) or not found["replicas"]:
        raise ConfigError("there are no replicas; give a list of them, as in 'replicas: [{kind: a, device: cpu}]'")
    given: dict[str, Any] = dict(found)
    given["replicas"] = tuple(_section(KindSpec, f"replicas[{i}]", one) for i, one in enumerate(given["replicas"]))
    for name, kind in (("gateways", GatewaySpec), ("network", NetworkSpec), ("clients", ClientSpec),
                       ("autoscaling", AutoscalingSpec)):  # fmt: skip
        if name in given:
            given[name] = _section(kind, name, given[name])
    if "load" in given:
        given["load"] = _load(given["load"])
    if "events" in given:
        if not isinstance(given["events"], list):
            raise ConfigError(f"events is {given['events']!r}; it must be a list")
        given["events"] = tuple(_happening(f"events[{i}]", one) for i, one in enumerate(given["events"]))
    if "goal" in given and not isinstance(given["goal"], Mapping):
        raise ConfigError(f"goal is {given['goal']!r}; it must be figures and seconds, as in 'ttft_p90: 0.5'")
    return _section(FleetSpec, "", given | {"directory": directory})  # type: ignore[no-any-return]


def _load(found: Any) -> Any:
    if isinstance(found, Mapping):
        found = dict(found)
        for name in ("prompt_tokens", "new_tokens"):
            if isinstance(found.get(name), Mapping):
                found[name] = _section(Lengths, f"load: {name}", found[name])
            elif name in found:
                found[name] = _section(Lengths, f"load: {name}", {"median": found[name]})
    return _section(LoadSpec, "load", found)


def _happening(where: str, found: Any) -> Any:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} is {found!r}; it must be one such as {{at: 60, kill: a-0}}")
    what = [name for name in HAPPENINGS if name in found]
    if len(what) != 1:
        raise ConfigError(f"{where} has {', '.join(map(str, found))}; it must have one of {', '.join(HAPPENINGS)}")
    rest = {str(name): value for name, value in found.items() if name != what[0]}
    if "for" in rest:
        rest["duration"] = rest.pop("for")
    return _section(Happening, where, rest | {"what": what[0], "target": str(found[what[0]])})


def _section(kind: Any, where: str, found: Any) -> Any:
    """Convert a section to its class. Raises ConfigError."""
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} is {found!r}; it must have entries")
    prefix = f"{where}: " if where else ""
    given = {str(name).replace("-", "_"): value for name, value in found.items()}
    known = {one.name for one in fields(kind)}
    check_known(ConfigError, f"{prefix}there is no entry", given, known, {})
    lacking = [
        one.name for one in fields(kind)
        if one.default is MISSING and one.default_factory is MISSING and one.name not in given
    ]  # fmt: skip
    if lacking:
        raise ConfigError(f"{prefix}{lacking[0]} is missing")
    for one in fields(kind):  # YAML may have 1 for 1.0
        if str(one.type) == "float" and isinstance(given.get(one.name), int) and given[one.name] is not True:
            given[one.name] = float(given[one.name])
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error
