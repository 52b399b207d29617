"""ReplicaView: a gateway's knowledge of a replica, for metrics and the inspector."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quire.fleet.state import ReplicaState


class Status(str, Enum):
    """The states of a replica, of which only UP gets new requests."""

    UP = "up"
    DRAINING = "draining"  # it accepts no new requests
    LOST = "lost"  # it does not answer
    LEFT_OUT = "left out"  # it has another tokenizer or template than the gateway


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """A gateway's knowledge of one replica at one moment."""

    url: str
    status: Status
    failure: str | None  # why it is lost
    fingerprint: str | None  # its digest; None if the replica never answered
    different: tuple[str, ...]  # parts of the fingerprint that differ from those of the gateway's model
    state: ReplicaState | None  # the last one that it sent; None while it is lost
    held_blocks: int  # blocks that the index has for it
    num_samples: int  # samples that it computes for this gateway
