"""What vLLM's own tests of its tool parsers, reasoning parsers and OpenAI entrypoints ask for, row by row.

Each row names vLLM's test that has the behaviour, below its tests/: a function, or a file and what is asked of it. The
inputs are our own. A row is answered as vLLM
answers it, refused as vLLM refuses it, or, where vLLM serves what Quire does not, refused by the sentence in the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from quire.server.tools.dialect import REASONING_MARKS, SYNTAXES, Dialect
from quire.server.tools.parser import Answer, gathered
from tests.server.serving import Serving
from tests.server.tools.test_families import WRITTEN
from tests.server.tools.test_tools_served import CLOCK, WEATHER, assert_follows

# ----------------------------------------------------------------------------------------------------- parsers

PARSERS = {  # vLLM's file of tests -> our name of the syntax
    "test_hermes_tool_parser": "hermes",
    "test_granite4_tool_parser": "hermes",
    "test_qwen3coder_tool_parser": "qwen3_coder",
    "test_qwen3xml_tool_parser": "qwen3_coder",
    "test_seed_oss_tool_parser": "seed_oss",
    "test_llama3_json_tool_parser": "llama3_json",
    "test_pythonic_tool_parser": "pythonic",
    "test_llama4_pythonic_tool_parser": "llama4_pythonic",
    "test_lfm2_tool_parser": "lfm2",
    "test_olmo3_tool_parser": "olmo3",
    "test_gemma4_tool_parser": "gemma4",
    "test_functiongemma_tool_parser": "functiongemma",
    "test_mistral_tool_parser": "mistral",
    "test_granite_tool_parser": "granite",
    "test_phi4mini_tool_parser": "phi4_mini_json",
    "test_deepseekv3_tool_parser": "deepseek_v3",
    "test_deepseekv31_tool_parser": "deepseek_v31",
    "test_glm4_moe_tool_parser": "glm45",
    "test_glm47_moe_tool_parser": "glm47",
    "test_openai_tool_parser": "openai",
}
Calls = list[tuple[str, Any]]
KINDS = {
    "words": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "sure": {"type": "boolean"},
    "none": {"type": "null"},
    "many": {"type": "array", "items": {"type": "integer"}},
    "inner": {"type": "object"},
}
FUNCTIONS: dict[str, Any] = {
    "forecast": {"type": "object", "properties": {"place": {"type": "string"}}},
    "clock": {"type": "object", "properties": {"zone": {"type": "string"}}},
    "all_kinds": {"type": "object", "properties": KINDS},
    "ping": {"type": "object", "properties": {}},
}
LISBON: Calls = [("forecast", {"place": "Lisbon"})]
BOTH: Calls = [*LISBON, ("clock", {"zone": "WET"})]
EVERY_KIND: Calls = [
    (
        "all_kinds",
        {"words": "w", "count": -3, "share": 0.5, "sure": False, "none": None, "many": [1, 2], "inner": {"k": "v"}},
    )
]
ESCAPED: Calls = [("forecast", {"place": 'a "b"\tc\\d\n\u00e9 \u6f22'})]


class Read(NamedTuple):
    """What is read of a text."""

    cite: str  # vLLM's test
    syntax: str | None
    text: str
    content: str
    calls: Calls
    reasoning: str = ""
    marks: str | None = None
    begins: str = ""  # where the prompt ends


def common(file: str, syntax: str) -> Iterator[Read]:
    """What common_tests.py asks of each parser."""
    write = WRITTEN[syntax]
    said = "The sun [1] is out; {nothing} was called."
    final = "<|channel|>final<|message|>"
    before = (
        "Let me see.\n"
        if syntax != "openai"
        else "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    )
    cite = f"tool_parsers/{file}.py::common_tests.test_"
    yield Read(f"{cite}no_tool_calls", syntax, (final if syntax == "openai" else "") + said, said, [])
    yield Read(f"{cite}single_tool_call_simple_args", syntax, write(LISBON), "", LISBON)
    yield Read(f"{cite}parallel_tool_calls", syntax, write(BOTH), "", BOTH)
    yield Read(f"{cite}various_data_types", syntax, write(EVERY_KIND), "", EVERY_KIND)
    yield Read(f"{cite}empty_arguments", syntax, write([("ping", {})]), "", [("ping", {})])
    yield Read(f"{cite}escaped_strings", syntax, write(ESCAPED), "", ESCAPED)
    if syntax != "pythonic":  # there a list within a text may be anything, for vLLM as well
        yield Read(f"{cite}surrounding_text", syntax, before + write(LISBON), "Let me see.", LISBON)


def thinking(file: str, name: str) -> Iterator[Read]:
    """What the files of reasoning parsers ask of each, in its own marks."""
    begin, end = REASONING_MARKS[name]
    cite = f"reasoning/{file}.py::test_reasoning"
    for case, text, begins, reasoning, content in (
        ("simple_reasoning", f"I weigh it.{end}Yes.", "thinking", "I weigh it.", "Yes."),
        ("complete_reasoning", f"I weigh it.{end}", "thinking", "I weigh it.", ""),
        ("reasoning_with_think", f"{begin}I weigh it.{end}Yes.", "", "I weigh it.", "Yes."),
        ("complete_reasoning_with_think", f"{begin}I weigh it.{end}", "", "I weigh it.", ""),
        ("multiple_lines", f"One.\nTwo.{end}Yes.\nNo.", "thinking", "One.\nTwo.", "Yes.\nNo."),
        ("multiple_lines_with_think", f"{begin}One.\nTwo.{end}Yes.\nNo.", "", "One.\nTwo.", "Yes.\nNo."),
        ("shortest", f"{end}Yes.", "thinking", "", "Yes."),
        ("think_no_end", f"{begin}I weigh it", "", "I weigh it", ""),
        ("no_reasoning_token", "I weigh it", "thinking", "I weigh it", ""),
        ("empty", "", "", "", ""),
    ):
        yield Read(f"{cite}[{case}]", None, text, content, [], reasoning, name, begins)


HERMES = "tool_parsers/test_hermes_tool_parser.py::test_hermes_"
OWN = [
    Read(HERMES + "parser_streaming_just_forward_text", "hermes", "nothing to call here", "nothing to call here", []),
    Read(HERMES + "parser_streaming_failure_case_bug_19056", "hermes",
         '<tool_call>\n{"name": "ping", "arguments": {"on": true}}\n</tool_call>', "", [("ping", {"on": True})]),
    Read(HERMES + "parser_streaming", "hermes",
         '<tool_call>{"name": "forecast","arguments": {"place":"Porto, Portugal"}}</tool_call>', "",
         [("forecast", {"place": "Porto, Portugal"})]),
    Read(HERMES + "streaming_content_then_tool_call_with_stream_interval", "hermes",
         'I look.<tool_call>{"name": "clock", "arguments": {}}</tool_call>', "I look.", [("clock", {})]),
    Read(HERMES + "streaming_multiple_tool_calls_with_stream_interval", "hermes",
         '<tool_call>{"name": "ping", "arguments": {"q": "a"}}</tool_call>'
         '<tool_call>{"name": "ping", "arguments": {"q": "b"}}</tool_call>', "",
         [("ping", {"q": "a"}), ("ping", {"q": "b"})]),
    Read(HERMES + "parser_non_streaming_tool_call_until_eos", "hermes",
         '<tool_call>\n{"name": "ping", "arguments": {"on": true}}', "", [("ping", {"on": True})]),
    Read(HERMES + "parser_non_streaming_serialized_arguments", "hermes",
         '<tool_call>{"name": "ping", "arguments": "{\\"q\\": 7}"}</tool_call>', "", [("ping", {"q": 7})]),
    Read(HERMES + "parser_non_streaming_bare_string_arguments", "hermes",
         '<tool_call>{"name": "ping", "arguments": "soon"}</tool_call>', "", [("ping", "soon")]),
    Read("tool_parsers/test_llama3_json_tool_parser.py: extract tool calls with arguments key", "llama3_json",
         '{"name": "ping", "arguments": {"q": 1}}', "", [("ping", {"q": 1})]),
    Read("tool_parsers/test_llama3_json_tool_parser.py: extract tool calls multiple json", "llama3_json",
         '{"name": "ping", "parameters": {}}; {"name": "clock", "parameters": {"zone": "CET"}}', "",
         [("ping", {}), ("clock", {"zone": "CET"})]),
    Read("tool_parsers/test_llama3_json_tool_parser.py: extract tool calls missing name key", "llama3_json",
         '{"parameters": {"q": 1}}', '{"parameters": {"q": 1}}', []),
    Read("tool_parsers/test_mistral_tool_parser.py: extract tool calls pre v11 tokenizer", "mistral",
         '[TOOL_CALLS][{"name": "ping", "arguments": {"q": 1}}]', "", [("ping", {"q": 1})]),
    Read("tool_parsers/test_mistral_tool_parser.py: extract tool calls", "mistral",
         '[TOOL_CALLS]ping{"q": 1}', "", [("ping", {"q": 1})]),
    Read("tool_parsers/test_granite_tool_parser.py: granite token prefix format", "granite",
         '<|tool_call|>[{"name": "ping", "arguments": {"q": 1}}]', "", [("ping", {"q": 1})]),
    Read("tool_parsers/test_granite_tool_parser.py: granite string prefix format", "granite",
         '<tool_call>[{"name": "ping", "arguments": {"q": 1}}]', "", [("ping", {"q": 1})]),
    Read("tool_parsers/test_gemma4_tool_parser.py: nested arguments", "gemma4",
         '<|tool_call>call:ping{at:{lat:1.5,tags:[<|"|>x<|"|>]}}<tool_call|>', "",
         [("ping", {"at": {"lat": 1.5, "tags": ["x"]}})]),
    Read("tool_parsers/test_qwen3coder_tool_parser.py: extract tool calls fallback no tags", "qwen3_coder",
         "<function=forecast><parameter=place>Faro</parameter></function>", "", [("forecast", {"place": "Faro"})]),
    Read("tool_parsers/test_qwen3coder_tool_parser.py: extract tool calls type conversion", "qwen3_coder",
         "<function=all_kinds><parameter=count>42</parameter><parameter=sure>true</parameter></function>", "",
         [("all_kinds", {"count": 42, "sure": True})]),
    Read("tool_parsers/test_glm4_moe_tool_parser.py: extract tool calls no args", "glm45",
         "<tool_call>ping</tool_call>", "", [("ping", {})]),
    Read("tool_parsers/test_openai_tool_parser.py: extract tool calls no tools", "openai",
         "<|channel|>final<|message|>Nothing.", "Nothing.", []),
    Read("reasoning/test_qwen3_reasoning_parser.py: reasoning, with tool call", "hermes",
         f"<think>I look.</think>{WRITTEN['hermes'](LISBON)}", "", LISBON, "I look.", "qwen3"),
    Read("reasoning/test_gptoss_reasoning_parser.py: gptoss is reasoning end", "openai",
         "<|channel|>analysis<|message|>I weigh.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "Yes.", [],
         "I weigh.", "openai_gptoss"),
]  # fmt: skip
MALFORMED = {  # of common_tests.test_malformed_input: no error, and no call of what is none
    "hermes": ["<tool_call>ping</tool_call>", '<tool_call>{"arguments": {}}</tool_call>'],
    "qwen3_coder": ["<tool_call>ping</tool_call>", "<function=\nping>"],
    "llama3_json": ['{"name": 5}', "{{{"],
    "pythonic": ["[1, 2]", "[ping"],
    "mistral": ["[TOOL_CALLS] none", '[TOOL_CALLS] {"q": 1}'],
    "granite": ["<|tool_call|>[]", "<|tool_call|>none"],
    "deepseek_v31": ["<｜tool▁call▁begin｜>ping", "<｜tool▁calls▁begin｜>"],
    "glm45": ["<tool_call>two words</tool_call>", "<tool_call>"],
    "phi4_mini_json": ["functools are tools", "functools["],
    "gemma4": ["<|tool_call>{}<tool_call|>", "<|tool_call>"],
}
THINKERS = {
    "test_deepseekr1_reasoning_parser": "deepseek_r1",
    "test_qwen3_reasoning_parser": "qwen3",
    "test_mistral_reasoning_parser": "mistral",
    "test_seedoss_reasoning_parser": "seed_oss",
}
READ = [
    *(row for file, syntax in PARSERS.items() for row in common(file, syntax)),
    *(row for file, name in THINKERS.items() for row in thinking(file, name)),
    *OWN,
]


def read(row: Read, pieces: list[str]) -> Answer:
    dialect = Dialect(
        SYNTAXES[row.syntax] if row.syntax else None, REASONING_MARKS[reasoning_of(row)] if reasoning_of(row) else None
    )
    parser = dialect.parser(FUNCTIONS, (), may_call=True, begins=row.begins)
    return gathered([found for piece in pieces for found in parser.feed(piece)] + parser.finish())


def reasoning_of(row: Read) -> str:
    return "openai_gptoss" if row.syntax == "openai" else row.marks or ""


@pytest.mark.slow
def test_parsers() -> None:
    """Whole, letter by letter, and at stream intervals of vLLM's: the same is read."""
    assert len(READ) >= 195
    for row in READ:
        whole = read(row, [row.text])
        calls = [(call.name, json.loads(call.arguments)) for call in whole.calls]
        assert (whole.content, calls, whole.reasoning) == (row.content, row.calls, row.reasoning), row
        for interval in (1, 2, 3, 5, 8):
            pieces = [row.text[at : at + interval] for at in range(0, len(row.text), interval)]
            assert read(row, pieces) == whole, (row, interval)
    # vLLM gives such a call back as text where it does not stream; a stream has named it by then, so it is one here.
    cut = Read(HERMES + "parser_non_streaming_tool_call_invalid_json", "hermes", "", "", [])
    [call] = read(cut, ['<tool_call>{"name": "ping", "arguments": {"on": true}']).calls
    assert call.name == "ping"
    for syntax, texts in MALFORMED.items():
        for text in texts:
            found = read(Read("common_tests.test_malformed_input", syntax, text, "", []), [text])
            assert not found.calls, (syntax, text)


# ---------------------------------------------------------------------------------------------------- entrypoints

COMPLETIONS, CHAT, EMBEDDINGS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "import os\n", "max_tokens": 4, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "a stack"}], "max_completion_tokens": 4, "temperature": 0},
    EMBEDDINGS: {"input": "import os\n"},
    RESPONSES: {"input": "a stack", "max_output_tokens": 4, "temperature": 0},
    "/tokenize": {"prompt": "import os\n"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/score": {"text_1": "a", "text_2": ["a", "b"]},
    "/v1/rerank": {"query": "a", "documents": ["a", "b"]},
}
Check = Callable[[Any], Any]  # whether an answer's JSON, or the list of a stream's events, is right


class Asked(NamedTuple):
    """What is answered."""

    cite: str
    path: str
    body: dict[str, Any]
    check: Check


class Refused(NamedTuple):
    """What is refused, here and there."""

    cite: str
    path: str
    body: dict[str, Any]
    words: str  # of our sentence


class NotHere(NamedTuple):
    """What vLLM serves, and Quire refuses by a sentence."""

    cite: str
    path: str
    body: dict[str, Any]
    words: str


def first(answer: Any) -> Any:
    return answer["choices"][0]


def said(answer: Any) -> str:
    return str(first(answer)["message"]["content"])


def calls_of(answer: Any) -> list[Any]:
    for call in (calls := first(answer)["message"]["tool_calls"]):
        assert_follows(call)
    return list(calls)


def ends_once(events: Any) -> bool:
    reasons = [one["finish_reason"] for event in events for one in event["choices"]]
    return reasons[-1] == "length" and reasons[:-1] == [None] * (len(reasons) - 1)


def counts(events: Any) -> bool:
    """A last chunk without choices has the usage."""
    *others, last = events
    usage = last["usage"]
    return (
        not last["choices"]
        and all(event.get("usage") is None for event in others)
        and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    )


def counts_always(events: Any) -> bool:
    numbers = [event["usage"]["completion_tokens"] for event in events]
    return all(one <= other for one, other in pairwise(numbers)) and numbers[-1] == 4


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a stack"} | fields]}


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


C = "entrypoints/openai/completion/test_completion.py::test_"
H = "entrypoints/openai/chat_completion/test_chat.py::test_"
E = "entrypoints/openai/chat_completion/test_chat_error.py::test_"
F = "entrypoints/openai/chat_completion/test_completion_with_function_calling.py: "
TOOLS = {"tools": [WEATHER, CLOCK], "max_completion_tokens": 120, "seed": 3}
CLOCK_ONLY = {"type": "function", "function": {"name": "clock"}}
YES = schema(a={"type": "boolean"})
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ANSWERED = [
    Asked(C + "single_completion", COMPLETIONS, {}, lambda a: a["usage"]["completion_tokens"] == 4 and a["id"]),
    Asked(C + "single_completion[ids]", COMPLETIONS, {"prompt": [5, 6, 7]}, lambda a: a["usage"]["prompt_tokens"] == 3),
    Asked(C + "no_logprobs", COMPLETIONS, {"logprobs": None}, lambda a: first(a)["logprobs"] is None),
    Asked(C + "zero_logprobs", COMPLETIONS, {"logprobs": 0},
          lambda a: len(first(a)["logprobs"]["top_logprobs"][0]) == 1),
    Asked(C + "some_logprobs", COMPLETIONS, {"logprobs": 5},
          lambda a: 5 <= len(first(a)["logprobs"]["top_logprobs"][0]) <= 6),
    Asked(C + "prompt_logprobs_completion[0]", COMPLETIONS, {"prompt_logprobs": 0},
          lambda a: len(first(a)["prompt_logprobs"]) > 0),
    Asked(C + "prompt_logprobs_completion[1]", COMPLETIONS, {"prompt_logprobs": 1, "prompt": ["a b", "c d"]},
          lambda a: all(one["prompt_logprobs"] for one in a["choices"])),
    Asked(C + "prompt_logprobs_completion[None]", COMPLETIONS, {}, lambda a: first(a).get("prompt_logprobs") is None),
    Asked(C + "completion_streaming", COMPLETIONS, STREAM, ends_once),
    Asked(C + "parallel_no_streaming", COMPLETIONS, {"n": 3, "temperature": 1, "seed": 4, "logprobs": 0},
          lambda a: [one["index"] for one in a["choices"]] == [0, 1, 2]),
    Asked(C + "parallel_streaming", COMPLETIONS, STREAM | {"n": 3, "temperature": 1, "seed": 4},
          lambda e: sum(one["finish_reason"] is not None for event in e for one in event["choices"]) == 3),
    Asked(C + "completion_stream_options[none]", COMPLETIONS, STREAM | {"stream_options": {}},
          lambda e: all(event.get("usage") is None for event in e)),
    Asked(C + "completion_stream_options[no usage]", COMPLETIONS,
          STREAM | {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
          lambda e: all(event.get("usage") is None for event in e)),
    Asked(C + "completion_stream_options[usage]", COMPLETIONS, USAGE, counts),
    Asked(C + "completion_stream_options[always]", COMPLETIONS,
          STREAM | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, counts_always),
    Asked(C + "batch_completions", COMPLETIONS, {"prompt": ["import os\n"] * 2},
          lambda a: a["choices"][0]["text"] == a["choices"][1]["text"]),
    Asked(C + "batch_completions[ids]", COMPLETIONS, {"prompt": [[5, 6]] * 2}, lambda a: len(a["choices"]) == 2),
    Asked(C + "batch_completions[beams]", COMPLETIONS, {"prompt": ["import os\n"] * 2, "n": 2, "use_beam_search": True},
          lambda a: [one["text"] for one in a["choices"][:2]] == [one["text"] for one in a["choices"][2:]]),
    Asked(C + "echo_logprob_completion[1]", COMPLETIONS, {"echo": True, "logprobs": 1},
          lambda a: first(a)["text"].startswith("import os\n") and first(a)["logprobs"]["token_logprobs"][0] is None),
    Asked(C + "echo_logprob_completion[0]", COMPLETIONS, {"echo": True, "logprobs": 0},
          lambda a: first(a)["logprobs"]["top_logprobs"][0] is None),
    Asked(H + "no_logprobs_chat", CHAT, {"logprobs": False}, lambda a: first(a)["logprobs"] is None),
    Asked(H + "zero_logprobs_chat", CHAT, {"logprobs": True, "top_logprobs": 0},
          lambda a: first(a)["logprobs"]["content"][0]["top_logprobs"] == []),
    Asked(H + "some_logprobs_chat", CHAT, {"logprobs": True, "top_logprobs": 5},
          lambda a: len(first(a)["logprobs"]["content"][0]["top_logprobs"]) == 5),
    Asked(H + "prompt_logprobs_chat[1]", CHAT, {"prompt_logprobs": 1}, lambda a: len(a["prompt_logprobs"]) > 0),
    Asked(H + "prompt_logprobs_chat[0]", CHAT, {"prompt_logprobs": 0}, lambda a: len(a["prompt_logprobs"]) > 0),
    Asked(H + "prompt_logprobs_chat[None]", CHAT, {}, lambda a: a.get("prompt_logprobs") is None),
    Asked(H + "more_than_one_prompt_logprobs_chat", CHAT, {"prompt_logprobs": 2},
          lambda a: 2 <= len(a["prompt_logprobs"][3]) <= 3),
    Asked(H + "single_chat_session", CHAT, {"logprobs": True, "top_logprobs": 5},
          lambda a: first(a)["finish_reason"] == "length" and first(a)["message"]["role"] == "assistant"),
    Asked(H + "chat_streaming", CHAT, STREAM, ends_once),
    Asked(H + "chat_completion_stream_options[usage]", CHAT, USAGE, counts),
    Asked(H + "chat_completion_stream_options[no usage]", CHAT, STREAM | {"stream_options": {"include_usage": False}},
          lambda e: all(event.get("usage") is None for event in e)),
    Asked(H + "chat_completion_stream_options[always]", CHAT,
          STREAM | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, counts_always),
    Asked(H + "structured_outputs_choice_chat", CHAT, {"structured_outputs": {"choice": ["red", "blue"]}},
          lambda a: said(a) in ("red", "blue")),
    Asked(H + "structured_outputs_json_chat", CHAT, {"structured_outputs": {"json": YES}, "max_completion_tokens": 40},
          lambda a: set(json.loads(said(a))) == {"a"}),
    Asked(H + "structured_outputs_regex_chat", CHAT,
          {"structured_outputs": {"regex": "[0-9]{1,3}\\.[0-9]{1,3}"}, "max_completion_tokens": 20},
          lambda a: re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", said(a))),
    Asked(H + "structured_outputs_choice_chat_logprobs", CHAT,
          {"structured_outputs": {"choice": ["red", "blue"]}, "logprobs": True, "top_logprobs": 5},
          lambda a: all(one["logprob"] >= -9999 for one in first(a)["logprobs"]["content"][0]["top_logprobs"])),
    Asked(H + "response_format_json_schema", CHAT,
          {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": YES}},
           "max_completion_tokens": 40}, lambda a: set(json.loads(said(a))) == {"a"}),
    Asked(H + "response_format_text", CHAT, {"response_format": {"type": "text"}}, lambda a: said(a) is not None),
    Asked(H + "extra_fields_allowed", CHAT, message(extra_field="0"), said),
    Asked(H + "complex_message_content", CHAT, message(content=[{"type": "text", "text": "a stack"}]), said),
    Asked(H + "custom_role", CHAT, message(role="my-custom-role"), said),
    Asked(H + "chat_completion_n_parameter_non_streaming", CHAT, {"n": 3, "temperature": 1, "seed": 3},
          lambda a: [one["index"] for one in a["choices"]] == [0, 1, 2]),
    Asked(H + "chat_completion_n_parameter_streaming", CHAT, STREAM | {"n": 2, "temperature": 1, "seed": 3},
          lambda e: {one["index"] for event in e for one in event["choices"]} == {0, 1}),
    Asked(H + "chat_completion_n_with_seed", CHAT, {"n": 2, "seed": 42}, lambda a: len(a["choices"]) == 2),
    Asked(H + "chat_completion_n_equals_1", CHAT, {"n": 1}, lambda a: len(a["choices"]) == 1),
    Asked(E + "system_message_accepts_text", CHAT, message(role="system"), said),
    Asked(E + "system_message_accepts_text_array", CHAT,
          message(role="system", content=[{"type": "text", "text": "x"}]), said),
    Asked("entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_valid", CHAT,
          {"logit_bias": {"2047": 1.0}}, said),
    Asked("entrypoints/openai/chat_completion/test_chat_stop_token_ids_validation.py::test_chat_stop_token_ids_valid",
          CHAT, {"stop_token_ids": [2047]}, said),
    Asked("entrypoints/openai/chat_completion/test_tool_choice_null.py", CHAT, TOOLS | {"tool_choice": None}, first),
    Asked("entrypoints/openai/basic/test_return_token_ids.py: basic completion with emoji", COMPLETIONS,
          {"return_token_ids": True}, lambda a: len(first(a)["token_ids"]) == 4 and first(a)["prompt_token_ids"]),
    Asked("entrypoints/openai/basic/test_return_token_ids.py: chat completion basic", CHAT,
          {"return_token_ids": True}, lambda a: len(first(a)["token_ids"]) == 4 and a["prompt_token_ids"]),
    Asked("entrypoints/openai/chat_completion/test_include_reasoning.py", CHAT, {"include_reasoning": False},
          lambda a: not first(a)["message"].get("reasoning_content")),
    Asked("entrypoints/openai/chat_completion/test_reasoning_effort.py", CHAT, {"reasoning_effort": "low"}, said),
    Asked("entrypoints/openai/chat_completion/test_enable_force_include_usage.py", CHAT, {},
          lambda a: a["usage"]["total_tokens"] > 4),
    Asked(F + "function_tool_use[required]", CHAT, TOOLS | {"tool_choice": "required"}, calls_of),
    Asked(F + "function_tool_use[required, streamed]", CHAT, TOOLS | STREAM | {"tool_choice": "required"},
          lambda e: any(one["delta"].get("tool_calls") for event in e for one in event["choices"])),
    Asked(F + "named_tool_use", CHAT, TOOLS | {"tool_choice": CLOCK_ONLY},
          lambda a: [call["function"]["name"] for call in calls_of(a)] == ["clock"]),
    Asked(F + "function_tool_use[none]", CHAT, TOOLS | {"tool_choice": "none"},
          lambda a: not first(a)["message"].get("tool_calls")),
    Asked(F + "function_tool_use[auto]", CHAT, TOOLS | {"tool_choice": "auto"}, first),
    Asked(F + "max_tokens_with_tool_choice_required", CHAT,
          TOOLS | {"tool_choice": "required", "max_completion_tokens": 1},
          lambda a: first(a)["finish_reason"] == "length"),
    Asked("tool_use/test_parallel_tool_calls.py: parallel tool calls false", CHAT,
          TOOLS | {"tool_choice": "required", "parallel_tool_calls": False}, lambda a: len(calls_of(a)) == 1),
    Asked("tool_use/test_tool_choice_required.py", CHAT, TOOLS | {"tool_choice": "required", "n": 2},
          lambda a: len(a["choices"]) == 2 and all(one["message"]["tool_calls"] for one in a["choices"])),
    Asked("entrypoints/openai/responses/test_basic.py: simple input", RESPONSES, {},
          lambda a: a["object"] == "response"),
    Asked("entrypoints/openai/responses/test_basic.py: instructions", RESPONSES, {"instructions": "Be short."},
          lambda a: a["instructions"] == "Be short."),
    Asked("entrypoints/openai/responses/test_basic.py: chat", RESPONSES,
          {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                     {"role": "user", "content": "c"}]}, lambda a: a["output"]),
    Asked("entrypoints/openai/responses/test_function_call.py: function call with tool choice", RESPONSES,
          {"tools": [{"type": "function"} | CLOCK["function"]], "tool_choice": "required", "max_output_tokens": 80},
          lambda a: a["output"][0]["type"] == "function_call" and a["output"][0]["name"] == "clock"),
    Asked("entrypoints/pooling/embed/test_online.py: embedding request", EMBEDDINGS, {"encoding_format": "float"},
          lambda a: len(a["data"]) == 1),
    Asked("entrypoints/pooling/embed/test_online.py: base64 embed dtype and endianness", EMBEDDINGS,
          {"encoding_format": "base64"}, lambda a: isinstance(a["data"][0]["embedding"], str)),
    Asked("entrypoints/pooling/embed/test_online.py: truncate prompt tokens", EMBEDDINGS,
          {"input": "a b c d e f g h", "truncate_prompt_tokens": 3}, lambda a: a["usage"]["prompt_tokens"] == 3),
    Asked("entrypoints/pooling/embed/test_online_dimensions.py: matryoshka", EMBEDDINGS, {"dimensions": 8},
          lambda a: len(a["data"][0]["embedding"]) == 8),
    Asked("entrypoints/pooling/score/test_online_score.py: text 1 str text 2 list", "/v1/score", {},
          lambda a: len(a["data"]) == 2),
    Asked("entrypoints/pooling/score/test_online_rerank.py: rerank texts", "/v1/rerank", {},
          lambda a: a["results"][0]["index"] == 0),
    Asked("entrypoints/pooling/score/test_online_rerank.py: rerank top n", "/v1/rerank", {"top_n": 1},
          lambda a: len(a["results"]) == 1),
    Asked("entrypoints/serve, tokenize: tokenize_completions", "/tokenize", {},
          lambda a: a["count"] == len(a["tokens"])),
    Asked("entrypoints/serve, tokenize: tokenize_with_return_token_strs", "/tokenize",
          {"return_token_strs": True}, lambda a: "".join(a["token_strs"][1:]) == "import os\n"),
    Asked("entrypoints/serve, tokenize: detokenize", "/detokenize", {}, lambda a: a["prompt"]),
]  # fmt: skip
REFUSED = [
    Refused(C + "too_many_completion_logprobs", COMPLETIONS, {"logprobs": 21}, "20"),
    Refused(C + "too_many_completion_logprobs[stream]", COMPLETIONS, STREAM | {"logprobs": 30}, "20"),
    Refused(C + "prompt_logprobs_completion[-1]", COMPLETIONS, {"prompt_logprobs": -1}, "at least 0"),
    Refused(C + "invalid_json_schema", COMPLETIONS,
            {"structured_outputs": {"json": {"type": "object", "properties": {"foo": "bar"}}}}, "structured_outputs"),
    Refused(C + "invalid_regex", COMPLETIONS, {"structured_outputs": {"regex": "[.*"}}, "structured_outputs"),
    Refused(C + "invalid_grammar", COMPLETIONS, {"structured_outputs": {"grammar": "root ::= nowhere"}},
            "structured_outputs"),
    Refused(H + "too_many_chat_logprobs", CHAT, {"logprobs": True, "top_logprobs": 21}, "20"),
    Refused(H + "too_many_chat_logprobs[stream]", CHAT, STREAM | {"logprobs": True, "top_logprobs": 30}, "20"),
    Refused(H + "prompt_logprobs_chat[-1]", CHAT, {"prompt_logprobs": -1}, "at least 0"),
    Refused(H + "structured_outputs_type_error", CHAT, {"structured_outputs": {"regex": {"1": "a"}}}, "a text"),
    Refused(H + "long_seed[low]", CHAT, {"seed": -(2**63) - 1}, "seed"),
    Refused(H + "long_seed[high]", CHAT, {"seed": 2**63}, "seed"),
    Refused(E + "json_schema_response_format_missing_schema", CHAT, {"response_format": {"type": "json_schema"}},
            "json_schema is missing"),
    Refused("entrypoints/openai/completion/test_completion_error.py::test_json_schema_response_format_missing_schema",
            COMPLETIONS, {"response_format": {"type": "json_schema"}}, "json_schema is missing"),
    Refused("entrypoints/openai/completion/test_completion_error.py::test_negative_prompt_token_ids_flat", COMPLETIONS,
            {"prompt": [-1]}, "prompt"),
    Refused("entrypoints/openai/completion/test_completion_error.py::test_negative_prompt_token_ids_nested",
            COMPLETIONS, {"prompt": [[-1]]}, "prompt"),
    Refused("entrypoints/openai/completion/test_prompt_validation.py::test_empty_prompt", COMPLETIONS,
            {"prompt": None}, "prompt"),
    Refused("entrypoints/openai/completion/test_prompt_validation.py::test_out_of_vocab_token_ids", COMPLETIONS,
            {"prompt": [999999]}, "999999"),
    Refused("entrypoints/openai/completion/test_empty_prompt_list.py", COMPLETIONS, {"prompt": []}, "prompt"),
    Refused("entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_invalid",
            CHAT, {"logit_bias": {"99999": 1.0}}, "99999"),
    Refused("entrypoints/openai/chat_completion/test_chat_stop_token_ids_validation.py::test_chat_stop_token_ids_invalid",
            CHAT, {"stop_token_ids": [99999]}, "99999"),
    Refused(F + "named_tool_use[unknown]", CHAT,
            TOOLS | {"tool_choice": {"type": "function", "function": {"name": "nowhere"}}}, "not a function of tools"),
    Refused(F + "required_tool_use_without_tools", CHAT, {"tool_choice": "required"}, "without tools"),
    Refused(F + "invalid_tool_choice", CHAT, TOOLS | {"tool_choice": "sometimes"}, "'none', 'auto', 'required'"),
    Refused("entrypoints/openai/chat_completion/test_thinking_token_budget_validation.py", CHAT,
            {"thinking_token_budget": -5}, "at least 0"),
    Refused("entrypoints/pooling/embed/test_online.py: truncate prompt tokens invalid", EMBEDDINGS,
            {"truncate_prompt_tokens": 10**9 * 9}, "truncate_prompt_tokens"),
    Refused("entrypoints/openai/basic/test_chat_echo.py: top logprobs, without logprobs", CHAT,
            {"top_logprobs": 2}, "without logprobs"),
    Refused("entrypoints/openai/chat_completion/test_serving_chat.py: continue final message", CHAT,
            {"continue_final_message": True, "add_generation_prompt": True}, "leave one of them out"),
]  # fmt: skip
NOT_HERE = [
    NotHere(C + "completion_truncation_side_controls_prompt_truncation", COMPLETIONS,
            {"truncate_prompt_tokens": 2, "truncation_side": "right"}, "keeps the end of a prompt"),
    NotHere(E + "user_message_accepts_image", CHAT,
            message(content=[{"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}]), "text"),
    NotHere("entrypoints/openai/chat_completion/test_audio.py: single chat session audio", CHAT,
            message(content=[{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]), "text"),
    NotHere("entrypoints/openai/chat_completion/test_video.py: single chat session video", CHAT,
            message(content=[{"type": "video_url", "video_url": {"url": "http://localhost/a.mp4"}}]), "text"),
    NotHere("entrypoints/openai/completion/test_completion_with_prompt_embeds.py", COMPLETIONS,
            {"prompt_embeds": "AAAA"}, "a prompt is a text or token ids"),
    NotHere("entrypoints/openai/basic/test_chat_template.py: request template", CHAT,
            {"chat_template": "{{ messages }}"}, "a template in a request would be a program from a stranger"),
    NotHere("tool_parsers/test_structural_tag_registry.py", CHAT,
            {"structured_outputs": {"structural_tag": "{}"}}, "a structural tag is not served"),
    NotHere("entrypoints/openai/responses/test_stateful.py: store", RESPONSES,
            {"previous_response_id": "resp_1"}, "nothing is stored here"),
    NotHere("entrypoints/openai/responses/test_stateful.py: background", RESPONSES, {"background": True},
            "an answer is given while its client waits"),
    NotHere("entrypoints/openai/chat_completion/test_serving_chat.py: logits processors", CHAT,
            {"logits_processors": ["a"]}, "no code of a request is run"),
]  # fmt: skip

OTHERWISE = [  # what vLLM refuses and Quire takes, and why
    Asked(C + "completion_stream_options[without stream]", COMPLETIONS, {"stream_options": {"include_usage": True}},
          lambda a: a["usage"]["total_tokens"] > 4),  # clients send it always, and an answer has its usage anyway
    Asked(H + "chat_completion_stream_options[without stream]", CHAT, {"stream_options": {"include_usage": None}},
          lambda a: a["usage"]["total_tokens"] > 4),
]  # fmt: skip


@pytest.mark.slow
def test_entrypoints(speaking: Serving) -> None:
    assert len({row.cite for row in (*ANSWERED, *REFUSED, *NOT_HERE)}) >= 110
    for asked in (*ANSWERED, *OTHERWISE):
        answer = speaking.post(asked.path, **BASE[asked.path] | asked.body)
        assert answer.status == 200, (asked.cite, answer.body)
        assert asked.check(answer.events() if asked.body.get("stream") else answer.json()), (asked.cite, answer.body)
    for refused in (*REFUSED, *NOT_HERE):
        answer = speaking.post(refused.path, **BASE[refused.path] | refused.body)
        assert answer.status == 400, (refused.cite, answer.body)
        error = answer.error()
        assert refused.words in f"{error['param']}: {error['message']}", (refused.cite, error)
