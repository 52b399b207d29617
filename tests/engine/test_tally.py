"""A tally that grows with its request has the counts of one that is made at once."""

from __future__ import annotations

import random
from array import array
from collections import Counter

from quire.engine.tally import Tally
from quire.request import Request, SamplingParams


def counted(request: Request) -> dict[int, float]:
    """Each token of a request, with the times that it was generated."""
    generated = Counter(request.tokens[request.num_prompt :])
    return {token: float(generated[token]) for token in request.tokens}


def test_it_grows_with_the_request() -> None:
    rng = random.Random(1)
    for num_prompt in (1, 2, 30):
        tokens = array("i", (rng.randrange(12) for _ in range(num_prompt)))
        request = Request("r", tokens, num_prompt, SamplingParams())
        tally = Tally(request)
        for _ in range(40):
            found, counts = tally.numbers()
            assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == counted(request)
            assert len(set(found.tolist())) == len(found)
            request.tokens.extend(rng.randrange(12) for _ in range(rng.randrange(3)))
            assert tally.follows(request)


def test_it_does_not_follow_other_tokens() -> None:
    request = Request("r", array("i", [1, 2, 3]), 2, SamplingParams())
    tally = Tally(request)
    request.tokens = request.tokens[:]
    assert not tally.follows(request)
    tally = Tally(request)
    request.tokens.pop()
    assert not tally.follows(request)
