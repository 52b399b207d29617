"""ReplicaState: a replica's report of its load, from which the cost of a request can be computed."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import BadValue, are_counts, are_times, check_integer, check_number


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaState:
    """A replica's load, room and speed at one moment.

    If a model has several cache groups, the block counts are those of the group with the fewest free blocks.

    Raises BadValue, with the field's name, for an invalid number: the state comes from another machine, and a NaN among
    the costs would attract all requests.
    """

    waiting_tokens: int  # prompt tokens of waiting and running requests still to be computed; shared ones count once
    num_waiting: int  # requests
    num_running: int  # requests
    max_running: int  # requests
    free_blocks: int  # blocks that no request owns, including cached ones
    cached_blocks: int  # free blocks that can be reused
    num_blocks: int
    block_size: int  # tokens
    seconds_a_step: float  # fixed part of each step; 0.0 means unknown, also for the next two
    seconds_a_prompt_token: float
    seconds_a_sequence: float  # of each sequence that decodes in a step
    draining: bool  # it accepts no new requests
    seconds_a_disk_block: float = 0.0  # to read a block from its disk; 0.0: it has none
    seconds_a_peer_block: float = 0.0  # to read a block from another replica; 0.0: it does not read there

    def __post_init__(self) -> None:
        counts = self.waiting_tokens, self.num_waiting, self.num_running, self.cached_blocks
        if not are_counts(*counts):
            for name in ("waiting_tokens", "num_waiting", "num_running", "cached_blocks"):
                check_integer(BadValue, name, getattr(self, name), 0)
        if not (are_counts(self.max_running, self.num_blocks, self.block_size) and self.max_running and self.num_blocks
                and self.block_size):  # fmt: skip
            for name in ("max_running", "num_blocks", "block_size"):
                check_integer(BadValue, name, getattr(self, name), 1)
        times = self.seconds_a_step, self.seconds_a_prompt_token, self.seconds_a_sequence
        if not are_times(*times, self.seconds_a_disk_block, self.seconds_a_peer_block):
            for name in ("seconds_a_step", "seconds_a_prompt_token", "seconds_a_sequence", "seconds_a_disk_block",
                         "seconds_a_peer_block"):  # fmt: skip
                check_number(BadValue, name, getattr(self, name), 0.0)
        if not (are_counts(self.free_blocks) and self.cached_blocks <= self.free_blocks <= self.num_blocks):
            check_integer(BadValue, "free_blocks", self.free_blocks, self.cached_blocks, self.num_blocks)
        if not isinstance(self.draining, bool):
            raise BadValue(f"draining is {self.draining!r}; it must be true or false")

    def with_room(self, free_blocks: int, cached_blocks: int) -> ReplicaState:
        """Return a copy with other free blocks. They are not checked, since the replica itself counted them.

        `dataclasses.replace` takes four times as long, and simulated fleets make many copies.
        """
        found = object.__new__(ReplicaState)
        for name in ReplicaState.__slots__:
            object.__setattr__(found, name, getattr(self, name))
        object.__setattr__(found, "free_blocks", free_blocks)
        object.__setattr__(found, "cached_blocks", cached_blocks)
        return found

    @property
    def owned_blocks(self) -> int:
        """Blocks that requests own."""
        return self.num_blocks - self.free_blocks

    @property
    def held_blocks(self) -> int:
        """Blocks with contents: owned ones, and free ones that can be reused."""
        return self.owned_blocks + self.cached_blocks
