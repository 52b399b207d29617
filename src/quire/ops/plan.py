"""The attention plan: a step's metadata, validated once and then used by every layer of a cache group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from quire.errors import BadValue, Unsupported, check_integer
from quire.ops.checks import INT32_MAX
from quire.ops.metadata import check_metadata
from quire.ops.spec import AttentionSpec

_KEYS = itertools.count(1)
_PLANS: WeakValueDictionary[int, AttentionPlan] = WeakValueDictionary()  # by key, as long as somebody holds them


class AttentionPlan:
    """Sizes and integer tensors of one step. A backend whose kernels want a work list subclasses it.

    The tensors are allocated once and keep their addresses over all `update`s, so that a captured graph or a
    registered operator may hold on to them. Only their first `num_tokens` / `num_seqs` entries count.

    A plan that `takes_device_metadata` has `update_on_device` too.

    Several threads may use one plan: attention, write_kv and updates take turns, each with the plan to itself. A call
    sees the last update that came before it, so its tensors have to fit that one.

    Raises BadValue for a size that an int32 does not hold, MemoryError where there is no room for the tensors.

    `key` names the plan where only a tensor can stand: the operators of a compiled graph find it by `plan_of`.
    """

    takes_device_metadata = False

    def __init__(self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_seqs", max_seqs), ("max_blocks", max_blocks)):
            check_integer(BadValue, name, value, 0, INT32_MAX)
        self.spec = spec
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.max_blocks = max_blocks
        self.num_tokens = 0  # T of the last update
        self.num_seqs = 0  # S of the last update
        self.covers_all = False  # whether launches cover all that any update may bring, as those of a graph have to
        self.writable = False  # whether the last update gave slots
        try:
            self.block_tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int32)  # [max_seqs, max_blocks]
            self.query_starts = torch.zeros(max_seqs + 1, dtype=torch.int32)  # [max_seqs + 1]
            self.context_lens = torch.zeros(max_seqs, dtype=torch.int32)  # [max_seqs]
            self.slots = torch.zeros(max_tokens, dtype=torch.int32)  # [max_tokens]
            self._nonfinite = torch.zeros(max_tokens, dtype=torch.int32)  # [max_tokens]
        except RuntimeError as error:  # which torch raises where there is no memory
            raise MemoryError(
                f"no memory for a plan of {max_tokens} query tokens and {max_seqs} sequences of {max_blocks} blocks"
            ) from error
        self.lock = Lock()  # held by whatever reads or changes the plan
        number = next(_KEYS)
        self.key = torch.tensor(number, device="cpu")  # int64 []
        _PLANS[number] = self

    def update(
        self,
        query_starts: torch.Tensor,  # int32 [S+1], host
        context_lens: torch.Tensor,  # int32 [S], host
        block_tables: torch.Tensor,  # int32 [S, M], host
        slots: torch.Tensor | None = None,  # int64 [T], host
    ) -> None:
        """Take over the metadata of one step.

        query_starts: sequence s owns the query rows query_starts[s]:query_starts[s+1].
        context_lens: KV tokens of each sequence, this step's included.
        block_tables: ids of each sequence's blocks; entries at or beyond ceil(context_len / B), or wholly below the
            window, are never read and may hold anything.
        slots: where write_kv puts each row's K and V, `block_id * B + offset`; -1 skips the row. Without slots the
            plan is read-only.

        Raises BadShape, BadDtype or BadValue, naming the argument, the sequence and the value; the plan then keeps
        what it held before.
        """
        with self.lock:
            self._update(query_starts, context_lens, block_tables, slots)

    def _update(
        self,
        query_starts: torch.Tensor,  # int32 [S+1], host
        context_lens: torch.Tensor,  # int32 [S], host
        block_tables: torch.Tensor,  # int32 [S, M], host
        slots: torch.Tensor | None,  # int64 [T], host
    ) -> None:
        check_metadata(
            self.spec,
            (self.max_tokens, self.max_seqs, self.max_blocks),
            query_starts,
            context_lens,
            block_tables,
            slots,
        )
        num_seqs, num_blocks = block_tables.shape
        num_tokens = int(query_starts[-1])
        self.query_starts[: num_seqs + 1].copy_(query_starts)
        self.context_lens[:num_seqs].copy_(context_lens)
        self.block_tables[:num_seqs, :num_blocks].copy_(block_tables)
        if slots is not None:
            self.slots[:num_tokens].copy_(slots)
        self._nonfinite[:num_tokens].zero_()
        self.num_tokens, self.num_seqs, self.writable = num_tokens, num_seqs, slots is not None

    @property
    def nonfinite(self) -> torch.Tensor:
        """Rows whose K or V was not finite when write_kv stored it, in any layer since the last update.

        int32 [T], on the device where that is a GPU's plan: 0 for rows that were finite or not written. A block that
        holds such a row is of no use to other requests.
        """
        return self._nonfinite[: self.num_tokens]

    def update_on_device(
        self,
        num_tokens: int,  # T
        query_starts: torch.Tensor,  # int32 or int64 [S+1], on the device
        context_lens: torch.Tensor,  # int32 or int64 [S], on the device
        block_tables: torch.Tensor,  # int32 or int64 [S, M], on the device
    ) -> None:
        """As `update`, from metadata on the device, which the host neither waits for nor checks. The plan is read-only.

        Raises Unsupported where the plan's work is cut on the host.
        """
        with self.lock:
            self._update_on_device(num_tokens, query_starts, context_lens, block_tables)

    def _update_on_device(
        self,
        num_tokens: int,  # T
        query_starts: torch.Tensor,  # int32 or int64 [S+1], on the device
        context_lens: torch.Tensor,  # int32 or int64 [S], on the device
        block_tables: torch.Tensor,  # int32 or int64 [S, M], on the device
    ) -> None:
        raise Unsupported("this plan is made on the host: give host tensors to its update")


def plan_of(
    key: torch.Tensor,  # int64 [], host
) -> AttentionPlan:
    """The plan of that key. Raises BadValue where there is none, as when nobody has held on to it."""
    plan = _PLANS.get(int(key))
    if plan is None:
        raise BadValue(f"plan is the key {int(key)}, and there is no such plan (any more): hold on to the plan itself")
    return plan


class Lockable(Protocol):
    """A plan of any kind."""

    lock: Lock


@contextmanager
def locked(plans: Iterable[Lockable]) -> Iterator[None]:
    """Within it, no other thread uses or updates these plans."""
    with ExitStack() as stack:
        for plan in sorted(set(plans), key=id):  # in one order everywhere, so that two threads do not block each other
            stack.enter_context(plan.lock)
        yield
