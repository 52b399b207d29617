"""Link: a gateway's connection to one replica."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import aiohttp

from quire.errors import QuireError
from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.lines import MAX_LINE, HttpRefused, read_lines
from quire.fleet.state import ReplicaState
from quire.fleet.wire import (
    PROTOCOL,
    SILENCE,
    Call,
    EncodeCall,
    Frame,
    Hello,
    SearchCall,
    WireError,
    check_blocks,
    dumps,
    loads,
    read,
)

log = logging.getLogger("quire.fleet")

CONNECT = 2.0  # s, timeout of a connection
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # s before the next attempt to connect to a lost replica
# Error codes after which another replica can serve the call. One that does not know the session has just ended it.
BUSY = ("draining", "engine_stopped", "engine_stuck", "unknown_session")
LONGEST_DISTRUST = 60.0  # s, the longest pause after a contradiction
ERRORS = frozenset(status for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST)
T = TypeVar("T")


class LinkLost(QuireError):
    """The replica does not answer any more, or its answer is invalid."""


class Refused(QuireError):
    """The replica refused a call."""

    def __init__(self, status: int, body: object) -> None:
        """status: one of ERRORS. body: the parsed JSON, of any type."""
        error = body.get("error") if isinstance(body, dict) else None
        self.error: dict[str, Any] = error if isinstance(error, dict) else {}
        self.is_away = self.error.get("code") in BUSY  # like a lost replica: the refusal is not about the call
        self.is_own_fault = status >= 500 and not self.is_away
        super().__init__(str(self.error.get("message", f"HTTP status {status}")))
        self.status = status


class Listener(Protocol):
    """The interface that a link calls with the messages of its replica."""

    def connected(self, link: Link) -> None:
        """Handle the greeting of a replica, after its first state."""

    def frames(self, link: Link, frames: Sequence[Frame]) -> None:
        """Take in the frames of a step. Raises WireError for an invalid one, after those before it were taken in."""

    def failed(self, link: Link, flow: int, status: int, body: dict[str, Any]) -> None:
        """Handle a call that failed before its samples ended."""

    def blocks(self, link: Link, snapshot: list[int] | None, events: list[list[Any]]) -> None:
        """Take in a snapshot of the replica's blocks, or events of them."""

    def started(self, link: Link, flows: Sequence[int]) -> None:
        """Mark calls that the replica's latest state counts."""

    def changed(self, link: Link) -> None:
        """Handle a new state of the replica."""

    def contradicted(self, link: Link) -> None:
        """Handle a message that is invalid or contradicts an earlier one."""

    def lost(self, link: Link) -> None:
        """Handle the loss of the session, and of all its calls. No later frames of them are reported."""


class Link:
    """A session with a replica. It is reopened when it is lost."""

    def __init__(self, slot: int, url: str, secret: str, http: aiohttp.ClientSession, listener: Listener) -> None:
        """slot: the replica's number in the index. http: not closed here."""
        self.slot = slot
        self.url = url
        self.hello: Hello | None = None  # while it is connected
        self.fingerprint: Fingerprint | None = None  # of the last session
        self.state: ReplicaState | None = None
        self.state_time = 0.0  # s of time.monotonic(), when the state arrived
        self.failure = "it has not answered yet"  # why it is not connected
        self._http = http
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._listener = listener
        self._posts: set[asyncio.Task[Any]] = set()
        self._next_event: int | None = None

    @property
    def is_up(self) -> bool:
        """True if the replica can be called."""
        return self.hello is not None and self.state is not None

    async def run(self) -> None:
        """Stay connected until this is cancelled."""
        pause, reported = FIRST_PAUSE, ""
        while True:
            longest = LONGEST_PAUSE
            try:
                await self._serve()
                self.failure = "it has ended the session"
            except WireError as error:  # reconnecting at once would not help
                self.failure, longest = str(error), LONGEST_DISTRUST
                self._listener.contradicted(self)
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                self.failure = _reason(error)
            finally:
                was_up = self.is_up
                self._drop()
            if self.failure != reported or was_up:
                log.warning("replica %s is %s: %s", self.url, "lost" if was_up else "not there", self.failure)
                reported = self.failure
                pause = FIRST_PAUSE if longest == LONGEST_PAUSE else pause
            await asyncio.sleep(pause)
            pause = min(longest, 2 * pause)

    async def post(self, path: str, message: Call | EncodeCall | SearchCall | dict[str, Any]) -> dict[str, Any]:
        """Send a message. Raises Refused, and LinkLost, also if the session is lost meanwhile."""
        if self.hello is None:
            raise LinkLost(f"{self.url}: {self.failure}")
        found = message if isinstance(message, dict) else vars(message)
        task = asyncio.create_task(self._post(path, dumps(found | {"session": self.hello.session})))
        self._posts.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._posts:
                raise  # the caller itself was cancelled
            raise LinkLost(f"{self.url}: {self.failure}") from None
        finally:
            self._posts.discard(task)

    async def ask(
        self, path: str, message: Call | EncodeCall | SearchCall | dict[str, Any], read: Callable[[dict[str, Any]], T]
    ) -> T:
        """Send a message and return the result of `read` for the answer. Raises like `post`.

        A WireError of `read` becomes LinkLost.
        """
        answer = await self.post(path, message)
        try:
            return read(answer)
        except WireError as error:
            raise self._contradiction(f"its answer to {path} is invalid: {error}") from error

    def _contradiction(self, why: str) -> LinkLost:
        self._listener.contradicted(self)
        log.warning("replica %s: %s", self.url, why)
        return LinkLost(f"{self.url}: {why}")

    async def _post(self, path: str, line: bytes) -> dict[str, Any]:
        try:
            async with self._http.post(
                self.url + path, data=line, headers=self._headers, timeout=_timeout(None)
            ) as answer:
                body = await read_body(answer)
                found = json.loads(body) if body else {}
        except WireError as error:
            raise self._contradiction(f"its answer to {path} is invalid: {error}") from error
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise LinkLost(f"{self.url}: {_reason(error)}") from error
        if answer.status in ERRORS:
            raise Refused(answer.status, found)
        if answer.status != HTTPStatus.OK:
            raise self._contradiction(
                f"it answers {path} with HTTP status {answer.status}; it must be 200, or an error's"
            )
        if not isinstance(found, dict):
            raise self._contradiction(f"it answers {path} with a {type(found).__name__}; it must be an object")
        return found

    async def _serve(self) -> None:
        """Read the replica's lines until its session ends."""
        url, self._next_event = f"{self.url}/fleet/session", None
        try:
            await read_lines(url, self._headers, self._hear, connect=CONNECT, silence=SILENCE)
        except HttpRefused as error:
            raise Refused(error.status, json.loads(error.body)) from error

    def _hear(self, line: bytes) -> None:
        """Take in a line. Raises WireError for any error of an invalid line, also for an unexpected one."""
        try:
            take = self._greet if self.hello is None else self._take
            take(loads(line))
        except WireError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            log.exception("a line of replica %s cannot be taken", self.url)
            raise WireError(f"a line cannot be taken: {type(error).__name__}: {error}") from error

    def _greet(self, message: dict[str, Any]) -> None:
        """Take in the first line, the greeting. Raises WireError."""
        if (spoken := message.get("protocol")) != PROTOCOL:
            raise WireError(f"it speaks version {spoken} of the fleet's protocol; this gateway {PROTOCOL}")
        hello = read(Hello, message)
        self.fingerprint = Fingerprint.from_json(hello.fingerprint)
        self.hello = hello

    def _take(self, message: dict[str, Any]) -> None:
        """Take in any other line."""
        was_up, listener = self.is_up, self._listener
        frames = [Frame.parse(frame) for frame in message.get("frames", ())]
        failed = [(int(flow), int(status), dict(body)) for flow, status, body in message.get("failed", ())]
        for _, status, _ in failed:
            if status not in ERRORS:
                raise WireError(f"a call has failed with HTTP status {status}; it must be an error's")
        started = [int(flow) for flow in message.get("started", ())]
        state = read(ReplicaState, message["state"]) if "state" in message else None
        first, snapshot, events = message.get("event"), message.get("snapshot"), message.get("events", [])
        check_blocks(snapshot, events)
        if snapshot is not None:
            self._next_event = first
            listener.blocks(self, snapshot, events)  # these events list the blocks on the disk
        elif events:
            if self._next_event is None or first != self._next_event:
                raise WireError(f"block event {first} comes where {self._next_event} was expected")
            self._next_event += len(events)
            listener.blocks(self, None, events)
        if state is not None:
            self.state, self.state_time = state, time.monotonic()
            if not was_up:
                listener.connected(self)
            listener.started(self, started)
            listener.changed(self)
        listener.frames(self, frames)
        for flow, status, body in failed:
            listener.failed(self, flow, status, body)

    def _drop(self) -> None:
        was_up = self.is_up
        self.hello = self.state = None
        posts, self._posts = self._posts, set()
        for task in posts:
            task.cancel()
        if was_up:
            self._listener.lost(self)


async def abort(link: Link, flow: int) -> None:
    """Abort a call at its replica. A lost session ends the call, too."""
    with suppress(LinkLost, Refused):
        await link.post("/fleet/abort", {"flow": flow})


async def read_body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of a replica's answer. Raises WireError if it has more than MAX_LINE bytes."""
    found = bytearray()
    async for piece in answer.content.iter_any():
        found += piece
        if len(found) > MAX_LINE:
            raise WireError(f"{len(found)} bytes of its body have come; the most is {MAX_LINE}")
    return bytes(found)


def _timeout(seconds: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT)


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"it sent nothing for {SILENCE:g} s"
    return str(error) or type(error).__name__
