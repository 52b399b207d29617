"""ReplicaView: what a gateway knows of a replica, for metrics and for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quire.fleet.state import ReplicaState


class Status(str, Enum):
    """Whether a replica gets requests."""

    UP = "up"
    DRAINING = "draining"  # it takes no new ones
    LOST = "lost"  # it does not answer
    LEFT_OUT = "left out"  # it has another tokenizer or template than the gateway


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica, as the gateway knows it at one moment."""

    url: str
    status: Status
    failure: str | None  # why it is lost
    fingerprint: str | None  # its digest; None: it never answered
    different: tuple[str, ...]  # parts of the fingerprint that differ from those of the gateway's model
    state: ReplicaState | None  # the last one that it sent; None while it is lost
    held_blocks: int  # that the index knows it to hold
    num_samples: int  # that it computes for this gateway
