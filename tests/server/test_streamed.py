"""Parts that are sent where they come: never before what has to come first, and never lost."""

from __future__ import annotations

import asyncio

import pytest

from quire.frontend.jobs import Delta
from quire.frontend.requests import make_requests
from quire.request import SamplingParams
from quire.server.api.jobs import Stream


class Client:
    """Takes deltas where it may, as an outlet would."""

    def __init__(self) -> None:
        self.reads = True
        self.got: list[str] = []

    def send(self, deltas: list[Delta]) -> bool:
        if self.reads:
            self.got += [delta.text for delta in deltas]
        return self.reads


def stream() -> Stream:
    return Stream([make_requests("a", None, [1], SamplingParams(max_tokens=4), 0, "")])


def delta(job: Stream, text: str) -> Delta:
    return Delta(job.outputs[0], 0, text, [1], None, None, None, None)


def test_what_comes_early_or_while_the_client_does_not_read_is_not_overtaken() -> None:
    async def main() -> None:
        job, client = stream(), Client()
        job.send_with(client.send)
        job.take([delta(job, "before the head")])
        assert client.got == []

        sent = asyncio.Event()

        async def consume() -> None:
            while deltas := await job.deltas():
                await sent.wait()
                client.got += [one.text for one in deltas]

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(0)
        job.take([delta(job, "while that is sent")])
        assert client.got == []
        sent.set()
        while len(client.got) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        job.take([delta(job, "at once")])
        assert client.got == ["before the head", "while that is sent", "at once"]

        client.reads = False
        job.take([delta(job, "kept")])
        client.reads = True
        job.take([delta(job, "after it")])
        assert client.got[3:] == []
        while len(client.got) < 5:
            await asyncio.sleep(0)
        assert client.got[3:] == ["kept", "after it"]

        job.ended.set()
        job.take([])
        await consumer

    asyncio.run(main())


def test_what_fails_to_be_sent_is_the_reader_s() -> None:
    def fail(_: list[Delta]) -> bool:
        raise ZeroDivisionError("in a writer")

    async def main() -> None:
        job = stream()
        job.send_with(fail)
        reader = asyncio.create_task(job.deltas())
        await asyncio.sleep(0)
        job.take([delta(job, "a")])
        with pytest.raises(ZeroDivisionError):
            await reader

    asyncio.run(main())
