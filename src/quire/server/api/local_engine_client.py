"""LocalEngineClient: an engine on its thread with a bounded queue, deadlines, health and request clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path

from quire.engine.beam import BeamSearchParams
from quire.engine.beam_driver import BeamDriver
from quire.engine.cost import CostModel
from quire.fingerprint.fingerprint import Fingerprint
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.clocks import Clocks
from quire.frontend.jobs import BeamSearchJob, Job, end
from quire.frontend.model_fingerprint import with_adapters, with_weights
from quire.request import Request
from quire.server.http.api_error import ApiError, asleep, deadline_passed, engine_stopped, queue_full

STUCK_AFTER = 4.0  # seconds in one step after which the engine counts as stuck, unless the step is long
HOPELESS = 10  # times that limit, after which the process should be restarted
PATIENCE = 16  # times a step's duration in the cost model, whose machine may be that much faster than this one


class LocalEngineClient:
    """Serves jobs with an engine of this process. Call its methods from the event loop."""

    def __init__(
        self,
        llm: AsyncLLM,
        clocks: Clocks,
        cost: CostModel,
        max_queued: int,
        request_timeout: float | None = None,
        stuck_after: float | None = None,
    ) -> None:
        """Create it. max_queued: samples that may wait for a slot. request_timeout: seconds that a job may take.

        cost: estimates a step's duration. stuck_after: seconds that a step may take; None: depends on its cost.
        """
        self.identify: Callable[[], Fingerprint | None] = lambda: None  # slow; finds the fingerprint of the system
        self.llm = llm
        self.engine = llm.engine
        self.clocks = clocks
        self.max_samples = llm.engine.scheduler.max_num_seqs + max_queued
        self._cost = cost
        self._stuck_after = stuck_after
        self._timeout = request_timeout
        self._num_samples = 0  # of the open jobs
        self.num_updates = 0
        llm.engine.listen(clocks.hear)
        llm.observers.append(clocks.observe)

    def start(self) -> None:
        """Start to serve, for the running event loop."""
        self.llm.start()
        self._identified = asyncio.create_task(asyncio.to_thread(self.identify))  # on a thread, being slow
        self._old_identified, self._old_version = self._identified, ""  # of the weights before these

    async def fingerprint(self, weights_version: str | None = None) -> str | None:
        """Return the digest of the computing system. The first answers may wait for it, for a fraction of a second.

        weights_version: that of an answer, which the system had last or before that; None: the last one.
        """
        is_old = weights_version is not None and weights_version == self._old_version
        found = await asyncio.shield(self._old_identified if is_old else self._identified)
        return None if found is None else found.digest

    async def update_weights(self, directory: Path, version: str | None) -> str:
        """Replace the weights, and update the fingerprint of later answers. Raises the errors of `LLM.update_weights`.

        Return the version of the new weights.
        """
        await self.fingerprint()  # that of the old weights
        llm, old = self.llm.llm, self.llm.llm.weights_version
        found = await self.llm.update_weights(directory, version)
        self.num_updates += 1
        self._old_identified, self._old_version = self._identified, old
        change = partial(with_weights, files=llm.files, version=found)
        self._identified = asyncio.create_task(_changed(self._identified, change))
        return found

    def use_adapters(self, digests: Mapping[str, str]) -> None:
        """Set the adapters that the fingerprint covers. digests: the digests of their weights, by name."""
        change = partial(with_adapters, loras=digests)
        self._identified = asyncio.create_task(_changed(self._identified, change))

    async def stop(self) -> None:
        """Stop the engine. Wait up to STUCK_AFTER s for the current step, then fail the pending jobs."""
        await self.llm.stop("the server is stopping", STUCK_AFTER)

    @property
    def num_samples(self) -> int:
        """The number of samples that run or wait."""
        return self._num_samples

    def check_alive(self) -> None:
        """Raise ApiError (503) if the engine has stopped, or has been stuck for so long that a restart is needed."""
        self._check(HOPELESS)

    def check_health(self) -> None:
        """Raise ApiError (503) if the engine has stopped or is stuck in a step."""
        self._check(1)

    def _check(self, times: int) -> None:
        """Raise ApiError (503) if the engine has stopped, or a step takes longer than `times` its limit."""
        if self.llm.failure is not None:
            raise engine_stopped(self.llm.failure)
        seconds = self.llm.busy_for
        if seconds > times * (self._stuck_after or STUCK_AFTER) and seconds > times * (longest := self._longest_step()):
            message = (
                f"the engine has been in one step for {seconds:.1f} s, which should take {longest:.1f} s at most "
                f"(--stuck-after sets a limit for all steps)"
            )
            raise ApiError(message, HTTPStatus.SERVICE_UNAVAILABLE, code="engine_stuck")
        if times == 1 and self.is_sleeping:
            raise asleep()

    def _longest_step(self) -> float:
        """Return the seconds that the engine's current step may take."""
        if self._stuck_after is not None:
            return self._stuck_after
        plan = self.engine.under_way
        if plan is None:
            return STUCK_AFTER
        num_drawn = sum(1 if item.request.sampling.prompt_logprobs is None else item.num_rows for item in plan.items)
        return max(STUCK_AFTER, PATIENCE * self._cost.seconds(plan, num_drawn))

    @property
    def is_sleeping(self) -> bool:
        """True if the engine sleeps."""
        return self.engine.is_asleep

    def num_slots(self) -> tuple[int, int]:
        """Return the number of samples that can run at a time, and of those that run."""
        total = self.engine.scheduler.max_num_seqs
        return total, min(total, self._num_samples)

    def check_room(self, num_samples: int, name: str = "n") -> None:
        """Raise ApiError, naming a field, if `num_samples` more samples cannot be accepted now."""
        if self.llm.failure is not None:
            raise engine_stopped(self.llm.failure)
        if self.is_sleeping:
            raise asleep()
        if num_samples > self.max_samples:
            message = f"the request asks for {num_samples} samples; this server takes {self.max_samples} at a time"
            raise ApiError(message, param=name)
        if self._num_samples + num_samples > self.max_samples:
            raise queue_full(self.max_samples)

    def check(self, request: Request) -> None:
        """Raise RequestError if a request could never run."""
        self.engine.check(request)

    def search(
        self, name: str, prompt: Sequence[int], params: BeamSearchParams, salt: str, lora: str | None
    ) -> BeamSearchJob:
        """Create a beam search, not yet queued. Raises RequestError if it could never run."""
        driver = BeamDriver(self.engine, name, prompt, params, salt, lora)
        driver.check()
        return BeamSearchJob(driver)

    async def submit(self, job: Job) -> None:
        """Queue a job. Raises RequestError or ApiError, queueing nothing, if it cannot be served."""
        self.check_room(job.num_samples)
        job.check(self.engine)
        self._num_samples += job.num_samples
        timer = None
        if self._timeout is not None:
            timer = asyncio.get_running_loop().call_later(self._timeout, self._expire, job, self._timeout)
        clocks = {request.id: self.clocks.clock(request) for request in job.requests}
        self.clocks.began(job.requests)
        self.llm.post(partial(self.clocks.add, clocks))
        self.llm.submit(job, partial(self._release, job, timer))

    def abort(self, job: Job) -> None:
        """Abort a job: it ends with the engine's next step."""
        self.llm.abort(job)

    def _release(self, job: Job, timer: asyncio.TimerHandle | None) -> None:
        """Free the resources of a job that the engine has finished."""
        self._num_samples -= job.num_samples
        if timer is not None:
            timer.cancel()
        if job.error is not None:  # if it could not be queued, no step counts its end
            self.llm.post(partial(self.clocks.drop, job))

    def _expire(self, job: Job, seconds: float) -> None:
        """End a job at its deadline. Its caller gets an error at once, even if the engine is in a step without end."""
        end(job, deadline_passed(seconds))
        self.abort(job)


async def _changed(
    identified: asyncio.Task[Fingerprint | None], change: Callable[[Fingerprint], Fingerprint]
) -> Fingerprint | None:
    found = await identified
    return None if found is None else await asyncio.to_thread(change, found)
