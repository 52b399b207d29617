"""A ledger takes each token once, in order, whatever comes from whom, and refuses what cannot be."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.fleet.ledger import Ledger
from quire.fleet.wire import Frame, WireError
from quire.frontend.outputs import CompletionOutput, Logprob

TOKENS = [7, 7, 3, 7, 7, 9, 3, 7]  # so that parts of it look like others
PIECES = ["a", "", "", "a\U0001f642", "a", "a", "", "aa"]  # what each of them adds: some complete a character
ENDS = list(accumulate(map(len, PIECES)))
END = ["stop", "aa", None]


def logprobs(start: int, stop: int) -> list[list[list[object]]]:
    return [[[TOKENS[i], -0.1 * i - 0.05, 1, "a"], [1, -9.0 - i, 2, "b"]] for i in range(start, stop)]


def frame(start: int, stop: int, *, ends: bool = False) -> Frame:
    """The true one of these tokens."""
    before = ENDS[start - 1] if start else 0
    end = END if ends else None
    return Frame(0, 0, start, TOKENS[start:stop], before, "".join(PIECES[start:stop]), logprobs(start, stop), end)


def ledger() -> Ledger:
    return Ledger(CompletionOutput(0), has_logprobs=True)


def state(of: Ledger) -> tuple[object, ...]:
    one = of.output
    return (list(one.token_ids), one.text, list(one.logprobs or ()), one.cumulative_logprob, one.finish_reason)


def check_prefix(of: Ledger) -> None:
    """What is entered is a prefix of the answer, its logprobs and its sum included."""
    one, count = of.output, len(of.tokens)
    assert one.token_ids == TOKENS[:count]
    assert one.text == "".join(PIECES[:count])
    expected = [{a: Logprob(b, c, d) for a, b, c, d in entry} for entry in logprobs(0, count)]
    assert one.logprobs == expected
    total = 0.0
    for token, entry in zip(one.token_ids, expected, strict=True):
        total += entry[token].logprob
    assert one.cumulative_logprob == total
    assert one.finished == (one.finish_reason == "stop")


@st.composite
def sources(draw: st.DrawFn) -> list[Frame]:
    """Frames of a replica that began at some token, maybe cut off, with some of them twice or left out."""
    start = draw(st.integers(0, len(TOKENS)))
    cuts = draw(st.sets(st.integers(start, len(TOKENS))))
    places = sorted({start, len(TOKENS), *cuts})
    frames = [frame(a, b, ends=b == len(TOKENS)) for a, b in pairwise(places)]
    if draw(st.booleans()):
        frames.append(frame(len(TOKENS), len(TOKENS), ends=True))
    kept = []
    for one in frames:
        kept += [one] * draw(st.sampled_from((1, 1, 1, 1, 0, 2)))
    return kept


@pytest.mark.slow
@given(st.data())
def test_of_two_sources_the_ledger_takes_a_prefix_or_all(data: st.DataObject) -> None:
    """Whichever frame comes first, of each source in its order: no token twice, none lost, none wrong."""
    queues = [data.draw(sources()), data.draw(sources())]
    of = ledger()
    while any(queues):
        turn = data.draw(st.sampled_from([i for i, queue in enumerate(queues) if queue]))
        one = queues[turn].pop(0)
        before = state(of)
        try:
            is_new = of.enter(one)
        except WireError:
            assert one.at > len(of.tokens), "only what comes after a gap is refused"
            assert state(of) == before
            queues[turn] = []  # such a source is not heard any more
        else:
            assert is_new == (state(of) != before)
        check_prefix(of)
    whole = Frame(0, 0, 0, TOKENS, 0, "".join(PIECES), logprobs(0, len(TOKENS)), END)
    of.enter(whole)
    assert state(of)[:2] == (TOKENS, "".join(PIECES))
    assert (of.output.finish_reason, of.output.stop_reason) == ("stop", "aa")


@given(st.integers(0, len(TOKENS)), st.data())
def test_what_contradicts_the_ledger_changes_nothing(known: int, data: st.DataObject) -> None:
    of = ledger()
    of.enter(frame(0, known, ends=known == len(TOKENS)))
    before = state(of)
    true = frame(*sorted((data.draw(st.integers(0, len(TOKENS))), data.draw(st.integers(0, len(TOKENS))))))
    kind = data.draw(st.sampled_from(("token", "text", "gap", "characters", "early end", "after the end")))
    if kind == "token" and true.at < known and true.tokens:
        i = data.draw(st.integers(0, min(known - true.at, len(true.tokens)) - 1))
        wrong = true._replace(tokens=[*true.tokens[:i], true.tokens[i] + 1, *true.tokens[i + 1 :]])
    elif kind == "text" and true.characters < len(of.output.text) and true.text:
        wrong = true._replace(text="b" + true.text[1:])
    elif kind == "gap":
        wrong = true._replace(at=known + 1)
    elif kind == "characters":
        wrong = true._replace(characters=len(of.output.text) + 1)
    elif kind == "early end" and 0 < known < len(TOKENS):
        wrong = frame(0, data.draw(st.integers(0, known - 1)))._replace(end=END)
    elif of.output.finished:
        wrong = frame(known, known)._replace(tokens=[1], text="", logprobs=[[[1, -1.0, 1, "x"]]])
    else:
        return
    with pytest.raises(WireError):
        of.enter(wrong)
    assert state(of) == before


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"logprobs": None}, "logprobs"),
        ({"logprobs": [[[5, -1.0, 1, "x"]]]}, "logprobs"),
        ({"logprobs": [[[7, "x"]]]}, "logprobs"),
        ({"end": ["stop"]}, "end"),
        ({"end": ["finished", None, None]}, "end"),
        ({"end": "stp"}, "end"),
    ],
)
def test_a_frame_that_lacks_what_belongs_to_its_tokens_is_refused(wrong: dict[str, object], words: str) -> None:
    of = ledger()
    before = state(of)
    with pytest.raises(WireError, match=words):
        of.enter(Frame.parse(list(frame(0, 1)._replace(**wrong))))  # type: ignore[arg-type]
    assert state(of) == before
