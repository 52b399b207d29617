"""Guard: who may ask, and how much may be sent. The first that a request meets, before any of it is understood."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Callable
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import ApiError
from quire.server.sse import JsonBody

OPEN_PATHS = frozenset({"/health"})  # what is answered without a key
KEY_STATE = "key"  # where a request's state holds the key that was shown
BODY_TIMEOUT = 60.0  # seconds for a body to come
MAX_HELD_BODIES = 16  # of the largest size: as many bytes are held at a time for requests that are being answered


class Guard:
    """Refuses requests without a key that is known, and bodies that are too large or too slow."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], max_body_size: int, realm_paths: tuple[str, ...]) -> None:
        """realm_paths: a browser that comes to one of these without a key asks its user for one (as a password)."""
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_body_size = max_body_size
        self._realm_paths = realm_paths
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = self._check_key(scope) or self._check_length(headers)
        if refusal is not None:
            await JsonBody(refusal.body(), refusal.status, refusal.headers)(scope, receive, send)
            return
        body = _Bounded(receive, self._max_body_size, self._hold)
        try:
            await self._app(scope, body, send)
        finally:
            self._held -= body.held

    def _hold(self, count: int) -> None:
        """Make room for bytes of a body. Raises HTTPException (429) where there is none."""
        if self._held + count > MAX_HELD_BODIES * self._max_body_size:
            told = f"{self._held} bytes of requests are being served, as many as this server takes; try again later"
            raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, told, {"Retry-After": "1"})
        self._held += count

    def _check_key(self, scope: Scope) -> ApiError | None:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return None
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        shown = _shown_key(given[0]) if len(given) == 1 else b""  # of several, a proxy may have checked another one
        # Each key is compared, and in constant time, so that the time taken tells nothing of any.
        found = [key for key in self._keys if hmac.compare_digest(key, shown)]
        if found:
            scope.setdefault("state", {})[KEY_STATE] = found[0].decode()
            return None
        told = 'send "Authorization: Bearer KEY" with a key of this server'
        challenge = "Basic" if scope["path"].startswith(self._realm_paths) else "Bearer"
        return ApiError(
            f"{'this key is not known' if shown else 'there is no key in the request'}; {told}",
            HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
            headers={"WWW-Authenticate": f'{challenge} realm="quire"'},
        )

    def _check_length(self, headers: dict[bytes, bytes]) -> ApiError | None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_size:
            return _too_large(self._max_body_size)
        return None


class _Bounded:
    """A `receive` that ends a body where it becomes too large or too late."""

    def __init__(self, receive: Receive, limit: int, hold: Callable[[int], None]) -> None:
        """hold: is asked for room for bytes that came."""
        self.held = 0
        self._hold = hold
        self._receive = receive
        self._limit = limit
        self._left = limit
        self._end: float | None = None
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        if self._end is None:
            self._end = now + BODY_TIMEOUT
        try:
            message = await asyncio.wait_for(self._receive(), self._end - now)
        except asyncio.TimeoutError:
            raise HTTPException(
                HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_TIMEOUT:g} s"
            ) from None
        if message["type"] == "http.request":
            self._left -= (count := len(message.get("body", b"")))
            if self._left < 0:
                error = _too_large(self._limit)
                raise HTTPException(error.status, str(error))
            self._hold(count)
            self.held += count
            self._is_complete = not message.get("more_body", False)
        return message


def _shown_key(authorization: bytes) -> bytes:
    """The key of a Bearer, or the password of a Basic authorization; empty where there is none."""
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def _too_large(limit: int) -> ApiError:
    return ApiError(
        f"the body is larger than {limit} bytes, which is the most that this server takes",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="body_too_large",
    )
