"""Guard: checks keys, host names and body sizes. It is the first layer, before a request is parsed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from hashlib import blake2b
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.http.access import note_refusal
from quire.server.http.api_error import ApiError, shown
from quire.server.http.hosts import host_in, is_loopback
from quire.server.http.sse import JsonBody

FLEET_PATHS = "/fleet/"  # prefix of the routes for a fleet's gateways, which have a separate secret
# Routes that replace weights and free memory, which have a separate key. Without one they do not exist.
ADMIN_PATHS = ("/sleep", "/wake_up", "/is_sleeping", "/update_weights_from_disk")
OPEN_PATHS = frozenset({"/health", "/ready"})  # paths that need no key and accept any host name
CLIENT = "client"  # name of the client's identity in a request's state
MAX_FILE_SIZE = 200 * 2**20  # bytes, OpenAI's limit for the input of a batch
MAX_FORM_SIZE = MAX_FILE_SIZE + 2**16  # with the fields around the file
BODY_TIMEOUT = 60.0  # seconds for a body to arrive
UPLOADS = "/v1/files"  # path of the route whose bodies are files
UPLOAD_TIMEOUT = 3600.0  # seconds for a file to arrive


def identity_of(key: bytes) -> str:
    """Return the identity of the clients that have this key."""
    return blake2b(key, digest_size=16).hexdigest()


def client_of(request: Request) -> str:
    """Return the identity of a request's client: a digest of its key, or an empty string without keys."""
    return getattr(request.state, CLIENT, "")


class Guard:
    """Refuses requests to another host or without a known key, and bodies that are too large or too slow."""

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[str, ...],
        hosts: frozenset[str] | None,
        max_body_size: int,
        realm_paths: tuple[str, ...],
        fleet_secret: str | None = None,
        admin_key: str | None = None,
        max_file_size: int = 0,
    ) -> None:
        """Wrap an application. hosts: see `hosts_to_check`. fleet_secret: the only key of the routes below /fleet/.
        admin_key: the only key of ADMIN_PATHS. max_file_size: most bytes of an uploaded file; 0: no uploads.

        realm_paths: a browser that requests / or a path below one of these without a key asks its user for a password.
        """
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._fleet_keys = [] if fleet_secret is None else [fleet_secret.encode()]
        self._admin_keys = [] if admin_key is None else [admin_key.encode()]
        self._hosts = hosts
        self._max_body_size = max_body_size
        self._max_file_size = max_file_size
        self._realm_paths = realm_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        limit, seconds = self._max_body_size, BODY_TIMEOUT
        if scope["path"] == UPLOADS and self._max_file_size:
            limit, seconds = self._max_file_size, UPLOAD_TIMEOUT
        if scope["path"].startswith(FLEET_PATHS) and self._fleet_keys:
            limit *= 2  # a body of a gateway's client, and the gateway's own fields
        refusal = self._check_host(scope) or self._check_key(scope) or _check_length(headers, limit)
        if refusal is not None:
            note_refusal(scope, refusal)
            await JsonBody(refusal.body_for(scope["path"]), refusal.status, refusal.headers)(scope, receive, send)
            return
        await self._app(scope, _Bounded(receive, limit, seconds), send)

    def _check_host(self, scope: Scope) -> ApiError | None:
        if self._hosts is None or scope["path"] in OPEN_PATHS:
            return None
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not given and scope["http_version"] == "1.0":  # optional in HTTP/1.0, and every browser sends one
            return None
        named = [host_in(header) for header in given]
        if named and all(host is not None and (host in self._hosts or is_loopback(host)) for host in named):
            return None
        reported = f"the request names the host {', '.join(map(shown, given))}" if given else "there is no Host header"
        others = "".join(f", {host}" for host in sorted(self._hosts))
        return ApiError(
            f"{reported}; this server answers requests to localhost and its addresses (127.0.0.1, [::1]){others}; "
            f"start it with --allowed-hosts NAME to allow another name, or with an --api-key",
            HTTPStatus.FORBIDDEN,
            code="host_not_allowed",
        )

    def _check_key(self, scope: Scope) -> ApiError | None:
        keys = self._fleet_keys if scope["path"].startswith(FLEET_PATHS) else self._keys
        if scope["path"] in ADMIN_PATHS and self._admin_keys:
            keys = self._admin_keys
        if not keys or scope["path"] in OPEN_PATHS:
            return None
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if given:
            shown = _shown_key(given[0]) if len(given) == 1 else b""  # of several, a proxy may have checked another one
        else:  # Anthropic's clients
            given = [value for name, value in scope["headers"] if name == b"x-api-key"]
            shown = given[0].strip() if len(given) == 1 else b""
        # Every key is compared, each in constant time, so that the time taken reveals nothing about the keys.
        found = [key for key in keys if hmac.compare_digest(key, shown)]
        if found:
            scope.setdefault("state", {})[CLIENT] = identity_of(found[0])
            return None
        message = 'send "Authorization: Bearer KEY" with a key of this server'
        is_page = scope["path"] == "/" or scope["path"].startswith(self._realm_paths)
        challenge = "Basic" if is_page else "Bearer"
        return ApiError(
            f"{'this key is not known' if shown else 'there is no key in the request'}; {message}",
            HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
            headers={"WWW-Authenticate": f'{challenge} realm="quire"'},
        )


def _check_length(headers: dict[bytes, bytes], limit: int) -> ApiError | None:
    length = headers.get(b"content-length", b"0")
    return _too_large(limit) if length.isdigit() and int(length[:20]) > limit else None


class _Bounded:
    """A `receive` that aborts a body that becomes too large or too late."""

    def __init__(self, receive: Receive, limit: int, seconds: float) -> None:
        self._receive = receive
        self._limit = limit
        self._seconds = seconds
        self._left = limit
        self._end: float | None = None
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        if self._end is None:
            self._end = now + self._seconds
        try:
            message = await asyncio.wait_for(self._receive(), self._end - now)
        except asyncio.TimeoutError:
            raise HTTPException(
                HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {self._seconds:g} s"
            ) from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                error = _too_large(self._limit)
                raise HTTPException(error.status, str(error))
            self._is_complete = not message.get("more_body", False)
        return message


def _shown_key(authorization: bytes) -> bytes:
    """Return the key of a Bearer or the password of a Basic authorization, or an empty string."""
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
        f"the body is larger than {limit} bytes, which is the limit of this server",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="body_too_large",
    )
