"""AsyncLLM: an LLM on a dedicated thread, for event loops.

Only that thread uses the engine. The event loop sends it functions, which it runs between two steps, and gets back the
reports of each step. An error of one request affects no other request: the thread ends only when it is stopped or when
the engine has failed, and then all pending calls raise EngineStopped with the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from quire.config import EngineArgs, describes_options, takes_options
from quire.errors import EngineStopped, QuireError, RequestError
from quire.frontend.embedding import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RankedDocument,
    ScoringRequestOutput,
)
from quire.frontend.jobs import BeamSearchJob, Delta, EngineStep, GenerationJob, Job, SnapshotJob, end
from quire.frontend.llm import LLM, Closed
from quire.frontend.outputs import RequestOutput
from quire.frontend.pooled import Call, Pooled
from quire.frontend.replacing import Loaded, load_dropped, load_new, sleep, use_new, wake_up
from quire.frontend.request_factory import Prompt, TokenizedPrompt, named_loras
from quire.frontend.requests import Made
from quire.lora.request import LoRARequest
from quire.models.lora.fitting import prepare
from quire.models.lora.slots import Prepared
from quire.models.replaced import NewWeights
from quire.parallel.group import ProcessGroup
from quire.request import Event, RequestOutputKind, SamplingParams

log = logging.getLogger("quire")
T = TypeVar("T")


@describes_options
class AsyncLLM:
    """A model for event loops, whose engine runs on a dedicated thread.

    Prompts of several tasks are computed in the same batches. One event loop at a time can use it. The thread starts at
    first use. `async with` closes it at the end.

    Args:
        model: see `LLM`.
        lora: see `LLM`.
        **options: see `LLM`.

    Raises:
        ConfigError: see `LLM`.
        ModelError: see `LLM`.
        Unsupported: see `LLM`.

    Example:
        ```python
        import asyncio

        from quire import AsyncLLM, SamplingParams


        async def main() -> None:
            async with AsyncLLM(num_blocks=128) as llm:
                async for output in llm.generate("def fibonacci(", SamplingParams(max_tokens=8)):
                    print(output.outputs[0].text)


        asyncio.run(main())
        ```
    """

    @takes_options
    def __init__(
        self, model: str | None = None, *, lora: Mapping[str, str | Path] | None = None, **options: Any
    ) -> None:
        self._own(LLM(model, lora=lora, **options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Create an AsyncLLM from collected arguments.

        Args:
            engine_args: AsyncEngineArgs or EngineArgs.

        Returns:
            The same as AsyncLLM(**dataclasses.asdict(engine_args)).

        Raises:
            ConfigError: see `LLM`.
            ModelError: see `LLM`.
            Unsupported: see `LLM`.
        """
        return cls(**vars(engine_args))

    @classmethod
    def of(cls, llm: LLM) -> AsyncLLM:
        """Wrap an LLM. Afterwards only the engine's thread may call it.

        Args:
            llm: the LLM.

        Returns:
            An AsyncLLM of the same engine.
        """
        made = cls.__new__(cls)
        made._own(llm)
        return made

    def _own(self, llm: LLM) -> None:
        self.llm = llm
        self.engine = llm.engine
        self.failure: str | None = None  # why the engine has stopped
        self.on_failure: Callable[[], None] = lambda: None  # called on the event loop when the engine has failed
        # Called on the engine's thread after each step.
        self.observers: list[Callable[[EngineStep], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[Job, Callable[[], None]] = {}  # and the callback for when the engine is done with it
        self._calls: set[asyncio.Future[Any]] = set()
        self._names: set[str] = set()  # of the loop's prompts that have not ended
        # The engine's thread owns the attributes below.
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy_since: float | None = None
        self._processor = llm.processor
        if llm.group is not None:
            llm.group.on_lost = partial(_end_lost, weakref.ref(self), llm.group)
            self.post(llm.group.check)  # it may have been lost already
        self._generations: dict[str, GenerationJob] = {}  # by the id of each output that has not ended
        self._searches: dict[str, BeamSearchJob] = {}  # by the id of each beam
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
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt. Yield its output whenever it has grown, the last time when it has ended.

        Each output is a separate copy, and complete unless output_kind asks for the new part. Tokens that arrive while
        the caller is busy are in the next output, so a slow caller neither blocks the engine nor uses more memory.
        Closing the iterator, or cancelling the task that waits for it, aborts the prompt.

        Args:
            prompt: a text, a list of token ids, or a dictionary, see `LLM.generate`.
            sampling_params: parameters of sampling; None is `LLM.get_default_sampling_params()`.
            request_id: id of the output, which must be unique among running prompts. None: a number.
            priority: lower is first, with scheduling_policy="priority".
            lora: name of an adapter; None is the model without an adapter.
            lora_request: the same in vLLM's form. An adapter that is not loaded yet is loaded.

        Yields:
            The output so far. If a step failed, its finish_reason is "error" and its `error` has the reason.

        Raises:
            RequestError: the prompt is invalid or can never fit.
            EngineStopped: the engine stopped before the prompt ended.
        """
        own = (sampling_params, request_id, priority, await self._named_lora(lora, lora_request))
        async for output in self._generate(lambda: self.llm.factory.tokenize(prompt), *own):
            yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora: str | None = None,
        lora_request: LoRARequest | None = None,
        **rendering: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation. Yield the output whenever it has grown, as `generate` does.

        Args:
            messages: messages with a role and a content, see `LLM.chat`.
            sampling_params: see `generate`.
            request_id: see `generate`.
            priority: see `generate`.
            lora: see `generate`.
            lora_request: see `generate`.
            **rendering: chat_template, add_generation_prompt, continue_final_message, tools and chat_template_kwargs of
                `LLM.chat`.

        Yields:
            The output so far, see `generate`.

        Raises:
            RequestError: see `LLM.chat`.
            ModelError: the model's template is invalid.
            EngineStopped: the engine stopped before the answer ended.

        Example:
            ```python
            import asyncio

            from quire import AsyncLLM


            async def main() -> None:
                async with AsyncLLM(num_blocks=128) as llm:
                    async for output in llm.chat([{"role": "user", "content": "hello"}]):
                        print(output.outputs[0].text)


            asyncio.run(main())
            ```
        """
        own = (sampling_params, request_id, priority, await self._named_lora(lora, lora_request))
        async for output in self._generate(lambda: self.llm.factory.tokenize_chat(messages, **rendering), *own):
            yield output

    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the embedding of a prompt.

        Args:
            prompt: a text, a list of token ids, or a dictionary, see `LLM.generate`.
            request_id: see `generate`.
            dimensions: number of leading values to keep, see `LLM.embed`; None keeps all.
            prompt_name: see `LLM.embed`.
            truncate_prompt_tokens: see `LLM.embed`.
            priority: see `generate`.
            lora: see `generate`.

        Returns:
            The embedding, see `LLM.embed`.

        Raises:
            RequestError: the prompt or another argument is invalid, or the prompt can never fit.
            EngineStopped: the engine stopped before the prompt ended.

        Example:
            ```python
            import asyncio

            from quire import AsyncLLM


            async def main() -> None:
                async with AsyncLLM(num_blocks=128) as llm:
                    first, second = await asyncio.gather(llm.embed("import os"), llm.embed("import sys"))
                    print(len(first.outputs.embedding), len(second.outputs.embedding))


            asyncio.run(main())
            ```
        """
        [found] = await self._answer(
            lambda pooled: pooled.embed([prompt], dimensions, prompt_name),
            request_id,
            truncate_prompt_tokens,
            priority,
            lora,
        )
        return found

    async def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        request_id: str | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs of prompts.

        Args:
            data_1: see `LLM.score`.
            data_2: see `LLM.score`.
            request_id: see `generate`.
            truncate_prompt_tokens: see `LLM.score`.
            priority: see `generate`.
            lora: see `generate`.

        Returns:
            One output for each pair, see `LLM.score`.

        Raises:
            RequestError: see `LLM.score`.
            EngineStopped: the engine stopped before the prompts ended.
        """
        own = (request_id, truncate_prompt_tokens, priority, lora)
        return await self._answer(lambda pooled: pooled.score(data_1, data_2), *own)

    async def rerank(
        self,
        query: Prompt,
        documents: Sequence[Prompt],
        request_id: str | None = None,
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> list[RankedDocument]:
        """Return the documents that fit a query best.

        Args:
            query: see `LLM.rerank`.
            documents: see `LLM.rerank`.
            request_id: see `generate`.
            top_n: see `LLM.rerank`.
            truncate_prompt_tokens: see `LLM.score`.
            priority: see `generate`.
            lora: see `generate`.

        Returns:
            The best documents, best first.

        Raises:
            RequestError: see `LLM.score`.
            EngineStopped: the engine stopped before the prompts ended.
        """
        own = (request_id, truncate_prompt_tokens, priority, lora)
        return await self._answer(lambda pooled: pooled.rerank(query, documents, top_n), *own)

    async def classify(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> ClassificationRequestOutput:
        """Return a classifier's scores for a prompt.

        Args:
            prompt: see `embed`.
            request_id: see `generate`.
            truncate_prompt_tokens: see `LLM.embed`.
            priority: see `generate`.
            lora: see `generate`.

        Returns:
            The scores, see `LLM.classify`.

        Raises:
            RequestError: see `LLM.classify`.
            EngineStopped: the engine stopped before the prompt ended.
        """
        own = (request_id, truncate_prompt_tokens, priority, lora)
        [found] = await self._answer(lambda pooled: pooled.classify([prompt]), *own)
        return found

    async def _answer(
        self,
        make: Callable[[Pooled], Call[T]],
        request_id: str | None,
        truncate: int | None,
        priority: int,
        lora: str | None,
    ) -> T:
        """Make the requests of a call, run them, and return its answer."""
        name = self._named(request_id)
        numbers = itertools.count()
        pooled = Pooled(self.llm.factory, lambda: f"{name}-{next(numbers)}", truncate, priority, lora)
        call = await self._made(name, partial(make, pooled))
        job = GenerationJob(call.made)
        self._start(job, name)
        try:
            await job.ended.wait()
        finally:
            self.abort(job)
        if job.error is not None:
            raise job.error
        return call.finish(job.outputs)

    async def update_weights(self, weights: NewWeights, version: str | None = None) -> str:
        """Replace weights by others of the same model, between two steps, see `LLM.update_weights`.

        Prompts are computed while the new weights are loaded. Those that have not ended then continue with the new
        weights; beam searches end with an error.

        Args:
            weights: see `LLM.update_weights`.
            version: see `LLM.update_weights`.

        Returns:
            The version.

        Raises:
            ModelError: see `LLM.update_weights`.
            ConfigError: see `LLM.update_weights`; or another call has replaced the weights meanwhile.
        """
        return await self.call(partial(self._use_new, await asyncio.to_thread(load_new, self.llm, weights, version)))

    async def sleep(self, level: int = 1) -> None:
        """Free memory between two steps, see `LLM.sleep`. Prompts that have not ended continue after `wake_up`.

        Args:
            level: see `LLM.sleep`.

        Raises:
            ConfigError: see `LLM.sleep`.
        """

        def fall_asleep() -> None:
            self._settle()
            sleep(self.llm, level)

        await self.call(fall_asleep)

    async def wake_up(self) -> None:
        """Allocate the memory that `sleep` freed, see `LLM.wake_up`.

        Raises:
            ModelError: see `LLM.wake_up`.
        """
        await self.call(partial(wake_up, self.llm, await asyncio.to_thread(load_dropped, self.llm)))

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps.

        Returns:
            True if no prompt can be computed.
        """
        return self.engine.is_asleep

    async def close(self) -> None:
        """Stop the engine after its current step and free its memory. Pending calls raise EngineStopped."""
        await self.stop("the AsyncLLM is closed")
        self.shutdown()

    def shutdown(self) -> None:
        """Do the same as `close`, also without an event loop. It waits for the current step."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()
        self.end_all("the AsyncLLM is closed")
        self.engine = self._processor = Closed()  # type: ignore[assignment]  # a reference would keep its memory
        self.llm.close()

    async def _named_lora(self, lora: str | None, lora_request: LoRARequest | None) -> str | None:
        """Return the name of a call's adapter, after loading it if it is not loaded yet."""
        if lora_request is None:
            return lora
        known = self.engine.known_loras()
        _, missing = named_loras(lora, lora_request, known.by_name)

        def load(name: str, prepared: Prepared) -> None:
            if name not in known.by_name:  # another task may have loaded it meanwhile
                self.engine.load_lora(name, prepared)

        for one in missing:
            prepared = await asyncio.to_thread(prepare, known, Path(one.lora_path))
            await self.call(partial(load, one.lora_name, prepared))
        return lora_request.lora_name

    async def _generate(
        self,
        tokenize: Callable[[], TokenizedPrompt],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        lora: str | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        name = self._named(request_id)

        def make() -> Made:
            return self.llm.factory.one_generation(name, tokenize(), sampling_params, priority, lora)

        output, requests = await self._made(name, make)
        job = SnapshotJob(output, requests)
        is_final_only = requests[0].sampling.output_kind is RequestOutputKind.FINAL_ONLY
        self._start(job, name)
        try:
            while True:
                output = await job.grown()
                if output.finished or not is_final_only:
                    yield output
                if output.finished:
                    return
        finally:
            self.abort(job)

    def _named(self, request_id: str | None) -> str:
        """Return a prompt's name and reserve it."""
        self.start()
        name = request_id
        if name is None:
            name = next(name for name in iter(self.llm.factory.next_name, None) if name not in self._names)
        elif not isinstance(name, str) or not name:
            raise RequestError(f"request_id is {name!r}; it must be a text of at least one character")
        elif name in self._names:
            raise RequestError(f"request_id is {name!r}, which a running prompt has; choose another one")
        self._names.add(name)
        return name

    async def _made(self, name: str, make: Callable[[], T]) -> T:
        """Make a prompt's request on another thread, since long texts and grammars take long."""
        names = self._names  # each event loop has its own
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
        """Begin to serve the current event loop.

        Raises:
            QuireError: another event loop still waits for prompts.
            EngineStopped: the engine has stopped.
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
        """Stop the engine's thread and fail pending calls with EngineStopped.

        Args:
            why: the reason, for the message of EngineStopped.
            patience: seconds to wait for the current step; None waits until it has ended.
        """
        if self._thread.ident is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join, patience)
        self.end_all(why)

    @property
    def busy_for(self) -> float:
        """Seconds since the engine began its current work; 0 while it is idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def post(self, function: Callable[[], None]) -> None:
        """Make the engine's thread run a function between two steps, in the order of the calls of `post`.

        If the function raises, the engine stops.

        Args:
            function: the function, which takes no argument.
        """
        self._inbox.put(function)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps. Return its result or raise its exception.

        Args:
            function: the function, which takes no argument.

        Returns:
            The result of the function.

        Raises:
            EngineStopped: the engine stopped before the function ran.
        """
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
        """Queue a job.

        Args:
            job: the job.
            released: called on the event loop when the engine is done with the job.

        Raises:
            RequestError: the job could never run. Nothing was queued.
            EngineStopped: the engine has stopped.
        """
        self.start()
        job.check(self.engine)
        self._open[job] = released
        self.post(partial(self._begin, job))

    def abort(self, job: Job) -> None:
        """Abort a job that has not ended: it ends with the engine's next step.

        Args:
            job: the job.
        """
        if job in self._open and self.failure is None:
            self.post(partial(job.stop, self.engine))

    def end_all(self, why: str) -> None:
        """Fail all pending calls with EngineStopped and accept no further jobs.

        Args:
            why: the reason, for the message of EngineStopped.
        """
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
        """Call the callback of a job that the engine is done with."""
        released = self._open.pop(job, None)
        if released is not None:
            released()

    def _leave(self) -> None:
        """Abort the jobs of an event loop that was closed."""
        for job in list(self._open):
            self.abort(job)
            self._release(job)
        self._calls.clear()
        self._names = set()  # prompts that are still being made use the old set

    def _close(self, job: Job, error: QuireError | None = None) -> None:
        end(job, error)
        self._release(job)

    def _deliver(self, reports: Sequence[tuple[GenerationJob, list[Delta], bool]]) -> None:
        """Pass a step's deltas to each job, and end the jobs whose last step it was."""
        for job, deltas, is_last in reports:
            if not job.ended.is_set():  # it may have timed out
                job.take(deltas)
            if is_last:
                self._close(job)

    def _die(self, why: str) -> None:
        self.end_all(why)
        self.on_failure()

    # ---------------------------------------------------------------------------------------- the engine's thread

    def _report(self, function: Callable[[], None]) -> None:
        """Make the event loop run a function."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed, so no call is pending
                loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            log.exception("the engine has failed and stops; pending requests end with an error")
            self._report(partial(self._die, f"{type(error).__name__}: {error}"))

    def _turn(self) -> bool:
        """Run the functions of the event loop, then a step. Return False if the engine must stop."""
        if not self.engine.can_step:
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
        if self.engine.can_step:
            self._busy_since = time.monotonic()
            self._step()
        return True

    def _step(self) -> None:
        start = time.monotonic()
        self._process(self.engine.step(), start)

    def _settle(self) -> None:
        """Commit a step that was launched ahead, and update the outputs."""
        start = time.monotonic()
        if events := self.engine.settle():
            self._process(events, start)

    def _process(self, events: Sequence[Event], start: float) -> None:
        """Report the events of a step that began at `start`."""
        now = time.monotonic()
        searches = []
        if self._searches:
            for event in events:
                search = self._searches.get(event.request_id)
                if search is not None and self._lead(search, event):
                    searches.append(search)
        texts = list(self._processor.process(events))
        grown = {output.request_id: output for _, output in texts}
        shown = []
        for name, output in grown.items():
            job = self._generations.get(name)
            if job is None:  # not all of it could be queued
                continue
            if output.finished:
                job.num_open -= 1
                del self._generations[name]
            deltas = job.news(output)
            if deltas or job.num_open == 0:
                shown.append((job, deltas, job.num_open == 0))
        if shown:
            self._report(partial(self._deliver, shown))
        step = EngineStep(events, texts, searches, start, now)
        for observe in self.observers:
            try:
                observe(step)
            except Exception:  # an observer's failure must not affect requests
                log.exception("an observer of engine steps failed")
        for search in searches:
            self._report(partial(self._close, search))

    def _begin(self, job: Job) -> None:
        names = job.driver.request_ids if isinstance(job, BeamSearchJob) else [request.id for request in job.requests]
        while any(map(self._is_leaving, names)) and self.engine.can_step:
            self._step()
        try:
            job.start(self._processor)
        except Exception as error:  # `check` did not detect it; abort the queued part of the job
            log.exception("a job could not be queued")
            job.stop(self.engine)
            self._report(partial(self._close, job, QuireError(f"{type(error).__name__}: {error}")))
            return
        if isinstance(job, GenerationJob):
            self._generations.update((output.request_id, job) for output in job.outputs)
        elif isinstance(job, BeamSearchJob):
            self._searches.update((name, job) for name in names)

    def _use_new(self, loaded: Loaded) -> str:
        """Use loaded weights from the next step on. The candidates of a search's beams are of the old ones."""
        self._settle()
        version = use_new(self.llm, loaded)
        for search in dict.fromkeys(self._searches.values()):
            search.driver.error = "the weights were replaced during the search; start it again"
            search.driver.stop()
        return version

    def _is_leaving(self, request_id: str) -> bool:
        """Return whether the engine holds a request that has ended for its caller, until its next commit.

        Such a request ended at a stop string or was aborted, so its caller may already use its name again.
        """
        request = self.engine.scheduler.requests.get(request_id)
        return request is not None and request.finish_reason is not None

    def _lead(self, search: BeamSearchJob, event: Event) -> bool:
        """Pass a search an event of one of its beams. Return True if the search has ended."""
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


def _end_lost(of: weakref.ref[AsyncLLM], group: ProcessGroup) -> None:
    """Stop the engine now rather than at the next request."""
    here = of()
    if here is not None:
        here.post(group.check)
