"""Lines that are taken where they are read: whole and in order, however they come, and every end of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.fleet.lines import HttpRefused, read_lines

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
    with pytest.raises(ConnectionError, match="no HTTP"):
        reading([b"SSH-2.0-x\r\n\r\n"], lambda _: None)


def test_nothing_comes() -> None:
    taken: list[bytes] = []
    with pytest.raises(asyncio.TimeoutError):
        reading([HEAD, chunk(b"a\n")], taken.append, silence=0.05, stays=True)


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
