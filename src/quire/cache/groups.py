"""Cache groups: layers whose requests share one block table, and which blocks of it a request needs.

A block is the unit of a group's pool. In attention it holds the K and V of block_size tokens. Layers that keep a state
have two groups, because their recurrence is computed in pieces: in one a block is the state at the end
of a piece, in the other it is the rows of the piece in progress. In every group, block i of a request's table belongs
to the tokens i * span .. (i + 1) * span - 1, where span is the number of tokens a block stands for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

from quire.errors import ConfigError


class Group(ABC):
    """Which blocks a request needs, the same questions to every kind of group. span: tokens that a block stands for."""

    layers: tuple[int, ...]
    window: int | None  # keys that a row of these layers sees, its own included; None: all before it
    piece: int | None  # tokens of a piece, where the layers keep a state
    is_reusable: ClassVar[bool] = True  # full blocks may be found by other requests

    @abstractmethod
    def first(self, num_computed: int, span: int) -> int:
        """The first block that the row after num_computed tokens needs; those before it are free."""

    @abstractmethod
    def most(self, num_tokens: int, growth: int, span: int) -> int:
        """Blocks that a request owns at most on its way to num_tokens tokens, `growth` at a time."""

    def count(self, num_tokens: int, span: int) -> int:
        """Entries of a table for that many tokens."""
        return -(-num_tokens // span)

    def room(self, entries: int, span: int) -> int:
        """Tokens that so many entries of a table are enough for."""
        return entries * span

    def passed(self, num_sure: int, span: int) -> int:
        """The first block that a step has to store which computes num_sure tokens or more.

        Layers that keep a state pass it on from piece to piece, so a step stores only what comes after it.
        """
        return 0 if self.piece is None else self.first(num_sure, span)

    def stored(self, num_computed: int, num_cached: int) -> int:
        """Tokens that the blocks hold and that are not written again: also those that were found, but for a state."""
        return max(num_computed, num_cached) if self.piece is None else num_computed


@dataclass(frozen=True)
class Heads:
    """The heads of a layer's attention: they decide how much memory a token takes there."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    latent: int | None = None  # V is the first so many numbers of K, and not stored again; None: V is as wide as K


@dataclass(frozen=True)
class CacheGroup(Group):
    """Attention layers with the same window and heads. Most models have a single group."""

    layers: tuple[int, ...]  # those with memory: a layer may read another one's, and then is not here
    window: int | None = None
    heads: Heads = Heads(1, 1, 1)  # the books do not depend on them

    piece: int | None = field(default=None, init=False, repr=False)

    def first(self, num_computed: int, span: int) -> int:
        """As in Group: the window's first key is in it."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1) // span

    def most(self, num_tokens: int, growth: int, span: int) -> int:
        """As in Group."""
        whole = self.count(num_tokens, span)
        if self.window is None:
            return whole
        # What the first row of a step sees before itself, then the step's tokens; both ends may cut a block.
        return min(whole, -(-(self.window - 1 + growth) // span) + 1)


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """What a layer keeps of a sequence besides keys and values, in the letters of `quire.ops.recurrent`."""

    num_heads: int = 0  # Hv; 0: it is a convolution alone
    num_k_heads: int = 0  # Hk
    dim_k: int = 0  # Dk
    dim_v: int = 0  # Dv
    width: int = 0  # W; 0: it has no convolution
    taps: int = 1  # K


@dataclass(frozen=True)
class StateGroup(Group):
    """Layers that keep a state of the same sizes. A block is their state at the end of a piece; it is written once."""

    layers: tuple[int, ...]
    piece: int
    sizes: StateSizes = StateSizes()  # the books do not depend on them

    window: int | None = field(default=None, init=False, repr=False)

    def first(self, num_computed: int, span: int) -> int:
        """As in Group: the state at the end of the last full piece."""
        return max(0, num_computed // span - 1)

    def count(self, num_tokens: int, span: int) -> int:
        """As in Group: a piece that is not full has no state at its end."""
        return num_tokens // span

    def room(self, entries: int, span: int) -> int:
        """As in Group."""
        return (entries + 1) * span - 1

    def most(self, num_tokens: int, growth: int, span: int) -> int:
        """As in Group: in a step the state that it begins with and the one that it ends with.

        Where siblings are to be forked after a prompt, also the one before that.
        """
        return min(self.count(num_tokens, span), 2 if growth == 1 else 3)


@dataclass(frozen=True)
class RowGroup(Group):
    """The same layers as a StateGroup. A block is what they keep of the rows of a piece that is not full."""

    layers: tuple[int, ...]
    piece: int
    sizes: StateSizes = StateSizes()

    window: int | None = field(default=None, init=False, repr=False)
    is_reusable: ClassVar[bool] = False

    def first(self, num_computed: int, span: int) -> int:
        """As in Group: the rows of a full piece have gone into a state."""
        return num_computed // span

    def most(self, num_tokens: int, growth: int, span: int) -> int:
        """As in Group: the rows that a step begins with and those that it ends with."""
        return min(self.count(num_tokens, span), 1 if growth == 1 else 2)


AnyGroup: TypeAlias = CacheGroup | StateGroup | RowGroup


def plans_of_layers(groups: Sequence[AnyGroup]) -> dict[int, int]:
    """By layer, the index of its plan: there is one for each group of attention and one for each group of states."""
    planned = [group for group in groups if isinstance(group, CacheGroup)]
    return {
        layer: index
        for index, group in enumerate([*planned, *(group for group in groups if isinstance(group, StateGroup))])
        for layer in group.layers
    }


def has_states(groups: Sequence[AnyGroup]) -> bool:
    """Whether any of these layers keep a state."""
    return any(isinstance(group, StateGroup) for group in groups)


def check_pieces(groups: Sequence[AnyGroup], block_size: int, state_snapshot_interval: int) -> None:
    """Raise ConfigError where pieces are not whole blocks, or intervals between states not whole pieces."""
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
    """Blocks of the groups of layers that keep a state. Zeros where a model has none."""

    states: int = 0
    rows: int = 0
    hosts: int = 0  # on the host, of each of the two, for requests that are swapped out

    def of(self, group: StateGroup | RowGroup) -> int:
        """Blocks of the group."""
        return self.states if isinstance(group, StateGroup) else self.rows


NO_STATES = StatePools()
