"""quire top: views of what servers say, and of a server that runs."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import QuireError
from quire.terminal.client import Client
from quire.terminal.metrics import Change, Scrape
from quire.terminal.top import Top
from quire.terminal.top_view import fleet_view, view
from tests.loopback import Quiet, answering
from tests.marks import of_long_runs
from tests.server.serving import serving
from tests.terminal.fake_server import fake_server

METRICS = """# TYPE quire:num_requests_running gauge
quire:num_requests_running{{model_name="m",engine="0"}} 2
quire:num_requests_waiting{{model_name="m",engine="0"}} {waiting}
quire:kv_cache_usage_perc{{model_name="m",engine="0"}} 0.75
quire:kv_blocks{{state="used",model_name="m",engine="0"}} 6
quire:kv_blocks{{state="cached",model_name="m",engine="0"}} 1
quire:kv_blocks{{state="free",model_name="m",engine="0"}} 1
quire:cache_config_info{{model_name="m",block_size="16",num_gpu_blocks="8"}} 1
quire:model_config_info{{model_name="m",dtype="bfloat16",quantization="int4, groups of 128"}} 1
# TYPE quire:prompt_tokens counter
quire:prompt_tokens_total{{model_name="m",engine="0"}} {prompt}
quire:generation_tokens_total{{model_name="m",engine="0"}} {new}
quire:prefix_cache_queries_total{{model_name="m",engine="0"}} {asked}
quire:prefix_cache_hits_total{{model_name="m",engine="0"}} {found}
# TYPE quire:engine_step_seconds histogram
quire:engine_step_seconds_bucket{{model_name="m",le="0.1"}} {fast}
quire:engine_step_seconds_bucket{{model_name="m",le="0.5"}} {slow}
quire:engine_step_seconds_bucket{{model_name="m",le="+Inf"}} {slow}
quire:engine_step_seconds_sum{{model_name="m"}} {seconds}
quire:engine_step_seconds_count{{model_name="m"}} {slow}
"""


def scrape(moment: float, prefix: str = "quire", **numbers: float) -> Scrape:
    zero = dict.fromkeys(("waiting", "prompt", "new", "asked", "found", "fast", "slow", "seconds"), 0)
    found = Scrape.of(METRICS.replace("quire:", f"{prefix}:").format(**zero | numbers))
    found.moment = moment
    return found


def request(
    key: int, state: str, prompt: int = 20, times: tuple[float | None, ...] = (0, None, None), **more: Any
) -> Any:
    return {"id": f"r{key}", "state": state, "prompt": prompt, "generated": 0, "stored": 0, "times": times} | more


def snapshot(*requests: Any, most: int = 3) -> dict[str, Any]:
    config = {"max_num_seqs": most, "block_size": 16, "num_blocks": 8}
    return {"time": 10.0, "about": {"model": "m", "backend": "cpu"}, "config": config, "requests": requests}


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = scrape(0.0, prompt=100, new=50, asked=100, found=50, fast=1, slow=1, seconds=0.05)
    now = scrape(2.0, prompt=300, new=60, asked=200, found=125, fast=2, slow=4, seconds=0.75, waiting=1)
    lines = view("http://x", Change(before, now), snapshot())
    assert lines == [
        "m at http://x, cpu, bfloat16, int4, groups of 128",
        "throughput  100.0 prompt tokens a second, 5.0 new",
        "queue       2 running of 3 at most, 1 waiting; 0 preemptions since the start",
        "cache       75% used of 8 blocks of 16 tokens; prefix hits 75% now, 62% since the start",
        "steps       1.5 a second of 233 ms on average, the slowest 100 ms to 500 ms",
        "latency     no token came",
        "",
        "No request is open.",
    ]
    assert view("http://x", Change(now, now), None)[4] == "steps       none"
    for moment, one in enumerate((before, now), 1):
        one.values |= {"spec_decode_num_draft_tokens_total": 40.0 * moment**2}
        one.values |= {"spec_decode_num_accepted_tokens_total": 30.0 * moment}
    drafts = "drafts      25% accepted now, 38% of 160 draft tokens since the start"
    assert view("http://x", Change(before, now), None)[5] == drafts
    assert vars(scrape(0.0, "vllm", prompt=100)) == vars(scrape(0.0, prompt=100))
    again = scrape(4.0, prompt=30)  # the server was started again
    assert "15.0 prompt tokens a second" in view("http://x", Change(now, again), None)[1]


def test_who_waits_for_what() -> None:
    requests = [
        request(1, "running", times=(1, 2, 3), generated=5),
        request(2, "running", prompt=1000, stored=512, times=(2, 3, None)),
        request(3, "waiting", prompt=20, times=(9, None, None)),
        request(4, "waiting", prompt=100, times=(9.5, 9.6, None), generated=1),
    ]
    now = scrape(0.0)
    rows = view("http://x", Change(now, now), snapshot(*requests))[7:]
    assert [row.split(maxsplit=2)[:2] for row in rows[1:]] == [
        ["r3", "waiting"], ["r4", "waiting"], ["r1", "decoding"], ["r2", "prompt"]]  # fmt: skip
    assert rows[1].endswith("  a step")  # two blocks are free
    assert rows[2].endswith("  preempted; 7 blocks (2 free)")
    assert "512 of 1,000" in rows[4]
    rows = view("http://x", Change(now, now), snapshot(*requests, most=2))[7:]
    assert rows[1].endswith("  a slot (2 taken)")


def test_a_gateway_shows_its_replicas() -> None:
    state = {"num_running": 2, "num_waiting": 1, "num_blocks": 64, "free_blocks": 60}
    replicas = [{"url": "http://a", "status": "up", "state": state, "failure": None},
                {"url": "http://b", "status": "lost", "state": None, "failure": "no answer"}]  # fmt: skip
    lines = fleet_view("http://x", {"replicas": replicas, "num_requests": 3, "about": {"model": "m"}})
    assert lines[0] == "m at http://x, a fleet's gateway with 2 replicas"
    assert lines[4].split() == ["http://a", "up", "2", "1", "4", "of", "64"]
    assert lines[5].split() == ["http://b", "lost", "-", "-", "-", "no", "answer"]


@pytest.mark.slow
@pytest.mark.parametrize("names", ["quire", of_long_runs("vllm")])
def test_a_running_server(names: str) -> None:
    with serving({"max_num_seqs": 2}, api_key=("a-key",), vllm_metrics=names == "vllm") as server:
        stop = threading.Event()

        def ask() -> None:
            body = {"prompt": "import os\n", "max_tokens": 120, "ignore_eos": True}
            while not stop.is_set():
                server.ask("POST", "/v1/completions", body, {"Authorization": "Bearer a-key"})

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        try:
            looks, seen = Top(Client(server.url, "a-key")), ""
            # The counts and the requests are two answers: a request may end between them.
            words = ("2 running of 2 at most, 1 waiting", "a slot (2 taken)", "decoding", "prefix hits")
            deadline = time.monotonic() + 60
            while (" 0.0 new" in seen or not all(word in seen for word in words)) and time.monotonic() < deadline:
                seen = "\n".join(looks.look())
            assert seen.startswith("quire-embedded at http://127.0.0.1:")
            assert " 0.0 new" not in seen
            assert [word for word in words if word not in seen] == []
        finally:
            stop.set()
            for client in clients:
                client.join()
        arguments = ["top", "--url", server.url, "--once", "--interval", "0.1"]
        shown = CliRunner().invoke(app, [*arguments, "--api-key", "a-key"])
        assert shown.exit_code == 0, shown.output
        assert [line.split()[0] for line in shown.stdout.splitlines()[1:7]] == [
            "throughput", "queue", "cache", "steps", "drafts", "latency"]  # fmt: skip
        assert CliRunner().invoke(app, arguments, env={"QUIRE_API_KEY": "a-key another-key"}).exit_code == 0
        refused = CliRunner().invoke(app, arguments)
        assert refused.exit_code == 1
        assert "wants a key" in refused.stderr


def test_what_is_no_server_of_models_is_a_sentence() -> None:
    shown = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9"])
    assert shown.exit_code == 1
    assert shown.stderr == (
        "error: no server answers at http://127.0.0.1:9 (Connection refused); quire serve starts one\n"
    )
    for text, words in (("<html>", "no Prometheus text"), (json.dumps({"a": 1}), "no Prometheus text")):
        with fake_server([], models=text.encode()) as url, pytest.raises(QuireError, match=words):
            Top(Client(url)).look()


def test_ps_lists_models_and_adapters_with_open_requests() -> None:
    models = {"data": [{"id": "m", "created": time.time() - 7300, "parent": None}, {"id": "a", "parent": "m"}]}
    metrics = METRICS.format(
        **dict.fromkeys(("prompt", "new", "asked", "found", "fast", "slow", "seconds"), 0), waiting=3
    )
    expected = [
        "NAME  LOADED       REQUESTS",
        "m     2 hours ago  2 running, 3 waiting",
        "a     unknown      counted for m",
    ]
    fleet = "".join(
        f'quire:fleet_replica_requests_{state}{{replica="{one}"}} {count}\n'
        for state, counts in (("running", (2, 0)), ("waiting", (1, 2)))
        for one, count in enumerate(counts)
    )

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write((json.dumps(models) if self.path.endswith("/v1/models") else texts[self.path]).encode())

    texts = {"/metrics": metrics, "/fleet/metrics": fleet}
    with answering(Handler) as address:
        for url in (address, f"{address}/fleet"):
            assert CliRunner().invoke(app, ["ps", "--url", url]).stdout.splitlines() == expected
    with serving() as server:
        port = {"QUIRE_PORT": server.url.rpartition(":")[2]}
        shown = CliRunner().invoke(app, ["ps"], env=port).stdout.splitlines()
        assert shown[1].split("  ") == ["quire-embedded", "just now", "0 running, 0 waiting"]
