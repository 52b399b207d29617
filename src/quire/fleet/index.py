"""FleetIndex: the blocks that each replica holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quire.errors import BadValue

MAX_SLOTS = 256  # replicas of one gateway


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """Blocks that a replica will hold soon, since a request was routed there. FleetIndex.settle removes them."""

    slot: int
    digests: tuple[int, ...]


class FleetIndex:
    """The reusable blocks of all replicas, by digest.

    A digest is an integer of 8 bytes that names a block and, by its chain, all blocks before it. A slot is a replica's
    number, 0..255.

    Held blocks come from a replica's events. Expected blocks are counted separately: a block that was stored and
    evicted again is still expected, and one that is no longer expected is still held. `runs` counts both.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # digest -> mask of the slots that hold it; never 0
        self._held: dict[int, set[int]] = {}  # slot -> digests: the inverse, so that a slot is cleared without a scan
        self._expecting: dict[int, int] = {}  # digest -> mask of the slots that are expected to hold it; never 0
        self._expected: dict[tuple[int, int], int] = {}  # (slot, digest) -> how often; never 0
        self._open: set[Expectation] = set()

    def __len__(self) -> int:
        """Return the number of digests that at least one replica holds."""
        return len(self._holders)

    def num_held(self, slot: int) -> int:
        """Return the number of blocks that the replica holds, without expected ones."""
        return len(self._held.get(slot, ()))

    # ----------------------------------------------------------------------------------------------- held blocks

    def store(self, slot: int, digests: Iterable[int]) -> None:
        """Record that the replica holds these blocks. Raises BadValue for a slot that is not in 0..255."""
        check_slot(slot)
        held, holders, bit = self._held.setdefault(slot, set()), self._holders, 1 << slot
        for digest in digests:
            held.add(digest)
            others = holders.get(digest)
            holders[digest] = bit if others is None else others | bit  # most have one holder and share this integer

    def remove(self, slot: int, digests: Iterable[int]) -> None:
        """Record that the replica no longer holds these blocks. Ignore others: a snapshot may be newer."""
        held = self._held.get(slot, set())
        for digest in digests:
            if digest in held:
                held.remove(digest)
                _drop_bit(self._holders, digest, 1 << slot)
        if not held:
            self._held.pop(slot, None)

    def clear(self, slot: int) -> None:
        """Record that the replica holds nothing: its cache was cleared, or it is gone. Expectations stay."""
        for digest in self._held.pop(slot, ()):
            _drop_bit(self._holders, digest, 1 << slot)

    def replace(self, slot: int, digests: Iterable[int]) -> None:
        """Set the blocks of a replica from a snapshot. Costs one walk and the number of changes."""
        now, before = set(digests), self._held.get(slot, set())
        self.remove(slot, before - now)
        self.store(slot, now - before)

    # ------------------------------------------------------------------------------------------- expected blocks

    def expect(self, slot: int, digests: Iterable[int]) -> Expectation:
        """Count blocks as held by a replica to which a request was routed, until `settle`.

        Expectations nest: a block is expected while at least one of them is open. Raises BadValue for a slot that is
        not in 0..255.
        """
        check_slot(slot)
        made = Expectation(slot, tuple(digests))
        for digest in made.digests:
            self._expected[slot, digest] = self._expected.get((slot, digest), 0) + 1
            self._expecting[digest] = self._expecting.get(digest, 0) | 1 << slot
        self._open.add(made)
        return made

    def settle(self, expectation: Expectation) -> None:
        """Remove an expectation when its request has ended or moved. Raises BadValue the second time."""
        if expectation not in self._open:
            raise BadValue(
                f"an expectation of {len(expectation.digests)} blocks in slot {expectation.slot} is not open; "
                "settle each one once, in the index that made it"
            )
        self._open.remove(expectation)
        for digest in expectation.digests:
            left = self._expected.pop((expectation.slot, digest)) - 1
            if left:
                self._expected[expectation.slot, digest] = left
            else:
                _drop_bit(self._expecting, digest, 1 << expectation.slot)

    # --------------------------------------------------------------------------------------------------- reading

    def runs(self, digests: Iterable[int], besides: FleetIndex | None = None) -> dict[int, int]:
        """Return the number of leading blocks of each slot that holds the first block or is expected to.

        digests: those of a prompt's full blocks, in order. `besides`: another index, such as that of the disks, whose
        blocks count as well. One walk serves all replicas: O(blocks + replicas).
        """
        return _runs(digests, self._holders, self._expecting, {} if besides is None else besides._holders)

    def held_runs(self, digests: Iterable[int], besides: FleetIndex) -> dict[int, int]:
        """Return the same as `runs` without the blocks that are only expected."""
        return _runs(digests, self._holders, {}, besides._holders)

    def audit(self) -> None:
        """Check that all tables agree. Raises BadValue if they do not."""
        holders: dict[int, int] = {}
        for slot, held in self._held.items():
            for digest in held:
                holders[digest] = holders.get(digest, 0) | 1 << slot
        if holders != self._holders:
            raise BadValue("the fleet index knows other holders by digest than by slot")
        expected: dict[tuple[int, int], int] = {}
        expecting: dict[int, int] = {}
        for one in self._open:
            for digest in one.digests:
                expected[one.slot, digest] = expected.get((one.slot, digest), 0) + 1
                expecting[digest] = expecting.get(digest, 0) | 1 << one.slot
        if expected != self._expected or expecting != self._expecting:
            raise BadValue("the fleet index expects other blocks than its open expectations have")


def check_slot(slot: int) -> None:
    """Raise BadValue unless the slot is in 0..255: a larger one would make every mask that wide."""
    if not 0 <= slot < MAX_SLOTS:
        raise BadValue(f"slot is {slot}; it must be in 0..{MAX_SLOTS - 1}")


def _runs(digests: Iterable[int], a: dict[int, int], b: dict[int, int], c: dict[int, int]) -> dict[int, int]:
    """Return the number of leading blocks that each slot has in any of these tables of masks."""
    runs: dict[int, int] = {}
    mask, count = (1 << MAX_SLOTS) - 1, 0
    for digest in digests:
        still = mask & (a.get(digest, 0) | b.get(digest, 0) | c.get(digest, 0))
        if still != mask:
            if count:
                runs.update((slot, count) for slot in _slots(mask ^ still))
            mask = still
            if not mask:
                return runs
        count += 1
    if count:
        runs.update((slot, count) for slot in _slots(mask))
    return runs


def _drop_bit(masks: dict[int, int], digest: int, bit: int) -> None:
    """Clear a bit of the digest's mask, in which it is set. Delete an empty mask to free its memory."""
    left = masks[digest] ^ bit
    if left:
        masks[digest] = left
    else:
        del masks[digest]


def _slots(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, in ascending order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
