"""A client of a server's routes. All failures are QuireErrors with a readable message."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ssl import SSLCertVerificationError
from typing import Any
from urllib.parse import urlsplit

from quire.errors import ConfigError, QuireError

CONNECT = 10.0  # seconds, timeout of a connection and of a short answer
ANSWER = 600.0  # seconds, timeout of silence in a stream, since a long prompt takes long
SHOWN = 300  # characters shown of an error page


class Refused(QuireError):
    """A server answered with an error."""

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code  # of OpenAI's API


class Client:
    """Sends requests to one server, one at a time."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """url: of the server, with or without /v1. key: sent as a bearer token. Raises ConfigError for invalid ones."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            self._host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"url is {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"url is {url!r}; it must be as in http://127.0.0.1:8000")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key has characters that no HTTP header can carry; use printable ASCII")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._port = port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._socket: socket.socket | None = None  # of the open request
        self.is_stopped = False  # by `stop`

    def get(self, path: str) -> str:
        """Return the answer of a route. Raises QuireError if there is no server, and Refused for an error status."""
        connection, answer = self._ask("GET", path, None, CONNECT)
        try:
            return answer.read().decode("utf-8", "replace")
        except (OSError, HTTPException) as error:
            raise QuireError(f"the server at {self.url} ended while it answered {path} ({_name(error)})") from error
        finally:
            self._socket = None
            connection.close()

    def get_json(self, path: str) -> Any:
        """Return the parsed JSON of a route. Raises QuireError if it is not JSON, and like `get`."""
        text = self.get(path)
        try:
            return json.loads(text)
        except ValueError as error:
            raise QuireError(f"{self.url}{path} does not answer JSON; is it an OpenAI-compatible server?") from error

    def models(self) -> list[Mapping[str, Any]]:
        """Return the models of the server, each with an id. Raises QuireError if it lists none, and like `get`."""
        listed = self.get_json("/v1/models")
        try:
            return [dict(one, id=one["id"]) for one in listed["data"]]
        except (KeyError, TypeError, ValueError) as error:
            raise QuireError(f"{self.url}/v1/models lists no models; is it an OpenAI-compatible server?") from error

    def events(self, path: str, body: Mapping[str, Any] | None = None) -> Generator[str, None, None]:
        """Yield the data of server-sent events. body: if given, it is posted.

        Ends early after `stop`. Raises like `get`, and QuireError if the connection ends in the middle of an answer.
        """
        self.is_stopped = False  # by `stop`
        text = None if body is None else json.dumps(body)
        try:
            connection, answer = self._ask("GET" if body is None else "POST", path, text, ANSWER)
        except QuireError:
            if self.is_stopped:
                return
            raise
        try:
            for line in answer:
                if self.is_stopped:
                    return
                if line.startswith(b"data:"):
                    yield line[5:].strip().decode("utf-8", "replace")
        except (OSError, HTTPException) as error:
            if not self.is_stopped:
                raise QuireError(
                    f"the server at {self.url} ended in the middle of an answer ({_name(error)})"
                ) from error
        finally:
            self._socket = None
            connection.close()

    def stop(self) -> None:
        """End the open stream. A signal handler or another thread may call this."""
        self.is_stopped = True
        opened = self._socket
        if opened is not None:
            with suppress(OSError):  # it has ended already
                opened.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, body: str | None, seconds: float) -> tuple[HTTPConnection, HTTPResponse]:
        connection = self._kind(self._host or "", self._port, timeout=CONNECT)
        try:
            connection.connect()
            self._socket = connection.sock
            connection.sock.settimeout(seconds)
            connection.request(method, self._path + path, body, self._headers)
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                raise self._refused(path, answer)
        except SSLCertVerificationError as error:
            connection.close()
            raise QuireError(
                f"the certificate of {self.url} is not trusted ({error.verify_message}); if it is right, give the PEM "
                f"file of its CA in the variable SSL_CERT_FILE"
            ) from error
        except (OSError, HTTPException) as error:
            connection.close()
            raise QuireError(f"no server answers at {self.url} ({_name(error)}); quire serve starts one") from error
        except BaseException:
            connection.close()
            raise
        return connection, answer

    def _refused(self, path: str, answer: HTTPResponse) -> Refused:
        try:
            text = answer.read().decode("utf-8", "replace")
        except (OSError, HTTPException):
            text = ""
        message, code = text.strip()[:SHOWN], None
        try:
            error = json.loads(text)["error"]
            message, code = (error, None) if isinstance(error, str) else (str(error["message"]), error.get("code"))
        except (ValueError, KeyError, TypeError):
            if message.startswith("<"):  # an HTML page
                message = ""
        if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) and code != "host_not_allowed":
            return Refused(
                f"the server at {self.url} wants a key: give --api-key KEY, or set QUIRE_API_KEY (HTTP status "
                f"{answer.status}{f', {message}' if message else ''})",
                answer.status,
                code,
            )
        said = message or answer.reason
        return Refused(
            f"the server at {self.url} answers {path} with HTTP status {answer.status}: {said}", answer.status, code
        )


def _name(error: Exception) -> str:
    """Return a short reason."""
    text = getattr(error, "strerror", None) or str(error)
    return text or type(error).__name__
