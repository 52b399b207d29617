"""The application of Ray Serve: `serve run quire.ray.app:build model=... replicas=...`.

There are two deployments. Each replica of the first one starts `quire serve`, watches it, and publishes its address.
Each replica of the second one is a gateway with its own port, one per node. Clients speak HTTP to a gateway, and a
gateway to the replicas. Ray's proxy and handles are not involved, so serving continues while Ray's head is down.
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
GRACE = 15.0  # seconds that Ray waits for a replica to end, which first moves its streams and then stops its server
DRAIN = 5.0  # seconds in which a replica's streams move
LEAVE = 10.0  # seconds that a gateway may take to end after its shutdown timeout
NO_CALLS = 0.1  # seconds between Ray's checks for its own open calls, which do not exist here
HEALTH_PERIOD = 2.0  # seconds between two health checks of a replica
# Options of the two commands that the application sets itself, and the arguments to use instead.
OWN = {
    "host": "gateway_host; a replica listens at its node's address",
    "port": "gateway_port; a replica takes a free one",
    "fleet_secret": "secret_file, a file that holds it",
}


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Arguments of the application in addition to the options of `quire serve` and `quire fleet`."""

    replicas: str = option("1", "Number of replicas, or a range such as 1..8 for autoscaling by load.")
    num_cpus: float = option(1.0, "Cores of a replica. It computes with as many threads.", lower=0.1)
    gateways: int = option(1, "Number of gateways, each on a separate node.", lower=1)
    gateway_host: str = option("127.0.0.1", "Address at which the gateways listen.")
    gateway_port: int = option(8100, "Port at which the gateways listen.", lower=1, upper=65_535)
    gateway_resource: str = option("", "Ray resource of the nodes that have a gateway. Default: any node has one.")
    secret_file: str = option("", "File with the fleet's secret, on each node. Default: a new secret.")

    def __post_init__(self) -> None:
        check_options(self)
        self.bounds()

    def bounds(self) -> tuple[int, int]:
        """Return the least and the most number of replicas. Raises ConfigError for an invalid `replicas`."""
        least, dots, most = str(self.replicas).partition("..")
        if least.isdecimal() and (most if dots else least).isdecimal():
            found = int(least), int(most if dots else least)
            if 1 <= found[0] <= found[1]:
                return found
        raise ConfigError(f"replicas is {self.replicas!r}; it must be a number from 1 on, or two as in '1..8'")


@dataclass(frozen=True)
class Arguments:
    """The parsed arguments of an application."""

    fleet: FleetConfig
    replica: dict[str, Any]  # options of `quire serve` for every replica
    gateway: dict[str, Any]  # options of `quire fleet`


def parse(args: Mapping[str, Any]) -> Arguments:
    """Parse an application's arguments. On a command line all of them are strings.

    An option that both commands have, such as a limit on bodies, applies to the gateways. API keys also apply to the
    replicas, whose routes would otherwise be open.
    Raises ConfigError for an unknown or invalid argument.
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
            found[1][name] = value  # `quire serve` parses it
        else:
            close = difflib.get_close_matches(name, {*own, *gateway, *served} - {*OWN}, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see quire serve --help and quire fleet --help"
            raise ConfigError(f"there is no argument {name!r}; {hint}")
    GatewayConfig(fleet_secret="-", **found[2])  # checks the options
    return Arguments(FleetConfig(**found[0]), found[1], found[2])


def _as(hint: Any, name: str, value: Any) -> Any:
    """Convert a value of a command line or of YAML to the type of a field."""
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
    """Return the application, for `serve run` or the `import_path` of a Serve config.

    args: see `FleetConfig`; all others are options of `quire serve` and `quire fleet`. Raises ConfigError for an
    unknown or invalid one.
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
        max_replicas_per_node=1,  # all gateways use the same port
        ray_actor_options={"num_cpus": 0.1, "resources": resources},
        health_check_period_s=HEALTH_PERIOD,
        graceful_shutdown_wait_loop_s=NO_CALLS,
        graceful_shutdown_timeout_s=config.shutdown_timeout + LEAVE,
    )
    return gateway(GatewayDeployment).bind(replicas(fleet, found.replica, secret), fleet, found.gateway, secret)


def replicas(fleet: FleetConfig, options: dict[str, Any], secret: str) -> Application:
    """Return the deployment of the replicas alone. options: of `quire serve`. secret: see `read_secret`."""
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
                upscale_delay_s=0.0,  # the policy has its own delays
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
    return deployment(ReplicaDeployment).bind(options, max(1, int(fleet.num_cpus)), secret, fleet.secret_file)


def read_secret(secret: str, path: str) -> str:
    """Return the fleet's secret, from the file if a path is given. Raises ConfigError for an unreadable file."""
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


class ReplicaDeployment:
    """A deployment: `quire serve` in a separate process. Ray's process only watches it."""

    def __init__(self, options: dict[str, Any], num_threads: int, secret: str, secret_file: str) -> None:
        """Start the server. options: of `quire serve`. Raises QuireError if it does not start."""
        import ray.util

        self._secret = read_secret(secret, secret_file)
        own = {"host": ray.util.get_node_ip_address(), "port": 0, "fleet_secret": self._secret}
        self._server = ServerProcess({**options, **own, "shutdown_timeout": DRAIN}, num_threads, _end_actor)
        self._meter = Meter()

    def url(self) -> str:
        """Return the server's URL."""
        return self._server.url

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the URL for each router. The stats must not change, since Ray sends changes to every process."""
        return {URL: self._server.url}

    async def check_health(self) -> None:
        """Raise OSError while the server does not serve. After three failures Ray replaces this replica."""
        await asyncio.to_thread(self._server.get, "/health")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the server's load for `quire.ray.scaling.policy`; empty if the server does not answer."""
        try:
            state = json.loads(await asyncio.to_thread(self._server.get, "/fleet/state", self._bearer()))
            return stats(self._meter.read(state, time.monotonic()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the load of %s is not known: %s", self._server.url, error)
            return {}

    def __del__(self) -> None:
        """Stop the server, after its streams have moved to other replicas. Ray ends a replica by deleting it."""
        if not hasattr(self, "_server"):  # it did not start
            return
        try:
            self._server.post("/fleet/drain", self._bearer(), DRAIN)
        except OSError as error:
            log.warning("%s did not drain: %s", self._server.url, error)
        self._server.stop(GRACE - DRAIN - 1)

    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._secret}"}


class GatewayDeployment:
    """A deployment: a gateway, on a separate thread, that gets the replicas from Ray."""

    def __init__(self, replicas: DeploymentHandle, fleet: FleetConfig, options: dict[str, Any], secret: str) -> None:
        """Start the gateway.

        replicas: a handle, needed only because its first call creates the router in this process.
        options: of `quire fleet`.
        """
        from quire.fleet.gateway import FleetServer  # imported late, since its imports are slow

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
        """Raise QuireError if the gateway has ended. Ray then starts another one."""
        if not self._thread.is_alive():
            raise QuireError("the gateway has ended; see its error in the log")

    def __del__(self) -> None:
        """Stop the gateway after its open answers. Ray ends a gateway by deleting it, and waits for a limited time."""
        if hasattr(self, "_thread"):  # it has started
            self._server.stop()
            self._thread.join()


def _end_actor(status: int) -> None:
    """End this process, since its server has ended. Ray starts another replica at once."""
    log.error("quire serve ended with status %d, and this replica with it", status)
    os._exit(1)
