"""Gateway: OpenAI's API in front of a fleet. It makes prompts and answers; replicas compute what lies between."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import aiohttp
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest

from quire import __version__
from quire.errors import ConfigError
from quire.fleet.config import GatewayConfig
from quire.fleet.dispatch import Fleet
from quire.fleet.fingerprint import Fingerprint
from quire.fleet.membership import Membership
from quire.fleet.metrics import FleetMetrics
from quire.fleet.watch import FleetWatch
from quire.fleet.wire import Hello, read
from quire.fleet.work import FarGuide
from quire.request import Guide, Request
from quire.server.api.app import build_app
from quire.server.api.jobs import Delta, Stream
from quire.server.api.service import Identity, ServedModel, Service
from quire.server.http.api_error import ApiError
from quire.server.http.guard import client_of
from quire.server.run import Listening, allow_connections, listen, run_until_stopped, settings
from quire.server.sandbox.chat_template import ChatTemplate, tokenizer_settings
from quire.server.sandbox.grammar import Spec
from quire.text import RequestOutput, find_tokenizer

ASK_AGAIN = 0.2  # s, while no replica has answered yet
MAX_KEY = 256  # characters of an Idempotency-Key
LAST_EVENT = re.compile(r"([a-z]+-[0-9a-f]{32})/([0-9]{1,12})/((?:[0-9]+:[0-9]+(?:e)?,?)*)")


class Known(NamedTuple):
    """What a client has of a sample."""

    characters: int
    tokens: int
    is_whole: bool


NOTHING = Known(0, 0, False)


class FleetService(Service):
    """A service whose requests have names that outlive the gateway, so that another one can go on with a stream."""

    def identity(self, request: HttpRequest, kind: str) -> Identity:
        """The name that the client's own headers give the request, or a new one.

        Last-Event-ID: the last event that the client has of a stream. Idempotency-Key: the same key, the same name,
        and so the same seed. Raises ApiError for a header that is none.
        """
        last, key = request.headers.get("last-event-id"), request.headers.get("idempotency-key")
        if last is not None:
            found = LAST_EVENT.fullmatch(last)
            if found is None or not found[1].startswith(f"{kind}-"):
                raise ApiError(
                    f"the header Last-Event-ID is {last[:80]!r}; it must be the id of an event of this route"
                )
            return Identity(found[1], int(found[2]))
        if key is None:
            return super().identity(request, kind)
        if not 0 < len(key) <= MAX_KEY:
            raise ApiError(f"the header Idempotency-Key has {len(key)} characters; it must have 1 to {MAX_KEY}")
        digest = blake2b(f"{client_of(request)}\0{key}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
        return Identity(f"{kind}-{digest}", int(time.time()))

    def stream(
        self, request: HttpRequest, identity: Identity, prompts: Sequence[tuple[RequestOutput, list[Request]]]
    ) -> Stream:
        """A stream that goes on after the client's last event."""
        found = LAST_EVENT.fullmatch(request.headers.get("last-event-id", ""))
        known = [_known(one) for one in found[3].split(",")] if found is not None and found[3] else []
        return NumberedStream(identity, prompts, known)

    async def compiled(self, client: str, spec: Spec, field: str) -> Guide:
        """The replica compiles it."""
        return FarGuide(spec, field)


class NumberedStream(Stream):
    """A stream whose events say how far each sample is, so that a client can ask another gateway for the rest."""

    def __init__(
        self, identity: Identity, prompts: Sequence[tuple[RequestOutput, list[Request]]], known: Sequence[Known]
    ) -> None:
        """known: what the client has, sample by sample; empty of a new stream. Raises ApiError for another number."""
        super().__init__(prompts)
        self._identity = identity
        self._places = {
            (output.request_id, sample.index): place
            for place, (output, sample) in enumerate((output, one) for output in self.outputs for one in output.outputs)
        }
        if known and len(known) != len(self._places):
            raise ApiError(
                f"the header Last-Event-ID tells of {len(known)} samples; this request has {len(self._places)}"
            )
        self.is_continued = bool(known)
        self._delivered = list(known) or [NOTHING] * len(self._places)
        # Of a sample of which the client has nothing, it lacks the echo, too.
        begun = zip(self._places, self._delivered, strict=True)
        self._known = {place: one for place, one in begun if one != NOTHING}

    def news(self, output: RequestOutput) -> list[Any]:
        """What is new in an output; before all is there that the client has of it, no more than that.

        Nothing before all logprobs of the prompt are there, which the first event of each sample has.
        """
        of_prompt = output.prompt_logprobs
        if of_prompt is not None and len(of_prompt) < len(output.prompt_token_ids) and not output.outputs[0].finished:
            return []
        if not self._known:
            return super().news(output)
        found = []
        for sample in output.outputs:
            known = self._known.get((output.request_id, sample.index))
            if known is None:
                continue
            whole = sample.finished if known.is_whole else len(sample.token_ids) >= known.tokens
            if not whole:
                continue
            del self._known[output.request_id, sample.index]
            logprobs = None if sample.logprobs is None else sample.logprobs[: known.tokens]
            end = (sample.finish_reason, sample.stop_reason) if known.is_whole else (None, None)
            text, tokens = sample.text[: known.characters], sample.token_ids[: known.tokens]
            found.append(Delta(output, sample.index, text, tokens, logprobs, *end, None, is_known=True))
            self.mark_told(output, sample.index, known.characters, known.tokens, is_whole=known.is_whole)
        if any((output.request_id, sample.index) in self._known for sample in output.outputs):
            return found
        return found + super().news(output)

    def marked(self, delta: Delta, events: list[bytes]) -> list[bytes]:
        """The events of a delta, each after a line that says what the client has with it."""
        if delta.is_known:
            return events
        place = self._places[delta.output.request_id, delta.sample]
        before = self._delivered[place]
        known = Known(before.characters + len(delta.text), before.tokens + len(delta.token_ids), False)
        ended = known._replace(is_whole=delta.finish_reason is not None)
        found = []
        for number, event in enumerate(events, start=1):
            self._delivered[place] = ended if number == len(events) else known
            found.append(self._mark() + event)
        self._delivered[place] = ended
        return found

    def _mark(self) -> bytes:
        places = ",".join(f"{one.characters}:{one.tokens}{'e' * one.is_whole}" for one in self._delivered)
        return f"id: {self._identity.name}/{self._identity.created}/{places}\n".encode("ascii")


def _known(text: str) -> Known:
    characters, tokens = text.rstrip("e").split(":")
    return Known(int(characters), int(tokens), text.endswith("e"))


# --------------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Found:
    """What the first replica has said of the model."""

    hello: Hello
    files: dict[str, str]  # that prompts are made with


def serve_fleet(membership: Membership, config: GatewayConfig, tell: Callable[[str], None]) -> None:
    """Serve until a signal, which ends the process. tell: is given the lines that say what is served.

    Raises QuireError where an option cannot be honoured; nothing was served then.
    """
    listening = listen(config.host, config.port)
    allow_connections()
    with TemporaryDirectory(prefix="quire-gateway-") as directory:
        try:
            tell("waiting for a replica")
            found = asyncio.run(find_model(membership, config))
            gateway = build_gateway(membership, config, found, Path(directory))

            def ready() -> None:
                host, port = listening.getsockname()[:2]
                address = f"[{host}]" if ":" in host else host
                name = gateway.service.model.names[0]
                tell(f"Quire {__version__} serves {name} at http://{address}:{port} with a fleet")

            run_until_stopped(GatewayServer(settings(gateway.app(), config), gateway, ready), listening)
        finally:
            listening.close()


@dataclass
class Gateway:
    """What a gateway is made of."""

    service: FleetService
    fleet: Fleet
    metrics: FleetMetrics
    watch: FleetWatch

    def app(self) -> FastAPI:
        """The application that serves it."""
        return build_app(self.service, self.metrics, [self.watch.router()])


class GatewayServer(Listening):
    """Lets open answers end before it does, and the streams that never end go first."""

    def __init__(self, settings: uvicorn.Config, gateway: Gateway, ready: Callable[[], None]) -> None:
        super().__init__(settings, ready)
        self._gateway = gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is running, then end."""
        gateway = self._gateway
        gateway.watch.close()
        end_all = partial(gateway.fleet.end_all, "the gateway is stopping")
        timer = asyncio.get_running_loop().call_later(gateway.service.config.shutdown_timeout, end_all)
        await super().shutdown(sockets)
        timer.cancel()


def build_gateway(membership: Membership, config: GatewayConfig, found: Found, directory: Path) -> Gateway:
    """A gateway whose fleet is not started. directory: an empty one, for the files of the model."""
    hello = found.hello
    for name, text in found.files.items():
        (directory / name).write_text(text, "utf-8")
    model = ServedModel(
        names=tuple(hello.names),
        tokenizer=find_tokenizer(directory),
        tokenizer_settings=tokenizer_settings(directory),
        template=ChatTemplate.find(directory),
        max_model_len=hello.max_model_len,
        vocab_size=hello.vocab_size,
        eos_token_ids=frozenset(hello.eos_token_ids),
        hidden_size=hello.hidden_size,
    )
    metrics = FleetMetrics()
    secret = config.fleet_secret or ""
    fleet = Fleet(membership, secret, Fingerprint.from_json(hello.fingerprint), hello, config, metrics)
    watch = FleetWatch(fleet, {"model": model.names[0], "version": __version__})
    metrics.show(watch.replicas)
    return Gateway(FleetService(model, fleet, config), fleet, metrics, watch)


async def find_model(membership: Membership, config: GatewayConfig) -> Found:
    """What the first replica that answers says of its model; waits for one.

    Raises ConfigError where one refuses the fleet's secret, or is no replica.
    """
    headers = {"Authorization": f"Bearer {config.fleet_secret}"}
    timeout = aiohttp.ClientTimeout(total=10, sock_connect=2)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        async for members in membership.changes():
            while True:
                for member in sorted(members):
                    try:
                        async with http.get(f"{member.url}/fleet/model") as answer:
                            body = await answer.json(content_type=None)
                    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
                        continue
                    if answer.status != 200:
                        why = (body.get("error") or {}).get("message", "") if isinstance(body, dict) else ""
                        raise ConfigError(
                            f"{member.url} is no replica of this fleet: HTTP status {answer.status}, {why}"
                        )
                    return Found(read(Hello, body["hello"]), dict(body["files"]))
                await asyncio.sleep(ASK_AGAIN)
    raise ConfigError("the fleet has no replica")
