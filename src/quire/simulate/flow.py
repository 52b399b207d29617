"""A client's request, on its way through gateways and replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from quire.fleet.ledger import Ledger
from quire.fleet.resume import NUM_CHECKED
from quire.fleet.wire import Frame
from quire.frontend.outputs import CompletionOutput
from quire.request import Request, SamplingParams
from quire.simulate.loads import Job


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
    routing: int = 0  # number of times that it was sent to a replica
    incarnation: int = 0  # of the replica
    bits: str | None = None  # of the replicas that may continue it; None: it has not begun
    ledger: Ledger | None = None  # set when another replica continues it
    num_lost: int = 0
    lost_at: float | None = None
    heard: float = 0.0  # when its gateway receives the last message that was sent
    has_begun: bool = False  # its first token was drawn
    is_done: bool = False
    passed_over: set[int] = field(default_factory=set)
    waits_until: float | None = None

    def enter(self, drawn: int) -> None:
        """Enter the tokens that a replica has drawn into the ledger."""
        if self.ledger is not None:
            at = len(self.ledger.tokens)
            self.ledger.enter(Frame(self.number, 0, at, [0] * max(0, drawn - at), 0, ""))

    def go_on(self, drawn: int) -> int:
        """Make the request for another replica after `drawn` tokens. Return the number that its gateway received."""
        if self.ledger is None:
            self.ledger = Ledger(CompletionOutput(0), False)
        self.enter(drawn)
        delivered = len(self.ledger.tokens)
        self.request = request_of(f"{self.request.id}+", self.job, self.request.sampling)
        self.request.resume([0] * delivered, NUM_CHECKED)
        return delivered


def request_of(name: str, job: Job, params: SamplingParams) -> Request:
    """Return the request for a job that a replica receives."""
    return Request(name, cast(Any, job.tokens()), job.prompt_tokens, params)
