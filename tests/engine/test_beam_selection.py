"""Beam search against transformers' own, driven by the same tiny models; then each rule by hand."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from quire.engine.beam import Beam, BeamSearch, BeamSearchParams, Hypothesis
from quire.errors import BadValue, RequestError
from quire.request import FinishReason
from tests.marks import spread

pytestmark = pytest.mark.slow

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
NONE: frozenset[int] = frozenset()
PROMPT = [1, 2, 0, 2]
M = 10  # tokens to generate
SEEDS, LONG_SEEDS = range(2), range(6)  # one of each kind of model; with --long three
FILLER = -1e7  # transformers' scores of places without a hypothesis lie far below, those of hypotheses above


@cache
def tiny_model(seed: int, vocab: int) -> torch.nn.Module:
    """A random model with peaked distributions.

    In float64, so that the two searches see the same logits to the last bit of float32, cache or no cache.
    """
    torch.manual_seed(seed)
    common = {"vocab_size": vocab, "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": None}
    if seed % 2:
        config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, max_position_embeddings=64, **common)  # fmt: skip
        return LlamaForCausalLM(config).double().eval()
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **common)
    return GPT2LMHeadModel(config).double().eval()


def transformers_search(
    model: torch.nn.Module, width: int, eos: list[int], penalty: float = 1.0, max_tokens: int = M
) -> list[tuple[tuple[int, ...], float]]:
    """The generated tokens, cut after the end token, and the score of every sequence, best first."""
    prompt = torch.tensor([PROMPT])
    options: dict[str, object] = {"eos_token_id": eos, "pad_token_id": eos[0]} if eos else {}
    if width > 1:
        options |= {"num_return_sequences": width, "length_penalty": penalty, "early_stopping": False}
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=width, do_sample=False, max_new_tokens=max_tokens,
        output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    scores = out.sequences_scores.tolist() if width > 1 else [math.nan]  # one beam is greedy search, without scores
    found = []
    for row, score in zip(out.sequences[:, len(PROMPT) :].tolist(), scores, strict=True):
        length = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        found.append((tuple(row[:length]), score))
    return found


def next_tokens(model: torch.nn.Module, beams: Sequence[Beam], count: int) -> list[list[tuple[int, float]]]:
    """The most probable next tokens of each beam, all of them computed from the prompt on."""
    rows = torch.tensor([[*PROMPT, *beam.tokens] for beam in beams])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(rows).logits[:, -1].float(), -1)
    best = logprobs.topk(min(count, logprobs.shape[1]))
    return [list(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def our_search(model: torch.nn.Module, params: BeamSearchParams, eos: list[int]) -> tuple[list[Hypothesis], int]:
    """The results and the number of steps; every step's parents are checked against the beams they became."""
    search, steps = BeamSearch(params, params.max_tokens, frozenset(eos)), 0
    while not search.done:
        old = search.beams
        live = search.advance(next_tokens(model, old, search.num_candidates))
        steps += 1
        assert [(*old[parent].tokens, token) for parent, token in live] == [beam.tokens for beam in search.beams]
    return search.results(), steps


@cache
def frequent_tokens(model: torch.nn.Module, width: int) -> list[int]:
    """Tokens that a search without end tokens writes, the most frequent ones first."""
    counts = Counter(token for tokens, _ in transformers_search(model, width, []) for token in tokens)
    return [token for token, _ in counts.most_common()]


def assert_same(
    ours: list[Hypothesis], theirs: list[tuple[tuple[int, ...], float]], eos: list[int], penalty: float
) -> None:
    assert [h.tokens for h in ours] == [tokens for tokens, _ in theirs]
    for h, (_, score) in zip(ours, theirs, strict=True):
        assert math.isnan(score) or h.score == pytest.approx(score, rel=1e-5, abs=1e-6)
        assert h.score == pytest.approx(h.cumulative_logprob / len(h.tokens) ** penalty)
        assert h.finish_reason == (STOP if h.tokens[-1] in eos else LENGTH)
        assert len(h.tokens) == M or h.finish_reason is STOP


class TestAgainstTransformers:
    @pytest.mark.parametrize(("width", "penalty"), spread(4, [1, 2, 3, 5], [0.0, 1.0, 2.0, -1.0]))
    def test_same_sequences_and_scores(self, width: int, penalty: float, long: bool) -> None:
        seen: Counter[object] = Counter()
        params = BeamSearchParams(beam_width=width, max_tokens=M, length_penalty=penalty)
        for seed in LONG_SEEDS if long else SEEDS:
            model = tiny_model(seed, vocab=60)
            first, second, third = frequent_tokens(model, 5)[:3]
            for eos in ([first], [third], [third, second]):
                ours, steps = our_search(model, params, eos)
                assert_same(ours, transformers_search(model, width, eos, penalty), eos, penalty)
                seen.update(h.finish_reason for h in ours)
                seen["early"] += steps < M
                seen["at the end"] += steps == M
                seen["mixed lengths"] += len({len(h.tokens) for h in ours}) > 1
        # The cases are worth the name: both ways of ending occur, of stopping too, and lengths that compete.
        assert min(seen[STOP], seen[LENGTH]) >= 1
        if long:
            assert min(seen["early"], seen["at the end"]) >= 1
            assert seen["mixed lengths"] >= 2 or width == 1

    @pytest.mark.parametrize(("width", "vocab"), spread(3, [2, 5, 9], [3, 4, 6]))
    def test_small_vocabularies(self, width: int, vocab: int, long: bool) -> None:
        """Where tokens run out, transformers fills up with beams of score -1e9; ours are fewer, the others the same."""
        params = BeamSearchParams(beam_width=width, max_tokens=M)
        for seed in LONG_SEEDS if long else SEEDS:
            model = tiny_model(seed, vocab)
            for eos in ([vocab - 1], [0, 1]):
                ours, _ = our_search(model, params, eos)
                theirs = transformers_search(model, width, eos)
                assert_same(ours, [pair for pair in theirs if pair[1] > FILLER], eos, 1.0)

    def test_the_fewer_beams_are_really_fewer(self) -> None:
        model = tiny_model(0, vocab=3)
        ours, steps = our_search(model, BeamSearchParams(beam_width=9, max_tokens=3), [0, 1])
        theirs = transformers_search(model, 9, [0, 1], max_tokens=3)
        assert steps == 3
        assert len(ours) == 2 + 2 + 3 < len(theirs)
        assert [h.tokens for h in ours] == [tokens for tokens, score in theirs if score > FILLER]


def start(width: int, max_tokens: int = 10, eos: Sequence[int] = (9,), **options: object) -> BeamSearch:
    return BeamSearch(BeamSearchParams(beam_width=width, **options), max_tokens, frozenset(eos))


def tokens_of(search: BeamSearch) -> list[tuple[int, ...]]:
    return [h.tokens for h in search.results()]


class TestRules:
    def test_starts_with_one_empty_beam(self) -> None:
        search = start(3)
        assert search.beams == [Beam((), 0.0)]
        assert not search.done
        assert search.results() == []

    @pytest.mark.parametrize(
        ("eos", "ignore_eos", "expected"),
        [((), False, 6), ((9,), False, 6), ((8, 9), False, 9), ((7, 8, 9), False, 12), ((7, 8, 9), True, 6)],
    )
    def test_number_of_candidates(self, eos: tuple[int, ...], ignore_eos: bool, expected: int) -> None:
        assert start(3, eos=eos, ignore_eos=ignore_eos).num_candidates == expected

    def test_the_best_continuations_of_all_beams_live_on(self) -> None:
        search = start(2)
        assert search.advance([[(1, -0.5), (2, -1.0), (3, -2.0), (4, -3.0)]]) == [(0, 1), (0, 2)]
        assert search.advance([[(5, -2.0), (6, -3.0)], [(7, -0.25), (8, -1.0)]]) == [(1, 7), (1, 8)]
        assert search.beams == [Beam((2, 7), -1.25), Beam((2, 8), -2.0)]

    def test_only_the_first_of_all_continuations_may_end(self) -> None:
        search = start(2)
        assert search.advance([[(1, -0.5), (2, -1.0), (9, -1.1), (3, -2.0)]]) == [(0, 1), (0, 2)]
        assert search.results() == []

    def test_as_many_live_on_as_end(self) -> None:
        search = start(2, eos=(8, 9))
        live = search.advance([[(8, -0.5), (9, -1.0), (1, -3.0), (2, -4.0), (3, -5.0)]])
        assert live == []  # none of them can catch up
        assert tokens_of(search) == [(8,), (9,)]
        search = start(2, eos=(8, 9))
        assert search.advance([[(8, -0.5), (1, -3.0), (9, -3.5), (2, -4.0), (3, -5.0)]]) == [(0, 1), (0, 2)]
        assert search.results() == [Hypothesis((8,), -0.5, -0.5, STOP)]

    def test_a_full_set_ends_the_search_unless_the_best_live_beam_beats_its_worst(self) -> None:
        def second_step(logprob: float, penalty: float = 1.0) -> BeamSearch:
            search = start(2, length_penalty=penalty)
            search.advance([[(9, -1.0), (1, -1.0), (2, -3.0)]])  # rank 1 and 2: token 1, the end token
            assert [beam.tokens for beam in search.beams] == [(1,), (2,)]
            search.advance([[(9, -1.0), (3, logprob)], [(3, -9.0), (4, -9.0)]])
            assert tokens_of(search) == [(9,), (1, 9)]
            return search

        assert second_step(-1.0).done  # -2 / 2 does not beat -2 / 2
        assert second_step(-1.5).done
        assert second_step(-1.0, penalty=0.0).done

    def test_the_search_goes_on_while_a_longer_hypothesis_might_win(self) -> None:
        """By its score at the length it has now, not at the length it might get."""
        search = start(2, length_penalty=2.0)
        search.advance([[(9, -1.0), (1, -1.5), (2, -3.0)]])
        search.advance([[(3, -0.1), (4, -9.0)], [(9, -0.2), (5, -9.0)]])
        assert tokens_of(search) == [(2, 9), (9,)]  # -3.2 / 4, -1 / 1
        assert [beam.tokens for beam in search.beams] == [(1, 3), (1, 4)]  # -1.6 / 4 beats -1
        assert search.advance([[(9, -1.0), (6, -8.0)], [(6, -9.0), (7, -9.0)]]) == []  # -9.6 / 9 does not beat -3.2 / 4
        assert search.results() == [
            Hypothesis((1, 3, 9), pytest.approx(-2.6), pytest.approx(-2.6 / 9), STOP),
            Hypothesis((2, 9), pytest.approx(-3.2), pytest.approx(-0.8), STOP),
        ]

    def test_a_single_beam_is_greedy(self) -> None:
        search = start(1, length_penalty=-1.0)
        search.advance([[(1, -0.5), (9, -0.6)]])
        search.advance([[(9, -0.5), (1, -0.6)]])
        assert search.done
        assert search.results() == [Hypothesis((1, 9), -1.0, -2.0, STOP)]

    def test_at_max_tokens_the_first_of_all_continuations_end(self) -> None:
        search = start(2, max_tokens=2)
        search.advance([[(1, -0.5), (2, -1.0)]])
        assert search.advance([[(3, -0.5), (9, -0.75)], [(4, -1.0), (5, -1.0)]]) == []
        assert search.done
        assert search.results() == [Hypothesis((1, 3), -1.0, -0.5, LENGTH), Hypothesis((1, 9), -1.25, -0.625, STOP)]

    def test_hypotheses_at_max_tokens_compete_with_earlier_ones(self) -> None:
        search = start(2, max_tokens=2)
        search.advance([[(1, -0.5), (9, -1.0), (2, -2.0)]])
        search.advance([[(3, -1.0), (4, -2.0)], [(5, -3.0)]])
        assert search.results() == [Hypothesis((1, 3), -1.5, -0.75, LENGTH), Hypothesis((9,), -1.0, -1.0, STOP)]

    def test_one_token(self) -> None:
        search = start(3, max_tokens=1)
        assert search.advance([[(4, -0.5), (9, -1.0), (2, -1.5), (1, -2.0)]]) == []
        assert tokens_of(search) == [(4,), (9,), (2,)]

    def test_max_tokens_is_what_the_search_was_given(self) -> None:
        search = BeamSearch(BeamSearchParams(beam_width=1, max_tokens=7), 1, NONE)
        search.advance([[(1, -1.0), (2, -2.0)]])
        assert search.done

    def test_ties_go_to_the_lowest_token_then_to_the_lowest_beam(self) -> None:
        search = start(3)
        assert search.advance([[(5, -1.0), (3, -1.0), (4, -1.0), (2, -1.0)]]) == [(0, 2), (0, 3), (0, 4)]
        step = [[(7, -1.0), (6, -1.0)], [(6, -1.0), (5, -2.0)], [(6, -1.0), (1, -2.0)]]
        assert search.advance(step) == [(0, 6), (1, 6), (2, 6)]
        assert search.advance(step) == [(0, 6), (1, 6), (2, 6)]

    def test_of_equal_hypotheses_the_earlier_one_stays(self) -> None:
        search = start(2, max_tokens=2, length_penalty=0.0)
        search.advance([[(1, -0.5), (9, -1.0), (2, -3.0)]])
        search.advance([[(3, -0.5), (4, -0.5)], [(3, -1.0)]])
        assert tokens_of(search) == [(9,), (1, 3)]

    def test_candidates_beyond_those_asked_for_change_nothing(self) -> None:
        row = [(token, -0.1 * (token + 1)) for token in range(9)]
        short, long = start(2), start(2)
        assert short.advance([row[:4]]) == long.advance([row])
        assert short.advance([row[:4], row[:4]]) == long.advance([row, row])
        assert short.beams == long.beams


class TestFewTokens:
    def test_fewer_tokens_than_beams(self) -> None:
        search = start(4, max_tokens=3, eos=(0,))
        assert search.advance([[(1, -0.5), (0, -1.0)]]) == [(0, 1)]
        assert search.advance([[(0, -0.5), (1, -1.0)]]) == [(0, 1)]
        assert search.advance([[(0, -0.5), (1, -1.0)]]) == []
        assert [(h.tokens, h.finish_reason) for h in search.results()] == [
            ((1, 0), STOP), ((1, 1, 0), STOP), ((1, 1, 1), LENGTH), ((0,), STOP),
        ]  # fmt: skip

    def test_the_search_ends_when_no_token_goes_on(self) -> None:
        search = start(4, eos=(0, 1))
        assert search.advance([[(1, -0.5), (0, -1.0)]]) == []
        assert search.done
        assert tokens_of(search) == [(1,), (0,)]

    def test_impossible_tokens_are_left_out(self) -> None:
        search = start(3)
        assert search.advance([[(4, -0.5), (9, -math.inf), (1, -math.inf)]]) == [(0, 4)]
        assert search.advance([[(4, -math.inf), (9, -math.inf)]]) == []
        assert search.done
        assert search.results() == []


class TestErrors:
    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("beam_width", [0, -1, 257, 1.5, True, "2", None]),
            ("max_tokens", [0, -5, 1.0, None]),
            ("length_penalty", [math.nan, math.inf, -math.inf, 10.5, -11, "1", None, True]),
        ],
    )
    def test_every_field_is_checked(self, field: str, values: list[object]) -> None:
        for value in values:
            with pytest.raises(RequestError, match=rf"^{field} is "):
                BeamSearchParams(**{"beam_width": 2, field: value})

    def test_defaults_are_vllms_and_good_values_pass(self) -> None:
        params = BeamSearchParams(beam_width=4)
        assert (params.max_tokens, params.ignore_eos, params.length_penalty) == (16, False, 1.0)
        assert BeamSearchParams(beam_width=256, max_tokens=10**6, length_penalty=-10).length_penalty == -10

    def test_scores_stay_finite_at_the_extremes(self) -> None:
        for penalty in (10.0, -10.0):
            search = start(1, max_tokens=500, eos=(), length_penalty=penalty)
            while not search.done:
                search.advance([[(1, -100.0), (2, -101.0)]])
            (best,) = search.results()
            assert best.score == pytest.approx(-50_000 / 500**penalty)
            assert math.isfinite(best.score)
            assert best.score < 0

    def test_max_tokens_of_the_search_is_checked(self) -> None:
        with pytest.raises(RequestError, match=r"^max_tokens is 0; it must be at least 1"):
            BeamSearch(BeamSearchParams(beam_width=2), 0, NONE)

    def test_one_entry_for_each_live_beam(self) -> None:
        search = start(2)
        with pytest.raises(BadValue, match=r"^candidates has 2 entries; 1 beams are live"):
            search.advance([[(1, -1.0)], [(1, -1.0)]])
        search = start(2, max_tokens=1)
        search.advance([[(1, -1.0)]])
        with pytest.raises(BadValue, match=r"^candidates has 1 entries; 0 beams are live"):
            search.advance([[(1, -1.0)]])
        assert search.advance([]) == []

    def test_nan_is_refused_and_nothing_changes(self) -> None:
        search = start(2)
        search.advance([[(1, -0.5), (2, -1.0)]])
        before = search.beams
        with pytest.raises(BadValue, match=r"^candidates\[1\] has NaN as the log-probability of token 3"):
            search.advance([[(9, -0.1), (1, -0.5)], [(3, math.nan)]])
        assert search.beams == before
        assert search.results() == []
