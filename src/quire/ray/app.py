"""The application of Ray Serve: `serve run quire.ray.app:build model=... replicas=...`.

Two deployments. Each replica of the one starts `quire serve`, watches it, and says where it listens. Each of the other
is a gateway with a port of its own, one a node. Clients speak HTTP to a gateway, and a gateway to the replicas; Ray's
own proxy and handles have no part in that, so both go on when Ray's head does not.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from quire.config import CacheConfig, EngineConfig, check_options, option, options_of
from quire.errors import ConfigError, QuireError
from quire.fleet.config import GatewayConfig
from quire.fleet.process import ServerProcess
from quire.fleet.scaling import Meter
from quire.ray.membership import MEMBERS, URL
from quire.ray.scaling import stats
from quire.server.server_config import ServerConfig

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("quire.ray")

REPLICA, GATEWAY = "QuireReplica", "QuireGateway"
GRACE = 15.0  # seconds that Ray gives a replica to end: it needs one for its streams, and they for what is left
DRAIN = 5.0  # seconds in which a replica's streams have moved
LEAVE = 10.0  # seconds for which a gateway may be there after the time of its open answers is over
NO_CALLS = 0.1  # seconds between Ray's looks at its own calls that are to end first: there are none
HEALTH_PERIOD = 2.0  # seconds between two looks at a replica's health
# Options of the two commands that the application gives them, and what is given instead.
OWN = {
    "host": "gateway_host; a replica listens at its node's address",
    "port": "gateway_port; a replica takes a free one",
    "fleet_secret": "secret_file, a file that holds it",
}


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """What the application takes besides the options of `quire serve` and `quire fleet`."""

    replicas: str = option("1", "How many replicas: a number, or as in 1..8 as many of these as the load needs.")
    num_cpus: float = option(1.0, "Cores of a replica. It computes with as many threads.", lower=0.1)
    gateways: int = option(1, "How many gateways, each on a node of its own.", lower=1)
    gateway_host: str = option("127.0.0.1", "Address at which the gateways listen.")
    gateway_port: int = option(8100, "Port at which the gateways listen.", lower=1, upper=65_535)
    gateway_resource: str = option("", "Ray resource of the nodes that have a gateway. Default: any node has one.")
    secret_file: str = option("", "File with the fleet's secret, on each node. Default: a new secret.")

    def __post_init__(self) -> None:
        check_options(self)
        self.bounds()

    def bounds(self) -> tuple[int, int]:
        """The fewest replicas and the most. Raises ConfigError where `replicas` does not say."""
        least, dots, most = str(self.replicas).partition("..")
        if least.isdecimal() and (most if dots else least).isdecimal():
            found = int(least), int(most if dots else least)
            if 1 <= found[0] <= found[1]:
                return found
        raise ConfigError(f"replicas is {self.replicas!r}; it must be a number from 1 on, or two as in '1..8'")


@dataclass(frozen=True)
class Arguments:
    """What an application is built from."""

    fleet: FleetConfig
    replica: dict[str, Any]  # options of `quire serve`, which every replica gets
    gateway: dict[str, Any]  # of `quire fleet`


def parse(args: Mapping[str, Any]) -> Arguments:
    """What an application's arguments say. On a command line all of them are texts.

    An option that both commands have, such as a limit on bodies, is the gateways'; the keys of clients are also the
    replicas', whose routes would be open without.
    Raises ConfigError for an argument that is unknown or wrong.
    """
    own, gateway = (get_type_hints(config) for config in (FleetConfig, GatewayConfig))
    served = {name for config in (EngineConfig, CacheConfig, ServerConfig) for name in options_of(config)}
    found: tuple[dict[str, Any], ...] = ({}, {}, {})
    for key, value in args.items():
        name = key.replace("-", "_")
        if name in OWN:
            raise ConfigError(f"{name} is given; give {OWN[name]}")
        if name in own:
            found[0][name] = _as(own[name], name, value)
        elif name in gateway:
            found[2][name] = _as(gateway[name], name, value)
            if name == "api_key":
                found[1][name] = found[2][name]
        elif name in served:
            found[1][name] = value  # the command reads it
        else:
            close = difflib.get_close_matches(name, {*own, *gateway, *served} - {*OWN}, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see quire serve --help and quire fleet --help"
            raise ConfigError(f"there is no argument {name!r}; {hint}")
    GatewayConfig(fleet_secret="-", **found[2])  # which checks them
    return Arguments(FleetConfig(**found[0]), found[1], found[2])


def _as(hint: Any, name: str, value: Any) -> Any:
    """A value of a command line, or of YAML, as a field with that type has it."""
    if hint == tuple[str, ...]:
        return (value,) if isinstance(value, str) else tuple(value)
    [kind] = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if kind is bool:
        return {"true": True, "false": False}.get(str(value).lower(), value)
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {value!r}; it must be a number") from None


def build(args: dict[str, Any]) -> Application:
    """The application, for `serve run` or the `import_path` of a Serve config.

    args: see `FleetConfig`; all others are options of `quire serve` and `quire fleet`. Raises ConfigError where one is
    unknown or wrong.
    """
    from ray import serve

    found = parse(args)
    fleet = found.fleet
    secret = "" if fleet.secret_file else secrets.token_urlsafe(32)
    resources = {fleet.gateway_resource: 1.0} if fleet.gateway_resource else {}
    config = GatewayConfig(fleet_secret="-", **found.gateway)  # each gateway reads the secret itself
    gateway = serve.deployment(
        name=GATEWAY,
        num_replicas=fleet.gateways,
        max_replicas_per_node=1,  # a port is there once
        ray_actor_options={"num_cpus": 0.1, "resources": resources},
        health_check_period_s=HEALTH_PERIOD,
        graceful_shutdown_wait_loop_s=NO_CALLS,
        graceful_shutdown_timeout_s=config.shutdown_timeout + LEAVE,
    )
    return gateway(Gateway).bind(replicas(fleet, found.replica, secret), fleet, found.gateway, secret)


def replicas(fleet: FleetConfig, options: dict[str, Any], secret: str) -> Application:
    """The deployment of the replicas alone. options: of `quire serve`. secret: see `read_secret`."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    least, most = fleet.bounds()
    number: dict[str, Any] = {"num_replicas": least}
    if most > least:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                policy=AutoscalingPolicy(policy_function="quire.ray.scaling:policy"),
                upscale_delay_s=0.0,  # the policy itself knows when
                downscale_delay_s=0.0,
            )
        }
    deployment = serve.deployment(
        name=REPLICA,
        ray_actor_options={"num_cpus": fleet.num_cpus},
        request_router_config=RequestRouterConfig(request_router_class="quire.ray.router.QuireRouter"),
        health_check_period_s=HEALTH_PERIOD,
        graceful_shutdown_wait_loop_s=NO_CALLS,
        graceful_shutdown_timeout_s=GRACE,
        **number,
    )
    return deployment(Replica).bind(options, max(1, int(fleet.num_cpus)), secret, fleet.secret_file)


def read_secret(secret: str, path: str) -> str:
    """The fleet's secret: that one, or what a file holds. Raises ConfigError for a file that cannot be read."""
    if not path:
        return secret
    try:
        with open(path, encoding="utf-8") as file:
            found = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secret_file {path!r} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"secret_file {path!r} is empty; it must hold the fleet's secret")
    return found


class Replica:
    """A deployment: `quire serve` in a process of its own. Ray's process only watches it."""

    def __init__(self, options: dict[str, Any], num_threads: int, secret: str, secret_file: str) -> None:
        """Start it. options: of `quire serve`. Raises QuireError where it does not start."""
        import ray.util

        self._secret = read_secret(secret, secret_file)
        own = {"host": ray.util.get_node_ip_address(), "port": 0, "fleet_secret": self._secret}
        self._server = ServerProcess({**options, **own, "shutdown_timeout": DRAIN}, num_threads, _end_actor)
        self._meter = Meter()

    def url(self) -> str:
        """Where the server listens."""
        return self._server.url

    def record_routing_stats(self) -> dict[str, Any]:
        """What each router is shown. It never changes: Ray sends what does to every process."""
        return {URL: self._server.url}

    async def check_health(self) -> None:
        """Raise OSError while the server does not serve. After three times, Ray replaces this replica."""
        await asyncio.to_thread(self._server.get, "/health")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The server's load, for `quire.ray.scaling.policy`. Nothing where the server does not say."""
        try:
            state = json.loads(await asyncio.to_thread(self._server.get, "/fleet/state", self._bearer()))
            return stats(self._meter.read(state, time.monotonic()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the load of %s is not known: %s", self._server.url, error)
            return {}

    def __del__(self) -> None:
        """Ray's way to end a replica: its streams move to others first."""
        if not hasattr(self, "_server"):  # it did not start
            return
        try:
            self._server.post("/fleet/drain", self._bearer(), DRAIN)
        except OSError as error:
            log.warning("%s did not drain: %s", self._server.url, error)
        self._server.stop(GRACE - DRAIN - 1)

    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._secret}"}


class Gateway:
    """A deployment: a gateway that knows the replicas from Ray, on a thread of its own."""

    def __init__(self, replicas: DeploymentHandle, fleet: FleetConfig, options: dict[str, Any], secret: str) -> None:
        """Start it.

        replicas: a handle, of which nothing is needed but that its first call makes the router in this process.
        options: of `quire fleet`.
        """
        from quire.fleet.gateway import FleetServer  # all that is heavy

        self._first_call = replicas.url.remote()
        config = GatewayConfig(
            host=fleet.gateway_host,
            port=fleet.gateway_port,
            fleet_secret=read_secret(secret, fleet.secret_file),
            **options,
        )
        self._server = FleetServer(MEMBERS, config, log.info)
        self._thread = threading.Thread(target=self._server.run, name="quire-gateway", daemon=True)
        self._thread.start()

    def check_health(self) -> None:
        """Raise QuireError when the gateway has ended. Ray starts another one then."""
        if not self._thread.is_alive():
            raise QuireError("the gateway has ended; its error stands in the log")

    def __del__(self) -> None:
        """Ray's way to end a gateway: open answers end first. Those that take longer than Ray waits are cut."""
        if hasattr(self, "_thread"):  # it has started
            self._server.stop()
            self._thread.join()


def _end_actor(status: int) -> None:
    """End this process: a replica without its server is none, and Ray starts another one at once."""
    log.error("quire serve ended with status %d, and this replica with it", status)
    os._exit(1)
