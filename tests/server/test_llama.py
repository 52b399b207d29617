"""llama-server's own routes: bodies as its users write them, and what is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.server.api import infill
from quire.server.api.infill import Form
from tests.server.serving import SMALL, Serving

COMPLETION, INFILL, TOKENIZE, TEMPLATE = "/completion", "/infill", "/tokenize", "/apply-template"
PROMPT = "import os\n\n\ndef "
GREEDY: dict[str, Any] = {"prompt": PROMPT, "n_predict": 12, "temperature": 0}
# What llama.vim sends with each request.
OF_AN_EDITOR: dict[str, Any] = {
    "id_slot": 0, "n_indent": 4, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "stream": False,
}  # fmt: skip
# The defaults that its own page sends: each is neutral here.
OF_A_PAGE: dict[str, Any] = {
    "typical_p": 1.0, "repeat_last_n": 64, "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "min_keep": 0,
    "dynatemp_range": 0, "dynatemp_exponent": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "dry_multiplier": 0,
    "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "n_keep": 0, "seed": -1, "n_probs": 0,
    "top_n_sigma": -1, "grammar": "", "image_data": [], "lora": [], "logit_bias": [], "stop": [], "id_slot": -1,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**SMALL)


def ask(server: Serving, path: str, **body: Any) -> Any:
    answer = server.post(path, **body)
    assert answer.status == 200, answer.body
    return answer.json()


def pieces(server: Serving, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which has no [DONE]."""
    answer = server.post(path, **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = [json.loads(part.removeprefix("data: ")) for part in answer.body.decode().split("\n\n")[:-1]]
    assert [one["stop"] for one in found] == [False] * (len(found) - 1) + [True]
    return found


def test_a_prompt_is_continued_as_offline(server: Serving, llm: LLM) -> None:
    [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    tokens, [expected] = output.prompt_token_ids, output.outputs
    for body in (GREEDY, GREEDY | OF_A_PAGE, GREEDY | OF_AN_EDITOR | {"top_k": 0}, GREEDY | {"prompt": tokens}):
        found = ask(server, COMPLETION, **body, return_tokens=True)
        assert (found["content"], found["tokens"]) == (expected.text, expected.token_ids)
        assert found["prompt"].removeprefix("<|endoftext|>") == PROMPT
        assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
        assert (found["tokens_predicted"], found["tokens_evaluated"]) == (12, len(tokens))
        assert (found["model"], found["truncated"]) == ("quire-embedded", False)
        assert found["has_new_line"] == ("\n" in expected.text)
        assert found["generation_settings"]["n_predict"] == 12
        assert found["generation_settings"]["temperature"] == 0
        timings = found["timings"]
        assert timings["prompt_n"] + timings["cache_n"] == len(tokens)
        assert timings["cache_n"] == found["tokens_cached"]
        assert timings["predicted_per_second"] == pytest.approx(12_000 / timings["predicted_ms"])
    *parts, last = pieces(server, COMPLETION, **GREEDY, timings_per_token=True, n_probs=2)
    assert "".join(one["content"] for one in parts) == expected.text
    assert [token for one in parts for token in one["tokens"]] == expected.token_ids
    assert [one["id"] for part in parts for one in part["completion_probabilities"]] == expected.token_ids
    assert parts[-1]["timings"]["predicted_n"] == parts[-1]["tokens_predicted"] == 12
    assert (last["content"], last["tokens_predicted"], last["stop_type"]) == ("", 12, "limit")
    scored = ask(server, COMPLETION, **GREEDY, n_probs=2)["completion_probabilities"]
    assert [(one["id"], one["top_logprobs"][0]["id"]) for one in scored] == [(t, t) for t in expected.token_ids]
    assert all(len(one["top_logprobs"]) == 2 for one in scored)


@pytest.mark.slow
def test_what_ends_and_restricts_a_text(server: Serving, llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = ask(server, COMPLETION, **GREEDY)["content"]
    word = ask(server, COMPLETION, **GREEDY, stop=[text[3:6]])
    assert (word["stop_type"], word["stopping_word"], word["content"]) == (
        "word",
        text[3:6],
        text[: text.index(text[3:6])],
    )
    first = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids[0]
    for bias in ([[first, False]], [[first, -100]], {str(first): -100}):
        assert ask(server, COMPLETION, **GREEDY, logit_bias=bias, return_tokens=True)["tokens"][0] != first
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    ended = ask(server, COMPLETION, prompt="x", temperature=3, seed=1, json_schema=schema, n_predict=-1)
    assert json.loads(ended["content"]).keys() == {"on"}
    assert ended["stop_type"] == "eos"
    warm = ask(server, COMPLETION, **GREEDY | {"n_predict": 0})
    assert (warm["content"], warm["tokens_predicted"], warm["timings"]["predicted_n"]) == ("", 0, 0)
    assert warm["generation_settings"]["n_predict"] == 0
    [only] = pieces(server, COMPLETION, **GREEDY | {"n_predict": 0})
    assert only["content"] == ""
    names = ["content", "timings/prompt_n", "generation_settings/n_predict", "nothing", "content/a"]
    chosen = ask(server, COMPLETION, **GREEDY, response_fields=names)
    assert chosen.keys() == {"content", "timings/prompt_n", "generation_settings/n_predict"}
    assert (chosen["content"], chosen["generation_settings/n_predict"]) == (text, 12)
    # Without a window there are no penalties, so a penalty of the body has no effect.
    assert ask(server, COMPLETION, **GREEDY, repeat_last_n=0, repeat_penalty=9)["content"] == text
    assert ask(server, COMPLETION, **GREEDY, repeat_last_n=64, repeat_penalty=9)["content"] != text


def test_filling_in(server: Serving, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens of the model in the place of those that families of models were taught with."""
    assert llm.tokenizer is not None
    body = {"input_prefix": "os.path\n", "input_suffix": "\n\nx", "prompt": "  y", "n_predict": 16, "temperature": 0}
    refused = server.post(INFILL, **body)
    assert (refused.status, refused.error()["param"]) == (400, "input_suffix")
    assert "not trained to fill in" in refused.error()["message"]

    def encode(text: str) -> list[int]:
        assert llm.tokenizer is not None
        return llm.tokenizer.encode(text, add_special_tokens=False)

    prefix, suffix, middle, end, repository, file = (
        llm.tokenizer.token_id(text) for text in ("def", "class", "return", "import", "self", "None")
    )
    [first, *before] = llm.tokenizer.encode("os.path\n  y")
    gap = [prefix, *before, suffix, *encode("\n\nx"), middle]
    extra = [{"filename": "a.py", "text": "a = 1"}, {"filename": "b.py", "text": "b = 2"}]
    files = [file, *encode("a.py\na = 1\n"), file, *encode("b.py\nb = 2\n"), file, *encode("file\n")]
    plain, known = Form("def", "class", "return", ("import",)), Form("def", "class", "return", (), "self", "None")
    params = SamplingParams(max_tokens=16, temperature=0, stop_token_ids=[end])  # type: ignore[list-item]
    for form, given, tokens in (
        (plain, {}, [first, *gap]),
        (plain, {"input_extra": extra}, [first, *encode("a = 1\n"), *encode("b = 2\n"), *gap]),
        (
            known._replace(ends=("import",)),
            {"input_extra": extra},
            [first, repository, *encode("project\n"), *files, *gap],
        ),
    ):
        monkeypatch.setattr(infill, "FORMS", (form,))
        [expected] = llm.generate([tokens], params)  # type: ignore[list-item]
        found = ask(server, INFILL, **body, **OF_AN_EDITOR, **given)
        assert found["prompt"] == llm.tokenizer.decode(tokens, skip_special_tokens=False)  # type: ignore[arg-type]
        assert (found["content"], found["tokens_evaluated"]) == (expected.outputs[0].text, len(tokens))
        assert "".join(one["content"] for one in pieces(server, INFILL, **body, **given)) == found["content"]
    # Of long texts of other files, the end is kept.
    longest = server.service.model.max_model_len
    found = ask(server, INFILL, **body, input_extra=[{"text": "a = 1\n" * longest}, *extra])
    assert found["tokens_evaluated"] == longest - 16
    assert found["prompt"].endswith(llm.tokenizer.decode([*files, *gap], skip_special_tokens=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (TOKENIZE, {"content": "ab é"}, lambda t: {"tokens": t.encode("ab é", False)}),
        (TOKENIZE, {"content": "ab", "add_special": True}, lambda t: {"tokens": t.encode("ab", True)}),
        (TOKENIZE, {"content": ""}, lambda t: {"tokens": []}),
        (TOKENIZE, {"content": "<|endoftext|>"}, lambda t: {"tokens": [t.token_id("<|endoftext|>")]}),
        (
            TOKENIZE,
            {"content": "<|endoftext|>", "parse_special": False, "add_special": True},
            lambda t: {"tokens": [*t.leading_tokens, *t.encode("<", False), *t.encode("|endoftext|>", False)]},
        ),
        (
            TOKENIZE,
            {"content": "a\u2603", "with_pieces": True},
            lambda t: {
                "tokens": [{"id": t.encode("a", False)[0], "piece": "a"}]
                + [{"id": one, "piece": list(t.token_bytes(one))} for one in t.encode("\u2603", False)]
            },
        ),
        ("/detokenize", {"tokens": [300, 301]}, lambda t: dict.fromkeys(("content", "prompt"), t.decode([300, 301]))),
    ],
)  # fmt: skip
def test_tokens_and_texts(server: Serving, llm: LLM, path: str, body: dict[str, Any], expected: Any) -> None:
    assert ask(server, path, **body) == expected(llm.tokenizer)


def test_prompts_settings_and_slots(speaking: Serving, server: Serving) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a queue"}]
    template = speaking.service.model.template
    assert template is not None
    prompt = ask(speaking, TEMPLATE, messages=messages, chat_template_kwargs={"enable_thinking": False}, stream=True)
    assert prompt == {"prompt": template.render(messages, True, None, {"enable_thinking": False, "mood": "calm"})}
    found = speaking.get("/props").json()
    settings, total = found["default_generation_settings"], speaking.service.engine_client.engine.scheduler.max_num_seqs
    assert (settings["n_ctx"], found["total_slots"]) == (1024, total)
    assert (settings["params"]["n_predict"], settings["params"]["top_p"], settings["params"]["typical_p"]) == (-1, 1, 1)
    assert (found["model_path"], found["model_alias"]) == ("quire-embedded", "quire-embedded")
    assert found["chat_template"] == template.source
    assert found["modalities"] == {"vision": False, "audio": False}
    assert found["build_info"].startswith("quire ")
    assert server.get("/slots").json() == [
        {"id": i, "id_task": -1, "n_ctx": 1024, "is_processing": False} for i in range(total)
    ]
    worker = server.service.engine_client
    worker._num_samples, before = 3, worker._num_samples
    try:
        assert [one["is_processing"] for one in server.get("/slots").json()] == [True] * 3 + [False] * (total - 3)
        assert server.get("/slots?fail_on_no_slot=1").status == 200
        worker._num_samples = total + 1
        full = server.get("/slots?fail_on_no_slot=1")
        assert (full.status, full.error()["code"]) == (503, "no_slot")
    finally:
        worker._num_samples = before


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETION, {"prompt": "a", "typical_p": 0.5}, "typical_p", "leave it out"),
        (COMPLETION, {"prompt": "a", "mirostat": 2}, "mirostat", "mirostat is 2; this way of drawing"),
        (COMPLETION, {"prompt": "a", "repeat_last_n": 128}, "repeat_last_n", "over the whole text"),
        (COMPLETION, {"prompt": "a", "xtc_probability": 0.5}, "xtc_probability", "this way of drawing"),
        (COMPLETION, {"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs", "before sampling"),
        (COMPLETION, {"prompt": "a", "lora": [{"id": 0, "scale": 1}]}, "lora", "by its name"),
        (COMPLETION, {"prompt": "a", "max_tokens": 1}, "max_tokens", "use n_predict"),
        (COMPLETION, {"prompt": "a", "logit_bias": [["x", 1]]}, "logit_bias", "/tokenize"),
        (COMPLETION, {"prompt": "a", "json_schema": {"type": "x"}}, "json_schema", "cannot be followed"),
        (COMPLETION, {"prompt": "a", "grammar": 'root ::= "a"'}, "grammar", "GBNF"),
        (COMPLETION, {"prompt": "a", "n_probs": 99}, "n_probs", "n_probs is 99; this server reports at most 20"),
        (COMPLETION, {"prompt": ["a", "b"]}, "prompt", "continues one prompt"),
        (INFILL, {"input_prefix": "a"}, "input_suffix", "input_suffix is missing; /infill fills in before it"),
        (COMPLETION, {"prompt": "a " * 5000}, "prompt", "maximum context length"),
        (INFILL, {"input_prefix": "a" * 100_000, "input_suffix": ""}, "input_prefix", "has 100000 characters"),
        (TOKENIZE, {"content": "a", "prompt": "b"}, "prompt", "give either prompt, messages or content"),
        (TEMPLATE, {"messages": []}, "messages", "1 entries"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Serving, path: str, body: dict[str, Any], param: str, words: str) -> None:
    refused = server.post(path, **body)
    assert (refused.status, refused.error()["param"]) == (400, param), refused.body
    assert words in refused.error()["message"]
