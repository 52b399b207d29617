"""/v1/responses, by the openai package and as it is written."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall

from quire.server.protocol.responses import ResponsesRequest
from tests.server.serving import Serving

MODEL = "quire-embedded"
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
CLOCK = {"type": "function", "name": "clock", "description": "The time.", "parameters": SCHEMA, "strict": True}
WRITTEN = "<think>hm{3}</think>Look:<tool_call>\n{}\n</tool_call>"


@pytest.fixture
def client(speaking: Serving) -> OpenAI:
    return OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0)


def events_of(server: Serving, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of the form that the document says."""
    answer = server.post("/v1/responses", stream=True, **body)
    assert answer.status == 200, answer.body
    parts = answer.body.decode().split("\n\n")
    assert parts.pop() == ""
    found = []
    for number, part in enumerate(parts):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    items = [{key: one for key, one in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    numbers = response["usage"] | {"input_tokens_details": None}
    times = {"id": None, "created_at": None, "completed_at": None}
    return response | times | {"output": items, "usage": numbers}


def prompt_of(messages: Any, **body: Any) -> list[dict[str, Any]]:
    """The messages of the chat that an input asks for."""
    chat = ResponsesRequest.model_validate({"input": messages} | body).chat()
    return [message.model_dump(exclude_none=True, exclude_defaults=True) for message in chat.messages]


@pytest.mark.slow
def test_a_text_is_answered_as_a_chat_is(speaking: Serving, client: OpenAI) -> None:
    drawn = {"temperature": 0.9, "top_p": 0.8, "seed": 4}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a queue"}]
    body = {"messages": messages, "max_tokens": 12, "top_k": 30} | drawn
    chat = speaking.post("/v1/chat/completions", **body).json()
    answer = client.responses.create(
        model=MODEL, input="a queue", instructions="Be brief.", max_output_tokens=12, temperature=0.9, top_p=0.8,
        metadata={"a": "b"}, store=True, include=["reasoning.encrypted_content"], extra_body={"seed": 4, "top_k": 30},
    )  # fmt: skip
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.total_tokens == chat["usage"]["total_tokens"]
    assert (answer.metadata, answer.instructions, answer.temperature) == ({"a": "b"}, "Be brief.", 0.9)
    written = speaking.post("/v1/responses", input="a", max_output_tokens=1)
    assert written.json()["store"] is False
    assert written.headers["x-request-id"]


def test_logprobs(speaking: Serving) -> None:
    body = {"input": "a", "max_output_tokens": 6, "temperature": 0, "include": ["message.output_text.logprobs"]}
    whole = speaking.post("/v1/responses", **body, top_logprobs=2).json()
    [part] = whole["output"][0]["content"]
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode() == part["text"]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    streamed = events_of(speaking, **body, top_logprobs=2)[-1]["response"]
    assert without_names(streamed) == without_names(whole)


def test_logprobs_of_characters_of_several_tokens_are_streamed(speaking: Serving) -> None:
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["a☺ ☺"]}}}
    body = {"input": "a", "max_output_tokens": 30, "temperature": 0, "top_logprobs": 1, "text": form}
    events = events_of(speaking, **body)
    assert without_names(events[-1]["response"]) == without_names(speaking.post("/v1/responses", **body).json())
    [part] = events[-1]["response"]["output"][0]["content"]
    assert part["text"] == '"a☺ ☺"'
    assert len(part["logprobs"]) > len(part["text"])
    assert [one for event in events for one in event.get("logprobs", ()) if "delta" in event] == part["logprobs"]


@pytest.mark.slow
def test_a_stream_is_the_whole_in_order(speaking: Serving) -> None:
    """A regex makes the model think, speak and call."""
    call = '\\{"name": "clock", "arguments": \\{"zone": "UTC"\\}\\}'
    fields = {"input": "x", "tools": [CLOCK | {"strict": None}], "temperature": 0, "max_output_tokens": 200}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResponsesRequest, "chat", with_regex(WRITTEN.replace("{}", call)))
        whole = speaking.post("/v1/responses", **fields).json()
        events = events_of(speaking, **fields)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == "hmmm"
    assert whole["output"][2]["arguments"] == '{"zone": "UTC"}'
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert without_names(events[-1]["response"]) == without_names(whole)
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    part = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    assert once == [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.done", *done,
        *part, "output_text.delta", "output_text.done", *done,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        said = "".join(event.get("delta", "") for event in own)
        assert said == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        assert own[-1]["item"] == item


def with_regex(regex: str) -> Any:
    chat = ResponsesRequest.chat

    def guided(self: ResponsesRequest) -> Any:
        return chat(self).model_copy(update={"regex": regex})

    return guided


@pytest.mark.slow
def test_a_call_and_its_result_go_on(client: OpenAI) -> None:
    given = {"model": MODEL, "tools": [CLOCK], "max_output_tokens": 120, "input": "the time"}
    with client.responses.stream(**given, tool_choice={"type": "function", "name": "clock"}) as stream:
        events = list(stream)
        first: Response = stream.get_final_response()
    assert events[-1].type == "response.completed"
    [call] = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments)["zone"] in ("UTC", "CET")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    history = [{"role": "user", "content": "the time"}, call.model_dump(exclude_none=True), result]
    second = client.responses.create(**given | {"input": history, "max_output_tokens": 4}, tool_choice="none")
    assert second.output_text
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    other = CLOCK | {"name": "other"}
    answer = client.responses.create(
        **given | {"tools": [other, CLOCK]}, tool_choice=allowed, parallel_tool_calls=False
    )
    assert [item.name for item in answer.output if item.type == "function_call"] == ["clock"]
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = client.responses.create(model=MODEL, input="x", max_output_tokens=60, text={"format": schema})
    assert json.loads(answer.output_text)["zone"] in ("UTC", "CET")


def test_items_become_messages() -> None:
    """What the assistant thought, said and called in one go is one message; unknown fields of items are left out."""
    items = [
        {"role": "developer", "content": "Hurry."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "time?"}],
            "status": "completed",
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}", "parsed_arguments": {}},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "more"},
    ]
    texts = [{"type": "text", "text": "time?"}]
    call = {"id": "c", "function": {"name": "clock", "arguments": "{}"}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "I"}], "reasoning_content": "hm"}
    more = [{"type": "text", "text": text} for text in ("no", "more")]
    assert prompt_of(items, instructions="Be.") == [
        {"role": "system", "content": "Be.\n\nHurry."},
        {"role": "user", "content": texts},
        said | {"tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "reasoning_content": "so", "content": more},
    ]
    assert prompt_of("a") == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_fields_reach_the_chat() -> None:
    given = {
        "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.1, "seed": 2, "stop": ["x"],
        "parallel_tool_calls": False, "truncation": "auto", "reasoning": {"effort": "low", "summary": "auto"},
        "top_logprobs": 3, "cache_salt": "s", "priority": 1, "chat_template_kwargs": {"a": 1}, "stream": True,
    }  # fmt: skip
    chat = ResponsesRequest.model_validate({"input": "a"} | given).chat()
    assert chat.model_dump(exclude_unset=True, exclude={"messages", "tools"}) == {
        "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.1, "seed": 2,
        "stop": ["x"], "parallel_tool_calls": False, "truncate_prompt_tokens": -1, "reasoning_effort": "low",
        "logprobs": True, "top_logprobs": 3, "cache_salt": "s", "priority": 1, "chat_template_kwargs": {"a": 1},
        "stream": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "at least 1|1 entries"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", r"input\[0\] is of type 'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "input_image|image_url",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", r"input\[0\].call_id is missing"),
        ({"input": [5]}, "input", r"input\[0\] is 5"),
        ({"tools": [{"type": "web_search"}]}, "tools", r"tools\[0\].type is 'web_search'"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not a function"),
        (
            {
                "tools": [CLOCK],
                "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "clok"}]},
            },
            "tool_choice",
            "allows 'clok', which is not a function of tools",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"background": True}, "background", "nothing is stored"),
        ({"conversation": "c"}, "conversation", "nothing is stored"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format.schema is missing"),
        ({"include": ["x"]}, "include", "message.output_text.logprobs"),
        ({"input": "a" * 3000}, "input", "maximum context length"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ],
)
def test_what_cannot_be_served_is_named(speaking: Serving, body: dict[str, Any], param: str, words: str) -> None:
    answer = speaking.post("/v1/responses", **{"input": "a"} | body)
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert re.search(words, answer.error()["message"]), answer.error()
