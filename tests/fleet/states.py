"""The state of a replica, for tests of those that read it."""

from __future__ import annotations

from typing import Any

from quire.fleet.state import ReplicaState

BLOCK = 16  # tokens


def state(**known: Any) -> ReplicaState:
    """A replica that is idle and empty, but for what is given."""
    numbers: dict[str, Any] = {
        "waiting_tokens": 0,
        "num_waiting": 0,
        "num_running": 0,
        "max_running": 32,
        "free_blocks": 1_000,
        "cached_blocks": 0,
        "num_blocks": 1_000,
        "block_size": BLOCK,
        "seconds_a_step": 0.010,
        "seconds_a_prompt_token": 0.0004,
        "seconds_a_sequence": 0.0006,
        "draining": False,
    }
    return ReplicaState(**numbers | known)
