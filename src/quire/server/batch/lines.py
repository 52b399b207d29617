"""Lines: the requests of a batch, in OpenAI's format, and their results."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from quire.server.http.api_error import ApiError, shown
from quire.server.http.sse import dumps

ID_PREFIX = "batch_req_"


class Result(NamedTuple):
    """The result of a line: a line of the answers or of the errors."""

    encoded: bytes
    is_error: bool


@dataclass(frozen=True)
class Line:
    """A line of a batch. `error` is set if it is no request; `url` and `body` are empty then."""

    number: int  # from 1 on
    id: str  # of its result: depends on the line, its number, and the batch's system
    digest: str  # of the line alone; its answer's name and its seed follow from it
    custom_id: str | None = None
    url: str = ""
    body: Any = None
    error: ApiError | None = None

    def answered(self, status: int, body: bytes) -> Result:
        """Return the result for a route's answer."""
        error = None if status < 400 else self._error(json.loads(body)["error"])
        response = dumps({"status_code": status, "request_id": self.digest})[:-1] + b',"body":' + body + b"}"
        return self._result(response, error)

    def failed(self, error: ApiError) -> Result:
        """Return the result for a line that no route has answered."""
        return self._result(b"null", self._error(dict(error.body()["error"])))

    def _error(self, found: dict[str, Any]) -> dict[str, Any]:
        message = f"line {self.number}: {found['message']}"
        return {
            "code": found["code"] or found["type"],
            "message": message,
            "param": found["param"],
            "line": self.number,
        }

    def _result(self, response: bytes, error: dict[str, Any] | None) -> Result:
        head = dumps({"id": self.id, "custom_id": self.custom_id})[:-1]
        encoded = head + b',"response":' + response + b',"error":' + dumps(error) + b"}\n"
        return Result(encoded, error is not None)


class LineParser:
    """Parses the lines of a batch, in order."""

    def __init__(self, system: str, urls: Collection[str], endpoint: str | None, max_size: int) -> None:
        """Create it.

        Args:
            system: the digest of everything outside of a line that its result depends on.
            urls: the routes of batches.
            endpoint: the only one that this batch may use; None: any.
            max_size: most bytes of a line.
        """
        self.number = 0  # of the last line
        self.others = "the input, the model or its options were others"  # why results can be of another batch
        self._system = system
        self._urls = urls
        self._endpoint = endpoint
        self._max_size = max_size
        self._seen: dict[str, int] = {}  # the number of the line with each custom_id

    def id_of(self, raw: bytes, number: int) -> str:
        """Return the id of a line's result."""
        return ID_PREFIX + _digest(f"{self._system} {number} ".encode() + raw)

    def parse(self, raw: bytes) -> Line | None:
        """Return the next line; None if it is blank."""
        self.number += 1
        raw = raw.strip()
        if not raw:
            return None
        line = Line(self.number, self.id_of(raw, self.number), _digest(raw))
        found: Any = None
        try:
            found = self._object(raw)
            self._check(found)
        except ApiError as error:
            custom_id = found.get("custom_id") if isinstance(found, dict) else None
            return Line(
                line.number, line.id, line.digest, custom_id if isinstance(custom_id, str) else None, error=error
            )
        return Line(line.number, line.id, line.digest, found["custom_id"], found["url"], found["body"])

    def _object(self, raw: bytes) -> Any:
        """Return a line's JSON value. Raises ApiError."""
        if len(raw) > self._max_size:
            raise ApiError(f"it has {len(raw)} bytes; this server takes {self._max_size} (--max-body-size)")
        try:
            return json.loads(raw)
        except json.JSONDecodeError as error:
            raise ApiError(f"it is not JSON: {error.msg} at character {error.pos}", code="invalid_json_line") from error
        except (ValueError, RecursionError) as error:
            message = "it is not UTF-8, nests too deeply, or has a number with too many digits"
            raise ApiError(message, code="invalid_json_line") from error

    def _check(self, found: Any) -> None:
        """Raise ApiError for a value that is not a request."""
        if not isinstance(found, dict):
            raise ApiError(f"it is {shown(found)}; it must be an object with custom_id, method, url and body")
        name = found.get("custom_id")
        if not isinstance(name, str) or not name:
            raise _wrong("custom_id", found, "it must be a text that no other line has")
        if (earlier := self._seen.setdefault(name, self.number)) != self.number:
            message = f"custom_id is {shown(name)}, which line {earlier} has already; each line needs its own"
            raise ApiError(message, param="custom_id", code="duplicate_custom_id")
        if found.get("method", "POST") != "POST":
            raise _wrong("method", found, "it must be 'POST'")
        url = found.get("url")
        if not isinstance(url, str) or url not in self._urls:
            raise _wrong("url", found, f"a batch may use {', '.join(self._urls)}")
        if self._endpoint not in (None, url):
            raise _wrong("url", found, f"the endpoint of this batch is {self._endpoint}", "mismatched_endpoint")
        if not isinstance(found.get("body"), dict):
            raise _wrong("body", found, "it must be an object, the body of the request")


def _wrong(name: str, found: dict[str, Any], wanted: str, code: str | None = None) -> ApiError:
    state = f"is {shown(found[name])}" if name in found else "is missing"
    return ApiError(f"{name} {state}; {wanted}", param=name, code=code)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16, person=b"quire batch").hexdigest()
