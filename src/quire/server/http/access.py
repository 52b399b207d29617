"""Access: each request has an id, a line in the log, and is counted."""

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
CLIENT_GONE = 499  # what is logged where the client has not waited for an answer; nginx's number
# Keys of a request's state.
ID = "request_id"
IGNORED = "ignored_fields"  # names as a header can carry them
REASON = "reason"  # why it was refused, in a word
TOKENS = "tokens"  # a function that returns how many tokens its prompts have, and how many were generated


class Tally:
    """How many requests were answered, and why some were not served. It belongs to the event loop."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str, str]] = Counter()  # by route, method and status
        self.refused: Counter[str] = Counter()  # by reason


class Access:
    """The layer of the application that knows of every request, refused ones included."""

    def __init__(self, app: ASGIApp, tally: Tally, logs: bool, quiet: Collection[str] = ()) -> None:
        """logs: write a line for each request, but for those to a quiet path that went well."""
        self._app = app
        self._tally = tally
        self._logs = logs
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, and note what comes of it."""
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
    """Remember why a request is refused."""
    try:
        phrase = HTTPStatus(error.status).phrase.lower().replace(" ", "_")
    except ValueError:
        phrase = str(error.status)
    scope.setdefault("state", {})[REASON] = error.code or phrase


def _id_of(scope: Scope) -> str:
    """The id that a client gives its request, or a new one."""
    given = [value for name, value in scope["headers"] if name == ID_HEADER.lower().encode()]
    if len(given) == 1 and GIVEN_ID.fullmatch(given[0]):
        return bytes(given[0]).decode("ascii")
    return uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The route that was asked, as it was declared. There are few, whatever paths are asked for."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    return scope["path"] if "endpoint" in scope else "none"
