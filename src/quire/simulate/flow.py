"""A client's request, on its way through gateways and replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from quire.fleet.ledger import Ledger
from quire.fleet.resume import NUM_CHECKED
from quire.fleet.wire import Frame
from quire.request import Request, SamplingParams
from quire.simulate.loads import Job
from quire.text import CompletionOutput


@dataclass(eq=False)
class Flow:
    """A client's request, on its way through gateways and replicas."""

    number: int
    job: Job
    began: float  # when the client first asked
    attempt: int
    gateway: int
    request: Request
    digests: list[int]
    replica: int = -1
    routing: int = 0  # how often it was sent to a replica
    incarnation: int = 0  # of the replica
    bits: str | None = None  # of the replicas that may go on with it; None: it has not begun
    ledger: Ledger | None = None  # once it went on elsewhere
    num_lost: int = 0
    lost_at: float | None = None
    heard: float = 0.0  # when its gateway gets the last thing that was sent to it
    has_begun: bool = False  # its first token came
    is_done: bool = False
    passed_over: set[int] = field(default_factory=set)
    waits_until: float | None = None

    def enter(self, drawn: int) -> None:
        """Let its ledger have the tokens that a replica has drawn."""
        if self.ledger is not None:
            at = len(self.ledger.tokens)
            self.ledger.enter(Frame(self.number, 0, at, [0] * max(0, drawn - at), 0, ""))

    def go_on(self, drawn: int) -> int:
        """Make the request with which another replica goes on after so many tokens. How many its gateway has got."""
        if self.ledger is None:
            self.ledger = Ledger(CompletionOutput(0), False)
        self.enter(drawn)
        delivered = len(self.ledger.tokens)
        self.request = request_of(f"{self.request.id}+", self.job, self.request.sampling)
        self.request.resume([0] * delivered, NUM_CHECKED)
        return delivered


def request_of(name: str, job: Job, params: SamplingParams) -> Request:
    """A request for a job, as a replica gets it."""
    return Request(name, cast(Any, job.tokens()), job.prompt_tokens, params)
