"""Messages arrive as they were sent, and what is none is refused with its sentence."""

import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.prefix import root_digest
from quire.errors import RequestError
from quire.fleet.wire import Call, Frame, Hello, SearchCall, WireError, check_blocks, dumps, loads, read, wire_digest
from quire.request import Holder, Retention, SamplingParams, Task

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
NUMBERS = st.floats(allow_nan=False)


@pytest.mark.slow
@given(TOKENS, st.text(), st.lists(NUMBERS, max_size=5))
def test_frames_keep_every_bit(tokens: list[int], text: str, logprobs: list[float]) -> None:
    found = [[[token, logprob, 1, text]] for token, logprob in zip(tokens, logprobs, strict=False)]
    frame = Frame(3, 1, 7, tokens[: len(found)], 9, text, found, ["stop", None, None], {"cached": 4})
    assert Frame.parse(loads(dumps({"frames": [frame]}))["frames"][0]) == frame


def test_numbers_that_are_none_survive() -> None:
    [back] = loads(dumps({"frames": [Frame(0, 0, 0, [1], 0, "", [[[1, -math.inf, 1, None]]])]}))["frames"]
    assert Frame.parse(back).logprobs == [[[1, -math.inf, 1, None]]]


@pytest.mark.parametrize(
    "call",
    [
        Call(
            flow=1,
            name="a-0",
            prompt=[1, 2],
            sampling=SamplingParams(seed=2**63 - 1, stop=["é", "\n"], max_tokens=None),
        ),
        Call(
            flow=2,
            name="b",
            prompt=[5],
            sampling=SamplingParams(n=3, seed=0),
            sample=2,
            delivered=[4, 5],
            num_checked=4,
        ),
        Call(
            flow=4,
            name="d",
            prompt=[5],
            sampling=SamplingParams(
                logit_bias={7: -0.1, 3: 100}, allowed_token_ids=[1, 2], bad_words=["a b", "\ud800"]
            ),
        ),
        Call(flow=3, name="c", prompt=[5], sampling=SamplingParams(seed=1), task=Task.EMBED, grammar=("regex", "a|b")),
        Call(flow=5, name="e", prompt=[5], sampling=SamplingParams(seed=1), holder=Holder("http://[::1]:8101", 3)),
        Call(flow=6, name="f", prompt=[5], sampling=SamplingParams(seed=1), retention=Retention("s", 300.0)),
    ],
)
def test_calls_keep_all_that_they_ask(call: Call) -> None:
    assert read(Call, loads(dumps(call))) == call


def test_searches_keep_all_that_they_ask() -> None:
    search = SearchCall(
        name="s",
        prompt=[1],
        salt="t",
        beam_width=2,
        max_tokens=3,
        ignore_eos=True,
        length_penalty=0.1 + 0.2,
        logprobs=3,
    )
    assert read(SearchCall, loads(dumps(search))) == search


@pytest.mark.parametrize("line", [b"", b"[]", b"{", b"\xff", b"null", b'"text"', b"[" * 100_000])
def test_a_line_that_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        loads(line)


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        [0, 0, 0],
        [0, 0, -1, [], 0, "", None, None, None],
        [0, 0, 0.5, [], 0, "", None, None, None],
        [0, 0, 0, [1, "a"], 0, "", None, None, None],
        [0, 0, True, [], 0, "", None, None, None],
        [0, 0, 0, [1], 0, None, None, None, None],
        [0, 0, 0, 1, 0, "", None, None, None],
        [0, 0, 0, [1, 2], 0, "", [[]], None, None],
        [0] * 12,
        [0, 0, 0, [1], 0, "", None, None, 5],
        [0, 0, 0, [1], 0, "", None, None, {"cached": "a"}],
        [0, 0, 0, [1], 0, "", None, None, {"differences": -1}],
        [0, 0, 0, [1], 0, "", None, None, {"prompt_logprobs": 1}],
        [0, 0, 0, [1], 0, "", None, None, {"prompt_logprobs": [-1, []]}],
        [0, 0, 0, [1], 0, "", None, None, {"hidden_state": [10**400]}],
    ],
)
def test_a_frame_that_is_none_is_refused(found: Any) -> None:
    with pytest.raises(WireError, match="frame"):
        Frame.parse(found)


def test_calls_that_cannot_be_are_refused_by_field() -> None:
    good = asdict(Call(flow=1, name="a", prompt=[1], sampling=SamplingParams(seed=1)))
    for change, sentence in (
        ({"color": "red"}, "the field 'color'"),
        ({"task": "sing"}, "sing"),
        ({"sampling": {"seed": 1, "beat": 2}}, "beat"),
        *[
            ({"holder": wrong}, "holder is .*; it must be the URL of a replica and a number of blocks")
            for wrong in (
                *(5, [], ["http://a:1"], ["http://a:1", 0], ["http://a:1", "3"], ["http://a:1", True], [7, 3]),
                *(["https://a:1", 3], ["file:///etc/passwd", 3], ["http://:1", 3], ["http://a", 3], ["http://a:x", 3]),
            )
        ],
        *[
            ({"retention": wrong}, "retention is .*; it must be a key and a number of seconds")
            for wrong in (5, ["s"], ["s", 1], ["s", -1.0], ["s", math.inf], [7, 1.0])
        ],
        *[
            ({"images": wrong}, "images is .*; it must be a text and a list of data URLs")
            for wrong in (
                5,
                ["s"],
                ["s", []],
                ["s", [5]],
                ["s", ["/etc/passwd"]],
                ["s", ["http://a/b"]],
                [7, ["data:,"]],
            )
        ],
    ):
        with pytest.raises(WireError, match=sentence):
            read(Call, loads(dumps(good | change)))
    with pytest.raises(RequestError, match="temperature"):  # the client's own mistake, which the client has to hear of
        read(Call, loads(dumps(good | {"sampling": {"temperature": -1.0}})))
    del good["prompt"]
    with pytest.raises(WireError, match="prompt"):
        read(Call, good)


HELLO = Hello(
    protocol=1, session="s", incarnation="i", fingerprint={}, names=["m"], max_model_len=100, vocab_size=50,
    eos_token_ids=[1], hidden_size=8, root="m", default_sampling={"top_k": 5},
    max_samples=4, block_size=16, salt="", has_windows=False,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"block_size": "16"},
        {"max_model_len": 1.5},
        {"max_samples": True},
        {"vocab_size": None},
        {"hidden_size": -1},
        {"names": []},
        {"names": "m"},
        {"eos_token_ids": [None]},
        {"salt": None},
        {"session": 5},
        {"has_windows": 0},
        {"no_images": 0},
        {"root": None},
        {"default_sampling": {"top_p": 2}},
        {"default_sampling": []},
    ],
    ids=str,
)
def test_a_hello_that_cannot_be_is_refused_by_field(change: dict[str, Any]) -> None:
    assert read(Hello, loads(dumps(HELLO))) == HELLO
    with pytest.raises(WireError, match=next(iter(change))):
        read(Hello, loads(dumps(HELLO)) | change)


@pytest.mark.parametrize(
    ("snapshot", "events"),
    [(5, []), ([[1]], []), (None, 5), (None, [5]), (None, [[]]), (None, [["x", 1]]), (None, [["+", "a"]])],
)
def test_block_events_that_are_none_are_refused(snapshot: Any, events: Any) -> None:
    check_blocks([1, 2], [["+", 1], ["-", 1, 2], ["0"]])
    with pytest.raises(WireError, match="block"):
        check_blocks(snapshot, events)


def test_digests_say_nothing_without_the_secret() -> None:
    digest = root_digest("prompt")
    assert wire_digest(digest, b"one") == wire_digest(digest, b"one") < 2**64
    assert wire_digest(digest, b"one") != wire_digest(digest, b"two") != int.from_bytes(digest[:8], "little")
