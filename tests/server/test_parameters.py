"""docs/parameters.md says what the protocol's classes say, and these say what a server does."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import quire.server
from quire.request import MESSAGES, OLLAMA, OPENAI, RESPONSES, SERVED, served_in
from quire.server.http.body import model_of
from quire.server.protocol.body import Body
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.messages import MessagesRequest
from quire.server.protocol.ollama import Options
from quire.server.protocol.responses import ResponsesRequest
from tests.server.parameters import PAGE, Fate, bodies, fate_of, page, parameters, routes
from tests.server.serving import Serving

GIVEN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "import os\n", "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0},
    "/v1/responses": {"input": "a", "max_output_tokens": 2, "temperature": 0},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0},
    "/v1/embeddings": {"input": "import os\n"},
    "/v1/rerank": {"query": "a", "documents": ["a", "b"]},
}
# A value for each kind of field; of a field that is refused it asks for something.
VALUES: tuple[Any, ...] = ("zzz", ["zzz"], {"zzz": 1}, True, 1, "auto")


@pytest.fixture(scope="module")
def found() -> dict[type[Body], list[str]]:
    return bodies(routes())


@pytest.mark.slow
def test_the_page_is_what_the_code_says(found: dict[type[Body], list[str]]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(found), "python -m tests.server.parameters writes it"
    assert len(found) >= 15
    assert sum(len(list(parameters(kind))) for kind in found) >= 500


def test_each_body_has_the_fields_of_sampling_that_their_metadata_give_it() -> None:
    for protocol, body in (
        (OPENAI, ChatRequest), (RESPONSES, ResponsesRequest), (MESSAGES, MessagesRequest), (OLLAMA, Options)
    ):  # fmt: skip
        assert served_in(protocol).keys() <= body.model_fields.keys(), protocol
        assert len(served_in(protocol)) >= 5


@pytest.mark.slow
def test_what_is_honoured_is_read_somewhere(found: dict[type[Body], list[str]]) -> None:
    """A field that no code names outside the class that declares it can have no effect."""
    named = {name for one in SERVED.values() for name in one.names.values()} | set(SERVED)  # read by these lists
    for path in Path(quire.server.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                named.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value)
    for kind in found:
        for one in parameters(kind):
            name = one.path.rpartition(".")[2]
            if one.fate is Fate.HONOURED and name != "type":  # types say how objects are read
                assert name in named or f"{name}_" in named, (kind, one)


@pytest.mark.slow
def test_what_is_refused_is_refused_and_what_has_no_effect_has_none(
    server: Serving, found: dict[type[Body], list[str]]
) -> None:
    tried = {Fate.REFUSED: 0, Fate.WITHOUT_EFFECT: 0}
    for kind, paths in found.items():
        if paths[0] not in GIVEN:
            continue
        path, given = paths[0], GIVEN[paths[0]]
        usual = shown(server.post(path, **given).json())
        for name in kind.model_fields:
            fate, why = fate_of(kind, name)
            if fate is Fate.HONOURED:
                continue
            value = value_for(kind, name, given)
            answer = server.post(path, **given, **{name: value})
            tried[fate] += 1
            if fate is Fate.REFUSED:
                assert answer.status == 400, (path, name, value, answer.body)
                message = str(answer.json()["error"]["message"])
                assert name in message, (path, name, message)
                assert why.partition("; `")[0] in message, (path, name, message)
            else:
                assert answer.status == 200, (path, name, value, answer.body)
                assert shown(answer.json()) == usual, (path, name)
                assert "x-quire-ignored-fields" not in answer.headers
    assert tried[Fate.REFUSED] >= 25
    assert tried[Fate.WITHOUT_EFFECT] >= 15


def value_for(kind: type[Body], name: str, given: dict[str, Any]) -> Any:
    """A value of the field's type."""
    for value in VALUES:
        try:
            model_of(given | {name: value}, kind)
        except Exception as error:  # of another type, or refused as it has to be
            if "leave it out" in str(error):
                return value
        else:
            if name in kind.IGNORED:
                return value
    raise AssertionError(f"{kind.__name__}.{name} takes none of {VALUES}")


def shown(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from answer to answer."""
    left = without(body, "id", "created", "created_at", "completed_at", "usage")
    return left | {"output": [without(item, "id") for item in left.get("output", ())]}


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}
