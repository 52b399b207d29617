"""The sampler against plain definitions, row by row."""

import math
from array import array
from collections import Counter

import numpy as np
import pytest
import torch

from quire import ops
from quire.engine import sampler
from quire.engine.flatten import sampling_rows
from quire.engine.sampler import TILE, _argmax, sample, token_logprobs
from quire.engine.sampling_parameters import parameters_of
from quire.request import Request, SamplingParams
from tests.marks import of_long_runs

V = 50
OPS = ops.load()
LOOKING, BLINDLY = sampler._draw_looking, sampler._draw_blindly


@pytest.fixture(params=[LOOKING, BLINDLY], ids=["cpu", "gpu"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with both ways to draw, on the CPU."""
    monkeypatch.setattr(sampler, "_draw_looking", request.param)


def request(
    tokens: tuple[int, ...] = (1, 2), num_prompt: int | None = None, seed: int = 0, **sampling: object
) -> Request:
    params = SamplingParams(**sampling)
    prompt = len(tokens) if num_prompt is None else num_prompt
    return Request("r", array("i", tokens), prompt, params, seed=seed, ending_tokens=frozenset(params.stop_tokens))


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def allowed_probabilities(row: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """Temperature, min-p, top-k, top-p as their definitions say, in float64, one token after the other."""
    p = torch.softmax(row.double() / params.temperature, -1)
    ranked = sorted(range(len(p)), key=lambda token: (-p[token].item(), token))
    kept = [token for token in ranked if p[token] >= params.min_p * p.max()]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, mass, nucleus = sum(p[token].item() for token in kept), 0.0, []
    for token in kept:
        if mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += p[token].item()
    return {token: p[token].item() / mass for token in nucleus}


@pytest.mark.parametrize("_way", [LOOKING], indirect=True)
def test_few_logits_draw_the_same_tokens_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few logits are drawn by numpy: every token is the one that torch draws, for all mixtures of parameters."""
    mixtures: list[list[dict[str, float]]] = [
        [{"temperature": 0}], [{}], [{"temperature": 0.01}, {"temperature": 50.0}], [{}, {"temperature": 0}],
        [{"top_p": 0.5}, {}, {"min_p": 0.1}, {"temperature": 0}, {"top_k": 3}],
    ]  # fmt: skip
    for seed, mixture in enumerate(mixtures * 4):
        requests = [request(seed=97 * seed + i, **mixture[i % len(mixture)]) for i in range(33)]
        given = logits(33, V, seed=seed)
        given[::5] = given[::5].round()  # ties
        given[7], given[8, 3], given[9, :40] = -torch.inf, torch.nan, -torch.inf
        rows = sampling_rows(requests)
        few = sample(given.clone(), rows, OPS)
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "FEW_LOGITS", 0)
            many = sample(given.clone(), rows, OPS)
        assert few.tolist() == many.tolist()
        assert few[7] == few[8] == -1


CUTS: list[dict[str, float]] = [
    {}, {"temperature": 0.3}, {"temperature": 3.0}, {"top_k": 5}, {"top_k": 1}, {"top_k": -1}, {"top_p": 0.7},
    {"top_p": 1e-6}, {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 10, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
]  # fmt: skip
# test_waits.py shows that both ways draw the same: the second one has the first case and the last one here.
SHOWN = [(LOOKING, cuts) for cuts in CUTS] + [(BLINDLY, CUTS[0]), (BLINDLY, CUTS[-1])]
FURTHER = [of_long_runs(BLINDLY, cuts) for cuts in CUTS[1:-1]]


@pytest.mark.slow
@pytest.mark.parametrize(("_way", "sampling"), [*SHOWN, *FURTHER], indirect=["_way"])
def test_draws_follow_the_distribution(sampling: dict[str, float], long: bool) -> None:
    n, row, params = 20_000 if long else 3_000, logits(V), SamplingParams(**sampling)
    requests = [Request("r", array("i", (0,) * k), k, params, seed=s) for s in range(n // 100) for k in range(1, 101)]
    drawn = Counter(sample(row.repeat(n, 1), sampling_rows(requests), OPS).tolist())
    expected = allowed_probabilities(row, params)
    assert set(drawn) <= set(expected)
    for token, p in expected.items():
        assert abs(drawn[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    row = torch.zeros(3, V)
    row[0, [7, 30]] = 2.0
    row[2] = -5.0
    assert sample(row, sampling_rows([request(temperature=0.0)] * 3), OPS).tolist() == [7, 0, 0]


@pytest.mark.parametrize("size", [1, TILE - 1, TILE, TILE + 1, 5 * TILE, 5 * TILE + 3])
def test_the_greedy_choice_is_argmax(size: int) -> None:
    """With ties, infinities and NaN anywhere, the ends of tiles among them."""
    logits = torch.randint(-3, 3, (300, size)).float()
    for row, value in enumerate([torch.nan, torch.inf, -torch.inf] * 50):
        logits[row, torch.randint(size, (row % 4,))] = value
    logits[250:] = -torch.inf
    for place in (0, size - 1, *range(TILE - 1, size, TILE)):
        logits[place % 300, place] = torch.nan
    assert torch.equal(_argmax(logits), logits.argmax(-1))


def test_ties_in_a_cut_go_to_the_lowest_ids() -> None:
    requests = [request(seed=i, top_k=3) for i in range(200)]
    assert set(sample(torch.zeros(200, V), sampling_rows(requests), OPS).tolist()) == {0, 1, 2}


def test_a_row_is_the_same_alone_and_among_others() -> None:
    variants = [{}, {"top_k": 4}, {"top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.2}, {"repetition_penalty": 1.5},
                {"min_tokens": 9, "stop_token_ids": [3]}]  # fmt: skip
    requests = [request((i, 5, i), 1, seed=i, **variants[i % len(variants)]) for i in range(21)]
    rows = logits(21, V)
    together = sample(rows.clone(), sampling_rows(requests), OPS).tolist()
    alone = [sample(rows[i : i + 1].clone(), sampling_rows([requests[i]]), OPS).item() for i in range(21)]
    assert together == alone
    parts = sampling_rows(requests)
    cut = [sample(rows[a:b].clone(), parts.part(a, b), OPS).tolist() for a, b in ((0, 4), (4, 5), (5, 99))]
    assert [token for part in cut for token in part] == together


def test_parameters_of_the_step_before_serve_the_same_rows_alone() -> None:
    rows = [request((1,), seed=i, top_k=1 + i, repetition_penalty=1.0 + i) for i in range(3)]
    known = parameters_of(rows)
    assert parameters_of(list(rows), known) is known
    listed, again = (request((1,), stop_token_ids=np.array([3, 4])) for _ in range(2))  # arrays cannot be compared
    assert parameters_of([again], parameters_of([listed])).requests == [again]
    for others in (rows[::-1], rows[:2], [*rows, rows[0]], [*rows[:2], request((1,), top_k=4)], []):
        made = parameters_of(others, known)
        assert made is not known
        assert made.whole[0].tolist() == [one.sampling.top_k for one in others]
    drawn = sampling_rows(rows)
    assert drawn.repetition.tolist() == [1.0, 2.0, 3.0]
    assert drawn.penalty_rows.unique().tolist() == [1, 2]


def test_the_same_seed_and_position_draw_the_same_token() -> None:
    row = logits(1, V)
    [first, again] = [sample(row.clone(), sampling_rows([request(seed=3)]), OPS).item() for _ in range(2)]
    assert first == again
    others = {sample(row.clone(), sampling_rows([request((1,) * k, seed=3)]), OPS).item() for k in range(1, 40)}
    assert len(others) > 2


def test_penalties() -> None:
    """Repetition: seen tokens, prompt and output; presence and frequency: generated tokens."""
    row = logits(V).tolist()
    tokens, num_prompt = (4, 4, 9, 11, 11, 11, 9), 3
    r = request(
        tokens, num_prompt, temperature=0.0, repetition_penalty=1.7, presence_penalty=0.9, frequency_penalty=0.4
    )
    changed = torch.tensor([row])
    sample(changed, sampling_rows([r]), OPS)
    for token in range(V):
        expected = row[token]
        if token in tokens:
            expected = expected / 1.7 if expected > 0 else expected * 1.7
        count = tokens[num_prompt:].count(token)
        expected -= 0.4 * count + (0.9 if count else 0.0)
        assert changed[0, token].item() == pytest.approx(expected, abs=1e-6)


def test_stop_tokens_are_forbidden_before_min_tokens() -> None:
    row = torch.zeros(1, V)
    row[0, 3], row[0, 8] = 9.0, 5.0
    sampling = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [3]}
    for generated, expected in ((0, 8), (1, 8), (2, 3)):
        r = request((1,) * (1 + generated), 1, **sampling)
        assert sample(row.clone(), sampling_rows([r]), OPS).item() == expected


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 1e6])
def test_rows_without_a_finite_logit_are_told_apart(temperature: float) -> None:
    rows = logits(5, V)
    rows[1, 7] = torch.nan
    rows[2, :] = -torch.inf
    rows[3, 7] = torch.inf
    rows[4, 1:] = -torch.inf
    tokens = sample(rows, sampling_rows([request(seed=i, temperature=temperature) for i in range(5)]), OPS).tolist()
    assert 0 <= tokens[0] < V
    assert tokens[1:] == [-1, -1, -1, 0]


def test_extreme_random_numbers_stay_inside_the_kept_tokens() -> None:
    rows = torch.full((4, V), -torch.inf)
    rows[:, 10:13] = torch.tensor([0.0, 1.0, 2.0])
    batch = sampling_rows([request(seed=i, top_k=k) for i, k in enumerate((0, 0, 2, 2))])
    batch.uniforms[:] = torch.tensor([0.0, 1 - 2**-53, 0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample(rows, batch, OPS).tolist() == [10, 12, 12, 11]


def test_logprobs_rank_and_most_probable() -> None:
    rows = logits(4, V)
    rows[1, :] = 0.0  # all equal: the lowest ids are named
    rows[2, [5, 6, 7]] = 20.0
    tokens = torch.tensor([0, 49, 6, rows[3].argmax().item()])
    found = token_logprobs(rows, tokens, torch.tensor([0, 3, 4, V]), OPS)()
    expected = torch.log_softmax(rows.double(), -1)
    for i, one in enumerate(found):
        assert one.token == tokens[i]
        assert one.logprob == pytest.approx(expected[i, one.token].item(), abs=1e-5)
        ranked = sorted(range(V), key=lambda token: (-rows[i, token].item(), token))
        assert one.rank == 1 + ranked.index(one.token)
        assert [token for token, _ in one.top] == ranked[: len(one.top)]
        assert [value for _, value in one.top] == pytest.approx(expected[i, ranked[: len(one.top)]].tolist(), abs=1e-5)
    assert [len(one.top) for one in found] == [0, 3, 4, V]
    assert [token for token, _ in found[1].top] == [0, 1, 2]
    assert [token for token, _ in found[2].top][:3] == [5, 6, 7]


@pytest.mark.slow
def test_the_number_of_candidates_ranked_at_first_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows, whose nucleus is most of the vocabulary, and steep ones; top-k below and above the candidates."""
    rows = torch.cat([logits(40, 5_000) * 0.1, logits(40, 5_000, seed=1)])
    cuts = [{"top_p": 0.9}, {"top_p": 0.05}, {"top_k": 40}, {"top_k": 3_000, "top_p": 0.99}]
    requests = [request(seed=i, **cuts[i % 4]) for i in range(80)]
    drawn = []
    for candidates in (5_000, 1, 7, 60, 1_024):
        monkeypatch.setattr(sampler, "CANDIDATES", candidates)
        drawn.append(sample(rows.clone(), sampling_rows(requests), OPS).tolist())
    assert drawn == [drawn[0]] * 5
    for token, row, r in zip(drawn[0], rows, requests, strict=True):
        p = torch.softmax(row.double(), -1)
        if r.sampling.top_k > 0:
            assert (p > p[token]).sum() < r.sampling.top_k
        assert p[p > p[token]].sum() < r.sampling.top_p + 1e-6
