"""Access: the id, the log line and the count of each request."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.http.api_error import ApiError, cut
from quire.server.logs import fields

log = logging.getLogger("quire.access")

ID_HEADER, IGNORED_HEADER = "X-Request-Id", "X-Quire-Ignored-Fields"
GIVEN_ID = re.compile(rb"[!-~]{1,128}")  # printable ASCII without spaces
CLIENT_GONE = 499  # logged if the client disconnected before an answer; nginx's number
# Keys of a request's state.
ID = "request_id"
IGNORED = "ignored_fields"  # names, escaped for a header
REASON = "reason"  # the reason of a refusal, in a word
TOKENS = "tokens"  # a function that returns the number of prompt tokens and of generated tokens


class Tally:
    """Counters of answered requests and of the reasons for refusals. It belongs to the event loop."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str, str]] = Counter()  # by route, method and status
        self.refused: Counter[str] = Counter()  # by reason


class Access:
    """The layer of the application that sees every request, including refused ones."""

    def __init__(self, app: ASGIApp, tally: Tally, logs: bool, quiet: Collection[str] = ()) -> None:
        """Wrap an application. logs: write a line for each request, except successful ones to a quiet path."""
        self._app = app
        self._tally = tally
        self._logs = logs
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, then count and log its status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_GONE
        state: dict[str, Any] = scope.setdefault("state", {})
        state[ID] = _id_of(scope)

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {ID_HEADER: state[ID]} | ({IGNORED_HEADER: state[IGNORED]} if IGNORED in state else {})
                own_lines = [(name.lower().encode(), value.encode("ascii")) for name, value in own.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own_lines]}
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        finally:
            self._tally.answered[_route(scope), scope["method"], str(int(status))] += 1
            if REASON in state:
                self._tally.refused[state[REASON]] += 1
            if self._logs and not (status == HTTPStatus.OK and scope["path"] in self._quiet):
                self._write(scope, status, time.monotonic() - began)

    def _write(self, scope: Scope, status: int, seconds: float) -> None:
        state, path = scope["state"], cut(scope["raw_path"].decode("ascii", "replace"))
        prompt, new = state[TOKENS]() if TOKENS in state else (0, 0)
        tokens = f", {prompt} prompt tokens, {new} new" if prompt or new else ""
        reason = f", {state[REASON]}" if REASON in state else ""
        about: dict[str, Any] = {"request_id": state[ID], "method": scope["method"], "path": path}
        about |= {"status": int(status), "seconds": round(seconds, 6), "prompt_tokens": prompt, "new_tokens": new}
        if REASON in state:
            about["reason"] = state[REASON]
        form = "%s %s %s %d in %.3f s%s%s"
        log.info(form, state[ID], scope["method"], path, status, seconds, tokens, reason, extra=fields(**about))


def note_refusal(scope: Scope, error: ApiError) -> None:
    """Store the reason of a refusal in the request's state."""
    try:
        phrase = HTTPStatus(error.status).phrase.lower().replace(" ", "_")
    except ValueError:
        phrase = str(error.status)
    scope.setdefault("state", {})[REASON] = error.code or phrase


def _id_of(scope: Scope) -> str:
    """Return the id that the client gave its request, or a new one."""
    given = [value for name, value in scope["headers"] if name == ID_HEADER.lower().encode()]
    if len(given) == 1 and GIVEN_ID.fullmatch(given[0]):
        return bytes(given[0]).decode("ascii")
    return uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """Return the declared path of the request's route. There are few of these, whatever paths clients send."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    return scope["path"] if "endpoint" in scope else "none"
