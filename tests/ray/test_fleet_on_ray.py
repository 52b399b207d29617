"""Real replicas on Ray Serve, and what a gateway's process learns of them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.fleet.scaling import Load
from quire.ray.app import REPLICA, FleetConfig, build, replicas
from quire.ray.membership import MEMBERS
from tests.ray.head import free_port, serving

pytestmark = [pytest.mark.slow, pytest.mark.long]

OPTIONS = {"num_blocks": 64, "max_num_seqs": 4, "served_model_name": ["fleet-on-ray"]}


class Watcher:
    """In a gateway's place: tells which members its process knows."""

    def __init__(self, handle: Any) -> None:
        self.first_call = handle.url.remote()

    def members(self) -> list[str]:
        return sorted(member.url for member in MEMBERS._members)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def answer(url: str) -> str:
    body = json.dumps({"prompt": "import", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    return str(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"])


def streamed(url: str, body: dict[str, Any]) -> str:
    """The text of an answer that comes in pieces."""
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    texts = []
    with urllib.request.urlopen(request, timeout=120) as events:
        for line in events:
            if line == b"data: [DONE]\n":
                return "".join(texts)
            if line.startswith(b"data: "):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
    raise AssertionError(f"it ends without [DONE] after {len(texts)} pieces")


def servers() -> set[int]:
    """The processes that serve in this process's cluster. Another test may have a cluster of its own meanwhile."""
    return serving(os.getpid())


def test_replicas_come_are_replaced_when_they_die_and_leave_nothing(serve: Any) -> None:
    fleet = FleetConfig(replicas="2", num_cpus=0.5)
    watcher = serve.deployment(name="Watcher", ray_actor_options={"num_cpus": 0.1})(Watcher)
    handle = serve.run(watcher.bind(replicas(fleet, OPTIONS, "s3cret")), name="fleet", route_prefix=None)

    def members() -> list[str]:
        return list(handle.members.remote().result(timeout_s=60))

    wait_for(lambda: len(members()) == 2)
    before, first = servers(), members()
    assert len(before) == 2
    assert answer(first[0]) == answer(first[1])

    handle_of_replicas = serve.get_deployment_handle(REPLICA, "fleet")

    def load() -> dict[str, float]:
        for url in first:
            answer(url)
        return dict(handle_of_replicas.record_autoscaling_stats.remote().result(timeout_s=60))

    wait_for(lambda: load().get("decoded_tokens_a_second", 0.0) > 0.0)
    assert Load(**load()).demand > 0.0

    os.kill(min(before), signal.SIGKILL)
    wait_for(lambda: len(members()) == 2 and members() != first)
    assert len(set(members()) & set(first)) == 1  # the other one was not touched
    assert answer(members()[0]) == answer(members()[1])
    assert len(servers()) == 2

    serve.delete("fleet")
    wait_for(lambda: not servers())


def test_a_replica_of_several_processes_is_replaced_when_one_of_them_dies(serve: Any) -> None:
    watcher = serve.deployment(name="Watcher", ray_actor_options={"num_cpus": 0.1})(Watcher)
    fleet = FleetConfig(replicas="1", num_cpus=1.0)
    deployment = replicas(fleet, OPTIONS | {"tensor_parallel_size": 2}, "s3cret")
    handle = serve.run(watcher.bind(deployment), name="ranks", route_prefix=None)

    def members() -> list[str]:
        return list(handle.members.remote().result(timeout_s=60))

    wait_for(lambda: len(members()) == 1)
    first, [server] = members(), servers()
    text = answer(first[0])
    [rank] = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"quire.parallel.worker" in contents(path) and parent(int(path.parent.name)) == server
    ]
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: len(members()) == 1 and members() != first)
    assert answer(members()[0]) == text
    serve.delete("ranks")
    wait_for(lambda: not servers())


def contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_application_answers_at_its_gateway_also_after_a_death(serve: Any) -> None:
    port = free_port()
    args = {"replicas": "2", "num_cpus": "0.5", "gateway_port": str(port), "num-blocks": "64", "max-num-seqs": "4"}
    serve.run(build(args), name="quire", route_prefix=None)
    gateway = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return bool(answer(gateway))
        except urllib.error.URLError:  # it does not listen yet
            return False

    try:
        wait_for(answers)
        before, text = servers(), answer(gateway)
        assert len(before) == 2
        os.kill(min(before), signal.SIGKILL)
        assert [answer(gateway) for _ in range(10)] == [text] * 10
        wait_for(lambda: len(servers() - {min(before)}) == 2)
        assert answer(gateway) == text
    finally:
        serve.delete("quire")
    wait_for(lambda: not servers())


def test_no_answer_is_cut_when_the_application_is_deployed_again(serve: Any, tmp_path: Path) -> None:
    """Streams move from old replicas to new ones, and the old gateway ends after its last one.

    There is one gateway, so requests that come before the new one listens are refused.
    """
    port, secret = free_port(), tmp_path / "secret"
    secret.write_text("s3cret")
    args = {"replicas": "2", "num_cpus": "0.5", "gateway_port": str(port), "secret_file": str(secret)}
    args |= {"num-blocks": "512", "max-num-seqs": "4"}
    url, body = f"http://127.0.0.1:{port}", {"max_tokens": 800, "ignore_eos": True, "temperature": 0.9}
    bodies = [body | {"prompt": f"def f{i}(x):\n", "seed": i} for i in range(4)]
    is_over, found = threading.Event(), [list[str]() for _ in bodies]

    def client(number: int) -> None:
        while not is_over.is_set():
            try:
                found[number].append(streamed(url, bodies[number]))
            except urllib.error.URLError:  # it takes no connection
                time.sleep(0.05)

    serve.run(build(args), name="quire", route_prefix=None)
    try:
        before = servers()
        with ThreadPoolExecutor(len(bodies)) as pool:
            clients = [pool.submit(client, i) for i in range(len(bodies))]
            try:
                wait_for(lambda: all(found))
                serve.run(build(args), name="quire", route_prefix=None)
                wait_for(lambda: len(servers()) == 2 and not servers() & before)
                counts = [len(texts) for texts in found]
                wait_for(lambda: all(len(texts) > count for texts, count in zip(found, counts, strict=True)))
            finally:
                is_over.set()
            for one in clients:
                one.result()
        assert [len(set(texts)) for texts in found] == [1] * len(bodies)
    finally:
        serve.delete("quire")
    wait_for(lambda: not servers())
