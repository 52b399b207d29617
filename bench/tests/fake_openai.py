"""An OpenAI-compatible server that does what each test tells it."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def chunk(text: str, reason: str | None = None, **fields: object) -> bytes:
    return event({"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": reason}], **fields})


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


DONE = b"data: [DONE]\n\n"


def whole(tokens: int, prompt: int = 3) -> bytes:
    texts = [chunk(f"t{i}", "length" if i == tokens - 1 else None) for i in range(tokens)]
    return b"".join(texts) + event({"choices": [], "usage": usage(prompt, tokens)}) + DONE


class Reply:
    """One exchange, as its script sees it."""

    def __init__(self, path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        self.path, self.headers, self.body, self._writer = path, headers, body, writer

    async def start(self, status: int = 200, kind: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._writer.write(head.encode())
        await self._writer.drain()

    async def write(self, data: bytes) -> None:
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def all(self, data: bytes, status: int = 200, kind: str = "text/event-stream") -> None:
        await self.start(status, kind)
        await self.write(data)
        await self.end()

    def cut(self) -> None:
        self._writer.transport.abort()


Script = Callable[[int, Reply], Awaitable[None]]


class Fake:
    """An HTTP server on a thread. The script gets the number of the request, from 0, and answers it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.replies: list[Reply] = []
        self.under_way = self.most_under_way = 0
        self.came = threading.Condition()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request, *lines = head.decode().strip().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                reply = Reply(request.split()[1], headers, json.loads(body) if body else None, writer)
                if reply.path == "/v1/models":
                    await reply.all(json.dumps({"data": [{"id": "fake"}]}).encode(), kind="application/json")
                    continue
                with self.came:
                    number = len(self.replies)
                    self.replies.append(reply)
                    self.under_way += 1
                    self.most_under_way = max(self.most_under_way, self.under_way)
                    self.came.notify_all()
                try:
                    await self.script(number, reply)
                finally:
                    self.under_way -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> "Fake":
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


async def answer_whole(number: int, reply: Reply) -> None:
    await reply.all(whole(reply.body["max_tokens"]))
