"""What `make demo-fleet` runs: a replica is killed in the middle of an answer, and another one goes on with it."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.request import Request, urlopen

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

BODY = {"prompt": "import json\nimport os\n\n\ndef ", "max_tokens": 220, "temperature": 0.8, "top_p": 0.95, "seed": 0}
KILLED_AFTER = 300  # characters
ADDRESS = re.compile(r" at (http://[\d.:]+)")


class Server:
    """A `quire serve` or `quire fleet` in a process of its own, at a free port."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "quire", *arguments, "--port", "0"]
        alone = os.environ | {"OMP_NUM_THREADS": "1"}  # several share this machine
        self.process = subprocess.Popen(command, env=alone, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []

    def url(self) -> str:
        """Where it listens, as soon as it does."""
        for line in self.process.stderr or ():
            self.said.append(line)
            if (found := ADDRESS.search(line)) is not None:
                return found[1]
        raise SystemExit(f"a server has ended: {''.join(self.said)}")

    def stop(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def fleet() -> Iterator[tuple[str, dict[str, Server]]]:
    """Two replicas and a gateway: the gateway's URL, and the replicas by theirs."""
    secret = ("--fleet-secret", secrets.token_hex(16))
    with ExitStack() as stack:  # what was started is stopped, also at an interrupt

        def start(*arguments: str) -> Server:
            server = Server(*arguments, *secret)
            stack.callback(server.stop)
            return server

        started = [start("serve", "--num-blocks", "512") for _ in range(2)]  # side by side
        replicas = {server.url(): server for server in started}
        yield start("fleet", "--replicas", ",".join(replicas)).url(), replicas


def stream(url: str) -> Iterator[str]:
    """The pieces of an answer as they come."""
    body = json.dumps(BODY | {"stream": True}).encode()
    with urlopen(Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


def computing(replicas: dict[str, Server]) -> str:
    """The URL of the replica that runs a request."""
    for url in replicas:
        with urlopen(f"{url}/metrics") as answer:
            [running] = re.findall(r"^quire:num_requests_running.* (\S+)$", answer.read().decode(), re.MULTILINE)
        if float(running) > 0:
            return url
    raise SystemExit("no replica computes the answer; it had ended before it could be disturbed")


def main() -> None:
    """Ask for the same answer twice, and kill a replica in the second one."""
    console = Console(highlight=False)
    with fleet() as (url, replicas):
        undisturbed = "".join(stream(url))
        pieces, killed, at = [], "", 0
        stall, last = 0.0, time.perf_counter()
        console.print(Text(str(BODY["prompt"]), style="bold"), end="")
        for piece in stream(url):
            now = time.perf_counter()
            if killed:
                stall = max(stall, now - last)
            last = now
            pieces.append(piece)
            console.print(Text(piece), end="")
            if not killed and sum(map(len, pieces)) >= KILLED_AFTER:
                killed, at = computing(replicas), sum(map(len, pieces))
                replicas[killed].process.kill()
                console.print(Text("[kill -9]", style="reverse red"), end="")
                last = time.perf_counter()
    answer = "".join(pieces)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("killed", f"{killed}, when {at} of {len(answer)} characters had come")
    table.add_row("longest stall", f"{1000 * stall:.0f} ms after that")
    table.add_row("the answer", "identical to the undisturbed one" if answer == undisturbed else "ANOTHER ONE")
    console.print("\n", Rule(style="dim"), table, sep="")
    if answer != undisturbed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
