"""AsyncLLM: an LLM on a thread of its own, for event loops.

The engine belongs to its thread alone. The event loop sends it functions, which it runs between two steps; it sends
back, once a step, what that step reported. What happens to one request stays with it: the thread ends only when it is
asked to, or when the engine can serve no one any more, and then all who wait get the reason.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from quire.embedding import EmbeddingRequestOutput, check_dimensions, embedding_output
from quire.errors import EngineStopped, QuireError, RequestError
from quire.jobs import Delta, Generation, Growing, Job, Search, end
from quire.llm import LLM, Closed
from quire.parallel.group import Group
from quire.prompts import Encoded, Prompt
from quire.request import Event, SamplingParams
from quire.text import RequestOutput

log = logging.getLogger("quire")
T = TypeVar("T")


class Step(NamedTuple):
    """What came of a step of the engine, as its observers see it."""

    events: Sequence[Event]  # as the engine reported them
    texts: Sequence[tuple[Event, RequestOutput]]  # of these, those of outputs, with the ends that the texts made
    searches: Sequence[Search]  # those that have ended
    start: float  # s of time.monotonic()
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class AsyncLLM:
    """A model whose engine runs on a thread of its own; what several tasks ask for is computed in the same batches.

    It works with any event loop, with one at a time. The thread starts at first use.

    model, lora and the options are those of `LLM`, and the same errors are raised.
    """

    def __init__(
        self, model: str | None = None, *, lora: Mapping[str, str | Path] | None = None, **options: Any
    ) -> None:
        self._own(LLM(model, lora=lora, **options))

    @classmethod
    def of(cls, llm: LLM) -> AsyncLLM:
        """Let a thread have the engine of an LLM, which then must not be called by others."""
        made = cls.__new__(cls)
        made._own(llm)
        return made

    def _own(self, llm: LLM) -> None:
        self.llm = llm
        self.engine = llm.engine
        self.failure: str | None = None  # why the engine serves no one any more
        self.on_failure: Callable[[], None] = lambda: None  # called on the event loop when the engine has failed
        # Called on the engine's thread after each step.
        self.observers: list[Callable[[Step], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[Job, Callable[[], None]] = {}  # and whom to call when the engine has done with it
        self._calls: set[asyncio.Future[Any]] = set()
        self._names: set[str] = set()  # of the loop's prompts that have not ended
        # From here on the engine thread's.
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy_since: float | None = None
        self._processor = llm.processor
        if llm.group is not None:
            llm.group.on_lost = partial(_end_lost, weakref.ref(self), llm.group)
            self.post(llm.group.check)  # it may have been lost before
        self._generations: dict[str, Generation] = {}  # by the id of each output that has not ended
        self._searches: dict[str, Search] = {}  # by the id of each beam
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------------ for prompts

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt: all that there is of its output, whenever it has grown, the last time when it has ended.

        Each is a copy of its own. What comes while the caller does other things is in the next one, so a caller that
        is slow makes nothing wait and takes no memory. Closing the iterator, or cancelling the task that waits for it,
        takes the prompt back.

        prompt, sampling_params, priority and lora are as `LLM.generate` takes them. request_id: the output's, which no
        other prompt that runs may have; None: a number.

        Raises RequestError for a prompt that is invalid or can never fit, EngineStopped where the engine ends before
        the prompt does. A prompt whose step failed has the finish_reason "error" and says why in its `error`.
        """
        own = (sampling_params, request_id, priority, lora)
        async for output in self._generate(lambda: self.llm.prompts.encoded(prompt), *own):
            yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora: str | None = None,
        **rendering: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, as `generate` continues a prompt.

        rendering: chat_template, add_generation_prompt, continue_final_message, tools and chat_template_kwargs, as
        `LLM.chat` takes them.
        """
        own = (sampling_params, request_id, priority, lora)
        async for output in self._generate(lambda: self.llm.prompts.encoded_chat(messages, **rendering), *own):
            yield output

    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        dimensions: int | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt, as `LLM.embed` has it. Raises what `generate` raises."""
        check_dimensions(dimensions, self.llm.hidden_size)
        name = self._named(request_id)
        make = partial(self.llm.prompts.embedding_request, name, prompt, priority, lora)
        job = Generation([await self._made(name, make)])
        self._start(job, name)
        try:
            await job.ended.wait()
        finally:
            self.abort(job)
        if job.error is not None:
            raise job.error
        return embedding_output(job.outputs[0], dimensions)

    async def close(self) -> None:
        """End the engine after its present step and free its memory, see `LLM.close`. Who waits gets EngineStopped."""
        await self.stop("the AsyncLLM is closed")
        self.engine = self._processor = Closed()  # type: ignore[assignment]  # else its memory would not be free
        self.llm.close()

    async def _generate(
        self,
        encode: Callable[[], Encoded],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        lora: str | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        name = self._named(request_id)

        def make() -> tuple[RequestOutput, list[Any]]:
            return self.llm.prompts.request(name, encode(), sampling_params, priority, lora)

        job = Growing(*await self._made(name, make))
        self._start(job, name)
        try:
            while True:
                output = await job.grown()
                yield output
                if output.finished:
                    return
        finally:
            self.abort(job)

    def _named(self, request_id: str | None) -> str:
        """A prompt's name, which is taken from now on."""
        self.start()
        name = request_id
        if name is None:
            name = next(name for name in iter(self.llm.prompts.next_name, None) if name not in self._names)
        elif not isinstance(name, str) or not name:
            raise RequestError(f"request_id is {name!r}; it must be a text of at least one character")
        elif name in self._names:
            raise RequestError(f"request_id is {name!r}, which another prompt has that has not ended")
        self._names.add(name)
        return name

    async def _made(self, name: str, make: Callable[[], T]) -> T:
        """A prompt's request, made on another thread: long texts and grammars take their time."""
        names = self._names  # which another loop does not have
        try:
            return await asyncio.to_thread(make)
        except BaseException:
            names.discard(name)
            raise

    def _start(self, job: Job, name: str) -> None:
        try:
            self.submit(job, partial(self._names.discard, name))
        except BaseException:
            self._names.discard(name)
            raise

    # ------------------------------------------------------------------------------------------------ for servers

    def start(self) -> None:
        """Begin to serve the event loop in which this is called.

        Raises QuireError while another one waits for something, EngineStopped if nothing is served any more.
        """
        if self.failure is not None:
            raise EngineStopped(self.failure)
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed() and (self._open or self._calls or self._names):
                raise QuireError("another event loop waits for prompts of this AsyncLLM; one at a time can use it")
            self._leave()
        self._loop = loop
        if self._thread.ident is None:
            self._thread.start()

    async def stop(self, why: str, patience: float | None = None) -> None:
        """End. The step that is being computed is waited for, that many seconds; then who still waits gets an error."""
        if self._thread.ident is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join, patience)
        self.end_all(why)

    @property
    def busy_for(self) -> float:
        """Seconds since the engine began what it is doing; 0 while it has nothing to do."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def post(self, function: Callable[[], None]) -> None:
        """Let the engine's thread run a function between two steps, in the order of these calls.

        If it raises, the engine serves no one any more.
        """
        self._inbox.put(function)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps: what it returns or raises."""
        self.start()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                settle = partial(_set_result, future, function())
            except Exception as error:
                settle = partial(_set_exception, future, error)
            self._report(settle)

        self.post(run)
        return await future

    def submit(self, job: Job, released: Callable[[], None] = lambda: None) -> None:
        """Queue a job. Raises RequestError, queueing nothing, if it could never run.

        released: called on the event loop when the engine has done with it.
        """
        self.start()
        job.check(self.engine)
        self._open[job] = released
        self.post(partial(self._begin, job))

    def abort(self, job: Job) -> None:
        """Take a job back, if it has not ended: it ends with the engine's next step."""
        if job in self._open and self.failure is None:
            self.post(partial(job.stop, self.engine))

    def end_all(self, why: str) -> None:
        """Say to all who wait that no further step is computed for them, and take no further jobs."""
        if self.failure is not None:
            return
        self.failure = why
        for job in list(self._open):
            end(job, EngineStopped(why))
            self._release(job)
        for future in list(self._calls):
            _set_exception(future, EngineStopped(why))

    # ------------------------------------------------------------------------------ called by the engine's thread

    def _release(self, job: Job) -> None:
        """The engine has done with a job."""
        released = self._open.pop(job, None)
        if released is not None:
            released()

    def _leave(self) -> None:
        """Take back what an event loop has left that is closed."""
        for job in list(self._open):
            self.abort(job)
            self._release(job)
        self._calls.clear()
        self._names = set()  # some may be of prompts that were still being made

    def _close(self, job: Job, error: QuireError | None = None) -> None:
        end(job, error)
        self._release(job)

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

    def _report(self, function: Callable[[], None]) -> None:
        """Let the event loop run a function."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it is closed, and no one waits there any more
                loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            log.exception("the engine stops: it can serve no one any more")
            self._report(partial(self._die, f"{type(error).__name__}: {error}"))

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
        searches = [
            search
            for event in events
            if (search := self._searches.get(event.request_id)) is not None and self._lead(search, event)
        ]
        texts = list(self._processor.process(events))
        grown = {output.request_id: output for _, output in texts}
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
            self._report(partial(self._deliver, shown))
        step = Step(events, texts, searches, start, now)
        for observe in self.observers:
            try:
                observe(step)
            except Exception:  # who watches must not hurt who is served
                log.exception("a step could not be counted or shown")
        for search in searches:
            self._report(partial(self._close, search))

    def _begin(self, job: Job) -> None:
        names = job.driver.request_ids if isinstance(job, Search) else [request.id for request in job.requests]
        while any(map(self._is_leaving, names)):
            self._step()
        try:
            job.start(self._processor)
        except Exception as error:  # nothing that `check` saw; what was queued of it is taken back
            log.exception("a job could not be queued")
            job.stop(self.engine)
            self._report(partial(self._close, job, QuireError(f"{type(error).__name__}: {error}")))
            return
        if isinstance(job, Generation):
            self._generations.update((output.request_id, job) for output in job.outputs)
        elif isinstance(job, Search):
            self._searches.update((name, job) for name in names)

    def _is_leaving(self, request_id: str) -> bool:
        """Return whether the engine holds a request that has ended for its caller, until its next commit.

        Such a request ended at a stop string, or was aborted, so that its caller may use its name again already.
        """
        request = self.engine.scheduler.requests.get(request_id)
        return request is not None and request.finish_reason is not None

    def _lead(self, search: Search, event: Event) -> bool:
        """Give a search an event of one of its beams. True: it has ended."""
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
        return driver.done


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _end_lost(of: weakref.ref[AsyncLLM], group: Group) -> None:
    """Let the engine end now; else it would with the next request."""
    here = of()
    if here is not None:
        here.post(group.check)
