"""/v1/chat/completions, /tokenize and /detokenize."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from openai.types.chat import ChatCompletionMessage

from quire import LLM, SamplingParams
from quire.models import EMBEDDED
from quire.sandbox.process import Sandbox, SandboxFailed
from tests.server.serving import SMALL, Serving, serving

MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "a class for a stack"}]


def chat(server: Serving, **body: Any) -> dict[str, Any]:
    given = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0} | body
    answer = server.post("/v1/chat/completions", **given)
    assert answer.status == 200, answer.body
    return answer.json()


def stream(server: Serving, **body: Any) -> list[dict[str, Any]]:
    given = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "stream": True} | body
    return server.post("/v1/chat/completions", **given).events()


def rendered(server: Serving, messages: list[dict[str, Any]] = MESSAGES) -> str:
    assert server.service.model.template is not None
    return server.service.model.template.render(messages)


@pytest.mark.slow
def test_a_chat_goes_on_after_the_rendered_template(server: Serving) -> None:
    llm = LLM(**SMALL)
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(rendered(server), add_special_tokens=False)
    [expected] = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=12))
    found = chat(server)
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    assert found["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": expected.outputs[0].text, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert found["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.slow
def test_without_a_limit_it_goes_on_to_the_end_of_the_context(server: Serving) -> None:
    found = chat(server, max_tokens=None, ignore_eos=True)
    assert found["usage"]["total_tokens"] == server.service.model.max_model_len
    assert chat(server, max_tokens=None, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_stream(server: Serving) -> None:
    whole = chat(server, n=2, temperature=0.9, seed=5)
    chunks = stream(server, n=2, temperature=0.9, seed=5, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["delta"] == {}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_logprobs(server: Serving) -> None:
    [choice] = chat(server, logprobs=True, top_logprobs=3)["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0]  # greedy
    chunks = stream(server, logprobs=True, top_logprobs=3)
    pieces = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for piece in pieces for entry in piece] == content
    alone = chat(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in alone)


def test_parts_of_a_message_and_beam_search(server: Serving) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    whole = [{"role": "user", "content": "a\nb"}]
    assert chat(server, messages=parts)["choices"] == chat(server, messages=whole)["choices"]
    found = chat(server, use_beam_search=True, n=2)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["choices"][0]["message"]["content"]


def test_braces_in_a_message_are_its_text(server: Serving) -> None:
    text = "{{ 7 * 7 }} {% for x in y %}"
    assert text in rendered(server, [{"role": "user", "content": text}])
    assert server.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=1).status == 200


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "1 entries or more"),
        ({"messages": [{"content": "a"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "stranger"),
        ({"logprobs": False, "top_logprobs": 2}, "logprobs", "set logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "one limit"),
        ({"top_logprobs": 2, "use_beam_search": True}, "logprobs", "set logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"verbosity": "low"}, "verbosity", "max_completion_tokens"),
        ({"messages": [{"role": "assistant", "refusal": "No."}]}, "messages", "refusals"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages", "tool_calls"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages", "text"),
        ({"messages": [{"role": "assistant", "annotations": [{}]}]}, "messages", "annotations"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"top_pp": 1}, "top_pp", "no field"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    server: Serving, body: dict[str, Any], param: str, words: str
) -> None:
    answer = server.post("/v1/chat/completions", **{"messages": MESSAGES, "max_tokens": 4} | body)
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert words in answer.error()["message"]


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "file", "image"])
def test_images_and_sounds_are_refused_by_their_place(server: Serving, kind: str) -> None:
    said = {"role": "user", "content": "a"}
    seen = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": kind, kind: {"url": "x"}}]}
    answer = server.post("/v1/chat/completions", messages=[said, seen], max_tokens=4)
    assert answer.status == 400
    assert answer.error()["message"] == (
        f"messages[1].content[1] is of type '{kind}'; parts of type 'text' and 'image_url' are served"
    )


def test_an_image_for_a_model_without_eyes_is_refused_by_its_place(server: Serving) -> None:
    seen = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": seen}], max_tokens=4)
    assert answer.status == 400
    assert answer.error()["message"] == ("messages[0].content[1] is an image, and this model is served for text alone")


def test_neutral_values_of_unserved_fields_are_taken(server: Serving) -> None:
    neutral = {"tools": [], "tool_choice": "none", "logit_bias": {}, "store": False, "user": "me"}
    neutral |= {"prompt_cache_key": "k", "safety_identifier": "me", "verbosity": "medium", "reasoning_effort": None}
    neutral |= {"max_completion_tokens": 12, "modalities": ["text"]}
    assert chat(server, **neutral)["choices"] == chat(server)["choices"]


def test_an_answer_is_taken_back_as_a_message(server: Serving) -> None:
    """As OpenAI's package writes it down, and as this server does."""
    shown = chat(server)["choices"][0]["message"]
    dumped = ChatCompletionMessage(**shown).model_dump()
    assert {"annotations", "audio", "function_call", "tool_calls", "refusal"} < set(dumped)
    empty = shown | {"annotations": [], "audio": {}, "function_call": {}, "tool_calls": [], "refusal": ""}
    first = chat(server, messages=[*MESSAGES, {"role": "assistant", "content": shown["content"]}])["choices"]
    for message in (shown, dumped, empty):
        assert chat(server, messages=[*MESSAGES, message])["choices"] == first


def test_prompt_logprobs_come_with_a_whole_answer(server: Serving) -> None:
    found = chat(server, prompt_logprobs=1, n=2)
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    usual = {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert set(found) == usual | {"prompt_logprobs"}


def test_without_a_template_a_chat_is_refused_with_the_way_out() -> None:
    def forget(service: Any) -> None:
        service.model.template = None

    with serving(prepare=forget) as server:
        answer = server.post("/v1/chat/completions", messages=MESSAGES)
        assert answer.status == 400
        assert "--chat-template" in answer.error()["message"]


def test_tokenize_and_back(server: Serving) -> None:
    text = "def f(x):  # 漢字 🎉\n    return x"
    found = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == server.service.model.max_model_len
    bare = server.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert found["tokens"][-len(bare) :] == bare
    assert server.post("/detokenize", tokens=bare).json() == {"prompt": text, "content": text}
    prompt = server.post("/tokenize", messages=MESSAGES).json()["tokens"]
    assert server.post("/detokenize", tokens=prompt).json()["prompt"] == rendered(server)
    for body in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": "a", "model": "x"}):
        server.post("/tokenize", **body).error()
    refused = server.post("/detokenize", tokens=[1, 10**6])
    assert "tokens[1] is 1000000" in refused.error()["message"]
    assert server.post("/detokenize", tokens=[]).json()["prompt"] == ""


def test_models_and_version(server: Serving) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"]) == ("quire-embedded", "model")
    assert server.get("/v1/models/quire-embedded").json() == model
    missing = server.get("/v1/models/other")
    assert (missing.status, missing.error()["code"]) == (404, "model_not_found")
    from quire import __version__

    assert server.get("/version").json() == {"version": __version__}
    assert server.get("/health").body == b""


def test_tokenizer_info(server: Serving) -> None:
    """As vLLM has it: what stands in tokenizer_config.json, with the template that the server uses."""
    info = server.get("/tokenizer_info").json()
    written = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    for name in ("tokenizer_class", "bos_token", "eos_token", "pad_token"):
        assert info[name] == written[name]
    assert info["unk_token"] is None
    assert info["chat_template"] == (EMBEDDED / "chat_template.jinja").read_text()
    assert info["model_max_length"] == server.service.model.max_model_len


@pytest.mark.slow
def test_tokenizer_info_of_special_tokens_that_are_objects_and_of_a_template_of_ones_own(tmp_path: Path) -> None:
    model, template = tmp_path / "model", tmp_path / "mine.jinja"
    shutil.copytree(EMBEDDED, model)
    settings = {
        "bos_token": {"content": "<|endoftext|>", "special": True},
        "eos_token": None,
        "name_or_path": "/secret",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    template.write_text("{{ messages[0].content }}")
    with serving({"model": str(model)}, chat_template=template) as server:
        info = server.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<|endoftext|>", None)
    assert info["chat_template"] == "{{ messages[0].content }}"
    assert isinstance(info["tokenizer_class"], str)
    assert "name_or_path" not in info


def test_a_client_with_the_servers_tokenizer_writes_the_same_prompts(server: Serving) -> None:
    """What lm_eval's remote tokenizer does with the three routes."""
    info = server.get("/tokenizer_info").json()
    [end] = server.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["tokens"]
    assert end in server.service.engine_client.engine.eos_token_ids
    template = ImmutableSandboxedEnvironment().from_string(info["chat_template"])
    text = template.render(messages=MESSAGES, add_generation_prompt=True, bos_token=info["bos_token"])
    assert text == rendered(server)
    tokens = server.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert tokens == server.post("/tokenize", messages=MESSAGES).json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json()["prompt"] == text


def test_a_sandbox_that_fails_is_not_the_clients_fault(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SandboxFailed("the process of a program cannot start, exit status 1")

    monkeypatch.setattr(Sandbox, "ask", fail)
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "a", "regex": "unheard of"}),
    ):
        answer = server.post(path, **body)
        assert (answer.status, answer.error()["code"]) == (503, "sandbox_failed")
        assert answer.error()["message"].endswith("cannot start, exit status 1; try again later")
