"""Scheduler: distributes each step's tokens among the requests, and preempts requests."""

from __future__ import annotations

import logging
from functools import cached_property
from itertools import chain, islice

from quire.cache.manager import Move
from quire.engine.committer import Committer
from quire.engine.decisions import (
    Hold,
    fits,
    free_slots,
    may_pass,
    num_new_tokens,
    slots_wanted,
    who_gives_way,
)
from quire.engine.decode_rows import DecodeRows
from quire.engine.inflight_prefixes import ComingBlocks, unforked
from quire.engine.limits import check_size
from quire.engine.lookahead import plan_ahead
from quire.engine.plan import Plan, PlanItem, StepOutput
from quire.engine.policy import BLIND_TO_PRIORITY
from quire.engine.prefetch import NAP
from quire.engine.scheduler_state import SchedulerState
from quire.engine.step_events import StepEvents
from quire.errors import OutOfBlocks, RequestError
from quire.request import BACKGROUND_PRIORITY, Event, Request

log = logging.getLogger("quire")


class Scheduler(SchedulerState):
    """Continuous batching by one rule: num_computed catches up with len(tokens), within a token budget per step.

    A prompt, a chunk of one, a single decoded token, the rest after a prefix hit and the recomputation of a preempted
    request are all the same subtraction. A request waits, runs (it owns blocks), or is swapped out (it owns blocks on
    the host). Running requests share the budget first. Requests are admitted in the order of their ranks. When blocks
    run out, the last running ones are preempted, and preempted requests resume first: no request can take a block from
    the first of all, so all of them end.
    """

    @cached_property
    def committer(self) -> Committer:
        """Applies the results of steps."""
        return Committer(self)

    def check(self, request: Request) -> None:
        """Raise RequestError, with the numbers, if the request could never run here."""
        if request.priority not in (0, BACKGROUND_PRIORITY) and self.order in BLIND_TO_PRIORITY:
            message = f"request {request.id} has priority {request.priority}"
            raise RequestError(f"{message}; only scheduling_policy='priority' uses it", "priority")
        check_size(
            request,
            self.longest(request),
            self.manager,
            self.max_model_len,
            self.max_num_seqs,
            self.max_num_batched_tokens,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and queues nothing, if it could never run or its id is taken.

        Siblings must be added one after the other.
        """
        if not request.is_checked:
            self.check(request)
        if request.guide is not None:
            try:
                request.schedule.allowed = request.guide.allowed()
            except Exception as error:
                raise RequestError(f"request {request.id}: its grammar allows no first token: {error}") from error
        self.register(request)
        if request.images is not None:
            self.longest_run = max(self.longest_run, request.images.longest_run)
        self.waiting.add(request)

    # --------------------------------------------------------------------------- requests whose tokens a driver chooses

    def extend(self, request: Request, token: int) -> None:
        """Append the next token to a driven request."""
        request.tokens.append(token)

    def fork(self, parent: Request, child: Request) -> None:
        """Make the child, a new request or a sibling that drops its own state, continue from the parent.

        The child already has the parent's tokens. It inherits everything that determines the parent's numbers, such as
        its adapter. If the parent was preempted and its tokens are not all in the cache, the child is recomputed too.
        """
        child.inherit(parent)
        if child.id not in self.requests:
            self.register(child)
        is_running = bool(child.cache.block_ids)
        self.leave(child)
        self.manager.forget_tokens(child)
        if parent.cache.block_ids and parent.num_missing == 0 and (is_running or len(self.running) < self.max_num_seqs):
            self.manager.fork(parent, child)
            self.running.add(child)
        else:
            self.waiting.add(child)

    # ------------------------------------------------------------------------------------------------- a step

    def plan(self) -> Plan:
        """Plan the next step: running requests first, then preempted ones, then new ones."""
        plan = Plan()
        self.num_plans += 1
        self.manager.begin_step(self.clock())
        if self.prefetch is not None:
            self.prefetch.begin_step()
        lacking = self._keep_running(plan)
        if not plan.preempted:  # blocks freed for one request are not given to another in the same step
            self._bring_back(plan, lacking)
            self._admit(plan, lacking)
        if self.prefetch is not None:
            self.prefetch.planned(plan)
            if plan.is_empty and not (plan.failed or self.marked) and self.prefetch.is_waiting:
                self.prefetch.arrivals.wait(NAP)
                return plan
        if self.running and plan.is_empty and not (plan.preempted or plan.failed or self.marked):
            # No request can advance: siblings that wait for one another own the blocks that the next one in the queue
            # needs. They are put in the queue after it; if swapped to the host, they would resume before it.
            self._preempt(self.running.last_unit(), None, plan)
        self.keep_states(plan)
        return plan

    def _keep_running(self, plan: Plan) -> list[int]:
        """Plan the running requests. Return the blocks of each group that they will still need for their tokens.

        Every request that needs a single token gets it before a long prompt takes the rest of the budget.
        """
        if self.rows is not None and (lacking := self._keep_rows(self.rows, plan)) is not None:
            return lacking
        singles = sum([len(request.tokens) - request.cache.num_computed == 1 for request in self.running])
        all_decode = singles == len(self.running) and not self.swapped
        budget = self.budget = self._step_budget(singles)
        lacking = [0] * len(self.manager.groups)
        at = 0
        while at < len(self.running) and budget > 0:  # the list may lose its tail meanwhile
            request = self.running[at]
            at += 1
            missing = len(request.tokens) - request.cache.num_computed
            num_new = num_new_tokens(request, request.cache.num_computed, missing, budget, singles)
            singles -= missing == 1
            if missing == 0 or request.finish_reason is not None:
                continue
            if num_new <= 0:
                lacking = [a + b for a, b in zip(lacking, self.manager.lacking(request), strict=True)]
                continue
            try:
                has_room = self._make_room(request, request.cache.num_computed + num_new, plan)
            except Exception as error:
                plan.failed.append((request, error))
                continue
            if has_room:
                plan.rest.append(PlanItem(request, request.cache.num_computed, num_new))
                budget -= num_new
                if num_new < missing:
                    lacking = [a + b for a, b in zip(lacking, self.manager.lacking(request), strict=True)]
        plan.num_tokens = self.budget - budget
        if all_decode and not plan.preempted:
            self._add_drafts(plan, budget)
        return lacking

    def _add_drafts(self, plan: Plan, budget: int) -> None:
        """Add draft tokens to a step in which all requests decode, unless a waiting request may join them."""
        nobody_comes = not self.waiting or len(self.running) >= self.max_num_seqs
        if self.speculation is not None and nobody_comes:
            self.speculation.add_to(plan, self.manager, self.longest, budget)

    def _keep_rows(self, rows: DecodeRows, plan: Plan) -> list[int] | None:
        """Plan the running requests like `_keep_running`, but those that merely decode all at once.

        Return None, having allocated nothing, if there are too few tokens or blocks for all: then requests grow in the
        order of their ranks, and no request is preempted after it was planned.
        """
        rows.settle()
        others = self.others(rows)
        singles = len(rows) + sum([request.num_missing == 1 for request in others])
        budget = self._step_budget(singles)
        if not rows or budget < singles:
            return None
        all_decode = singles == len(self.running) and not self.swapped
        left, singles = budget - len(rows), singles - len(rows)
        wanted: list[tuple[Request, int]] = []  # requests with their numbers of new tokens
        lacking = [0] * len(self.manager.groups)
        for request in others:
            missing = request.num_missing
            num_new = num_new_tokens(request, request.cache.num_computed, missing, left, singles)
            singles -= missing == 1
            if missing == 0 or request.finish_reason is not None:
                continue
            if num_new > 0:
                wanted.append((request, num_new))
                left -= num_new
            if num_new < missing:
                lacking = [a + b for a, b in zip(lacking, self.manager.lacking(request), strict=True)]
        short = rows.short(0)
        most = rows.most_taken(short, 0)
        most += sum(self.manager.most_taken(one, one.cache.num_computed + num_new) for one, num_new in wanted)
        if most and not self.manager.has_free([most] * len(self.manager.pools)):
            return None
        plan.decode = rows.grow(short, 0, plan)
        plan.num_tokens = plan.num_decoding
        for request, num_new in wanted:
            try:
                if not self.manager.grow(request, request.cache.num_computed + num_new, plan.copies):
                    raise OutOfBlocks(f"request {request.id} was planned with too few free blocks")
            except Exception as error:
                plan.failed.append((request, error))
            else:
                plan.add(request, num_new)
        self.budget = budget
        if all_decode:
            self._add_drafts(plan, left)
        return lacking

    def _step_budget(self, num_decoding: int) -> int:
        """Return the token budget of a step in which `num_decoding` sequences decode."""
        if self.pace is None or num_decoding == 0:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, max(self.pace.most(num_decoding), num_decoding + self.longest_run))

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Grow a running request, preempting the last ones while blocks are short.

        Return False if it was itself preempted.
        """
        while not self.manager.grow(request, num_tokens, plan.copies):
            unit = who_gives_way(request, self.running)
            self._preempt(unit, self._swap_out(unit), plan)
            if request in unit:
                return False
        if self.rows is not None:
            self.rows.note(request)
        return True

    def _swap_out(self, unit: list[Request]) -> list[Move] | None:
        try:
            return self.manager.swap_out(unit)
        except Exception:
            log.exception("swapping out failed; %s will be computed again", ", ".join(request.id for request in unit))
            return None

    def _preempt(self, unit: list[Request], moves: list[Move] | None, plan: Plan) -> None:
        """Stop these requests. Swap their blocks out to the host or, without moves, free them to be recomputed."""
        for request in unit:
            self.running.take_out(request)
            if self.rows is not None:
                self.rows.drop(request)
            if moves is None:
                self._restart(request)
            else:
                self.swapped.add(request)
        plan.swap_out += moves or []
        plan.preempted += unit
        self.num_preemptions += len(unit)

    def _restart(self, request: Request) -> None:
        self.manager.release(request)
        self.waiting.add(request)

    def restart_all(self) -> None:
        """Make all requests wait, without blocks. Their tokens will be computed again, and their blocks named again."""
        started = [*self.running, *self.swapped]
        for request in started:
            self.leave(request)
            self.waiting.add(request)
        for request in self.requests.values():
            self.manager.forget_tokens(request)
        self.num_preemptions += len(started)

    def _bring_back(self, plan: Plan, lacking: list[int]) -> None:
        """Swap requests in, in the order of their ranks.

        Siblings are swapped in together, and only if there are blocks for all of their tokens in addition to those that
        the running requests lack.
        """
        while self.swapped and plan.num_tokens < self.budget:
            unit = self.swapped.first_unit()
            needed = [a + b for a, b in zip(self.manager.needed_to_swap_in(unit), lacking, strict=True)]
            if len(self.running) + len(unit) > self.max_num_seqs or not self.manager.has_free(needed):
                if self.running:
                    return
                for request in unit:  # together they do not fit even alone: restart them one by one
                    self.swapped.take_out(request)
                    self._restart(request)
                continue
            try:
                plan.swap_in += self.manager.swap_in(unit)
            except Exception as error:
                plan.failed.append((unit[0], error))
                return
            plan.resumed += unit
            for request in unit:
                self.swapped.take_out(request)
                self.running.add(request)
            for request in unit:
                if request.num_missing and request.finish_reason is None:
                    self._start(request, self.budget - plan.num_tokens, plan, lacking)

    def _admit(self, plan: Plan, lacking: list[int]) -> None:
        """Plan waiting requests in order, until the budget, the slots or the blocks are used up.

        While others are swapped out, only requests that precede them and were admitted before may enter.

        A request is admitted only if there are blocks for all of its tokens, in addition to those that the running
        requests still need and those promised to earlier waiting ones. With blocks for a first chunk alone it would
        soon be preempted again and its work lost. A request whose next block is being computed by another request waits
        for it, and those after it may pass.
        """
        if not self.waiting:
            return
        coming = ComingBlocks(self.manager, self.running)
        slots = free_slots(self.running, self.max_num_seqs)
        passed: list[Request] = []
        try:
            while (request := self.waiting.first()) is not None and plan.num_tokens < self.budget:
                wanted = slots_wanted(request, self.running)
                if len(self.running) >= self.max_num_seqs or wanted > slots - len(passed):
                    break
                if not may_pass(request, self.swapped):
                    break
                self.waiting.pop()
                try:
                    if (
                        request.finish_reason is not None
                        or self._awaits_another(request, coming)
                        or self._awaits_blocks(request, plan, lacking)
                    ):
                        passed.append(request)
                        if self.prefetch is not None:
                            lacking = [a + b for a, b in zip(lacking, self.prefetch.promised(request), strict=True)]
                    elif self._start_waiting(request, plan, lacking):
                        slots -= wanted
                        coming.add(request)
                    else:
                        passed.append(request)
                        break
                except Exception as error:
                    plan.failed.append((request, error))
                    if not request.cache.block_ids:
                        passed.append(request)
        finally:
            for request in passed:
                self.waiting.add(request)

    def _awaits_blocks(self, request: Request, plan: Plan, lacking: list[int]) -> bool:
        """Return whether to admit a waiting request later, with blocks that are being read from another source."""
        if self.prefetch is None:
            return False
        spare = self._spare(lacking)
        if plan.computes and self.shortage.lasts(request, spare, self.num_plans):
            return False
        return self.prefetch.awaits(request, spare)

    def _spare(self, lacking: list[int]) -> list[int]:
        """Return the free blocks of each group minus those that running requests still lack."""
        return [pool.num_free - count for pool, count in zip(self.manager.pools, lacking, strict=True)]

    def _start_waiting(self, request: Request, plan: Plan, lacking: list[int]) -> bool:
        """Start a waiting request, if there are blocks for it and for its siblings' first tokens."""
        spare = self._spare(lacking)
        if plan.computes and self.shortage.lasts(
            request, spare, self.num_plans
        ):  # matching its blocks again costs time
            return False
        if request.is_whole and request.num_missing > self.budget - plan.num_tokens:
            return False
        match = self.manager.lookup.match(request)
        slots = self.max_num_seqs - len(self.running) - 1
        forks = sum(1 for _ in islice(unforked(request, self.waiting), slots))
        needed = [count + forks for count in self.manager.needed(request, match)]
        if not fits(needed, spare) and (forks == 0 or self.running or plan.computes or any(lacking)):
            self.shortage.note(request, spare, self.num_plans)
            return False
        self.manager.admit(request, match)
        self.running.add(request)
        if self.prefetch is not None:
            self.prefetch.admitted(request)
        lacking[:] = [a + forks for a in lacking]
        self._start(request, self.budget - plan.num_tokens, plan, lacking)
        return True

    def hold(self) -> Hold | None:
        """Return the reason why the first waiting request is not in the last planned step, or None if none waits."""
        first = self.waiting.first()
        if first is None:
            return Hold.SWAPPED if self.swapped else None
        if len(self.running) >= self.max_num_seqs:
            return Hold.SLOTS
        if not may_pass(first, self.swapped):
            return Hold.SWAPPED
        return Hold.BLOCKS if self.shortage.is_of(first) else Hold.BUDGET

    def _start(self, request: Request, budget: int, plan: Plan, lacking: list[int]) -> None:
        """Plan the first tokens of a request that just got its blocks; without a budget, only add to `lacking`."""
        num_new = min(budget, num_new_tokens(request, request.cache.num_computed, request.num_missing, budget, 0))
        try:
            if num_new and not self.manager.grow(request, request.cache.num_computed + num_new, plan.copies):
                raise OutOfBlocks(f"request {request.id} was admitted with too few free blocks")
        except Exception as error:
            plan.failed.append((request, error))
            return
        if num_new:
            plan.add(request, num_new)
        if num_new < request.num_missing:
            lacking[:] = [a + b for a, b in zip(lacking, self.manager.lacking(request), strict=True)]

    def _awaits_another(self, request: Request, coming: ComingBlocks) -> bool:
        """Return whether a running request is computing blocks that the waiting one could then share."""
        if coming.help(request):
            return True
        if request.num_generated > 0 or request.driven:
            return False
        return any(s.num_generated == 0 for s in self.running.siblings_of(request))  # it will be forked from that one

    def plan_ahead(self, before: Plan) -> Plan | None:
        """Plan the step after one that is being computed, see `lookahead.plan_ahead`."""
        return plan_ahead(self, before)

    # ---------------------------------------------------------------------------------------------- its results

    def commit(self, plan: Plan, output: StepOutput) -> StepEvents:
        """Apply the results of a step, see `Committer.commit`."""
        return self.committer.commit(plan, output)

    def fail(self, plan: Plan, error: BaseException) -> list[Event]:
        """End the requests of a step that raised, see `Committer.fail`."""
        return self.committer.fail(plan, error)

    def is_needed(self, plan: Plan) -> bool:
        """Return whether any request of a step continues, so that its commit uses the step's results."""
        decoding = () if plan.decode is None else plan.decode.requests
        requests = chain(decoding, (item.request for item in plan.rest))
        return any(request.finish_reason is None for request in requests)
