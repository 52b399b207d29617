"""Tools, reasoning and templates' variables over HTTP, with the embedded model, whose calls grammars make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from pydantic import TypeAdapter

from quire.server.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from tests.server.serving import Serving, serving

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "the weather in Paris"}]
COMPLETION, CHUNKS = TypeAdapter(ChatCompletion), TypeAdapter(list[ChatChunk])  # which are encoded in parts


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": f"What {name} does.", "parameters": parameters}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


WEATHER = tool(
    "get_weather", city={"type": "string", "maxLength": 6}, days={"type": "integer", "minimum": 0, "maximum": 9}
)
YES_OR_NO = tool("", a={"type": "boolean"})["function"]["parameters"]
CLOCK = tool("clock", zone={"enum": ["UTC", "CET"]})


@pytest.fixture
def server(speaking: Serving) -> Serving:
    return speaking


def chat(server: Serving, **body: Any) -> dict[str, Any]:
    answer = server.post(CHAT, **{"messages": MESSAGES, "max_tokens": 200, "seed": 3} | body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    COMPLETION.validate_python(found)
    return found


def streamed(server: Serving, **body: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages that a stream's pieces make, and the pieces."""
    answer = server.post(CHAT, **{"messages": MESSAGES, "max_tokens": 200, "seed": 3, "stream": True} | body)
    assert answer.status == 200, answer.body
    chunks = answer.events()
    CHUNKS.validate_python(chunks)
    choices: dict[int, dict[str, Any]] = {}
    for choice in (one for chunk in chunks for one in chunk["choices"]):
        message = choices.setdefault(choice["index"], {"content": "", "tool_calls": [], "reasoning_content": ""})
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert call["function"]["name"]
                message["tool_calls"].append(
                    {"id": call["id"], "type": call["type"], "function": dict(call["function"])}
                )
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)], chunks


def prompt_of(server: Serving, **body: Any) -> str:
    tokens = server.post("/tokenize", **{"messages": MESSAGES} | body).json()["tokens"]
    return str(server.post("/detokenize", tokens=tokens).json()["prompt"])


def assert_follows(call: dict[str, Any]) -> None:
    """A call is one of the two functions with arguments of its schema."""
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "clock":
        assert set(arguments) == {"zone"}
        assert arguments["zone"] in ("UTC", "CET")
    else:
        assert call["function"]["name"] == "get_weather"
        assert set(arguments) == {"city", "days"}
        assert len(arguments["city"]) <= 6
        assert arguments["days"] in range(10)


@pytest.mark.slow
def test_a_required_call_is_one_of_the_functions(server: Serving) -> None:
    for body in (
        {"tool_choice": "required", "parallel_tool_calls": False, "n": 3, "temperature": 1.5},
        {"tool_choice": "required", "parallel_tool_calls": False, "response_format": {"type": "json_object"}},
        {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "logprobs": True, "n": 2},
    ):
        body = {"tools": [WEATHER, CLOCK]} | body
        choices = chat(server, **body)["choices"]
        for choice in choices:
            message = choice["message"]
            assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
            [call] = message["tool_calls"]
            assert_follows(call)
            if isinstance(body["tool_choice"], dict):
                assert call["function"]["name"] == body["tool_choice"]["function"]["name"]
        messages, chunks = streamed(server, **body)
        assert [m["finish_reason"] for m in messages] == ["tool_calls"] * len(choices)
        for message, choice in zip(messages, choices, strict=True):
            [mine], [other] = message["tool_calls"], choice["message"]["tool_calls"]
            assert mine["function"] == other["function"]
            assert message["content"] == ""
        if body.get("logprobs"):
            entries = [
                entry
                for chunk in chunks
                for one in chunk["choices"]
                if one["index"] == 0 and one["logprobs"]
                for entry in one["logprobs"]["content"]
            ]
            assert entries == choices[0]["logprobs"]["content"]


def test_arguments_without_a_name_in_the_schema_are_left_out(server: Serving) -> None:
    open_schema = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
    body = {"tools": [named("clock", parameters=open_schema)], "tool_choice": "required", "parallel_tool_calls": False}
    for choice in chat(server, **body, n=4, temperature=1.5)["choices"]:
        assert_follows(choice["message"]["tool_calls"][0])


@pytest.mark.slow
def test_several_calls(server: Serving) -> None:
    """A greedy embedded model never ends by itself, so it calls until its tokens are used up."""
    [choice] = chat(server, tools=[CLOCK], tool_choice="required", temperature=2.0, max_tokens=120)["choices"]
    calls = choice["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls[:-1] if choice["finish_reason"] == "length" else calls:
        assert_follows(call)


@pytest.mark.slow
def test_a_calls_first_byte_comes_in_the_step_of_its_name(server: Serving) -> None:
    body = {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}}
    _, chunks = streamed(server, **body, logprobs=True)
    seen, names = "", []
    for chunk in chunks:
        for choice in chunk["choices"]:
            before = seen
            seen += "".join(entry["token"] for entry in (choice["logprobs"] or {"content": []})["content"])
            if any("id" in call for call in choice["delta"].get("tool_calls", [])):
                names.append('"name": "clock"' in seen and '"name": "clock"' not in before)
    assert names == [True]


@pytest.mark.slow
def test_auto_is_text_and_a_strict_function_a_grammar(server: Serving) -> None:
    plain = chat(server, temperature=0, max_tokens=8, tools=[CLOCK], tool_choice="none")
    assert "tool_calls" not in plain["choices"][0]["message"]
    assert plain["choices"] == chat(server, temperature=0, max_tokens=8)["choices"]
    auto = chat(server, temperature=0, max_tokens=8, tools=[CLOCK])
    assert auto["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    assert auto["choices"][0]["message"]["content"]
    only = {"temperature": 0, "max_tokens": 8, "tools": [CLOCK], "parallel_tool_calls": False}
    assert chat(server, **only)["choices"] == auto["choices"]
    for asked, has_grammar in ((only, True), (only | {"regex": "a"}, False), (only | {"tool_choice": "none"}, False)):
        request = ChatRequest.model_validate({"messages": MESSAGES} | asked)
        assert request.has_calls_of_a_grammar() == has_grammar
    strict = tool("clock", strict=True, zone={"enum": ["UTC", "CET"]})
    refused = server.post(CHAT, messages=MESSAGES, tools=[strict], regex="a")
    assert (refused.status, refused.json()["error"]["param"]) == (400, "regex")
    found = chat(server, temperature=1.0, max_tokens=30, tools=[strict, WEATHER], n=3)
    for choice in found["choices"]:
        assert choice["message"]["content"] or choice["message"]["tool_calls"]
    # An answer in JSON, or a call.
    form = {"type": "json_schema", "json_schema": {"schema": YES_OR_NO}}
    body = {"tools": [CLOCK], "response_format": form, "parallel_tool_calls": False}
    for choice in chat(server, **body, temperature=1.5, n=6)["choices"]:
        message = choice["message"]
        if "tool_calls" in message:
            assert_follows(message["tool_calls"][0])
        else:
            assert set(json.loads(message["content"])) == {"a"}


@pytest.mark.slow
def test_what_models_write_is_read(server: Serving) -> None:
    """A regex writes the answer, so that reasoning and calls come without a model that was taught to."""
    call = '<tool_call>\n\\{"name": "clock", "arguments": \\{"zone": "UTC"\\}\\}\n</tool_call>'
    for regex, expected in (
        (f"<think>\nhm{{3}} a\n</think>\n\nLook: {call}", ("hmmm a", "Look:", 1)),
        (f"<think>hm{{9}}</think>{call}\n{call}", ("h" + "m" * 9, "", 2)),
        ("plain < text {7}", ("", "plain < text" + " " * 7, 0)),
        ("<think>only", ("only", "", 0)),
    ):
        body = {"regex": regex, "tools": [CLOCK], "temperature": 0, "stream_options": None}
        [choice] = (whole := chat(server, **body))["choices"]
        [message], chunks = streamed(server, **body | {"stream_options": {"include_usage": True}})
        reasoning, content, num_calls = expected
        assert choice["message"].get("reasoning_content", "") == message["reasoning_content"] == reasoning
        assert (choice["message"]["content"] or "") == message["content"] == content
        assert len(choice["message"].get("tool_calls", [])) == len(message["tool_calls"]) == num_calls
        assert choice["finish_reason"] == message["finish_reason"]
        assert (choice["finish_reason"] == "tool_calls") == (num_calls > 0)
        details = whole["usage"]["completion_tokens_details"]
        assert details == chunks[-1]["usage"]["completion_tokens_details"]
        assert (details["reasoning_tokens"] > 0) == bool(reasoning)
        assert details["reasoning_tokens"] < whole["usage"]["completion_tokens"] or regex == "<think>only"
        one = chat(server, **body | {"parallel_tool_calls": False, "include_reasoning": False})["choices"][0]["message"]
        assert len(one.get("tool_calls", [])) == min(num_calls, 1)
        assert "reasoning_content" not in one


@pytest.mark.slow
def test_reasoning_is_bounded_and_grammars_begin_after_them(server: Serving) -> None:
    """The prompt is continued within its reasoning, as templates do that open them."""
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nwell"}]
    inside = {"messages": messages, "continue_final_message": True, "temperature": 1.0, "ignore_eos": False}
    for limit in (0, 5):
        found = chat(server, **inside, thinking_token_budget=limit, max_tokens=40)
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= limit + 2
        again = chat(server, **inside, thinking_token_budget=limit, max_tokens=40)
        assert again["choices"] == found["choices"]
    choices = chat(
        server, **inside, thinking_token_budget=6, tools=[CLOCK, WEATHER], tool_choice="required", n=3,
        parallel_tool_calls=False,
    )["choices"]  # fmt: skip
    for choice in choices:
        [call] = choice["message"]["tool_calls"]
        assert_follows(call)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    message = chat(server, **inside, thinking_token_budget=4, response_format=form)["choices"][0]["message"]
    assert set(json.loads(message["content"])) == {"a"}
    assert chat(server, response_format=form)["choices"][0]["message"]["content"].startswith(("{", "<"))


def test_what_the_template_sees(server: Serving) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    cached = {"type": "text", "text": "late?", "cache_control": {"type": "ephemeral"}}
    history = [
        {"role": "user", "content": [cached], "id": "m1"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "I look"},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    shown = prompt_of(server, messages=history, tools=[CLOCK], chat_template_kwargs={"enable_thinking": False})
    assert '"name": "clock"' in shown
    assert "strict" not in shown
    assert "# mood=calm effort= thinking=False" in shown
    assert "# assistant:I look:\n# call_1=clock:[('zone', 'UTC')]" in shown
    assert "# tool::12:00" in shown
    assert shown.endswith("def answer():\n")
    assert "mood=wild" in prompt_of(server, chat_template_kwargs={"mood": "wild"})
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": "The weat"}]}
    assert prompt_of(server, **body, continue_final_message=True).endswith("# assistant::The weat")
    assert prompt_of(server, **body, add_generation_prompt=False).endswith("The weat\n")
    usual = chat(server, max_tokens=1)["usage"]["prompt_tokens"]
    assert chat(server, max_tokens=1, reasoning_effort="high")["usage"]["prompt_tokens"] > usual


RECURSIVE = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
HUGE = {"type": "object", "properties": {f"p{i}": {"enum": [f"v{j}" for j in range(40)]} for i in range(400)}}


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}


def named(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", "'clock', as that of tools[0]"),
        ({"tools": [named("a b")]}, "tools", "tools[0].function.name is 'a b'"),
        ({"tools": [named("")]}, "tools", "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0].type is 'retrieval'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is missing"),
        ({"tools": [named("f", parameters=5)]}, "tools", "tools[0].function.parameters is 5"),
        ({"tools": [named("f", parameters={"type": "array"})]}, "tools[0].function.parameters", "'array'"),
        ({"tools": [named("f", parameters=DEEP)]}, None, "nested"),
        ({"tools": [named("f", parameters=HUGE, strict=True)]}, "messages", "characters"),
        (
            {"tools": [named("f", parameters={"properties": {"a": {"multipleOf": 0}}}, strict=True)]},
            "tools",
            "tools cannot",
        ),
        ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice", "'required'"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice", "not a function"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tools": [CLOCK], "tool_choice": "required", "regex": "a"}, "regex", "leave one of them out"),
        ({"tools": [CLOCK], "tool_choice": "required", "min_tokens": 3}, "min_tokens", "tools"),
        ({"tools": [CLOCK], "use_beam_search": True}, "tools", "use_beam_search"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages", "messages[0].tool_call_id is missing"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages", "'assistant'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "tool_calls[0].function is missing"),
        ({"chat_template_kwargs": DEEP}, None, "chat_template_kwargs is nested"),
        ({"messages": [calling(DEEP)]}, None, "arguments is nested"),
        ({"chat_template_kwargs": {"messages": []}}, "messages", "'messages'"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "leave one"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "-1"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_place(
    server: Serving, body: dict[str, Any], param: str | None, words: str
) -> None:
    answer = server.post(CHAT, **{"messages": MESSAGES, "max_tokens": 4} | body)
    assert answer.status == 400, answer.body
    error = answer.error()
    assert words in error["message"]
    assert param is None or error["param"] == param


@pytest.mark.slow
def test_arguments_of_the_history_that_are_no_objects_stay_text(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}")
    with serving(chat_template=template) as server:
        for given, shown in (
            ("{broken", '"{broken"'),
            ("[1]", '"[1]"'),
            ("", "{}"),
            (None, "{}"),
            ('{"a": 1}', '{"a": 1}'),
            ({"a": 1}, '{"a": 1}'),
        ):
            assert prompt_of(server, messages=[calling(given)]) == shown
        for opening in ("[", '{"a":'):
            for depth in (150, 2000):  # above what is read, and above what Python reads
                assert prompt_of(server, messages=[calling(opening * depth)]).startswith('"')
                nested = opening * depth + "1" + {"[": "]"}.get(opening, "}") * depth
                assert prompt_of(server, messages=[calling(nested)]).startswith('"')


@pytest.mark.slow
def test_a_recursive_schema_is_followed(server: Serving) -> None:
    [choice] = chat(
        server, tools=[named("f", parameters=RECURSIVE)], tool_choice="required", temperature=0, max_tokens=60
    )["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith("{")


@pytest.mark.slow
def test_a_model_whose_syntax_is_not_known_is_said_so(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools }}{{ messages[0].content }}")
    with serving(chat_template=template) as unknown:
        answer = unknown.post(CHAT, messages=MESSAGES, tools=[CLOCK])
        assert (answer.status, "--tool-call-parser NAME" in answer.error()["message"]) == (400, True)
    with serving() as plain:
        for body, word in (
            ({"tools": [CLOCK]}, "the chat template of quire-embedded does not show tools to the model"),
            ({"thinking_token_budget": 5}, "--reasoning-parser"),
        ):
            answer = plain.post(CHAT, messages=MESSAGES, **body)
            assert answer.status == 400
            assert word in answer.error()["message"]
        assert plain.post(CHAT, messages=MESSAGES, max_tokens=2, tools=[CLOCK], tool_choice="none").status == 200


@pytest.mark.slow
def test_the_openai_packages_tool_loop(server: Serving) -> None:
    """A call, its result, and the conversation with both; whole, streamed, and put together by the package."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    said: list[Any] = [{"role": "user", "content": "the time"}]
    body: dict[str, Any] = {"model": "quire-embedded", "tools": [CLOCK], "seed": 3, "max_tokens": 80}
    choice: Any = {"type": "function", "function": {"name": "clock"}}
    message = client.chat.completions.create(**body, messages=said, tool_choice=choice).choices[0].message
    [call] = message.tool_calls or []
    with client.chat.completions.stream(**body, messages=said, tool_choice=choice) as stream:
        [streamed_call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert_follows(call.model_dump())
    assert streamed_call.model_dump()["function"]["arguments"] == call.model_dump()["function"]["arguments"]
    said += [message, {"role": "tool", "tool_call_id": call.id, "content": "12:00"}]
    answer = client.chat.completions.create(**body, messages=said, tool_choice="none", temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
