"""What a disk gives back is, bit for bit, what was computed; whatever happens to its files costs time and no token."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from array import array
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.cache import incoming
from quire.cache.disk import store as files
from quire.cache.disk.store import LOG, DiskStore
from quire.cache.disk.tier import DiskTier
from quire.cache.incoming import THREADS, Arrivals, Name, Read
from quire.engine.engine import Engine
from quire.engine.prefetch import Prefetch
from quire.engine.runner import Runner
from quire.errors import ConfigError
from quire.fingerprint import components
from quire.frontend import disk_cache as kv_disk
from quire.models import EMBEDDED
from quire.ops import native
from quire.request import Request
from tests.engine.test_cache_bits import BATCH, FEW, SHAPES, Bits, asked, bits, built, expected, model
from tests.forks import Spawner
from tests.marks import of_long_runs, quick

assert model  # the fixture
pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")
SECRET = b"s" * 32


def with_disk(
    engine: Engine, directory: Path, slots: int, threads: bool = True, seconds_a_token: float = 1.0
) -> DiskTier:
    """Give an engine a disk with so many slots for each group, that reads whatever is there."""
    assert isinstance(engine.runner, Runner)
    manager = engine.scheduler.manager
    memory = kv_disk.block_memory(engine.runner, manager)
    widths = memory.widths()
    directory.mkdir(exist_ok=True)
    prefetch = engine.scheduler.prefetch = Prefetch(manager, Arrivals(), seconds_a_token)
    store = DiskStore(directory, SECRET, widths, [slots] * len(widths))
    manager.memory = memory
    manager.disk = tier = DiskTier(store, memory, prefetch.arrivals)
    prefetch.sources.append(tier.reader)
    if threads:
        tier.start()
    return tier


def forget(engine: Engine) -> None:
    """As a restart does: nothing is in memory."""
    manager = engine.scheduler.manager
    disk, manager.disk = manager.disk, None
    manager.reset_prefix_cache()
    manager.disk = disk


def written(directory: Path, seconds_a_token: float = 1.0) -> tuple[Engine, DiskTier, Bits]:
    """An engine of the embedded model that has answered a request, whose blocks are on the disk alone; its answer.

    The tier has no threads.
    """
    engine = built(EMBEDDED, num_blocks=200, block_size=4)
    tier = with_disk(engine, directory, 100, threads=False, seconds_a_token=seconds_a_token)
    wanted = bits(engine, requests(1))
    while tier.write_next():
        pass
    forget(engine)
    return engine, tier, wanted


def step(engine: Engine, found: Bits) -> None:
    """One step, whose tokens and logprobs go into what was found."""
    for event in engine.step():
        assert event.logprobs is not None
        found[event.request_id].append((event.logprobs.token, event.logprobs.logprob, event.logprobs.top))
    engine.scheduler.audit()


def requests(count: int) -> list[Request]:
    return [request for members in asked(count) for request in members]


@pytest.mark.slow
@pytest.mark.parametrize("model", [name if name in FEW[::3] else of_long_runs(name) for name in SHAPES], indirect=True)
def test_the_same_bits(model: tuple[Path | torch.dtype, str], tmp_path: Path, long: bool) -> None:
    """Cold, warm, after a restart, preempted, and with a disk that is too small."""
    directory, kv_dtype = model
    count = BATCH if long else 7
    options = {"kv_cache_dtype": kv_dtype, "block_size": 4, "max_num_batched_tokens": 64}
    wanted = expected(directory, kv_dtype, count)
    for i, (slots, own) in enumerate(
        [
            (2_000, {"num_blocks": 2_000}),
            (2_000, {"num_blocks": 2_000}),
            (2_000, {"num_blocks": 24, "preemption": "swap", "swap_space": "8MiB"}),
            *[(20, {"num_blocks": 24})] * long,
            (
                20,
                {"num_blocks": 24, "num_speculative_tokens": 3} if isinstance(directory, Path) else {"num_blocks": 24},
            ),
        ]
    ):
        engine = built(directory, **options, **own)
        tier = with_disk(engine, tmp_path / "disk", slots)
        for _ in range(2):
            assert bits(engine, requests(count)) == wanted, i
            assert tier.flush(20)
            forget(engine)
        engine.scheduler.audit()
        tier.store.audit()
        # A state of a prompt is rarely there still where there are slots for 20.
        assert tier.reader.counts.hits > 0 or (engine.scheduler.manager.state_groups and slots == 20), i
        assert not tier.reader.counts.misses.keys() & {"checksum", "io"}
        assert tier.counts.blocks > 0 or i in (1, 2)
        tier.close()


def test_a_request_waits_for_the_disk_while_others_are_served(tmp_path: Path) -> None:
    engine = built(EMBEDDED, num_blocks=200, block_size=4)
    [one], [other] = asked(2)
    assert len(one.tokens) >= 8
    tier = with_disk(engine, tmp_path / "disk", 100, threads=False)
    wanted = bits(engine, [one]) | bits(engine, [other])
    while tier.write_next():
        pass
    forget(engine)
    (one,), (other,) = asked(2)
    other.cache_salt = "another"
    engine.add(one)
    engine.add(other)
    found: Bits = {one.id: [], other.id: []}
    while engine.has_work:
        step(engine, found)
        if len(found[other.id]) == 4:  # nothing was read until now
            assert not found[one.id]
            while tier.reader.read_next():
                pass
    assert found == wanted
    assert one.cache.prefix_report is not None
    assert one.cache.prefix_report.num_cached == len(one.tokens[: one.num_prompt]) // 4 * 4
    assert tier.reader.counts.hits == 1


def test_what_is_slower_than_computing_is_computed(tmp_path: Path) -> None:
    engine, tier, wanted = written(tmp_path / "disk", seconds_a_token=1e-12)
    assert bits(engine, requests(1)) == wanted
    assert tier.reader.counts.misses == {"slower": 1}
    assert tier.reader.counts.bytes == 0


def test_a_disk_that_hangs_is_waited_for_as_long_as_computing_takes(tmp_path: Path) -> None:
    engine, tier, wanted = written(tmp_path / "disk", seconds_a_token=1e-3)
    assert bits(engine, requests(1)) == wanted
    assert tier.reader.counts.misses == {"late": 1}
    while tier.reader.read_next():
        pass
    assert tier.reader.counts.bytes == 0  # no request waits for it any more
    assert bits(engine, requests(1)) == wanted


def test_an_abort_while_blocks_are_read_leaves_nothing(tmp_path: Path) -> None:
    engine, tier, wanted = written(tmp_path / "disk")
    [one] = requests(1)
    engine.add(one)
    engine.step()
    assert engine.scheduler.prefetch is not None
    assert engine.scheduler.prefetch.is_waiting
    tier.reader.read_next()
    engine.abort(one.id)
    while engine.has_work:
        engine.step()
    engine.step()
    assert not engine.scheduler.prefetch.is_waiting
    engine.scheduler.audit()
    tier.start()
    assert bits(engine, requests(1)) == wanted
    tier.close()


def test_a_reset_forgets_the_disk_too(tmp_path: Path) -> None:
    engine, tier, wanted = written(tmp_path / "disk")
    assert len(tier.store) > 0
    engine.reset_prefix_cache()
    assert len(tier.store) == 0
    assert bits(engine, requests(1)) == wanted
    assert tier.reader.counts.hits == 0


@pytest.mark.parametrize("is_before", [True, False])
def test_a_reset_forgets_the_block_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    engine = built(EMBEDDED, num_blocks=200, block_size=4)
    tier = with_disk(engine, tmp_path / "disk", 100, threads=False)
    wanted = bits(engine, requests(1))
    put = tier.store.put

    def reset_too(*arguments: Any) -> list[Name] | None:
        if is_before:
            engine.reset_prefix_cache()
        written = put(*arguments)
        if not is_before:
            engine.reset_prefix_cache()
        return written

    monkeypatch.setattr(tier.store, "put", reset_too)
    assert tier.write_next() > 0
    monkeypatch.undo()
    assert len(tier.store) == tier.counts.blocks == tier.write_next() == 0
    assert not any(change.is_stored for change in tier.changes())
    assert not tier.counts.unwritten
    assert bits(engine, requests(1)) == wanted  # from here on blocks are written again
    assert tier.write_next() > 0
    assert len(tier.store) == 1


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_writing_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = built(EMBEDDED, num_blocks=200, block_size=4)
    tier = with_disk(engine, tmp_path / "disk", 100)
    wanted = bits(engine, requests(1))
    assert tier.flush(20)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_write_at", full)
    with caplog.at_level(logging.ERROR, "quire"):
        found = bits(engine, requests(8))
        assert tier.flush(20)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left on device; KV blocks are no longer written there" in caplog.text
    assert found == bits(built(EMBEDDED, num_blocks=200, block_size=4), requests(8))
    forget(engine)
    assert bits(engine, requests(1)) == wanted
    assert tier.reader.counts.hits == 1  # what is there is still read
    tier.close()


# ------------------------------------------------------------------------------------------- short of free blocks


def unlike(count: int, **options: int) -> list[Request]:
    """Prompts of 10 blocks of 4 tokens each that have nothing in common."""
    rng, params = random.Random(11), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
    prompts = [array("i", [rng.randrange(500) for _ in range(40)]) for _ in range(count)]
    return [Request(f"{i}", prompt, 40, params, **options) for i, prompt in enumerate(prompts)]


def short(directory: Path, count: int, num_blocks: int, **options: Any) -> tuple[Engine, DiskTier, Bits]:
    """An engine with few blocks, whose disk alone has these prompts; their answers. The tier has no threads."""
    engine = built(EMBEDDED, num_blocks=num_blocks, block_size=4, **options)
    tier, wanted = with_disk(engine, directory, 200, threads=False), Bits()
    for request in unlike(count):
        wanted |= bits(engine, [request])
        while tier.write_next():
            pass
    forget(engine)
    return engine, tier, wanted


def num_cached(request: Request) -> int:
    assert request.cache.prefix_report is not None
    return request.cache.prefix_report.num_cached


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [12, 25, 80])
def test_requests_that_come_together_find_all_that_is_there(
    tmp_path: Path, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one, two and six of them; and what was read and is not in the cache stays within its bound."""
    engine, tier, wanted = short(tmp_path / "disk", 8, num_blocks)
    [width] = tier.store.widths
    monkeypatch.setattr(incoming, "MOST_STAGED", 5 * width)
    assert engine.scheduler.prefetch is not None
    arrivals, reads, held = engine.scheduler.prefetch.arrivals, [], []
    put = arrivals.put

    def seen(read: Read) -> None:
        reads.append(read)
        held.append(sum(len(one.payload) for one in reads if one.payload is not None))
        put(read)

    monkeypatch.setattr(arrivals, "put", seen)
    tier.start()
    those = unlike(8)
    assert bits(engine, those) == wanted
    assert [num_cached(request) for request in those] == [40] * 8
    assert (tier.reader.counts.hits, tier.reader.counts.tokens, tier.reader.counts.blocks) == (8, 320, 80)
    assert width <= max(held) <= (5 + THREADS) * width
    tier.close()


@pytest.mark.slow
def test_a_running_request_takes_the_blocks_that_it_needs(tmp_path: Path) -> None:
    """What is promised to one that waits is no reason to preempt; what is left of it is found and counted."""
    engine, tier, wanted = short(tmp_path / "disk", 1, 20)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    runs = Request("runs", array("i", range(8)), 8, params)  # comes to 12 blocks, and 10 are promised
    wanted |= bits(built(EMBEDDED, num_blocks=200, block_size=4), [Request("runs", runs.tokens[:], 8, params)])
    found: Bits = {"runs": [], "0": []}
    [waits] = unlike(1)
    engine.add(runs)
    engine.add(waits)
    for i in count():
        step(engine, found)
        if not engine.has_work:
            break
        if 6 <= i < 15 or "runs" not in engine.scheduler.requests:  # 9 of 10 blocks, then the last one
            tier.reader.read_next()
    assert found == wanted
    assert engine.scheduler.num_preemptions == 0
    assert num_cached(waits) == tier.reader.counts.tokens == 32  # one of its blocks was taken


def test_promised_blocks_are_kept_from_the_requests_after_it(tmp_path: Path) -> None:
    """One that comes before it may take them."""
    engine, tier, wanted = short(tmp_path / "disk", 1, 16, scheduling_policy="priority")
    wanted |= bits(built(EMBEDDED, num_blocks=200, block_size=4), unlike(3)[1:])
    [waits, before, after] = unlike(3)
    before.priority, after.priority = -1, 1
    found: Bits = {request.id: [] for request in (waits, before, after)}

    engine.add(waits)
    engine.add(after)
    for _ in range(5):
        step(engine, found)
        tier.reader.read_next()
    assert not any(found.values())
    engine.add(before)
    for _ in range(3):
        step(engine, found)
    assert found == {"0": [], "1": wanted["1"], "2": []}
    while tier.reader.read_next():
        pass
    while engine.has_work:
        step(engine, found)
    assert found == wanted
    assert [num_cached(request) for request in (waits, before, after)] == [40, 0, 0]


def test_a_request_that_is_not_reached_is_late_too(tmp_path: Path) -> None:
    engine, tier, wanted = short(tmp_path / "disk", 1, 40, scheduling_policy="priority", max_num_seqs=1)
    [waits] = unlike(1)
    engine.add(waits)
    engine.step()
    prefetch = engine.scheduler.prefetch
    assert prefetch is not None
    assert prefetch.is_waiting
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add(Request("runs", array("i", range(8)), 8, params, priority=-1))  # takes the only seat
    engine.step()
    prefetch._clock = lambda: engine.scheduler.clock() + 1e6
    engine.step()
    assert len(engine.scheduler.running) == 1
    assert not prefetch.is_waiting
    assert tier.reader.counts.misses == {"late": 1}
    while engine.has_work:
        engine.step()
    forget(engine)
    tier.start()
    prefetch._clock = engine.scheduler.clock
    assert bits(engine, unlike(1)) == wanted
    tier.close()


# ----------------------------------------------------------------------------------------------------------- LLM


PROMPT = {"prompt_token_ids": [7 * i % 500 for i in range(200)]}
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=1)


def answer(llm: LLM) -> tuple[object, int]:
    [found] = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    one = found.outputs[0]
    return (one.token_ids, one.cumulative_logprob), found.num_cached_tokens or 0


@pytest.mark.slow
def test_a_prompt_is_found_after_a_restart(tmp_path: Path) -> None:
    with LLM(num_blocks=100, kv_disk=tmp_path / "kv", kv_disk_space="16MiB") as llm:
        first, cached = answer(llm)
        assert cached == 0
    with LLM(num_blocks=100, kv_disk=tmp_path / "kv", kv_disk_space="16MiB") as llm:
        assert answer(llm) == (first, 192)
        disk = llm.engine.scheduler.manager.disk
        assert disk is not None
        assert disk.reader.counts.hits == 1
        assert disk.reader.counts.tokens == 192
    # Blocks of another dtype are never read.
    with LLM(num_blocks=100, kv_disk=tmp_path / "kv", kv_cache_dtype="int8") as llm:
        assert answer(llm)[1] == 0
    # A salt is another prompt.
    with LLM(num_blocks=100, kv_disk=tmp_path / "kv") as llm:
        [found] = llm.generate([PROMPT | {"cache_salt": "tenant"}], PARAMS, use_tqdm=False)
        assert found.num_cached_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize(("module", "number"), [(components, "BITS_VERSION"), (kv_disk, "FORMAT")])
def test_blocks_of_an_earlier_release_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, number: str
) -> None:
    """Release 1 published K and V of beams that had been computed without their adapter."""
    with monkeypatch.context() as patch:
        patch.setattr(module, number, 1)
        with LLM(num_blocks=100, kv_disk=tmp_path / "kv") as llm:
            first, _ = answer(llm)
    with LLM(num_blocks=100, kv_disk=tmp_path / "kv") as llm:
        assert answer(llm) == (first, 0)


@pytest.mark.slow
def test_a_kill_loses_what_was_not_written_alone(tmp_path: Path, forks: Spawner) -> None:
    program = f"""
import os, signal
from tests.engine.test_disk import *
llm = LLM(num_blocks=100, kv_disk={str(tmp_path / "kv")!r})
print("the answer is", repr(answer(llm)[0]), flush=True)
disk = llm.engine.scheduler.manager.disk
while disk.counts.blocks < 6:
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = forks.start("killed", program=program)
    answered = process.said("^the answer is (.*)$")[1]
    assert process.wait(120) == -9
    with LLM(num_blocks=100, kv_disk=tmp_path / "kv") as llm:
        found, cached = answer(llm)
        assert repr(found) == answered
        assert cached >= 6 * 16


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_disk_space": "1GiB"}, "only kv_disk uses it, so give both"),
        ({"kv_disk": "", "kv_disk_space": "1GiB"}, "it must be the path of a directory"),
        ({"kv_disk": "DIR", "kv_disk_space": "50%"}, "give bytes with a unit, as in '50GiB'"),
        ({"kv_disk": "DIR", "kv_disk_space": "much"}, "give bytes with a unit, as in '50GiB'"),
        ({"kv_disk": "DIR", "kv_disk_space": "1KiB"}, "1,024 bytes; one block of every kind takes 20,736"),
        ({"kv_disk": "DIR", "enable_prefix_caching": False}, "enable_prefix_caching is False; leave one out"),
        ({"kv_disk": "DIR", "attention_backend": "reference"}, "which is not batch-invariant"),
        ({"kv_disk": "FILE"}, "a file; it must be a directory"),
        ({"kv_disk": "OTHER"}, "has other contents than a KV cache"),
        ({"kv_disk": "FILE/below"}, "it must be a directory to"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, options: dict[str, object], sentence: str) -> None:
    (tmp_path / "FILE").write_text("mine")
    (tmp_path / "OTHER").mkdir()
    (tmp_path / "OTHER" / "mine").write_text("mine")
    given = {key: str(tmp_path / value) if key == "kv_disk" and value else value for key, value in options.items()}
    with pytest.raises(ConfigError) as caught:
        LLM(num_blocks=50, **given)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "FILE").read_text() == (tmp_path / "OTHER" / "mine").read_text() == "mine"


@pytest.mark.slow
def test_two_engines_cannot_have_one_directory(tmp_path: Path) -> None:
    with LLM(num_blocks=50, kv_disk=tmp_path / "kv"):
        with pytest.raises(ConfigError, match=r"only one at a time can, so give this one a separate directory"):
            LLM(num_blocks=50, kv_disk=tmp_path / "kv")
        with LLM(num_blocks=50, kv_disk=tmp_path / "kv", block_size=32):
            pass
    with LLM(num_blocks=50, kv_disk=tmp_path / "kv"):
        pass


# ---------------------------------------------------------------------------------------------------- what breaks

FAULTS, LONG_FAULTS, SHARDS = 240, 10_000, 4


@dataclass
class Recording:
    """All that a tier wrote to its files, in order; and what its requests were answered."""

    writes: list[tuple[str, int, bytes]] = field(default_factory=list)  # file's name, place, bytes
    sizes: dict[str, int] = field(default_factory=dict)
    wanted: Bits = field(default_factory=dict)


def two() -> list[Request]:
    """Prompts with a stem in common: [stem, one], [stem, other]."""
    rng = random.Random(3)
    stem = [rng.randrange(500) for _ in range(48)]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)
    tails = [[rng.randrange(500) for _ in range(16)] for _ in range(2)]
    return [Request(f"{i}", array("i", stem + tail), 64, params) for i, tail in enumerate(tails)]


@cache
def faulty_engine() -> Engine:
    return built(EMBEDDED, num_blocks=60, block_size=4)


def answers(engine: Engine) -> Bits:
    found: Bits = {}
    for request in two():
        found |= bits(engine, [request])
    return found


@cache
def recording(directory: Path) -> Recording:
    """Two tiers one after the other wrote these files: the slots are fewer than the blocks, so some were reused."""
    made, engine = Recording(), faulty_engine()
    places: dict[str, int] = {LOG: 0}
    patch = pytest.MonkeyPatch()
    real_write, real_append = files._write_at, files._append

    def name_of(file: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{file}")).name

    def write_at(file: int, data: memoryview, at: int) -> None:
        made.writes.append((name_of(file), at, bytes(data)))
        real_write(file, data, at)

    def append(file: int, data: bytes) -> None:
        if data and name_of(file) == LOG:
            made.writes.append((LOG, places[LOG], bytes(data)))
            places[LOG] += len(data)
        real_append(file, data)

    patch.setattr(files, "_write_at", write_at)
    patch.setattr(files, "_append", append)
    tier = with_disk(engine, directory, 14, threads=False)
    forget(engine)
    for request in two():
        made.wanted |= bits(engine, [request])
        while tier.write_next():
            pass
    tier.close()
    patch.undo()
    made.sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    shutil.rmtree(directory)
    assert len({write[:2] for write in made.writes if write[0] != LOG}) < len(made.writes) // 2  # some were reused
    return made


def damaged(made: Recording, directory: Path, rng: random.Random) -> str:
    """Files as a crash, a loss of power, or a bad disk may leave them. Returns which of these."""
    writes, kind = list(made.writes), rng.choice(["crash", "power", "bits", "cut", "moved", "nothing"])
    if kind == "crash":  # at a write, which is torn
        at = rng.randrange(len(writes))
        name, place, data = writes[at]
        writes = [*writes[:at], (name, place, data[: rng.randrange(len(data) + 1)])]
    elif kind == "power":  # what was written last is there or not, in any order
        kept = [write for write in writes if rng.random() < 0.7]
        rng.shuffle(kept)
        writes = kept if rng.random() < 0.5 else [write for write in writes if rng.random() < 0.8]
    contents = {name: bytearray() for name in made.sizes}
    for name, place, data in writes:
        content = contents[name]
        content.extend(bytes(max(0, place + len(data) - len(content))))
        content[place : place + len(data)] = data
    for _ in range(rng.randrange(1, 4)):
        content = rng.choice([content for content in contents.values() if content] or [bytearray(1)])
        at, there = rng.randrange(len(content)), rng.randrange(len(content))
        if kind == "bits":
            content[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del content[at:]
        elif kind == "moved":
            part = content[there : there + rng.randrange(1, 2_000)]
            content[at : at + len(part)] = part
    directory.mkdir()
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return kind


@pytest.mark.parametrize("shard", quick(range(SHARDS), 0, 1))
def test_damage_never_gives_a_wrong_token(shard: int, long: bool, tmp_path: Path) -> None:
    """Bits, ends that are cut off, pieces elsewhere, a crash at a write, writes that are lost or in another order."""
    engine, made = faulty_engine(), recording(tmp_path / "recorded")
    rng, counts = random.Random(shard), dict.fromkeys(["hits", "misses"], 0)
    seen: set[str] = set()
    for i in range((LONG_FAULTS if long else FAULTS) // SHARDS):
        directory = tmp_path / str(i)
        kind = damaged(made, directory, rng)
        seen.add(kind)
        forget(engine)
        tier = with_disk(engine, directory, 14)
        tier.store.audit()
        assert answers(engine) == made.wanted, (shard, i, kind)
        assert tier.flush(20)
        tier.store.audit()
        assert kind != "nothing" or tier.reader.counts.hits > 0
        counts["hits"] += tier.reader.counts.hits
        counts["misses"] += tier.reader.counts.misses["checksum"]
        tier.close()
        shutil.rmtree(directory)
    assert seen == {"crash", "power", "bits", "cut", "moved", "nothing"}
    assert min(counts.values()) > 5, counts
