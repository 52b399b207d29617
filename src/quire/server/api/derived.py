"""Models that clients derive from a served one, as in Ollama: a name, a system prompt, first messages and defaults."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Protocol

from typing_extensions import TypedDict

from quire.server.http.api_error import ApiError, shown
from quire.server.http.body import model_of
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.ollama import CreateRequest, OllamaChatRequest

KIND = "model"
MOST = 128  # derived models of a key
MOST_BYTES = 2**16  # of one, as JSON: all those of a key are read at once
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,255}")


class Derived(TypedDict):
    """A derived model."""

    id: str
    object: str
    name: str
    base: str  # the served model or adapter
    system: str
    messages: list[dict[str, Any]]  # in Ollama's form; they come before those of a request
    parameters: dict[str, Any]  # Ollama's options, for those that a request does not set
    license: str
    created_at: int  # seconds since 1970


class Objects(Protocol):
    """A store of objects by id, each with its owner."""

    def put(self, owner: str, *objects: Mapping[str, Any]) -> None:
        """Add objects, or replace them. Raises OSError."""

    def get(self, owner: str, kind: str, name: str) -> Any:
        """Return an owner's object; None if it is unknown."""

    def delete(self, name: str) -> None:
        """Remove an object. Raises OSError."""

    def listed(self, owner: str, kind: str, after: str | None, limit: int) -> list[Any]:
        """Return up to `limit` objects of an owner, the last one first."""


class DerivedModels:
    """The derived models of all clients. A client, that is a key, sees its own. Belongs to the event loop."""

    def __init__(self, store: Objects) -> None:
        self._store = store

    def find(self, owner: str, name: str) -> Derived | None:
        """Return a derived model, or None if this name is unknown."""
        found: Derived | None = self._store.get(owner, KIND, _id(owner, name))
        return found

    def listed(self, owner: str) -> list[Derived]:
        """Return all derived models of a client, the last one first."""
        return self._store.listed(owner, KIND, None, MOST)

    def create(self, owner: str, name: str, base: str, parent: Derived | None, body: CreateRequest) -> None:
        """Add a derived model, or replace it. Fields that the body lacks are taken from its parent, if it is derived.

        Raises ApiError for a wrong name, too many models or a full disk, and RequestValidationError for parameters that
        no request may have.
        """
        license_ = body.license or ""
        old: Any = parent or {}
        given = [one.model_dump(exclude_unset=True) for one in body.messages or ()]
        self._put(
            owner,
            {
                "id": _id(owner, name),
                "object": KIND,
                "name": name,
                "base": base,
                "system": old.get("system", "") if body.system is None else body.system,
                "messages": given or old.get("messages", []),
                "parameters": old.get("parameters", {}) | (body.options() if body.parameters else {}),
                "license": license_ if isinstance(license_, str) else "\n".join(license_),
                "created_at": int(time.time()),
            },
        )

    def copy(self, owner: str, base: str, source: Derived | None, name: str) -> None:
        """Add a further name of a served or a derived model. Raises ApiError."""
        empty: Derived = {"id": "", "object": KIND, "name": "", "base": base, "system": "", "messages": [],
                          "parameters": {}, "license": "", "created_at": int(time.time())}  # fmt: skip
        self._put(owner, {**(source or empty), "id": _id(owner, name), "name": name})

    def delete(self, owner: str, name: str) -> None:
        """Remove a derived model. Raises ApiError (404) for an unknown one."""
        if self.find(owner, name) is None:
            message = f"there is no created model {shown(name)} of this key here"
            raise ApiError(message, HTTPStatus.NOT_FOUND, param="model", code="model_not_found")
        with _writing():
            self._store.delete(_id(owner, name))

    def _put(self, owner: str, one: Derived) -> None:
        if NAME.fullmatch(one["name"]) is None:
            message = f"{shown(one['name'])} is no name of a model; it has letters, digits and any of _ . : / -"
            raise ApiError(message, param="model")
        if (size := len(json.dumps(one))) > MOST_BYTES:
            message = f"the model has {size} bytes with its texts, of {MOST_BYTES} at most"
            raise ApiError(message, param="model")
        apply(one, model_of({"messages": [{"role": "user", "content": ""}]}, ChatRequest))  # refuses wrong values
        if self.find(owner, one["name"]) is None and len(self.listed(owner)) >= MOST:
            message = f"there are {MOST} created models of this key, the most; delete one (DELETE /api/delete)"
            raise ApiError(message, HTTPStatus.TOO_MANY_REQUESTS, code="too_many_models")
        with _writing():
            self._store.put(owner, one)


def apply(derived: Derived, body: ChatRequest) -> None:
    """Turn a request to a derived model into one to its base. Raises RequestValidationError.

    Its first messages come before those of the request, its system prompt first, unless the request has its own.
    """
    given = [{"role": "system", "content": derived["system"]}] if derived["system"] else []
    last = {"role": "user", "content": ""}  # a chat has a message
    own = {"messages": [*given, *derived["messages"], last], "options": derived["parameters"]}
    defaults = model_of(own, OllamaChatRequest).chat()
    has_system = bool(body.messages) and body.messages[0].role in ("system", "developer")
    body.messages[has_system:has_system] = defaults.messages[len(given) if has_system else 0 : -1]
    asked = {name for name in body.model_fields_set if getattr(body, name) is not None}
    if "max_completion_tokens" in asked:
        asked.add("max_tokens")
    for name in defaults.model_fields_set - asked - {"messages", "stream", "logprobs"}:
        setattr(body, name, getattr(defaults, name))
    body.model = derived["base"]


def _id(owner: str, name: str) -> str:
    both = f"{owner}\n{name}".encode(errors="surrogatepass")
    return f"model-{sha256(both).hexdigest()}"


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"the data directory cannot be written: {error.strerror}"
        raise ApiError(message, HTTPStatus.INSUFFICIENT_STORAGE, code="disk_full") from error
