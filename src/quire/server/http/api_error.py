"""What a client gets when its request cannot be served: a status and a body in OpenAI's shape."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from quire.errors import EngineStopped, QuireError, RequestError

# OpenAI's names of kinds of errors, by status; others are "invalid_request_error" below 500 and "server_error" above.
KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
# Anthropic's, on its own routes; others are "invalid_request_error" below 500 and "api_error" above.
ANTHROPIC_KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
ANTHROPIC_PATHS, OLLAMA_PATHS = "/v1/messages", "/api/"  # what the routes of these protocols begin with
MAX_SHOWN = 80  # characters of what a client sent that an error shows


def shown(value: object) -> str:
    """A value as an error shows it."""
    short = reprlib.Repr()  # of a large one, it writes a few entries only
    short.maxstring = MAX_SHOWN
    return cut(short.repr(value))


def cut(text: str) -> str:
    """A text, or the beginning of a long one."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class ApiError(QuireError):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        status: int = HTTPStatus.BAD_REQUEST,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """param: the field that is wrong; code: a word for programs."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        default = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        kind = next((name for status, name in KINDS.items() if status == self.status), default)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> dict[str, Any]:
        """The error as the protocol of a route has it."""
        if path.startswith(OLLAMA_PATHS):
            return {"error": str(self)}
        if path == ANTHROPIC_PATHS or path.startswith(f"{ANTHROPIC_PATHS}/"):
            default = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
            kind = next((name for status, name in ANTHROPIC_KINDS.items() if status == self.status), default)
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        return self.body()


def queue_full(limit: int) -> ApiError:
    """There is no room for one more request."""
    return ApiError(
        f"{limit} requests run or wait already, which is as many as this server takes; try again later",
        HTTPStatus.TOO_MANY_REQUESTS,
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def engine_stopped(why: str) -> ApiError:
    """No request can be served any more."""
    return ApiError(f"the engine has stopped: {why}", HTTPStatus.SERVICE_UNAVAILABLE, code="engine_stopped")


def api_error(error: QuireError) -> ApiError:
    """What a client gets of an error that a job ended with."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStopped):
        return engine_stopped(error.why)
    return ApiError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def sandbox_failed(why: str) -> ApiError:
    """No grammar or template can be looked at now, whatever it is."""
    return ApiError(f"{why}; try again later", HTTPStatus.SERVICE_UNAVAILABLE, code="sandbox_failed")


def deadline_passed(seconds: float) -> ApiError:
    """A request took longer than it may."""
    return ApiError(
        f"the request was not done {seconds:g} s after it came, which is the longest that this server lets one take",
        HTTPStatus.GATEWAY_TIMEOUT,
        code="deadline",
    )


def internal_error(error: Exception) -> ApiError:
    """Something failed that has to do with no request."""
    message = f"an error of the server's own: {type(error).__name__}"
    return ApiError(message, HTTPStatus.INTERNAL_SERVER_ERROR, code="internal_error")


def request_failed(why: str, grammar: str | None = None) -> ApiError:
    """A request ended with an error: its own, of a grammar that grows too large, or a failing step's.

    grammar: the field that had the request's grammar.
    """
    own = f"{RequestError.__name__}: "
    if why.startswith(own):
        return ApiError(why.removeprefix(own), param=grammar)
    return ApiError(f"the request failed: {why}", HTTPStatus.INTERNAL_SERVER_ERROR, code="engine_error")
