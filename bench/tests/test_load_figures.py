"""quire bench serve: how a stream is read, what is computed from it, and what is asked for."""

import math
from array import array
from pathlib import Path

import numpy as np
import pytest

from bench.tests.fake_openai import DONE, chunk, event, usage, whole
from quire.errors import ConfigError
from quire_bench.server import report as load_report
from quire_bench.server.client import Record, Run
from quire_bench.server.prompts import (
    Prompt,
    arrival_times,
    read_prompts,
    repeated,
)
from quire_bench.server.report import Report, token_gaps
from quire_bench.server.stream import MAX_LINE, Answer, StreamError

# ------------------------------------------------------------------------------------------------------- one answer


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_the_stream_may_be_cut_anywhere(size: int, newline: bytes) -> None:
    stream = b": a comment\n\nevent: message\nid: 7\n" + whole(5, prompt=11) + b": ping\n\n"
    stream = stream.replace(b"\n", newline)
    answer = Answer()
    for i in range(0, len(stream), size):
        answer.feed(stream[i : i + size], float(i))
    answer.close(1e9)
    assert (len(answer.times), answer.num_tokens, answer.prompt_tokens) == (5, 5, 11)
    assert list(answer.times) == sorted(answer.times)
    assert answer.chunk_tokens() == [1] * 5
    ends = [i + 1 for i in range(len(stream)) if stream[i : i + 1] == b"\n"]  # a chunk came with the end of its line
    data = [end for end in ends if b'"text"' in stream[:end].split(newline)[-2]]
    assert list(answer.times) == [(end - 1) // size * size for end in data]


def test_generated_text_is_not_taken_for_the_protocol() -> None:
    answer = Answer()
    for text in ('"finish_reason":"stop"', '"choices":[] "role":"x"', '{"error":{"message":"no"}}', 'data: [DONE]\n\n',
                 '"usage":{"completion_tokens":99,"prompt_tokens":98}', '"text":""'):  # fmt: skip
        answer.feed(chunk(text), 1.0)
    assert not answer.finished
    assert (answer.completion_tokens, answer.prompt_tokens, len(answer.times)) == (None, None, 6)


def delta(content: str | None, reason: str | None = None, **fields: object) -> bytes:
    said = fields if content is None else {**fields, "content": content}
    return event({"choices": [{"index": 0, "delta": said, "finish_reason": reason}], "usage": None})


def test_chat_chunks_without_tokens_are_not_counted() -> None:
    answer = Answer()
    stream = [delta("", role="assistant"), delta("a"), delta(""), delta("b"), delta(None, "stop"), b"data:[DONE]\n\n"]
    for i, part in enumerate(stream):
        answer.feed(part, float(i))
    answer.close(9.0)
    assert list(answer.times) == [1.0, 2.0, 3.0]  # the empty one is a token whose text is held back
    assert answer.finished


@pytest.mark.parametrize(
    "line",
    [
        b'data: {"choices": [ { "delta": { "content": "a" }, "finish_reason": null } ]}\n',
        b'data: {"choices":[{"delta":{"role":"assistant","content":"a"},"finish_reason":null}]}\n',
        b'data: {"choices":[{"delta":{"reasoning_content":"hm"},"finish_reason":null}]}\n',
        b'data:{"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]},"finish_reason":null}]}\n',
    ],
)
def test_other_servers_chunks_are_counted(line: bytes) -> None:
    answer = Answer()
    answer.feed(line, 1.0)
    assert len(answer.times) == 1


def test_several_tokens_a_chunk_as_told_with_each() -> None:
    answer = Answer()
    for i, total in enumerate([2, 3, 3, 7]):
        answer.feed(chunk("ab", usage=usage(9, total)), float(i))
    answer.feed(event({"choices": [], "usage": usage(9, 7)}) + DONE, 4.0)
    answer.close(4.0)
    assert answer.counts_are_told
    assert answer.chunk_tokens() == [2, 1, 0, 4]
    assert (answer.num_tokens, answer.prompt_tokens) == (7, 9)


@pytest.mark.parametrize(
    ("stream", "kind", "message"),
    [
        (chunk("a") + event({"error": {"message": "out of  blocks", "code": 500}}), "error event", "out of blocks"),
        (event({"error": "plain"}), "error event", "plain"),
        (chunk("a"), "stream ended early", "before the answer was complete"),
        (b"", "stream ended early", "before the answer was complete"),
        (DONE, "no tokens", "no token came"),
        (b"data: " + b"x" * (MAX_LINE + 1), "malformed stream", "longer than 1,048,576 bytes"),
    ],
)
def test_an_answer_that_is_none(stream: bytes, kind: str, message: str) -> None:
    def read() -> None:
        answer = Answer()
        answer.feed(stream, 1.0)
        answer.close(2.0)

    with pytest.raises(StreamError, match=message) as raised:
        read()
    assert raised.value.kind == kind


# ------------------------------------------------------------------------------------------------------- arithmetic


def test_gaps() -> None:
    assert token_gaps([1.0, 3.0, 4.0], [1, 1, 1]) == [2.0, 1.0]
    assert token_gaps([1.0, 3.0, 4.0], [5, 4, 1]) == [0.5] * 4 + [1.0]  # the first chunk has no gap before it
    assert token_gaps([1.0, 3.0, 4.0], [1, 0, 3]) == [1.0] * 3  # nothing came at 3.0
    assert token_gaps([1.0], [7]) == []


def record(due: float, sent: float, times: list[float], ended: float, queued: float = 0.0) -> Record:
    made = Record(due, sent, queued, ended)
    made.answer.times, made.answer.told = array("d", times), array("q", [0] * len(times))
    made.answer.prompt_tokens, made.answer.completion_tokens = 10, len(times)
    return made


def some_run() -> Run:
    """Two answers, a rejection, an error and a request that somebody interrupted."""
    rejected, broken, unfinished = Record(102.0, 102.0), Record(103.0, 103.0), Record(104.0, 104.0)
    rejected.error, rejected.ended = ("HTTP 429", "queue is full"), 102.1
    broken.error, broken.ended = ("HTTP 500", "oops"), 103.1
    broken.answer.times.append(103.05)
    good = record(100.0, 100.0, [100.1, 100.2, 100.4], 100.5)
    slow = record(101.0, 101.5, [101.8, 104.0], 104.0, queued=0.25)
    return Run([good, slow, rejected, broken, unfinished], 100.0, 5.0, 1.0)


def test_the_report_of_given_moments() -> None:
    shown = Report(some_run(), limits={"ttft": 0.2}, percents=(50, 100)).as_dict()
    counts = (
        "requests",
        "completed",
        "failed",
        "rejected",
        "unfinished",
        "input_tokens",
        "output_tokens",
        "lost_tokens",
    )
    assert [shown[name] for name in counts] == [5, 2, 2, 1, 1, 20, 5, 1]
    assert shown["errors"] == [
        {"kind": "HTTP 429", "message": "queue is full", "count": 1},
        {"kind": "HTTP 500", "message": "oops", "count": 1},
    ]
    assert shown["ttft"] == pytest.approx({"mean": 0.2, "p50": 0.2, "p100": 0.3})
    assert shown["itl"] == pytest.approx({"mean": 2.5 / 3, "p50": 0.2, "p100": 2.2})
    assert shown["tpot"] == pytest.approx({"mean": 1.175, "p50": 1.175, "p100": 2.2})
    assert shown["e2el"] == pytest.approx({"mean": 1.5, "p50": 1.5, "p100": 2.5})
    assert shown["late"] == pytest.approx({"mean": 0.05, "p50": 0.0, "p100": 0.25})
    assert shown["queued"]["p100"] == 0.25
    assert (shown["request_throughput"], shown["output_throughput"], shown["total_token_throughput"]) == (0.4, 1.0, 5.0)
    assert shown["goodput"] == {"limits": {"ttft": 0.2}, "share": 0.2, "rate": 0.2}
    assert shown["client_cpu_share"] == 0.2


@pytest.mark.parametrize(
    ("limits", "good"),
    [("ttft:400", 2), ("ttft:400,itl:210", 1), ("tpot:2300 e2el:2600", 2), ("e2el:400", 0), ("itl:199", 0), ("", 2)],
)
def test_goodput(limits: str, good: int) -> None:
    report = Report(some_run(), limits=load_report.parse_limits([limits]))
    assert sum(load_report.met(found, report.limits) for found in report.found) == good


# ------------------------------------------------------------------------------------------------ what is asked for


def test_arrivals() -> None:
    times = arrival_times(20_000, 50.0, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.03)  # of an exponential distribution: its mean
    assert np.mean(gaps > 1 / 50) == pytest.approx(math.exp(-1), rel=0.03)
    assert times == arrival_times(20_000, 50.0, seed=1) != arrival_times(20_000, 50.0, seed=2)
    assert arrival_times(3, math.inf, seed=1) == [0.0, 0.0, 0.0]
    for rate in (0.0, -1.0, math.nan, -math.inf):
        with pytest.raises(ConfigError, match="request_rate is"):
            arrival_times(3, rate, seed=1)


def test_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt":"a\u2028b","max_tokens":3}\n\n{"prompt":[1,2],"max_tokens":4,"more":0}\n', encoding="utf-8"
    )
    prompts = read_prompts(path)
    assert prompts == [Prompt("a\u2028b", 3), Prompt([1, 2], 4)]
    assert repeated(prompts, 5) == [*prompts, *prompts, prompts[0]]
    assert repeated(prompts, None) == prompts
    for line, shown in (
        ("{", "line 1 is no JSON"),
        ("[]", r"line 1 is '\[\]'; it must be"),
        ('{"prompt":"a"}', "it must be"),
        ('{"prompt":"a","max_tokens":0}', "line 1: max_tokens is 0"),
        ('{"prompt":"a","max_tokens":true}', "line 1: max_tokens is True"),
        ('{"prompt":{},"max_tokens":1}', "prompt is {}; it must be a text or a list of token ids"),
        ('{"prompt":[1,"x"],"max_tokens":1}', "prompt token 1 is 'x'"),
        ("", "is empty"),
    ):
        path.write_text(line)
        with pytest.raises(ConfigError, match=shown):
            read_prompts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none")
