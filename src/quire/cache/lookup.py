"""PrefixLookup: find the cached blocks of a request's first tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from quire.cache.groups import AnyGroup, CacheGroup, StateGroup
from quire.cache.pool import NONE
from quire.cache.prefix import PrefixIndex, block_digest, block_tokens, root_digest, root_salt, why_missing
from quire.cache.scores import Scores
from quire.request import Miss, PrefixReport, Request

ELSEWHERE = -2  # in place of a block that can be read into a pool


@dataclass(frozen=True)
class Match:
    """The cached blocks that a waiting request could share for its first tokens."""

    num_blocks: int  # full blocks of block_size tokens that need not be computed
    reach: int  # the same, disregarding missing states
    first: list[int]  # of each group, the first block that a later row needs
    blocks: list[array[int]]  # of each group, the blocks from the first one on


class PrefixLookup:
    """Names the blocks of requests' tokens, and looks them up in the indexes. It neither allocates nor frees blocks."""

    def __init__(
        self,
        groups: Sequence[AnyGroup],
        indexes: Sequence[PrefixIndex],  # of each group
        block_size: int,
        *,
        enable_prefix_caching: bool,
        salt: str,
        scores: Scores,
    ) -> None:
        """See `BlockManager`."""
        self.groups = tuple(groups)
        self.indexes = indexes
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.salt = salt
        self.weights = ""  # set when they are replaced: another text for each replacement
        self.scores = scores
        self.spans = tuple(group.piece or block_size for group in groups)  # tokens of a block of each group
        self.unit = max(self.spans)  # tokens: a shared prefix is a multiple of it
        self.attention_groups = tuple(g for g, group in enumerate(groups) if isinstance(group, CacheGroup))
        self.state_groups = tuple(g for g, group in enumerate(groups) if isinstance(group, StateGroup))
        # Full attention leaves the fewest blocks to look up in the other groups.
        self._order = sorted(
            range(len(groups)), key=lambda g: (g not in self.attention_groups, groups[g].window is not None)
        )

    @property
    def leading_group(self) -> int:
        """The group whose blocks are looked up first: full attention if there is any."""
        return self._order[0]

    def digest(self, request: Request, index: int) -> bytes:
        """Return the digest of the request's full block `index`."""
        self.know_digests(request, index + 1)
        return request.cache.digests[index + 1]

    def know_digests(self, request: Request, count: int) -> None:
        """Extend the request's digests to its first `count` blocks."""
        digests, size = request.cache.digests, self.block_size
        if not digests:
            salt = root_salt(self.salt + self.weights, request.cache_salt, request.lora_digest)
            if not self.enable_prefix_caching:  # a salt that only its siblings share
                salt += f"\0{request.schedule.sort_key[1]}"
            digests.append(root_digest(salt))
        first = len(digests) - 1
        for i, tokens in enumerate(block_tokens(request.tokens, first, count, size), first):
            begun = b"" if request.images is None else request.images.begun_in(i * size, (i + 1) * size)
            digests.append(block_digest(digests[-1], tokens + begun))

    def shares(self, request: Request) -> bool:
        """Return whether the request shares blocks with others or, without a prefix cache, with its siblings."""
        return self.enable_prefix_caching or request.group is not None

    def num_reusable(self, request: Request) -> int:
        """Return the number of the request's full blocks that may be reused ones: a multiple of the sharing unit."""
        if not self.shares(request) or request.is_whole:
            return 0
        usable = len(request.tokens) - bool(self.state_groups)  # a state either includes the last token or does not
        needs_rows = (
            request.sampling.prompt_logprobs is not None and request.next_prompt_logprob < request.num_prompt - 1
        )
        if needs_rows and not self.scores.serve(request):
            usable = request.next_prompt_logprob
        return self._uncut(request, usable) // self.block_size

    def _uncut(self, request: Request, num_tokens: int) -> int:
        """Return the most whole sharing units of these tokens that end within no image which one step computes."""
        whole = num_tokens // self.unit * self.unit
        if request.images is None or (end := request.images.uncut(whole)) == whole:
            return whole
        return self._uncut(request, end)

    def start(self, request: Request, num_cached: int) -> int:
        """Return the first row that a request with that many cached tokens computes.

        The last cached row is computed again if the logprob of the token after it is needed.
        """
        again = request.next_prompt_logprob < num_cached < request.num_prompt and self.scores.serve(request)
        return min(num_cached - again, len(request.tokens) - 1)

    def match(self, request: Request, more: Callable[[int, bytes, bytes, bytes], bool] | None = None) -> Match:
        """Find the longest prefix of the request's tokens whose needed blocks are cached in every group.

        more: returns whether a block of a group, with that digest, parent and tokens, is available outside the indexes;
        such a block is ELSEWHERE in the match.
        """
        count, size = self.num_reusable(request), self.block_size
        self.know_digests(request, count)
        found: list[array[int]] = [array("i")] * len(self.groups)
        starts: dict[int, list[int]] = {}  # of a windowed group, by count: start of the run of blocks that ends there
        for g in self._order:
            there = self.find(request, g, 0, count * size // self.spans[g], more)
            if isinstance(self.groups[g], CacheGroup) and self.groups[g].window is None:
                found[g] = array("i", takewhile(lambda block: block != NONE, there))
                count = len(found[g])
                if g == self.scores.group and self.scores.serve(request):
                    count = self.scores.covered(request, found[g])
                continue
            found[g] = array("i", there)
            if isinstance(self.groups[g], CacheGroup):
                starts[g] = [0]
                for i, block in enumerate(found[g]):
                    starts[g].append(i + 1 if block == NONE else starts[g][i])

        def first(g: int) -> int:
            return self.groups[g].first(self.start(request, count * size), self.spans[g])

        def has_states() -> bool:
            ends = [divmod(count * size, self.spans[g]) for g in self.state_groups]
            return all(
                rest == 0 and found[g][i - 1] != NONE for g, (i, rest) in zip(self.state_groups, ends, strict=True)
            )

        def is_cut() -> bool:
            return request.images is not None and request.images.uncut(count * size) < count * size

        def begins_late() -> bool:
            return any(starts[g][count] > first(g) for g in starts)

        while count > 0 and (begins_late() or is_cut()):
            count -= 1
        reach = count
        while count > 0 and (begins_late() or is_cut() or not has_states()):
            count -= 1
        ends = [count * size // span for span in self.spans]
        begins = [min(end, first(g)) for g, end in enumerate(ends)]
        blocks = [those[begin:end] for those, begin, end in zip(found, begins, ends, strict=True)]
        return Match(count, reach if self.attention_groups else count, begins, blocks)

    def find(
        self,
        request: Request,
        group: int,
        start: int,
        stop: int,
        more: Callable[[int, bytes, bytes, bytes], bool] | None = None,
    ) -> Iterator[int]:
        """Yield the group's cached blocks start..stop of the request's tokens; NONE for a missing one.

        more: see `match`.
        """
        size, span, tokens, digests = self.block_size, self.spans[group], request.tokens, request.cache.digests
        for i in range(start, stop if self.groups[group].is_reusable else start):
            at = (i + 1) * span // size - 1  # a block is named by the digest at its end
            names = digests[at + 1], digests[at], tokens[at * size : (at + 1) * size].tobytes()
            found = self.indexes[group].find(*names)
            if found is None:
                found = ELSEWHERE if more is not None and more(group, *names) else NONE
            yield found

    def _lacks_scores(self, request: Request, count: int) -> bool:
        """Return whether the request's block `count` is cached, but not the logprobs that the request needs."""
        group = self.scores.group
        return (
            group is not None and self.scores.serve(request) and NONE not in self.find(request, group, count, count + 1)
        )

    def parting(self, reach: int) -> int:
        """Return `reach` in whole sharing units: where prefixes diverge, and a stored state would have been reused."""
        return reach // self.unit * self.unit

    def explain(self, request: Request, match: Match, now: float) -> PrefixReport:
        """Explain why the request finds no more blocks than this. now: seconds."""
        size, count = self.block_size, match.num_blocks
        full = self._uncut(request, request.num_prompt - bool(self.state_groups)) // size
        reason, first_difference, seconds_ago, window = None, None, None, None
        if count >= full:
            reason = Miss.SHORT if full == 0 else None
        elif not self.enable_prefix_caching:
            reason = Miss.DISABLED
        elif count >= self.num_reusable(request) or self._lacks_scores(request, count):
            reason = Miss.PROMPT_LOGPROBS
        elif (parted := self.parting(match.reach * size)) > count * size:
            reason, digest = Miss.STATE, self.digest(request, parted // size - 1)
            lost = [at for g in self.state_groups if (at := self.indexes[g].evicted_at(digest)) is not None]
            seconds_ago = now - max(lost) if lost else None
        else:
            at = match.reach if self.attention_groups else count + self.unit // size - 1
            groups = self.attention_groups or self.state_groups
            if request.images is not None:  # the first blocks of an image may be cached without the others
                known = (all(name in self.indexes[g] for g in groups) for name in request.cache.digests[at + 1 : full])
                at += sum(takewhile(bool, known))
            tokens = request.tokens[at * size : (at + 1) * size].tobytes()
            parent, digest = request.cache.digests[at : at + 2]
            short = next((g for g in groups if digest not in self.indexes[g]), groups[0])
            reason, more = why_missing(self.indexes[short], parent, digest, tokens, at == 0)
            if reason is Miss.DIFFERS:
                first_difference = at * size + int(more)
            elif reason in (Miss.EVICTED, Miss.EXPIRED, Miss.BUDGET):
                seconds_ago, window = now - more, self.groups[short].window
        cached = min(count, full) * size
        reach = max(cached, match.reach * size)
        return PrefixReport(request.num_prompt, cached, self.unit, reason, first_difference, seconds_ago, reach, window)
