"""Gates through which gateways reach replicas, and which see, hold and lose what passes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

Watch = Callable[["Gate", "Connection", str, bytes], bool]


class Connection:
    """What is remembered of a connection through a gate."""

    def __init__(self) -> None:
        self.is_session = False
        self.is_called = False  # a call was sent on it whose answer has not come


class Gate:
    """A way from one gateway to one replica. While it is held, nothing passes, and nothing is closed."""

    def __init__(self, gateway: int, replica: int, watch: Watch) -> None:
        """watch: sees what is about to pass; what it returns False for is lost, and with it the connection."""
        self.gateway = gateway
        self.replica = replica
        self.target = 0  # port of the replica
        self.port = 0
        self.num_sessions = 0
        self._watch = watch
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._served: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._served:
            task.cancel()
        await asyncio.gather(*self._served, return_exceptions=True)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        connection = Connection()
        ways = [
            asyncio.create_task(self._pass(connection, "up", reader, up_writer)),
            asyncio.create_task(self._pass(connection, "down", up_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            await self._open.wait()
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, up_writer):
                end.close()
            if connection.is_session:
                self.num_sessions -= 1

    async def _pass(
        self, connection: Connection, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if way == "down" and not connection.is_session and b'"protocol":' in data:
                    connection.is_session = True
                    self.num_sessions += 1
                if not self._watch(self, connection, way, data):
                    return
                await self._open.wait()
                writer.write(data)
                await writer.drain()
