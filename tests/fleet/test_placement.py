"""Why a request went where it went, in words: they are true of the choice."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.fleet.placement import PARTS, reason_of
from quire.fleet.score import TIE, Candidate, Demand, ScoreParts, choose
from quire.fleet.state import ReplicaState

IDLE = {"waiting_tokens": 0, "num_waiting": 0, "num_running": 0, "max_running": 8, "free_blocks": 100,
        "cached_blocks": 0, "num_blocks": 100, "block_size": 16, "seconds_a_step": 0.01,
        "seconds_a_prompt_token": 0.001, "seconds_a_sequence": 0.0005, "draining": False}  # fmt: skip


def candidate(slot: int, num_blocks: int = 0, **state: Any) -> Candidate:
    return Candidate(
        slot=slot, name=f"http://{slot}", fingerprint="f", state=ReplicaState(**IDLE | state),
        step_age=0.0, num_blocks=num_blocks, unseen_tokens=0, unseen_requests=0,
    )  # fmt: skip


def demand(num_tokens: int = 160) -> Demand:
    return Demand(request_id="r", num_tokens=num_tokens, new_tokens=10.0, hit_rate=0.5)


def reason(*candidates: Candidate) -> str:
    return reason_of(choose(demand(), candidates))


def test_the_only_one() -> None:
    assert reason(candidate(0)) == "it is the only replica that can take the request"


def test_the_cheapest_and_what_makes_it_so() -> None:
    assert reason(candidate(0), candidate(1, waiting_tokens=500)) == (
        "it costs 500.0 ms less than the next one, most of it for the work before it"
    )
    assert "most of it for its tokens that are not cached" in reason(candidate(0), candidate(1, num_blocks=9))


def test_equal_costs() -> None:
    both = "2 replicas cost the same within 3 %"
    assert reason(candidate(0), candidate(1)) == f"{both}; the request's name decides"
    assert reason(candidate(0, free_blocks=90, cached_blocks=10), candidate(1)) == (
        f"{both}; of those with the fewest tokens to compute it holds the fewest blocks"
    )
    waiting = candidate(1, num_blocks=1, waiting_tokens=33)  # costs a millisecond more, of 400
    assert reason(candidate(0), waiting) == f"{both}; it has the fewest tokens to compute, 144"


def test_every_part_has_words() -> None:
    assert list(PARTS) == list(ScoreParts._fields)
    parts = ScoreParts(*range(len(PARTS)))
    assert sum(parts._asdict().values()) == parts.total


@given(
    st.lists(
        st.builds(
            candidate,
            st.integers(0, 9),
            num_blocks=st.integers(0, 10),
            waiting_tokens=st.integers(0, 40),
            num_running=st.integers(0, 8),
            free_blocks=st.integers(50, 100),
            cached_blocks=st.integers(0, 50),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_words_are_those_of_the_choice(candidates: list[Candidate]) -> None:
    choice = choose(demand(), candidates)
    words, best = reason_of(choice), choice.best
    cheapest = min(one.parts.total for one in choice.ranking)
    assert best.parts.total <= cheapest * TIE
    tied = choice.ranking[: choice.num_tied]
    if len(candidates) == 1:
        assert "only" in words
    elif len(tied) == 1:
        assert "less than the next one" in words
    else:
        assert words.startswith(f"{len(tied)} replicas")
        fewest = [one for one in tied if one.uncached_tokens == best.uncached_tokens]
        assert ("fewest tokens to compute," in words) == (len(fewest) == 1)
        held = [one.candidate.state.held_blocks for one in fewest]
        if "name decides" in words:
            assert held.count(held[0]) > 1
