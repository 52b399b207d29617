"""Sharing in flight: blocks that running requests are computing and that waiting requests could then reuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from quire.cache.manager import BlockManager
from quire.engine.queue import WaitingQueue
from quire.request import Request


class ComingBlocks:
    """The blocks that requests fill next, and the states that they will soon leave to others.

    Rebuilt in each step, so no entry outlives its request.
    """

    def __init__(self, manager: BlockManager, requests: Iterable[Request]) -> None:
        self._manager = manager
        # By the block's index in its request, digests, and whether logprobs of the prompt are stored with the block.
        self._digests: dict[int, dict[bytes, bool]] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Add the next block of a running request, and the state that it leaves where prefixes diverge.

        Skipped are a block that is already cached, a block whose tokens are not all known, and a block that will not be
        published because something before it is not finite.
        """
        if request.cache.nonfinite_at is not None:
            return
        manager, size = self._manager, self._manager.block_size
        if not request.cache.block_ids or not manager.lookup.shares(request):
            return
        # Where a state was missing, cached keys and values are computed again.
        index = max(request.cache.num_computed, request.cache.num_cached, request.cache.reach) // size
        if (index + 1) * size <= len(request.tokens):
            self._add(request, index, manager.attention_groups)
        if (parted_at := manager.parted_at(request)) > request.cache.num_computed:
            self._add(request, parted_at // size - 1, manager.state_groups)

    def _add(self, request: Request, index: int, groups: Iterable[int]) -> None:
        """Add the full block at `index` of the request, unless it is already indexed in all of these groups."""
        digest = self._manager.lookup.digest(request, index)
        if any(digest not in self._manager.indexes[g] for g in groups):
            of_index, is_scored = self._digests.setdefault(index, {}), request.sampling.prompt_logprobs is not None
            of_index[digest] = is_scored or of_index.get(digest, False)

    def help(self, request: Request) -> bool:
        """Return whether the waiting request could reuse one of these blocks from the cache."""
        lookup, must_be_scored = self._manager.lookup, self._manager.scores.serve(request)
        reusable = lookup.num_reusable(request)
        within = ((index, digests) for index, digests in self._digests.items() if index < reusable)
        found = (digests.get(lookup.digest(request, index)) for index, digests in within)
        return any(is_scored is not None and is_scored >= must_be_scored for is_scored in found)


def unforked(request: Request, waiting: WaitingQueue) -> Iterator[Request]:
    """Return the siblings that wait to be forked from a request whose prompt is being computed."""
    group = request.group
    if group is None or request.driven or request.num_generated > 0:
        return iter(())

    def is_unforked(member: Request) -> bool:
        return member in waiting and member.num_generated == 0 and member.finish_reason is None

    members = group.members
    while group.num_born < len(members) and not is_unforked(members[group.num_born]):
        group.num_born += 1
    return filter(is_unforked, islice(members, group.num_born, None))
