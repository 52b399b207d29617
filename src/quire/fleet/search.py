"""FleetSearch: a beam search, which one replica does as a whole."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.beam import BeamSearchParams, Hypothesis
from quire.fleet.link import Link
from quire.fleet.wire import Hello, SearchCall
from quire.fleet.work import wire_digests
from quire.request import FinishReason, Request
from quire.server.http.api_error import ApiError

if TYPE_CHECKING:  # its packages are an extra
    from quire.server.watch.traces import CallSpan


class FleetSearch:
    """A beam search that a replica does: a `SearchJob`."""

    def __init__(self, name: str, prompt: Sequence[int], params: BeamSearchParams, salt: str) -> None:
        self.call = SearchCall(
            name=name,
            prompt=list(prompt),
            salt=salt,
            beam_width=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=params.length_penalty,
        )
        self.num_samples = params.beam_width
        self.requests: list[Request] = []
        self.ended = asyncio.Event()
        self.error: ApiError | None = None
        self.failure: str | None = None
        self.task: asyncio.Task[None] | None = None
        self.replica: str | None = None  # the URL of the one that does it
        self.began = time.monotonic()  # s
        self._found: list[Hypothesis] = []

    def digests(self, hello: Hello, secret: bytes) -> list[int]:
        """The full blocks of the prompt, as the replica's events name them."""
        return wire_digests(array("i", self.call.prompt), self.call.salt, hello, secret)

    async def run_at(self, link: Link, span: CallSpan | None) -> None:
        """Let a replica do it. span: of that, which ends with it. Raises as Link.post."""
        call, outcome = self.call, "not finished"
        try:
            answer = await link.post("/fleet/search", call if span is None else replace(call, trace=span.traceparent))
            outcome = "finished"
        finally:
            if span is not None:
                span.end(outcome, is_error=outcome != "finished")
        self.failure = answer["failure"]
        self._found = [
            Hypothesis(tuple(tokens), logprob, score, FinishReason(reason))
            for tokens, logprob, score, reason in answer["found"]
        ]

    def results(self) -> list[Hypothesis]:
        """What was found, best first."""
        return self._found

    def check(self, engine: Any) -> None:
        """The replica checks it."""

    def start(self, processor: Any) -> None:
        """The replica starts it."""

    def stop(self, engine: Any) -> None:
        """The replica stops it when its caller goes."""

    def take(self, deltas: list[Any]) -> None:
        """Nothing comes before its end."""
