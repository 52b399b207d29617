"""The stream of cache events tells everything: from it alone the reference counts and all tables can be rebuilt."""

import random
from collections import Counter, defaultdict

import pytest

from quire.cache import events
from quire.cache.events import CacheEvent
from quire.cache.manager import CacheGroup
from quire.engine.engine import Engine
from tests.engine.fakes import VOCAB, fake_engine, request, siblings

TWO = (CacheGroup((0,)), CacheGroup((1,), window=8))


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
                assert event.block not in self.cached[event.group]
                self.cached[event.group][event.block] = event.block_hash
            case events.BlockRemoved():
                assert self.cached[event.group].pop(event.block) == event.block_hash
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


@pytest.mark.parametrize("groups", [(CacheGroup((0,)),), TWO])
@pytest.mark.parametrize("seed", range(8))
def test_the_events_rebuild_the_books(seed: int, groups: tuple[CacheGroup, ...]) -> None:
    rng, replay = random.Random(seed), Replay()
    engine = fake_engine(num_blocks=20, groups=groups, num_host_blocks=rng.choice([6, 40]), max_num_batched_tokens=16)
    engine.listen(replay.take)
    stems = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(2)]
    for i in range(25):
        prompt = [*rng.choice(stems)[: rng.randint(1, 20)], i]
        for r in siblings(f"r{i}", prompt, 3, max_tokens=12) if i % 3 == 0 else [request(f"r{i}", prompt)]:
            engine.add(r)
    step = 0
    while engine.has_work:
        step += 1
        engine.runner.fail_next = step % 17 == 0
        if step % 13 == 0:
            engine.abort(rng.choice(sorted(engine.scheduler.requests)))
        if step == 40:
            engine.reset_prefix_cache()
        engine.step()
        replay.check(engine)
    expected = {"BlocksAllocated", "BlocksShared", "BlocksForked", "BlockCopied", "BlocksFreed", "BlocksSwappedOut",
                "BlocksSwappedIn", "BlockStored", "BlockRemoved", "AllBlocksCleared"}  # fmt: skip
    assert expected <= replay.seen.keys()
    assert not any(+blocks for blocks in (*replay.owned.values(), *replay.hosts.values()))


def test_a_stored_block_tells_its_tokens_its_hash_and_its_parents() -> None:
    engine = fake_engine(block_size=4)
    stored: list[events.BlockStored] = []
    engine.listen(lambda event: stored.append(event) if isinstance(event, events.BlockStored) else None)
    engine.add(request("r", list(range(9)), max_tokens=1))
    engine.step()
    assert [event.token_ids for event in stored] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stored[1].parent_block_hash == stored[0].block_hash
    assert [event.request_id for event in stored] == ["r", "r"]
    assert [event.block for event in stored] == [0, 1]
