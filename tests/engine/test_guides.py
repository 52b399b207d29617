"""Guides: a grammar decides which tokens may come next, for its own request alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire import ops
from quire.engine import sampler
from quire.engine.engine import Engine
from quire.engine.flatten import sampling_rows
from quire.engine.plan import Plan, StepOutput
from quire.engine.sampler import sample
from quire.errors import RequestError
from quire.models.batch import Batch
from quire.request import Event, FinishReason, Guide, Request, SamplingParams
from tests.engine.fakes import VOCAB, FakeRunner, continuation, fake_engine, next_token, request, run, siblings
from tests.engine.test_waits import OPS, VARIANTS, Watch, requests


def bitmask(tokens: list[int], size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Residues:
    """Allows the tokens of one residue modulo 7; which one depends on all tokens so far. Done after `length` tokens."""

    def __init__(self, length: int = 10**6, size: int = VOCAB, fail: str = "", fail_at: int = -1) -> None:
        self.length, self.size, self.fail, self.fail_at = length, size, fail, fail_at
        self.state, self.count = 3, 0

    def tokens(self) -> list[int]:
        return list(range(self.state, self.size, 7))

    def allowed(self) -> NDArray[np.int32]:
        self._maybe_fail("allowed")
        return bitmask([] if self.fail == "empty" and self.count >= self.fail_at else self.tokens(), self.size)

    def accept(self, token: int) -> None:
        self._maybe_fail("accept")
        assert token in self.tokens()
        self.count += 1
        self.state = (self.state * 5 + token + 1) % 7

    @property
    def done(self) -> bool:
        return self.count >= self.length

    def copy(self) -> Residues:
        other = Residues(self.length, self.size, self.fail, self.fail_at)
        other.state, other.count = self.state, self.count
        return other

    def _maybe_fail(self, what: str) -> None:
        if self.fail == what and self.count >= self.fail_at:
            raise ValueError("injected")


class SamplingRunner(FakeRunner):
    """Draws with the real sampler, from logits that fall from the fake model's token on upwards, and round."""

    def run(self, batch: Batch) -> StepOutput:
        found = super().run(batch).tokens
        tokens = torch.tensor([found[name] for name in batch.logit_ids], dtype=torch.int64)
        logits = -((torch.arange(VOCAB) - tokens[:, None]) % VOCAB).float()
        drawn = sample(logits, batch.sampling, OPS).tolist() if len(tokens) else []
        return StepOutput(dict(zip(batch.logit_ids, drawn, strict=True)))


def guided_engine(**options: object) -> Engine:
    engine = fake_engine(**options)
    manager = engine.scheduler.manager
    host = manager.host_pools[0].num_blocks
    engine.runner = SamplingRunner(manager.num_blocks, manager.block_size, manager.groups, host)
    return engine


def guided(name: str, prompt: list[int], guide: Guide, **sampling: object) -> Request:
    made = request(name, prompt, **sampling)
    made.guide = guide
    return made


def constrained(prompt: list[int], guide: Residues, count: int) -> list[int]:
    """What a guided request must generate, computed without an engine."""
    tokens, guide = list(prompt), guide.copy()
    while len(tokens) < len(prompt) + count and not guide.done:
        wanted, may = next_token(tokens), guide.tokens()
        tokens.append(min(may, key=lambda token: (token - wanted) % VOCAB))
        guide.accept(tokens[-1])
    return tokens[len(prompt) :]


class Preemptions:
    """How often an engine preempts."""

    def __init__(self, engine: Engine) -> None:
        self.count, self._plan = 0, engine.scheduler.plan
        engine.scheduler.plan = self

    def __call__(self) -> Plan:
        plan = self._plan()
        self.count += len(plan.preempted)
        return plan


# ------------------------------------------------------------------------------------------------ on a fake model


@pytest.mark.slow
def test_guided_and_plain_requests_side_by_side() -> None:
    """Prompts in pieces, siblings, preemption by recomputation and by swapping: everyone gets his own tokens."""
    preempted = 0
    for seed in range(12):
        rng = random.Random(seed)
        engine = guided_engine(
            num_blocks=24, max_num_seqs=6, max_num_batched_tokens=rng.choice([5, 16]), num_host_blocks=seed % 2 * 12
        )
        expected: dict[str, tuple[list[int], str]] = {}
        for i in range(8):
            prompt, count = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))], rng.randint(2, 25)
            if i % 4 == 0:
                engine.add(request(f"plain{i}", prompt, max_tokens=count))
                expected[f"plain{i}"] = (continuation(prompt, count), "length")
                continue
            guide = Residues(rng.choice([count // 2, count, count + 1]))
            made = siblings(f"s{i}", prompt, 3, max_tokens=count) if i % 4 == 1 else [request(f"r{i}", prompt)]
            for r in made:
                r.sampling, r.guide = SamplingParams(temperature=0.0, max_tokens=count), guide.copy()
                engine.add(r)
                tokens = constrained(prompt, guide, count)
                expected[r.id] = (tokens, "stop" if guide.length <= count else "length")
        watched = Preemptions(engine)
        assert run(engine) == expected
        preempted += watched.count
    assert preempted > 10


def test_the_end_of_a_grammar_is_told_after_its_last_token() -> None:
    """In the same step, so that the token's text is told as that of any other."""
    engine = guided_engine()
    engine.add(guided("r", [1, 2], Residues(2), max_tokens=2))
    first, second = constrained([1, 2], Residues(2), 2)
    assert engine.step() == [Event("r", first)]
    assert engine.step() == [Event("r", second), Event("r", finish_reason=FinishReason.STOP)]
    assert not engine.has_work
    engine.scheduler.audit()


def test_a_grammar_that_is_done_at_once_gives_nothing() -> None:
    engine = guided_engine()
    for r in siblings("s", [1, 2, 3], 3):
        r.guide = Residues(0)
        engine.add(r)
    assert run(engine) == {f"s-{i}": ([], "stop") for i in range(3)}


@pytest.mark.parametrize("fail", ["accept", "allowed", "empty"])
def test_a_guide_that_fails_ends_its_own_request_alone(fail: str) -> None:
    engine = guided_engine(block_size=4)
    prompt = list(range(9))
    engine.add(guided("bad", prompt, Residues(fail=fail, fail_at=3), max_tokens=9))
    engine.add(guided("good", prompt, Residues(), max_tokens=9))
    engine.add(request("plain", prompt, max_tokens=9))
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Event] = {}
    while engine.has_work:
        for event in engine.step():
            if event.token is not None:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason is not None:
                ends[event.request_id] = event
        engine.scheduler.audit()
    assert tokens["good"] == constrained(prompt, Residues(), 9)
    assert tokens["plain"] == continuation(prompt, 9)
    assert tokens["bad"] == tokens["good"][: 2 if fail == "allowed" else 3]
    assert ends["bad"].finish_reason is FinishReason.ERROR
    empty = "RequestError: no token that the grammar allows may be drawn and has a finite logit at position 12"
    assert ends["bad"].error == (empty if fail == "empty" else "ValueError: injected")
    assert ends["good"].finish_reason is ends["plain"].finish_reason is FinishReason.LENGTH
    assert engine.scheduler.usage().used_blocks == 0


def test_a_grammar_without_a_beginning_is_refused() -> None:
    engine = guided_engine()
    with pytest.raises(RequestError, match="request r: its grammar allows no first token: injected"):
        engine.add(guided("r", [1], Residues(fail="allowed", fail_at=0)))
    assert not engine.has_work


def test_a_beam_search_takes_no_guide() -> None:
    engine = guided_engine()
    made = guided("r", [1], Residues())
    made.driven = True
    with pytest.raises(RequestError, match="has a guide; a beam search"):
        engine.add(made)


def test_ending_tokens_end_guided_requests_but_not_before_min_tokens() -> None:
    """Also with ignore_eos: only where a grammar has an end does it allow them."""
    prompt = [4, 4]
    tokens = constrained(prompt, Residues(), 9)
    assert tokens[1] not in tokens[:1]
    for sampling, expected in (({"ignore_eos": True}, tokens[:2]), ({"min_tokens": 2}, [tokens[0]])):
        engine = guided_engine(eos=frozenset({tokens[1]}))
        engine.add(guided("r", prompt, Residues(), max_tokens=3, **sampling))
        found, reason = run(engine)["r"]
        assert found[: len(expected)] == expected
        assert (reason == "stop") == (sampling == {"ignore_eos": True})
        assert (tokens[1] in found[:2]) == (reason == "stop")


def test_without_guides_a_batch_has_no_masks() -> None:
    engine = guided_engine()
    engine.add(request("plain", [1, 2], max_tokens=2))
    engine.step()
    assert engine.runner.batches[-1].sampling.masks is None
    engine.add(guided("r", [1, 2], Residues(), max_tokens=2))
    engine.step()
    rows = engine.runner.batches[-1].sampling
    assert rows.masks.rows.tolist() == [1]
    assert rows.part(0, 1).masks is None
    assert rows.part(1, 9).masks.rows.tolist() == [0]


# ------------------------------------------------------------------------------------------------ the sampler


@pytest.fixture(params=[sampler._draw_looking, sampler._draw_blindly], ids=["cpu", "gpu"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to draw, on the CPU."""
    monkeypatch.setattr(sampler, "_draw_looking", request.param)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(("vocabulary", "known"), [(300, 300), (300, 250), (203, 256), (60, 7)])
def test_masked_rows_draw_as_if_the_other_logits_were_missing(vocabulary: int, known: int) -> None:
    """Also where the mask ends before the vocabulary, or goes on after it. The other rows do not change."""
    count = 3 * len(VARIANTS)
    asked, rng = requests(count), np.random.default_rng(vocabulary)
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    plain = sample(logits.clone(), sampling_rows(asked), OPS).tolist()
    by_hand = logits.clone()
    for row in range(0, count, 2):
        share = 0.2 if row % 4 else 0.6  # few tokens are drawn among themselves
        may = [9, *np.flatnonzero(rng.random(known) < share).tolist()] if known > 9 else [6]
        asked[row].schedule.allowed = bitmask(may, known)
        kept = [token for token in may if token < vocabulary]
        by_hand[row] = -torch.inf
        by_hand[row, kept] = logits[row, kept]
    rows = sampling_rows(asked)
    drawn = sample(logits.clone(), rows, OPS).tolist()
    assert drawn == sample(by_hand, sampling_rows(requests(count)), OPS).tolist()
    assert drawn[1::2] == plain[1::2]
    assert all(
        asked[row].schedule.allowed.view(np.uint8)[drawn[row] // 8] >> drawn[row] % 8 & 1 for row in range(0, count, 2)
    )
    cut = [sample(logits[a:b].clone(), rows.part(a, b), OPS).tolist() for a, b in ((0, 7), (7, 8), (8, 99))]
    assert [token for part in cut for token in part] == drawn


@pytest.mark.usefixtures("_way")
def test_a_mask_that_leaves_nothing_is_told() -> None:
    asked = requests(2 * len(VARIANTS))
    for r, may in zip(asked, [[], [60]] * len(VARIANTS), strict=True):
        r.schedule.allowed = bitmask(may, 64)
    logits = torch.randn(len(asked), 50, generator=torch.Generator().manual_seed(1))
    assert set(sample(logits, sampling_rows(asked), OPS).tolist()) == {-1}


@pytest.mark.slow
def test_masking_on_a_gpu_waits_for_nothing() -> None:
    asked = requests(30)
    for r in asked[::3]:
        r.schedule.allowed = bitmask([1, 2], 60_000)
    with Watch() as watch:
        tokens = sample(torch.empty(30, 70_000, device="meta"), sampling_rows(asked), OPS)
    assert tokens.device.type == "meta"
    assert watch.copies == 3  # penalties with forbidden tokens, masks, what is drawn


# ------------------------------------------------------------------------------------------------ on a real model


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    backend = ops.load("triton", "cuda")
    asked = requests(280)
    for r in asked[::3]:
        r.schedule.allowed = bitmask(list(range(5, 900, 13)), 1_000)
    logits = torch.randn(280, 1_003, generator=torch.Generator().manual_seed(3)) * 3
    rows, there = sampling_rows(asked), logits.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample(there, rows, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.tolist() == sample(logits, rows, OPS).tolist()
