"""Prompt lookup: what it guesses, and that nobody can tell from the tokens whether it did."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from quire import LLM, StructuredOutputsParams
from quire.cli import app
from quire.engine.engine import Engine
from quire.engine.speculation import (
    LONGEST_PAUSE,
    MATCHED,
    MAX_FAILURES,
    MAX_ROWS,
    PromptLookup,
    Speculation,
    _after_the_same,
)
from quire.engine.trace import TraceRecorder
from quire.errors import ConfigError
from quire.request import Event, FinishReason, Request, SamplingParams
from tests.marks import of_long_runs, spread
from tests.models.checkpoints import engine, save

pytestmark = pytest.mark.slow

NUM_TOKENS = 60
LOOPS = [[5, 6, 7, 8] * 5, [9, 3] * 6, list(range(2, 30)), [4]]


def request(tokens: list[int], num_prompt: int | None = None, **params: Any) -> Request:
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | params))
    return Request("r", array("i", tokens), num_prompt or len(tokens), sampling)


# ------------------------------------------------------------------------------------------------------ guesses


def plainly(tokens: array[int], most: int) -> array[int]:
    """The same, token by token."""
    for count in MATCHED:
        for at in range(len(tokens) - count - 1, -1, -1):
            if tokens[at : at + count] == tokens[-count:]:
                known = array("i", tokens)
                for i in range(most):
                    known.append(known[at + count + i])
                return known[len(tokens) :]
    return array("i")


def test_guesses_are_what_stood_after_the_same_tokens() -> None:
    """Ids whose bytes look alike at every offset."""
    rng = random.Random(0)
    found = 0
    for _ in range(5_000):
        tokens = array("i", rng.choices([0, 1, 256, 65_536, 2**24], k=rng.randrange(20)))
        drafts = _after_the_same(tokens, 3)
        assert drafts == plainly(tokens, 3)
        found += len(drafts) == 3
    assert found > 1_000


def test_few_rows_are_shared_among_those_that_decode() -> None:
    speculation = Speculation([PromptLookup()], 5)
    assert [speculation.most(rows) for rows in (0, 1, 2, 3, 4, 5, MAX_ROWS, 100)] == [0, 5, 3, 1, 1, 0, 0, 0]
    assert Speculation([PromptLookup()], 1).most(1) == 1


def test_who_was_wrong_pauses_longer_and_longer() -> None:
    lookup, unlucky, other = PromptLookup(), request([1, 2, 3, 1, 2], 2), request([1, 2, 3, 1, 2], 2)
    pauses = []
    for _ in range(8):
        assert lookup.draft(unlucky, 2) == array("i", [3, 1])
        lookup.judge(unlucky, 2, 0)
        pauses.append(0)
        while not lookup.draft(unlucky, 2):
            pauses[-1] += 1
    assert pauses == [2, 4, 8, 16, 32, 64, LONGEST_PAUSE, LONGEST_PAUSE]
    lookup.judge(unlucky, 2, 1)
    assert lookup.draft(unlucky, 2)
    assert lookup.draft(other, 2)


def drafts_of(asked: Request, most: int) -> tuple[list[int], list[int]]:
    """Its draft tokens by prompt lookup, and of each mask whether it allows token 0."""
    found = Speculation([PromptLookup()], 6).drafts([(asked, most)], lambda *_: True)
    tokens, masks = found.get(asked, ((), ()))
    return list(tokens), [int(mask[0]) & 1 for mask in masks]


def test_no_guesses_before_the_first_token_and_for_driven_requests() -> None:
    tokens = [1, 2, 3, 1, 2]
    assert drafts_of(request(tokens, 2), 4) == ([3, 1, 2, 3], [])
    assert drafts_of(request(tokens), 4) == ([], []), "its prompt is still to be shared with its siblings"
    driven = request(tokens, 2)
    driven.driven = True
    assert drafts_of(driven, 4) == ([], [])


class Alternating:
    """A guide that allows only even tokens after odd ones and the other way round, up to token 63, and ends at 40."""

    def __init__(self, last: int) -> None:
        self.last, self.done = last, last == 40

    def allowed(self) -> NDArray[np.int32]:
        return np.full(2, 0x55555555 if self.last % 2 else -0x55555556, np.int32)

    def accept(self, token: int) -> None:
        assert (token - self.last) % 2
        self.__init__(token)  # type: ignore[misc]

    def forced(self) -> list[int]:
        return [9, 8, 7] if self.last == 10 else []

    def for_drafts(self) -> Alternating:
        return Alternating(self.last)


def test_drafts_of_a_guided_request_are_those_that_its_guide_allows() -> None:
    cases = {
        (1, 2, 3, 6, 7, 1, 2): [3, 6, 7],  # 1 after 7 is not allowed
        (1, 2, 3, 6, 64, 1, 2): [3, 6],  # beyond the mask
        (1, 2, 3, 40, 1, 1, 2): [3],  # 40 ends the text
        (1, 2, 5, 4, 3, 1, 2): [5],  # 4 is an end token
        (1, 10, 3, 1, 10): [9, 8, 7],  # forced
    }
    for tokens, drafts in cases.items():
        guided = request([*tokens], 2)
        guided.guide, guided.ending_tokens = Alternating(tokens[-1]), frozenset({4})
        assert drafts_of(guided, 6) == (drafts, [token % 2 for token in drafts]), "even tokens after odd ones"
        assert guided.guide.last == tokens[-1], "the guide has not moved"


class Failing(PromptLookup):
    """A drafter whose every proposal fails, and that counts them."""

    asked = 0

    def propose(self, *_: Any) -> list[Any]:
        self.asked += 1
        raise RuntimeError("no memory")


def test_a_drafter_that_fails_is_left_alone_and_the_others_are_asked(caplog: pytest.LogCaptureFixture) -> None:
    failing, tokens = Failing(), [1, 2, 3, 1, 2]
    speculation = Speculation([failing, PromptLookup()], 4)
    for _ in range(10):
        assert [*speculation.drafts([(one := request(tokens, 2), 4)], lambda *_: True)[one].tokens] == [3, 1, 2, 3]
    assert failing.asked == len(caplog.records) == MAX_FAILURES


def test_a_guide_that_raises_costs_the_others_no_drafts() -> None:
    broken, other = request([1, 10, 3, 1, 10], 2), request([1, 10, 3, 1, 10], 2)
    broken.guide, other.guide = Alternating(10), Alternating(10)
    broken.guide.forced = None  # type: ignore[assignment]
    found = Speculation([], 6).drafts([(broken, 6), (other, 6)], lambda *_: True)
    assert [*found] == [other]
    assert [*found[other].tokens] == [9, 8, 7]


def test_drafts_that_a_guide_forbids_count_as_wrong() -> None:
    judged: list[tuple[int, int]] = []
    lookup = PromptLookup()
    lookup.judge = lambda _, *numbers: judged.append(numbers)  # type: ignore[method-assign, assignment]
    guided = request([1, 3, 5, 1, 3], 2)  # 5 after 3 is not allowed
    guided.guide = Alternating(3)
    assert not Speculation([lookup], 2).drafts([(guided, 2)], lambda *_: True)
    assert judged == [(2, 0)]


def test_a_guide_that_is_too_slow_is_not_walked() -> None:
    guided = request([1, 10, 3, 1, 10], 2)
    guided.guide = Alternating(10)
    guided.guide.for_drafts = lambda: None  # type: ignore[assignment, method-assign, return-value]
    assert drafts_of(guided, 6) == ([], [])


# ----------------------------------------------------------------------------------------------------- the engine


def run(
    made: Engine,
    prompts: list[list[int]],
    arrivals: Sequence[int] = (),
    aborts: Mapping[str, int] = MappingProxyType({}),
    **params: Any,
) -> tuple[dict[str, list[Event]], int]:
    """Every event of each request, and the steps that it took.

    arrivals: before which step each request comes; all before the first one if not given. aborts: request id -> before
    which step it is taken back.
    """
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | params))
    to_come = [Request(f"r{i}", array("i", prompt), len(prompt), sampling) for i, prompt in enumerate(prompts)]
    events: dict[str, list[Event]] = {request.id: [] for request in to_come}
    left = sorted(arrivals) or [0] * len(to_come)
    steps = 0
    while left or made.has_work:
        while left and left[0] <= steps:
            made.add(to_come[-len(left)])
            left.pop(0)
        for name, step in aborts.items():
            if step == steps:
                made.abort(name)
        for event in made.step():
            assert event.error is None, event.error
            events[event.request_id].append(event)
        made.scheduler.audit()
        steps += 1
    assert all(pool.num_used == 0 for pool in made.scheduler.manager.pools)
    return events, steps


def save_looping(directory: Path, kind: str = "Llama", **changes: Any) -> None:
    """A model whose next token hangs on the last one above all, so that it soon goes in circles."""
    model = save(directory, kind, **changes)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data.mul_(0.03)
    model.save_pretrained(directory)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.3, "seed": 1},
    "drawn from few": {"temperature": 1.0, "top_k": 2, "seed": 3},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 1, "logprobs": 0},
    "stop token": {"stop_token_ids": [5, 6, 7, 9, 11]},
    "no stop token at first": {"stop_token_ids": list(range(20)), "min_tokens": 25},
    "penalties": {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.05, "logprobs": 2},
    "short": {"max_tokens": 3},
}


@pytest.mark.parametrize(("kind", "case"), spread(4, ["Llama", "Gemma2"], CASES))
def test_tokens_are_those_that_come_one_by_one(tmp_path: Path, kind: str, case: str, long: bool) -> None:
    """Bit for bit, logprobs included; one request, and four that share the rows."""
    options = CASES[case]
    save_looping(tmp_path, kind, **({"sliding_window": 9} if kind == "Gemma2" else {}))
    saved = 0
    little = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 16}
    for prompts in ([LOOPS[0]], LOOPS) if long or kind == "Llama" else (LOOPS,):
        for limits in ({}, little) if long else [little if len(prompts) == 1 else {}]:
            plain, plain_steps = run(engine(tmp_path, num_speculative_tokens=0, **limits), prompts, **options)
            guessed, steps = run(engine(tmp_path, num_speculative_tokens=5, **limits), prompts, **options)
            assert guessed == plain
            saved += plain_steps - steps
    if kind == "Llama" and options.keys() <= {"logprobs"}:
        assert saved > 25, "hardly anything was guessed"


def judgements(made: Engine) -> list[int]:
    """Filled as the engine runs: how many guesses of a request were right, each time."""
    assert made.scheduler.speculation is not None
    lookup, judged = made.scheduler.speculation.drafters[0], []
    judge = lookup.judge

    def listening(request: Request, num_drafts: int, num_right: int) -> None:
        judged.append(num_right)
        judge(request, num_drafts, num_right)

    lookup.judge = listening  # type: ignore[method-assign]
    return judged


ARRIVALS = (0, 2, 9, 10, 25, 60)
SIX = [*LOOPS, [5, 6, 7, 8] * 5 + [5], [11, 12] * 4]
LIMITS: tuple[dict[str, Any], ...] = ({}, {"block_size": 4, "num_blocks": 30, "max_num_batched_tokens": 16})


PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "year": {"type": "integer"}, "is_known": {"type": "boolean"}},
    "required": ["name", "year", "is_known"],
    "additionalProperties": False,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "schema": {"structured_outputs": StructuredOutputsParams(json=PERSON)},
    "regex": {"structured_outputs": StructuredOutputsParams(regex=r"(abc ){3,8}end(\\.){5}")},
    "choice and penalty": {
        "structured_outputs": StructuredOutputsParams(choice=["a long choice", "a longer choice", "another"]),
        "frequency_penalty": 0.5,
    },
    "bad words": {"bad_words": ["self.", "return self", " 1"]},
    "penalties": {"repetition_penalty": 1.02, "presence_penalty": 0.1, "frequency_penalty": 0.01},
    "bias": {"logit_bias": {13: 2.0, 30: -1.0}, "min_tokens": 20},
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draws_that_look_back_are_those_of_one_by_one(temperature: float) -> None:
    """Grammars, penalties and bad words of the embedded model, alone and together: tokens, logprobs and reasons."""
    params = [
        SamplingParams(**{"temperature": temperature, "seed": 2, "max_tokens": 60, "logprobs": 2} | options)
        for options in SPECIAL.values()
    ]
    found, steps = [], []
    for count in (0, 7):
        llm = LLM(num_blocks=200, num_speculative_tokens=count)
        tracer = made_steps(llm.engine)
        outputs = [output for one in params for output in llm.generate("class Stack:\n    def ", one)]
        steps.append(len(tracer))
        outputs += llm.generate(["x = "] * len(params), params)
        found.append([output.outputs for output in outputs])
        assert not llm.engine.has_work
        if llm.engine.scheduler.speculation is not None:
            assert llm.engine.scheduler.speculation.num_right > 30
    assert found[0] == found[1]
    assert steps[1] < 0.9 * steps[0]


def made_steps(made: Engine) -> list[int]:
    """The tokens of each step, filled as the engine runs."""
    sizes: list[int] = []
    launch = made.runner.launch

    def listening(batch: Any) -> Any:
        sizes.append(len(batch.token_ids))
        return launch(batch)

    made.runner.launch = listening  # type: ignore[method-assign]
    return sizes


STOPS: dict[str, dict[str, Any]] = {
    "one": {"stop": "-2001-2"},
    "kept": {"stop": ["never", "1-20"], "include_stop_str_in_output": True},
    "not at first": {"stop": ["0", "e"], "min_tokens": 17},
    "none": {},
}


@pytest.mark.parametrize("case", ["one", "not at first", *map(of_long_runs, ["kept", "none"])])
def test_stop_strings_end_a_text_where_they_would(case: str, long: bool) -> None:
    """Of the embedded model, which soon repeats itself, so that some stop strings end among guesses."""
    options = STOPS[case]
    params = [SamplingParams(**({"temperature": t, "seed": 1, "max_tokens": 60, "logprobs": 1, "n": n} | options))
              for t, n in ((0.0, 1), (0.5, 1), (0.5, 3)) if long or (t, n) != (0.5, 3)]  # fmt: skip
    outputs, steps = [], []
    for count in (0, 7):
        llm = LLM(num_blocks=200, num_speculative_tokens=count)
        outputs.append([])
        steps.append(0)
        for prompt in ("x = ", "class Stack:\n"):
            for sampling in params:
                seen = [""] * sampling.n
                for output in llm.stream(prompt, sampling):
                    steps[-1] += 1
                    for i, sample in enumerate(output.outputs):
                        assert sample.text.startswith(seen[i])
                        seen[i] = sample.text
                outputs[-1] += output.outputs
        assert not llm.engine.has_work
        assert all(pool.num_used == 0 for pool in llm.engine.scheduler.manager.pools)
    assert outputs[0] == outputs[1]
    assert steps[1] < steps[0]
    stopped = [sample.stop_reason in options["stop"] for sample in outputs[0] if sample.stop_reason is not None]
    assert all(stopped)
    assert bool(stopped) == bool(options)


def test_a_trace_of_guessed_requests_is_that_of_others(tmp_path: Path) -> None:
    save_looping(tmp_path)
    found = []
    for count in (0, 5):
        made = engine(tmp_path, num_speculative_tokens=count)
        made.recorder = TraceRecorder()
        run(made, LOOPS, stop_token_ids=[5, 9])
        found.append([(row.prompt_tokens, row.new_tokens, row.prefix_id) for row in made.recorder.rows()])
    assert found[0] == found[1]
    assert len({new_tokens for _, new_tokens, _ in found[0]}) > 1


def test_who_gets_no_blocks_for_guesses_goes_on_without(tmp_path: Path) -> None:
    """Also where taking them fails."""
    save_looping(tmp_path)
    plain, _ = run(engine(tmp_path, block_size=1, num_blocks=256), LOOPS)
    made = engine(tmp_path, block_size=1, num_blocks=256, num_speculative_tokens=5)
    [pool] = made.scheduler.manager.pools
    allocate, failed = pool.allocate, []

    def failing(count: int) -> array[int]:
        if 1 < count < 8:  # no step without drafts takes so many, but for the shortest prompt's
            failed.append(count)
            raise MemoryError("injected")
        return allocate(count)

    pool.allocate = failing  # type: ignore[method-assign]
    assert run(made, LOOPS)[0] == plain
    assert len(failed) > 5


def test_guessing_never_takes_blocks_from_others(tmp_path: Path) -> None:
    save_looping(tmp_path)
    made = engine(tmp_path, block_size=4, num_blocks=21, num_speculative_tokens=5, max_model_len=80)
    _, steps = run(made, LOOPS[:2])
    plain = engine(tmp_path, block_size=4, num_blocks=21, num_speculative_tokens=0, max_model_len=80)
    _, plain_steps = run(plain, LOOPS[:2])
    assert made.scheduler.num_preemptions <= plain.scheduler.num_preemptions
    assert steps < plain_steps


def test_only_where_a_row_keeps_its_bits(tmp_path: Path) -> None:
    save(tmp_path)
    assert engine(tmp_path, num_speculative_tokens=1).scheduler.speculation is not None
    assert engine(tmp_path, num_speculative_tokens=0).scheduler.speculation is None
    assert engine(tmp_path, num_speculative_tokens=None).scheduler.speculation is not None
    assert engine(tmp_path, num_speculative_tokens=None, attention_backend="reference").scheduler.speculation is None
    with pytest.raises(ConfigError, match="not 'reference' on 'cpu'"):
        engine(tmp_path, num_speculative_tokens=1, attention_backend="reference")
    for count in (-1, 8):
        with pytest.raises(ConfigError, match=f"num_speculative_tokens is {count}"):
            engine(tmp_path, num_speculative_tokens=count)


def test_quire_generate_takes_the_number_of_guesses() -> None:
    arguments = ["generate", "x = ", "--json", "--temperature", "0", "--max-tokens", "40", "--num-speculative-tokens"]
    found = [CliRunner().invoke(app, [*arguments, count]) for count in ("0", "5", "9")]
    assert [result.exit_code for result in found] == [0, 0, 1]
    assert found[0].stdout == found[1].stdout
    assert "num_speculative_tokens is 9" in found[2].stderr


def test_a_wrong_guess_that_overflows_hurts_nobody(tmp_path: Path) -> None:
    """Its K and V are not finite; the rows before it do not see them, and those after it are dropped with it."""
    model = save(tmp_path)
    model.model.embed_tokens.weight.data[7] = float("nan")
    model.save_pretrained(tmp_path)
    made = [engine(tmp_path, num_speculative_tokens=count) for count in (0, 5)]
    prompt, tried = [5, 6, 8, 9] * 3, []

    def wrong(request: Request, most: int) -> array[int]:
        tried.append(most if len(tried) % 3 == 0 else 0)  # in between none, as after a pause
        return array("i", [7] * tried[-1])

    assert made[1].scheduler.speculation is not None
    made[1].scheduler.speculation.drafters[0].draft = wrong  # type: ignore[method-assign]
    plain, _ = run(made[0], [prompt], max_tokens=20)
    again, _ = run(made[1], [prompt], max_tokens=20)
    assert again == plain
    assert sum(tried) > 0


def test_a_right_guess_that_overflows_ends_the_request(tmp_path: Path) -> None:
    """With the same tokens before it as without guesses."""
    model, prompt = save(tmp_path, tie_word_embeddings=False), [5, 6, 8, 9] * 3
    plain, _ = run(engine(tmp_path), [prompt], max_tokens=20)
    tokens = [event.token for event in plain["r0"]]
    poison = next(i for i in range(3, 20) if tokens[i] not in prompt + tokens[:i])
    model.get_input_embeddings().weight.data[tokens[poison]] = float("nan")
    model.save_pretrained(tmp_path)
    found, given = [], []
    for count in (0, 5):
        made = engine(tmp_path, num_speculative_tokens=count)
        if made.scheduler.speculation is not None:

            def right(request: Request, most: int) -> array[int]:
                given.append(array("i", tokens[request.num_generated :][:most]))
                return given[-1]

            made.scheduler.speculation.drafters[0].draft = right  # type: ignore[method-assign]
        made.add(request(prompt, max_tokens=20))
        found.append([event for _ in iter(lambda made=made: made.has_work, False) for event in made.step()])
        made.scheduler.audit()
    assert found[0] == found[1]
    assert [event.token for event in found[0][:-1]] == tokens[: poison + 1]
    assert found[0][-1].finish_reason is FinishReason.ERROR
    assert any(tokens[poison] in drafts[:-1] for drafts in given)  # it overflowed as a guess that others followed
