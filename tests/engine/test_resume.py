"""A request that goes on after delivered tokens: the same tokens, bits, text and end as if nothing had happened."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM
from quire.engine.loops import Loop, OverlappedLoop, SequentialLoop
from quire.errors import RequestError
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.requests import constraints_for, make_requests
from quire.request import Guide, Request, SamplingParams
from tests.engine import fakes
from tests.engine.test_guides import Residues, bitmask
from tests.marks import spread

pytestmark = pytest.mark.slow

PROMPT = "import os\n\n\ndef main(path):\n    for name in sorted(os.listdir(path)):\n"
COUNT = 28
CHARACTERS = "漢漢🙂漢 漢🙂字 is the end"
# With 20 blocks not even two of them fit at their end, so that they are preempted again and again.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0},
    "guesses": {"num_speculative_tokens": 4, "max_num_batched_tokens": 48},
    "no cache": {"num_speculative_tokens": 0, "enable_prefix_caching": False},
    "preempted": {"num_blocks": 20, "max_model_len": 256, "max_num_seqs": 12},
    "swapped": {
        "num_blocks": 20,
        "max_model_len": 256,
        "max_num_seqs": 12,
        "preemption": "swap",
        "swap_space": "16MiB",
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "one of three": {"n": 3},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "min_tokens": {"temperature": 1.5, "min_tokens": 12, "stop_token_ids": list(range(200, 900)), "ignore_eos": False},
    "stop strings": {"temperature": 0.6, "stop": ["\n\n", "import", "zzz"], "min_tokens": 8},
    "characters": {"stop": ["漢🙂字"], "temperature": 2.0},
    "guide": {"temperature": 1.0},
    "prompt": {"temperature": 0.8, "prompt_logprobs": 1},
    "constraints": {
        "temperature": 0.8,
        "logit_bias": {300: 4.0, 301: -100.0},
        "allowed_token_ids": range(1, 2000),
        "bad_words": ["for name", "self", "print(name)", "os"],
    },
}


class Spelling:
    """Allows one text, whose characters take several tokens each."""

    def __init__(self, tokens: list[int], size: int) -> None:
        self.tokens, self.size = tokens, size

    def allowed(self) -> NDArray[np.int32]:
        return bitmask(self.tokens[:1], self.size)

    def accept(self, token: int) -> None:
        assert token == self.tokens[0]
        self.tokens = self.tokens[1:]

    @property
    def done(self) -> bool:
        return not self.tokens

    def copy(self) -> Spelling:
        return Spelling(self.tokens, self.size)


def guide_of(kind: str, llm: LLM) -> Guide | None:
    assert llm.tokenizer is not None
    if kind == "characters":
        return Spelling(llm.tokenizer.encode(CHARACTERS, False), llm.engine.vocab_size)
    return Residues(COUNT - 5, llm.engine.vocab_size) if kind == "guide" else None


def made(
    llm: LLM,
    name: str,
    kind: str,
    delivered: Sequence[int] = (),
    num_checked: int = 4,
    *,
    strict: bool = True,
) -> tuple[RequestOutput, list[Request]]:
    """A request, or the last sample of it after delivered tokens."""
    sampling = SamplingParams(**{"max_tokens": COUNT, "seed": 11, "logprobs": 2, "ignore_eos": True} | KINDS[kind])
    assert llm.tokenizer is not None
    limits = constraints_for(sampling, llm.tokenizer, llm.engine.vocab_size)
    output, requests = make_requests(name, None, llm.tokenizer.encode(PROMPT), sampling, constraints=limits)
    guide = guide_of(kind, llm)
    if delivered:
        output.outputs, requests = output.outputs[-1:], requests[-1:]
        output.num_running, requests[0].group = 1, None
    for request in requests:
        request.guide = None if guide is None else guide.copy()
        request.is_strict = strict
    if delivered:
        requests[0].resume(delivered, num_checked)
    return output, requests


def run(llm: LLM, *outputs: tuple[RequestOutput, list[Request]]) -> tuple[list[CompletionOutput], list[list[str]]]:
    """The last sample of each, and its text when it was added and after each of its tokens."""
    texts, ended = OutputProcessor(llm.engine, llm.tokenizer), deque[RequestOutput]()
    seen: list[list[str]] = []
    for output, requests in outputs:
        for request in requests:
            texts.add(request, output, ended)
        seen.append([output.outputs[-1].text])
    while llm.engine.has_work:
        for event, output in texts.process(llm.engine.step()):
            place = next(i for i, (other, _) in enumerate(outputs) if other is output)
            if event.token is not None and event.drawn is None and event.request_id == outputs[place][1][-1].id:
                seen[place].append(output.outputs[-1].text)
        llm.engine.scheduler.audit()
    return [output.outputs[-1] for output, _ in outputs], seen


@pytest.fixture(scope="module")
def right() -> dict[str, tuple[CompletionOutput, list[str]]]:
    """Each kind's answer, undisturbed and alone, and its text after each token."""
    llm = LLM(num_blocks=512, num_speculative_tokens=0)
    found = {}
    for kind in KINDS:
        [output], [seen] = run(llm, made(llm, kind, kind))
        found[kind] = (output, seen)
    return found


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(**{"num_blocks": 512} | ENGINES[request.param])


def test_the_kinds_show_what_they_should(right: dict[str, tuple[CompletionOutput, list[str]]]) -> None:
    ends = {kind: (output.finish_reason, output.stop_reason) for kind, (output, _) in right.items()}
    assert ends["greedy"] == ("length", None)
    assert ends["guide"] == ("stop", None)
    assert ends["min_tokens"][0] == ends["stop strings"][0] == "stop"
    assert isinstance(ends["min_tokens"][1], int)
    assert isinstance(ends["stop strings"][1], str)
    assert all(len(output.token_ids) > 8 for output, _ in right.values())
    texts = right["characters"][1]
    assert len(texts) > len(set(texts)) + 6, "nothing is held back"
    assert right["characters"][0].text == "漢漢🙂漢 "


@pytest.mark.parametrize(("llm", "kind"), spread(8, ENGINES, KINDS), indirect=["llm"])
def test_after_any_delivered_token_the_rest_is_the_same(
    llm: LLM, kind: str, right: dict[str, tuple[CompletionOutput, list[str]]]
) -> None:
    """All cuts at once, so that they also meet in steps, and with any number of tokens that are checked."""
    whole, seen = right[kind]
    cuts = range(1, len(whole.token_ids))
    before = llm.engine.scheduler.num_preemptions
    resumed = [made(llm, f"{kind} {cut}", kind, whole.token_ids[:cut], (4, 0, 1, 4, 99)[cut % 5]) for cut in cuts]
    found, shown = run(llm, *resumed)
    for cut, output, texts in zip(cuts, found, shown, strict=True):
        assert output.error is None, (cut, output.error)
        assert (output.token_ids, output.text) == (whole.token_ids, whole.text), cut
        assert (output.finish_reason, output.stop_reason) == (whole.finish_reason, whole.stop_reason), cut
        assert whole.logprobs is not None
        assert output.logprobs == whole.logprobs[cut:], cut
        assert texts == seen[cut:], cut
        assert output.num_differences == 0
    if llm.config.cache.num_blocks == 20 and len(cuts) == COUNT - 1:
        assert llm.engine.scheduler.num_preemptions > before


@pytest.mark.parametrize("llm", ["guesses", "swapped"], indirect=True)
def test_prompt_logprobs_go_on_where_they_ended(llm: LLM, right: dict[str, tuple[CompletionOutput, list[str]]]) -> None:
    output, _ = whole = made(llm, "whole", "prompt")
    run(llm, whole)
    assert output.prompt_logprobs is not None
    rest = []
    for first in (0, 1, 7, len(output.prompt_token_ids) - 2):
        other, [request] = made(llm, f"after {first}", "prompt")
        request.first_prompt_logprob = first
        rest.append((first, (other, [request])))
    run(llm, *(each for _, each in rest))
    for first, (other, _) in rest:
        assert other.prompt_logprobs is not None
        assert other.prompt_logprobs[1:] == output.prompt_logprobs[1 + first :]


@pytest.mark.parametrize(
    ("llm", "kind"), spread(3, ENGINES, ["greedy", "sampled", "penalties", "stop strings"]), indirect=["llm"]
)
def test_a_token_that_is_drawn_otherwise_ends_a_strict_request(
    llm: LLM, kind: str, right: dict[str, tuple[CompletionOutput, list[str]]]
) -> None:
    whole = right[kind][0].token_ids
    for cut, wrong in ((9, 8), (9, 5), (1, 0)):
        delivered = [*whole[:wrong], whole[wrong] ^ 1, *whole[wrong + 1 : cut]]
        [output], _ = run(llm, made(llm, "strict", kind, delivered))
        assert output.finish_reason == "error"
        assert output.error is not None
        position = wrong + len(llm.tokenizer.encode(PROMPT))  # type: ignore[union-attr]
        assert f"the token at position {position} was delivered as {whole[wrong] ^ 1} before" in output.error
        assert f"and is {whole[wrong]} here" in output.error
        assert output.token_ids == delivered
    assert not llm.engine.has_work


@pytest.mark.parametrize(("llm", "kind"), spread(3, ENGINES, ["greedy", "sampled", "penalties"]), indirect=["llm"])
def test_a_lenient_request_goes_on_after_what_was_delivered_and_counts(
    llm: LLM, kind: str, right: dict[str, tuple[CompletionOutput, list[str]]]
) -> None:
    """As if all of it had been trusted."""
    whole = right[kind][0].token_ids
    for wrong in (8, 5):
        delivered = [*whole[:wrong], whole[wrong] ^ 1, *whole[wrong + 1 : 9]]
        [lenient, trusting], _ = run(
            llm,
            made(llm, "lenient", kind, delivered, strict=False),
            made(llm, "trusting", kind, delivered, 0),
        )
        assert lenient.token_ids[:9] == delivered
        assert (lenient.token_ids, lenient.text) == (trusting.token_ids, trusting.text)
        assert lenient.logprobs == trusting.logprobs
        assert 1 <= lenient.num_differences <= 9 - wrong
        assert trusting.num_differences == 0


@pytest.mark.parametrize("loop", [SequentialLoop, OverlappedLoop])
def test_a_step_that_is_planned_ahead_takes_what_was_delivered(loop: type[Loop]) -> None:
    """Also where another token was drawn, with a model that sees each token of the past."""
    prompt = [5, 6, 7, 8, 9]
    delivered = fakes.continuation(prompt, 9)
    delivered[6] ^= 1
    engine = fakes.fake_engine(runner=fakes.LaterRunner, loop=loop())
    resumed, other = fakes.request("resumed", prompt, max_tokens=30), fakes.request("other", [3, 4], max_tokens=40)
    resumed.resume(delivered, 5)
    resumed.is_strict = False
    engine.add(resumed)
    engine.add(other)
    found = fakes.run(engine)
    assert found["resumed"] == (delivered[4:] + fakes.continuation(prompt + delivered, 21), "length")
    assert found["other"] == (fakes.continuation([3, 4], 40), "length")


@pytest.mark.parametrize("num_checked", [0, 4])
def test_bad_delivered_tokens_are_refused(num_checked: int) -> None:
    llm = LLM(num_blocks=64)
    vocabulary = llm.engine.vocab_size
    cases: list[tuple[list[int], str]] = [
        ([5, vocabulary, 5], rf"delivered\[1\] is {vocabulary}; token ids"),
        ([5, -1], r"delivered\[1\] is -1; token ids"),
        ([5] * COUNT, f"continues after {COUNT} delivered tokens, and ends at {COUNT}"),
        ([5] * (COUNT + 3), f"continues after {COUNT + 3} delivered tokens, and ends at {COUNT}"),
    ]
    for delivered, words in cases:
        output, [request] = made(llm, "bad", "greedy", delivered, num_checked)
        with pytest.raises(RequestError, match=words):
            llm.engine.check(request)
        with pytest.raises(RequestError, match=words):
            OutputProcessor(llm.engine, llm.tokenizer).add(request, output, deque())
    assert not llm.engine.has_work


def test_a_guide_that_cannot_have_led_there_says_so() -> None:
    class Strict(Residues):
        def accept(self, token: int) -> None:
            if token not in self.tokens():
                raise RequestError(f"the token {token} may not stand here")
            super().accept(token)

    request = Request("r", array("i", [1, 2]), 2, SamplingParams(), guide=Strict(9))
    with pytest.raises(RequestError, match="may not stand here"):
        request.resume([4, 4, 4, 4, 4], 2)
