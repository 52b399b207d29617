"""A soak of a few seconds, and what is said of servers that keep too much."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from quire_bench.cli.soak import soak as command
from quire_bench.server import soak as module
from quire_bench.server.mix import Asker, Wrong, read_answer
from quire_bench.server.soak import Soak, soak
from quire_bench.server.verdict import POOL_THREADS, TRIAL_DESCRIPTORS, Findings, Sample, judge

MIB = 2**20
IDLE = Sample(0.0, 500 * MIB, 400 * MIB, 10, 14, 0, 0, 0, 0, 0)
TOO_MANY = IDLE.descriptors + TRIAL_DESCRIPTORS + 1


def sample(seconds: float, resident: float) -> Sample:
    return replace(IDLE, seconds=seconds, resident=int(resident), running=3, blocks=77)


def sound() -> Findings:
    """Return the findings of a server that may run for ever: memory that goes up and down, and nothing else."""
    rng = random.Random(0)
    found = Findings([sample(t, (500 + rng.uniform(-20, 20)) * MIB) for t in range(0, 3600, 5)], IDLE, IDLE)
    found.note("chat", "answered")
    found.canaries["a"] = 9
    found.num_healthy, found.status = 720, -signal.SIGTERM
    return found


def test_a_sound_server_has_no_problems() -> None:
    assert judge(sound()) == []
    assert judge(replace(sound(), status=0)) == []


def test_a_leak_is_found_after_noise() -> None:
    found = sound()
    leaking = [replace(s, resident=s.resident + int(s.seconds * 0.003 * MIB)) for s in found.samples]  # 11 MiB an hour
    assert judge(replace(found, samples=leaking))[0].startswith("resident memory grew by")
    shrinking = [replace(s, resident=s.resident - int(s.seconds * 0.01 * MIB)) for s in found.samples]
    assert judge(replace(found, samples=shrinking)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"after": replace(IDLE, blocks=2)}, "not everything came back: 2 blocks"),
        ({"after": replace(IDLE, host_blocks=3, swapped=1)}, "1 swapped, 3 host_blocks"),
        ({"after": replace(IDLE, descriptors=TOO_MANY)}, f"descriptors are left: {TOO_MANY}, and 14 after the warm-up"),
        ({"after": replace(IDLE, threads=IDLE.threads + POOL_THREADS + 2)}, f"{POOL_THREADS + 2} threads are left"),
        ({"canaries": Counter(a=5, b=1)}, "one request had 2 answers"),
        ({"canaries": Counter()}, "the canary was never answered"),
        ({"unhealthy": ["status 503"]}, "/health failed 1 times; first: status 503"),
        ({"logged": ["ERROR oh"]}, "1 errors in the server's log; the first: ERROR oh"),
        ({"status": -signal.SIGKILL}, "the server ended with status -9"),
        ({"ended_early": "no answer"}, "the soak ended early: no answer"),
    ],
)
def test_whatever_is_left_or_wrong_is_told(change: dict[str, object], words: str) -> None:
    [problem] = judge(replace(sound(), **change))  # type: ignore[arg-type]
    assert words in problem


def test_answers_are_read_streamed_or_not() -> None:
    whole = {"choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    pieces = [{"choices": [{"index": 0, "text": "a", "finish_reason": None}]}, whole | {"usage": None}]
    pieces[1]["choices"] = [{"index": 0, "text": "b", "finish_reason": "stop"}]
    pieces.append({"choices": [], "usage": {"completion_tokens": 2}})
    stream = b"".join(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces)
    shown = read_answer(json.dumps(whole).encode(), False)
    assert shown == read_answer(stream + b"data: [DONE]\n\n", True)
    assert (shown.texts, shown.reasons, shown.num_generated) == ({0: "ab"}, {0: "stop"}, 2)
    for broken in (stream, b"", stream + b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n'):
        with pytest.raises(Wrong):
            read_answer(broken, True)


def test_requests_are_of_all_kinds_and_answers_are_checked() -> None:
    asker, rng = Asker(3), random.Random(3)
    asks = [asker.draw(rng) for _ in range(400)]
    kinds = Counter(ask.kind for ask in asks)
    assert set(kinds) == {
        "completion",
        "chat",
        "logprobs",
        "beam search",
        "regex",
        "json schema",
        "tokenize",
        "embeddings",
        "bad",
    }
    assert asks[7].body == [Asker(3).draw(r) for r in [random.Random(3)] for _ in range(8)][7].body
    good = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
    for ask in asks:
        with pytest.raises(Wrong):
            ask.check(500, b'{"error": {"message": "it broke"}}')
        if ask.kind == "completion" and b'"stream"' not in (ask.body or b""):
            with pytest.raises(Wrong):
                ask.check(200, json.dumps(good | {"choices": []}).encode())
        if ask.kind == "embeddings":
            count = len(json.loads(ask.body or b"")["input"])
            for vectors, is_right in (
                ([[0.6, 0.8]] * count, True),
                ([[0.6, 0.8]] * 9, False),
                ([[1.1]] * count, False),
            ):
                answer = json.dumps({"data": [{"embedding": vector} for vector in vectors]}).encode()
                with nullcontext() if is_right else pytest.raises(Wrong):
                    ask.check(200, answer)


@pytest.mark.long
@pytest.mark.slow
def test_a_short_soak() -> None:
    """All of it works, but for the memory: seconds are too few to say anything of that."""
    advanced = []
    found = soak(Soak(2.0, 0.5, clients=6), lambda: advanced.append(1))
    assert [problem for problem in judge(found) if not problem.startswith("resident memory")] == []
    assert len(found.samples) >= 3
    assert found.total("answered") > 5
    assert found.before is not None
    assert found.before.resident > 50 * MIB
    assert found.counts["generation_tokens"] > 100
    assert found.canaries.total() >= 1
    assert len(advanced) >= 2
    shown = json.loads(json.dumps(found.as_dict()))
    assert shown["after"]["blocks"] == 0
    assert shown["spread_bytes"] >= 0


def test_the_command_tells_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    app = typer.Typer()
    app.command()(command)
    monkeypatch.setattr(module, "soak", lambda plan, advance: sound())
    done = CliRunner().invoke(app, ["--minutes", "60"])
    assert done.exit_code == 0
    assert "canary             9 times, 1 answers" in done.output
    monkeypatch.setattr(module, "soak", lambda plan, advance: replace(sound(), status=3))
    done = CliRunner().invoke(app, ["--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout.splitlines()[0])["problems"] == ["the server ended with status 3"]
