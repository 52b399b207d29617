"""What limits the tokens of an answer, and what is said of them, on both routes: as offline, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.request import StructuredOutputsParams
from quire.sandbox.grammar import Spec
from quire.server.api import infill
from quire.server.api.infill import Form
from quire.server.api.service import Service
from tests.server.serving import SMALL, Serving

PROMPT = "import os\n\n\ndef "
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a stack"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**SMALL)


def complete(server: Serving, **body: Any) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, **{"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | body)
    assert answer.status == 200, answer.body
    return answer.json()


def chat(server: Serving, **body: Any) -> dict[str, Any]:
    answer = server.post(CHAT, **{"messages": MESSAGES, "max_tokens": 8, "temperature": 0} | body)
    assert answer.status == 200, answer.body
    return answer.json()


def events(server: Serving, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(path, **{"max_tokens": 8, "temperature": 0, "stream": True} | body)
    assert answer.status == 200, answer.body
    return answer.events()


def chat_tokens(server: Serving, llm: LLM) -> list[int]:
    assert server.service.model.template is not None
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(server.service.model.template.render(MESSAGES), add_special_tokens=False)


@pytest.mark.slow
def test_answers_are_those_of_the_offline_interface(server: Serving, llm: LLM) -> None:
    plain = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    structured: dict[str, Any] = {"json": schema, "regex": "[0-9]{2}", "choice": ["yes", "no"], "grammar": 'start: "a"'}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"logit_bias": {str(plain[0]): -100, "300": 2.5}}, {"logit_bias": {plain[0]: -100, 300: 2.5}}),
        ({"allowed_token_ids": [300, 301, 302]}, {"allowed_token_ids": [300, 301, 302]}),
        ({"bad_words": ["import", "main"]}, {"bad_words": ["import", "main"]}),
        ({"truncate_prompt_tokens": 3}, {"truncate_prompt_tokens": 3}),
        ({"truncate_prompt_tokens": -1}, {}),
    ]
    for kind, value in [*structured.items(), ("json", {})]:
        offline = {"structured_outputs": StructuredOutputsParams(**{kind: value})}
        cases += [({"structured_outputs": {kind: value}}, offline), ({f"guided_{kind}": value}, offline)]
    anything, drawn = StructuredOutputsParams(json_object=True), {"seed": 3, "temperature": 1}
    cases.append(({"structured_outputs": {"json_object": True}} | drawn, {"structured_outputs": anything} | drawn))
    talk = chat_tokens(server, llm)
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 8} | one) for _, one in cases]
    expected = llm.generate([PROMPT] * len(cases), params), llm.generate([talk] * len(cases), params)
    for (body, _), one, other in zip(cases, *expected, strict=True):
        found = complete(server, **body)
        assert found["choices"][0]["text"] == one.outputs[0].text, body
        assert found["usage"]["prompt_tokens"] == len(one.prompt_token_ids)
        assert chat(server, **body)["choices"][0]["message"]["content"] == other.outputs[0].text, body


def test_a_truncated_prompt_is_echoed_as_what_is_left(server: Serving) -> None:
    found = complete(server, prompt="one two three four", truncate_prompt_tokens=2, echo=True, max_tokens=0, logprobs=0)
    [choice] = found["choices"]
    assert len(choice["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"] == 2
    assert "one two three four".endswith(choice["text"])


@pytest.mark.slow
def test_token_ids_are_reported_where_they_are_asked_for(server: Serving, llm: LLM) -> None:
    for path, tokens, body in (
        (COMPLETIONS, llm.generate(PROMPT, SamplingParams(max_tokens=1))[0].prompt_token_ids, {"prompt": PROMPT}),
        (CHAT, chat_tokens(server, llm), {"messages": MESSAGES}),
    ):
        [expected] = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=8, n=2))
        whole = server.post(path, **body, max_tokens=8, temperature=0, n=2, return_token_ids=True).json()
        assert [choice["token_ids"] for choice in whole["choices"]] == [one.token_ids for one in expected.outputs]
        assert (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"] == tokens
        pieces = [one["choices"][0] for one in events(server, path, **body, return_token_ids=True)]
        assert [token for piece in pieces for token in piece.get("token_ids", [])] == expected.outputs[0].token_ids
        assert [piece["prompt_token_ids"] for piece in pieces if "prompt_token_ids" in piece] == [tokens]


def test_beams_of_several_prompts_with_logprobs_and_as_a_stream(server: Serving, llm: LLM) -> None:
    prompts = [PROMPT, "class "]
    params = BeamSearchParams(beam_width=3, max_tokens=6, logprobs=4)
    expected = llm.beam_search(prompts, params)
    asked = {"use_beam_search": True, "n": 3, "max_tokens": 6, "temperature": 1}
    found = complete(server, prompt=prompts, logprobs=4, **asked)
    sequences = [one for output in expected for one in output.sequences]
    texts = [(prompt + choice["text"]) for prompt, choice in zip([PROMPT] * 3 + ["class "] * 3, found["choices"])]  # noqa: B905
    assert texts == [one.text for one in sequences]
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert found["usage"]["completion_tokens"] == 6 * 6
    for choice, one in zip(found["choices"], sequences, strict=True):
        assert one.logprobs is not None
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(one.cum_logprob, abs=1e-6)
        tokens = one.tokens[-6:]
        for token, position, chosen in zip(tokens, one.logprobs, choice["logprobs"]["token_logprobs"], strict=True):
            assert position[token].logprob == chosen
            assert sorted(logprob.rank for logprob in position.values())[:4] == [1, 2, 3, 4]
    streamed = events(server, COMPLETIONS, prompt=prompts, logprobs=4, **asked)
    assert [one["choices"][0] for one in streamed] == found["choices"]
    talk = chat(server, **asked, logprobs=True, top_logprobs=2)
    [offline] = llm.beam_search([chat_tokens(server, llm)], BeamSearchParams(beam_width=3, max_tokens=6))
    said = [one["delta"].get("content", "") for event in events(server, CHAT, messages=MESSAGES, **asked)
            for one in event["choices"]]  # fmt: skip
    contents = [choice["message"]["content"] for choice in talk["choices"]]
    assert [one for one in said if one] == contents
    assert all((one.text or "").endswith(content) for one, content in zip(offline.sequences, contents, strict=True))
    assert {len(one["top_logprobs"]) for choice in talk["choices"] for one in choice["logprobs"]["content"]} == {2}
    refused = server.post(COMPLETIONS, prompt=[[5], [10**6]], stream=True, **asked)
    assert (refused.status, refused.error()["param"]) == (400, "prompt")
    assert server.is_idle()


def test_a_suffix_is_put_into_the_prompt(server: Serving, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens of the model's in the place of those that families of models were taught with."""
    assert llm.tokenizer is not None
    monkeypatch.setattr(infill, "FORMS", (Form("def", "class", "return", ("import",)),))
    prefix, suffix, middle, end = (llm.tokenizer.token_id(text) for text in ("def", "class", "return", "import"))
    [first, *rest] = llm.tokenizer.encode("os.path")
    tokens = [first, prefix, *rest, suffix, *llm.tokenizer.encode("\n\nx", add_special_tokens=False), middle]
    params = SamplingParams(max_tokens=24, seed=3, stop_token_ids=[end])
    [expected] = llm.generate([tokens], params)  # type: ignore[list-item]
    found = complete(
        server, prompt="os.path", suffix="\n\nx", max_tokens=24, seed=3, temperature=1, return_token_ids=True
    )
    [choice] = found["choices"]
    assert choice["prompt_token_ids"] == tokens
    assert (choice["text"], choice["finish_reason"]) == (expected.outputs[0].text, expected.outputs[0].finish_reason)
    refused = server.post(COMPLETIONS, prompt="a", suffix="b", echo=True)
    assert (refused.status, refused.error()["param"]) == (400, "echo")


OPEN = {"type": "object", "properties": {"a": {"type": "boolean"}}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": OPEN}}


@pytest.mark.parametrize(
    ("path", "fields", "is_closed"),
    [
        (COMPLETIONS, {"guided_json": OPEN}, True),
        (COMPLETIONS, {"guided_json": json.dumps(OPEN)}, True),
        (COMPLETIONS, {"structured_outputs": {"json": OPEN, "disable_additional_properties": True}}, True),
        (COMPLETIONS, {"response_format": FORMAT}, False),
        (CHAT, {"guided_json": OPEN}, True),
        (CHAT, {"response_format": FORMAT}, False),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": OPEN}}}, False),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": OPEN}}, "max_tokens": 8},
            False,
        ),
        ("/api/chat", {"format": OPEN}, True),
        ("/api/generate", {"format": OPEN}, True),
        ("/completion", {"json_schema": OPEN}, True),
    ],
)
def test_which_schemas_allow_further_keys(
    speaking: Serving, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], is_closed: bool
) -> None:
    """Each protocol's users are used to their own rule."""
    specs: list[Spec] = []

    async def compiled(self: Service, client: str, spec: Spec, field: str) -> Any:
        specs.append(spec)
        raise RequestError("nothing is compiled here")

    monkeypatch.setattr(Service, "compiled", compiled)
    prompts = {"/v1/responses": {"input": "a"}, COMPLETIONS: {"prompt": "a"}, "/completion": {"prompt": "a"}}
    given = prompts.get(path) or ({"prompt": "a"} if path == "/api/generate" else {"messages": MESSAGES})
    answer = speaking.post(path, **given, **fields)
    assert (answer.status, "nothing is compiled here" in answer.body.decode()) == (400, True), answer.body
    [spec] = specs
    assert '"a' in spec.text
    assert ("additionalProperties" in spec.text) == is_closed


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_cannot_be_is_refused_by_name(server: Serving, path: str) -> None:
    given = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    for body, param, words in (
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has the key 'x'; it must be a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias.5 is 101"),
        ({"logit_bias": {"5": "a"}}, "logit_bias", "logit_bias.5 is 'a'"),
        ({"logit_bias": {"2048": 1}}, "logit_bias", "logit_bias has the token 2048; token ids of this model lie in"),
        ({"logit_bias": {"9" * 200: 1}}, "logit_bias", "token ids of this model lie in"),
        ({"logit_bias": [1]}, "logit_bias", "logit_bias is [1]"),
        ({"allowed_token_ids": [1, 2048]}, "allowed_token_ids", "allowed_token_ids[1] is 2048"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids", "allowed_token_ids[0] is 'a'"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids is []; it must have 1 entries or more"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt is ''"),
        ({"bad_words": "word"}, "bad_words", "bad_words is 'word'"),
        ({"bad_words": [""]}, "bad_words", "bad_words[0] is ''"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "leave it out"),
        ({"structured_outputs": {"json": {}, "regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {}}, "structured_outputs", "asks for nothing"),
        ({"structured_outputs": {"json": {}, "regex": ""}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "structured_outputs.choice is []"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs", "structured_outputs.json is ''"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "structured_outputs.regex is ''"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "json_object is False"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural tag is not served"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "x-guidance"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex cannot be followed"),
        ({"structured_outputs": {"schema": {}}}, "structured_outputs", "structured_outputs.schema"),
        ({"guided_json": "{"}, "guided_json", "json_schema cannot be followed"),
        ({"guided_choice": []}, "guided_choice", "guided_choice is []"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "one of them only"),
        ({"guided_choice": [""]}, "guided_choice", "guided_choice[0] is ''"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "one of them only"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "one of them only"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "llguidance handles all"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "x-guidance"),
        ({"grammar": 'root ::= "a" | "b"'}, "grammar", "Lark's notation is wanted"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "it is in GBNF"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "guided_regex"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias", "use_beam_search"),
        ({"use_beam_search": True, "guided_regex": "a"}, "guided_regex", "use_beam_search"),
    ):
        refused = server.post(path, **given, max_tokens=2, **body)
        assert (refused.status, refused.error()["param"]) == (400, param), (body, refused.body)
        assert words in refused.error()["message"], refused.body
    for body in (
        {"logit_bias": {}, "bad_words": [], "guided_regex": "", "guided_grammar": "", "guided_json": ""},
        {"guided_decoding_backend": "auto", "truncate_prompt_tokens": None},
    ):
        assert server.post(path, **given, max_tokens=2, **body).status == 200
    ended = server.post(path, **given, max_tokens=2, allowed_token_ids=[300], logit_bias={"300": 0},
                        bad_words=[server.service.tokenizer.decode([300])])  # fmt: skip
    assert ended.status == 400
    assert "no token that allowed_token_ids and bad_words leave" in ended.error()["message"]
