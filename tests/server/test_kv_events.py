"""Block events in vLLM's wire form, read as a router's subscriber reads them."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache import events as cache
from quire.cache.events import CacheEvent
from quire.cache.groups import CacheGroup, RowGroup, StateGroup
from quire.cache.manager import BlockManager
from quire.errors import ConfigError, QuireError
from quire.frontend.jobs import EngineStep
from quire.server.observability import kv_events
from quire.server.observability.kv_events import END, KVEventPublisher, listens, wire_events, wire_hash
from quire.server.run import build_parts, open_publisher
from quire.server.server_config import ServerConfig
from tests.cache.machine import machine
from tests.engine.fakes import fake_engine
from tests.forks import Spawner
from tests.server.serving import Serving, serving
from tests.server.test_serve_command import failing, post, running

ANYWHERE = "tcp://127.0.0.1:*"
COMPLETIONS = "/v1/completions"
PATIENCE = 20_000  # milliseconds
NOTHING = EngineStep((), (), (), 0.0, 0.0)  # a step that brought no text
QUIET = 300  # milliseconds without a message

# ------------------------------------------------------------------- what a subscriber declares, as vLLM's example does


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Index:
    """What a router knows of one engine: of each group, the tokens of each block by its hash."""

    def __init__(self) -> None:
        self.blocks: dict[int | None, dict[bytes | int, list[int]]] = {}
        self.known: set[tuple[int | None, bytes | int]] = set()  # all that was ever stored

    def take(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                blocks, size = self.blocks.setdefault(event.group_idx, {}), event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                assert len({event.parent_block_hash, *event.block_hashes}) == len(event.block_hashes) + 1
                # The blocks before a state are those of attention.
                if event.parent_block_hash is not None and event.kv_cache_spec_kind != "mamba":
                    assert (event.group_idx, event.parent_block_hash) in self.known
                for i, each in enumerate(event.block_hashes):
                    assert each not in blocks
                    blocks[each] = event.token_ids[i * size : (i + 1) * size]
                    self.known.add((event.group_idx, each))
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    del self.blocks[event.group_idx][each]
            else:
                self.blocks.clear()


class Subscriber:
    """A SUB socket, and requests for what it missed."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "", most: int = 100_000) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.set_hwm(most)
        self.sub.rcvbuf = 4096 if most == 1 else -1
        self.sub.subscribe(topic)
        if listens(endpoint):
            self.sub.bind(endpoint)
        else:
            self.sub.connect(endpoint)
        self.replay = replay

    def receive(self, patience: int = PATIENCE) -> tuple[bytes, int, KVEventBatch] | None:
        """Topic, number and batch of the next message; None: none came in so many milliseconds."""
        if not self.sub.poll(patience):
            return None
        topic, number, payload = self.sub.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), DECODER.decode(payload)

    def all(self, patience: int = PATIENCE) -> list[tuple[int, KVEventBatch]]:
        """Numbers and batches, until none comes any more."""
        received, found = [], self.receive(patience)
        while found is not None:
            received.append(found[1:])
            found = self.receive(QUIET)
        return received

    def again(self, first: int, topic: bytes = b"") -> list[tuple[int, KVEventBatch]]:
        """The batches from that number on."""
        assert self.replay is not None
        with self.context.socket(zmq.DEALER) as dealer:
            dealer.set_hwm(100_000)
            dealer.linger = 0
            dealer.connect(self.replay)
            dealer.send_multipart((b"", first.to_bytes(8, "big")))
            received = []
            while True:
                assert dealer.poll(PATIENCE)
                empty, told, number, payload = dealer.recv_multipart()
                assert empty == b""
                if number == END:
                    assert (told, payload) == (b"", b"")
                    return received
                assert told == topic
                received.append((int.from_bytes(number, "big"), DECODER.decode(payload)))

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def subscribed(publisher: KVEventPublisher, topic: str = "", most: int = 100_000) -> Iterator[Subscriber]:
    made = Subscriber(publisher.endpoint, publisher.replay_endpoint, topic, most)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def opened(endpoint: str, replay: str | None = None) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(endpoint, replay)
    try:
        yield publisher
    finally:
        publisher.close()


def clear(publisher: KVEventPublisher) -> None:
    """Publish a small batch."""
    publisher.hear(cache.AllBlocksCleared(0.0, 0))
    publisher.observe(NOTHING)


def joined(router: Subscriber, publish: Callable[[], object]) -> int:
    """Publish small batches until the publisher has heard of the subscriber. Returns the number of the next batch."""
    while True:
        publish()
        if received := router.all(QUIET):
            return received[-1][0] + 1


@contextmanager
def publishing(
    replay: str | None = ANYWHERE, topic: str = "", **options: Any
) -> Iterator[tuple[Serving, KVEventPublisher]]:
    """A server that publishes its block events."""
    config = {"kv_events": ANYWHERE, "kv_events_replay": replay, "kv_events_topic": topic}
    with serving(options, **config) as server:
        assert server.publisher is not None
        yield server, server.publisher


def num_batches(server: Serving, publisher: KVEventPublisher) -> int:
    """Batches that the steps so far made. It is asked between two steps, so none is missing."""
    return server.on_engine(lambda: publisher._number)


def cached(server: Serving) -> dict[int | None, dict[bytes | int, list[int]]]:
    """The engine's own index, as `Index` has it."""

    def look() -> dict[int | None, dict[bytes | int, list[int]]]:
        return of_manager(server.service.engine_client.engine.scheduler.manager)

    return server.on_engine(look)


def of_manager(manager: BlockManager) -> dict[int | None, dict[bytes | int, list[int]]]:
    return {
        g: {wire_hash(each.digest): array("i", each.tokens).tolist() for each in index.by_block.values()}
        for g, index in enumerate(manager.indexes)
        if index.by_block
    }


def follow(subscriber: Subscriber, index: Index, next_one: int, end: int) -> int:
    """Take in the messages up to that number; those that are missing are asked for. Returns how many were missing."""
    missed = 0
    while next_one < end:
        found = subscriber.receive(QUIET)
        number = end if found is None else found[1]
        if number > next_one:
            for again, batch in subscriber.again(next_one):
                if again < number:
                    assert again == next_one
                    index.take(batch)
                    next_one, missed = next_one + 1, missed + 1
        if found is not None and number == next_one:
            index.take(found[2])
            next_one += 1
    return missed


# ------------------------------------------------------------------------------------------------------- a real server

TEXTS = [f"# the {word} of {other}\n" * 6 for word in ("queue", "stack", "tree") for other in ("one", "two", "few")]
FEW_BLOCKS = {"num_blocks": 40, "max_model_len": 320, "max_num_seqs": 4}


@pytest.mark.slow
def test_a_subscriber_knows_what_the_engine_has() -> None:
    with publishing(**FEW_BLOCKS) as (server, publisher), subscribed(publisher) as router:
        index = Index()

        def ask(**body: Any) -> None:
            assert server.post(COMPLETIONS, **{"max_tokens": 40, "ignore_eos": True, "seed": 1} | body).status == 200

        ask(prompt=TEXTS)
        ask(prompt=TEXTS[0], n=3, temperature=1.0)
        end = num_batches(server, publisher)
        follow(router, index, 0, end)
        assert index.blocks == cached(server)
        assert len(index.known) > FEW_BLOCKS["num_blocks"] >= len(index.blocks[0]) > 0  # so some were evicted

        server.on_engine(server.service.engine_client.engine.reset_prefix_cache)
        ask(prompt=TEXTS[3])
        ask(prompt=TEXTS[3], cache_salt="mine")
        follow(router, index, end, num_batches(server, publisher))
        assert index.blocks == cached(server)
        tokens = list(index.blocks[0].values())
        assert all(tokens.count(each) == 2 for each in tokens)  # under another salt they are other blocks


def test_the_bytes_are_those_of_vllm() -> None:
    """As a server of vLLM 0.26 was seen to send them."""
    with publishing(topic="kv@host@model", replay=None) as (server, publisher), subscribed(publisher, "kv@") as router:
        first = joined(router, lambda: server.on_engine(lambda: clear(publisher)))
        server.post(COMPLETIONS, prompt=list(range(5, 41)), max_tokens=1)
        assert router.sub.poll(PATIENCE)
        topic, number, payload = router.sub.recv_multipart()
        assert (topic, number) == (b"kv@host@model", bytes(7) + bytes([first]))
        found = msgspec.msgpack.decode(payload)
        manager = server.service.engine_client.engine.scheduler.manager
        hashes = [int.from_bytes(each.digest[8:], "big") for each in manager.indexes[0].by_block.values()]
        assert isinstance(found[0], float)
        assert found[1:] == [
            [
                {
                    "type": "BlockStored",
                    "block_hashes": hashes,
                    "parent_block_hash": None,
                    "token_ids": list(range(5, 37)),
                    "block_size": 16,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            ],
            0,
        ]
        assert list(found[1][0]) == ["type", *BlockStored.__struct_fields__[:7], "group_idx", "kv_cache_spec_kind"]


@pytest.mark.slow
def test_a_step_is_a_batch_and_one_without_events_is_none() -> None:
    with publishing() as (server, publisher), subscribed(publisher) as router:
        server.post(COMPLETIONS, prompt=list(range(5, 105)), max_tokens=30, ignore_eos=True)  # at 112 and 128 tokens
        assert num_batches(server, publisher) == 3
        wait_for(router, [0, 1, 2])
        events = [batch.events for _, batch in router.again(0)]
        assert [[len(event.block_hashes) for event in each] for each in events] == [[6], [1], [1]]


# ------------------------------------------------------------------------------------------- what was missed, the end


@pytest.mark.slow
def test_what_was_missed_is_given_again_from_any_number_on() -> None:
    with publishing(topic="blocks") as (server, publisher):
        for text in TEXTS:
            server.post(COMPLETIONS, prompt=text, max_tokens=20, ignore_eos=True)
        end = num_batches(server, publisher)
        with subscribed(publisher, "blocks") as router:  # it comes late
            index = Index()
            while len(received := router.again(0, b"blocks")) < end:
                pass
            for _, batch in received:
                index.take(batch)
            assert index.blocks == cached(server)
            assert [number for number, _ in received] == list(range(end))
            assert [number for number, _ in router.again(end - 2, b"blocks")] == [end - 2, end - 1]
            assert router.again(end, b"blocks") == []
            with router.context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                dealer.connect(publisher.replay_endpoint)
                for wrong in ([bytes(8)], [b"", b"1"], [b"x", bytes(8)], [b"", bytes(8), b""]):
                    dealer.send_multipart(wrong)
                dealer.send_multipart((b"", (end - 1).to_bytes(8, "big")))  # only this one is answered
                assert dealer.poll(PATIENCE)
                assert int.from_bytes(dealer.recv_multipart()[2], "big") == end - 1
                assert dealer.poll(PATIENCE)
                assert dealer.recv_multipart() == [b"", b"", END, b""]
                assert not dealer.poll(QUIET)


@pytest.mark.slow
def test_a_subscriber_that_reads_nothing_stops_neither_the_engine_nor_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "MAX_OUTSTANDING", 5)
    large = stored(0, [bytes(16)] * 15_000, None)  # so large that the system's buffers hold few of them

    with publishing() as (server, publisher), subscribed(publisher, most=1) as slow, subscribed(publisher) as router:

        def publish() -> None:
            publisher.hear(large)
            publisher.observe(NOTHING)

        first = joined(router, lambda: server.on_engine(lambda: clear(publisher)))
        wanted = list(range(first, first + 150))
        for number in wanted:
            server.on_engine(publish)
            found = router.receive()
            assert found is not None
            assert found[1] == number
        assert server.post(COMPLETIONS, prompt="import os\n", max_tokens=2).status == 200
        numbers = [number for number, _ in slow.all() if number in wanted]
        assert 0 < len(numbers) < 150
        again = [number for number, _ in slow.again(min({*wanted} - {*numbers}))]
        assert sorted({*numbers, *again}) == wanted


def wait_for(router: Subscriber, numbers: list[int]) -> None:
    """Until just these batches can be had again."""
    while [number for number, _ in router.again(0)] != numbers:
        pass


def test_batches_that_find_no_room_leave_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_QUEUED", 2)
    engine = fake_engine()
    with opened(ANYWHERE, ANYWHERE) as publisher, subscribed(publisher) as router:
        for _ in range(4):  # nothing takes them yet
            clear(publisher)
        publisher.observe(NOTHING)  # nothing was heard
        publisher.start(engine)
        wait_for(router, [0, 1])
        engine.reset_prefix_cache()
        publisher.observe(NOTHING)
        wait_for(router, [0, 1, 4])


def test_only_so_many_batches_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_REMEMBERED", 3)
    with opened(ANYWHERE, ANYWHERE) as publisher, subscribed(publisher) as router:
        publisher.start(fake_engine())
        for _ in range(10):
            clear(publisher)
        wait_for(router, [7, 8, 9])


def test_the_last_batch_is_sent_and_the_endpoints_are_free_again() -> None:
    with opened(ANYWHERE, ANYWHERE) as publisher, subscribed(publisher) as router:
        endpoint, replay = "tcp://*:" + publisher.endpoint.rpartition(":")[2], publisher.replay_endpoint
        assert str(publisher) == f"published at {publisher.endpoint}, and again at {replay}"
        publisher.start(fake_engine())
        last = joined(router, lambda: clear(publisher))
        clear(publisher)
        publisher.close()
        assert [number for number, _ in router.all()] == [last]
        assert not publisher._thread.is_alive()
        clear(publisher)  # by a step that was not waited for
    for _ in range(2):
        with opened(endpoint, replay):  # closed without a start
            pass


def test_a_router_that_listens_is_connected_to() -> None:
    router = Subscriber(ANYWHERE)
    try:
        with opened(router.sub.last_endpoint.decode()) as publisher:
            assert str(publisher) == f"sent to {publisher.endpoint}"
            publisher.start(fake_engine())
            assert joined(router, lambda: clear(publisher)) > 0
    finally:
        router.close()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://127.0.0.1:*", True),
        ("ipc:///run/quire/events", True),
        ("tcp://router:5557", False),
        ("tcp://10.0.0.0:5557", False),
    ],
)
def test_where_the_server_listens(endpoint: str, expected: bool) -> None:
    assert listens(endpoint) is expected


# ---------------------------------------------------------------------------------------------- several cache groups


@pytest.mark.slow
@settings(deadline=None)
@given(seed=st.integers(0, 2**20), sizes=st.lists(st.integers(1, 60), max_size=12))
def test_any_cut_into_batches_tells_what_the_manager_has(seed: int, sizes: list[int]) -> None:
    state, rng, heard = machine(seed), random.Random(seed), []
    manager, index = state.manager, Index()
    manager.listeners.append(heard.append)
    for size in sizes:
        for _ in range(size):
            state.step(rng)
        if rng.random() < 0.1:
            manager.reset_prefix_cache()
        index.take(sent(heard, manager.groups))
        heard.clear()
        assert {group: blocks for group, blocks in index.blocks.items() if blocks} == of_manager(manager)


def sent(events: Sequence[CacheEvent], groups: Sequence[CacheGroup]) -> KVEventBatch:
    """A batch as a subscriber gets it."""
    return DECODER.decode(msgspec.msgpack.encode(kv_events.KVEventBatch(0.0, wire_events(events, groups), 0)))


def stored(group: int, digests: list[bytes], parent: bytes | None) -> cache.BlockStored:
    return cache.BlockStored(0.0, group, "r", [0] * len(digests), digests, parent, [7] * 2 * len(digests), 2)


def test_a_state_is_one_event_with_the_block_that_it_ends_with() -> None:
    a, b = bytes([1]) * 16, bytes([2]) * 16
    groups = [CacheGroup((0,)), StateGroup((1,), 4), RowGroup((1,), 4)]
    found = sent([stored(0, [a], None), stored(0, [b], a), stored(1, [b], a)], groups).events
    assert [(event.group_idx, event.kv_cache_spec_kind, event.block_hashes) for event in found] == [
        (0, "full_attention", [wire_hash(a), wire_hash(b)]),
        (1, "mamba", [wire_hash(b)]),
    ]
    assert found[1].parent_block_hash == wire_hash(a)


def test_images_are_extra_keys_of_their_blocks() -> None:
    a, b, c, d = (bytes([each]) * 16 for each in range(1, 5))
    image, other = ("ab" * 32, 1), ("cd" * 32, -1)
    events = [stored(0, [a], None), stored(0, [b], a), stored(0, [c], b), stored(0, [d], c)]
    events[1].images, events[2].images = [[image]], [[other, image]]
    [found] = sent(events, [CacheGroup((0,))]).events
    assert found.extra_keys == [None, ([*image],), ([*other], [*image]), None]
    assert len(found.block_hashes) == 4
    [found] = sent(events[:1] + events[3:], [CacheGroup((0,))]).events[:1]
    assert found.extra_keys is None


def test_groups_are_told_apart_and_runs_of_each_are_one_event() -> None:
    a, b, c, d = (bytes([each]) * 16 for each in range(1, 5))
    events: list[CacheEvent] = [
        stored(0, [a], None),
        stored(1, [a], None),
        cache.BlocksAllocated(0.0, 0, "r", [3]),
        stored(0, [b], a),
        stored(1, [b], a),
        cache.BlockRemoved(0.0, 1, [0], [a], evicted=True),
        cache.BlockRemoved(0.0, 1, [1], [b], evicted=False),
        cache.BlockRemoved(0.0, 0, [1], [b], evicted=True),
        stored(0, [b], a),  # anew: it is no part of the event above
        stored(0, [c], b),
        stored(0, [d], b),  # another one after the same
        cache.AllBlocksCleared(0.0, 0),
        cache.AllBlocksCleared(0.0, 1),
    ]
    found = sent(events, [CacheGroup((0,)), CacheGroup((1,), window=9)]).events
    wire = [wire_hash(each) for each in (a, b, c, d)]
    shown = [
        (event.group_idx, event.block_hashes, event.parent_block_hash)
        if isinstance(event, BlockStored)
        else (event.group_idx, event.block_hashes)
        if isinstance(event, BlockRemoved)
        else ()
        for event in found
    ]
    assert shown == [
        (0, wire[:2], None),
        (1, wire[:2], None),
        (1, wire[:2]),
        (0, [wire[1]]),
        (0, wire[1:3], wire[0]),
        (0, [wire[3]], wire[1]),
        (),
    ]
    kinds = [(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in found[:2]]  # type: ignore[union-attr]
    assert kinds == [("full_attention", None), ("sliding_window", 9)]
    assert all(event.medium == "GPU" for event in found[:-1])  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_events": "5557"}, "kv_events is '5557'; it must be tcp://HOST:PORT, with a port in 1..65535"),
        ({"kv_events": "inproc://events"}, "must be tcp"),
        ({"kv_events": "tcp://*"}, "kv_events is 'tcp://*'; it must be"),
        ({"kv_events": "tcp://:5557"}, "it must be"),
        ({"kv_events": "tcp://*:0"}, "it must be"),
        ({"kv_events": "tcp://*:70000"}, "it must be"),  # ZeroMQ would listen at 4464
        ({"kv_events": "tcp://no host:5557"}, "it must be"),
        ({"kv_events": ANYWHERE, "kv_events_replay": "udp://*:5558"}, "kv_events_replay is 'udp://*:5558'; it must be"),
        ({"kv_events_replay": ANYWHERE}, "kv_events_replay is 'tcp://127.0.0.1:*'; it goes with kv_events"),
        ({"kv_events_topic": "kv"}, "kv_events_topic is 'kv'; it goes with kv_events"),
        (
            {"kv_events": "tcp://no_such_interface*:5557"},
            "kv_events is 'tcp://no_such_interface*:5557': No such device;",
        ),
        ({"kv_events": "ipc:///no/such/directory/events"}, "No such file"),
        ({"kv_events": ANYWHERE, "kv_events_replay": "tcp://192.0.2.1:5558"}, "kv_events_replay is 'tcp://192.0.2.1"),
    ],
)
def test_what_cannot_be_is_told_before_a_model_is_loaded(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_publisher({}, ServerConfig(**options))  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_an_endpoint_that_is_taken_is_told() -> None:
    with opened(ANYWHERE) as publisher, pytest.raises(ConfigError, match="Address already in use"):
        KVEventPublisher("tcp://*:" + publisher.endpoint.rpartition(":")[2])


def test_an_endpoint_is_free_again_where_no_model_could_be_loaded() -> None:
    with opened(ANYWHERE) as publisher:
        endpoint = "tcp://*:" + publisher.endpoint.rpartition(":")[2]
    with pytest.raises(QuireError, match="/no/such/model"):
        build_parts({"model": "/no/such/model"}, ServerConfig(kv_events=endpoint))
    with opened(endpoint):
        pass


def test_without_a_prefix_cache_there_is_nothing_to_publish() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is False"):
        open_publisher({"enable_prefix_caching": False}, ServerConfig(kv_events=ANYWHERE))
    assert open_publisher({"enable_prefix_caching": False}, ServerConfig()) is None


@pytest.mark.parametrize("name", ["msgspec", "zmq"])
def test_a_missing_package_is_told_with_the_extra_that_brings_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, kv_events.__name__)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"needs the package {name}: pip install 'quire\[events\]'"):
        open_publisher({}, ServerConfig(kv_events=ANYWHERE))


@pytest.mark.slow
def test_the_command_says_where_and_publishes(forks: Spawner) -> None:
    with running(forks, "--kv-events", ANYWHERE, "--kv-events-replay", ANYWHERE, "--num-blocks", "100") as server:
        found = server.said(r"^  events   published at (tcp://\S+), and again at (tcp://\S+)\n")
        router = Subscriber(found[1], found[2])
        try:
            post(server, prompt=TEXTS[0], max_tokens=1)
            while not (batches := router.again(0)):
                pass
            assert batches[0][0] == 0
            assert isinstance(batches[0][1].events[0], BlockStored)
        finally:
            router.close()
    assert "kv_events is 'x'" in failing(forks, "--kv-events", "x")
