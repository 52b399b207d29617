"""The inspector tells the truth: snapshot and records rebuild every table, whenever one begins to watch."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.request import urlopen

import pytest

from quire.cache.events import DiskBlockRemoved, DiskBlockStored
from quire.cache.groups import CacheGroup, RowGroup, StateGroup, StatePools
from quire.engine.engine import Engine
from quire.request import Event
from quire.server.http.api_error import ApiError
from quire.server.observability import event_log, inspector
from quire.server.observability.event_log import MAX_UNREPORTED, shorten
from quire.server.observability.inspector import MAX_WATCHERS, Watcher
from tests.engine.fakes import VOCAB, fake_engine, request, run, siblings
from tests.marks import quick
from tests.server.watching import Books, EngineOnAThread, Hub, Served, expand, load

ONE = (CacheGroup((0,)),)
TWO = (CacheGroup((0,)), CacheGroup((1,), window=8))
STATES = (CacheGroup((0,)), StateGroup((1,), piece=4), RowGroup((1,), piece=4))


@pytest.mark.parametrize("groups", [ONE, TWO, STATES])
@pytest.mark.parametrize("seed", quick(range(6), 1, 1))
def test_snapshot_and_records_rebuild_the_books(seed: int, groups: tuple[CacheGroup, ...]) -> None:
    """Under forks, copies, swaps, evictions, preemptions, failures and aborts, whenever one begins to watch."""
    rng = random.Random(seed)
    engine = fake_engine(
        num_blocks=20,
        groups=groups,
        num_host_blocks=rng.choice([0, 6, 40]),
        max_num_batched_tokens=16,
        state_pools=StatePools(17, 12, 8),
    )
    hub = Hub(engine)
    all_along, _ = hub.watch()
    load(engine, rng)
    watching = [all_along]
    step = 0
    while engine.has_work:
        step += 1
        engine.runner.fail_next = step % 17 == 0
        if step % 13 == 0:
            engine.abort(rng.choice(engine.scheduler.swapped or list(engine.scheduler.requests.values())).id)
        if step == 40:
            engine.reset_prefix_cache()
        hub.step()
        if step % 9 == 0:
            watching.append(hub.watch()[0])
        if rng.random() < 0.4:  # else several steps share a record
            hub.inspector.flush()
            for books in watching:
                books.check(engine)
    hub.inspector.flush()
    for books in watching:
        books.check(engine)
    assert all_along.requests == {}
    reasons = {e.request_id: e.finish_reason.value for e in hub.events if e.finish_reason}
    for name, story in all_along.stories.items():
        # A request that failed before its first step is known by its end alone.
        assert story[0] == "arrived" or story == ["ended"]
        assert story[-1] == "ended"
        assert story.count("ended") == story.count("arrived") or story == ["ended"]
        if reasons[name] == "length":
            assert [what for what in story if what in ("ran", "first_token")] == ["ran", "first_token"]
    assert reasons.keys() == all_along.stories.keys()
    expected = {"allocated", "shared", "forked", "copied", "freed", "stored", "evicted", "preempted", "resumed"}
    assert expected <= all_along.seen.keys()
    assert all_along.gauges["generated_tokens"] == sum(e.token is not None for e in hub.events)
    assert all_along.gauges["copies"] == all_along.seen["copied"]
    assert all_along.gauges["preemptions"] == engine.scheduler.num_preemptions


def test_swaps_are_told() -> None:
    engine = fake_engine(num_blocks=8, num_host_blocks=16)
    hub = Hub(engine)
    books, _ = hub.watch()
    for name in "abc":
        engine.add(request(name, [ord(name) % 7] * 8, max_tokens=14))
    while engine.has_work:
        hub.step()
        hub.inspector.flush()
        books.check(engine)
    assert {"swapped_out", "swapped_in"} <= books.seen.keys()
    assert any(story[-4:] == ["first_token", "preempted", "resumed", "ended"] for story in books.stories.values())
    assert books.gauges["swapped_out"] > 0


def test_the_story_reaches_back_before_anybody_watched() -> None:
    engine = fake_engine(num_blocks=40)
    hub = Hub(engine)
    engine.add(request("first", [1] * 10, max_tokens=3))
    while engine.has_work:
        hub.step()
    engine.add(request("second", [1] * 9 + [2, 3, 4, 5], max_tokens=3))
    hub.step()
    books, _ = hub.watch()
    shown = [
        (event[0], event[2:4]) for event in books.history if event[0] in ("arrived", "ran", "first_token", "ended")
    ]
    assert [what for what, _ in shown] == ["arrived", "ran", "first_token", "ended", "arrived", "ran", "first_token"]
    assert shown[0][1] == [0, "first"]
    [ended] = [event for event in books.history if event[0] == "ended"]
    assert ended[2:] == [0, "first", "length", 10, 3, None, 0, 0]
    [_, ran] = [event for event in books.history if event[0] == "ran"]
    report = engine.scheduler.requests["second"].cache.prefix_report
    assert ran[3] == {"cached": 8, "miss": "differs", "text": str(report), "differs": 9}
    assert "differs from token 9 on" in ran[3]["text"]
    assert [event[4] for event in books.history if event[0] == "shared"] == [[0, -2]]
    times = [event[1] for event in books.history]
    assert all(0 <= at < 60 for at in times)
    # The books of a watcher who reads on from there are complete.
    while engine.has_work:
        hub.step()
    hub.inspector.flush()
    books.check(engine)


def test_prompt_tokens_are_counted_where_they_are_computed() -> None:
    engine = fake_engine(num_blocks=40, max_num_batched_tokens=8)
    hub = Hub(engine)
    books, _ = hub.watch()
    for r in siblings("r", list(range(30)), 3, max_tokens=2):
        engine.add(r)
    counted = []
    while engine.has_work:
        hub.step()
        hub.inspector.flush()
        counted.append(books.gauges["prompt_tokens"])
    assert counted[:4] == [8, 16, 24, 30]
    assert counted[-1] == 30  # forks compute none
    engine.add(request("again", [*range(24), 99], max_tokens=2))
    while engine.has_work:
        hub.step()
    hub.inspector.flush()
    assert books.gauges["prompt_tokens"] == 31
    assert (books.gauges["asked_tokens"], books.gauges["cached_tokens"]) == (55, 24)


def test_no_token_and_no_prompt_is_ever_told() -> None:
    engine = fake_engine(num_blocks=30, num_host_blocks=8)
    engine.vocab_size = 10**9
    hub = Hub(engine)
    books, _ = hub.watch()
    secret = list(range(123_456_700, 123_456_740))
    for i in range(6):
        r = request(f"r{i}", [*secret[: 20 + i], 123_456_780 + i], max_tokens=6)
        r.cache_salt = "hush-hush"
        engine.add(r)
    while engine.has_work:
        hub.step()
        hub.inspector.flush()
    late, _ = hub.watch()
    for shown in (books.heard, late.heard):
        assert len(shown) > 2000
        assert b"1234567" not in shown
        assert b"hush" not in shown
        assert b"token_ids" not in shown
    digests = [cached.digest.hex() for cached in engine.scheduler.manager.indexes[0].by_block.values()]
    assert any(digest[:8].encode() in books.heard for digest in digests)
    assert not any(digest[:10].encode() in books.heard for digest in digests)


def test_an_error_is_named_but_not_quoted() -> None:
    engine = fake_engine()
    hub = Hub(engine)
    books, _ = hub.watch()
    engine.add(request("r", [1, 2, 3]))
    engine.runner.fail_next = True  # raises RuntimeError("injected")
    hub.step()
    hub.inspector.flush()
    assert b'"error",3,0,"RuntimeError",0,0]' in books.heard
    assert b"injected" not in books.heard


# ------------------------------------------------------------------------------------------------------ cost, bounds


def test_nothing_is_written_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> bytes:
        raise AssertionError("JSON was made though nobody watches")

    for module in (event_log, inspector):
        monkeypatch.setattr(module, "dumps", forbidden)
    monkeypatch.setattr(event_log, "shorten", forbidden)
    engine = fake_engine(num_blocks=20)
    hub = Hub(engine)
    load(engine, random.Random(0))
    while engine.has_work:
        hub.step()
    monkeypatch.undo()
    books, watcher = hub.watch()
    books.check(engine)
    hub.inspector.unsubscribe(watcher)
    engine.add(request("r", [1, 2, 3]))
    hub.step()
    hub.inspector.flush()
    assert books.kinds == ["snapshot"]


@pytest.mark.slow
def test_what_is_kept_is_bounded() -> None:
    """Also where nobody watches for long; and no request that has ended is kept alive."""
    engine = fake_engine(num_blocks=20)
    hub = Hub(engine)
    kept = hub.inspector._log
    rounds = 0
    while len(kept) < MAX_UNREPORTED:
        rounds += 1
        for i in range(8):
            engine.add(request(f"{rounds}-{i}", [rounds % VOCAB, i] * 20, max_tokens=2))
        while engine.has_work:
            hub.step()
    assert kept.requests == {}
    assert kept._silent == {}
    assert +kept._states == Counter()
    assert len(kept) == MAX_UNREPORTED
    books, _ = hub.watch()
    books.check(engine)
    assert hub.inspector._history_size <= inspector.MAX_HISTORY
    assert [event[0] for event in books.history[-2:]] == ["ended", "step"]


def test_steps_are_merged_into_at_most_one_record_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(inspector.time, "monotonic", lambda: now)
    engine = fake_engine(num_blocks=40)
    hub = Hub(engine)
    books, _ = hub.watch()
    engine.add(request("r", [1] * 6, max_tokens=20))
    hub.step()
    assert books.kinds == ["snapshot", "record"]
    for _ in range(7):
        hub.step()
    assert books.kinds == ["snapshot", "record"]
    assert hub.inspector.has_news
    now += inspector.INTERVAL
    hub.step()
    assert books.kinds == ["snapshot", "record", "record"]
    assert not hub.inspector.has_news
    books.check(engine)


def test_a_slow_watcher_is_given_a_snapshot_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "MAX_OUTSTANDING", 6000)
    engine = fake_engine(num_blocks=30)
    hub = Hub(engine)
    fast, _ = hub.watch()
    parts: deque[bytes] = deque()
    slow = Watcher(parts.append)
    hub.inspector.subscribe(slow)
    most = 0
    for turn in range(40):
        engine.add(request(f"r{turn}", [turn] * 9, max_tokens=3))
        while engine.has_work:
            hub.step()
            hub.inspector.flush()
            most = max(most, sum(map(len, parts)))
    assert len(fast.heard) > 5 * 6000
    assert most <= 6000
    assert slow.missed
    books = Books()
    while parts:  # he reads on, and then gets all books anew
        slow.num_taken += len(parts[0])
        books.hear(parts.popleft())
    hub.inspector.flush()
    assert not slow.missed
    books.hear(parts.popleft())
    assert books.kinds[-1] == "snapshot"
    assert len(parts) == 0
    books.check(engine)
    fast.check(engine)


def test_events_that_are_lost_are_made_up_for_by_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector.time, "monotonic", lambda: 0.0)
    engine = fake_engine(num_blocks=60, max_num_batched_tokens=200, max_model_len=200, block_size=1)
    hub = Hub(engine)
    hub.inspector._log._unreported = deque(maxlen=50)
    monkeypatch.setattr(inspector, "MAX_UNREPORTED", 50)
    books, _ = hub.watch()
    engine.add(request("r", list(range(55)), max_tokens=3))
    while engine.has_work:
        hub.step()
    hub.inspector.flush()
    assert "snapshot" in books.kinds[1:]
    books.check(engine)


def test_a_watcher_who_fails_harms_nobody() -> None:
    engine = fake_engine()
    hub = Hub(engine)

    def closed(part: bytes) -> None:
        raise RuntimeError("Event loop is closed")

    hub.inspector.subscribe(Watcher(closed))
    books, _ = hub.watch()
    engine.add(request("r", [1, 2, 3], max_tokens=2))
    while engine.has_work:
        hub.step()
    hub.inspector.flush()
    books.check(engine)
    assert len(hub.inspector._watchers) == 1


def test_so_many_may_watch_and_no_more() -> None:
    hub = Hub(fake_engine())
    watchers = [hub.watch()[1] for _ in range(MAX_WATCHERS)]
    with pytest.raises(ApiError, match="16 watch the blocks already"):
        hub.watch()
    hub.inspector.unsubscribe(watchers[3])
    hub.watch()


def test_runs_of_blocks_are_short() -> None:
    for blocks in ([], [0], [0, 1], [1, 0], [5, 6, 7, 9, 8, 7, 3, 3000, 3001], [4, 2, 0], list(range(999, -1, -1))):
        assert expand(shorten(blocks)) == blocks
        assert len(shorten(blocks)) <= len(blocks)
    assert shorten(range(100_000)) == [0, -199_998]
    rng = random.Random(1)
    for _ in range(200):
        blocks = rng.sample(range(12), rng.randint(0, 12))
        assert expand(shorten(blocks)) == blocks


@pytest.mark.slow
def test_100_000_blocks_make_a_small_snapshot() -> None:
    engine = fake_engine(num_blocks=100_000, block_size=1, max_model_len=16_384, max_num_batched_tokens=16_384)
    hub = Hub(engine)
    for i in range(8):
        for r in siblings(f"r{i}", [i] * 8000, 2, max_tokens=4):
            engine.add(r)
    hub.step()
    hub.step()
    books, _ = hub.watch()
    assert sum(len(r["tables"][0]) for r in books.requests.values()) > 16_000
    assert len(books.heard) < 200_000
    books.check(engine)


# ------------------------------------------------------------------------------------------------------------ HTTP


@contextlib.contextmanager
def served(engine: Engine) -> Iterator[Served]:
    server = Served(EngineOnAThread(engine))
    try:
        yield server
    finally:
        server.stop()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def parts(stream: Iterable[bytes]) -> Iterator[bytes]:
    """The events of a stream."""
    pending: list[bytes] = []
    for line in stream:
        pending.append(line)
        if line == b"\n":
            yield b"".join(pending)
            pending.clear()


def test_the_page_is_one_file_that_loads_nothing_from_elsewhere() -> None:
    with served(fake_engine()) as server:
        with urlopen(server.url) as page:
            policy, text = page.headers["content-security-policy"], page.read().decode()
            assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert policy.count("sha256-") == text.count("</script>") + text.count("</style>")
        assert not re.findall(
            r"""\b(?:src|href|srcset|action)=(?!"data:|"./")|@import|url\(|https?://(?!www.w3.org/2000/svg)""", text
        )
        assert not [path for path in server.schema["paths"] if "inspector" in path]


def test_a_stream_is_read_to_the_last_event_and_ends_when_the_inspector_closes() -> None:
    with served(fake_engine(num_blocks=40)) as server, urlopen(f"{server.url}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        books, shown = Books(), parts(stream)
        books.hear(next(shown))
        worker = server.worker
        worker.do(lambda: [worker.engine.add(r) for r in siblings("r", [1] * 20, 4, max_tokens=9)])
        worker.finish()
        while books.requests or "ended" not in books.seen:  # the last steps come, though no step follows them
            books.hear(next(shown))
        books.check(worker.engine)
        worker.hub.inspector.close()
        assert list(shown) == []
        assert urlopen(f"{server.url}/events").read().count(b"snapshot") == 1


def test_readers_who_leave_are_forgotten_and_a_shutdown_waits_for_nobody() -> None:
    with served(fake_engine()) as server:
        watched = server.worker.hub.inspector
        for _ in range(3):
            with urlopen(f"{server.url}/events") as stream:
                stream.readline()
        until(lambda: server.worker.do(watched.flush) or watched._watchers == [])
        with urlopen(f"{server.url}/events") as stream:
            server.stop()
            assert stream.read().endswith(b"]}\n\n")  # whole, and ended as it should


def test_silence_is_broken_by_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "HEARTBEAT", 0.02)
    monkeypatch.setattr(inspector, "PATIENCE", 0.02)
    with served(fake_engine()) as server, urlopen(f"{server.url}/events") as stream:
        assert next(line for line in stream if line.startswith(b":")) == b": still here\n"


@pytest.mark.slow
def test_a_reader_who_does_not_read_does_not_make_the_server_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "MAX_OUTSTANDING", 200_000)
    engine = fake_engine(num_blocks=2000, block_size=1, max_num_batched_tokens=200)
    with served(engine) as server, urlopen(f"{server.url}/events") as stream:
        worker = server.worker
        [watcher] = worker.hub.inspector._watchers
        most = 0

        def burst() -> None:
            nonlocal most
            for i in range(16):
                name = f"{time.monotonic_ns()}-{i}" + "x" * 2000  # what is told has to be large
                engine.add(request(name, [i % VOCAB, time.monotonic_ns() % VOCAB], max_tokens=1))
            while engine.has_work:
                worker.hub.step()
                worker.hub.inspector.flush()
            most = max(most, watcher.num_delivered - watcher.num_taken)

        for _ in range(400):
            worker.do(burst)
            if watcher.missed:
                break
        assert watcher.missed
        assert most <= 200_000
        books, shown = Books(), parts(stream)
        while books.kinds.count("snapshot") < 2:
            books.hear(next(shown))
        books.check(engine)


@pytest.mark.slow
def test_it_watches_real_runs_to_their_end() -> None:
    """Every request that `run` serves, audited after each step, is told to its end."""
    engine = fake_engine(num_blocks=24, num_host_blocks=8)
    hub = Hub(engine)
    books, _ = hub.watch()
    engine_step = engine.step

    def step() -> Sequence[Event]:
        events = engine_step()
        hub.inspector.observe(events)
        return events

    engine.step = step  # type: ignore[method-assign,assignment]
    load(engine, random.Random(5))
    results = run(engine)
    hub.inspector.flush()
    books.check(engine)
    assert books.stories.keys() == results.keys()


def test_steps_say_what_they_computed_and_why_somebody_waits() -> None:
    engine = fake_engine(num_blocks=8, max_num_batched_tokens=8, max_model_len=32)
    hub = Hub(engine)
    books, _ = hub.watch()
    engine.add(request("long", [1] * 13, max_tokens=6))
    engine.add(request("next", [2] * 20, max_tokens=2))
    hub.step()  # "long" takes the whole budget
    hub.step()  # its other 5 tokens, and nothing that "next" would need fits beside it
    hub.step()
    hub.inspector.flush()
    assert [step[1] for step in books.steps] == [1, 2, 3]
    computed = [(prompt, decoded, pieces) for _, _, _, prompt, decoded, _, _, pieces in books.steps]
    assert computed == [(8, 0, [[0, 0, 8]]), (5, 0, [[0, 8, 5]]), (0, 1, [])]
    assert [(waiting, hold) for *_, waiting, hold, _ in books.steps] == [(1, "budget"), (1, "blocks"), (1, "blocks")]
    assert all(seconds >= 0 for _, _, seconds, *_ in books.steps)
    while engine.has_work:
        hub.step()
    hub.inspector.flush()
    assert sum(step[3] for step in books.steps) == 33
    assert books.steps[-1][5:7] == [0, None]

    engine.scheduler.max_num_seqs = 1
    for name in "ab":
        engine.add(request(name, [ord(name) % 7] * 5, max_tokens=2))
    hub.step()
    hub.inspector.flush()
    assert books.steps[-1][5:7] == [1, "slots"]


@pytest.mark.slow
def test_a_request_swapped_out_is_what_the_others_wait_for() -> None:
    engine = fake_engine(num_blocks=8, num_host_blocks=16)
    hub = Hub(engine)
    books, _ = hub.watch()
    for name in "abc":
        engine.add(request(name, [ord(name) % 7] * 8, max_tokens=14))
    while engine.has_work:
        hub.step()
    hub.inspector.flush()
    assert "swapped" in {step[6] for step in books.steps}


def test_siblings_have_one_number_and_blocks_know_what_stands_before_them() -> None:
    engine = fake_engine(num_blocks=40)
    hub = Hub(engine)
    books, _ = hub.watch()
    engine.add(request("alone", [9] * 5, max_tokens=2))
    for r in siblings("s", list(range(13)), 3, max_tokens=3):
        engine.add(r)
    hub.step()
    hub.inspector.flush()
    assert [r["family"] for r in books.requests.values()] == [0, 1, 1, 1]
    while engine.has_work:
        hub.step()
    hub.inspector.flush()
    late, _ = hub.watch()
    first = engine.scheduler.manager.indexes[0]
    chain = [block for block in late.cached[0] if late.before[0][block]]
    assert {late.before[0][block] - 1 for block in chain} <= late.cached[0]
    assert late.before == books.before
    assert all(first.block_before(block) == late.before[0][block] - 1 for block in chain)
    assert len(chain) >= 2


def test_what_goes_to_the_disk_changes_no_pool() -> None:
    engine = fake_engine(num_blocks=20)
    hub = Hub(engine)
    books, _ = hub.watch()
    engine.add(request("r", [1] * 9, max_tokens=20))
    hub.step()
    digest = bytes(16)
    for kind in (DiskBlockStored, DiskBlockRemoved):
        for listener in engine.scheduler.manager.listeners:
            listener(kind(engine.scheduler.clock(), 0, [digest]))
    hub.step()
    hub.inspector.flush()
    books.check(engine)
    assert "cleared" not in books.seen
