"""The specification of a simulation: a fleet, its load and its faults, from a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from quire.config import check_options, option
from quire.errors import ConfigError, check_integer, check_known, check_number

HAPPENINGS = ("kill", "hang", "slow", "partition")
GOALS = ("ttft", "itl", "e2e")
LEVELS = ("mean", "p50", "p90", "p99", "max")
CELL = 64  # replicas
MAX_REPLICAS = 100_000
TINY = 1e-9  # for numbers that must be positive


class Checked:
    """A section whose values are checked by the bounds of their options. Raises ConfigError for invalid ones."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Lengths(Checked):
    """Numbers of tokens of prompts or answers: log-normal, within bounds. With a spread of 0, all are equal."""

    median: float = option(MISSING, "Median.", lower=1.0)
    spread: float = option(0.0, "Standard deviation of the logarithm.", lower=0.0, upper=10.0)
    least: int = option(1, "Least number.", lower=1)
    most: int = option(2**20, "Largest number.", lower=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(ConfigError, "most", self.most, self.least)


@dataclass(frozen=True, kw_only=True)
class LoadSpec(Checked):
    """Arrivals and lengths of requests."""

    arrivals: str = option("poisson", "Arrivals.", choices=("poisson", "gamma", "bursts", "trace"))
    rate: float = option(
        1.0, "Requests a second to the whole fleet; with several turns, new conversations a second.", lower=TINY
    )
    duration: float = option(600.0, "Seconds in which they begin.", lower=TINY)
    prompt_tokens: Lengths = field(default_factory=lambda: Lengths(median=256))  # the new part of a prompt
    new_tokens: Lengths = field(default_factory=lambda: Lengths(median=128))
    variation: float = option(2.0, "gamma: variation coefficient of the time between two arrivals.", lower=TINY)
    burst_factor: float = option(5.0, "bursts: multiple of the usual rate.", lower=TINY)
    burst_seconds: float = option(10.0, "bursts: average duration.", lower=TINY)
    burst_every: float = option(60.0, "bursts: average seconds from one to the next.", lower=TINY)
    prefixes: int = option(0, "Different prefixes, the n-th drawn with a weight of 1 / n; 0: none.", lower=0)
    prefix_tokens: int = option(0, "Tokens of each prefix.", lower=0)
    turns: int = option(
        1, "Of a conversation: each prompt is the whole conversation and a new part.", lower=1, upper=1000
    )
    think: float = option(5.0, "Average seconds from an answer to the next turn.", lower=0.0)
    trace: str = ""  # a file
    speed: float = option(1.0, "Factor by which a trace is replayed faster than it was recorded.", lower=TINY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.arrivals == "trace") != bool(self.trace):
            raise ConfigError(
                f"arrivals is {self.arrivals!r} and trace is {self.trace!r}; a trace has its own arrivals"
            )
        if bool(self.prefixes) != bool(self.prefix_tokens):
            raise ConfigError(
                f"prefixes is {self.prefixes} and prefix_tokens is {self.prefix_tokens}; give both or neither"
            )


@dataclass(frozen=True, kw_only=True)
class KindSpec(Checked):
    """Replicas of one kind."""

    kind: str
    device: str  # a device file, or a name of DEVICES
    count: int = option(1, "Replicas.", lower=1, upper=MAX_REPLICAS)
    blocks: int = option(1024, "Blocks of each replica's cache.", lower=1)
    per_host: int = option(1, "Replicas on each machine.", lower=1)
    host_bytes_per_second: float = option(
        0.0, "Read by all replicas of a machine together; 0: the device file's number.", lower=0.0
    )
    per_neighbour: float | None = option(
        None, "Share by which steps take longer for each other computing replica of a machine. Default: the device's.",
        lower=0.0, upper=100.0,
    )  # fmt: skip
    per_machine: int | None = option(
        None, "Replicas that use all cores of a machine, so they wait for event loops, gateway and clients. Default: "
        "the device's.", lower=0,
    )  # fmt: skip
    bits: str = "same"  # answers move only among replicas with the same value
    queue: int = option(1024, "Most waiting requests: further ones are refused.", lower=0)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine: max_num_seqs, block_size, ...

    def __post_init__(self) -> None:
        for name in ("kind", "device"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a text")
        super().__post_init__()
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options is {self.options!r}; it must be options of the engine with their values")


@dataclass(frozen=True, kw_only=True)
class GatewaySpec(Checked):
    """Gateways. Without any, requests go to the replicas in turns."""

    count: int = option(1, "Gateways.", lower=0, upper=1024)
    seconds: float = option(0.0015, "Time of a request in a gateway.", lower=0.0)
    lag: float = option(0.001, "Seconds until a replica's report is known.", lower=0.0)


@dataclass(frozen=True, kw_only=True)
class NetworkSpec(Checked):
    """Latencies in seconds."""

    to_gateway: float = option(0.0002, "Between clients and gateways.", lower=0.0)
    to_replica: float = option(0.0002, "Between gateways and replicas.", lower=0.0)
    jitter: float = option(0.0, "Average addition to a latency, as a share of it.", lower=0.0)


@dataclass(frozen=True, kw_only=True)
class ClientSpec(Checked):
    """Timeout and retries of clients."""

    timeout: float = option(0.0, "Seconds that an answer may take; 0: no limit.", lower=0.0)
    retries: int = option(2, "After an error or a timeout.", lower=0, upper=100)
    backoff: float = option(0.5, "Seconds before the first retry, doubled for each further one.", lower=0.0)


@dataclass(frozen=True, kw_only=True)
class AutoscalingSpec(Checked):
    """Autoscaling of the first kind of replicas."""

    least: int = option(1, "Least number of replicas.", lower=1, upper=MAX_REPLICAS)
    most: int = option(MISSING, "Largest number of replicas.", lower=1, upper=MAX_REPLICAS)
    every: float = option(10.0, "Seconds from one decision to the next.", lower=0.01)
    start_seconds: float = option(5.0, "Seconds until a new replica serves.", lower=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(ConfigError, "most", self.most, self.least, MAX_REPLICAS)

    def share(self, number: int, count: int) -> AutoscalingSpec:
        """Return the spec of cell `number` of `count`: the bounds are divided among the cells."""
        least, most = (whole // count + (number < whole % count) for whole in (self.least, self.most))
        return replace(self, least=least, most=most)


@dataclass(frozen=True, kw_only=True)
class Happening(Checked):
    """A fault."""

    what: str
    target: str  # the name of a replica (KIND-N), a host (KIND-host-N) or a kind
    at: float = option(MISSING, "Seconds.", lower=0.0)
    duration: float = 5.0  # seconds until it is over; a killed replica restarts then, with an empty cache
    factor: float = option(2.0, "slow: factor of the time of steps.", lower=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(ConfigError, "for", self.duration, 0.0)


@dataclass(frozen=True, kw_only=True)
class FleetSpec(Checked):
    """A fleet, its load and its faults."""

    replicas: tuple[KindSpec, ...]
    load: LoadSpec = field(default_factory=LoadSpec)
    gateways: GatewaySpec = field(default_factory=GatewaySpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    clients: ClientSpec = field(default_factory=ClientSpec)
    autoscaling: AutoscalingSpec | None = None
    events: tuple[Happening, ...] = ()
    goal: Mapping[str, float] = field(default_factory=dict)  # seconds, by figure such as ttft_p90
    model: str = ""  # a config.json or its directory; empty: the embedded model
    cell: int = option(
        CELL, "Most replicas that gateways choose among; larger fleets have several cells.", lower=1, upper=256
    )
    seed: int = option(0, "Seed of all random numbers.", lower=0)
    directory: Path = Path()  # base of relative paths

    def __post_init__(self) -> None:
        super().__post_init__()
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
