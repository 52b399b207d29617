"""Cache groups: sets of layers for which a request has one block table, and the blocks of it that a request needs.

A block is the unit of a group's pool. In attention it contains the K and V of block_size tokens. Layers that keep a
state have two groups, because their recurrence is computed in pieces: in one a block is the state at the end of a
piece, in the other it is the rows of the piece in progress. In every group, block i of a request's table belongs to the
tokens i * span .. (i + 1) * span - 1, where span is the number of tokens of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

from quire.errors import ConfigError

NEVER = 2**62  # a number of tokens that no sequence has


class BlockGroup(ABC):
    """Computes the blocks that a request needs, for every kind of group. span: number of tokens of a block."""

    layers: tuple[int, ...]
    window: int | None  # keys that a row of these layers attends to, including its own; None: all before it
    piece: int | None  # tokens of a piece, for layers that keep a state
    is_reusable: ClassVar[bool] = True  # full blocks may be reused by other requests

    @abstractmethod
    def first(self, num_computed: int, span: int) -> int:
        """Return the first block that the row after num_computed tokens needs; the blocks before it are free."""

    @abstractmethod
    def most(self, num_tokens: int, growth: int, span: int) -> int:
        """Return the maximum number of blocks of a request that grows to num_tokens tokens, `growth` at a time."""

    @abstractmethod
    def freed_at(self, block: int, span: int) -> int:
        """Return the number of computed tokens from which block `block` is free: `first` is then beyond it."""

    def count(self, num_tokens: int, span: int) -> int:
        """Return the number of table entries for that many tokens."""
        return -(-num_tokens // span)

    def room(self, entries: int, span: int) -> int:
        """Return the number of tokens that fit into `entries` entries of a table."""
        return entries * span

    def passed(self, num_sure: int, span: int) -> int:
        """Return the first block that must be stored by a step that computes num_sure tokens or more.

        Layers that keep a state pass it on from piece to piece, so a step stores only the blocks after it.
        """
        return 0 if self.piece is None else self.first(num_sure, span)

    def stored(self, num_computed: int, num_cached: int) -> int:
        """Return the number of stored tokens, not to be written again.

        It includes cached ones, unless layers keep a state.
        """
        return max(num_computed, num_cached) if self.piece is None else num_computed


@dataclass(frozen=True)
class Heads:
    """The heads of a layer's attention, which determine its memory per token."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    latent: int | None = None  # V is that number of leading columns of K, not stored again; None: V is as wide as K
    index_dim: int = 0  # numbers after those of K: the key of an indexer; only of a latent cache

    @property
    def numbers(self) -> int:
        """The stored numbers of a token, without scales."""
        return self.num_kv_heads * ((2 if self.latent is None else 1) * self.head_dim + self.index_dim)


@dataclass(frozen=True)
class CacheGroup(BlockGroup):
    """Attention layers with the same window and heads. Most models have a single group."""

    layers: tuple[int, ...]  # those with memory: a layer that reuses another one's is not listed
    window: int | None = None
    heads: Heads = Heads(1, 1, 1)  # block tables do not depend on them
    causal: bool = True  # a row attends to no key after its own

    piece: int | None = field(default=None, init=False, repr=False)

    def first(self, num_computed: int, span: int) -> int:
        """Return the block of the window's first key, see `Group.first`."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1) // span

    def freed_at(self, block: int, span: int) -> int:
        """See `Group.freed_at`."""
        return NEVER if self.window is None else (block + 1) * span + self.window - 1

    def most(self, num_tokens: int, growth: int, span: int) -> int:
        """See `Group.most`."""
        whole = self.count(num_tokens, span)
        if self.window is None:
            return whole
        # The keys before a step's first row, then the step's tokens; both ends may be within a block.
        return min(whole, -(-(self.window - 1 + growth) // span) + 1)


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """Sizes of a layer's state, apart from keys and values, in the letters of `quire.ops.recurrent`."""

    num_heads: int = 0  # Hv; 0: it is only a convolution
    num_k_heads: int = 0  # Hk
    dim_k: int = 0  # Dk
    dim_v: int = 0  # Dv
    width: int = 0  # W; 0: it has no convolution
    taps: int = 1  # K
    dim_decay: int = 0  # decays of a head; 0: one


@dataclass(frozen=True)
class StateGroup(BlockGroup):
    """Layers that keep a state of the same sizes. A block is their state at the end of a piece; it is written once."""

    layers: tuple[int, ...]
    piece: int
    sizes: StateSizes = StateSizes()  # block tables do not depend on them

    window: int | None = field(default=None, init=False, repr=False)

    def first(self, num_computed: int, span: int) -> int:
        """Return the state at the end of the last full piece, see `Group.first`."""
        return max(0, num_computed // span - 1)

    def freed_at(self, block: int, span: int) -> int:
        """See `Group.freed_at`."""
        return (block + 2) * span

    def count(self, num_tokens: int, span: int) -> int:
        """Return the number of full pieces: a partial piece has no state at its end. See `Group.count`."""
        return num_tokens // span

    def room(self, entries: int, span: int) -> int:
        """See `Group.room`."""
        return (entries + 1) * span - 1

    def most(self, num_tokens: int, growth: int, span: int) -> int:
        """Return the most states of a request: a step needs its first and its last one, see `Group.most`.

        If siblings have to be forked after a prompt, it also needs the state before the last one.
        """
        return min(self.count(num_tokens, span), 2 if growth == 1 else 3)


@dataclass(frozen=True)
class RowGroup(BlockGroup):
    """The same layers as a StateGroup. A block is the rows that they keep of a partial piece."""

    layers: tuple[int, ...]
    piece: int
    sizes: StateSizes = StateSizes()

    window: int | None = field(default=None, init=False, repr=False)
    is_reusable: ClassVar[bool] = False

    def first(self, num_computed: int, span: int) -> int:
        """Return the piece in progress, since the rows of a full piece are merged into a state. See `Group.first`."""
        return num_computed // span

    def freed_at(self, block: int, span: int) -> int:
        """See `Group.freed_at`."""
        return (block + 1) * span

    def most(self, num_tokens: int, growth: int, span: int) -> int:
        """Return the most blocks of rows: a step needs its first and its last one, see `Group.most`."""
        return min(self.count(num_tokens, span), 1 if growth == 1 else 2)


AnyGroup: TypeAlias = CacheGroup | StateGroup | RowGroup


def plans_of_layers(groups: Sequence[AnyGroup]) -> dict[int, int]:
    """Return the index of each layer's plan: there is one per group of attention and one per group of states."""
    planned = [group for group in groups if isinstance(group, CacheGroup)]
    return {
        layer: index
        for index, group in enumerate([*planned, *(group for group in groups if isinstance(group, StateGroup))])
        for layer in group.layers
    }


def has_states(groups: Sequence[AnyGroup]) -> bool:
    """Return whether any of these layers keep a state."""
    return any(isinstance(group, StateGroup) for group in groups)


def check_pieces(groups: Sequence[AnyGroup], block_size: int, state_snapshot_interval: int) -> None:
    """Raise ConfigError if a piece is not whole blocks, or the interval between states not whole pieces."""
    for piece in {group.piece for group in groups if isinstance(group, StateGroup)}:
        if piece % block_size:
            right = [size for size in range(1, piece + 1) if piece % size == 0]
            raise ConfigError(
                f"block_size is {block_size}; this model has layers that keep a state, which they compute in pieces of "
                f"{piece} tokens, so it must be one of {', '.join(map(str, right))}"
            )
        if state_snapshot_interval % piece:
            below = max(piece, state_snapshot_interval // piece * piece)
            raise ConfigError(
                f"state_snapshot_interval is {state_snapshot_interval}; states are computed at multiples of {piece} "
                f"tokens, so it must be a multiple of that, such as {below}"
            )


class StatePools(NamedTuple):
    """Numbers of blocks of the groups of layers that keep a state; zeros for a model without such layers."""

    states: int = 0
    rows: int = 0
    hosts: int = 0  # on the host, of each of the two, for swapped-out requests

    def of(self, group: StateGroup | RowGroup) -> int:
        """Return the number of blocks of the group."""
        return self.states if isinstance(group, StateGroup) else self.rows


NO_STATES = StatePools()
