"""The score: one test for each complaint about routers that it answers, and its monotony.

tests/simulate/test_routing.py has fleets that route by it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import BadValue, NoReplica
from quire.fleet import score
from quire.fleet.index import FleetIndex
from quire.fleet.score import Candidate, Demand, PlacementChoice, ScoreParts, choose, eligible, with_holders
from quire.fleet.state import ReplicaState
from quire.request import Holder
from tests.fleet.states import BLOCK, state

REQUEST = Demand(request_id="r", num_tokens=1_000, new_tokens=50, hit_rate=0.5)


def candidate(slot: int, num_blocks: int = 0, /, **known: Any) -> Candidate:
    """A replica in that state, which holds so many of the request's blocks."""
    return Candidate(
        slot=slot,
        name=f"http://r{slot}",
        fingerprint="aa",
        state=state(**known),
        step_age=0.0,
        num_blocks=num_blocks,
        unseen_tokens=0,
        unseen_requests=0,
    )


def slot_of(choice: PlacementChoice) -> int:
    return choice.best.candidate.slot


def cost(demand: Demand, one: Candidate) -> float:
    return choose(demand, [one]).best.parts.total


COUNTS = st.integers(0, 5_000)
RATES = st.floats(1e-6, 0.1)


@st.composite
def states(draw: st.DrawFn) -> ReplicaState:
    num_blocks = draw(st.integers(1, 5_000))
    free = draw(st.integers(0, num_blocks))
    return state(
        waiting_tokens=draw(COUNTS),
        num_waiting=draw(st.integers(0, 200)),
        num_running=draw(st.integers(0, 64)),
        max_running=draw(st.integers(1, 64)),
        num_blocks=num_blocks,
        free_blocks=free,
        cached_blocks=draw(st.integers(0, free)),
        seconds_a_step=draw(RATES),
        seconds_a_prompt_token=draw(RATES),
        seconds_a_sequence=draw(RATES),
    )


@st.composite
def candidates(draw: st.DrawFn, slot: int = 0) -> Candidate:
    return replace(
        candidate(slot, draw(st.integers(0, 62))),
        state=draw(states()),
        step_age=draw(st.floats(0.0, 5.0)),
        unseen_tokens=draw(COUNTS),
        unseen_requests=draw(st.integers(0, 50)),
    )


@st.composite
def fleets(draw: st.DrawFn) -> list[Candidate]:
    return [draw(candidates(slot)) for slot in range(draw(st.integers(1, 6)))]


DEMANDS = st.builds(
    Demand,
    request_id=st.text(max_size=5),
    num_tokens=st.integers(1, 5_000),
    new_tokens=st.floats(0.0, 2_000.0),
    hit_rate=st.floats(0.0, 1.0),
)


class TestComplaints:
    """Each of them is about a router that others use."""

    @pytest.mark.slow
    @given(st.lists(st.integers(0, 10), min_size=2, max_size=8), st.lists(st.integers(0, 300), min_size=8, max_size=8))
    def test_a_miss_goes_to_the_least_loaded(self, running: list[int], held: list[int]) -> None:
        """However small the caches of the others are."""
        fleet = [
            candidate(slot, num_running=3 * n, free_blocks=1_000 - 15 * n, cached_blocks=held[slot])
            for slot, n in enumerate(running)
        ]
        best = choose(REQUEST, fleet).best
        assert best.candidate.state.num_running == 3 * min(running)

    def test_a_miss_in_an_idle_fleet_goes_anywhere(self) -> None:
        counts = Counter(
            slot_of(choose(replace(REQUEST, request_id=f"r{i}"), [candidate(slot) for slot in range(4)]))
            for i in range(400)
        )
        assert set(counts) == {0, 1, 2, 3}
        assert min(counts.values()) > 60

    @pytest.mark.slow
    @given(DEMANDS, fleets(), candidates(99))
    def test_a_loaded_replica_switches_nothing_off_for_the_others(
        self, demand: Demand, fleet: list[Candidate], other: Candidate
    ) -> None:
        """Each cost depends on its own replica, so that an idle holder keeps its requests whatever the rest does."""
        alone = {one.candidate.slot: one.parts for one in choose(demand, fleet).ranking}
        together = {one.candidate.slot: one.parts for one in choose(demand, [*fleet, other]).ranking}
        assert together == alone | {99: together[99]}

    def test_an_idle_holder_is_chosen_among_overloaded_replicas(self) -> None:
        loaded = [candidate(slot, waiting_tokens=50_000, num_waiting=50, num_running=32) for slot in (0, 1)]
        assert slot_of(choose(REQUEST, [*loaded, candidate(2), candidate(3, 62)])) == 3

    @pytest.mark.slow
    @given(DEMANDS, candidates(), st.integers(0, 1_000))
    def test_load_that_other_gateways_sent_counts_as_much_as_ours(
        self, demand: Demand, one: Candidate, tokens: int
    ) -> None:
        one = replace(one, step_age=0.0)  # what a state says is begun at once, what came after it is not
        ours = replace(one, unseen_tokens=one.unseen_tokens + tokens, unseen_requests=one.unseen_requests + 1)
        reported = replace(
            one.state, waiting_tokens=one.state.waiting_tokens + tokens, num_waiting=one.state.num_waiting + 1
        )
        assert cost(demand, ours) == pytest.approx(cost(demand, replace(one, state=reported)))

    def test_long_contexts_count_by_their_tokens_and_blocks(self) -> None:
        short = candidate(0, num_running=4, waiting_tokens=400)
        long = candidate(1, num_running=4, waiting_tokens=40_000)
        assert slot_of(choose(REQUEST, [short, long])) == 0
        demand = replace(REQUEST, num_tokens=8_000)
        full = candidate(2, num_running=2, free_blocks=10)  # has fewer requests, and no room
        choice = choose(demand, [candidate(0, num_running=4, free_blocks=600), full])
        assert slot_of(choice) == 0
        assert [one.parts.room > 0.0 for one in choice.ranking] == [False, True]

    def test_each_replica_is_looked_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looked, plain = Counter[int](), score._cost

        def counting(demand: Demand, one: Candidate, *rest: Any) -> ScoreParts:
            looked[one.slot] += 1
            return plain(demand, one, *rest)

        monkeypatch.setattr(score, "_cost", counting)
        choose(REQUEST, [candidate(slot) for slot in range(256)])
        assert looked == Counter(range(256))

    def test_a_prefix_that_all_hold_leaves_the_load_to_decide(self) -> None:
        for idle in range(4):
            fleet = [candidate(slot, 60, num_running=0 if slot == idle else 10) for slot in range(4)]
            assert slot_of(choose(REQUEST, fleet)) == idle

    def test_a_prefix_that_one_holds_spreads_when_that_one_is_busy(self) -> None:
        assert slot_of(choose(REQUEST, [candidate(0, 62, waiting_tokens=500), candidate(1)])) == 0
        assert slot_of(choose(REQUEST, [candidate(0, 62, waiting_tokens=5_000), candidate(1)])) == 1


class TestTogether:
    """Equal prompts that come at once, before any replica has said anything."""

    def routed(self, new_tokens: float, num_prompts: int = 32) -> list[int]:
        index, prompt = FleetIndex(), range(62)
        tokens, requests, slots = Counter[int](), Counter[int](), []
        for i in range(num_prompts):
            runs = index.runs(prompt)
            fleet = [
                replace(candidate(slot, runs.get(slot, 0)), unseen_tokens=tokens[slot], unseen_requests=requests[slot])
                for slot in range(4)
            ]
            demand = Demand(request_id=f"r{i}", num_tokens=1_000, new_tokens=new_tokens, hit_rate=0.0)
            best = choose(demand, fleet).best
            slot = best.candidate.slot
            index.expect(slot, prompt)
            tokens[slot] += best.uncached_tokens
            requests[slot] += 1
            slots.append(slot)
        return slots

    def test_they_go_where_the_first_went_as_long_as_that_is_cheaper(self) -> None:
        assert len(set(self.routed(new_tokens=8))) == 1

    def test_they_spread_when_waiting_costs_more_than_computing(self) -> None:
        slots = self.routed(new_tokens=200)
        assert set(slots[:3]) == {slots[0]}
        assert set(slots) == {0, 1, 2, 3}
        assert max(Counter(slots).values()) <= 12


class TestMonotone:
    """More of what is bad never makes a replica cheaper."""

    @pytest.mark.slow
    @given(DEMANDS, candidates(), st.sampled_from(["waiting_tokens", "num_waiting", "num_running"]), COUNTS)
    def test_in_load(self, demand: Demand, one: Candidate, name: str, more: int) -> None:
        worse = replace(one.state, **{name: getattr(one.state, name) + more})
        assert cost(demand, replace(one, state=worse)) >= cost(demand, one)

    @pytest.mark.slow
    @given(DEMANDS, candidates(), st.data())
    def test_in_free_blocks(self, demand: Demand, one: Candidate, data: st.DataObject) -> None:
        fewer = data.draw(st.integers(one.state.cached_blocks, one.state.free_blocks))
        worse = replace(one.state, free_blocks=fewer)
        assert cost(demand, replace(one, state=worse)) >= cost(demand, one)

    @pytest.mark.slow
    @given(DEMANDS, candidates(), st.data())
    def test_in_blocks_that_must_be_evicted(self, demand: Demand, one: Candidate, data: st.DataObject) -> None:
        more = data.draw(st.integers(one.state.cached_blocks, one.state.free_blocks))
        worse = replace(one.state, cached_blocks=more)
        assert cost(demand, replace(one, state=worse)) >= cost(demand, one)

    @pytest.mark.slow
    @given(DEMANDS, candidates(), st.integers(0, 62))
    def test_in_blocks_that_it_lacks(self, demand: Demand, one: Candidate, fewer: int) -> None:
        worse = replace(one, num_blocks=min(fewer, one.num_blocks))
        assert cost(demand, worse) >= cost(demand, one)

    @pytest.mark.slow
    @given(
        DEMANDS,
        candidates(),
        st.sampled_from(["seconds_a_step", "seconds_a_prompt_token", "seconds_a_sequence"]),
        st.floats(1.0, 100.0),
    )
    def test_in_slowness(self, demand: Demand, one: Candidate, name: str, factor: float) -> None:
        worse = replace(one.state, **{name: getattr(one.state, name) * factor})
        assert cost(demand, replace(one, state=worse)) >= cost(demand, one)

    @pytest.mark.slow
    @given(DEMANDS, candidates(), COUNTS, st.floats(0.0, 1_000.0))
    def test_in_what_is_asked_for(self, demand: Demand, one: Candidate, tokens: int, new_tokens: float) -> None:
        longer = replace(demand, num_tokens=demand.num_tokens + tokens, new_tokens=demand.new_tokens + new_tokens)
        assert cost(longer, one) >= cost(demand, one)

    @pytest.mark.slow
    @given(DEMANDS, candidates(), st.floats(0.0, 10.0))
    def test_in_how_lately_a_step_began(self, demand: Demand, one: Candidate, younger: float) -> None:
        worse = replace(one, step_age=max(0.0, one.step_age - younger))
        assert cost(demand, worse) >= cost(demand, one)

    @pytest.mark.slow
    @given(DEMANDS, candidates())
    def test_every_part_is_finite_and_not_negative(self, demand: Demand, one: Candidate) -> None:
        parts = choose(demand, [one]).best.parts
        assert all(math.isfinite(part) and part >= 0.0 for part in parts)


class TestRanking:
    @pytest.mark.slow
    @given(DEMANDS, fleets())
    def test_the_tied_come_first_and_then_the_cheaper_ones(self, demand: Demand, fleet: list[Candidate]) -> None:
        choice = choose(demand, fleet)
        totals = [one.parts.total for one in choice.ranking]
        assert sorted(one.candidate.slot for one in choice.ranking) == list(range(len(fleet)))
        assert choice.best == choice.ranking[0]
        assert max(totals[: choice.num_tied]) <= 1.03 * min(totals)
        assert totals[choice.num_tied :] == sorted(totals[choice.num_tied :])
        assert all(total > 1.03 * min(totals) for total in totals[choice.num_tied :])

    @pytest.mark.slow
    @given(DEMANDS, fleets())
    def test_the_order_of_the_candidates_does_not_matter(self, demand: Demand, fleet: list[Candidate]) -> None:
        one, other = choose(demand, fleet), choose(demand, fleet[::-1])
        assert (one.best, one.num_tied, one.ranking) == (other.best, other.num_tied, other.ranking)

    def test_a_tie_goes_to_the_fewest_tokens_and_then_to_the_fewest_held_blocks(self) -> None:
        demand = replace(REQUEST, hit_rate=0.0)
        fuller, emptier = candidate(0, free_blocks=900, cached_blocks=800), candidate(1, cached_blocks=700)
        assert slot_of(choose(demand, [fuller, emptier])) == 1
        holder = candidate(2, 1, free_blocks=900, cached_blocks=900, waiting_tokens=BLOCK)
        choice = choose(demand, [fuller, emptier, holder])
        assert choice.num_tied == 3
        assert [one.candidate.slot for one in choice.ranking] == [2, 1, 0]

    def test_what_is_left_of_a_step_is_waited_for(self) -> None:
        busy = candidate(0, num_running=4, waiting_tokens=100)
        step = 0.010 + 4 * 0.0006
        for age, left in ((0.0, 100 * 0.0004 + step), (0.03, 100 * 0.0004 + step - 0.03), (1.0, 0.0)):
            assert choose(REQUEST, [replace(busy, step_age=age)]).best.parts.queue == pytest.approx(left)
        sent_since = replace(busy, step_age=1.0, unseen_tokens=200, unseen_requests=1)
        assert choose(REQUEST, [sent_since]).best.parts.queue == pytest.approx(200 * 0.0004)
        idle = candidate(1)
        assert choose(REQUEST, [idle]).best.parts.queue == 0.0
        begun = replace(idle, step_age=0.03, unseen_tokens=200, unseen_requests=1)  # what came first is computed
        assert choose(REQUEST, [begun]).best.parts.queue == pytest.approx(200 * 0.0004 + 0.0106 - 0.03)

    def test_a_running_request_slows_half_of_an_answer(self) -> None:
        parts = [choose(REQUEST, [candidate(0, num_running=n)]).best.parts for n in (0, 10)]
        assert parts[0].decode == pytest.approx(50 * 0.0006)
        assert parts[1].decode - parts[0].decode == pytest.approx(50 * 10 / 2 * 0.0006)

    def test_a_seat_that_must_be_waited_for_costs(self) -> None:
        full = candidate(0, 62, num_running=32)
        assert choose(REQUEST, [full]).best.parts.room == pytest.approx(1 / 32 * 50 * (0.010 + 32 * 0.0006))
        assert choose(REQUEST, [candidate(0, num_running=31)]).best.parts.room == 0.0

    def test_what_must_be_evicted_costs_by_how_much_it_is_asked_for(self) -> None:
        cached, empty = candidate(0, cached_blocks=1_000), candidate(1)
        for hit_rate in (0.1, 0.9):
            choice = choose(replace(REQUEST, hit_rate=hit_rate), [cached, empty])
            blocks = -(-1_050 // BLOCK)
            assert slot_of(choice) == 1
            assert choice.ranking[1].parts.evict == pytest.approx(blocks * BLOCK * 0.0004 * hit_rate)

    def test_the_last_token_is_always_computed(self) -> None:
        demand = replace(REQUEST, num_tokens=62 * BLOCK)
        assert choose(demand, [candidate(0, 62)]).best.uncached_tokens == 1

    @pytest.mark.slow
    @given(st.floats(1.5, 20.0))
    def test_a_slow_host_gets_less(self, factor: float) -> None:
        taken = Counter[int]()
        rates = {"seconds_a_step": 0.01, "seconds_a_prompt_token": 0.0004, "seconds_a_sequence": 0.0006}
        slow = {name: value * factor for name, value in rates.items()}
        for i in range(40):  # of which none ends
            fleet = [
                replace(candidate(slot, **speed), unseen_tokens=1_000 * taken[slot], unseen_requests=taken[slot])
                for slot, speed in enumerate((rates, slow))
            ]
            taken[slot_of(choose(replace(REQUEST, request_id=f"r{i}"), fleet))] += 1
        assert taken[0] > taken[1]
        assert taken[0] / 40 == pytest.approx(factor / (1 + factor), abs=0.1)

    def test_rates_that_are_not_known_are_taken_from_the_others(self) -> None:
        unknown = {"seconds_a_step": 0.0, "seconds_a_prompt_token": 0.0, "seconds_a_sequence": 0.0}
        known, new = candidate(0), candidate(1, **unknown)
        one, other = choose(REQUEST, [known, new]).ranking
        assert one.parts == other.parts
        busy = candidate(2, waiting_tokens=1_000, **unknown)
        assert slot_of(choose(REQUEST, [busy, new])) == 1


class TestEligible:
    def test_replicas_that_may_take_a_request(self) -> None:
        fine, other = candidate(0), replace(candidate(1), fingerprint="bb")
        draining = candidate(2, draining=True)
        assert eligible([fine, other, draining]) == [fine, other]
        assert eligible([fine, other, draining], fingerprint="bb") == [other]

    def test_none_is_an_error_that_says_why(self) -> None:
        other = replace(candidate(1), fingerprint="bb")
        draining = candidate(2, draining=True)
        sentence = (
            r"no replica can take the request: http://r3 does not answer; "
            r"http://r1 computes other bits \(bb, not aa\); http://r2 is draining"
        )
        with pytest.raises(NoReplica, match=sentence):
            eligible([other, draining], "aa", ["http://r3 does not answer"])
        for ask in (lambda: eligible([]), lambda: choose(REQUEST, [])):
            with pytest.raises(NoReplica, match="the fleet has none"):
                ask()

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"num_tokens": 0}, "num_tokens is 0; it must be at least 1"),
            ({"new_tokens": math.inf}, "new_tokens is inf; it must be finite"),
            ({"hit_rate": 1.1}, r"hit_rate is 1.1; it must be finite and in 0\.\.1"),
        ],
    )
    def test_a_demand_that_cannot_be_is_refused(self, change: dict[str, Any], sentence: str) -> None:
        with pytest.raises(BadValue, match=sentence):
            replace(REQUEST, **change)

    def test_a_candidate_that_cannot_be_is_refused(self) -> None:
        with pytest.raises(BadValue, match="unseen_tokens is -5; it must be at least 0"):
            replace(candidate(0), unseen_tokens=-5)


def test_a_disk_has_a_price_between_memory_and_computing() -> None:
    prompt, block = 1e-3, 2e-3  # s a token, s a block of BLOCK tokens
    known = {"seconds_a_prompt_token": prompt, "seconds_a_disk_block": block}
    in_memory, nowhere = candidate(0, 50, **known), candidate(1, 10, **known)
    on_disk = replace(candidate(2, 10, **known), num_disk_blocks=40)
    choice = choose(REQUEST, [nowhere, on_disk, in_memory])
    assert [one.candidate.slot for one in choice.ranking] == [0, 2, 1]
    one = choice.ranking[1]
    assert one.uncached_tokens == 1_000 - 50 * BLOCK
    assert one.parts.disk == pytest.approx(40 * block)
    assert cost(REQUEST, on_disk) - cost(REQUEST, in_memory) == pytest.approx(40 * block, abs=1e-2)


def test_a_disk_that_is_slower_than_computing_is_not_counted() -> None:
    """The replica would not read there either."""
    known = {"seconds_a_prompt_token": 1e-3, "seconds_a_disk_block": 1e-3 * BLOCK}
    nowhere = candidate(0, 10, **known)
    assert cost(REQUEST, replace(nowhere, num_disk_blocks=40)) == cost(REQUEST, nowhere)


def test_another_replica_has_a_price_between_memory_and_computing() -> None:
    known = {"seconds_a_prompt_token": 1e-3, "seconds_a_peer_block": 2e-3}  # s a token, s a block of BLOCK tokens
    holder = replace(candidate(0, 50, waiting_tokens=10_000, **known), num_given=50)
    others = [candidate(1, 10, **known), replace(candidate(2, 10, **known), fingerprint="bb")]
    choice = choose(REQUEST, with_holders([holder, *others]))
    assert [one.candidate.slot for one in choice.ranking] == [1, 2, 0]
    best = choice.best
    assert best.candidate.holder == Holder("http://r0", 50)
    assert best.uncached_tokens == 1_000 - 50 * BLOCK
    assert best.parts.peer == pytest.approx(40 * 2e-3)
    assert best.parts.disk == 0.0
    assert choice.ranking[1].candidate.holder is None  # other bits
    apart = with_holders([holder, replace(others[0], salt="replaced")])
    assert apart[1].holder is None  # the same weights, but its blocks have other digests
    idle = replace(holder, state=candidate(0, **known).state)
    assert slot_of(choose(REQUEST, with_holders([idle, *others]))) == 0  # what has the blocks, if it has time


def test_of_two_sources_a_replica_reads_from_the_one_that_saves_most() -> None:
    known = {"seconds_a_prompt_token": 1e-3, "seconds_a_peer_block": 4e-3}

    def parts(disk: float, num_disk: int, num_peer: int) -> ScoreParts:
        one = candidate(0, 10, **known, seconds_a_disk_block=disk)
        one = replace(one, num_disk_blocks=num_disk, holder=Holder("http://r1", 10 + num_peer))
        return choose(REQUEST, [one]).best.parts

    assert (parts(2e-3, 20, 20).disk, parts(2e-3, 20, 20).peer) == (pytest.approx(0.04), 0.0)
    assert (parts(2e-3, 20, 40).disk, parts(2e-3, 20, 40).peer) == (0.0, pytest.approx(0.16))
    assert parts(2e-3, 20, -5).disk == pytest.approx(0.04)  # it is expected to hold more than the other one does
    slow = parts(1e-3 * BLOCK, 40, 20)  # slower than computing
    assert (slow.disk, slow.peer) == (0.0, pytest.approx(0.08))


@pytest.mark.slow
@given(fleets())
def test_no_one_reads_where_less_is(fleet: list[Candidate]) -> None:
    sending = [replace(one, num_given=one.num_blocks * (i % 3 > 0)) for i, one in enumerate(fleet)]
    for one in with_holders(sending):
        given = [other.num_given for other in sending if other.slot != one.slot]
        if one.holder is None:
            assert max(given, default=0) <= max(one.num_blocks, one.num_given)
        else:
            assert one.holder.num_blocks == max(given) > one.num_blocks
