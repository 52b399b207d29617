"""Receipts: answers of every kind are computed again to the bit, and whatever was changed is found where it was."""

from __future__ import annotations

import json
import logging
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli import app
from quire.errors import ConfigError
from quire.frontend.receipts import logprobs_digest, request_digest
from quire.frontend.request_factory import RequestOptions, TokenizedPrompt
from quire.frontend.verification import Report, verify
from tests.models.adapters import embedded_linears, save_adapter
from tests.server.serving import serving

TIGHT = {"num_blocks": 20, "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 96}
OTHER = {"num_blocks": 64, "max_num_seqs": 3, "max_num_batched_tokens": 50, "max_model_len": 96, "draft": "off"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
TEXTS = ("import os\n\n\ndef ", "class Queue:\n    def ", "for i in range(", "x = [1, 2, ")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "min_tokens": 5, "max_tokens": 9},
    {"seed": 7, "n": 3},
    {"temperature": 0.8, "n": 2, "top_k": 40, "top_p": 0.9, "ignore_eos": True},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.1, "min_p": 0.02},
    {"temperature": 1.3, "stop": ["\n", "("], "include_stop_str_in_output": True},
    {"temperature": 0.0, "stop_token_ids": range(300, 330), "logit_bias": {305: 4.0, 12: -1.5}},
    {"bad_words": ["self"], "allowed_token_ids": {*range(200, 400)}, "seed": 0},
    {"structured_outputs": {"json": SCHEMA}, "max_tokens": 30},
    {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0.0},
    {"max_tokens": None, "temperature": 0.6, "truncate_prompt_tokens": 3, "prompt_logprobs": 1},
]  # fmt: skip


def parameters(count: int) -> list[SamplingParams]:
    drawn = random.Random(5)
    return [SamplingParams(**{"max_tokens": drawn.randint(1, 24)} | KINDS[i % len(KINDS)]) for i in range(count)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OTHER) as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Receipts of answers that were preempted, cancelled or resumed, among others; and the number of answers."""
    path = tmp_path_factory.mktemp("receipts") / "receipts.jsonl"
    return path, write(path, parameters(33))


def write(path: Path, params: list[SamplingParams]) -> int:
    """Write receipts. Return the number of answers, whose tokens are those without receipts."""
    prompts = [{"prompt": TEXTS[i % 4] * (1 + i % 3), "cache_salt": "mine" * (i % 5 == 0)} for i in range(len(params))]
    with LLM(**TIGHT, receipts=path) as llm, LLM(**TIGHT) as plain:
        found, expected = llm.generate(prompts, params, use_tqdm=False), plain.generate(prompts, params, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions > 0
        for one, other, sampling in zip(found, expected, params, strict=True):
            assert one.outputs == other.outputs  # logprobs that nobody asked for are not shown
            assert (one.outputs[0].logprobs is None) == (sampling.logprobs is None)
        cancelled = range(len(params) // 16)
        for seed in cancelled:
            cancel(llm, SamplingParams(n=2, seed=seed, max_tokens=60, ignore_eos=True), 1 + seed % 9)
        longer = found[0].outputs[0].token_ids
        prompt = TokenizedPrompt(None, found[0].prompt_token_ids)
        output, [request] = llm.factory.generation("resumed", prompt, params[0], RequestOptions(), None)
        request.resume(longer[:-2], 1)
        assert llm._finished([(output, [request])], False)[0].outputs[0].token_ids == longer
    return sum(sampling.n for sampling in params) + 4 * len(cancelled) + 1


def cancel(llm: LLM, params: SamplingParams, count: int) -> None:
    """Stop two prompts when the first sample has a number of tokens."""
    stream = llm.stream(["import os\n", "class A:"], params)
    for output in stream:
        if len(output.outputs[0].token_ids) == count:
            break
    stream.close()


def test_all_kinds_of_answers_are_the_same(llm: LLM, written: tuple[Path, int]) -> None:
    path, count = written
    report = verify(llm, path)
    assert report.is_good, (report.different[:3], report.unverified[:3])
    assert (report.num_lines, report.num_same) == (count, count)
    receipts = lines(path)
    assert {one["finish_reason"] for one in receipts} == {"length", "stop", "abort"}
    assert receipts[-1]["logprobs_from"] == len(receipts[-1]["token_ids"]) - 2
    lengths = [(len(one["logprobs_digest"]), max(1, len(one["token_ids"]))) for one in receipts[:-1]]
    assert all(length == 4 * tokens + 12 for length, tokens in lengths)


def forge_token(receipt: dict[str, Any], at: int) -> None:
    receipt["token_ids"][at] = (receipt["token_ids"][at] + 1) % 1000


def forge_logprob(receipt: dict[str, Any], at: int) -> None:
    digits = list(receipt["logprobs_digest"])
    digits[4 * at] = "0" if digits[4 * at] != "0" else "1"
    receipt["logprobs_digest"] = "".join(digits)


def forge_seed(receipt: dict[str, Any], at: int) -> None:
    receipt["request"]["seed"] += 1 + at


def forge_seed_and_digest(receipt: dict[str, Any], at: int) -> None:
    """As one who knows the format does. Even where the seed changes no token, the logprobs' digest contains it."""
    forge_seed(receipt, at)
    receipt["request_digest"] = request_digest(receipt["request"])


def forge_end(receipt: dict[str, Any], at: int) -> None:
    del receipt["token_ids"][at:]
    receipt["logprobs_digest"] = receipt["logprobs_digest"][: 4 * at]


FORGERIES = (forge_token, forge_logprob, forge_seed, forge_seed_and_digest, forge_end)


def test_everything_that_was_changed_is_found(llm: LLM, written: tuple[Path, int], tmp_path: Path) -> None:
    check_forgeries(llm, written[0], tmp_path / "forged.jsonl")


@pytest.mark.long
def test_a_thousand_receipts(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    count = write(path, parameters(660))
    assert count > 1000
    report = verify(llm, path)
    assert (report.is_good, report.num_same) == (True, count)
    check_forgeries(llm, path, tmp_path / "forged.jsonl")


def check_forgeries(llm: LLM, path: Path, forged_path: Path) -> None:
    """Of most answers something is changed, at a random place: that is found, there, and nothing else is."""
    receipts, drawn = [one for one in lines(path) if one["token_ids"]], random.Random(1)
    forged: dict[int, tuple[Callable[[dict[str, Any], int], None], int]] = {}
    for line, receipt in enumerate(receipts[:-1], 1):
        if line % 6 < len(FORGERIES):
            forged[line] = FORGERIES[line % 6], drawn.randrange(len(receipt["token_ids"]))
            forged[line][0](receipt, forged[line][1])
    forged_path.write_text("".join(json.dumps(one, sort_keys=True) + "\n" for one in receipts))
    report = verify(llm, forged_path)
    assert not report.unverified
    assert {one.line for one in report.different} == set(forged)
    assert {forge for forge, _ in forged.values()} == set(FORGERIES)
    for one in report.different:
        forge, at = forged[one.line]
        assert f"line {one.line}, request {receipts[one.line - 1]['id']}: {one.field} differs" in str(one)
        if forge in (forge_token, forge_logprob):
            assert one.position == at
            assert "both fingerprints are the same" in one.reason
        if forge is forge_seed:
            assert "it was changed" in one.reason
        if forge is forge_seed_and_digest:
            assert one.position is not None


def test_a_sample_is_the_same_for_a_seed(llm: LLM, written: tuple[Path, int], tmp_path: Path) -> None:
    receipts = lines(written[0])
    for receipt in receipts:
        receipt["request"]["seed"] += 1
    path = tmp_path / "forged.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in receipts))
    first, again, other = (verify(llm, path, 9, seed) for seed in (3, 3, 4))
    assert first.to_json() == again.to_json()
    assert len(first.different) == len(other.different) == 9
    assert {one.line for one in first.different} != {one.line for one in other.different}


def without(receipt: dict[str, Any], *path: str) -> dict[str, Any]:
    copy = json.loads(json.dumps(receipt))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return copy


def changed(receipt: dict[str, Any], value: Any, *path: str) -> dict[str, Any]:
    copy = json.loads(json.dumps(receipt))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return copy


def test_bad_lines_are_reported_by_line_and_field_and_others_are_verified(
    llm: LLM, written: tuple[Path, int], tmp_path: Path
) -> None:
    good = lines(written[0])[0]
    bad: list[tuple[str | dict[str, Any], str | None, str]] = [
        ("a text\n", None, "it is no receipt: Invalid JSON"),
        ("[1, 2]\n", None, "it is no receipt: Input should be an object"),
        ("\n", None, "it is no receipt"),
        (without(good, "token_ids"), "token_ids", "the field token_ids is missing"),
        (without(good, "request", "seed"), "request.seed", "the field request.seed is missing"),
        (changed(good, "x", "request", "seed"), "request.seed", 'request.seed is "x"; Input should be a valid integer'),
        (changed(good, 2, "receipt"), "receipt", "receipt is 2; Input should be 1"),
        (changed(good, -1, "request", "sampling", "temperature"), "request", "temperature is -1"),
        (changed(good, 1, "request", "sampling", "top_z"), "request.sampling.top_z", "there is no field"),
        (changed(good, [5, 10**6], "request", "prompt_token_ids"), "request.sampling.prompt", "prompt[1] is 1000000"),
        (changed(good, ["regex", "("], "request", "grammar"), "request", "regex cannot be followed"),
        (changed(good, ["sql", "0" * 16], "request", "lora"), "request.lora", "give --lora sql=PATH"),
        (changed(good, "0" * 16, "fingerprint", "weights"), "fingerprint.weights", "it is of another model"),
        (json.dumps(good)[:300], None, "it is cut off after 300 bytes"),
    ]
    path = tmp_path / "bad.jsonl"
    with path.open("w") as file:
        for line, _, _ in bad:
            file.write(json.dumps(good) + "\n")
            file.write(line if isinstance(line, str) else json.dumps(line) + "\n")
    report = verify(llm, path)
    assert report.num_same == len(bad)
    assert not report.different
    assert len(report.unverified) == len(bad)
    for number, (one, (_, field, message)) in enumerate(zip(report.unverified, bad, strict=True), 1):
        assert (one.line, one.field) == (2 * number, field)
        assert message in one.error
        assert "\n" not in str(one)


def test_reasons_name_the_parts_that_differ(written: tuple[Path, int], tmp_path: Path) -> None:
    receipts = lines(written[0])[:12]
    for receipt in receipts:
        receipt["fingerprint"] |= {"torch": "1.0", "template": "0" * 16, "instruction set": "none"}
    path = tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in receipts))
    with LLM(**OTHER, dtype="float32") as llm:
        report = verify(llm, path)
        isa = llm.backend.instruction_set
    assert len(report.different) + report.num_same == len(receipts)
    assert len(report.different) > 3
    for one in report.different:
        assert "weights: dtype (bfloat16, here float32)" in one.reason
        assert "template: template;" in one.reason
        assert "bits of linear" in one.reason
        assert f"instruction set (none, here {isa})" in one.reason
        assert "version: torch (1.0, here " in one.reason


def test_a_server_writes_them_for_tools_streams_and_adapters(tmp_path: Path) -> None:
    """Those of an adapter are verified with the same weights under another name."""
    path = tmp_path / "served.jsonl"
    save_adapter(tmp_path / "adapter", embedded_linears())
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    user = {"messages": [{"role": "user", "content": "a stack"}], "max_tokens": 24}
    small = {"receipts": str(path), "num_blocks": 64, "max_model_len": 256}
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools|tojson }}{% endif %}\ndef "
    )
    served = {"chat_template": template, "tool_call_parser": "hermes", "lora": (f"sql={tmp_path / 'adapter'}",)}
    with serving(small, **served) as server:
        assert server.post("/v1/chat/completions", **user, tools=[tool], tool_choice="required").status == 200
        assert server.post("/v1/chat/completions", **user, response_format={"type": "json_object"}).status == 200
        answer = server.post("/v1/completions", prompt="import ", stream=True, n=2, max_tokens=4, logprobs=1)
        assert len(answer.events()) > 2
        assert server.post("/v1/completions", prompt="import ", model="sql", max_tokens=6).status == 200
        assert server.post("/v1/embeddings", input="import").status == 200
    receipts = lines(path)
    assert [one["request"].get("grammar", [""])[0] for one in receipts] == ["tools", "json_object", "", "", ""]
    assert receipts[-1]["request"]["lora"][0] == "sql"
    with LLM(**OTHER | {"max_model_len": 256}, lora={"other": tmp_path / "adapter"}) as adapted:
        report = verify(adapted, path)
    assert report.is_good, report.different
    assert report.num_same == 5


def test_receipts_name_weights_that_were_replaced(llm: LLM, tmp_path: Path) -> None:
    path, new = tmp_path / "receipts.jsonl", {"model.norm.weight": torch.linspace(0.5, 2.0, llm.hidden_size)}
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    with LLM(**OTHER, receipts=path) as writer:
        writer.generate("import os", params)
        stream = writer.stream("class A:", params)
        next(output for output in stream if len(output.outputs[0].token_ids) == 4)
        writer.update_weights(new)
        list(stream)
        writer.generate("import os", params)
    report = verify(llm, path)
    assert report.num_same == 1
    assert [(one.line, one.field) for one in report.unverified] == [(2, "weights_versions"), (3, "fingerprint.weights")]
    with LLM(**OTHER) as other:
        other.update_weights(new)
        report = verify(other, path)
    assert report.num_same == 1
    assert [(one.line, one.field) for one in report.unverified] == [(1, "fingerprint.weights"), (2, "weights_versions")]


def test_a_full_disk_stops_no_answer(llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line that was cut off, by this process or by one that was killed, does not spoil the next one."""
    path = tmp_path / "receipts.jsonl"
    path.write_text('{"receipt": 1')
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LLM(**OTHER, receipts=path) as writer:
        expected = writer.generate("import os", greedy)[0].outputs[0].token_ids
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
        try:
            for _ in range(3):
                assert writer.generate("import os", greedy)[0].outputs[0].token_ids == expected
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.generate("import os", greedy)
    messages = [record.getMessage() for record in caplog.records if "receipts" in record.getMessage()]
    assert len(messages) == 2
    assert "answers are served without receipts" in messages[0]
    assert "again; 3 answers have none" in messages[1]
    assert caplog.records[-1].levelno == logging.WARNING
    report = verify(llm, path)
    assert report.num_same == 2
    assert [one.line for one in report.unverified] == [1, 3]


def test_the_command_reports_and_exits_with_1(written: tuple[Path, int], tmp_path: Path) -> None:
    receipts = lines(written[0])[:3]
    forge_token(receipts[1], 0)
    name = receipts[1]["id"]
    path = tmp_path / "forged.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in receipts))
    small = ["--num-blocks", "64", "--max-model-len", "96"]
    found = CliRunner().invoke(app, ["verify", str(path), *small])
    assert found.exit_code == 1
    assert f"line 2, request {name}: token_ids differs, from token 0 on: " in found.stdout
    assert found.stdout.splitlines()[-1] == "3 lines: 2 the same, 1 different, 0 not verified"
    found = CliRunner().invoke(app, ["verify", str(path), *small, "--sample", "1", "--seed", "1", "--json"])
    report = Report(**json.loads(found.stdout))
    assert report.num_lines == 3
    assert report.num_same + len(report.different) == 1
    found = CliRunner().invoke(app, ["verify", str(tmp_path / "none")])
    assert (found.exit_code, "No such file" in found.stderr) == (1, True)


def test_a_file_that_cannot_be_opened_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"receipts is '.*none/r.jsonl', which cannot be opened: No such file"):
        LLM(attention_backend="none", receipts=tmp_path / "none" / "r.jsonl")
    with pytest.raises(ConfigError, match=r"receipts is 3; it must be the path of a file"):
        LLM(receipts=3)


def test_a_digest_of_logprobs_shows_where_they_differ() -> None:
    request, logprobs = "0123456789abcdef", [-0.5, -1.25, -3.0, float("-inf")]
    digest = logprobs_digest(request, logprobs)
    assert len(digest) == 4 * 3 + 16
    for i in range(4):
        other = logprobs_digest(request, [*logprobs[:i], -7.0, *logprobs[i + 1 :]])
        assert other[: 4 * i] == digest[: 4 * i]
        assert other[4 * i : 4 * i + 4] != digest[4 * i : 4 * i + 4]
    assert logprobs_digest(request, []) == request
