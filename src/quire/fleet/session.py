"""Session: the stream from a replica to one gateway, and that gateway's open calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.fleet.report import STATE_EVERY, load_differs
from quire.fleet.state import ReplicaState
from quire.fleet.wire import Frame, Hello, dumps
from quire.frontend.jobs import GenerationJob
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.frontend.requests import Made
from quire.server.http.api_error import api_error

MAX_UNSENT = 2**16  # unsent frames and event items after which a slow gateway is disconnected


class Session:
    """The messages for one gateway. Only the event loop may use it, except `started`."""

    def __init__(self, name: str, hello: Callable[[str], Hello]) -> None:
        self.name = name
        self.flows: dict[int, Flow] = {}  # open calls, by the gateway's numbers
        self.started: list[int] = []  # calls that began since the last step; for the engine thread only
        self.draining = False
        self.closing = False  # the session ends when no call is open
        self._hello = hello
        self._gone = False
        self._frames: list[Frame] = []
        self._failed: list[list[Any]] = []
        self._events: list[list[Any]] = []
        self._num_named = 0  # items of these events: their blocks, and one for each kind
        self._first_event = 0  # the number of the first of these events
        self._snapshot: list[int] | None = None
        self._on_disk: list[int] = []
        self._state: ReplicaState | None = None
        self._started: list[int] = []  # calls that this state counts and the last sent one did not
        self._next_state = 0.0  # s of time.monotonic(), when the next state is due
        self._sent_state: ReplicaState | None = None
        self._sent_draining = False
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Send a line, possibly an empty one as a heartbeat."""
        self._news.set()

    def close(self) -> None:
        """Send no further lines."""
        self._gone = True
        self._news.set()

    def begin(self, digests: list[int], on_disk: list[int], next_event: int, state: ReplicaState) -> None:
        """Begin with the blocks in the replica's memory and on its disk. next_event: number of the next event."""
        self._snapshot, self._on_disk, self._first_event, self._state = digests, on_disk, next_event, state
        self.wake()

    def add(self, events: list[list[Any]], state: ReplicaState, started: Sequence[int]) -> None:
        """Add a step's events, the state after it, and the calls that this state counts for the first time."""
        self._events += events
        self._num_named += sum(map(len, events))
        self._bound()
        self._state = state
        self._started += started
        if events or load_differs(self._state, self._sent_state):
            self.wake()

    def report(self, frames: list[Frame]) -> None:
        """Add frames of open calls."""
        self._frames += frames
        self._bound()
        self.wake()

    def fail(self, flow: int, status: int, body: Mapping[str, Any]) -> None:
        """Report a call that failed before its samples ended."""
        self.flows.pop(flow, None)
        self._failed.append([flow, status, body])
        self.wake()

    def _bound(self) -> None:
        """Disconnect a gateway that reads too slowly, and discard its unsent messages."""
        if self._gone or len(self._frames) + self._num_named > MAX_UNSENT:
            self.close()
            self._frames, self._events, self._num_named = [], [], 0

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines to send."""
        yield dumps(self._hello(self.name))
        while not self._gone:
            await self._news.wait()
            self._news.clear()
            yield dumps(self._message())
            if self.closing and not self.flows and not self._news.is_set():
                return

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {}
        if self._frames:
            message["frames"], self._frames = self._frames, []
        if self._failed:
            message["failed"], self._failed = self._failed, []
        if self._snapshot is not None:
            message |= {"event": self._first_event, "snapshot": self._snapshot}
            if self._on_disk:
                message["events"] = [["d+", *self._on_disk]]
            self._snapshot, self._on_disk = None, []
        elif self._events:
            message |= {"event": self._first_event, "events": self._events}
            self._first_event += len(self._events)
            self._events, self._num_named = [], 0
        now, state = time.monotonic(), self._state
        is_new = state is not self._sent_state and (now >= self._next_state or load_differs(state, self._sent_state))
        if state is not None and (is_new or self.draining != self._sent_draining):
            message["state"] = replace(state, draining=self.draining)
            message["started"], self._started = self._started, []
            self._next_state, self._sent_state, self._sent_draining = now + STATE_EVERY, state, self.draining
        return message


class Flow(GenerationJob):
    """A call whose output is reported as frames."""

    def __init__(
        self, session: Session, number: int, prompts: Sequence[Made],
        started: Callable[[], None],
    ) -> None:  # fmt: skip
        """started: called by the engine thread when the samples are queued."""
        super().__init__(prompts)
        self._started = started
        self._session = session
        self._number = number
        self._sent: dict[int, tuple[int, int]] = {}  # sent characters and tokens of each sample; engine thread only
        self._num_logprobs: dict[int, int] = {}
        self._first_prompt_logprob = self.requests[0].first_prompt_logprob
        self._num_prompt_logprobs = 1  # the first token has none
        self._num_differences = 0
        self._has_sent_cached = False

    def start(self, processor: OutputProcessor) -> None:
        """Queue all samples."""
        super().start(processor)
        self._started()
        self._session.started.append(self._number)
        for output in self.outputs:
            self._sent |= {one.index: (len(one.text), len(one.token_ids)) for one in output.outputs}

    def news(self, output: RequestOutput) -> list[Any]:
        """Return the new part of an output as frames."""
        found = []
        for sample in output.outputs:
            characters, tokens = self._sent[sample.index]
            more = self._more(output) if sample is output.outputs[0] else {}
            if characters < 0 or (len(sample.token_ids) == tokens and not sample.finished and not more):
                continue
            end = [sample.finish_reason, sample.stop_reason, sample.error] if sample.finished else None
            found.append(
                Frame(
                    self._number,
                    sample.index,
                    tokens,
                    sample.token_ids[tokens:],
                    characters,
                    sample.text[characters:],
                    self._logprobs(sample),
                    end,
                    more or None,
                )
            )
            self._sent[sample.index] = (-1, -1) if sample.finished else (len(sample.text), len(sample.token_ids))
        return found

    def take(self, deltas: list[Any]) -> None:
        """Hand the frames to the session."""
        if self.error is not None:
            error = api_error(self.error)
            self._session.fail(self._number, error.status, error.body())
        elif deltas:
            self._session.report(deltas)
        if self.ended.is_set():
            self._session.flows.pop(self._number, None)

    def _logprobs(self, sample: CompletionOutput) -> list[list[list[Any]]] | None:
        if sample.logprobs is None:
            return None
        start = self._num_logprobs.get(sample.index, 0)
        self._num_logprobs[sample.index] = len(sample.logprobs)
        return [_candidates(found) for found in sample.logprobs[start:]]

    def _more(self, output: RequestOutput) -> dict[str, Any]:
        """Return the new data about the prompt, and other rare fields of a frame."""
        more: dict[str, Any] = {}
        if not self._has_sent_cached and output.num_cached_tokens is not None:
            self._has_sent_cached = True
            more["cached"] = output.num_cached_tokens
        if output.prompt_logprobs is not None and len(output.prompt_logprobs) > self._num_prompt_logprobs:
            new = [_candidates(found or {}) for found in output.prompt_logprobs[self._num_prompt_logprobs :]]
            more["prompt_logprobs"] = [self._first_prompt_logprob + self._num_prompt_logprobs, new]
            self._num_prompt_logprobs = len(output.prompt_logprobs)
        if (count := output.outputs[0].num_differences) > self._num_differences:
            more["differences"] = count - self._num_differences
            self._num_differences = count
        if output.hidden_state is not None:
            more["hidden_state"] = output.hidden_state.tolist()
        return more


def _candidates(found: dict[int, Logprob]) -> list[list[Any]]:
    return [[token, one.logprob, one.rank, one.decoded_token] for token, one in found.items()]
