"""Worker: the engine on a thread of its own, and what the event loop may ask of it.

The engine belongs to its thread alone. The event loop sends it functions, which it runs between two steps; it sends
back, once a step, what that step reported. What happens to one request stays with it: the thread ends only when it is
asked to, or when the engine can serve no one any more, and then all who wait get the reason.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from quire.cache.events import BlocksAllocated, BlocksForked, BlocksShared, CacheEvent
from quire.engine.beam import BeamSearchParams
from quire.engine.beam_driver import BeamDriver
from quire.engine.cost import CostModel
from quire.engine.engine import Engine
from quire.request import Event, FinishReason, Request
from quire.server.api.jobs import Delta, Generation, Job, Search
from quire.server.http.api_error import ApiError, deadline_passed, engine_stopped, queue_full
from quire.server.watch.inspector import Inspector
from quire.server.watch.metrics import Metrics, RequestClock
from quire.text import RequestOutput, TextEngine, Tokenizer

if TYPE_CHECKING:  # its packages are an extra
    from quire.server.watch.traces import Traces

log = logging.getLogger("quire.server")

STUCK_AFTER = 4.0  # seconds in one step after which the engine counts as stuck, unless the step is a long one:
HOPELESS = 10  # times that, after which the process had better be started again
PATIENCE = 16  # times what it takes by the cost model, whose machine may be that much faster than this one
FIRST_BLOCKS = (BlocksAllocated, BlocksShared, BlocksForked)  # one of these comes first when a request begins to run
T = TypeVar("T")


class Worker:
    """An engine on its thread. Public methods are the event loop's, private ones say whose they are."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        inspector: Inspector,
        metrics: Metrics,
        cost: CostModel,
        max_queued: int,
        request_timeout: float | None = None,
        stuck_after: float | None = None,
        traces: Traces | None = None,
    ) -> None:
        """cost: of a step. max_queued: samples that may wait for a seat. request_timeout: seconds that a job may take.

        stuck_after: seconds that a step may take; None: by its cost.
        """
        self.engine = engine
        self.failure: str | None = None  # why the engine serves nobody any more
        self.on_failure: Callable[[], None] = lambda: None
        # Called on the engine's thread after each step, with its events and the seconds that it took.
        self.observers: list[Callable[[Sequence[Event], float], None]] = []
        self._inspector = inspector
        self._metrics = metrics
        self._traces = traces
        self._cost = cost
        self._stuck_after = stuck_after
        self.max_samples = engine.scheduler.max_num_seqs + max_queued
        self._timeout = request_timeout
        self._num_samples = 0  # of the open jobs
        self._open: dict[Job, asyncio.TimerHandle | None] = {}  # with its deadline
        self._calls: set[asyncio.Future[Any]] = set()
        # From here on the engine thread's.
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy_since: float | None = None
        self._processor = TextEngine(engine, tokenizer)
        self._generations: dict[str, Generation] = {}  # by the id of each output that has not ended
        self._searches: dict[str, Search] = {}  # by the id of each beam
        self._clocks: dict[str, RequestClock] = {}  # by request id
        self._waiting: set[str] = set()  # requests that have never run
        self._num_found = 0  # tokens of searches that ended in this step
        engine.listen(self._hear)
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to serve, for the event loop in which this is called."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End. Who still waits gets an error; the step that is being computed is waited for, but not for ever."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, STUCK_AFTER)
        self.end_all("the server is stopping")

    @property
    def num_samples(self) -> int:
        """Samples that run or wait."""
        return self._num_samples

    @property
    def stuck_for(self) -> float:
        """Seconds since the engine began what it is doing; 0 while it has nothing to do."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def check_alive(self) -> None:
        """Raise ApiError (503) if the engine can serve no request any more, or is stuck beyond hope."""
        self._check(HOPELESS)

    def check_health(self) -> None:
        """Raise ApiError (503) if the engine does not serve: it has stopped, or is stuck in a step."""
        self._check(1)

    def _check(self, times: int) -> None:
        """times: how often as long as it may last a step lasts before the engine counts as stuck."""
        if self.failure is not None:
            raise engine_stopped(self.failure)
        seconds = self.stuck_for
        if seconds > times * (self._stuck_after or STUCK_AFTER) and seconds > times * (longest := self._longest_step()):
            message = (
                f"the engine has been in one step for {seconds:.1f} s, which should take {longest:.1f} s at most "
                f"(--stuck-after says how long any step may take)"
            )
            raise ApiError(message, HTTPStatus.SERVICE_UNAVAILABLE, code="engine_stuck")

    def _longest_step(self) -> float:
        """Seconds that what the engine is doing may take."""
        if self._stuck_after is not None:
            return self._stuck_after
        plan = self.engine.under_way
        if plan is None:
            return STUCK_AFTER
        num_drawn = sum(1 if item.request.sampling.prompt_logprobs is None else item.num_rows for item in plan.items)
        return max(STUCK_AFTER, PATIENCE * self._cost.seconds(plan, num_drawn))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps: what it returns or raises."""
        if self.failure is not None:
            raise engine_stopped(self.failure)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                settle = partial(_set_result, future, function())
            except Exception as error:
                settle = partial(_set_exception, future, error)
            self._post(settle)

        self._inbox.put(run)
        return await future

    def check_room(self, num_samples: int, name: str = "n") -> None:
        """Raise ApiError, naming a field, if so many samples cannot be taken now."""
        if self.failure is not None:
            raise engine_stopped(self.failure)
        if num_samples > self.max_samples:
            message = f"the request asks for {num_samples} samples; this server takes {self.max_samples} at a time"
            raise ApiError(message, param=name)
        if self._num_samples + num_samples > self.max_samples:
            raise queue_full(self.max_samples)

    def check(self, request: Request) -> None:
        """Raise RequestError if a request could never run."""
        self.engine.check(request)

    def search(self, name: str, prompt: Sequence[int], params: BeamSearchParams, salt: str, lora: str | None) -> Search:
        """A beam search, not yet queued. Raises RequestError if it could never run."""
        driver = BeamDriver(self.engine, name, prompt, params, salt, lora)
        driver.check()
        return Search(driver)

    async def submit(self, job: Job) -> None:
        """Queue a job. Raises RequestError or ApiError, queueing nothing, if it cannot be served."""
        self.check_room(job.num_samples)
        job.check(self.engine)
        self._num_samples += job.num_samples
        timer = None
        if self._timeout is not None:
            timer = asyncio.get_running_loop().call_later(self._timeout, self._expire, job, self._timeout)
        self._open[job] = timer
        clocks = {request.id: self._clock(request) for request in job.requests}
        if self._traces is not None:
            self._traces.began(job.requests)
        self._inbox.put(partial(self._begin, job, clocks))

    def abort(self, job: Job) -> None:
        """Take a job back: it ends with the engine's next step."""
        if job in self._open and self.failure is None:
            self._inbox.put(partial(job.stop, self.engine))

    def end_all(self, why: str) -> None:
        """Tell everybody who waits that no step will be computed for him any more, and take nobody else."""
        if self.failure is not None:
            return
        self.failure = why
        for job in list(self._open):
            self._tell(job, engine_stopped(why))
            self._release(job)
        for future in list(self._calls):
            _set_exception(future, engine_stopped(why))

    def _tell(self, job: Job, error: ApiError | None = None) -> None:
        """Let whoever waits for a job go on. Its blocks may still be the engine's."""
        if not job.ended.is_set():
            job.error = error
            job.ended.set()
            job.take([])

    def _release(self, job: Job) -> None:
        """The engine has done with a job."""
        if job in self._open:
            self._num_samples -= job.num_samples
            timer = self._open.pop(job)
            if timer is not None:
                timer.cancel()

    def _expire(self, job: Job, seconds: float) -> None:
        """A job's time is up. Who waits gets an error at once, even if the engine is in a step that never ends."""
        self._tell(job, deadline_passed(seconds))
        self.abort(job)

    def _clock(self, request: Request) -> RequestClock:
        """A request's clock starts when it comes, not when a step has time for it."""
        sampling = request.sampling
        return self._metrics.request(request.num_prompt, sampling.max_tokens, sampling.n)

    # ---------------------------------------------------------------------------- called by the engine's thread

    def _close(self, job: Job, error: ApiError | None = None) -> None:
        self._release(job)
        self._tell(job, error)

    def _deliver(self, reports: Sequence[tuple[Generation, list[Delta], bool]]) -> None:
        """Hand over what a step brought to each job, and whether it was the last of it."""
        for job, deltas, is_last in reports:
            if not job.ended.is_set():  # else its time was up
                job.take(deltas)
            if is_last:
                self._close(job)

    def _die(self, why: str) -> None:
        self.end_all(why)
        self.on_failure()

    # ---------------------------------------------------------------------------------------- the engine's thread

    def _post(self, function: Callable[[], None]) -> None:
        """Let the event loop run a function."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            log.exception("the engine stops: it can serve nobody any more")
            self._post(partial(self._die, f"{type(error).__name__}: {error}"))

    def _turn(self) -> bool:
        """Do what the event loop asked for, then a step. False: it asked for the end."""
        if not self.engine.has_work:
            self._busy_since = None
            asked = self._inbox.get()
            self._busy_since = time.monotonic()
            if asked is None:
                return False
            asked()
        while True:
            try:
                asked = self._inbox.get_nowait()
            except Empty:
                break
            if asked is None:
                return False
            asked()
        if self.engine.has_work:
            self._busy_since = time.monotonic()
            self._step()
        return True

    def _step(self) -> None:
        start = time.monotonic()
        events = self.engine.step()
        now = time.monotonic()
        for event in events:
            if (search := self._searches.get(event.request_id)) is not None:
                self._lead(search, event)
        taken = list(self._processor.process(events))
        grown = {output.request_id: output for _, output in taken}
        shown = []
        for name, output in grown.items():
            job = self._generations.get(name)
            if job is None:  # it could not be queued as a whole
                continue
            if output.finished:
                job.num_open -= 1
                del self._generations[name]
            deltas = job.news(output)
            if deltas or job.num_open == 0:
                shown.append((job, deltas, job.num_open == 0))
        if shown:
            self._post(partial(self._deliver, shown))
        try:
            self._count(taken, start, now)
            self._inspector.observe(events)
            for observe in self.observers:
                observe(events, now - start)
        except Exception:  # who watches must not hurt who is served
            log.exception("a step could not be counted or shown")

    def _begin(self, job: Job, clocks: dict[str, RequestClock]) -> None:
        self._clocks.update(clocks)
        self._waiting.update(clocks)
        try:
            job.start(self._processor)
        except Exception as error:  # nothing that `check` saw; what was queued of it is taken back
            log.exception("a job could not be queued")
            job.stop(self.engine)
            for name, clock in clocks.items():
                self._clocks.pop(name, None)
                self._waiting.discard(name)
                self._trace(name, clock, FinishReason.ERROR.value, time.monotonic())
            shown = ApiError(f"{type(error).__name__}: {error}", HTTPStatus.INTERNAL_SERVER_ERROR)
            self._post(partial(self._close, job, shown))
            return
        if isinstance(job, Generation):
            self._generations.update((output.request_id, job) for output in job.outputs)
        elif isinstance(job, Search):
            self._searches.update((name, job) for name in job.driver.request_ids)

    def _lead(self, search: Search, event: Event) -> None:
        """Give a search an event of one of its beams."""
        driver = search.driver
        try:
            driver.take(event)
        except Exception as error:
            log.exception("a beam search failed")
            driver.error = f"{type(error).__name__}: {error}"
            driver.stop()
        if driver.done:
            for name in driver.request_ids:
                self._searches.pop(name, None)
            self._count_search(search)
            self._post(partial(self._close, search))

    # ------------------------------------------------------------------------------------------------- metrics

    def _hear(self, event: CacheEvent) -> None:
        if self._waiting and isinstance(event, FIRST_BLOCKS) and event.request_id in self._waiting:
            self._waiting.discard(event.request_id)
            self._clocks[event.request_id].scheduled(event.time)

    def _count_search(self, search: Search) -> None:
        """Its tokens are known at its end, all at once."""
        driver, clock = search.driver, self._clocks.pop(search.driver.request.id)
        reason = FinishReason.ERROR.value
        self._waiting.discard(driver.request.id)
        found, now = driver.results(), time.monotonic()
        if driver.error is None and found:
            lengths = [len(hypothesis.tokens) for hypothesis in found]
            self._num_found += sum(lengths)
            clock.found(lengths, now)
            reason = found[0].finish_reason.value
        clock.ended(reason, now)
        self._trace(driver.request.id, clock, reason, now)

    def _count(self, taken: Sequence[tuple[Event, RequestOutput]], start: float, now: float) -> None:
        num_new, self._num_found = self._num_found, 0
        for event, _ in taken:
            clock = self._clocks.get(event.request_id)
            if clock is None:
                continue
            if event.token is not None and event.drawn is None:
                num_new += 1
                clock.tokens(1, now)
            if event.hidden_state is not None:
                clock.computed(now)
            if event.finish_reason is not None:
                clock.ended(event.finish_reason.value, now)
                self._trace(event.request_id, clock, event.finish_reason.value, now)
                del self._clocks[event.request_id]
                self._waiting.discard(event.request_id)
        self._metrics.step(num_new, now - start)

    def _trace(self, name: str, clock: RequestClock, reason: str, now: float) -> None:
        """A request has ended."""
        if self._traces is None:
            return
        try:
            self._traces.ended(name, clock.moments, reason, now)
        except Exception:  # who watches must not hurt who is served
            log.exception("a request could not be traced")


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
