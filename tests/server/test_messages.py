"""/v1/messages and /v1/messages/count_tokens, as Anthropic's clients read them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from tests.server.serving import Answer, Serving, serving
from tests.server.test_responses import SCHEMA

USER = [{"role": "user", "content": "a queue"}]
CLOCK = {"name": "clock", "description": "The time.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}


def ask(server: Serving, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/messages", **{"messages": USER, "max_tokens": 12, "temperature": 0} | body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def streamed(server: Serving, **body: Any) -> tuple[dict[str, Any], list[str]]:
    """The message that a stream's events make, and their kinds."""
    fields = {"messages": USER, "max_tokens": 12, "temperature": 0, "stream": True} | body
    answer = server.post("/v1/messages", **fields)
    assert answer.status == 200, answer.body
    message: dict[str, Any] = {}
    parts, kinds = [""], []
    for part in answer.body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        kinds.append(event["type"])
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            parts.append("")
        elif event["type"] == "content_block_delta":
            [text] = [one for key, one in event["delta"].items() if key != "type"]
            parts[-1] += text
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            kind = block["type"]
            block |= {"input": json.loads(parts[-1])} if kind == "tool_use" else {kind: parts[-1]}
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message, kinds


def without_names(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: one for key, one in block.items() if key != "id"} for block in message["content"]]
    used = message["usage"]
    num_prompt = used["input_tokens"] + used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
    return message | {"id": None, "content": content, "usage": (num_prompt, used["output_tokens"])}


def error_of(answer: Answer) -> dict[str, Any]:
    body = answer.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    found: dict[str, Any] = body["error"]
    assert found.keys() == {"type", "message"}
    return found


@pytest.mark.slow
def test_a_message_is_answered_as_a_chat_is(speaking: Serving) -> None:
    drawn = {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "max_tokens": 12}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a queue", "citations": None}]}]
    plain = [{"role": "system", "content": "Be brief."}, *USER]
    greedy = {"temperature": 0, "max_tokens": 12}
    chat = speaking.post("/v1/chat/completions", messages=plain, **greedy).json()
    found = ask(speaking, system=system, messages=parts, metadata={"user_id": "u"}, **greedy)
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    used = found["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert speaking.post("/v1/messages/count_tokens", messages=parts, system=system).json() == {
        "input_tokens": chat["usage"]["prompt_tokens"]
    }
    for body in (greedy, greedy | {"stop_sequences": ["("]}, {"thinking": {"type": "disabled"}}):
        whole = ask(speaking, **body)
        message, kinds = streamed(speaking, **body)
        assert without_names(message) == without_names(whole)
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    stopped = ask(speaking, stop_sequences=["("])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "(")
    assert ask(speaking, **drawn)["usage"]["output_tokens"] == 12


@pytest.mark.slow
def test_reasoning_texts_and_calls_are_blocks(speaking: Serving) -> None:
    call = '\\{"name": "clock", "arguments": \\{"zone": "UTC"\\}\\}'
    regex = f"<think>hm{{3}}</think>Look:<tool_call>\n{call}\n</tool_call>"
    chat = CountTokensRequest.chat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MessagesRequest, "chat", lambda self, **more: chat(self, **more).model_copy(update={"regex": regex})
        )
        whole = ask(speaking, tools=[CLOCK], max_tokens=200)
        message, _ = streamed(speaking, tools=[CLOCK], max_tokens=200)
        cut = ask(speaking, tools=[CLOCK], max_tokens=whole["usage"]["output_tokens"] - 14)
    assert without_names(whole)["content"] == [
        {"type": "thinking", "thinking": "hmmm", "signature": ""},
        {"type": "text", "text": "Look:"},
        {"type": "tool_use", "name": "clock", "input": {"zone": "UTC"}},
    ]
    assert whole["stop_reason"] == "tool_use"
    assert without_names(message) == without_names(whole)
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][2]["type"] == "text"  # a call that broke off cannot be made
    result = {"type": "tool_result", "tool_use_id": whole["content"][2]["id"], "content": "noon"}
    history = [*USER, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": [result]}]
    assert ask(speaking, tools=[CLOCK], messages=history)["content"]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "clock"}):
        message, _ = streamed(speaking, tools=[CLOCK], tool_choice=choice, max_tokens=120, temperature=1)
        assert message["stop_reason"] == "tool_use"
        assert {block["input"]["zone"] for block in message["content"]} <= {"UTC", "CET"}
    told = ask(speaking, tools=[CLOCK], tool_choice={"type": "none"})
    assert without_names(told) == without_names(ask(speaking))


def test_messages_become_a_chat(speaking: Serving) -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "d"},
        {"type": "text", "text": "I"},
        {"type": "tool_use", "id": "t", "name": "clock", "input": {"zone": "UTC"}, "caller": {"type": "direct"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "noon"}], "is_error": False},
        {"type": "text", "text": "and now?"},
    ]
    given = {
        "messages": [*USER, {"role": "assistant", "content": content}, {"role": "user", "content": results}],
        "system": "Be.", "max_tokens": 9, "stop_sequences": ["x"], "top_k": 4, "stream": True, "tools": [CLOCK],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    }  # fmt: skip
    chat = MessagesRequest.model_validate(given).chat(can_think=True)
    found = chat.model_dump(exclude_none=True, exclude_defaults=True, by_alias=True)
    assert found.pop("response_format")["json_schema"]["schema"] == SCHEMA
    assert found.pop("tools")[0]["function"]["parameters"] == SCHEMA
    function = {"name": "clock", "arguments": {"zone": "UTC"}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "I"}], "reasoning_content": "hm"}
    assert found == {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be."}]},
            {"role": "user", "content": [{"type": "text", "text": "a queue"}]},
            said | {"tool_calls": [{"id": "t", "function": function}]},
            {"role": "tool", "tool_call_id": "t", "content": [{"type": "text", "text": "noon"}]},
            {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
        ],
        "max_tokens": 9, "stop": ["x"], "top_k": 4, "stream": True, "tool_choice": "required",
        "parallel_tool_calls": False, "thinking_token_budget": 2048, "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low", "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    assert MessagesRequest.model_validate(given).chat(can_think=False).thinking_token_budget is None
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    continued = ask(speaking, messages=begun)
    chat_of = speaking.post(
        "/v1/chat/completions", messages=begun, continue_final_message=True, max_tokens=12, temperature=0
    ).json()
    assert continued["content"][0]["text"] == chat_of["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_errors_and_keys_are_anthropics(speaking: Serving) -> None:
    for body, words in (
        ({"max_tokens": None}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\].content\[0\].source is missing",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\].text is missing"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type is 'bash_20250124'"),
        ({"tool_choice": {"type": "any"}}, "without tools"),
        ({"stop": "x"}, "use stop_sequences"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, "maximum context length"),
        ({"mcp_servers": [{"url": "x"}]}, "no other server is asked"),
        ({"temperature": -1}, "temperature is -1"),
    ):
        answer = speaking.post("/v1/messages", **{"messages": USER, "max_tokens": 4} | body)
        error = error_of(answer)
        assert (answer.status, error["type"]) == (400, "invalid_request_error")
        assert re.search(words, error["message"]), error
    assert error_of(speaking.post("/v1/messages", model="m", messages=USER, max_tokens=1))["type"] == "not_found_error"
    assert error_of(speaking.get("/v1/messages"))["message"].startswith("/v1/messages takes POST")
    assert speaking.post("/v1/messagesX").json().keys() == {"error"}
    with serving(api_key=("right",)) as locked:
        given = {"messages": USER, "max_tokens": 1}
        assert locked.ask("POST", "/v1/messages", given, {"x-api-key": "right"}).status == 200
        assert locked.ask("GET", "/v1/models", None, {"x-api-key": "right"}).status == 200
        refused = locked.ask("POST", "/v1/messages", given, {"x-api-key": "wrong"})
        assert (refused.status, error_of(refused)["type"]) == (401, "authentication_error")
        both = {"x-api-key": "right", "Authorization": "Bearer wrong"}
        assert locked.ask("POST", "/v1/messages", given, both).status == 401
