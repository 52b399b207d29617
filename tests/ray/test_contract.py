"""What Quire uses of Ray Serve, much of which may change: each test fails with the release that changes it."""

from __future__ import annotations

import asyncio
import inspect
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from quire.fleet.scaling import Load
from quire.ray.membership import MEMBERS, URL
from quire.ray.scaling import policy
from tests.helm import CHART, render

pytest.importorskip("ray", reason="ray is not installed; it comes with quire[ray]")

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import ServeDeploySchema

from quire.ray.router import QuireRouter

BUSY = Load(
    prompt_tokens_a_second=1000.0,
    decoded_tokens_a_second=0.0,
    waiting_tokens=0.0,
    seconds_a_prompt_token=0.001,
    seconds_a_token=0.0,
)


# ------------------------------------------------------------------------------------------------------- the router


def test_the_router_overrides_what_ray_calls() -> None:
    for name in ("update_replicas", "choose_replicas"):
        theirs, ours = getattr(RequestRouter, name), getattr(QuireRouter, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)
    assert isinstance(inspect.getattr_static(RunningReplica, "routing_stats"), property)
    assert isinstance(inspect.getattr_static(RunningReplica, "replica_id"), property)


def test_the_router_waits_between_two_tries() -> None:
    """Without `should_backoff`, Ray tries again and again without a pause."""
    request = PendingRequest(args=[], kwargs={}, metadata=None)
    assert request.routing_context.should_backoff is False
    replicas: list[Any] = [object(), object()]
    router = QuireRouter.__new__(QuireRouter)
    assert asyncio.run(router.choose_replicas(replicas, request)) == [replicas]
    assert request.routing_context.should_backoff is True
    assert asyncio.run(router.choose_replicas(replicas)) == [replicas]


def test_the_router_that_ray_makes_finds_the_members_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes it of a copy of its module. What that imports when it is called is no copy."""
    config = RequestRouterConfig(request_router_class="quire.ray.router.QuireRouter")
    made = config.get_request_router_class()
    assert issubclass(made, FIFOMixin)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    shown = SimpleNamespace(replica_id="a", routing_stats={URL: "http://x:1"})
    made.update_replicas(made.__new__(made), [shown])
    assert [member.url for member in MEMBERS._members] == ["http://x:1"]


# ------------------------------------------------------------------------------------------------------- scaling


def context(replicas: list[ReplicaID], **other: Any) -> AutoscalingContext:
    """What Ray hands to a policy of two replicas that are wanted."""
    given: dict[str, Any] = dict.fromkeys(inspect.signature(AutoscalingContext).parameters)
    given |= {"target_num_replicas": 2, "running_replicas": replicas, "policy_state": {}, "current_time": 100.0}
    given |= {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": 8, "aggregated_metrics": {}}
    return AutoscalingContext(**given | other)


def test_the_policy_is_found_and_asked_as_ray_does() -> None:
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=8,
        policy=AutoscalingPolicy(policy_function="quire.ray.scaling:policy"),
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
    )
    found = config.policy.get_policy()
    assert found(context([])) == policy(context([])) == (2, {"since": 100.0})


def test_the_policy_reads_what_replicas_report() -> None:
    replicas = [ReplicaID(unique_id=name, deployment_id=None) for name in "ab"]
    reported = {name: dict.fromkeys(replicas, value) for name, value in asdict(BUSY).items()}
    assert policy(context(replicas, aggregated_metrics=reported)) == (3, {"since": 100.0})  # 2 / 0.7
    one = {name: {replicas[0]: value} for name, value in asdict(BUSY).items()}
    since = {"policy_state": {"since": -1000.0}}
    idle = {name: dict.fromkeys(replicas, 0.0) for name in reported}
    assert policy(context(replicas, aggregated_metrics=idle, **since)) == (1, {"since": 100.0})
    assert policy(context(replicas, aggregated_metrics=one, **since)) == (
        2,
        {"since": 100.0},
    )  # one has reported nothing


# -------------------------------------------------------------------------------------------------- the manifests


def test_the_config_of_the_manifests_is_one_of_serve() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | {"engine": "ray", "options": {"max-num-seqs": "8"}}
    service = next(yaml.safe_load_all(render(CHART, values, "quire")))
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.route_prefix is None
    assert application.args["max-num-seqs"] == "8"


# ------------------------------------------------------------------------------------------- in a running cluster


class Echo:
    """Reports what the deployments of `quire.ray.app` tell."""

    def __init__(self) -> None:
        self.asked = {"health": 0, "stats": 0}

    def record_routing_stats(self) -> dict[str, Any]:
        return {URL: "http://10.0.0.1:1234"}

    def record_autoscaling_stats(self) -> dict[str, float]:
        self.asked["stats"] += 1
        return asdict(BUSY)

    async def check_health(self) -> None:
        self.asked["health"] += 1

    async def echo(self, value: int) -> int:
        await asyncio.sleep(0.01)
        return value

    def counts(self) -> dict[str, int]:
        return self.asked


class Caller:
    """Calls another deployment as often as it is asked to, all at once out of one request."""

    def __init__(self, echo: Any) -> None:
        self.echo = echo

    async def call(self, count: int) -> list[int]:
        return list(await asyncio.gather(*(self.echo.echo.remote(i) for i in range(count))))

    def members(self) -> list[str]:
        return sorted(member.url for member in MEMBERS._members)


@pytest.mark.slow
@pytest.mark.long
def test_calls_and_members_come_through_the_router(serve: Any) -> None:
    """A router without FIFOMixin answers calls out of one request one in ten seconds."""
    echo = serve.deployment(
        name="Echo",
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(request_router_class="quire.ray.router.QuireRouter"),
        health_check_period_s=0.5,
        autoscaling_config=AutoscalingConfig(
            min_replicas=1,
            max_replicas=2,  # what this load needs, and one core has room for
            policy=AutoscalingPolicy(policy_function="quire.ray.scaling:policy"),
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=0.5,
        ),
    )(Echo)
    caller = serve.deployment(name="Caller", ray_actor_options={"num_cpus": 0.1})(Caller)
    handle = serve.run(caller.bind(echo.bind()), name="contract", route_prefix=None)
    try:
        assert handle.call.remote(32).result(timeout_s=60) == list(range(32))
        wait_for(lambda: handle.members.remote().result(timeout_s=30) == ["http://10.0.0.1:1234"])
        app = serve.get_deployment_handle("Echo", "contract")
        wait_for(lambda: min(app.counts.remote().result(timeout_s=30).values()) > 0)
        wait_for(lambda: serve.status().applications["contract"].deployments["Echo"].replica_states == {"RUNNING": 2})
    finally:
        serve.delete("contract")


def wait_for(holds: Any) -> None:
    """Wait until something holds; fail when it has not after a minute."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)
