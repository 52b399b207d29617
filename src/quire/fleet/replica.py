"""Replica: the server's side of a fleet, as routes below /fleet/ that require the fleet's secret."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    DiskBlockRemoved,
    DiskBlockStored,
)
from quire.engine.beam import BeamSearchParams
from quire.engine.runner import Runner
from quire.errors import RequestError
from quire.fleet.blocks import BlockServer
from quire.fleet.peers import PeerSource
from quire.fleet.report import Report
from quire.fleet.search import positions
from quire.fleet.session import Flow, Session
from quire.fleet.state import ReplicaState
from quire.fleet.wire import (
    BEAT,
    PROTOCOL,
    Call,
    EncodeCall,
    EncodedPrompt,
    Hello,
    Images,
    MatchCall,
    SearchCall,
    WireError,
    dumps,
    encoded_to_json,
    loads,
    read,
    wire_digest,
)
from quire.frontend.disk_cache import block_memory, prefetch_of
from quire.frontend.images import image_rows
from quire.frontend.jobs import EngineStep
from quire.frontend.llm import LLM
from quire.frontend.metrics import Metrics
from quire.frontend.model_fingerprint import lora_digests, replica_fingerprint, with_weights
from quire.frontend.request_factory import RequestOptions, TokenizedPrompt
from quire.frontend.requests import Made
from quire.models.files import SETTINGS, TEMPLATE, TOKENIZER
from quire.request import ImageRows, Task
from quire.sandbox.grammar import Spec
from quire.server.api.local_engine_client import LocalEngineClient
from quire.server.api.service import Service
from quire.server.http.api_error import ApiError, bad_messages
from quire.server.http.sse import EventStream, JsonBody

log = logging.getLogger("quire.fleet")
M = TypeVar("M")


class Replica:
    """Serves gateways. Only the event loop may call its methods, except those in the engine thread's section."""

    def __init__(
        self, llm: LLM, engine_client: LocalEngineClient, service: Service, metrics: Metrics, secret: str
    ) -> None:
        """secret: the one that gateways must send. Raises ConfigError for a model that is not batch-invariant."""
        template = service.model.template
        self.fingerprint = replica_fingerprint(llm, None if template is None else template.source)
        self.incarnation = secrets.token_hex(8)
        self._llm = llm
        self._engine_client = engine_client
        self._service = service
        self._secret = secret.encode()
        self._sessions: dict[str, Session] = {}
        self._closing = False
        self._num_resumed = 0  # requests that had begun elsewhere
        self._beats: asyncio.Task[None] | None = None
        self._num_named = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        # From here on only the engine thread may use these.
        self._manager = llm.engine.scheduler.manager
        self._events: list[list[Any]] = []  # of blocks, in this step
        self._next_event = 0
        self._reporter = Report(llm.engine.scheduler)
        self._num_mismatches = 0  # delivered tokens that were drawn differently
        self._leading = self._manager.lookup.leading_group
        self._weights = self._manager.lookup.weights
        self._version = llm.weights_version  # that the fingerprint covers
        self._peers, self._block_server = self._share_blocks(metrics)
        llm.engine.listen(self._hear)
        engine_client.llm.observers.append(self._observe)
        metrics.show_gauge("fleet_sessions", "Gateways that are connected.", lambda: len(self._sessions))
        metrics.show_gauge("fleet_calls", "Calls of gateways that have not ended.", self._num_calls)
        metrics.show_counter("resumed_requests", "Requests that had begun elsewhere.", lambda: self._num_resumed)
        message = "Delivered tokens that were drawn differently here."
        metrics.show_counter("resume_mismatch", message, lambda: self._num_mismatches)

    def router(self) -> APIRouter:
        """Return the routes."""
        routes = APIRouter()
        # Plain routes: FastAPI's handling of arguments would delay the first token of a call.
        for path, method, endpoint in (
            ("/model", "GET", self._model),
            ("/session", "POST", self._open),
            ("/generate", "POST", self._generate),
            ("/abort", "POST", self._abort),
            ("/search", "POST", self._search),
            ("/match", "POST", self._match),
            ("/images", "POST", self._encode),
            ("/blocks", "POST", self._blocks),
            ("/state", "GET", self._report),
            ("/drain", "POST", self._drain),
        ):
            routes.add_route(f"/fleet{path}", endpoint, methods=[method], include_in_schema=False)
        return routes

    @property
    def draining(self) -> bool:
        """True if the replica accepts no further calls."""
        return self._service.draining

    def drain(self) -> None:
        """Accept no further calls, and let gateways move running ones. Calls that are not moved are completed here."""
        self._service.draining = True
        for session in self._sessions.values():
            session.draining = True
            session.wake()

    def close(self) -> None:
        """Drain, and end each session when it has nothing left to report."""
        self._closing = True
        self.drain()
        for session in self._sessions.values():
            session.closing = True

    # ------------------------------------------------------------------------------------------------------- routes

    async def _model(self, _: HttpRequest) -> Response:
        """Describe the replica, with the files that a gateway needs to make prompts, by name."""
        await self._engine_client.llm.call(self._identify)
        llm, template = self._llm, self._service.model.template
        found = {SETTINGS: json.dumps(dict(llm.text_files.tokenizer_settings()))}
        if llm.tokenizer is not None:
            found[TOKENIZER] = llm.tokenizer.json()
        if template is not None:
            found[TEMPLATE] = template.source
        return JsonBody({"hello": asdict(self._hello("")), "files": found})

    async def _open(self, _: HttpRequest) -> Response:
        self._engine_client.check_health()
        self._loop = asyncio.get_running_loop()
        if self._beats is None:
            self._beats = self._loop.create_task(self._beat())
            if self._peers is not None:  # its threads are not needed before the first session
                self._peers.start()
        session = Session(secrets.token_hex(8), self._hello)
        session.draining, session.closing = self.draining, self._closing
        await self._engine_client.llm.call(partial(self._subscribe, session))
        return EventStream(self._lines(session), session.close)

    async def _generate(self, request: HttpRequest) -> Response:
        session, call = await self._called(request, Call)
        self._check_open()
        # Before the cost of compiling a grammar.
        self._engine_client.check_room(call.sampling.n if call.sample is None else 1)
        prompts = await self._made(request, call)
        self._check_open()  # again: making the requests may have taken long
        uncached = {} if call.uncached is None else {one.id: call.uncached for _, found in prompts for one in found}
        flow = Flow(session, call.flow, prompts, partial(self._reporter.uncached.update, uncached))
        self._num_resumed += bool(call.delivered)
        with self._under(call.trace):
            await self._engine_client.submit(flow)
        session.flows[call.flow] = flow
        if session.name not in self._sessions:  # the session has ended meanwhile
            self._engine_client.abort(flow)
        return Response()

    async def _abort(self, request: HttpRequest) -> Response:
        session, found = await self._message(request)
        flow = session.flows.pop(found.get("flow", -1), None)
        if flow is not None:
            self._engine_client.abort(flow)
        return Response()

    async def _search(self, request: HttpRequest) -> Response:
        _, call = await self._called(request, SearchCall)
        self._check_open()
        params = BeamSearchParams(
            beam_width=call.beam_width,
            max_tokens=call.max_tokens,
            ignore_eos=call.ignore_eos,
            length_penalty=call.length_penalty,
            logprobs=call.logprobs,
        )
        job = self._engine_client.search(self._unique(call.name), call.prompt, params, call.salt, call.lora)
        with self._under(call.trace):
            await self._engine_client.submit(job)
        await self._service.wait(request, job)
        found = [
            [list(one.tokens), one.cumulative_logprob, one.score, one.finish_reason, positions(one.logprobs)]
            for one in job.results()
        ]
        return Response(dumps({"found": found, "failure": job.failure}))  # may contain -inf, which is not valid JSON

    async def _match(self, request: HttpRequest) -> Response:
        """Report the number of cached tokens of a prompt, for models where the index of one group does not show it."""
        _, call = await self._called(request, MatchCall)
        [one] = [requests[0] for _, requests in await self._made(request, replace(call, grammar=None))]

        def look() -> dict[str, int]:
            self._llm.engine.bind_lora(one)
            lookup, disk, size = self._manager.lookup, self._manager.disk, self._manager.block_size
            cached = lookup.match(one).num_blocks * size
            stored = cached if disk is None else lookup.match(one, disk.reader.held(one)).num_blocks * size
            return {"cached": cached, "stored": max(cached, stored)}

        return JsonBody(await self._engine_client.llm.call(look))

    async def _encode(self, request: HttpRequest) -> Response:
        """Report the tokens of a prompt with images, and the digests of the images."""
        _, call = await self._called(request, EncodeCall)
        tokens, rows = await self._encoded(request, call.images)
        return JsonBody(encoded_to_json(tokens, rows))

    async def _encoded(self, request: HttpRequest, images: Images) -> tuple[list[int], ImageRows]:
        """Return the tokens of a prompt with images, and its rows. Raises ApiError."""
        try:
            found = await self._service.encode_images(request, images.text, images.urls)
        except RequestError as error:
            raise bad_messages(error) from error
        if found.images is None:
            raise ApiError("images has no image; it must have one", code="bad_message")
        return found.tokens, found.images

    async def _blocks(self, request: HttpRequest) -> Response:
        """Send blocks to another replica."""
        if self._block_server is None:
            message = "this replica sends no blocks: they are not in one CPU process's memory"
            raise ApiError(message, HTTPStatus.NOT_FOUND, code="no_blocks")
        return await self._block_server.answer(request)

    async def _report(self, _: HttpRequest) -> Response:
        """Report the state, and the tokens computed and decoded since the start, for autoscaling."""
        found = asdict(await self._engine_client.llm.call(self._state))
        report = self._reporter
        return JsonBody(found | {"prompt_tokens": report.prompt_tokens, "decoded_tokens": report.decoded_tokens})

    async def _drain(self, _: HttpRequest) -> Response:
        self.drain()
        return Response()

    async def _message(self, request: HttpRequest) -> tuple[Session, dict[str, Any]]:
        """Return the parsed body of a request and its session. Raises ApiError."""
        try:
            found = loads(await request.body())
        except WireError as error:
            raise ApiError(str(error), code="bad_message") from error
        session = self._sessions.get(found.pop("session", ""))
        if session is None:
            raise ApiError("there is no such session here", HTTPStatus.NOT_FOUND, code="unknown_session")
        return session, found

    async def _called(self, request: HttpRequest, kind: type[M]) -> tuple[Session, M]:
        session, found = await self._message(request)
        try:
            return session, read(kind, found)
        except WireError as error:
            raise ApiError(str(error), code="bad_message") from error

    async def _made(self, request: HttpRequest, call: Call) -> list[Made]:
        """Return the requests of a call. Its images are computed here. Raises ApiError if they give other tokens."""
        name = self._unique(call.name)
        factory, prompt = self._service.factory, TokenizedPrompt(None, call.prompt)
        if call.images is not None:
            tokens, rows = await self._encoded(request, call.images)
            if tokens != call.prompt:
                message = f"the images give {len(tokens)} tokens here, not the {len(call.prompt)} of the call"
                raise ApiError(message, HTTPStatus.CONFLICT, code="other_tokens")
            prompt = prompt._replace(images=rows)
        elif isinstance(call, MatchCall) and isinstance(call.encoded, EncodedPrompt):
            prompt = TokenizedPrompt(None, call.encoded.tokens, images=image_rows(*call.encoded))
        options = RequestOptions(call.priority, call.salt, call.lora, call.retention)
        if call.task is Task.EMBED:
            return [factory.embedding(name, prompt, options)]
        sampling = call.sampling if call.sample is None else replace(call.sampling, n=1)
        output, requests = factory.generation(name, prompt, sampling, options, factory.constraints(sampling))
        if call.sample is not None:
            output.outputs[0].index = requests[0].sample_index = call.sample
            requests[0].first_prompt_logprob = call.first_prompt_logprob
            requests[0].is_strict = call.is_strict
        for one in requests:
            one.holder = call.holder
        if call.grammar is not None:
            try:
                guide = await self._service.compiled(call.salt, Spec(*call.grammar), call.grammar[0])
            except RequestError as error:
                raise ApiError(str(error), code="bad_grammar") from error
            for one in requests:
                one.guide = guide.copy()
        if call.delivered and call.grammar is not None:  # a guide is slow to replay tokens
            await asyncio.to_thread(requests[0].resume, call.delivered, call.num_checked)
        elif call.delivered:
            requests[0].resume(call.delivered, call.num_checked)
        return [(output, requests)]

    def _share_blocks(self, metrics: Metrics) -> tuple[PeerSource | None, BlockServer | None]:
        """Return the reader of other replicas' blocks, not started yet, and the server that sends them blocks.

        Return None for both on a GPU, and if several processes compute the model: each has a part of every block.
        """
        llm, runner = self._llm, self._llm.engine.runner
        if llm.config.device != "cpu" or llm.group is not None or not isinstance(runner, Runner):
            return None, None
        memory = block_memory(runner, self._manager)
        widths = memory.widths()
        prefetch = prefetch_of(llm.engine, llm.decoder, memory)
        source = PeerSource(prefetch.arrivals, widths, self.fingerprint.digest, self._secret.decode())
        prefetch.sources.append(source)
        server = BlockServer(self._manager, memory, widths, self.fingerprint.digest)
        metrics.show_counter("kv_peer_sent_bytes", "Bytes of KV blocks sent to replicas.", lambda: server.num_bytes)
        return source, server

    def _check_open(self) -> None:
        """Raise ApiError (503) if the replica is draining."""
        if self.draining:
            raise ApiError("this replica takes no further requests", HTTPStatus.SERVICE_UNAVAILABLE, code="draining")

    def _under(self, trace: str | None) -> AbstractContextManager[None]:
        """Return a context in which submitted jobs are traced below a gateway's span."""
        traces = self._service.traces
        return nullcontext() if traces is None else traces.under(trace)

    def _unique(self, name: str) -> str:
        """Return a unique name for the engine: two gateways may send one request, if its client changes gateways."""
        self._num_named += 1
        return f"{name}~{self._num_named}"

    # ----------------------------------------------------------------------------------------------------- sessions

    def _hello(self, session: str) -> Hello:
        model = self._service.model
        return Hello(
            protocol=PROTOCOL,
            session=session,
            incarnation=self.incarnation,
            fingerprint=self.fingerprint.to_json(),
            names=list(model.names),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=sorted(model.eos_token_ids),
            hidden_size=model.hidden_size,
            pooling=asdict(model.pooling),
            root=model.root,
            default_sampling=dict(model.default_sampling),
            max_samples=self._engine_client.max_samples,
            block_size=self._manager.block_size,
            salt=self._manager.lookup.salt + self._manager.lookup.weights,
            has_windows=self._manager.frees_early,
            no_images=self._service.why_no_images(),
            loras=lora_digests(self._llm),
        )

    async def _lines(self, session: Session) -> AsyncIterator[bytes]:
        try:
            async for line in session.lines():
                yield line
        finally:
            self._end(session)

    async def _beat(self) -> None:
        """Make each session send a line regularly, also during a long step."""
        num_stuck = 0  # beats in a row
        while self._sessions or not self._closing:
            await asyncio.sleep(BEAT)
            try:
                self._engine_client.check_health()
                num_stuck = 0
            except ApiError as error:  # a stuck engine must not seem alive because the event loop is
                num_stuck += 1
                if num_stuck == 2:  # at the first, the whole process may just have been suspended
                    log.error("the gateways' sessions end: %s", error)
                if num_stuck >= 2:
                    for session in self._sessions.values():
                        session.close()
            for session in self._sessions.values():
                session.wake()

    def _end(self, session: Session) -> None:
        """Close the session of a gateway that has disconnected, and abort its calls."""
        session.close()
        if self._sessions.pop(session.name, None) is not None:
            for flow in session.flows.values():
                self._engine_client.abort(flow)

    def _end_all(self) -> None:
        """End all sessions, since the weights were replaced. Gateways continue their requests at other replicas."""
        for session in list(self._sessions.values()):
            self._end(session)

    def _num_calls(self) -> int:
        return sum(len(session.flows) for session in list(self._sessions.values()))

    def _join(
        self, session: Session, digests: list[int], on_disk: list[int], next_event: int, state: ReplicaState
    ) -> None:
        session.begin(digests, on_disk, next_event, state)
        self._sessions[session.name] = session

    def _publish(
        self, events: list[list[Any]], state: ReplicaState, started: Sequence[tuple[Session, Sequence[int]]]
    ) -> None:
        begun = {session.name: flows for session, flows in started}
        for session in self._sessions.values():
            session.add(events, state, begun.get(session.name, ()))

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _post(self, function: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function)

    def _subscribe(self, session: Session) -> None:
        """Send a session all blocks, then every event. The order is kept, as both use the same queue."""
        self._identify()
        self._flush(self._state())
        digests = [self._digest(block.digest) for block in self._manager.indexes[self._leading].by_block.values()]
        disk = self._manager.disk
        on_disk = [] if disk is None else [self._digest(digest) for digest in disk.store.digests(self._leading)]
        self._post(partial(self._join, session, digests, on_disk, self._next_event, self._state()))

    def _identify(self) -> None:
        """Update the fingerprint if the weights were replaced. Gateways then come again, see `_hear`.

        Raises ModelError if the files of the weights cannot be read.
        """
        if self._version != (version := self._llm.weights_version):
            # If the files cannot be read, it is tried again: no gateway may see the old fingerprint.
            self.fingerprint = with_weights(self.fingerprint, self._llm.files, version)
            self._version = version

    def _hear(self, event: CacheEvent) -> None:
        if isinstance(event, (BlockStored, BlockRemoved)):
            if event.group == self._leading:
                kind = "+" if isinstance(event, BlockStored) else "-"
                self._events.append([kind, *map(self._digest, event.block_hashes)])
        elif isinstance(event, (DiskBlockStored, DiskBlockRemoved)):
            if event.group == self._leading:
                kind = "d+" if isinstance(event, DiskBlockStored) else "d-"
                self._events.append([kind, *map(self._digest, event.block_hashes)])
        elif isinstance(event, AllBlocksCleared) and event.group == self._leading:
            self._events.append(["0"])
            if self._weights != self._manager.lookup.weights:
                self._weights = self._manager.lookup.weights
                self._post(self._end_all)  # before any frame of the new weights

    def _observe(self, step: EngineStep) -> None:
        """Handle a computed step."""
        self._num_mismatches += sum(event.drawn is not None and event.drawn != event.token for event in step.events)
        self._reporter.observe(step.events, step.seconds)
        self._flush(self._state())

    def _flush(self, state: ReplicaState) -> None:
        events, self._events = self._events, []
        self._next_event += len(events)
        started = []
        for session in list(self._sessions.values()):
            flows, session.started = session.started, []
            started.append((session, flows))
        self._post(partial(self._publish, events, state, started))

    def _digest(self, digest: bytes) -> int:
        return wire_digest(digest, self._secret)

    def _state(self) -> ReplicaState:
        return self._reporter.state(draining=self.draining)
