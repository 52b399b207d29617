"""The stream of cache events tells everything: from it alone the reference counts and all tables can be rebuilt."""

from collections import Counter, defaultdict

import pytest

from quire.cache import events
from quire.cache.events import CacheEvent
from quire.engine.engine import Engine
from tests.engine.fakes import fake_engine, request, run, siblings


class Replay:
    """Reference counts, owners and reusable blocks, as the events tell them."""

    def __init__(self) -> None:
        self.owned: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)  # group, request id -> blocks
        self.hosts: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
        self.cached: dict[int, dict[int, bytes]] = defaultdict(dict)  # group -> block -> digest
        self.seen: Counter[str] = Counter()

    def take(self, event: CacheEvent) -> None:
        self.seen[type(event).__name__] += 1
        match event:
            case events.BlocksAllocated() | events.BlocksShared() | events.BlocksForked():
                self.owned[event.group, event.request_id].update(event.blocks)
            case events.BlockCopied():
                self.owned[event.group, event.request_id].subtract([event.src])
                self.owned[event.group, event.request_id].update([event.dst])
            case events.BlocksFreed():
                self.owned[event.group, event.request_id].subtract(event.blocks)
            case events.BlocksSwappedOut():
                self.owned[event.group, event.request_id].subtract(event.blocks)
                self.hosts[event.group, event.request_id].update(event.host_blocks)
            case events.BlocksSwappedIn():
                self.owned[event.group, event.request_id].update(event.blocks)
                self.hosts[event.group, event.request_id].subtract(event.host_blocks)
            case events.HostBlocksFreed():
                self.hosts[event.group, event.request_id].subtract(event.host_blocks)
            case events.BlockStored():
                assert not self.cached[event.group].keys() & event.blocks
                self.cached[event.group].update(zip(event.blocks, event.block_hashes, strict=True))
            case events.BlockRemoved():
                assert [self.cached[event.group].pop(block) for block in event.blocks] == event.block_hashes
            case events.AllBlocksCleared():
                self.cached[event.group].clear()

    def check(self, engine: Engine) -> None:
        manager = engine.scheduler.manager
        for g, pool in enumerate(manager.pools):
            for owned, books in ((self.owned, pool), (self.hosts, manager.host_pools[g])):
                counts: Counter[int] = Counter()
                for (group, _), blocks in owned.items():
                    if group == g:
                        assert all(count >= 0 for count in blocks.values())
                        counts.update(blocks)
                assert [counts[block] for block in range(books.num_blocks)] == list(books.ref_counts)
            assert self.cached[g] == {b: cached.digest for b, cached in manager.indexes[g].by_block.items()}
        for r in engine.scheduler.running:
            for g in range(len(manager.groups)):
                assert +self.owned[g, r.id] == Counter(manager.owned(r, g))


def test_what_ends_on_the_host_gives_its_blocks_back_there() -> None:
    replay = Replay()
    engine = fake_engine(num_blocks=6, block_size=4, num_host_blocks=8)
    engine.listen(replay.take)
    for name in ("a", "b"):
        engine.add(request(name, [ord(name)] * 8, max_tokens=12))
    while not engine.scheduler.swapped:
        engine.step()
    assert sum(replay.hosts[0, "b"].values()) == 3
    engine.abort("b")
    engine.step()
    replay.check(engine)
    assert replay.seen["HostBlocksFreed"] == 1
    assert not +replay.hosts[0, "b"]


def test_a_listener_that_fails_is_let_go_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    kinds = [events.BlocksAllocated, events.BlocksShared, events.BlocksForked, events.BlockCopied, events.BlocksFreed,
             events.BlockStored, events.BlockRemoved]  # fmt: skip
    for kind in kinds:
        engine, replay, failed = fake_engine(num_blocks=9, block_size=4), Replay(), []

        def failing(event: events.CacheEvent, kind: type = kind, failed: list[object] = failed) -> None:
            if isinstance(event, kind):
                failed.append(event)
                raise RuntimeError("I am broken")

        engine.listen(failing)
        engine.listen(replay.take)
        for i in range(4):
            for r in siblings(f"r{i}", [1, 2, 3, 4, 5, i], 2, max_tokens=6):
                engine.add(r)
        results = run(engine)
        assert all(reason == "length" for _, reason in results.values())
        assert len(failed) == 1
        replay.check(engine)
    assert caplog.text.count("a listener failed") == len(kinds)


def test_a_stored_block_tells_its_tokens_its_hash_and_its_parents() -> None:
    engine = fake_engine(block_size=4)
    stored: list[events.BlockStored] = []
    engine.listen(lambda event: stored.append(event) if isinstance(event, events.BlockStored) else None)
    engine.add(request("r", list(range(9)), max_tokens=5))
    while engine.has_work:
        engine.step()
    first, *later = stored
    assert (first.token_ids, first.blocks, first.block_size) == ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1], 4)
    assert (first.request_id, first.parent_block_hash, len(first.block_hashes)) == ("r", None, 2)
    assert [event.parent_block_hash for event in later] == [first.block_hashes[-1]]
