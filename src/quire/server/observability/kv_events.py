"""Block events for external routers: changes of the reusable blocks, over ZeroMQ, in vLLM's wire format.

A message of the PUB socket has three frames: a topic, the batch's number (8 bytes, big-endian, from 0 on), and the
batch in msgpack: [seconds since the epoch, events, 0], where the last one is vLLM's rank in data parallelism. An event
is a map with the fields of vLLM 0.26 and later. A step with events makes one batch.

A subscriber that misses a number sends a request to the ROUTER socket: an empty frame, then the first number that it
needs. For each batch that is still stored it gets an empty frame, the topic, the number and the batch, and at the end
the same with an empty topic, the number END and an empty batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, Full, Queue
from typing import TypeAlias

import msgspec
import zmq

from quire.cache import events as cache
from quire.cache.events import CacheEvent
from quire.cache.groups import AnyGroup, StateGroup
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.frontend.jobs import EngineStep

log = logging.getLogger("quire.server")

MEDIUM = "GPU"  # vLLM's name for the cache that the model computes with, on a CPU too; the others are tiers below it
RANK = 0  # in data parallelism; routers require the field
MAX_REMEMBERED = 10_000  # batches that are stored for replay
MAX_OUTSTANDING = 10_000  # batches that a subscriber has not read; further ones are dropped, but can be replayed
MAX_QUEUED = 10_000  # batches that wait to be encoded
WAIT = 0.05  # seconds within which a replay request, or the end, is noticed
LINGER = 500  # milliseconds for sending the last batches
CLOSE_WITHIN = 2.0  # seconds
END = b"\xff" * 8  # instead of a number: there are no more batches
NUMBER_SIZE = 8  # bytes
HASH_SIZE = 8  # bytes of a digest that form a block's hash


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive full blocks became reusable.

    vLLM's optional fields `locality` and `ownership` are left out, as nothing here has them. Of its `extra_keys` only
    images are given, since a salt is a secret of its client.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]  # of all these blocks
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None = None
    # For each block the identifiers of its images, and their starts relative to the block; None: no block has any.
    extra_keys: list[list[tuple[str, int]] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No block of any group can be reused any more."""


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of a step."""

    ts: float  # seconds since the epoch
    events: list[WireEvent]
    data_parallel_rank: int


def wire_hash(digest: bytes) -> int:
    """Return a block's hash on the wire: the last 64 bits of its digest."""
    return int.from_bytes(digest[-HASH_SIZE:], "big")


def wire_events(events: Sequence[CacheEvent], groups: Sequence[AnyGroup]) -> list[WireEvent]:
    """Convert cache events to the wire format, without those that do not affect the reusable blocks.

    groups: of the cache. Consecutive blocks of a group are merged into one event if that does not change the meaning.
    """
    wire: list[WireEvent] = []
    stored: dict[int, BlockStored] = {}  # the last one of each group, if none of its blocks was removed since
    for event in events:
        if isinstance(event, cache.BlockStored):
            parent = None if event.parent_block_hash is None else wire_hash(event.parent_block_hash)
            hashes, last = [wire_hash(digest) for digest in event.block_hashes], stored.get(event.group)
            if last is not None and last.block_hashes[-1] == parent:
                if last.extra_keys is not None or event.images is not None:
                    before = last.extra_keys or [None] * len(last.block_hashes)
                    last.extra_keys = before + (event.images or [None] * len(hashes))
                last.block_hashes += hashes
                last.token_ids += event.token_ids
            else:
                group = groups[event.group]
                attends = "full_attention" if group.window is None else "sliding_window"
                stored[event.group] = BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=parent,
                    token_ids=[*event.token_ids],
                    block_size=event.block_size,
                    lora_id=None,
                    medium=MEDIUM,
                    lora_name=event.lora,
                    group_idx=event.group,
                    kv_cache_spec_kind="mamba" if isinstance(group, StateGroup) else attends,  # vLLM's name for states
                    kv_cache_spec_sliding_window=group.window,
                    extra_keys=event.images,
                )
                wire.append(stored[event.group])
        elif isinstance(event, cache.BlockRemoved):
            stored.pop(event.group, None)
            hashes, previous = [wire_hash(digest) for digest in event.block_hashes], wire[-1] if wire else None
            if isinstance(previous, BlockRemoved) and previous.group_idx == event.group:
                previous.block_hashes += hashes
            else:
                wire.append(BlockRemoved(hashes, MEDIUM, event.group))
        elif isinstance(event, cache.AllBlocksCleared):
            stored.clear()
            if not (wire and isinstance(wire[-1], AllBlocksCleared)):  # the cache reports it for each group
                wire.append(AllBlocksCleared())
    return wire


def listens(endpoint: str) -> bool:
    """Return whether to listen at an endpoint; otherwise the publisher connects to a subscriber that listens there.

    The rule is vLLM's, extended by 0.0.0.0: listen at an address with a wildcard or "::", and at a path.
    """
    return endpoint.startswith("ipc://") or any(part in endpoint for part in ("*", "::", "//0.0.0.0:"))


class KVEventPublisher:
    """Publishes the changes of an engine's reusable blocks.

    Call `hear` and `observe` on the engine's thread. They never wait: another thread encodes and sends the events. If
    the queue to that thread is full, a batch is dropped together with its number. If a subscriber has MAX_OUTSTANDING
    unread batches, further ones are dropped too, but can be replayed.
    """

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        """Open the sockets; nothing is sent before `start`.

        endpoint, replay: ZeroMQ addresses for publishing and for replay requests; without replay, old batches are not
        stored. topic: of all messages. Raises ConfigError if a socket cannot be opened.
        """
        self._how = "published at" if listens(endpoint) else "sent to"
        self._topic = topic.encode(errors="surrogateescape")
        self._groups: Sequence[AnyGroup] = ()
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self._old: deque[tuple[int, bytes]] = deque(maxlen=MAX_REMEMBERED)  # numbers and batches, if stored for replay
        try:
            self._pub = self._open("kv_events", zmq.PUB, endpoint, MAX_OUTSTANDING)
            if replay is not None:  # with room for an answer of all batches and the end
                self._replay = self._open("kv_events_replay", zmq.ROUTER, replay, MAX_REMEMBERED + 1)
        except ConfigError:
            self._context.destroy()
            raise
        self._heard: list[CacheEvent] = []  # since the last batch
        self._number = 0  # of the next batch
        self._is_full = False
        self._queue: Queue[tuple[int, float, list[CacheEvent]]] = Queue(MAX_QUEUED)  # numbers, times, events
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)

    def _open(self, name: str, kind: int, endpoint: str, most: int) -> zmq.Socket[bytes]:
        """Open a socket that queues at most `most` messages for each peer."""
        made = self._context.socket(kind)
        made.set_hwm(most)
        made.linger = LINGER
        made.ipv6 = "[" in endpoint
        try:
            if kind == zmq.ROUTER or listens(endpoint):
                made.bind(endpoint)
            else:
                made.connect(endpoint)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            message = f"{name} is {endpoint!r}: {reason}; it must be an address that is free here, as in 'tcp://*:5557'"
            raise ConfigError(message) from error
        return made

    def __str__(self) -> str:
        where = f"{self._how} {self.endpoint}"
        return where if self._replay is None else f"{where}, and again at {self.replay_endpoint}"

    @property
    def endpoint(self) -> str:
        """The address at which events are published, with the chosen port."""
        return self._pub.get_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        """The address for replay requests, with the chosen port."""
        return None if self._replay is None else self._replay.get_string(zmq.LAST_ENDPOINT)

    def start(self, engine: Engine) -> None:
        """Publish the events of an engine from now on. Its cache must be empty, as subscribers assume."""
        self._groups = engine.scheduler.manager.groups
        engine.listen(self.hear)
        self._thread.start()

    def close(self) -> None:
        """Send the remaining events and close the sockets. May be called before `start`."""
        self._closing.set()
        if self._thread.ident is None:
            self._context.destroy()
        else:
            self._thread.join(CLOSE_WITHIN)

    # ---------------------------------------------------------------------------------- called by the engine's thread

    def hear(self, event: CacheEvent) -> None:
        """Record an event."""
        if isinstance(event, (cache.BlockStored, cache.BlockRemoved, cache.AllBlocksCleared)):
            self._heard.append(event)

    def observe(self, _: EngineStep) -> None:
        """Queue the events of a finished step as a batch."""
        if not self._heard:
            return
        heard, self._heard = self._heard, []
        try:
            self._queue.put_nowait((self._number, time.time(), heard))
            self._is_full = False
        except Full:
            if not self._is_full:
                log.warning("%d batches of block events wait to be sent; the next ones are dropped", MAX_QUEUED)
            self._is_full = True
        self._number += 1

    # ------------------------------------------------------------------------------------------- the sending thread

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        try:
            while not (self._closing.is_set() and self._queue.empty()):
                try:
                    if self._replay is not None and self._replay.poll(0):
                        self._answer(self._replay)
                    number, now, heard = self._queue.get(timeout=WAIT)
                    self._send(number, encoder.encode(KVEventBatch(now, wire_events(heard, self._groups), RANK)))
                except Empty:
                    continue
                except Exception:  # does not affect the next batches
                    log.exception("block events could not be published")
        finally:
            self._context.destroy()

    def _send(self, number: int, batch: bytes) -> None:
        """Publish a batch, and store it for replay."""
        self._pub.send_multipart((self._topic, number.to_bytes(NUMBER_SIZE, "big"), batch))
        if self._replay is not None:
            self._old.append((number, batch))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer a replay request. Batches that the subscriber does not read are dropped."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_SIZE:
            sizes = [len(frame) for frame in frames[1:]]
            log.warning("a request for block events has frames of %s bytes; they must be [0, %d]", sizes, NUMBER_SIZE)
            return
        to, first = frames[0], int.from_bytes(frames[2], "big")
        for number, batch in self._old:
            if number >= first:
                replay.send_multipart((to, b"", self._topic, number.to_bytes(NUMBER_SIZE, "big"), batch))
        replay.send_multipart((to, b"", b"", END, b""))
