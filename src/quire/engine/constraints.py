"""Convert the token constraints of sampling parameters to the form that every step uses."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from quire.errors import RequestError
from quire.request import Constraints, Request, SamplingParams


def constraints_of(
    sampling: SamplingParams, bad_sequences: Sequence[Sequence[int]], vocab_size: int
) -> Constraints | None:
    """Return the constraints on the tokens that may be drawn, or None if nothing is constrained.

    Requests with equal parameters may share them. bad_sequences: the tokens of each bad word. Raises RequestError for
    token ids outside the vocabulary.
    """
    if not (sampling.logit_bias or sampling.allowed_token_ids is not None or bad_sequences):
        return None
    biased, listed = sampling.logit_bias or {}, sampling.allowed_tokens
    inside = f"token ids of this model lie in 0..{vocab_size - 1}"
    if biased and (most := max(biased)) >= vocab_size:
        raise RequestError(f"logit_bias has the token {most}; {inside}", "logit_bias")
    if listed and (most := max(listed)) >= vocab_size:
        at = f"allowed_token_ids[{listed.index(most)}]"
        raise RequestError(f"{at} is {most}; {inside}", "allowed_token_ids")
    endings: dict[int, list[tuple[array[int], int]]] = defaultdict(list)
    for *before, last in bad_sequences:
        if before and last < vocab_size:  # a tokenizer may have more tokens than the model
            endings[before[-1]].append((array("i", before), last))
    allowed = None
    if listed:
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[np.array(listed)] = 1
        allowed = np.packbits(bits, bitorder="little").view(np.int32)
    return Constraints(
        np.fromiter(biased.keys(), np.int64, len(biased)),
        np.fromiter(biased.values(), np.float32, len(biased)),
        tuple(sequence[0] for sequence in bad_sequences if len(sequence) == 1 and sequence[0] < vocab_size),
        endings,
        allowed,
    )


def banned_now(request: Request, num_ahead: int, drafts: Sequence[int] = ()) -> Iterator[int]:
    """Yield the tokens that a request must not draw `num_ahead` tokens after its next one, in any order.

    drafts: the tokens in between, if they are known.
    """
    if request.num_generated + num_ahead < request.sampling.min_tokens:
        yield from request.ending_tokens
    constraints = request.constraints
    if constraints is not None:
        yield from constraints.banned
        generated = request.num_generated + len(drafts)
        if constraints.endings and generated:  # then they are known, see `Request.looks_back`
            longest = max(len(before) for of in constraints.endings.values() for before, _ in of)
            tail = request.tokens[-longest:] + array("i", drafts)
            for before, last in constraints.endings.get(tail[-1], ()):
                if len(before) <= generated and tail[-len(before) :] == before:
                    yield last
