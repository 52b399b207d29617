"""Blocks in files: found by digest after a restart, in the order in which they give way, never with other bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from quire.cache.disk import store as module
from quire.cache.disk.directory import SECRET, TAG, check_root, clear, listed, make_root, take
from quire.cache.disk.store import LOG, RECORD_SIZE, DiskStore
from quire.cache.incoming import Fault, Name
from quire.errors import ConfigError
from tests.patches import set_in_this_thread

WIDTHS, SLOTS = (96, 40), (8, 5)
SECRETS = b"s" * 32


def opened(directory: Path, slots: tuple[int, ...] = SLOTS, secret: bytes = SECRETS) -> DiskStore:
    return DiskStore(directory, secret, WIDTHS[: len(slots)], slots)


def name(i: int, group: int = 0) -> Name:
    return Name(group, blake2b(bytes([group, i]), digest_size=16).digest())


def payload(i: int, group: int = 0) -> np.ndarray:
    return np.random.default_rng(100 * group + i).integers(0, 256, WIDTHS[group]).astype(np.uint8)


def check(store: DiskStore, i: int) -> bytes:
    return store.check_of(bytes([i]), b"tokens")


def put(store: DiskStore, i: int, group: int = 0, depth: int = 0, tick: int | None = None) -> list[Name] | None:
    if tick is None:
        store.tick = tick = store.tick + 1
    return store.put(name(i, group), check(store, i), depth, tick, payload(i, group))


def got(store: DiskStore, i: int, group: int = 0) -> Fault | None:
    out = np.empty(WIDTHS[group], np.uint8)
    fault = store.get(name(i, group), check(store, i), out)
    if fault is None:
        assert (out == payload(i, group)).all()
    return fault


def test_blocks_outlive_the_store(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(5):
        for group in range(2):
            assert put(store, i, group) == []
    store.close()
    again = opened(tmp_path)
    again.audit()
    assert len(again) == 10
    assert again.num_bytes == 5 * sum(WIDTHS)
    assert [got(again, i, group) for i in range(5) for group in range(2)] == [None] * 10
    assert again.tick == store.tick


def test_a_digest_is_not_believed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    out = np.empty(WIDTHS[0], np.uint8)
    assert not store.holds(name(1), store.check_of(b"another parent", b"tokens"))
    assert store.get(name(1), store.check_of(bytes([1]), b"other tokens"), out) is Fault.ABSENT
    assert got(store, 1) is None


def test_the_longest_unused_gives_way_and_the_tail_before_the_head(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(4):
        put(store, i, depth=i, tick=1)
    for i in range(4, 8):
        put(store, i, depth=i - 4, tick=2)
    assert put(store, 8, tick=3) == [name(3)]
    assert put(store, 9, tick=3) == [name(2)]
    store.touch([name(0), name(1)], 4)
    assert put(store, 10, tick=5) == [name(7)]
    assert got(store, 7) is Fault.ABSENT
    assert got(store, 0) is None
    # The end of a sequence that is longer than the disk takes nothing from its beginning.
    (tmp_path / "small").mkdir()
    small = opened(tmp_path / "small", (3,))
    assert [put(small, i, depth=i, tick=1) for i in range(5)] == [[], [], [], None, None]
    assert [got(small, i) for i in range(3)] == [None] * 3
    store.audit()
    small.audit()


def test_the_order_outlives_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(8):
        put(store, i)
    store.close()
    again = opened(tmp_path)
    assert put(again, 8) == [name(0)]
    assert put(again, 9) == [name(1)]


def test_less_space_keeps_what_fits(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(8):
        put(store, i)
    store.close()
    smaller = opened(tmp_path, (3, 5))
    assert [got(smaller, i) for i in range(8)] == [None] * 3 + [Fault.ABSENT] * 5
    smaller.audit()
    smaller.close()
    assert len(opened(tmp_path)) == 3


@pytest.mark.slow
def test_the_log_stays_short(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(3_000):
        put(store, i % 200)
    assert (tmp_path / LOG).stat().st_size <= RECORD_SIZE * (2 * sum(SLOTS) + module.MOST_RECORDS)
    store.close()
    again = opened(tmp_path)
    assert len(again) == 8
    assert all(got(again, i % 200) is None for i in range(2_992, 3_000))


def test_a_block_that_was_damaged_is_forgotten_and_may_come_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    with (tmp_path / "slots.0").open("r+b") as file:
        file.write(b"\xff" * 8)
    assert got(store, 1) is Fault.CHECKSUM
    assert got(store, 1) is Fault.ABSENT
    assert put(store, 1) == []
    assert got(store, 1) is None


def test_another_secret_finds_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    store.close()
    assert name(1).digest not in (tmp_path / LOG).read_bytes()
    assert got(opened(tmp_path, secret=b"t" * 32), 1) is Fault.ABSENT


def test_clear_forgets_everything(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(8):
        put(store, i)
    store.clear()
    assert len(store) == 0
    assert (tmp_path / LOG).stat().st_size == 0
    assert (tmp_path / "slots.0").stat().st_blocks == 0
    assert put(store, 3) == []
    store.close()
    assert got(opened(tmp_path), 3) is None


@pytest.mark.parametrize("broken", [LOG, "slots.0"])
def test_what_was_cleared_stays_cleared_where_a_file_cannot_be_emptied(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, (8,))
    put(store, 1)
    real, inode = os.ftruncate, (tmp_path / broken).stat().st_ino

    def failing(file: int, size: int) -> None:
        if os.fstat(file).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        real(file, size)

    set_in_this_thread(monkeypatch, os, "ftruncate", failing)
    with pytest.raises(OSError, match="Input/output error"):
        store.clear()
    monkeypatch.undo()
    assert len(store) == 0
    store.close()
    again = opened(tmp_path, (8,))
    assert got(again, 1) in (Fault.ABSENT, Fault.CHECKSUM)


@pytest.mark.parametrize("at", range(6))
def test_a_disk_that_is_full_loses_that_block_alone(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, writes = opened(tmp_path), 0
    real = os.pwrite, os.write

    def failing(real: object) -> object:
        def write(file: int, data: memoryview, *where: int) -> int:
            nonlocal writes
            writes += 1
            if writes > at:
                real(file, data[: len(data) // 2], *where)
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(file, data, *where)

        return write

    set_in_this_thread(monkeypatch, os, "pwrite", failing(real[0]))
    set_in_this_thread(monkeypatch, os, "write", failing(real[1]))
    done = 0
    while done < 4:
        try:
            put(store, done)
        except OSError:
            break
        done += 1
    monkeypatch.undo()
    assert done == at // 2
    assert [got(store, i) for i in range(4)] == [None] * done + [Fault.ABSENT] * (4 - done)
    store.audit()
    store.close()
    again = opened(tmp_path)
    assert [got(again, i) for i in range(4)] == [None] * done + [Fault.ABSENT] * (4 - done)


@pytest.mark.slow
def test_random_damage_is_a_miss(tmp_path: Path) -> None:
    """Bits flip, ends are cut off, pieces stand elsewhere: what is read is what was written, or nothing."""
    rng, faults = random.Random(0), 0
    for _ in range(300):
        store = opened(tmp_path)
        for _ in range(rng.randrange(6)):
            put(store, rng.randrange(20), rng.randrange(2), rng.randrange(3))
        store.close()
        for path in (tmp_path / LOG, tmp_path / "slots.0", tmp_path / "slots.1"):
            data = bytearray(path.read_bytes())
            kind, at = rng.random(), rng.randrange(len(data)) if data else 0
            if data and kind < 0.4:
                data[at] ^= 1 << rng.randrange(8)
            elif data and kind < 0.6:
                del data[at:]
            elif data and kind < 0.8:
                there = rng.randrange(len(data))
                data[at : at + 50] = data[there : there + 50]
            path.write_bytes(data)
        again = opened(tmp_path)
        again.audit()
        faults += sum(got(again, i, group) is Fault.CHECKSUM for i in range(20) for group in range(2))
        again.audit()
        again.close()
    assert faults > 50


def test_files_are_for_their_owner(tmp_path: Path) -> None:
    root = tmp_path / "new" / "cache"
    place = take(root, make_root(root), "0" * 16, {"model": "m"})
    store = opened(place.path, secret=place.secret)
    put(store, 1)
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert (root / SECRET).read_bytes() == place.secret
    os.close(place.lock)


def test_a_directory_is_one_process_s(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    secret = make_root(root)
    place = take(root, secret, "0" * 16, {"model": "m"})
    with pytest.raises(ConfigError, match=f"process {os.getpid()} uses"):
        take(root, secret, "0" * 16, {})
    other = take(root, secret, "1" * 16, {})  # another model's
    assert [one.is_used for one in listed(root)] == [True, True]
    with pytest.raises(ConfigError, match="is used by a process"):
        clear(root)
    os.close(place.lock)
    os.close(other.lock)
    assert make_root(root) == secret
    assert [one.about for one in clear(root)] == [{"model": "m"}, {}]
    assert sorted(path.name for path in root.iterdir()) == sorted([TAG, SECRET])


def test_a_directory_that_is_cleared_while_it_is_taken_is_one_process_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is open and not locked yet when `clear` removes it."""
    root = tmp_path / "cache"
    secret = make_root(root)
    os.close(take(root, secret, "0" * 16, {}).lock)
    real, cleared = fcntl.flock, []

    def flock(file: int, how: int) -> None:
        if not cleared:
            cleared.append(how)
            clear(root)
        real(file, how)

    set_in_this_thread(monkeypatch, fcntl, "flock", flock)
    place = take(root, secret, "0" * 16, {"model": "m"})
    assert os.path.samestat(os.fstat(place.lock), (place.path / "lock").stat())
    with pytest.raises(ConfigError, match=f"process {os.getpid()} uses"):
        take(root, secret, "0" * 16, {})
    with pytest.raises(ConfigError, match="is used by a process"):
        clear(root)
    os.close(place.lock)
    assert [one.about for one in clear(root)] == [{"model": "m"}]


def test_what_is_no_cache_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="a file; it must be a directory"):
        make_root(tmp_path / "file")
    with pytest.raises(ConfigError, match="has other contents than a KV cache"):
        make_root(tmp_path)
    with pytest.raises(ConfigError, match="has other contents than a KV cache"):
        clear(tmp_path)
    (tmp_path / "empty").mkdir()
    check_root(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is not a KV cache"):
        listed(tmp_path / "empty")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["empty", "file"]


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_what_cannot_be_written_is_one_sentence(tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> int:
        raise OSError(error, os.strerror(error))

    set_in_this_thread(monkeypatch, os, "open", failing)
    with pytest.raises(ConfigError, match=os.strerror(error).lower()):
        make_root(tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
