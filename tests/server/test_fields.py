"""What routes say of fields: which are taken as not given, which is wrong, and which was perhaps meant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import CompletionCreateParams, EmbeddingCreateParams
from openai.types.chat import CompletionCreateParams as ChatCreateParams

from quire.errors import RequestError
from quire.sandbox.chat_template import ChatTemplate
from quire.server.protocol.body import Body
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.embeddings import EmbeddingRequest
from quire.server.protocol.sampling import Sampling
from quire.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from quire.server.protocol.unknown import ALSO_CALLED, BOOKKEEPING, DEPENDENT, NOT_HERE, near_miss
from quire.server.protocol.unknown import NEUTRAL as NEUTRAL_VALUES
from tests.server.serving import Serving, serving

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES = [{"role": "user", "content": "a stack"}]
BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    COMPLETIONS: (CompletionRequest, {"prompt": "import os\n", "max_tokens": 4, "temperature": 0}),
    CHAT: (ChatRequest, {"messages": MESSAGES, "max_completion_tokens": 4, "temperature": 0}),
    EMBEDDINGS: (EmbeddingRequest, {"input": "import os\n"}),
    TOKENIZE: (TokenizeRequest, {"prompt": "import os\n"}),
    DETOKENIZE: (DetokenizeRequest, {"tokens": [5, 6]}),
}


def told(server: Serving, path: str, **body: Any) -> Any:
    """What is answered, without what differs from answer to answer."""
    answer = server.post(path, **BODIES[path][1] | body)
    assert answer.status == 200, (body, answer.body)
    found = answer.json()
    if "usage" in found:
        found["usage"].pop("prompt_tokens_details")
    return {name: value for name, value in found.items() if name not in ("id", "created")}


# ------------------------------------------------------------------------------------------------ nothing asked for


@pytest.mark.parametrize("path", BODIES)
def test_null_means_absent(server: Serving, path: str) -> None:
    body, given = BODIES[path]
    optional = [field.alias or name for name, field in body.model_fields.items() if not field.is_required()]
    nulls = {name: None for name in optional if name not in given}
    assert len(nulls) >= 1
    assert told(server, path, **nulls) == told(server, path)


@pytest.mark.parametrize(
    ("path", "kind"),
    [(COMPLETIONS, CompletionCreateParams), (CHAT, ChatCreateParams), (EMBEDDINGS, EmbeddingCreateParams)],
)
def test_no_field_of_the_openai_package_is_unknown(server: Serving, path: str, kind: Any) -> None:
    """Of a newer one, there may be some."""
    fields = {name for one in get_args(kind) or (kind,) for name in get_type_hints(one)}
    assert len(fields) >= 5
    unknown = [name for name in fields if f"no field '{name}'" in str(server.post(path, **{name: None}).body)]
    assert not unknown


EMPTY = {
    "logit_bias": {}, "metadata": {}, "response_format": {}, "service_tier": "", "stop": [], "stop_token_ids": [],
    "stream_options": {}, "user": "", "regex": "", "grammar": "", "model": "",
}  # fmt: skip
EMPTY_IN_CHAT = EMPTY | {
    "audio": {}, "chat_template": "", "function_call": {}, "functions": [], "modalities": [], "moderation": {},
    "prediction": {}, "prompt_cache_key": "", "prompt_cache_options": {}, "prompt_cache_retention": "",
    "reasoning_effort": "", "safety_identifier": "", "tool_choice": "", "tools": [], "verbosity": "",
}  # fmt: skip
NEUTRAL = {
    "best_of": 1, "n": 1, "parallel_tool_calls": False, "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "in_memory", "reasoning_effort": "none", "response_format": {"type": "text"},
    "service_tier": "default", "store": False, "stream_options": {"include_usage": False, "include_obfuscation": False},
    "tool_choice": "none", "function_call": "auto", "modalities": ["text"], "verbosity": "medium", "top_logprobs": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, EMPTY | {"suffix": ""}),
        (COMPLETIONS, {"stop": ""}),
        (CHAT, EMPTY_IN_CHAT),
        (CHAT, {"stop": "", "tool_choice": {}, "function_call": ""}),
        (CHAT, {name: value for name, value in NEUTRAL.items() if name != "best_of"}),
        (CHAT, {"service_tier": "auto", "tool_choice": "auto", "parallel_tool_calls": True, "function_call": "none"}),
        (COMPLETIONS, {name: value for name, value in NEUTRAL.items() if name in CompletionRequest.model_fields}),
        (EMBEDDINGS, {"encoding_format": "", "user": "", "model": ""}),
    ],
)
def test_what_asks_for_nothing_is_absent(server: Serving, path: str, fields: dict[str, Any]) -> None:
    assert told(server, path, **fields) == told(server, path)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("web_search_options", {}, "not searched"),
        ("web_search_options", {"search_context_size": "low"}, "not searched"),
        ("prompt_cache_retention", "2h", "'24h'"),
        ("cache_control", {"type": "ephemeral", "ttl": "2h"}, "'1h'"),
        ("prompt_cache_options", {"mode": "explicit"}, "breakpoints"),
        ("prompt_cache_options", {"ttl": "30m"}, "prompt_cache_retention"),
        ("moderation", {"model": "omni-moderation-latest"}, "moderated"),
        ("service_tier", "priority", "tier"),
        ("store", True, "stored"),
        ("modalities", ["text", "audio"], "only text"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "not a function of tools"),
        ("tool_choice", 5, "'none', 'auto'"),
        ("function_call", {"name": "f"}, "functions"),
    ],
)
def test_what_asks_for_more_is_refused_by_name(server: Serving, field: str, value: Any, words: str) -> None:
    answer = server.post(CHAT, **BODIES[CHAT][1], **{field: value})
    assert (answer.status, answer.error()["param"]) == (400, field)
    assert words in answer.error()["message"]


def test_a_message_may_have_a_null_where_a_tool_was_called(server: Serving) -> None:
    message = MESSAGES[0] | {"tool_call_id": None, "name": None, "tool_calls": None}
    assert told(server, CHAT, messages=[message]) == told(server, CHAT)


# ------------------------------------------------------------------------------------------------- did you mean ...


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        (COMPLETIONS, {"temprature": 1}, "temperature"),
        (COMPLETIONS, {"mesages": []}, None),
        (COMPLETIONS, {"topP": 0.5}, "top_p"),
        (COMPLETIONS, {"n_predict": 5}, "max_tokens"),
        (COMPLETIONS, {"max_token": 1}, "max_tokens"),
        (COMPLETIONS, {"stream_options": {"include_usag": 1}}, "include_usage"),
        (COMPLETIONS, {"stream_options": {"stream": True}}, None),
        (
            COMPLETIONS,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stict": 1}}},
            "strict",
        ),
        (CHAT, {"mesages": []}, "messages"),
        (CHAT, {"messages": [{**MESSAGES[0], "tool_choice": ""}]}, None),
        (CHAT, {"messages": [{"role": "user", "contnet": "a"}]}, "content"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "temperature": 0}]}, None),
        (EMBEDDINGS, {"max_tokens": 1}, None),
        (EMBEDDINGS, {"dimension": 1}, "dimensions"),
        (EMBEDDINGS, {"guided_regex": "a"}, None),
        (TOKENIZE, {"add_special_token": True}, "add_special_tokens"),
        (TOKENIZE, {"max_tokens": 1}, None),
        (TOKENIZE, {"prompt": None, "messages": [{"role": "user", "contents": "a"}]}, "content"),
        (DETOKENIZE, {"token": [1]}, "tokens"),
        (DETOKENIZE, {"prompts": [1]}, None),
    ],
)
def test_only_a_field_of_that_object_is_proposed(
    server: Serving, path: str, body: dict[str, Any], meant: str | None
) -> None:
    """One that resembles none is taken, and named in a header."""
    answer = server.post(path, **BODIES[path][1] | body)
    if meant is None:
        assert answer.status == 200
        assert answer.headers["x-quire-ignored-fields"].rpartition(".")[2] in json.dumps(body)
    else:
        assert answer.status == 400
        assert answer.error()["message"].endswith((f"; did you mean {meant!r}?", f"; use {meant}"))


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_no_proposal_is_ever_of_another_object(server: Serving, path: str) -> None:
    """Every field of every body, on every route that has it not: refused by name, or reported."""
    own = BODIES[path][0].model_fields
    for name in sorted({name for body, _ in BODIES.values() for name in body.model_fields} - set(own) - BOOKKEEPING):
        answer = server.post(path, **BODIES[path][1], **{name: 1})
        if answer.status == 200:
            assert answer.headers["x-quire-ignored-fields"] == name
        else:
            message = answer.error()["message"]
            assert name in message
            proposed = re.search(r"(?:did you mean '|use )(\w+)", message)
            assert proposed is None or proposed[1] in own, message


def test_a_field_that_changes_the_text_elsewhere_is_refused_with_a_sentence(server: Serving) -> None:
    for path, (kind, given) in BODIES.items():
        for name in (*ALSO_CALLED, *NOT_HERE):
            if not issubclass(kind, Sampling) or name in kind.model_fields:
                continue
            refused = server.post(path, **given, **{name: 5})
            assert (refused.status, refused.error()["param"]) == (400, name)
            assert f"there is no field {name!r}; " in refused.error()["message"]
    hints = ("cache_prompt", "options", "usage", "moderation")
    for name in hints:  # what once brought a misleading hint brings none
        assert near_miss(CompletionRequest, name) is None, name
    refused = server.post(COMPLETIONS, **BODIES[COMPLETIONS][1], response_format={"type": "json_object", "schema": {}})
    assert (refused.status, refused.error()["param"]) == (400, "response_format")
    assert refused.error()["message"] == "there is no field 'response_format.schema'"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_value_that_requests_the_behavior_here_is_accepted(server: Serving, path: str) -> None:
    """Of fields that are refused by name with any other value."""
    kind, usual = BODIES[path][0], told(server, path)
    names = [name for name in (*ALSO_CALLED, *NOT_HERE) if name not in kind.model_fields]
    assert NEUTRAL_VALUES.keys() <= {*ALSO_CALLED, *NOT_HERE}
    for i in range(2):  # together: a request for each value would take seconds
        fields = {name: (*NEUTRAL_VALUES.get(name, ()), None, [])[i] for name in names} | dict.fromkeys(DEPENDENT, 0.3)
        answer = server.post(path, **BODIES[path][1], **dict(list(fields.items())[:90]))
        assert (answer.status, "x-quire-ignored-fields" in answer.headers) == (200, False), answer.body
        assert told(server, path, **dict(list(fields.items())[90:])) == usual
    refused = server.post(path, **BODIES[path][1], typical_p=0.9, mirostat_tau=5)
    assert (refused.status, refused.error()["param"]) == (400, "typical_p")


def test_unknown_fields_are_reported_within_bounds(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    given = BODIES[COMPLETIONS][1]
    quiet = server.post(COMPLETIONS, **given, chat_id="c", cache_prompt=True, id="x")
    assert (quiet.status, "x-quire-ignored-fields" in quiet.headers) == (200, False)
    odd = {"zzz\r\nX-Evil: 1\x7f": 1, "é\u2028": 2, "q" * 5000: 3}
    for body in (odd, {f"zzz_{i}_zzz": i for i in range(90)}):
        for stream in (False, True):
            caplog.clear()
            answer = server.post(COMPLETIONS, **given, **body, stream=stream)
            assert answer.status == 200
            header = answer.headers["x-quire-ignored-fields"]
            assert 10 < len(header) < 1400
            assert "x-evil" not in answer.headers
            assert len(caplog.messages) == (0 if stream else min(len(body), 16))  # each once
            assert all(message.isascii() and message.isprintable() for message in caplog.messages)
    assert header.endswith(", and 74 more")
    assert server.post(COMPLETIONS, **given, **{f"zzz_{i}_zzz": i for i in range(101)}).status == 400
    parts = [{"role": "user", "content": "a", "zzz": i} for i in range(50)]
    assert server.post(CHAT, messages=parts, max_tokens=1).headers["x-quire-ignored-fields"] == "messages[].zzz"


def test_unknown_fields_can_be_refused() -> None:
    with serving(unknown_fields="refuse") as strict:
        refused = strict.post(COMPLETIONS, **BODIES[COMPLETIONS][1], zzz=1)
        assert (refused.status, refused.error()["param"]) == (400, "zzz")
        assert refused.error()["message"] == "there is no field 'zzz'"
        assert strict.post(COMPLETIONS, **BODIES[COMPLETIONS][1], chat_id="c").status == 200


# -------------------------------------------------------------------------------------- the field that is the cause


def wrong_prompts(server: Serving) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Bodies whose prompt cannot be served, whatever it is called, and what it is called."""
    longest = server.service.model.max_model_len
    for text in ("a " * longest, "a" * 1_000_000):
        yield COMPLETIONS, {"prompt": text}, "prompt"
        yield CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"
        yield EMBEDDINGS, {"input": text}, "input"
    yield TOKENIZE, {"prompt": None, "messages": [{"role": "user", "content": "a" * 1_000_000}]}, "messages"
    yield COMPLETIONS, {"prompt": [1, 10**6]}, "prompt"
    yield EMBEDDINGS, {"input": [1, 10**6]}, "input"
    yield DETOKENIZE, {"tokens": [1, 10**6]}, "tokens"


def test_an_error_of_the_prompt_names_the_field_that_it_came_from(server: Serving) -> None:
    for path, body, param in wrong_prompts(server):
        for stream in (False, True):
            streamed = {"stream": True} if stream and path in (COMPLETIONS, CHAT) else {}
            answer = server.post(path, **BODIES[path][1] | body | streamed)
            assert (answer.status, answer.error()["param"]) == (400, param), (path, answer.body)


@pytest.mark.slow
def test_beams_that_can_never_fit_name_their_number() -> None:
    """In a cache that holds one sequence of the longest kind."""
    with serving({"num_blocks": 66, "max_model_len": 1024}) as server:
        for path, given in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
            refused = server.post(path, **given, max_tokens=500, n=8, use_beam_search=True)
            assert (refused.status, refused.error()["param"]) == (400, "n")
            assert "can never fit" in refused.error()["message"]


@pytest.mark.slow
def test_a_limit_above_the_room_ends_at_the_context(server: Serving) -> None:
    longest = server.service.model.max_model_len
    for path, field in ((CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETIONS, "max_tokens")):
        body = {"messages": [{"role": "user", "content": "a " * 450}]} if path == CHAT else {"prompt": "a " * 950}
        answer = server.post(path, **body, **{field: 10**6}, ignore_eos=True, temperature=0).json()
        assert answer["usage"]["total_tokens"] == longest
        assert answer["choices"][0]["finish_reason"] == "length"
    beams = server.post(COMPLETIONS, prompt="a " * 1000, max_tokens=10**6, use_beam_search=True, n=2, ignore_eos=True)
    assert beams.status == 200, beams.body
    refused = server.post(CHAT, messages=MESSAGES, max_completion_tokens=4, min_tokens=5)
    assert (refused.status, refused.error()["param"]) == (400, "min_tokens")


@pytest.mark.slow
def test_a_template_that_refuses_names_the_messages() -> None:
    def refuse(service: Any) -> None:
        service.model.template = ChatTemplate("{{ raise_exception('no') }}", {})

    with serving(prepare=refuse) as server:
        for path, body in ((CHAT, {}), (TOKENIZE, {"messages": MESSAGES, "prompt": None})):
            refused = server.post(path, **BODIES[path][1] | body)
            assert (refused.status, refused.error()["param"], refused.error()["message"]) == (400, "messages", "no")


@pytest.mark.slow
def test_without_a_tokenizer_the_field_is_named_that_has_the_text() -> None:
    def forget(service: Any) -> None:
        service.model.tokenizer = None

    with serving(prepare=forget) as server:
        for path, param in (
            (COMPLETIONS, "prompt"),
            (CHAT, "messages"),
            (EMBEDDINGS, "input"),
            (TOKENIZE, "prompt"),
            (DETOKENIZE, "tokens"),
        ):
            refused = server.post(path, **BODIES[path][1])
            assert (refused.status, refused.error()["param"]) == (400, param), path
        refused = server.post(TOKENIZE, messages=MESSAGES)
        assert (refused.status, refused.error()["param"]) == (400, "messages")
        assert server.get("/tokenizer_info").status == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_grammar_that_fails_while_it_is_followed_is_named(
    server: Serving, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, kind: str) -> None:
        raise RequestError(f"{kind} takes too long to be followed: 1 s")

    monkeypatch.setattr("quire.sandbox.grammar._Budget.check", fail)
    for field, value in (
        ("regex", "[a-z]{9}"),
        ("grammar", "start: /[a-z]{9}/"),
        ("response_format", {"type": "json_object"}),
    ):
        answer = server.post(path, **BODIES[path][1], stream=stream, **{field: value})
        errors = [event["error"] for event in answer.events() if "error" in event] if stream else [answer.error()]
        assert [error["param"] for error in errors] == [field]
        assert "takes too long" in errors[0]["message"]
