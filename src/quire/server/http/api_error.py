"""The errors that clients receive: a status and a body in OpenAI's format."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from quire.errors import EngineAsleep, EngineStopped, PromptTooLong, QuireError, RequestError

# OpenAI's types of errors by status. Other statuses are "invalid_request_error" below 500 and "server_error" above.
KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
# Anthropic's, on its own routes. Other statuses are "invalid_request_error" below 500 and "api_error" above.
ANTHROPIC_KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
ANTHROPIC_PATHS, OLLAMA_PATHS = "/v1/messages", "/api/"  # prefixes of the routes of these protocols
MAX_SHOWN = 80  # characters of a client's value that an error shows


def shown(value: object) -> str:
    """Return a short representation of a value for an error message."""
    short = reprlib.Repr()  # shows only a few entries of a large value
    short.maxstring = MAX_SHOWN
    return cut(short.repr(value))


def cut(text: str) -> str:
    """Return a text, or the beginning of a long one."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


@with_config(ConfigDict(extra="forbid"))
class Answer(TypedDict):
    """An answer, or an object in it. It has no other fields than those of its class."""


class ErrorDetail(Answer):
    """The message of an error, its type, the wrong field, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """An error answer."""

    error: ErrorDetail


class AnthropicErrorDetail(Answer):
    """The type and the message of an error."""

    type: str
    message: str


class AnthropicError(Answer):
    """An error answer of Anthropic's protocol."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class OllamaError(Answer):
    """An error answer of Ollama's protocol."""

    error: str


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
        """Create it. param: the field that is wrong; code: a word for programs."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> Error:
        """Return the body in OpenAI's format."""
        default = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        kind = next((name for status, name in KINDS.items() if status == self.status), default)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> Error | AnthropicError | OllamaError:
        """Return the body in the format of the route's protocol."""
        if path.startswith(OLLAMA_PATHS):
            return {"error": str(self)}
        if path == ANTHROPIC_PATHS or path.startswith(f"{ANTHROPIC_PATHS}/"):
            default = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
            kind = next((name for status, name in ANTHROPIC_KINDS.items() if status == self.status), default)
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        return self.body()


def queue_full(limit: int) -> ApiError:
    """Return the error for a request that exceeds the queue."""
    return ApiError(
        f"{limit} requests run or wait already, which is the limit of this server; try again later",
        HTTPStatus.TOO_MANY_REQUESTS,
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def asleep() -> ApiError:
    """Return the error for requests while the engine sleeps."""
    return ApiError(
        "the model sleeps, so that its memory is free for other work; try again later (POST /wake_up ends the sleep)",
        HTTPStatus.SERVICE_UNAVAILABLE,
        code="asleep",
        headers={"Retry-After": "10"},
    )


def engine_stopped(why: str) -> ApiError:
    """Return the error for requests after the engine has stopped."""
    return ApiError(f"the engine has stopped: {why}", HTTPStatus.SERVICE_UNAVAILABLE, code="engine_stopped")


def api_error(error: QuireError) -> ApiError:
    """Convert the error that ended a job to the client's error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStopped):
        return engine_stopped(error.why)
    if isinstance(error, EngineAsleep):
        return asleep()
    return ApiError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def sandbox_failed(why: str) -> ApiError:
    """Return the error for a failed sandbox: no grammar or template can be processed now."""
    return ApiError(f"{why}; try again later", HTTPStatus.SERVICE_UNAVAILABLE, code="sandbox_failed")


def deadline_passed(seconds: float) -> ApiError:
    """Return the error for a request that took longer than allowed."""
    return ApiError(
        f"the request was not done {seconds:g} s after it arrived, which is the time limit of this server",
        HTTPStatus.GATEWAY_TIMEOUT,
        code="deadline",
    )


def internal_error(error: Exception) -> ApiError:
    """Return the error for a failure that no request has caused."""
    message = f"an error of the server's own: {type(error).__name__}"
    return ApiError(message, HTTPStatus.INTERNAL_SERVER_ERROR, code="internal_error")


def bad_messages(error: RequestError) -> ApiError:
    """Return the error for a conversation that gives no prompt."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(str(error), param="messages", code=code)


def request_failed(why: str, grammar: str | None = None) -> ApiError:
    """Return the error for a request that failed: by its own grammar, which grew too large, or by a failing step.

    grammar: the name of the field with the request's grammar.
    """
    own = f"{RequestError.__name__}: "
    if why.startswith(own):
        return ApiError(why.removeprefix(own), param=grammar)
    return ApiError(f"the request failed: {why}", HTTPStatus.INTERNAL_SERVER_ERROR, code="engine_error")
