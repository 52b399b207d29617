"""The fleet's autoscaling policy for Ray Serve. Ray's own numbers of requests in flight are zero, as it sees none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from quire.fleet.scaling import Load, Target, target

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


def stats(load: Load | None) -> dict[str, float]:
    """Return the result of a replica's `record_autoscaling_stats`."""
    return {} if load is None else asdict(load)


def policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Apply `target` to the replicas' loads: the `policy_function` of Serve's AutoscalingPolicy."""
    now = float(context.current_time)
    last = Target(context.target_num_replicas, context.policy_state.get("since", now))
    loads = [_load_of(context.aggregated_metrics, replica) for replica in context.running_replicas]
    found = target(loads, now, last, context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas)
    return found.replicas, {"since": found.since}


def _load_of(metrics: Mapping[str, Mapping[Any, float]], replica: Any) -> Load | None:
    """Return the load that a replica reported; None before the first report."""
    found = {one.name: metrics.get(one.name, {}).get(replica) for one in fields(Load)}
    numbers = {name: value for name, value in found.items() if value is not None}
    return Load(**numbers) if len(numbers) == len(found) else None
