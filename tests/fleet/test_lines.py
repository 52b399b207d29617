"""Lines that are taken where they are read: whole and in order, however they come, and every end of them."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Sequence

import aiohttp
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from quire.fleet import lines, link
from quire.fleet.lines import HttpRefused, read_lines
from quire.fleet.wire import WireError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def reading(
    pieces: Sequence[bytes], take: Callable[[bytes], None], *, silence: float = 30.0, stays: bool = False
) -> bytes:
    """Read what a server sends in these pieces. Returns what it was asked. stays: it does not close the connection."""
    asked = b""

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            asked = await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if stays:
                await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            headers = {"Authorization": "Bearer s"}
            await read_lines(f"http://127.0.0.1:{port}/a/b", headers, take, connect=30.0, silence=silence)
        finally:
            server.close()

    asyncio.run(main())
    return asked


@pytest.mark.slow
@given(
    st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=8),
    st.lists(st.integers(1, 30), max_size=12),
    st.lists(st.integers(1, 60), max_size=12),
)
def test_lines_are_whole_and_in_order(lines: list[bytes], chunks: list[int], pieces: list[int]) -> None:
    def cut(data: bytes, sizes: list[int]) -> list[bytes]:
        found = []
        for size in sizes:
            found.append(data[:size])
            data = data[size:]
        return [piece for piece in [*found, data] if piece]

    body = b"".join(map(chunk, cut(b"".join(line + b"\n" for line in lines), chunks)))
    taken: list[bytes] = []
    reading(cut(HEAD + body + END, pieces), taken.append)
    assert taken == lines


def test_what_is_asked() -> None:
    head, *headers = reading([HEAD + END], lambda _: None).decode().split("\r\n")
    assert head == "POST /a/b HTTP/1.1"
    assert {"Authorization: Bearer s", "Content-Length: 0"} <= set(headers)
    assert any(header.startswith("Host: 127.0.0.1:") for header in headers)


def test_another_status() -> None:
    taken: list[bytes] = []
    with pytest.raises(HttpRefused) as refused:
        reading([b"HTTP/1.1 503 No\r\ncontent-length: 6\r\n\r\n", b"ab\n", b"cd\n"], taken.append)
    assert (refused.value.status, refused.value.body, taken) == (503, b"ab\ncd\n", [])


def test_the_connection_is_closed_before_the_end() -> None:
    taken: list[bytes] = []
    with pytest.raises(ConnectionError):
        reading([HEAD, chunk(b"a\nb")], taken.append)
    assert taken == [b"a"]


def test_no_http() -> None:
    with pytest.raises(ConnectionError, match="not HTTP"):
        reading([b"SSH-2.0-x\r\n\r\n"], lambda _: None)


def test_nothing_comes() -> None:
    taken: list[bytes] = []
    with pytest.raises(asyncio.TimeoutError):
        reading([HEAD, chunk(b"a\n")], taken.append, silence=0.05, stays=True)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_reader_that_was_stopped_reads_what_came_meanwhile(kind: str) -> None:
    """While a process is stopped its timers become due; when it goes on, they run before the sockets are read."""
    listening = socket.create_server(("127.0.0.1", 0))
    stopped, sent = threading.Event(), threading.Event()

    def serve() -> None:
        with listening.accept()[0] as peer:
            peer.recv(65536)
            peer.sendall(HEAD + chunk(b"before\n"))
            stopped.wait()
            peer.sendall(chunk(b"meanwhile\n") + END)
            sent.set()
            peer.recv(65536)

    def stand_still() -> None:
        stopped.set()
        sent.wait()
        time.sleep(2 * silence)

    silence, taken = 0.05, list[bytes]()
    loop = uvloop.new_event_loop() if kind == "uvloop" else asyncio.SelectorEventLoop()

    def take(line: bytes) -> None:
        taken.append(line)
        if line == b"before" and isinstance(loop, asyncio.SelectorEventLoop):
            select = loop._selector.select  # type: ignore[attr-defined]

            def interrupted(timeout: float | None) -> list[object]:
                """As epoll_wait that a signal ends: the time is over, and no event was taken."""
                loop._selector.select = select  # type: ignore[attr-defined]
                stand_still()
                return []

            loop._selector.select = interrupted  # type: ignore[attr-defined]
        elif line == b"before":
            stand_still()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/a"
        loop.run_until_complete(read_lines(url, {}, take, connect=30.0, silence=silence))
    finally:
        stopped.set()
        thread.join()
        listening.close()
        loop.close()
    assert taken == [b"before", b"meanwhile"]


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD, *[chunk(b"x" * 500)] * 3],
        [HEAD, chunk(b"a\nb\n" + b"x" * 600), chunk(b"x" * 600)],
        [b"HTTP/1.1 200 OK\r\n", *[b"a: b\r\n" * 100] * 2],
        [b"HTTP/1.1 503 No\r\ncontent-length: 9999\r\n\r\n", *[b"x\n" * 300] * 2],
    ],
    ids=["the first line", "a later line", "the head", "a refusal"],
)
def test_what_never_ends_is_not_kept(pieces: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 1000)
    with pytest.raises(WireError, match="bytes have come without the end of a line; the most is 1000"):
        reading(pieces, lambda _: None, stays=True)


def test_the_bound_is_one_of_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 1000)
    taken: list[bytes] = []
    reading([HEAD, *[chunk(b"x" * 400)] * 2, *[chunk(b"\n" + b"y" * 700)] * 3, END], taken.append)
    assert taken == [b"x" * 800, b"y" * 700, b"y" * 700]


def test_a_body_that_never_ends_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(size: int) -> bytes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            for _ in range(size // 100):
                writer.write(b"x" * 100)
                await writer.drain()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        try:
            async with aiohttp.ClientSession() as http, http.get(url) as answer:
                return await link.read_body(answer)
        finally:
            server.close()

    assert asyncio.run(main(100_000)) == b"x" * 100_000
    monkeypatch.setattr(link, "MAX_LINE", 1000)
    with pytest.raises(WireError, match="bytes of its body have come; the most is 1000"):
        asyncio.run(main(2000))


def test_nobody_listens() -> None:
    with pytest.raises(OSError):
        asyncio.run(read_lines("http://127.0.0.1:1/", {}, lambda _: None, connect=30.0, silence=30.0))


def test_a_connection_that_is_not_made_leaves_nothing_that_fails_later() -> None:
    failures: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        with pytest.raises(OSError):
            await read_lines("http://127.0.0.1:1/", {}, lambda _: None, connect=30.0, silence=0.0)
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(main())
    assert not failures


def test_what_a_line_raises_ends_it() -> None:
    taken: list[bytes] = []

    def take(line: bytes) -> None:
        taken.append(line)
        if line == b"b":
            raise KeyError("b")

    with pytest.raises(KeyError):
        reading([HEAD, chunk(b"a\nb\nc\n"), chunk(b"d\n")], take, stays=True)
    assert taken == [b"a", b"b"]
