"""A replica's state: what can be is taken, anything else is refused with its field's name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from quire.errors import BadValue
from tests.fleet.states import state


def test_blocks_are_owned_cached_or_empty() -> None:
    some = state(num_blocks=100, free_blocks=70, cached_blocks=50)
    assert (some.owned_blocks, some.held_blocks) == (30, 80)


def test_other_free_blocks_change_nothing_else() -> None:
    some = state(num_waiting=3, seconds_a_disk_block=0.5)
    assert some.with_room(40, 7) == replace(some, free_blocks=40, cached_blocks=7)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"waiting_tokens": -1}, "waiting_tokens is -1; it must be at least 0"),
        ({"num_running": 1.0}, "num_running is 1.0; it must be an integer"),
        ({"max_running": 0}, "max_running is 0; it must be at least 1"),
        ({"block_size": True}, "block_size is True; it must be an integer"),
        ({"free_blocks": 1_001}, r"free_blocks is 1001; it must be in 0\.\.1000"),
        ({"cached_blocks": 7, "free_blocks": 6}, r"free_blocks is 6; it must be in 7\.\.1000"),
        ({"seconds_a_step": math.nan}, "seconds_a_step is nan; it must be finite"),
        ({"seconds_a_sequence": -0.5}, "seconds_a_sequence is -0.5; it must be finite and at least 0"),
        ({"draining": 1}, "draining is 1; it must be true or false"),
    ],
)
def test_a_number_that_cannot_be_is_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadValue, match=sentence):
        replace(state(), **change)  # type: ignore[arg-type]
