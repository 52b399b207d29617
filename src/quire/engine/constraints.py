"""Constraints: from what sampling parameters say of tokens to the form that every step uses."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from quire.request import Constraints, Request


def constraints_of(request: Request, vocab_size: int) -> Constraints | None:
    """What a request may draw at any time. None: nothing is said of it. Token ids must be the vocabulary's."""
    sampling = request.sampling
    if not (sampling.logit_bias or sampling.allowed_token_ids is not None or request.bad_sequences):
        return None
    biased = sampling.logit_bias or {}
    endings: dict[int, list[tuple[array[int], int]]] = defaultdict(list)
    for *before, last in request.bad_sequences:
        if before and last < vocab_size:  # a tokenizer may have more than the model
            endings[before[-1]].append((array("i", before), last))
    allowed = None
    if sampling.allowed_token_ids is not None:
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[np.array(sampling.allowed_tokens)] = 1
        allowed = np.packbits(bits, bitorder="little").view(np.int32)
    return Constraints(
        np.fromiter(biased.keys(), np.int64, len(biased)),
        np.fromiter(biased.values(), np.float32, len(biased)),
        tuple(sequence[0] for sequence in request.bad_sequences if len(sequence) == 1 and sequence[0] < vocab_size),
        endings,
        allowed,
    )


def banned_now(request: Request, num_ahead: int) -> Iterator[int]:
    """Tokens that a request must not draw next, or so many tokens after that, in any order. Some may come twice."""
    if request.num_generated + num_ahead < request.sampling.min_tokens:
        yield from request.ending_tokens
    constraints = request.constraints
    if constraints is not None:
        yield from constraints.banned
        if constraints.endings and request.num_generated:  # then nothing is drawn ahead, see Request.looks_back
            for before, last in constraints.endings.get(request.tokens[-1], ()):
                if len(before) <= request.num_generated and request.tokens[-len(before) :] == before:
                    yield last
