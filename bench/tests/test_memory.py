"""quire bench memory: the contiguous allocator is what it is said to be, and the figures are those of the run."""

from collections.abc import Callable
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.cache.groups import Heads
from quire.cli import app
from quire_bench.engine import memory
from quire_bench.engine.contiguous import ContiguousAllocator
from quire_bench.engine.memory import Moment, Setup
from tests.marks import of_long_runs

pytestmark = pytest.mark.slow

HEADS = Heads(2, 2, 8)

# ---------------------------------------------------------------------------------------------- the allocator


def test_first_fit() -> None:
    slots = ContiguousAllocator(20)
    assert [slots.allocate(size) for size in (4, 2, 6, 2)] == [0, 4, 6, 12]
    slots.free(0)
    slots.free(6)
    assert slots.gaps == ((0, 4), (6, 12), (14, 20))
    assert slots.allocate(3) == 0  # the first gap that is large enough, not the best one
    assert slots.allocate(2) == 6  # one slot is left before it
    assert slots.gaps == ((3, 4), (8, 12), (14, 20))
    assert slots.allocate(6) == 14
    assert slots.gaps == ((3, 4), (8, 12))


def test_refused_though_enough_is_free() -> None:
    slots = ContiguousAllocator(12)
    for _ in range(3):
        slots.allocate(4)
    slots.free(0)
    slots.free(8)
    before = slots.gaps
    assert slots.num_free == 8
    assert slots.allocate(5) is None
    assert (slots.num_free, slots.gaps) == (8, before)
    assert slots.allocate(4) == 0


@given(st.integers(1, 40), st.lists(st.integers(-6, 12).filter(bool), max_size=80))
def test_the_allocator_against_a_bitmap(num_slots: int, actions: list[int]) -> None:
    """A positive number allocates that many slots, a negative one frees one of those that are taken."""
    slots, taken = ContiguousAllocator(num_slots), [False] * num_slots
    sizes: dict[int, int] = {}
    for action in actions:
        if action > 0:
            starts = range(num_slots - action + 1)
            expected = next((start for start in starts if not any(taken[start : start + action])), None)
            assert slots.allocate(action) == expected
            if expected is not None:
                sizes[expected] = action
                taken[expected : expected + action] = [True] * action
        elif sizes:
            start = sorted(sizes)[-action % len(sizes)]
            slots.free(start)
            size = sizes.pop(start)
            taken[start : start + size] = [False] * size
        gaps = []
        for is_taken, run in groupby(range(num_slots), key=taken.__getitem__):
            whole = list(run)
            if not is_taken:
                gaps.append((whole[0], whole[-1] + 1))
        assert slots.gaps == tuple(gaps)
        assert slots.num_free == taken.count(False)


# ------------------------------------------------------------------------------------------------- the load


# ------------------------------------------------------------------------------------------------- the runs

Load = Callable[..., Setup]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """A setup with these lengths."""

    def make(lengths: list[tuple[int, int]], **options: int) -> Setup:
        drawn = iter(lengths)
        monkeypatch.setitem(memory.DISTRIBUTIONS, "hand-made", lambda rng, longest: next(drawn))
        return Setup(distribution="hand-made", requests=len(lengths), **options)

    return make


FOUR = [(3, 1), (1, 3), (3, 1), (5, 1)]


def test_contiguous_by_hand(load: Load) -> None:
    """The first and the third request end and leave two gaps of four slots, and the last one needs six in one piece."""
    setup = load(FOUR, block_size=4, num_blocks=3, max_model_len=8)
    run = memory.run_contiguous(setup, "exact length", [4, 4, 4, 6])
    assert run.moments == (
        Moment(running=3, used=12, live=7, shared=0, unusable=0, is_short=True),
        Moment(running=1, used=4, live=2, shared=0, unusable=8, is_short=True),
        Moment(running=1, used=4, live=3, shared=0, unusable=8, is_short=True),
        Moment(running=1, used=6, live=5, shared=0, unusable=0, is_short=False),
    )
    assert (run.refused, run.system) == (1, "contiguous, exact length")
    use = run.pressed
    assert (use.used, use.live, use.wasted, use.unusable) == pytest.approx((20 / 3, 4, 8 / 3, 16 / 3))
    assert (use.free, use.waste, use.mean_batch, use.largest_batch) == pytest.approx((0, 1 - 12 / 36, 5 / 3, 3))


def test_paged_by_hand(load: Load) -> None:
    setup = load(FOUR, block_size=4, num_blocks=3, max_model_len=8)
    run = memory.run_paged(setup)
    assert run.moments == (
        Moment(running=3, used=12, live=7, shared=0, unusable=0, is_short=True),
        Moment(running=2, used=12, live=7, shared=0, unusable=0, is_short=False),  # two blocks, not neighbours
        Moment(running=1, used=4, live=3, shared=0, unusable=0, is_short=False),
    )
    assert (run.refused, run.preemptions) == (0, 0)


@pytest.mark.parametrize("seed", [0, of_long_runs(1), of_long_runs(2)])
def test_the_targets_on_the_chat_like_load(seed: int) -> None:
    """Less than 4 % wasted at block size 16, and at least twice the batch of contiguous pre-allocation."""
    paged, whole, exact = memory.compare(Setup(distribution="chat", seed=seed))
    assert 0 < paged.pressed.waste < 0.04
    assert paged.use(paged.moments).waste < 0.04
    assert paged.pressed.mean_batch >= 2 * whole.pressed.mean_batch
    assert paged.pressed.mean_batch > exact.pressed.mean_batch
    assert len(paged.moments) < len(exact.moments) < len(whole.moments)
    assert (whole.pressed.mean_batch, whole.pressed.largest_batch, whole.pressed.unusable) == (16, 16, 0)
    assert exact.pressed.unusable > 0
    assert (paged.refused, whole.refused) == (0, 0)
    assert exact.refused > 0
    assert all(len(run.short) > 50 for run in (paged, whole, exact))


# ------------------------------------------------------------------------------------------------ the model


# ---------------------------------------------------------------------------------------------- the command


def run(arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", "memory", *arguments.split()])
    assert result.exit_code == status, result.output
    return result.stderr if status else result.stdout


SMALL = "--requests 40 --max-model-len 256 --memory 1GiB"


def test_the_table() -> None:
    shown = run(SMALL)
    for name in memory.DISTRIBUTIONS:
        assert f"{name}: 40 requests" in shown
    assert "256 blocks of 16, max_model_len 256" in shown
    assert shown.count("contiguous, exact length") == 6
    assert "embedded: 5 layers, 2 KV heads of 32, bfloat16" in shown
    assert "bytes a token      1,280" in shown
    assert "3,276 requests of 256 tokens, full length" in shown
    assert "1,024 tokens, full length" in run("--requests 2 --distribution chat")  # what the model was made for
