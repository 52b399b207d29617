"""The attention plan: a step's metadata, validated once and then used by every layer of a cache group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch

from quire.errors import BadValue, Unsupported, check_integer
from quire.ops.checks.metadata import Step, check_metadata
from quire.ops.checks.tensors import INT32_MAX
from quire.ops.spec import AttentionSpec

_KEYS = itertools.count(1)
_PLANS: WeakValueDictionary[int, AttentionPlan] = WeakValueDictionary()  # by key, while referenced


class AttentionPlan:
    """Sizes and integer tensors of one step. Use `Backend.plan` or `Backend.make_plan` to make one.

    The tensors are allocated once and keep their addresses over all `update`s, so that a captured graph or a
    registered operator may refer to them. Only their first `num_tokens` / `num_seqs` entries are valid. A backend whose
    kernels need a work list subclasses this class.

    `num_tokens` and `num_seqs` are T and S of the last update. A plan with `takes_device_metadata` also supports
    `update_on_device`. `key` identifies the plan where only a tensor is allowed: the operators of a compiled graph look
    it up with `plan_of`.

    Several threads may use one plan: attention, write_kv and updates lock it. A call sees the last update before it, so
    its tensors have to match that update.

    Args:
        spec: of the layers that use the plan.
        max_tokens: largest T of an update.
        max_seqs: largest S of an update.
        max_blocks: largest M of an update, blocks per sequence.

    Raises:
        BadValue: for a size that does not fit an int32.
        MemoryError: if the tensors cannot be allocated.
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
        self.covers_all = False  # True if launches cover every possible update, as a captured graph requires
        self.writable = False  # True if the last update had slots
        self.key_ends: torch.Tensor | None = None  # int32 [T], of the last update
        try:
            self.block_tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int32)  # [max_seqs, max_blocks]
            self.query_starts = torch.zeros(max_seqs + 1, dtype=torch.int32)  # [max_seqs + 1]
            self.context_lens = torch.zeros(max_seqs, dtype=torch.int32)  # [max_seqs]
            self.slots = torch.zeros(max_tokens, dtype=torch.int32)  # [max_tokens]
            self._nonfinite = torch.zeros(max_tokens, dtype=torch.int32)  # [max_tokens]
        except RuntimeError as error:  # torch's error for a failed allocation
            raise MemoryError(
                f"no memory for a plan of {max_tokens} query tokens and {max_seqs} sequences of {max_blocks} blocks"
            ) from error
        home = (self.query_starts, self.context_lens, self.block_tables, self.slots, self._nonfinite)
        self._home = tuple(tensor.numpy() for tensor in home)  # the same memory: numpy takes half of torch's time
        self.lock = Lock()  # held while the plan is read or changed
        number = next(_KEYS)
        self.key = torch.tensor(number, device="cpu")  # int64 []
        _PLANS[number] = self

    def update(
        self,
        query_starts: torch.Tensor,  # int32 [S+1], host: sequence s has the query rows query_starts[s]:[s+1]
        context_lens: torch.Tensor,  # int32 [S], host: KV tokens of each sequence, including this step's
        block_tables: torch.Tensor,  # int32 [S, M], host: ids of each sequence's blocks
        slots: torch.Tensor | None = None,  # int64 [T], host: where write_kv stores each row; None: read-only
        key_ends: torch.Tensor | None = None,  # int32 [T], host: a row sees the keys before it, and none after
    ) -> None:
        """Set the metadata of one step.

        Entries of `block_tables` at or beyond ceil(context_len / B), or entirely below the window, are never read and
        may have any value. A slot is `block_id * B + offset`; -1 skips the row.

        Without `key_ends` a row of a causal plan sees the keys up to its own position. With it, rows see later keys of
        their sequence, too: those of an image that attend to one another all have the position after the image. It must
        not fall from one row of a sequence to the next. Windows begin where they do without it.

        Raises:
            BadShape, BadDtype, BadValue: naming the argument, the sequence and the value. The plan is then unchanged.
        """
        step = Step(query_starts, context_lens, block_tables, slots, key_ends)
        with self.lock:
            check_metadata(self.spec, (self.max_tokens, self.max_seqs, self.max_blocks), step)
            self._update(step)

    def update_trusted(
        self,
        query_starts: torch.Tensor,  # int32 [S+1], host
        context_lens: torch.Tensor,  # int32 [S], host
        block_tables: torch.Tensor,  # int32 [S, M], host
        slots: torch.Tensor | None,  # int64 [T], host
        key_ends: torch.Tensor | None = None,  # int32 [T], host
    ) -> None:
        """Set the metadata of one step without a check, as `update` does.

        For an engine, whose block manager makes the values. Wrong ones make kernels access memory that is not theirs.
        """
        with self.lock:
            self._update(Step(query_starts, context_lens, block_tables, slots, key_ends))

    def _update(self, step: Step) -> None:
        query_starts, context_lens, block_tables, slots, key_ends = step
        num_seqs, num_blocks = block_tables.shape
        given = query_starts.numpy()
        num_tokens = int(given[-1])
        starts, lengths, tables, places, nonfinite = self._home
        starts[: num_seqs + 1] = given
        lengths[:num_seqs] = context_lens.numpy()
        tables[:num_seqs, :num_blocks] = block_tables.numpy()
        if slots is not None:
            places[:num_tokens] = slots.numpy()
        nonfinite[:num_tokens] = 0
        self.key_ends = None if key_ends is None else key_ends.to(torch.int32, copy=True).contiguous()
        self.num_tokens, self.num_seqs, self.writable = num_tokens, num_seqs, slots is not None

    @property
    def nonfinite(self) -> torch.Tensor:
        """Flags of rows whose K or V was not finite when write_kv stored it, in any layer since the last update.

        int32 [T], 1 for such a row and 0 for others; on the device if the plan is a GPU's. A block with such a row must
        not be shared with other requests.
        """
        return self._nonfinite[: self.num_tokens]

    def update_on_device(
        self,
        num_tokens: int,  # T
        query_starts: torch.Tensor,  # int32 or int64 [S+1], on the device
        context_lens: torch.Tensor,  # int32 or int64 [S], on the device
        block_tables: torch.Tensor,  # int32 or int64 [S, M], on the device
    ) -> None:
        """Set the metadata from tensors on the device, without a synchronisation or a check of their values.

        The arguments are those of `update`. The plan is then read-only.

        Raises:
            Unsupported: if the plan needs the metadata on the host to divide its work.
        """
        with self.lock:
            self._update_on_device(num_tokens, Step(query_starts, context_lens, block_tables, None))

    def _update_on_device(self, num_tokens: int, step: Step) -> None:
        raise Unsupported("this plan is made on the host: give host tensors to its update")


def plan_of(
    key: torch.Tensor,  # int64 [], host
) -> AttentionPlan:
    """Return the plan with that key. Raises BadValue if it does not exist or was garbage-collected."""
    plan = _PLANS.get(int(key))
    if plan is None:
        raise BadValue(f"plan is the key {int(key)}, and there is no such plan (any more): keep the plan alive")
    return plan


class Outline(NamedTuple):
    """The properties of a plan that checks read, known without the values of a step: while torch traces a graph."""

    spec: AttentionSpec
    num_tokens: int  # T
    num_seqs: int  # S


class Lockable(Protocol):
    """A plan of any kind."""

    lock: Lock


@contextmanager
def locked(plans: Iterable[Lockable]) -> Iterator[None]:
    """Hold the locks of these plans: within the context no other thread uses or updates them."""
    with ExitStack() as stack:
        for plan in sorted(set(plans), key=id):  # always in the same order, so that two threads cannot deadlock
            stack.enter_context(plan.lock)
        yield
