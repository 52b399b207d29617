"""Steps of a replica as its client sees them: when tokens come, and whose they are."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from quire.engine.cost import CostModel
from quire.engine.plan import Plan, PlanItem
from quire.request import Request, SamplingParams
from quire_bench.server.client import Record


class SeenStep(NamedTuple):
    """A step that began when the one before had ended."""

    seconds: float  # from the tokens of the step before to its own
    keys: tuple[int, ...]  # of each sequence that decodes
    prompts: tuple[int, ...]  # tokens of each prompt that it computes
    came: int  # requests that were sent meanwhile

    @property
    def num_drawn(self) -> int:
        """Tokens that it draws."""
        return len(self.keys) + len(self.prompts)

    def expected(self, cost: CostModel) -> float:
        """Seconds that it is simulated to take."""
        any_request = Request("any", array("i", bytes(4)), 1, SamplingParams())
        items = [PlanItem(any_request, keys - 1, 1) for keys in self.keys]
        items += [PlanItem(any_request, 0, tokens) for tokens in self.prompts]
        return cost.seconds(Plan(items, num_tokens=len(self.keys) + sum(self.prompts)), self.num_drawn)


def steps_seen(records: Sequence[Record], together: float) -> Iterator[SeenStep]:
    """Steps in which sequences decode that got a token in the step before.

    records: all that one replica had to do, which computes each prompt in one step and finds none in its cache.
    together: seconds within which the tokens of a step come.
    """
    sent = [record.sent for record in records if record.sent is not None]
    for before, after in pairwise(_tokens_by_step(records, together)):
        start, end = before[0][0], after[0][0]
        drew = {request for _, request, _ in before}
        decoding = [(request, number) for _, request, number in after if number]
        begun = [records[request] for _, request, number in after if not number]
        if not decoding or any(request not in drew for request, _ in decoding):
            continue  # it was idle, or tokens of several steps came together
        if any(record.sent is None or record.sent > start for record in begun):
            continue
        keys = tuple((records[request].answer.prompt_tokens or 0) + number for request, number in decoding)
        prompts = tuple(record.answer.prompt_tokens or 0 for record in begun)
        yield SeenStep(end - start, keys, prompts, sum(start < moment <= end for moment in sent))


def _tokens_by_step(records: Sequence[Record], together: float) -> list[list[tuple[float, int, int]]]:
    """Tokens of each step: when one came, of which record, and how many that had before."""
    tokens = sorted((time, i, j) for i, record in enumerate(records) for j, time in enumerate(record.answer.times))
    steps: list[list[tuple[float, int, int]]] = []
    for token in tokens:
        step = steps[-1] if steps else []
        if step and token[0] - step[-1][0] < together and all(token[1] != request for _, request, _ in step):
            step.append(token)
        else:
            steps.append([token])
    return steps
