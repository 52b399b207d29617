"""Runs and compares two sides. One of them is replayed with the inputs of the other, operator by operator."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from quire.diff.compare import OwnError, Report, check_structure, compare, largest_errors, own_errors
from quire.diff.live import Fault, Live, open_live
from quire.diff.side import DEFAULT_PROMPTS, URLS, Side, check_prompts
from quire.diff.trace import Output, Trace
from quire.diff.transformers import trace_transformers
from quire.errors import ConfigError
from quire.frontend.chat_tokenizer import find_chat_tokenizer
from quire.models import locate
from quire.ops import native

PLANTED = 1 / 8  # the size of a planted change, see Fault
WHOLE_BYTES = 2**28  # of outputs that a trace keeps whole
NUM_GREEDY = 16


@dataclass(frozen=True)
class Planted:
    """A planted change, and the operator that the search named."""

    fault: Fault
    operator: str
    named: str | None


def tokenize(side: Side, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the token ids of prompts. Raises ConfigError if there is no tokenizer, or they are too long."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    found = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if texts:
        tokenizer = find_chat_tokenizer(locate(side.name, side.options.get("gguf_file")))
        if tokenizer is None:
            raise ConfigError(
                f"{side.name} has no tokenizer, and a prompt is {texts[0]!r}; give --prompts FILE with a list of token "
                "ids on each line"
            )
        try:
            found = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        finally:
            tokenizer.close()
    check_prompts(found)
    return found


def trace(side: Side, prompts: Sequence[Sequence[int]], most_bytes: int = WHOLE_BYTES) -> Trace:
    """Run prompts on a model and return the trace. Raises the errors of `open_live` and `trace_transformers`."""
    if side.run == "transformers":
        return trace_transformers(side, prompts, NUM_GREEDY, most_bytes)
    with open_live(side) as live:
        return live.trace(prompts, NUM_GREEDY, most_bytes)


def diff(
    a: Side,
    b: Side,
    prompts: Sequence[str | list[int]] | None = None,
    most_bytes: int = WHOLE_BYTES,
    num_planted: int = 0,
) -> tuple[Report, list[Planted]]:
    """Compare two sides.

    Args:
        a: a trace or a model.
        b: the same. Its operators are replayed with A's inputs; if only A can be replayed, then A's with B's.
        prompts: for models; None: those of the trace, else DEFAULT_PROMPTS.
        most_bytes: of outputs to keep whole on each side.
        num_planted: changes to plant into the replayed side, one after the other, to test the search.

    Raises:
        ConfigError: the sides cannot be compared.
        ModelError: a model cannot be found or traced.
    """
    sides = [a, b]
    traces = [_kept(side.name or "") if side.is_trace else None for side in sides]
    fixed = next(filter(None, traces), None)
    if fixed is not None and prompts is not None:
        raise ConfigError("--prompts is for two models; a trace has its prompts, so leave it out")
    if fixed is not None:
        tokens = [prompt.tokens for prompt in fixed.prompts]
    else:
        tokens = tokenize(a, DEFAULT_PROMPTS if prompts is None else prompts)
    can_replay = [at for at in (1, 0) if traces[at] is None and sides[at].run == "quire"]
    found = [
        kept or (trace(side, tokens, most_bytes) if at not in can_replay[:1] else None)
        for at, (side, kept) in enumerate(zip(sides, traces, strict=True))
    ]
    if not can_replay:
        report = compare(*[one for one in found if one is not None])
        report.replayed = "no side is a model that Quire runs here"
        return report, _planted(report, None, num_planted)
    second = can_replay[0]
    [given] = [one for one in found if one is not None]
    with open_live(sides[second]) as live:
        if given.about.granularity == live.about.granularity:  # before tokens that the model lacks are an error
            check_structure(*((given.about, live.about) if second else (live.about, given.about)))
        own = live.trace(tokens, NUM_GREEDY, most_bytes)
        report = compare(given, own) if second else compare(own, given)
        replay = _Replay.of(live, given, sides[second])
        if isinstance(replay, str):
            report.replayed = replay
            return report, _planted(report, None, num_planted)
        report.own = replay.errors()
        report.replayed = "B's operators with A's inputs" if second else "A's operators with B's inputs"
        return report, _planted(report, replay, num_planted)


def _kept(name: str) -> Trace:
    """Return the trace of a file or of a URL."""
    return Trace.fetch(name) if name.startswith(URLS) else Trace.load(Path(name))


def _planted(report: Report, replay: _Replay | None, count: int) -> list[Planted]:
    if count and replay is None:
        raise ConfigError(f"--plant is {count}, and there is no replay: {report.replayed}")
    return [] if replay is None else replay.plant(count)


class _Replay:
    """A model's operators, one by one, with the inputs that another run recorded."""

    def __init__(self, live: Live, given: Trace, expected: Sequence[Mapping[str, Tensor]]) -> None:
        self.live, self.expected = live, expected
        self.given = [prompt for prompt in given.prompts if prompt.is_whole]
        self.values = [_values(prompt.outputs) for prompt in self.given]
        self._errors = [self._of_prompt(index) for index in range(len(self.given))]

    @classmethod
    def of(cls, live: Live, given: Trace, side: Side) -> _Replay | str:
        """Return the replay, or the reason why it is impossible.

        If both runs compute with the same formats, the other run's outputs are the expected ones. Otherwise these are
        computed by the reference in this run's formats, so that the rounding of these formats is no error.
        """
        if given.about.granularity == "layers":
            return "the other side has only the outputs of layers"
        whole = [prompt for prompt in given.prompts if prompt.is_whole]
        if not whole:
            return "no prompt of the other side is kept whole; a larger --size keeps more"
        if given.about.formats == live.about.formats:
            return cls(live, given, [_values(prompt.outputs) for prompt in whole])
        options = dict(side.options) | {"attention_backend": "reference"}
        with open_live(replace(side, isa=native.NO_KERNELS, options=options)) as reference:
            expected = [_values(reference.replay(prompt)) for prompt in whole]
        return cls(live, given, expected)

    def _of_prompt(self, index: int, fault: Fault | None = None) -> list[OwnError]:
        replayed, about = _values(self.live.replay(self.given[index], fault)), self.live.about
        return own_errors(about.operators, index, replayed, self.expected[index], self.values[index], about.unit)

    def errors(self, prompt: int = -1, instead: Sequence[OwnError] = ()) -> list[OwnError]:
        """Return the largest error of each operator. instead: those of that prompt."""
        found = [instead if index == prompt else errors for index, errors in enumerate(self._errors)]
        return largest_errors(error for errors in found for error in errors)

    def plant(self, count: int) -> list[Planted]:
        """Plant changes of one element or one row, one after the other, and name the operator of each."""
        generator, about, found = random.Random(0), self.live.about, []
        for _ in range(count):
            output, prompt = generator.choice(list(about.widths)), generator.randrange(len(self.given))
            row = generator.randrange(len(self.given[prompt].tokens))
            column = generator.choice([None, generator.randrange(about.widths[output])])
            fault = Fault(output, prompt, row, column, PLANTED)
            found.append(Planted(fault, about.operators[output], self.named(fault)))
        return found

    def named(self, fault: Fault) -> str | None:
        """Return the operator that the search names for a planted change."""
        errors = self.errors(fault.prompt, self._of_prompt(fault.prompt, fault))
        return next((error.operator for error in errors if error.excess > 1), None)


def _values(outputs: Mapping[str, Output]) -> dict[str, Tensor]:
    return {name: output.values for name, output in outputs.items()}
