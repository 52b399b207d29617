"""quire bench serve: what the client sends and notes, and the command line, against a server told what to do."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.tests.fake_openai import Fake, Reply, Script, answer_whole, chunk, event, whole
from quire.cli import app
from quire.errors import ConfigError, QuireError
from quire_bench.server.client import Run, Server, send
from quire_bench.server.process import ready
from quire_bench.server.prompts import Prompt, arrival_times, random_prompts, request_body
from quire_bench.server.report import Report

pytestmark = pytest.mark.slow


def bodies(count: int, max_tokens: int = 4) -> list[bytes]:
    return [request_body(Prompt([5, 6, 7], max_tokens), "completions", "fake", {})] * count


def loaded(script: Script, count: int = 1, timeout: float = 20.0, **options: Any) -> Run:
    with Fake(script) as fake:
        return send(Server(fake.url, timeout=timeout), bodies(count), [0.0] * count, **options)


# ------------------------------------------------------------------------------------------------------- the client


def test_moments_and_counts_of_a_run() -> None:
    async def slowly(number: int, reply: Reply) -> None:
        await reply.start()
        await asyncio.sleep(0.05)
        for start in range(0, len(data := whole(4, prompt=number)), 5):  # each event in several packets
            await reply.write(data[start : start + 5])
            if start % 50 == 0:
                await asyncio.sleep(0.001)
        await reply.end()

    done = []
    run = loaded(slowly, count=3, advance=lambda: done.append(1))
    assert len(done) == 3
    assert [made.completed for made in run.records] == [True] * 3
    assert sorted(made.answer.prompt_tokens or 0 for made in run.records) == [0, 1, 2]
    shown = Report(run).as_dict()
    assert (shown["output_tokens"], shown["chunks"], shown["spread"], shown["lost_tokens"]) == (12, 12, "chunks", 0)
    assert shown["ttft"]["p50"] >= 0.05  # the server waited that long
    assert shown["e2el"]["p99"] >= shown["ttft"]["p99"] + shown["tpot"]["p50"] * 3 >= 0.05
    assert run.seconds >= shown["e2el"]["p99"]
    assert shown["client_cpu_seconds"] > 0


def test_errors_are_counted_by_kind() -> None:
    async def script(number: int, reply: Reply) -> None:
        if number < 3:
            await reply.all(b'{"error":{"message":"too many"}}', 429, "application/json")
        elif number == 3:
            await reply.all(b'{"error":{"message":"bad"}}', 400, "application/json")
        elif number == 4:
            await reply.all(b"oops" * 100_000, 500, "text/plain")
        elif number == 5:
            await reply.start()
            await reply.write(chunk("a") + chunk("b"))
            await asyncio.sleep(0.02)
            reply.cut()
        elif number == 6:
            reply.cut()
        elif number == 7:
            await reply.all(b"{}", 200, "application/json")
        elif number == 8:
            await reply.all(chunk("a") + event({"error": {"message": "a step failed"}}))
        elif number == 9:
            await reply.all(chunk("a"))
        else:
            await answer_whole(number, reply)

    run = loaded(script, count=12)
    shown = Report(run).as_dict()
    kinds = {error["kind"]: (error["count"], error["message"]) for error in shown["errors"]}
    assert (shown["completed"], shown["failed"], shown["rejected"], shown["unfinished"]) == (2, 10, 3, 0)
    assert kinds["HTTP 429"] == (3, "too many")
    assert kinds["HTTP 400"] == (1, "bad")
    assert kinds["HTTP 500"] == (1, ("oops" * 50))
    assert kinds["no stream"][1] == "the answer is application/json, not text/event-stream"
    assert kinds["error event"] == (1, "a step failed")
    assert kinds["stream ended early"][0] == 1
    assert kinds["ClientPayloadError"][0] == 1
    assert sum(kinds[kind][0] for kind in ("ServerDisconnectedError", "ClientOSError") if kind in kinds) == 1
    assert shown["output_tokens"] == 8
    assert shown["lost_tokens"] == 4


def test_requests_do_not_wait_for_answers() -> None:
    """A server that answers nobody before all are there: a closed loop would wait forever."""
    all_came = asyncio.Event()

    async def together(number: int, reply: Reply) -> None:
        if number == 29:
            all_came.set()
        await all_came.wait()
        await answer_whole(number, reply)

    with Fake(together) as fake:
        run = send(Server(fake.url, timeout=10.0), bodies(30), arrival_times(30, 500.0, seed=0))
    assert sum(made.completed for made in run.records) == 30
    assert fake.most_under_way == 30
    assert all(made.sent is not None and made.sent > made.due - 0.01 for made in run.records)  # a timer may round


def test_a_limit_of_requests_under_way() -> None:
    async def slowly(number: int, reply: Reply) -> None:
        await asyncio.sleep(0.01)
        await answer_whole(number, reply)

    with Fake(slowly) as fake:
        run = send(Server(fake.url), bodies(9), [0.0] * 9, max_concurrency=3)
    assert fake.most_under_way == 3
    assert sum(made.completed for made in run.records) == 9
    assert sum(made.queued >= 0.01 for made in run.records) == 6
    with pytest.raises(ConfigError, match="max_concurrency is 0"):
        send(Server(fake.url), bodies(1), [0.0], max_concurrency=0)


def test_an_interrupt_keeps_what_was_done() -> None:
    async def first_alone(number: int, reply: Reply) -> None:
        await (answer_whole(number, reply) if number == 0 else asyncio.sleep(60))

    def interrupt() -> None:
        raise KeyboardInterrupt

    run = loaded(first_alone, count=5, advance=interrupt)
    shown = Report(run).as_dict()
    assert run.interrupted
    assert (shown["requests"], shown["completed"], shown["unfinished"], shown["failed"]) == (5, 1, 4, 0)
    assert "4 interrupted" in dict(Report(run).table())["requests"]


# ------------------------------------------------------------------------------------------------- the command line


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_json() -> None:
    with Fake(answer_whole) as fake:
        arguments = "--num-prompts 5 --random-input-len 6 --random-output-len 3 --request-rate 1000 --seed 4 --json"
        results = [invoke("serve", "--url", fake.url, *arguments.split(), "--goodput", "ttft:60000 e2el:60000")
                   for _ in range(2)]  # fmt: skip
    shown = json.loads(results[0].stdout)
    assert results[0].exit_code == 0
    assert list(shown) == [
        "url", "model", "endpoint", "seed", "requests", "completed", "failed", "rejected", "unfinished", "errors",
        "seconds", "input_tokens", "output_tokens", "lost_tokens", "chunks", "spread", "request_throughput",
        "output_throughput", "total_token_throughput", "ttft", "tpot", "itl", "e2el", "goodput", "queued", "late",
        "client_cpu_seconds", "client_cpu_share",
    ]  # fmt: skip
    assert list(shown["ttft"]) == ["mean", "p50", "p90", "p99"]
    assert (shown["model"], shown["completed"], shown["output_tokens"], shown["input_tokens"]) == ("fake", 5, 15, 15)
    assert shown["goodput"] == {"limits": {"ttft": 60.0, "e2el": 60.0}, "share": 1.0,
                               "rate": pytest.approx(5 / shown["seconds"])}  # fmt: skip
    asked = sorted(reply.body["prompt"] for reply in fake.replies[:5])
    assert asked == sorted(reply.body["prompt"] for reply in fake.replies[5:])  # the same seed
    assert asked == sorted(prompt.content for prompt in random_prompts(5, 6, 3, seed=4))
    assert all(reply.body["ignore_eos"] is True and reply.body["temperature"] == 0.0 for reply in fake.replies)


def test_a_table_a_plot_and_chat(tmp_path: Path) -> None:
    with Fake(answer_whole) as fake:
        options = ("--workload single --num-prompts 2 --endpoint chat --model m --no-ignore-eos "
                   '--metric-percentiles 95 --percentile-metrics ttft --extra-body {"top_k":3}').split()  # fmt: skip
        result = invoke("serve", "--base-url", fake.url, *options, "--plot", str(tmp_path / "load.svg"))
    assert result.exit_code == 0, result.output
    lines = {line[:18].strip(): line[19:] for line in result.stdout.splitlines()}
    assert lines["requests"].startswith("2 of 2 completed in ")
    assert lines["output tokens"].startswith("256, ")
    assert lines["TTFT"].startswith("mean ")
    assert "p95 " in lines["TTFT"]
    assert "ITL" not in lines
    body = fake.replies[0].body
    assert (body["model"], body["top_k"], "ignore_eos" in body) == ("m", 3, False)
    assert len(body["messages"][0]["content"].split()) == 16
    assert "<svg" in (tmp_path / "load.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--workload nope", "there is no workload 'nope'"),
        ("--workload single --random-input-len 3", "give one of --workload"),
        ("--goodput latency:3", "goodput is 'latency:3'"),
        ("--percentile-metrics ttft,x", "percentile_metrics has 'x'"),
        ("--metric-percentiles 101", "metric_percentiles is 101"),
        ("--request-rate 0", "request_rate is 0"),
        ("--num-prompts 0", "num_prompts is 0"),
        ("--extra-body [1]", "it must be a JSON object"),
        ("--extra-body {", "it must be JSON"),
        ("--plot x.nope", "its ending must be one of"),
        ("", "/v1/models does not answer"),
        ("--model m --num-prompts 1", "no request of 1 was completed"),
    ],
)
def test_what_cannot_be_is_said(arguments: str, told: str) -> None:
    result = invoke("serve", "--url", "http://127.0.0.1:9", *arguments.split())
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert told in result.stderr


# --------------------------------------------------------------------------------------------- the way over HTTP


@contextmanager
def started(program: str, said: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with said.open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-I", "-c", program], stderr=stderr)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


LISTENS = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    answers = [503, 200]
    def do_GET(self):
        self.send_response(self.answers.pop(0))
        self.end_headers()
server = HTTPServer(("127.0.0.1", 0), Handler)
print("loading\\nlistening on http://127.0.0.1:%d, ready" % server.server_port, file=sys.stderr, flush=True)
server.serve_forever()
"""


def test_a_server_is_waited_for(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    with started(LISTENS, said) as process:
        url = ready(process, said)
        assert f"listening on {url}, ready" in said.read_text()
    program = "import sys; sys.exit('warning: slow\\nerror: there is no model')"
    with started(program, said) as process, pytest.raises(QuireError, match="did not get ready: there is no model"):
        ready(process, said)
