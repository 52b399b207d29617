"""What the scheduler decides, without a block manager."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from quire import SamplingParams
from quire.engine.decisions import fits, free_slots, may_pass, num_new_tokens, slots_wanted, who_gives_way
from quire.engine.queue import RankedList
from quire.request import ImageRows, PrefixReport, Request, SampleGroup


def request(
    name: str, rank: int, group: SampleGroup | None = None, *, driven: bool = False, was_in: bool = False
) -> Request:
    made = Request(name, array("i", [1, 2]), 2, SamplingParams(), group=group, driven=driven)
    made.schedule.ordinal, made.schedule.sort_key = rank, (0.0, rank if group is None else len(name), rank)
    if group is not None:
        made.schedule.sort_key = (0.0, group.members[0].schedule.ordinal if group.members else rank, rank)
        group.members.append(made)
    if was_in:
        made.cache.prefix_report = PrefixReport(2, 0, 16)
    return made


def listed(*requests: Request) -> RankedList:
    made = RankedList()
    for one in requests:
        made.add(one)
    return made


@pytest.mark.parametrize(
    ("missing", "budget", "singles", "expected"),
    [
        (1, 5, 3, 1),
        (1, 1, 1, 1),
        (100, 64, 0, 64),
        (100, 64, 10, 54),  # ten others get their token first
        (30, 64, 10, 30),
        (100, 10, 10, 0),
        (100, 3, 10, -7),
    ],
)
def test_single_tokens_come_before_the_rest_of_a_prompt(missing: int, budget: int, singles: int, expected: int) -> None:
    assert num_new_tokens(request("a", 0), 0, missing, budget, singles) == expected


@pytest.mark.parametrize(
    ("start", "budget", "expected"),
    [
        (0, 4, 4),
        (0, 8, 4),
        (0, 10, 10),
        (0, 11, 10),
        (4, 5, 0),
        (4, 6, 6),
        (12, 8, 0),
        (12, 50, 18),
        (25, 2, 2),
        (0, -1, -1),
    ],
)
def test_an_image_whose_rows_see_one_another_is_not_cut(start: int, budget: int, expected: int) -> None:
    one, none = request("a", 0), np.empty(0, np.int64)
    one.images = ImageRows(none, none.astype(np.int32), [], None, runs=[(4, 10), (10, 12), (12, 25)])
    assert num_new_tokens(one, start, 30 - start, budget, 0) == expected


def test_the_last_one_gives_way_with_its_siblings_but_not_to_them() -> None:
    group = SampleGroup()
    first, one, two = request("first", 0), request("one", 1, group), request("two", 2, group)
    running = listed(two, first, one)
    assert who_gives_way(first, running) == [one, two]
    assert who_gives_way(one, running) == [two]
    assert who_gives_way(two, running) == [two]
    assert who_gives_way(first, listed(first)) == [first]
    last = request("last", 3)
    assert who_gives_way(one, listed(first, one, two, last)) == [last]


def test_a_search_may_claim_a_seat_for_each_of_its_beams() -> None:
    beams, plain = SampleGroup(), request("plain", 0)
    one, two, three = (request(name, 1 + i, beams, driven=True) for i, name in enumerate(("one", "two", "three")))
    assert free_slots([], 8) == 8
    assert free_slots([plain, one], 8) == 4  # one for the plain request, three for the search
    assert free_slots([plain, one, two, three], 8) == 4
    running = listed(plain)
    assert slots_wanted(request("other", 9), running) == 1
    assert slots_wanted(one, running) == 3
    running.add(one)
    assert slots_wanted(two, running) == 0  # they were claimed with the first one
    alone = request("alone", 10, driven=True)
    assert slots_wanted(alone, running) == 1


def test_only_who_was_admitted_before_and_ranks_first_passes_what_is_swapped_out() -> None:
    swapped = [request("out", 5, was_in=True)]
    assert may_pass(request("new", 1), [])
    assert not may_pass(request("new", 1), swapped)
    assert may_pass(request("again", 1, was_in=True), swapped)
    assert not may_pass(request("later", 9, was_in=True), swapped)


def test_blocks_have_to_fit_in_every_group() -> None:
    assert fits([], [])
    assert fits([3, 0], [3, 1])
    assert not fits([3, 2], [9, 1])
