"""Blocks of another replica have the bits that computing gives; whatever its answers are, no token is wrong."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.cache.incoming import Arrivals, Name
from quire.engine.engine import Engine
from quire.engine.prefetch import Prefetch
from quire.engine.runner import Runner
from quire.fleet.blocks import MOST_ANSWERS, MOST_BLOCKS, PATH, RECORD, BlockServer, Wanted
from quire.fleet.peers import PeerSource
from quire.fleet.wire import dumps
from quire.frontend.disk_cache import block_memory
from quire.models import EMBEDDED
from quire.ops import native
from quire.request import Holder, Request
from quire.server.http.api_error import ApiError
from tests.engine.test_cache_bits import BATCH, SHAPES, Bits, asked, bits, built, expected, model
from tests.engine.test_disk import forget, requests, with_disk
from tests.marks import of_long_runs, quick

assert model  # the fixture
pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")
Answer = Callable[[HttpRequest], Any]


@contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """A server on this machine that answers to the route of blocks; its URL."""

    async def endpoint(request: HttpRequest) -> Response:
        try:
            return await answer(request)
        except ApiError as error:
            return JSONResponse(error.body(), error.status)

    app = Starlette(routes=[Route(PATH, endpoint, methods=["POST"])])
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def sender(engine: Engine) -> BlockServer:
    assert isinstance(engine.runner, Runner)
    memory = block_memory(engine.runner, engine.scheduler.manager)
    return BlockServer(engine.scheduler.manager, memory, memory.widths(), "class")


def with_peers(
    engine: Engine, fingerprint: str = "class", threads: bool = True, seconds_a_token: float = 1.0
) -> PeerSource:
    """Let an engine read blocks of others, whatever the network is like."""
    assert isinstance(engine.runner, Runner)
    manager = engine.scheduler.manager
    memory = block_memory(engine.runner, manager)
    prefetch = engine.scheduler.prefetch
    if prefetch is None:
        prefetch = engine.scheduler.prefetch = Prefetch(manager, Arrivals(), seconds_a_token)
    manager.memory = memory
    source = PeerSource(prefetch.arrivals, memory.widths(), fingerprint, "secret")
    prefetch.sources.append(source)
    if threads:
        source.start()
    return source


def known_at(url: str, engine: Engine, those: list[Request]) -> list[Request]:
    """The requests, with what that engine has of them now."""
    for request in those:
        count = engine.scheduler.manager.lookup.match(fresh(request)).num_blocks
        request.holder = Holder(url, count) if count else None
    return those


def fresh(request: Request) -> Request:
    return Request(
        request.id,
        request.tokens[: request.num_prompt],
        request.num_prompt,
        request.sampling,
        cache_salt=request.cache_salt,
    )


# Blocks of several groups, and states; the embedded model has the tests below.
TWO_SHAPES = ("gemma2, windows, fp32", "qwen3 next, bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [name if name in TWO_SHAPES else of_long_runs(name) for name in SHAPES], indirect=True
)
def test_the_same_bits(model: tuple[Path | torch.dtype, str], long: bool) -> None:
    """Cold and warm, preempted, with too little memory, and while the other one evicts what it is asked for."""
    directory, kv_dtype = model
    options = {"kv_cache_dtype": kv_dtype, "block_size": 4, "max_num_batched_tokens": 64}
    count = BATCH if long else BATCH // 2
    wanted = expected(directory, kv_dtype, count)
    holder = built(directory, **options, num_blocks=2_000)
    bits(holder, requests(count))
    with listening(sender(holder).answer) as url:
        for i, own in enumerate(
            [
                {"num_blocks": 2_000},
                {"num_blocks": 24, "preemption": "swap", "swap_space": "8MiB"},
                {"num_blocks": 24},
            ]
        ):
            engine = built(directory, **options, **own)
            source = with_peers(engine)
            for _ in range(2):
                those = known_at(url, holder, requests(count))
                assert bits(engine, those) == {r.id: wanted[r.id] for r in those}, i
                forget(engine)
            engine.scheduler.audit()
            assert source.counts.hits > 0
            assert source.counts.tokens > 0
            assert not source.counts.misses.keys() - {"late", "slower"}, source.counts.misses
            source.close(5.0)


@pytest.mark.slow
def test_blocks_that_are_evicted_while_they_are_read_are_missed() -> None:
    """The other replica computes all the while, with little memory: what it sends is a block, never a mixture."""
    wanted = expected(EMBEDDED, "auto", BATCH)
    holder = built(EMBEDDED, block_size=4, num_blocks=40, max_num_batched_tokens=64)
    engine = built(EMBEDDED, block_size=4, num_blocks=400)
    source, is_over = with_peers(engine), threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            bits(holder, requests(BATCH))

    with listening(sender(holder).answer) as url:
        computing = threading.Thread(target=compute)
        computing.start()
        try:
            for i in range(20):
                those = requests(BATCH)
                for request in those:  # as a gateway that believes that nothing was evicted
                    request.holder = Holder(url, len(request.tokens) // 4)
                assert bits(engine, those) == {r.id: wanted[r.id] for r in those}
                forget(engine)
                if i and source.counts.blocks and source.counts.misses["absent"]:
                    break
        finally:
            is_over.set()
            computing.join(60)
    assert source.counts.blocks > 0
    assert source.counts.misses["absent"] > 0
    assert not source.counts.misses.keys() & {"checksum", "refused"}
    source.close(5.0)


def test_a_block_that_was_evicted_while_it_was_copied_is_not_sent() -> None:
    holder = built(EMBEDDED, block_size=4, num_blocks=200)
    [one] = requests(1)
    bits(holder, [one])
    server, manager = sender(holder), holder.scheduler.manager
    wanted = wanted_of(one, holder)
    assert server._payload(wanted) is not None
    real = server._memory.read_block

    def evicting(group: int, block: int, out: Any) -> None:
        real(group, block, out)
        manager.reset_prefix_cache()
        bits(holder, requests(1))  # it is there again, and may be in the same memory

    server._memory = type("Memory", (), {"read_block": staticmethod(evicting)})()
    assert server._payload(wanted) is None


def wanted_of(request: Request, engine: Engine, index: int = 0) -> Wanted:
    """The request's block of that index."""
    size, digests = engine.scheduler.manager.block_size, digests_of(request, engine)
    tokens = request.tokens[index * size : (index + 1) * size].tobytes()
    return Wanted(Name(0, digests[index + 1]), digests[index], tokens)


def digests_of(request: Request, engine: Engine) -> list[bytes]:
    again = fresh(request)
    engine.scheduler.manager.lookup.know_digests(again, len(again.tokens) // engine.scheduler.manager.block_size)
    return again.cache.digests


def test_a_digest_is_not_believed() -> None:
    """Who has a digest alone gets nothing; nor does who has the tokens, but another salt."""
    holder = built(EMBEDDED, block_size=4, num_blocks=200)
    [one] = requests(1)
    bits(holder, [one])
    server, right = sender(holder), wanted_of(one, holder)
    salted = fresh(one)
    salted.cache_salt = "tenant"
    assert server._payload(right) is not None
    assert server._payload(right._replace(tokens=b"\1" + right.tokens[1:])) is None
    assert server._payload(right._replace(parent=b"\1" * 16)) is None
    assert server._payload(wanted_of(salted, holder)) is None


@cache
def known() -> tuple[Engine, Bits, list[Request]]:
    """An engine that has answered some prompts, the answers, and the prompts."""
    holder = built(EMBEDDED, block_size=4, num_blocks=400)
    return holder, bits(holder, requests(6)), requests(6)


@cache
def reading() -> tuple[Engine, PeerSource]:
    engine = built(EMBEDDED, block_size=4, num_blocks=400)
    return engine, with_peers(engine)


def answers_from(url: str, **options: Any) -> PeerSource:
    """Let an engine whose cache is empty answer what another one knows; assert that it does so rightly."""
    holder, wanted, _ = known()
    engine = built(EMBEDDED, block_size=4, num_blocks=400)
    source = with_peers(engine, **options)
    assert bits(engine, known_at(url, holder, requests(6))) == wanted
    engine.scheduler.audit()
    source.close(5.0)
    return source


@pytest.mark.slow
def test_another_class_is_refused() -> None:
    with listening(sender(known()[0]).answer) as url:
        counts = answers_from(url, fingerprint="another").counts
    assert counts.blocks == 0
    assert set(counts.misses) == {"refused"}


def test_one_that_is_gone_is_not_missed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port:
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
    counts = answers_from(url).counts
    assert counts.blocks == 0
    assert set(counts.misses) == {"io"}


@pytest.mark.parametrize("url", ["http://", "http://[", "http://127.0.0.1:99999", "nonsense"])
def test_what_is_no_address_is_a_miss(url: str) -> None:
    assert set(answers_from(url).counts.misses) == {"io"}


def test_a_slow_one_is_waited_for_as_long_as_computing_takes() -> None:
    async def slow(_: HttpRequest) -> Response:
        time.sleep(1.5)
        return Response(b"")

    with listening(slow) as url:
        began = time.monotonic()
        counts = answers_from(url, seconds_a_token=1e-4).counts
        assert time.monotonic() - began < 60
    assert counts.misses["late"] > 0
    assert counts.hits == counts.blocks == 0


def test_what_is_slower_than_computing_is_computed() -> None:
    holder, wanted, (one, *_) = known()
    engine = built(EMBEDDED, block_size=4, num_blocks=400)
    source = with_peers(engine, threads=False, seconds_a_token=1e-12)
    assert bits(engine, known_at("http://nowhere:1", holder, [fresh(one)])) == {one.id: wanted[one.id]}
    assert source.counts.misses == {"slower": 1}
    assert not source.read_next()


def test_a_reset_takes_nothing_that_is_being_read() -> None:
    """K and V may be others after it, as when weights were changed."""
    holder, wanted, (one, *_) = known()
    engine = built(EMBEDDED, block_size=4, num_blocks=400)
    source = with_peers(engine, threads=False)
    with listening(sender(holder).answer) as url:
        [one] = known_at(url, holder, [fresh(one)])
        engine.add(one)
        engine.step()
        assert engine.scheduler.prefetch is not None
        assert engine.scheduler.prefetch.is_waiting
        engine.reset_prefix_cache()
        [again] = known_at(url, holder, [fresh(one)])
        again.id = "again"
        assert source.read_next()
        assert source.counts.blocks == 0  # no request waits for them any more
        while one.finish_reason is None:
            engine.step()
        assert one.cache.prefix_report is not None
        assert one.cache.prefix_report.num_cached == 0
        forget(engine)
        source.start()
        assert bits(engine, [again])["again"] == wanted[one.id]
        assert source.counts.hits == 1
    source.close(5.0)


@pytest.mark.slow
def test_a_disk_and_another_replica_are_two_sources(tmp_path: Path) -> None:
    """What is on the disk alone is read there, what another one has is read there, also from that one's disk."""
    holder = built(EMBEDDED, block_size=4, num_blocks=400)
    (here, *_), (there, *_) = asked(2)
    here.group = there.group = None
    wanted = bits(holder, [here, there])
    tier = with_disk(holder, tmp_path / "there", 200)
    bits(holder, requests(2))
    assert tier.flush(20)
    forget(holder)
    engine = built(EMBEDDED, block_size=4, num_blocks=400)
    own = with_disk(engine, tmp_path / "here", 200)
    peers = with_peers(engine)
    bits(engine, [fresh(here)])
    assert own.flush(20)
    forget(engine)
    with listening(sender(holder).answer) as url:
        those = [fresh(here), fresh(there)]
        those[1].holder = Holder(url, there.num_prompt // 4)
        assert bits(engine, those) == wanted
    assert own.reader.counts.hits == 1
    assert peers.counts.hits == 1
    assert tier.reader.counts.hits == 0
    assert tier.counts.blocks > 0
    own.close()
    tier.close()
    peers.close(5.0)


# ------------------------------------------------------------------------------------------------- what is asked


class Asking:
    """A message to the route."""

    def __init__(self, message: Any) -> None:
        self._message = message

    async def body(self) -> bytes:
        return self._message if isinstance(self._message, bytes) else dumps(self._message)


SCOPE = {"type": "http", "asgi": {"spec_version": "2.4"}}


async def unasked() -> Any:
    raise AssertionError("nothing is received while an answer is sent")


async def body_of(response: Response) -> bytes:
    parts: list[bytes] = []

    async def send(part: Any) -> None:
        parts.append(part.get("body", b""))

    await response(SCOPE, unasked, send)
    return b"".join(parts)


def answered(server: BlockServer, message: Any) -> bytes:
    async def ask() -> bytes:
        return await body_of(await server.answer(Asking(message)))  # type: ignore[arg-type]

    return asyncio.run(ask())


GOOD = ["00" * 16, "00" * 16, "00" * 16]


@pytest.mark.parametrize(
    ("message", "status", "sentence"),
    [
        (b"no JSON", 400, "is no JSON"),
        ({}, 400, "blocks is None; it must be a list of at most 1,024 blocks"),
        ({"blocks": [[0, *GOOD]] * (MOST_BLOCKS + 1)}, 400, "it must be a list of at most 1,024 blocks"),
        ({"blocks": [[0, *GOOD[1:]]]}, 400, "it must be a group, a digest, a parent and tokens"),
        ({"blocks": [[0, "zz", *GOOD[1:]]]}, 400, "it must be a group, a digest, a parent and tokens"),
        ({"blocks": [7]}, 400, "a block is 7; it must be"),
        ({"blocks": [[1, *GOOD]]}, 400, "the group of a block is 1; it must be in 0..0"),
        ({"blocks": [["0", *GOOD]]}, 400, "the group of a block is '0'; it must be in 0..0"),
        ({"blocks": [[0, "00", *GOOD[1:]]]}, 400, "they must have 16 bytes each"),
        ({"blocks": [], "fingerprint": "f"}, 409, "this replica computes other bits (class, not 'f')"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(message: Any, status: int, sentence: str) -> None:
    with pytest.raises(ApiError) as caught:
        answered(sender(known()[0]), message)
    assert caught.value.status == status
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_of_too_many_is_refused() -> None:
    holder, _, (one, *_) = known()
    server, message = sender(holder), {"fingerprint": "class", "blocks": [wanted_of(one, holder).to_json()] * 2}
    whole = answered(server, message)
    width = server._widths[0]
    assert len(whole) == 2 * (RECORD.size + width)
    assert server.num_bytes == len(whole)

    async def cut(_: Any) -> None:
        raise OSError("the caller has left")

    async def ask_at_once() -> None:
        calls = [server.answer(Asking(message)) for _ in range(MOST_ANSWERS + 3)]  # type: ignore[arg-type]
        found = await asyncio.gather(*calls, return_exceptions=True)
        errors = [one.status for one in found if isinstance(one, ApiError)]
        answers = [one for one in found if isinstance(one, Response)]
        assert errors == [HTTPStatus.TOO_MANY_REQUESTS] * 3
        for answer in answers:
            with pytest.raises((OSError, ClientDisconnect)):
                await answer(SCOPE, unasked, cut)

    for _ in range(2):  # an answer that was cut off makes room for another one
        asyncio.run(ask_at_once())


# ---------------------------------------------------------------------------------------------------- what breaks

FAULTS, LONG_FAULTS, SHARDS = 40, 4_000, 2
KINDS = ("bits", "cut", "moved", "doubled", "noise", "longer", "nothing", "status", "slow", "good")


def damaged(whole: bytes, kind: str, rng: random.Random) -> bytes:
    """An answer as a broken network, or a broken replica, may bring it."""
    content = bytearray(whole)
    at, there = rng.randrange(len(content)), rng.randrange(len(content))
    if kind == "bits":
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "moved":
        part = content[there : there + rng.randrange(1, 50_000)]
        content[at : at + len(part)] = part
    elif kind == "doubled":
        content[at:at] = content[there : there + rng.randrange(1, 50_000)]
    elif kind == "noise":
        content[at:] = rng.randbytes(len(content) - at)
    elif kind == "longer":
        content += rng.randbytes(1_000)
    elif kind == "nothing":
        content.clear()
    return bytes(content)


@pytest.mark.parametrize("shard", quick(range(SHARDS), 0, 1))
def test_damage_never_gives_a_wrong_token(shard: int, long: bool) -> None:
    """Bits, ends that are cut off, pieces elsewhere or twice, noise, errors: all of it is computed instead."""
    holder, wanted, _ = known()
    server, rng = sender(holder), random.Random(shard)
    engine, source = reading()
    before = replace(source.counts, misses=Counter(source.counts.misses))
    kind = "good"

    async def answer(request: HttpRequest) -> Response:
        whole = await body_of(await server.answer(request))
        if kind == "status":
            return Response(whole, rng.choice([201, 404, 500]))
        if kind == "slow":
            await asyncio.sleep(0.02)
        return Response(damaged(whole, kind, rng) if whole else whole)

    with listening(answer) as url:
        for i in range((LONG_FAULTS if long else FAULTS) // SHARDS):
            kind = KINDS[i % len(KINDS)]
            those = known_at(url, holder, requests(6))
            assert bits(engine, those) == wanted, (shard, i, kind)
            engine.scheduler.audit()
            forget(engine)
    counts = source.counts
    assert counts.hits > before.hits
    for reason in ("checksum", "io", "refused"):
        assert counts.misses[reason] > before.misses[reason], counts.misses


def test_one_that_dies_in_the_middle_is_computed_from_there() -> None:
    """What has arrived of its blocks before counts; the connection ends within a block."""
    holder, _, (one, *_) = known()
    wanted = bits(holder, [fresh(one)])
    server, count = sender(holder), one.num_prompt // 4
    assert count >= 3
    with socket.create_server(("127.0.0.1", 0)) as port:
        url = f"http://127.0.0.1:{port.getsockname()[1]}"

        def die() -> None:
            connection, _ = port.accept()
            with connection:
                connection.recv(65536)
                those = [wanted_of(one, holder, i) for i in range(count)]
                body = server._records(those)
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                connection.sendall(head + body[: 2 * (RECORD.size + server._widths[0]) + 100])

        dying = threading.Thread(target=die)
        dying.start()
        engine = built(EMBEDDED, block_size=4, num_blocks=400)
        source, again = with_peers(engine), fresh(one)
        again.holder = Holder(url, count)
        assert bits(engine, [again]) == wanted
        dying.join(20)
    assert again.cache.prefix_report is not None
    assert again.cache.prefix_report.num_cached == 8
    assert source.counts.blocks == 2
    assert source.counts.misses == {"io": count - 2}
    source.close(5.0)
