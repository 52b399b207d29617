"""DiskStore: blocks in the files of one directory, found by their digests, also after a restart.

Each cache group has a file of slots, which contain the bytes of a block each and nothing else. A log has a record for
each block that was written: its name, its slot and a checksum of its bytes. Nothing is ever synced to the disk: after a
crash or a power loss, records and blocks are checked when they are read. A torn or wrong record is ignored, and a slot
whose bytes do not match its record is a miss.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING
from zlib import crc32

from quire.cache.incoming import Fault, Name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = 3  # of the files; directories of another format are not read
LOG = "log"
NEW_LOG = "log.new"
SLOTS = "slots"  # followed by the group's number
FIELDS = Struct("<QIIHHI16s16s")  # tick, slot, depth, group, 0, crc of the payload, masked digest, check
CHECKSUM = Struct("<I")  # crc of the fields
RECORD_SIZE = FIELDS.size + CHECKSUM.size
HASH_SIZE = 16  # bytes
MOST_RECORDS = 1024  # in the log, in addition to two per slot; with more it is rewritten
MAX_SLOTS = 2**32 - 1


@dataclass(slots=True, eq=False)
class Entry:
    """A block in its slot."""

    slot: int
    depth: int  # number of blocks before it in its sequence
    tick: int  # time of the last use, in the store's own count; larger is later
    crc: int  # of the payload
    check: bytes  # of parent and tokens, because a digest is not trusted


class DiskStore:
    """Blocks by name, within a number of slots for each group.

    If a group has no free slot, its least recently used block is evicted, and of those with the same time the one with
    the most blocks before it: a sequence loses its tail before its head. Any thread may call any method; `put` and
    `clear` wait for one another.
    """

    def __init__(self, directory: Path, secret: bytes, widths: Sequence[int], capacities: Sequence[int]) -> None:
        """Open the files, or create them.

        widths: bytes of a block of each group; capacities: slots of each. secret: the key for hashing names. Raises
        OSError if the files cannot be opened or written.
        """
        self.directory = directory
        self.widths = tuple(widths)
        self.capacities = tuple(min(count, MAX_SLOTS) for count in capacities)
        self.tick = 0
        self.cleared_at = -1  # tick of the last `clear`: blocks used until then are not written any more
        self._secret = secret
        self._lock = threading.Lock()  # protects the tables
        self._writing = threading.Lock()  # protects the files' contents
        self._entries: list[dict[bytes, Entry]] = [{} for _ in self.widths]
        self._free: list[list[int]] = []  # unused slots below `_next`
        self._next = [0] * len(self.widths)  # the first slot that was never used
        self._order: list[list[tuple[int, int, bytes]]] = [[] for _ in self.widths]  # heaps: tick, -depth, digest
        self._num_records = 0
        self._log = -1
        self._files: list[int] = []
        try:
            for group, (width, count) in enumerate(zip(self.widths, self.capacities, strict=True)):
                self._files.append(_open(directory / f"{SLOTS}.{group}", os.O_RDWR))
                os.ftruncate(self._files[group], width * count)  # sparse: only written bytes take space
            self._replay()
            self._rewrite_log()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        with self._writing:
            for file in (*self._files, self._log):
                if file >= 0:
                    with suppress(OSError):
                        os.close(file)
            self._files, self._log = [], -1

    # ------------------------------------------------------------------------------------------------------- names

    def check_of(self, parent: bytes, tokens: bytes) -> bytes:
        """Return a hash for comparing a block's parent and tokens: 16 bytes that reveal nothing without the secret."""
        return blake2b(parent + tokens, key=self._secret, digest_size=HASH_SIZE, person=b"quire check").digest()

    def _mask(self, tick: int, slot: int, digest: bytes) -> bytes:
        """Return the masked digest for the log or, from a masked one, the digest."""
        nonce = tick.to_bytes(8, "little") + slot.to_bytes(8, "little")
        pad = blake2b(nonce, key=self._secret, digest_size=HASH_SIZE, person=b"quire mask").digest()
        return (int.from_bytes(digest, "little") ^ int.from_bytes(pad, "little")).to_bytes(HASH_SIZE, "little")

    # ----------------------------------------------------------------------------------------------------- reading

    def next_tick(self) -> int:
        """Return a new time of use: blocks last used in it are evicted before those used later."""
        self.tick += 1
        return self.tick

    def __len__(self) -> int:
        return sum(map(len, self._entries))

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(len(entries) * width for entries, width in zip(self._entries, self.widths, strict=True))

    def holds_name(self, name: Name) -> bool:
        """Return whether there is a block of that name, whatever its contents."""
        return name.digest in self._entries[name.group]

    def holds(self, name: Name, check: bytes) -> bool:
        """Return whether there is a block of that name and `check`."""
        entry = self._entries[name.group].get(name.digest)
        return entry is not None and entry.check == check

    def digests(self, group: int) -> list[bytes]:
        """Return the digests of all blocks of the group."""
        with self._lock:
            return list(self._entries[group])

    def get(
        self,
        name: Name,
        check: bytes,
        out: NDArray[np.uint8],  # [width]; undefined if a Fault is returned
    ) -> Fault | None:
        """Read a block into `out`.

        Return a Fault if it is not there or damaged; a damaged one is removed from the store.
        """
        entry = self._entries[name.group].get(name.digest)
        if entry is None or entry.check != check:
            return Fault.ABSENT
        fault: Fault | None = None
        try:
            size = os.preadv(self._files[name.group], [out.data], entry.slot * self.widths[name.group])
            if size != len(out) or crc32(out.data, _seed(name, check)) != entry.crc:
                fault = Fault.CHECKSUM
        except (OSError, IndexError):  # closed meanwhile
            fault = Fault.IO
        with self._lock:
            if self._entries[name.group].get(name.digest) is not entry:  # its slot may have been overwritten meanwhile
                return Fault.ABSENT
            if fault is not None:
                self._forget(name)
        return fault

    def touch(self, names: Iterable[Name], tick: int) -> None:
        """Mark these blocks as used at `tick`."""
        with self._lock:
            for group, digest in names:
                entry = self._entries[group].get(digest)
                if entry is not None and entry.tick != tick:
                    entry.tick = tick
                    self._push(group, digest, entry)

    # ----------------------------------------------------------------------------------------------------- writing

    def put(self, name: Name, check: bytes, depth: int, tick: int, payload: NDArray[np.uint8]) -> list[Name] | None:
        """Write a block. Return the blocks that were evicted for it.

        Return None if it is not written, because it would itself be evicted first, or was last used before `clear`.
        Raises OSError if the system could not write it. Then it is not in the store.
        """
        with self._writing:
            with self._lock:
                self._forget(name)
                found = None if tick <= self.cleared_at else self._slot(name.group, (tick, -depth))
            if found is None:
                return None
            slot, gone = found
            crc = crc32(payload.data, _seed(name, check))
            try:
                _write_at(self._files[name.group], payload.data, slot * self.widths[name.group])
                entry = Entry(slot, depth, tick, crc, check)
                if self._num_records >= 2 * sum(self.capacities) + MOST_RECORDS:
                    self._rewrite_log()
                _append(self._log, self._record(name, entry))
            except BaseException:
                with self._lock:
                    self._free[name.group].append(slot)
                raise
            self._num_records += 1
            with self._lock:
                self._entries[name.group][name.digest] = entry
                self._push(name.group, name.digest, entry)
            return gone

    def clear(self) -> None:
        """Remove all blocks. Raises OSError if a file could not be emptied; they are removed nevertheless."""
        with self._writing:
            with self._lock:
                self.cleared_at = self.tick
                for group, entries in enumerate(self._entries):
                    entries.clear()
                    self._order[group].clear()
                    self._free[group].clear()
                    self._next[group] = 0
            self._num_records, failed = 0, None
            sizes = (width * count for width, count in zip(self.widths, self.capacities, strict=True))
            # A record is useless without its block, so emptying one of the two is enough for a restart.
            for file, size in ((self._log, 0), *zip(self._files, sizes, strict=True)):
                try:
                    os.ftruncate(file, 0)
                    os.ftruncate(file, size)
                except OSError as error:
                    failed = error
            if failed is not None:
                raise failed

    def _slot(self, group: int, place: tuple[int, int]) -> tuple[int, list[Name]] | None:
        """Return a slot for a block with that place in the order, and the block that was evicted for it."""
        if self._free[group]:
            return self._free[group].pop(), []
        if self._next[group] < self.capacities[group]:
            self._next[group] += 1
            return self._next[group] - 1, []
        order, entries = self._order[group], self._entries[group]
        while order:
            tick, depth, digest = order[0]
            entry = entries.get(digest)
            if entry is None or (entry.tick, -entry.depth) != (tick, depth):  # touched since, or removed
                heapq.heappop(order)
                continue
            if (tick, depth) > place:
                return None
            heapq.heappop(order)
            del entries[digest]
            return entry.slot, [Name(group, digest)]
        return None

    def _forget(self, name: Name) -> None:
        entry = self._entries[name.group].pop(name.digest, None)
        if entry is not None:
            self._free[name.group].append(entry.slot)

    def _push(self, group: int, digest: bytes, entry: Entry) -> None:
        order, entries = self._order[group], self._entries[group]
        heapq.heappush(order, (entry.tick, -entry.depth, digest))
        if len(order) > 2 * len(entries) + MOST_RECORDS:
            order[:] = [(one.tick, -one.depth, each) for each, one in entries.items()]
            heapq.heapify(order)

    # ----------------------------------------------------------------------------------------------------- the log

    def _record(self, name: Name, entry: Entry) -> bytes:
        masked = self._mask(entry.tick, entry.slot, name.digest)
        place = (entry.tick, entry.slot, entry.depth, name.group, 0)
        body = FIELDS.pack(*place, entry.crc, masked, entry.check)
        return body + CHECKSUM.pack(crc32(body))

    def _replay(self) -> None:
        """Load the log. Of the records of a slot, and of a name, the last one counts."""
        owners: list[dict[int, bytes]] = [{} for _ in self.widths]  # of each group, digests by slot
        for name, entry in self._records():
            entries, owner = self._entries[name.group], owners[name.group]
            if (before := owner.pop(entry.slot, None)) is not None:
                del entries[before]
            if (other := entries.pop(name.digest, None)) is not None:
                del owner[other.slot]
            entries[name.digest], owner[entry.slot] = entry, name.digest
            self.tick = max(self.tick, entry.tick)
        for group, (entries, owner) in enumerate(zip(self._entries, owners, strict=True)):
            self._next[group] = max(owner, default=-1) + 1
            self._free.append([slot for slot in range(self._next[group]) if slot not in owner])
            self._order[group] = [(entry.tick, -entry.depth, digest) for digest, entry in entries.items()]
            heapq.heapify(self._order[group])

    def _records(self) -> Iterator[tuple[Name, Entry]]:
        """Yield the log's records, skipping invalid ones."""
        try:
            data = memoryview((self.directory / LOG).read_bytes())
        except FileNotFoundError:
            return
        for start in range(0, len(data) - RECORD_SIZE + 1, RECORD_SIZE):
            body = data[start : start + FIELDS.size]
            if crc32(body) != CHECKSUM.unpack_from(data, start + FIELDS.size)[0]:
                continue
            tick, slot, depth, group, zero, crc, masked, check = FIELDS.unpack(body)
            if zero or group >= len(self.widths) or slot >= self.capacities[group]:  # the capacity may be smaller now
                continue
            yield Name(group, self._mask(tick, slot, masked)), Entry(slot, depth, tick, crc, check)

    def _rewrite_log(self) -> None:
        """Write a log of the current blocks, and replace the old one."""
        new = self.directory / NEW_LOG
        log = _open(new, os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
        try:
            with self._lock:
                listed = [
                    (Name(group, digest), entry)
                    for group, entries in enumerate(self._entries)
                    for digest, entry in entries.items()
                ]
            listed.sort(key=lambda item: item[1].tick)
            _append(log, b"".join(self._record(name, entry) for name, entry in listed))
            new.replace(self.directory / LOG)
        except BaseException:
            os.close(log)
            raise
        if self._log >= 0:
            os.close(self._log)
        self._log, self._num_records = log, len(listed)

    def audit(self) -> None:
        """Verify that each slot has at most one owner. Raises ValueError if not."""
        with self._lock:
            for group, entries in enumerate(self._entries):
                taken = [entry.slot for entry in entries.values()]
                slots = sorted(taken + self._free[group])
                if len(set(slots)) != len(slots) or (slots and slots[-1] >= self._next[group]):
                    raise ValueError(f"slots of group {group} are taken twice, or never were given out: {slots}")


def _seed(name: Name, check: bytes) -> int:
    """Return the initial value of a payload's checksum, which differs between blocks."""
    return crc32(name.group.to_bytes(2, "little") + name.digest + check)


def _open(path: Path, flags: int) -> int:
    """Open a file that only its owner may read."""
    file = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(OSError):
        os.fchmod(file, 0o600)
    return file


def _write_at(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _append(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
