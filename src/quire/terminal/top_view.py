"""The lines of quire top, from a server's metrics and inspector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.terminal.metrics import Change, Scrape

Snapshot = Mapping[str, Any]  # the first event of /inspector/events
HEAD = ("REQUEST", "STATE", "AGE", "PROMPT", "NEW", "WAITS FOR")
FLEET_HEAD = ("REPLICA", "STATUS", "RUNNING", "WAITING", "BLOCKS", "")


def view(url: str, change: Change, snapshot: Snapshot | None) -> list[str]:
    """Return a server's lines. snapshot: None if the server has no inspector."""
    now, about = change.now, (snapshot or {}).get("about", {})
    config, model = now.labels.get("cache_config_info", {}), now.labels.get("model_config_info", {})
    name = about.get("model") or config.get("model_name") or "a model"
    facts = [about.get("backend"), model.get("dtype"), None if model.get("quantization") == "none" else
             model.get("quantization")]  # fmt: skip
    title = ", ".join([f"{name} at {url}", *(fact for fact in facts if fact)])
    lines = [
        title,
        f"throughput  {change.rate('prompt_tokens_total'):,.1f} prompt tokens a second, "
        f"{change.rate('generation_tokens_total'):,.1f} new",
        f"queue       {_queue(now, snapshot)}",
        f"cache       {_cache(change, config)}",
        f"steps       {_steps(change)}",
        *_drafts(change),
        f"latency     {_latency(change)}",
    ]
    if snapshot is None:
        return lines
    requests = snapshot.get("requests", ())
    return [*lines, "", *(_requests(requests, now, snapshot) if requests else ["No request is open."])]


def fleet_view(url: str, snapshot: Snapshot) -> list[str]:
    """Return a gateway's lines."""
    replicas = snapshot["replicas"]
    rows = [FLEET_HEAD]
    for one in replicas:
        state = one.get("state") or {}
        blocks = f"{state['num_blocks'] - state['free_blocks']:,} of {state['num_blocks']:,}" if state else "-"
        counts = (str(state.get("num_running", "-")), str(state.get("num_waiting", "-")), blocks)
        rows.append((one["url"], one["status"], *counts, one.get("failure") or ""))
    model = snapshot.get("about", {}).get("model", "a model")
    return [
        f"{model} at {url}, a fleet's gateway with {len(replicas)} replicas",
        f"queue       {snapshot.get('num_requests', 0):,} requests are open",
        "",
        *_table(rows),
        "",
        "quire top --url REPLICA shows one of them.",
    ]


def _queue(now: Scrape, snapshot: Snapshot | None) -> str:
    running, waiting, swapped = (int(now.get(f"num_requests_{what}")) for what in ("running", "waiting", "swapped"))
    slots = f" of {snapshot['config']['max_num_seqs']:,} at most" if snapshot is not None else ""
    moved = f", {swapped:,} swapped to the host" if swapped else ""
    preempted = int(now.get("num_preemptions_total"))
    return f"{running:,} running{slots}, {waiting:,} waiting{moved}; {preempted:,} preemptions since the start"


def _cache(change: Change, config: Mapping[str, str]) -> str:
    now = change.now
    of = f" of {int(config['num_gpu_blocks']):,} blocks of {config['block_size']} tokens" if config else ""
    asked, found = change.of("prefix_cache_queries_total"), change.of("prefix_cache_hits_total")
    recent = f"{found / asked:.0%} now, " if asked else ""
    asked, found = now.get("prefix_cache_queries_total"), now.get("prefix_cache_hits_total")
    hits = f"; prefix hits {recent}{found / asked:.0%} since the start" if asked else "; no prompt yet"
    return f"{now.get('kv_cache_usage_perc'):.0%} used{of}{hits}"


def _steps(change: Change) -> str:
    mean, longest = change.mean("engine_step_seconds"), change.longest("engine_step_seconds")
    if mean is None or longest is None:
        age = change.now.get("engine_heartbeat_age_seconds")
        return f"one has been running for {age:.1f} s" if age else "none"
    lower, upper = longest
    slowest = f"more than {_time(lower)}" if upper == float("inf") else f"{_time(lower)} to {_time(upper)}"
    return (
        f"{change.rate('engine_step_seconds_count'):,.1f} a second of {_time(mean)} on average, the slowest {slowest}"
    )


def _drafts(change: Change) -> list[str]:
    """Return a line about draft tokens; none if there were none."""
    names = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
    (drafted, accepted), (new, right) = map(change.now.get, names), map(change.of, names)
    if not drafted:
        return []
    recent = f"{right / new:.0%} accepted now, " if new else ""
    return [f"drafts      {recent}{accepted / drafted:.0%} of {int(drafted):,} draft tokens since the start"]


def _latency(change: Change) -> str:
    first, gap = change.mean("time_to_first_token_seconds"), change.mean("inter_token_latency_seconds")
    queue = change.mean("request_queue_time_seconds")
    parts = [
        f"{what} {_time(value)}"
        for what, value in (("first token after", first), ("of it in the queue", queue), ("next tokens after", gap))
        if value is not None
    ]
    return ", ".join(parts) or "no token came"


def _requests(requests: Sequence[Mapping[str, Any]], now: Scrape, snapshot: Snapshot) -> list[str]:
    """Return a table of the open requests, waiting ones first, with the resource that each waits for."""
    order = {"waiting": 0, "swapped": 1, "running": 2}
    rows = [HEAD]
    for one in sorted(requests, key=lambda one: (order.get(one["state"], 3), one["times"][0])):
        arrived, _, spoke = one["times"]
        decodes = one["state"] == "running" and spoke is not None
        state = "decoding" if decodes else "prompt" if one["state"] == "running" else one["state"]
        prompt = f"{one['prompt']:,}" if decodes else f"{min(one['stored'], one['prompt']):,} of {one['prompt']:,}"
        age = _time(max(0.0, snapshot["time"] - arrived))
        rows.append((one["id"], state, age, prompt, f"{one['generated']:,}", _waits_for(one, now, snapshot)))
    return _table(rows)


def _waits_for(request: Mapping[str, Any], now: Scrape, snapshot: Snapshot) -> str:
    if request["state"] == "running":
        return ""
    config = snapshot["config"]
    running = int(now.get("num_requests_running"))
    again = "preempted; " if request["times"][1] is not None else ""
    if running >= config["max_num_seqs"]:
        return f"{again}a slot ({running:,} taken)"
    size = config["block_size"]
    needed = -(-(request["prompt"] + request["generated"]) // size)
    free = int(now.get("kv_blocks/free") + now.get("kv_blocks/cached"))
    if needed > free:
        return f"{again}{needed:,} blocks ({free:,} free)"
    return f"{again}a step"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:,.1f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
