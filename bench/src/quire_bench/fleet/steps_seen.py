"""Steps of a replica as its client sees them: when tokens come, and whose they are."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quire.engine.cost import CostModel
from quire.engine.plan import Plan, PlanItem
from quire.errors import QuireError
from quire.request import Request, SamplingParams
from quire_bench.server.client import Record

Token = tuple[float, int, int]  # when it came, of which record, and how many tokens that had before


class SeenStep(NamedTuple):
    """A step that began when the one before had ended."""

    seconds: float  # from the tokens of the step before to its own
    keys: tuple[int, ...]  # that each sequence which decodes sees
    prompts: tuple[int, ...]  # tokens of each prompt that it computes
    came: int  # requests that were sent meanwhile


def step_seconds(cost: CostModel, keys: Sequence[int], prompts: Sequence[int] = ()) -> float:
    """Seconds that a step is simulated to take.

    keys: that each sequence which decodes sees. prompts: tokens of each prompt that it computes, from the first on.
    """
    any_request = Request("any", array("i", bytes(4)), 1, SamplingParams())
    items = [PlanItem(any_request, seen - 1, 1) for seen in keys]
    items += [PlanItem(any_request, 0, tokens) for tokens in prompts]
    return cost.seconds(Plan(items, num_tokens=len(keys) + sum(prompts)), len(items))


def steps_seen(records: Sequence[Record], together: float) -> Iterator[SeenStep]:
    """The steps of which a client knows all that they computed.

    All sequences that decode got a token in the step before and get their next one in this. Prompts are computed whole:
    each came in the step before. Nothing is under way that has no token yet.

    records: all that one replica had to do, none of it in its cache. together: seconds within which the tokens of a
    step come. Raises QuireError for an answer without its number of prompt tokens.
    """
    sent = [float("inf") if record.sent is None else record.sent for record in records]
    first = [record.answer.times[0] if record.answer.times else float("inf") for record in records]
    prompts = [_prompt_tokens(record) for record in records]
    steps = _tokens_by_step(records, together)
    for earlier, before, after in zip(steps[:-2], steps[1:-1], steps[2:], strict=True):
        start, end, last = before[0][0], after[0][0], after[-1][0]
        go_on = {i for _, i, number in before if number + 1 < len(records[i].answer.times)}
        decoding = [(i, number) for _, i, number in after if number]
        begun = [i for _, i, number in after if not number]
        if not decoding or {i for i, _ in decoding} != go_on:
            continue  # the replica was idle, or the tokens of a step did not come together
        if any(not earlier[0][0] < sent[i] <= start for i in begun):
            continue
        if any(moment <= start and last < token for moment, token in zip(sent, first, strict=True)):
            continue
        keys = tuple(prompts[i] + number for i, number in decoding)
        came = sum(start < moment <= end for moment in sent)
        yield SeenStep(end - start, keys, tuple(prompts[i] for i in begun), came)


def _prompt_tokens(record: Record) -> int:
    if record.answer.prompt_tokens is None:
        raise QuireError("the server does not say how many tokens a prompt has")
    return record.answer.prompt_tokens


def _tokens_by_step(records: Sequence[Record], together: float) -> list[list[Token]]:
    """The tokens of each step."""
    each = [enumerate(record.answer.times) for record in records]
    tokens = sorted((time, i, number) for i, those in enumerate(each) for number, time in those)
    steps: list[list[Token]] = []
    for token in tokens:
        step = steps[-1] if steps else []
        if step and token[0] - step[-1][0] < together and all(token[1] != i for _, i, _ in step):
            step.append(token)
        else:
            steps.append([token])
    return steps
