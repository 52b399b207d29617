"""Block events for routers of others: what can be reused here, over ZeroMQ, in the wire form of vLLM.

A message of the PUB socket has three frames: a topic, the batch's number (8 bytes, big-endian, from 0 on), and the
batch in msgpack: [seconds since the epoch, events, 0], where the last one is vLLM's rank in data parallelism. An event
is a map with the fields of vLLM 0.26 and later. A step with events makes one batch.

A subscriber that finds a number missing asks the ROUTER socket: an empty frame, then the first number that it wants. It
gets an empty frame, the topic, a number and a batch for each that is still remembered, and at the end the same with an
empty topic, the number END and an empty batch.
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

from quire.aio import Step
from quire.cache import events as cache
from quire.cache.events import CacheEvent
from quire.cache.groups import AnyGroup, StateGroup
from quire.engine.engine import Engine
from quire.errors import ConfigError

log = logging.getLogger("quire.server")

MEDIUM = "GPU"  # vLLM's name for the cache that the model computes with, on a CPU too; the others are tiers below it
RANK = 0  # in data parallelism; routers want the field
MAX_REMEMBERED = 10_000  # batches that can be asked for again
MAX_OUTSTANDING = 10_000  # batches that a subscriber has not read; after that it misses some, and can ask for them
MAX_QUEUED = 10_000  # batches that wait to be encoded
WAIT = 0.05  # seconds in which a request for old batches, or the end, is noticed
LINGER = 500  # milliseconds that the last batches get to leave
CLOSE_WITHIN = 2.0  # seconds
END = b"\xff" * 8  # instead of a number: there are no more
NUMBER_SIZE = 8  # bytes
HASH_SIZE = 8  # bytes of a digest that are a block's hash


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Full blocks, each after the one before it, can be reused from now on.

    vLLM's optional fields `extra_keys`, `locality` and `ownership` are left out: nothing here has them, and a salt is a
    secret of its client.
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
    """A block's hash on the wire: the last 64 bits of its digest."""
    return int.from_bytes(digest[-HASH_SIZE:], "big")


def wire_events(events: Sequence[CacheEvent], groups: Sequence[AnyGroup]) -> list[WireEvent]:
    """The events of an engine's cache in the wire form, those left out that say nothing of what can be reused.

    groups: of that cache. Blocks of a group that follow one another become one event, as far as that changes nothing.
    """
    wire: list[WireEvent] = []
    stored: dict[int, BlockStored] = {}  # the last one of each group, if none of its blocks was removed since
    for event in events:
        if isinstance(event, cache.BlockStored):
            parent = None if event.parent_block_hash is None else wire_hash(event.parent_block_hash)
            hashes, last = [wire_hash(digest) for digest in event.block_hashes], stored.get(event.group)
            if last is not None and last.block_hashes[-1] == parent:
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
                )
                wire.append(stored[event.group])
        elif isinstance(event, cache.BlockRemoved):
            stored.pop(event.group, None)
            hashes, before = [wire_hash(digest) for digest in event.block_hashes], wire[-1] if wire else None
            if isinstance(before, BlockRemoved) and before.group_idx == event.group:
                before.block_hashes += hashes
            else:
                wire.append(BlockRemoved(hashes, MEDIUM, event.group))
        elif isinstance(event, cache.AllBlocksCleared):
            stored.clear()
            if not (wire and isinstance(wire[-1], AllBlocksCleared)):  # the cache reports it for each group
                wire.append(AllBlocksCleared())
    return wire


def listens(endpoint: str) -> bool:
    """Whether events are published by listening at that endpoint, or by connecting to a subscriber that listens there.

    It is vLLM's rule, and 0.0.0.0 besides: an address with a wildcard or with "::" is listened at, and so is a path.
    """
    return endpoint.startswith("ipc://") or any(part in endpoint for part in ("*", "::", "//0.0.0.0:"))


class KVEventPublisher:
    """Publishes what happens to an engine's reusable blocks.

    `hear` and `observe` are the engine thread's and never wait: another thread encodes and sends what they take in. A
    batch that finds no room in the queue to that thread is dropped, and its number with it. For a subscriber that has
    MAX_OUTSTANDING batches to read, the next ones are dropped too, but can be asked for.
    """

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        """Open the sockets; nothing is sent before `start`.

        endpoint, replay: as ZeroMQ writes them, where to publish and where to take requests for old batches; None: no
        old batches are kept. topic: of all messages. Raises ConfigError where a socket cannot be opened there.
        """
        self._how = "published at" if listens(endpoint) else "sent to"
        self._topic = topic.encode(errors="surrogateescape")
        self._groups: Sequence[AnyGroup] = ()
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self._old: deque[tuple[int, bytes]] = deque(maxlen=MAX_REMEMBERED)  # numbers and batches, if they are kept
        try:
            self._pub = self._open("kv_events", zmq.PUB, endpoint, MAX_OUTSTANDING)
            if replay is not None:  # an answer has room for all batches and the end
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
        """A socket of that kind that keeps so many messages for each peer."""
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
        """Where events are published, with the port that was taken."""
        return self._pub.get_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        """Where old batches can be asked for, with the port that was taken."""
        return None if self._replay is None else self._replay.get_string(zmq.LAST_ENDPOINT)

    def start(self, engine: Engine) -> None:
        """Publish what happens in an engine from now on. Its blocks are to be empty, as subscribers take them to be."""
        self._groups = engine.scheduler.manager.groups
        engine.listen(self.hear)
        self._thread.start()

    def close(self) -> None:
        """Send what was heard and close the sockets. May be called before `start`."""
        self._closing.set()
        if self._thread.ident is None:
            self._context.destroy()
        else:
            self._thread.join(CLOSE_WITHIN)

    # ---------------------------------------------------------------------------------- called by the engine's thread

    def hear(self, event: CacheEvent) -> None:
        """Take in an event."""
        if isinstance(event, (cache.BlockStored, cache.BlockRemoved, cache.AllBlocksCleared)):
            self._heard.append(event)

    def observe(self, _: Step) -> None:
        """A step has ended: what was heard since the last one is a batch."""
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

    # ------------------------------------------------------------------------------------------------- its own thread

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
                except Exception:  # the next batches are as good as ever
                    log.exception("block events could not be published")
        finally:
            self._context.destroy()

    def _send(self, number: int, batch: bytes) -> None:
        """Publish a batch and remember it."""
        self._pub.send_multipart((self._topic, number.to_bytes(NUMBER_SIZE, "big"), batch))
        if self._replay is not None:
            self._old.append((number, batch))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the batches that one subscriber asked for. For one that does not take them they are dropped."""
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
