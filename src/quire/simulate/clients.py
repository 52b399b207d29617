"""Clients: they ask, wait, and ask again. Figures are taken as they see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.request import SamplingParams
from quire.simulate.flow import Flow, request_of
from quire.simulate.loads import Job
from quire.simulate.outcome import Outcome
from quire.simulate.spec import ClientSpec, FleetSpec
from quire.simulate.timeline import Timeline


def wait_before_retry(spec: ClientSpec, attempt: int) -> float | None:
    """Return the seconds that a client waits after its attempt of that number has failed; None: it gives up."""
    return spec.backoff * 2**attempt if attempt < spec.retries else None


class Clients:
    """The clients of a cell."""

    def __init__(
        self, spec: FleetSpec, jobs: Iterator[Job], timeline: Timeline, outcome: Outcome,
        arrive: Callable[[Flow], None], leave: Callable[[Flow], None], take_back: Callable[[Flow], None],
    ) -> None:  # fmt: skip
        """arrive: called with a request at its gateway. leave: with one that ended. take_back: with one to abort."""
        self._spec = spec
        self._jobs = jobs
        self._timeline = timeline
        self._outcome = outcome
        self._arrive = arrive
        self._leave = leave
        self._take_back = take_back
        self._num_flows = 0
        self._open = 0  # flows that have not ended, and those that follow them
        self._has_more = True  # whether there are more jobs
        self._params: dict[int, SamplingParams] = {}
        self._advance: Callable[[], None]  # called at the end of each request; set by `begin`

    def begin(self, advance: Callable[[], None]) -> None:
        """Ask for the first time."""
        self._advance = advance
        self._next_job()

    @property
    def are_open(self) -> bool:
        """True if a request is open or comes later."""
        return self._has_more or self._open > 0

    # ---------------------------------------------------------------------------------------------------- requests

    def _next_job(self) -> None:
        job = next(self._jobs, None)
        self._has_more = job is not None
        if job is not None:
            self._timeline.push(job.arrival, self._come, job)

    def _come(self, job: Job) -> None:
        self._next_job()
        self._open += 1
        self._ask(job, self._timeline.now, 0)

    def _ask(self, job: Job, began: float, attempt: int) -> None:
        """Send a request to one of the gateways in turn. It is counted as open already."""
        spec, timeline = self._spec, self._timeline
        self._num_flows += 1
        if attempt == 0:
            self._outcome.counts["requests"] += 1
        params = self._params.get(job.new_tokens)
        if params is None:
            params = self._params[job.new_tokens] = SamplingParams(max_tokens=job.new_tokens, ignore_eos=True)
        request = request_of(str(self._num_flows), job, params)
        flow = Flow(self._num_flows, job, began, attempt, self._num_flows % max(1, spec.gateways.count), request, [])
        if spec.clients.timeout:
            timeline.later(spec.clients.timeout, self._time_out, flow)
        at_gateway = spec.gateways.seconds if spec.gateways.count else 0.0
        timeline.push(timeline.now + timeline.delay(spec.network.to_gateway) + at_gateway, self._arrive, flow)

    def _time_out(self, flow: Flow) -> None:
        if not flow.is_done:
            self._take_back(flow)
            self.fail(flow, "timeout")

    # ------------------------------------------------------------------------------------------------------ answers

    def first(self, flow: Flow, cached: int) -> None:
        """Record the first token. cached: tokens of the prompt that its replica found in the cache."""
        timeline, outcome = self._timeline, self._outcome
        seconds = timeline.now + timeline.delay(self._spec.network.to_gateway) - flow.began
        timeline.note("first", flow.number, seconds)
        counts = {"prompt_tokens": flow.job.prompt_tokens, "cached_tokens": cached}
        outcome.ttft.add(seconds)
        outcome.counts.update(counts)
        moment = outcome.moment(timeline.now)
        moment.ttft.add(seconds)
        moment.numbers.update(counts)

    def finished(self, flow: Flow, new_tokens: int) -> None:
        """Record the last token. A conversation continues."""
        outcome = self._outcome
        self._end(flow)
        at = self._timeline.now + self._timeline.delay(self._spec.network.to_gateway)
        self._timeline.note("finished", flow.number, at)
        outcome.e2e.add(at - flow.began)
        outcome.counts.update({"finished": 1, "new_tokens": new_tokens})
        outcome.seconds = max(outcome.seconds, at)
        self._advance()
        if flow.job.then is not None:
            self._open += 1
            self._timeline.push(at + flow.job.think, self._ask_next, flow.job.then)

    def _ask_next(self, job: Job) -> None:
        self._ask(job, self._timeline.now, 0)

    def refused(self, flow: Flow, why: str | None) -> None:
        """Record a request that no replica can ever compute. Its client does not ask again."""
        self._end(flow)
        self._outcome.counts["refused"] += 1
        self._outcome.first_refusal = self._outcome.first_refusal or why
        self._advance()

    def fail(self, flow: Flow, why: str) -> None:
        """Record an error. The client may ask again."""
        if flow.is_done:
            return
        self._end(flow)
        self._outcome.errors[why] += 1
        self._timeline.note("fail", flow.number, why)
        wait = wait_before_retry(self._spec.clients, flow.attempt)
        if wait is None:
            self._outcome.counts["failed"] += 1
            self._advance()
        else:
            self._outcome.counts["retries"] += 1
            self._open += 1
            self._timeline.later(wait, self._ask, flow.job, flow.began, flow.attempt + 1)

    def _end(self, flow: Flow) -> None:
        flow.is_done = True
        self._open -= 1
        self._leave(flow)
