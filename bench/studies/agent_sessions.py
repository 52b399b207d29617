"""Measure sessions of agents that return to a server whose pool is too small for them, also after a restart.

    python bench/studies/agent_sessions.py --tokens 32000 --turns 43 --sessions 8

Each session is a conversation with its own prompt_cache_key. It grows in every turn by the model's answer and by the
result of a tool, and the sessions take turns. The pool has room for a part of them; a disk has room for all. In the
middle the server is restarted. The default model is the embedded one with a longer context, whose answers are
meaningless there, at the same cost. Prints the share of the tokens sent before, in prompts and answers, that were
found, and the share of all prompt tokens with its bound: a turn's new tokens cannot be found. Then the time to the
first token: cold, under another cache_salt, in which nothing is found; warm; and of as many new tokens after the cold
ones, whose blocks are all in memory, which is the bound of the warm time.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from quire.cli.options import fail
from quire.errors import QuireError
from quire.models.hub import EMBEDDED
from quire_bench.cli.options import Model
from quire_bench.fleet.running import OPENER, PATIENCE, Replica
from quire_bench.proc import num_cores

BLOCK = 16  # tokens
MARGIN = 512  # tokens of a context that the last turn may leave or exceed
WORDS = "the file has a test that fails in line because value of key is not what parser returned when tree was".split()


@dataclass
class Usage:
    """The report of one turn."""

    prompt: int
    cached: int
    generated: int
    seconds: float  # to the first token


@dataclass
class Session:
    """One conversation."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Usage] = field(default_factory=list)

    def tool(self, words: int) -> None:
        """Add a message of that many words."""
        rng = random.Random(f"{self.name} {len(self.messages)}")
        text = " ".join(rng.choice(WORDS) for _ in range(words))
        self.messages.append({"role": "user" if self.messages else "system", "content": f"{self.name}: {text}"})


def main(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=256, help="Of each conversation at its end.")] = 32_000,
    turns: Annotated[int, typer.Option(min=4, help="Of each conversation.")] = 43,
    sessions: Annotated[int, typer.Option(min=2, help="That take turns.")] = 8,
    room: Annotated[float, typer.Option(min=1.1, help="Conversations that the pool has room for.")] = 3.0,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    think: Annotated[
        float, typer.Option(min=0.0, help="Seconds from an answer to the next turn of any session.")
    ] = 0.3,
    directory: Annotated[Path | None, typer.Option(help="Where the blocks go.")] = None,
) -> None:
    """Print all."""
    try:
        with TemporaryDirectory(prefix="quire-sessions-", dir=directory) as made:
            blocks = int(room * (tokens + MARGIN)) // BLOCK
            own = ["--kv-disk", f"{made}/kv", "--num-blocks", str(blocks), "--max-num-seqs", "4"]
            chosen = model or longer(Path(made) / "model", tokens + 2 * MARGIN)
            replica = Replica([*own, "--model", chosen], num_cores())
            try:
                measure(replica, tokens, turns, sessions, answer, think)
            finally:
                replica.close()
    except QuireError as error:
        fail(error)


def longer(directory: Path, tokens: int) -> str:
    """Copy the embedded model with a context of that many tokens, and return the directory."""
    shutil.copytree(EMBEDDED, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": tokens}))
    return str(directory)


def measure(replica: Replica, tokens: int, turns: int, count: int, answer: int, think: float) -> None:
    """Play all sessions, and print."""
    replica.start()
    each = (tokens - turns * answer) // (turns + 1)  # of each message, with its template
    listed = [Session(f"agent {i}") for i in range(count)]
    words = each
    probes: list[tuple[Usage, Usage]] = []
    for turn in range(turns):
        if turn == turns // 2:
            replica.restart()
        for session in listed:
            if not turn:
                session.tool(words)
            session.tool(words)
            text, used = ask(replica, session, answer, session.name)
            session.messages.append({"role": "assistant", "content": text})
            session.turns.append(used)
            time.sleep(think)
        if not turn:  # the words of this model that make a message of the right length
            each_now = listed[0].turns[0].prompt / 2
            words = max(8, round(words * each / each_now))
        if turn % 6 == 5 or turn == turns - 1:
            other = Session("other", listed[0].messages[:-2])  # has another message of the tool in this turn
            other.tool(words)
            pair = (Session("cold", listed[0].messages[:-1]), other)
            cold, near = (ask(replica, one, 1, "", salt=f"cold {turn}")[1] for one in pair)
            probes.append((cold, near))
    report(listed, probes, turns // 2)


def report(listed: list[Session], probes: list[tuple[Usage, Usage]], restart: int) -> None:
    """Print the share of tokens that were found, and the times."""
    sent = found = prompts = 0
    for session in listed:
        for before, now in itertools.pairwise(session.turns):
            sent += before.prompt + before.generated
            found += min(now.cached, before.prompt + before.generated)
            prompts += now.prompt
    last = max(session.turns[-1].prompt for session in listed)
    print(f"{len(listed)} sessions of {len(listed[0].turns)} turns, up to {last:,} tokens:")
    print(f"  tokens sent before   {sent:12,}  found again {found / sent:6.1%}")
    print(f"  prompt tokens        {prompts:12,}  found again {found / prompts:6.1%}, at most {sent / prompts:6.1%}")
    after = [session.turns[restart] for session in listed]
    share = sum(one.cached for one in after) / sum(one.prompt for one in after)
    print(f"  first turn after the restart           found again {share:6.1%}")
    for cold, near in probes:
        turns = [one for each in listed for one in each.turns[1:] if abs(one.prompt - cold.prompt) < cold.prompt / 10]
        warm = statistics.median(one.seconds for one in turns)
        new = statistics.median(one.prompt - one.cached for one in turns)
        print(
            f"  first token of {cold.prompt:6,} tokens, {new / cold.prompt:5.1%} of them new: "
            f"cold {1e3 * cold.seconds:6.0f} ms, warm {1e3 * warm:6.0f} ms ({warm / cold.seconds:5.1%}), "
            f"blocks in memory {1e3 * near.seconds:6.0f} ms ({near.seconds / cold.seconds:5.1%})"
        )


def ask(replica: Replica, session: Session, answer: int, key: str, salt: str = "") -> tuple[str, Usage]:
    """Take a turn, and return its answer and its usage."""
    body: dict[str, Any] = {"messages": session.messages, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "prompt_cache_retention": "24h"}
    body |= {"prompt_cache_key": key} | ({"cache_salt": salt} if salt else {})
    request = urllib.request.Request(f"{replica.url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    began, first, parts, usage = time.perf_counter(), 0.0, list[str](), dict[str, Any]()
    with OPENER.open(request, timeout=10 * PATIENCE) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter() - began
                    parts.append(text)
            usage = event.get("usage") or usage
    if not usage:
        raise QuireError(f"{replica.url} has not answered a turn of {session.name}")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    seconds = first or time.perf_counter() - began
    return "".join(parts), Usage(usage["prompt_tokens"], cached, usage["completion_tokens"], seconds)


if __name__ == "__main__":
    typer.run(main)
