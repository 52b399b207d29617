"""A simulated fleet: runs its cells, one by one or in parallel, and finds the number of replicas for a load."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from quire.config import EngineConfig, engine_config
from quire.engine.cost import DEVICES, Device, ModelCost, model_cost
from quire.errors import ConfigError
from quire.models import EMBEDDED, expected_weight_bytes, read_config
from quire.simulate.autoscaling import Autoscaler
from quire.simulate.cell import Cell
from quire.simulate.device import DeviceFile, ReplicaCost, read_device
from quire.simulate.fault_injection import Trouble
from quire.simulate.loads import drawn, jobs_of, rows_of
from quire.simulate.outcome import Outcome
from quire.simulate.replica import SimulatedHost, SimulatedReplica, host_of
from quire.simulate.simulation import no_collector
from quire.simulate.spec import FleetSpec, KindSpec

MOMENTS = 240  # approximate number of intervals of a run's time series
LOOKS = 2000  # sampled requests to check a load before it is run
MOST_REPLICAS = 4096  # upper bound of the search


def no_advance() -> None:
    """Do nothing."""


class FleetSimulation:
    """A fleet and its load. Everything is checked at construction, and it can `run` any number of times."""

    def __init__(self, spec: FleetSpec, *, leaps: bool = True) -> None:
        """leaps: see `Simulation`. Raises ConfigError for an invalid fleet."""
        self.spec = spec
        # A leap publishes the blocks of an answer at its end; stepping publishes each one when it is full. The results
        # would differ for a repeated prompt that arrives before its gateway knows of the end.
        again = spec.gateways.seconds + spec.network.to_gateway
        self._leaps = leaps and (not spec.gateways.count or spec.gateways.lag <= again)
        path = spec.directory / spec.model if spec.model else EMBEDDED
        self.model: ModelCost = model_cost(*read_config(path), expected_weight_bytes(path))
        self._devices = {kind.kind: self._device(kind) for kind in spec.replicas}
        self._configs = {kind.kind: self._config(kind) for kind in spec.replicas}
        sizes = {config.cache.block_size for config in self._configs.values()}
        if len(sizes) > 1:
            raise ConfigError(f"block sizes are {', '.join(map(str, sorted(sizes)))}; those of a fleet must be equal")
        names = {name for _, _, kind, host, name in self._places() for name in (kind.kind, host, name)}
        for one in spec.events:
            if one.target not in names:
                example = next(name for _, _, _, _, name in self._places())
                raise ConfigError(f"there is no replica, host or kind {one.target!r} to {one.what}; one is {example!r}")
        num_hosts = len({host for _, host, _, _, _ in self._places()})
        self.num_cells = min(num_hosts, -(-spec.most_replicas // spec.cell))
        if spec.autoscaling is not None and (
            spec.autoscaling.least < self.num_cells or spec.most_replicas > spec.cell * self.num_cells
        ):
            needed = -(-spec.most_replicas // spec.cell)
            raise ConfigError(
                f"up to {spec.most_replicas} replicas are {needed} cells of {spec.cell}, and each cell scales its own "
                f"share, so count and least must be at least {needed}, on as many hosts"
            )
        self._check_load()

    def _device(self, kind: KindSpec) -> Device | DeviceFile:
        if kind.device in DEVICES:
            return DEVICES[kind.device]
        path = self.spec.directory / kind.device
        found = read_device(path)
        found.check_model(path, self.model)
        return found

    def _config(self, kind: KindSpec) -> EngineConfig:
        try:
            return engine_config(num_blocks=kind.blocks, **kind.options)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"options of {kind.kind}: {error}") from error

    def _cost(self, kind: KindSpec) -> ReplicaCost:
        device, size = self._devices[kind.kind], self._configs[kind.kind].cache.block_size
        if isinstance(device, Device):
            return ReplicaCost(self.model, device, size)
        return ReplicaCost(self.model, device.step, size, device.server)

    def _places(self) -> list[tuple[int, int, KindSpec, str, str]]:
        """Return for each replica its number, its host's number, its kind, the host's name and its own name."""
        found: list[tuple[int, int, KindSpec, str, str]] = []
        hosts = 0
        for kind in self.spec.replicas:
            for i in range(kind.count):
                host = hosts + i // kind.per_host
                found.append((len(found), host, kind, f"{kind.kind}-host-{i // kind.per_host}", f"{kind.kind}-{i}"))
            hosts += -(-kind.count // kind.per_host)
        return found

    def _check_load(self) -> None:
        """Raise ConfigError for a load that exceeds the fleet's capacity even with the best batches and caches."""
        load, spec = self.spec.load, self.spec
        if load.arrivals == "trace":
            rows = rows_of(load, spec.directory)
            seconds = max(rows[-1].arrival / load.speed, 1e-9)
            rate, unshared = len(rows) / seconds, sum(row.prompt_tokens - row.prefix_tokens for row in rows) / len(rows)
            new = sum(max(1, row.new_tokens) for row in rows) / len(rows)
            if len(rows) < 2 or seconds < 60.0:
                return  # a short burst, which may wait
        else:
            rng = random.Random("lengths")
            pairs = [(drawn(rng, load.prompt_tokens), drawn(rng, load.new_tokens)) for _ in range(LOOKS)]
            unshared, new = (sum(column) / LOOKS for column in zip(*pairs, strict=True))
            rate, seconds = load.rate * load.turns, load.duration
            if seconds < 60.0:
                return
        served = 0.0
        for kind in spec.replicas:
            count = kind.count if spec.autoscaling is None or kind is not spec.replicas[0] else spec.autoscaling.most
            cost, most = self._cost(kind), self._configs[kind.kind].max_num_seqs
            a_token = cost.decode_seconds(most, most) / most
            served += count / (cost.server.arrival + unshared * cost.seconds_a_prompt_token + new * a_token)
        if rate > served:
            raise ConfigError(
                f"the load is {rate:,.1f} requests a second, and the fleet can serve {served:,.1f} at most, whatever "
                f"its batches and caches; there must be more replicas, or the queue has no end"
            )

    # ---------------------------------------------------------------------------------------------------- a cell

    def _replica(self, number: int, kind: KindSpec, host: SimulatedHost, name: str) -> SimulatedReplica:
        config = self._configs[kind.kind]
        swaps = config.cache.preemption == "swap"
        # A leap publishes blocks late: too late for the gateways of a partitioned replica, and for replicas that read
        # the blocks of a draining one.
        partitions = {one.target for one in self.spec.events if one.what == "partition"}
        leaps = self._leaps and partitions.isdisjoint((name, host.name, kind.kind))
        cost = self._cost(kind)
        if self.spec.autoscaling is not None and cost.server.peer_byte:
            leaps = False
        made = SimulatedReplica(
            number, name, kind.kind, kind.bits, host, self.model, cost, config, kind.queue,
            num_gateways=self.spec.gateways.count, host_blocks=kind.blocks if swaps else 0, leaps=leaps,
        )  # fmt: skip
        host.replicas.append(made)
        return made

    def _host(self, kind: KindSpec, name: str) -> SimulatedHost:
        device = self._devices[kind.kind]
        if isinstance(device, DeviceFile):
            host = host_of(name, device)
        else:
            host = SimulatedHost(name, device.bytes_per_second, device.bytes_per_second * kind.per_host, 0.0, 0)
        host.total = kind.host_bytes_per_second or host.total
        if kind.per_neighbour is not None:
            host.per_neighbour = kind.per_neighbour
        if kind.per_machine is not None:
            host.per_machine = kind.per_machine
        return host

    def cell(self, number: int, advance: Callable[[], None] = no_advance) -> Outcome:
        """Run one of the cells. Hosts are assigned to the cells in turns."""
        spec = self.spec
        hosts: dict[int, SimulatedHost] = {}
        replicas: list[SimulatedReplica] = []
        for _, host, kind, host_name, name in self._places():
            if host % self.num_cells == number:
                if host not in hosts:
                    hosts[host] = self._host(kind, host_name)
                replicas.append(self._replica(len(replicas), kind, hosts[host], name))
        if not replicas:
            return Outcome()
        first, at_first = spec.replicas[0], len(replicas)

        def another(count: int) -> SimulatedReplica:
            new = first.count + (count - at_first) * self.num_cells + number  # unique among the cells
            return self._replica(count, first, self._host(first, f"{first.kind}-host-{new}"), f"{first.kind}-{new}")

        seconds = spec.load.duration
        if spec.load.arrivals == "trace":
            seconds = rows_of(spec.load, spec.directory)[-1].arrival / spec.load.speed
        outcome = Outcome(resolution=max(1.0, float(math.ceil(seconds / MOMENTS))))
        jobs = jobs_of(spec, number, self.num_cells, len(replicas) / spec.num_replicas)
        made = Cell(spec, replicas, jobs, f"{spec.seed}/{number}", outcome)
        Trouble(made, spec.events)
        if spec.autoscaling is not None:
            Autoscaler(made, spec.autoscaling.share(number, self.num_cells), another)
        with no_collector():
            return made.run(advance)

    def run(self, processes: int = 1, advance: Callable[[], None] = no_advance) -> Outcome:
        """Run all cells. advance: called at the end of each request, or of each cell with several processes."""
        outcomes: list[Outcome] = []
        if processes > 1 and self.num_cells > 1:
            with ProcessPoolExecutor(processes) as pool:
                for outcome in pool.map(self.cell, range(self.num_cells)):
                    outcomes.append(outcome)
                    advance()
        else:
            outcomes = [self.cell(number, advance) for number in range(self.num_cells)]
        found, *others = outcomes
        for outcome in others:
            found.add(outcome)
        return found


# ------------------------------------------------------------------------------------------------------- searching


def with_replicas(spec: FleetSpec, count: int) -> FleetSpec:
    """Return the same fleet with `count` replicas of its first kind."""
    first, *others = spec.replicas
    return replace(spec, replicas=(replace(first, count=count), *others))


def meets(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    """Return whether all requests were served within the goals."""
    lost = outcome.counts["failed"] + outcome.counts["refused"]
    return not lost and all(outcome.figure(name) <= most for name, most in goals.items())


def least_replicas(
    spec: FleetSpec, goals: Mapping[str, float], advance: Callable[[], None] = no_advance
) -> tuple[int, Outcome, dict[int, bool]]:
    """Return the fewest replicas of the first kind with which a load meets its goals, and the numbers tried.

    Doubles the number until it is enough, then bisects. Raises ConfigError if no number is enough.
    """
    tried: dict[int, bool] = {}
    best: Outcome | None = None

    def is_enough(count: int) -> bool:
        nonlocal best
        if count not in tried:
            try:
                outcome = FleetSimulation(with_replicas(spec, count)).run()
            except ConfigError as error:
                if "the load is" not in str(error):
                    raise
                tried[count] = False
            else:
                tried[count] = meets(outcome, goals)
                best = outcome if tried[count] else best
            advance()
        return tried[count]

    high = 1
    while not is_enough(high):
        high *= 2
        if high > MOST_REPLICAS:
            shown = ", ".join(f"{name} <= {most:g} s" for name, most in goals.items())
            raise ConfigError(
                f"no number of replicas up to {MOST_REPLICAS} meets {shown}; the goal is below a request alone"
            )
        if high > 4 and _is_hopeless(spec, goals, high):
            shown = ", ".join(f"{name} <= {most:g} s" for name, most in goals.items())
            raise ConfigError(f"{shown} cannot be met: a request that is alone at a replica takes longer")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    outcome = FleetSimulation(with_replicas(spec, high)).run()
    return high, outcome, tried


def _is_hopeless(spec: FleetSpec, goals: Mapping[str, float], count: int) -> bool:
    """Return whether more replicas cannot help: one replica with a tenth of its load already misses the goals."""
    if spec.load.arrivals == "trace":
        return False
    few = replace(spec.load, rate=spec.load.rate / (10 * count))
    outcome = FleetSimulation(with_replicas(replace(spec, load=few, events=()), 1)).run()
    return outcome.ttft.count > 0 and not meets(outcome, goals)
