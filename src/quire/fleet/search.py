"""FleetSearch: a beam search that one replica runs as a whole."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.engine.beam import BeamSearchParams, Hypothesis
from quire.errors import QuireError
from quire.fleet.link import Link
from quire.fleet.wire import ENDS, Hello, SearchCall, WireError, shown
from quire.fleet.work import wire_digests
from quire.request import FinishReason, Request, TokenLogprobs

if TYPE_CHECKING:  # its packages are an extra
    from quire.server.observability.traces import CallSpan


class FleetSearch:
    """A beam search that a replica runs: a `SearchJob`."""

    def __init__(self, name: str, prompt: Sequence[int], params: BeamSearchParams, salt: str, lora: str | None) -> None:
        self.call = SearchCall(
            name=name,
            prompt=list(prompt),
            salt=salt,
            lora=lora,
            beam_width=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=params.length_penalty,
            logprobs=params.logprobs,
        )
        self.num_samples = params.beam_width
        self.requests: list[Request] = []
        self.ended = asyncio.Event()
        self.error: QuireError | None = None
        self.failure: str | None = None
        self.task: asyncio.Task[None] | None = None
        self.replica: str | None = None  # the URL of the replica that runs it
        self.fingerprint: str | None = None  # of that replica
        self.began = time.monotonic()  # s
        self._found: list[Hypothesis] = []

    def digests(self, hello: Hello, secret: bytes) -> list[int]:
        """Return the digests of the prompt's full blocks as in the replica's events."""
        return wire_digests(array("i", self.call.prompt), self.call.salt, self.call.lora, hello, secret)

    async def run_at(self, link: Link, span: CallSpan | None) -> None:
        """Run the search at a replica. span: its trace span, which ends with it. Raises like Link.ask."""
        call, outcome = self.call, "not finished"
        self.fingerprint = None if link.fingerprint is None else link.fingerprint.digest
        try:
            traced = call if span is None else replace(call, trace=span.traceparent)
            self.failure, self._found = await link.ask("/fleet/search", traced, partial(_read, call))
            outcome = "finished"
        finally:
            if span is not None:
                span.end(outcome, is_error=outcome != "finished")

    def results(self) -> list[Hypothesis]:
        """Return the hypotheses, best first."""
        return self._found

    def check(self, engine: Any) -> None:
        """Do nothing: the replica checks it."""

    def start(self, processor: Any) -> None:
        """Do nothing: the replica starts it."""

    def stop(self, engine: Any) -> None:
        """Do nothing: the replica stops it when the caller disconnects."""

    def take(self, deltas: list[Any]) -> None:
        """Do nothing: a search has no deltas before its end."""


def _read(call: SearchCall, answer: Mapping[str, Any]) -> tuple[str | None, list[Hypothesis]]:
    """Return the reason of a failure and the hypotheses, best first. Raises WireError for an invalid answer."""
    failure, found = answer.get("failure", 0), answer.get("found")
    if failure is not None and not isinstance(failure, str):
        raise WireError(f"failure is {shown(answer.get('failure', 'missing'))}; it must be null or a text")
    if not isinstance(found, list) or len(found) > call.beam_width:
        raise WireError(f"found is {shown(found)}; it must be a list of at most {call.beam_width} hypotheses")
    return failure, [_hypothesis(call, one) for one in found]


def _hypothesis(call: SearchCall, found: Any) -> Hypothesis:
    if not isinstance(found, list) or len(found) != 5:
        raise WireError(f"a hypothesis is {shown(found)}; it must be its tokens, logprob, score, end and logprobs")
    tokens, logprob, score, reason, logprobs = found
    if not isinstance(tokens, list) or len(tokens) > call.max_tokens or not {*map(type, tokens)} <= {int}:
        raise WireError(f"tokens of a hypothesis are {shown(tokens)}; they must be at most {call.max_tokens} integers")
    if tokens and min(tokens) < 0:
        raise WireError(f"a token of a hypothesis is {min(tokens)}; it must not be negative")
    for name, number in (("logprob", logprob), ("score", score)):
        if type(number) not in (int, float):
            raise WireError(f"the {name} of a hypothesis is {shown(number)}; it must be a number")
    if reason not in ENDS:
        raise WireError(f"the finish reason of a hypothesis is {shown(reason)}; it must be one of {', '.join(ENDS)}")
    of_tokens = () if call.logprobs is None else _logprobs(tokens, logprobs)
    return Hypothesis(tuple(tokens), float(logprob), float(score), FinishReason(reason), of_tokens)


def positions(logprobs: Sequence[TokenLogprobs]) -> list[list[Any]]:
    """Return the JSON form of a hypothesis's logprobs: for each token its logprob, its rank and the best candidates."""
    return [[one.logprob, one.rank, one.top] for one in logprobs]


def _logprobs(tokens: Sequence[int], found: Any) -> tuple[TokenLogprobs, ...]:
    try:
        return tuple(
            TokenLogprobs(token, float(logprob), int(rank), tuple((int(other), float(its)) for other, its in top))
            for token, (logprob, rank, top) in zip(tokens, found, strict=True)
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"logprobs of a hypothesis are {shown(found)}; they cannot be read: {error}") from error
