"""Signals whose handlers raise, at any line: the books stay right, and no token is lost."""

import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import quire
from quire import LLM, SamplingParams
from quire.engine import interrupts
from quire.engine.beam import BeamSearchParams
from quire.engine.engine import Engine
from quire.engine.interrupts import deferred_interrupts
from quire.engine.plan import StepOutput
from quire.models.batch import Batch
from quire.request import Event, Request
from tests.engine.fakes import VOCAB, continuation, fake_engine, request, siblings

HERE = Path(quire.__file__).parent
DEFERRAL = {interrupts.__file__}
# Of the others, those that no step calls as a whole.
BOOKS = {str(path) for path in (*HERE.glob("*.py"), *HERE.glob("engine/*.py"), *HERE.glob("cache/*.py"))} - DEFERRAL


class Interrupted(KeyboardInterrupt):
    """What the handlers raise."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """SIGALRM and SIGUSR1 interrupt, and are what they were afterwards."""
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGALRM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) is interrupt
        signal.signal(number, handler)


class Lines:
    """Raises SIGALRM at each k-th line of these files that is run through it."""

    def __init__(self, every: int, files: set[str] = BOOKS) -> None:
        self.every, self.count, self.raised = every, 0, 0
        self._files = files

    def run(self, call: Callable[[], object]) -> object:
        """What the call returns, or raises."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, kind: str, _: object) -> object:
        if frame.f_code.co_filename not in self._files:
            return None
        if kind == "line":
            self.count += 1
            if self.count % self.every == 0:
                self.raised += 1
                signal.raise_signal(signal.SIGALRM)
        return self._trace


@pytest.mark.parametrize("every", [67, 139, 307])
@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_interrupts_at_any_line_of_the_engine_change_nothing(every: int, num_host_blocks: int) -> None:
    rng, lines = random.Random(every), Lines(every)
    engine = fake_engine(
        num_blocks=24, block_size=4, num_host_blocks=num_host_blocks, max_num_batched_tokens=16, max_num_seqs=6
    )
    stem = [rng.randrange(VOCAB) for _ in range(14)]
    requests: list[Request] = []
    for i in range(8):
        prompt = [*stem[: rng.randint(1, 14)], *(rng.randrange(9) for _ in range(rng.randint(0, 6)))]
        requests += siblings(f"r{i}", prompt, 1 + 2 * (i % 2), max_tokens=12)
    aborted, tokens, num_interrupts = requests[5], {r.id: list[int]() for r in requests}, 0

    def run(call: Callable[[], Any]) -> Any:
        nonlocal num_interrupts
        try:
            return lines.run(call)
        except Interrupted:
            num_interrupts += 1
            return None
        finally:
            engine.scheduler.audit()

    for r in requests:
        run(lambda r=r: engine.add(r))
        if r.id not in engine.scheduler.requests:  # the interrupt came before it began
            engine.add(r)
    shown: list[Event] = []
    for step in range(200):
        shown += run(engine.step) or []
        if step == 20:
            run(engine.reset_prefix_cache)
            run(lambda: engine.abort(aborted.id))
    assert num_interrupts > 50
    while engine.has_work:
        shown += engine.step()
    for event in shown:
        if event.token is not None:
            tokens[event.request_id].append(event.token)
    for r in requests:
        assert tokens[r.id] == r.tokens.tolist()[r.num_prompt :]
        assert tokens[r.id] == continuation(r.tokens.tolist()[: r.num_prompt], len(tokens[r.id]))
        assert len(tokens[r.id]) == 12 or r is aborted
    assert all(pool.num_used == 0 for pool in (*engine.scheduler.manager.pools, *engine.scheduler.manager.host_pools))


def test_an_interrupt_within_a_step_comes_at_its_end_and_the_events_with_the_next_step() -> None:
    engine = fake_engine()
    engine.add(request("r", [1, 2, 3], max_tokens=1))
    compute = engine.runner.run

    def interrupted(batch: Batch) -> StepOutput:
        signal.raise_signal(signal.SIGALRM)
        return compute(batch)

    engine.runner.run = interrupted
    with pytest.raises(Interrupted):
        engine.step()
    assert not engine.scheduler.requests
    assert engine.has_work  # somebody has yet to be told
    [event] = engine.step()
    assert [event.token] == continuation([1, 2, 3], 1)
    assert not engine.has_work


def test_an_interrupt_at_any_line_of_step_loses_no_event() -> None:
    """Each line of `Engine.step` in turn, the one that returns the events too."""
    for at in range(20):
        engine = fake_engine()
        engine.add(request("r", [1, 2, 3], max_tokens=1))
        count = 0

        def trace(frame: FrameType, kind: str, _: object) -> Callable[..., object] | None:
            nonlocal count
            if frame.f_code is not Engine.step.__code__:
                return None
            if kind == "line":
                count += 1
                if count == at + 1:  # noqa: B023 - called within the same round
                    raise Interrupted
            return trace

        before, events = sys.gettrace(), list[Event]()
        sys.settrace(trace)
        try:
            events = engine.step()
        except Interrupted:
            assert engine.has_work
        finally:
            sys.settrace(before)
        if count <= at:
            break  # there are no more lines
        assert [event.token for event in engine.step()] == continuation([1, 2, 3], 1)
        assert not engine.has_work
    assert at > 5
    assert [event.token for event in events] == continuation([1, 2, 3], 1)


# ----------------------------------------------------------------------------------------------------------- LLM


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=60, block_size=4, max_model_len=64, max_num_batched_tokens=32, max_num_seqs=8)


def ask(llm: LLM, what: str) -> object:
    prompts = [list(range(20 + i, 35 + 2 * i)) for i in range(3)]
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=4, ignore_eos=True, stop=["e"])
    if what == "generate":
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [[sample.token_ids for sample in output.outputs] for output in outputs]
    if what == "stream":
        return [[sample.token_ids for sample in output.outputs] for output in llm.stream(prompts[:1], sampling)]
    found = llm.beam_search(prompts[:2], BeamSearchParams(beam_width=3, max_tokens=4))
    return [[sequence.tokens for sequence in output.sequences] for output in found]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["generate", "stream", "beams"])
def test_nothing_of_an_interrupted_call_stays_in_the_engine(llm: LLM, what: str) -> None:
    """At lines spread over the whole call, from its first to its last."""
    expected = ask(llm, what)
    counting = Lines(sys.maxsize)
    counting.run(lambda: ask(llm, what))
    interrupted = 0
    for i in range(12):
        at = 1 + counting.count * i // 12 + i
        llm.reset_prefix_cache()
        lines = Lines(at)
        try:
            lines.run(lambda lines=lines: ask(llm, what))
        except Interrupted:
            interrupted += 1
        assert lines.raised > 0
        llm.engine.scheduler.audit()
        assert not llm.engine.scheduler.requests, at
        assert not llm.engine.has_work, at
        assert not llm.processor._samples, at
    assert interrupted == 12
    assert ask(llm, what) == expected


def test_a_stream_misses_nothing_when_a_call_beside_it_is_interrupted(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = list(range(30, 50))
    [expected] = llm.generate([prompt], sampling, use_tqdm=False)
    stream = llm.stream([prompt], sampling)
    next(stream)
    for at in range(700, 3500, 400):
        with pytest.raises(Interrupted):
            Lines(at).run(lambda: ask(llm, "generate"))
    [*_, output] = stream
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.outputs[0].text == expected.outputs[0].text


# --------------------------------------------------------------------------------------------------- the deferral


def test_handlers_wait_and_are_called_in_order_once_each() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: calls.append(number))

    @deferred_interrupts()
    def block() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGUSR1)
        with deferred_interrupts():
            signal.raise_signal(signal.SIGALRM)
        assert calls == []

    with pytest.raises(Interrupted) as raised:
        block()
    assert raised.value.args == (signal.SIGUSR1,)
    assert calls == [signal.SIGALRM]  # although another had raised before
    signal.signal(signal.SIGALRM, interrupt)


def test_what_the_block_raises_is_seen_with_the_interrupt() -> None:

    @deferred_interrupts()
    def block() -> None:
        signal.raise_signal(signal.SIGALRM)
        raise ValueError("the block's own")

    with pytest.raises(Interrupted) as raised:
        block()
    assert isinstance(raised.value.__context__, ValueError)
    with pytest.raises(ValueError, match="alone"), deferred_interrupts():
        raise ValueError("alone")


def test_a_handler_that_is_set_within_the_block_stays() -> None:
    calls: list[str] = []
    with deferred_interrupts():
        stand_in = signal.signal(signal.SIGALRM, lambda number, frame: calls.append("new"))
        signal.raise_signal(signal.SIGALRM)
    assert calls == ["new"]
    signal.raise_signal(signal.SIGALRM)
    assert calls == ["new", "new"]
    signal.signal(signal.SIGALRM, stand_in)  # by code that puts back what it found
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGALRM)
    with pytest.raises(Interrupted):
        _defer(lambda: (signal.raise_signal(signal.SIGALRM), calls.append("waited")))
    assert calls == ["new", "new", "waited"]
    signal.signal(signal.SIGALRM, interrupt)


def test_signals_without_a_handler_of_python_are_left_alone() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with deferred_interrupts():
        for number, handler in before.items():
            if not callable(handler):
                assert signal.getsignal(number) is handler
            elif number == signal.SIGALRM:
                assert signal.getsignal(number) is not handler
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_the_wakeup_descriptor_hears_at_once() -> None:
    heard: list[bytes] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno())
        try:
            with pytest.raises(Interrupted):
                _defer(lambda: (signal.raise_signal(signal.SIGALRM), heard.append(ours.recv(16))))
        finally:
            assert signal.set_wakeup_fd(before) == theirs.fileno()
    assert heard == [bytes([signal.SIGALRM])]


def test_another_thread_defers_nothing() -> None:
    seen: list[object] = []

    def block() -> None:
        with deferred_interrupts():
            seen.append(signal.getsignal(signal.SIGALRM))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [interrupt]


def test_an_interrupt_at_any_line_of_the_deferral_itself_leaves_the_handlers() -> None:
    counting = Lines(sys.maxsize, DEFERRAL)
    counting.run(_defer)
    for at in range(1, counting.count):
        with pytest.raises(Interrupted):
            Lines(at, DEFERRAL).run(_defer)
        assert signal.getsignal(signal.SIGALRM) is signal.getsignal(signal.SIGUSR1) is interrupt
        with pytest.raises(Interrupted):  # it defers again
            _defer(lambda: signal.raise_signal(signal.SIGALRM))


@deferred_interrupts()
def _defer(call: Callable[[], object] = lambda: None) -> None:
    call()
    assert signal.getsignal(signal.SIGALRM) is not interrupt
