"""Plan a step while the one before it is being computed."""

from __future__ import annotations

import numpy as np

from quire.engine.decisions import needs_token, share_budget
from quire.engine.decode_rows import DecodeRows
from quire.engine.plan import Plan
from quire.engine.scheduler_state import SchedulerState
from quire.errors import OutOfBlocks
from quire.request import Request


def plan_ahead(state: SchedulerState, before: Plan) -> Plan | None:
    """Plan the step after one that is being computed. Return None if that one must be committed first.

    The plan equals the one that `Scheduler.plan` would make after that commit, if every request that may continue does:
    the running ones continue, a token that is still to be drawn counts as present, and no request is admitted or
    preempted. If a request turns out to have ended, this plan's commit skips it.
    """
    if before.failed or before.resumed or state.swapped:  # if it fails, those it resumes lose their blocks
        return None
    rows = _rows_ahead(state, before)
    going = np.empty(0, np.bool_) if rows is None else rows.going()
    num_rows = int(going.sum())
    some_end = bool(state.marked) or (rows is not None and num_rows < len(rows))
    if rows is not None and any(going[row] and rows.requests[row].looks_back for row in rows.special):
        return None
    computing = {item.request: item for item in (before.items if rows is None else before.rest)}
    rest: list[tuple[Request, int, int]] = []  # a request, its first token to compute, number of tokens
    for request in state.running if rows is None else state.others(rows):
        item = computing.get(request)
        if request.finish_reason is not None:
            continue
        if request.driven or request.to_check or (item is not None and item.drafts):
            return None
        draws = item is not None and item.samples
        start = request.cache.num_computed if item is None else item.start + item.num_new
        missing = len(request.tokens) + draws - start
        if missing == 0 or (draws and start + missing >= state.longest(request)):
            some_end = True
        elif draws and needs_token(request):
            return None
        else:
            rest.append((request, start, missing))
    items = share_budget(rest, state.budget - num_rows)
    count = num_rows + len(items)
    if not count or (state.speculation is not None and state.speculation.most(count) > 0):
        return None
    num_tokens = num_rows + sum(item.num_new for item in items)
    if state.waiting and (some_end or _may_come(state, num_tokens)):
        return None
    most = sum(state.manager.most_taken(item.request, item.start + item.num_new) for item in items)
    if rows is not None:
        most += rows.most_taken(short := rows.short(1, going), 1)
    if not state.manager.has_free([most] * len(state.manager.pools)):
        return None
    plan = Plan()
    state.num_plans += 1
    state.manager.begin_step(state.clock())
    if rows is not None:
        plan.decode = rows.grow(short, 1, plan, None if num_rows == len(rows) else going)
        plan.num_tokens = plan.num_decoding
    for item in items:
        try:
            if not state.manager.grow(item.request, item.start + item.num_new, plan.copies):
                raise OutOfBlocks(f"request {item.request.id} was planned ahead with too few free blocks")
        except Exception as error:
            plan.failed.append((item.request, error))
        else:
            plan.rest.append(item)
            plan.num_tokens += item.num_new
    state.keep_states(plan)
    return plan if plan.computes else None


def _rows_ahead(state: SchedulerState, before: Plan) -> DecodeRows | None:
    """Return the rows if each of them draws a token in a step that is being computed, and fits into the next."""
    rows = state.rows
    if rows is None or before.decode is None:
        return None
    rows.settle()
    if not rows or len(rows) > state.budget:
        return None
    if rows.requests is not before.decode.requests:
        drawing = {*before.decode.requests, *(item.request for item in before.rest)}
        if not drawing.issuperset(rows.requests):
            return None
    return rows


def _may_come(state: SchedulerState, num_tokens: int) -> bool:
    """Return whether a waiting request may be admitted to the next plan, which has that many tokens already."""
    first = state.waiting.first()
    if first is None or len(state.running) >= state.max_num_seqs:
        return False
    if num_tokens >= state.budget:
        return False
    if state.manager.frees_early:  # the blocks that the step before frees are not known
        return True
    return not state.shortage.lasts(first, [pool.num_free for pool in state.manager.pools], state.num_plans + 1)
