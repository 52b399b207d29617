"""Work: the prompts of a gateway's jobs, and the assignments of their samples to replicas."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cache.prefix import block_digest, root_digest, root_salt
from quire.errors import BadValue
from quire.fleet.index import Expectation
from quire.fleet.ledger import Ledger, position
from quire.fleet.link import Link
from quire.fleet.placement import Placement
from quire.fleet.resume import NUM_CHECKED
from quire.fleet.wire import Call, Frame, Hello, WireError, wire_digest
from quire.frontend.jobs import GenerationJob
from quire.frontend.outputs import Logprob, RequestOutput
from quire.frontend.requests import seed_of
from quire.request import FinishReason, ImageRows, PrefixReport, Request
from quire.sandbox.grammar import Spec

if TYPE_CHECKING:  # its packages are an extra
    from opentelemetry.context import Context

    from quire.server.observability.traces import CallSpan


class FarGuide:
    """A grammar that a replica applies; the gateway only passes it on. See `quire.request.Guide`."""

    def __init__(self, spec: Spec, field: str) -> None:
        """field: the field of the request's body that has the grammar."""
        self.spec = spec
        self.field = field

    def copy(self) -> FarGuide:
        """Return itself: it has no state."""
        return self

    def for_drafts(self) -> FarGuide:
        """Return itself: it has no state."""
        return self

    @property
    def done(self) -> bool:
        """Unknown at a gateway. Raises BadValue."""
        raise BadValue("a gateway cannot follow a grammar")

    def allowed(self) -> Any:
        """Unknown at a gateway. Raises BadValue."""
        raise BadValue("a gateway cannot follow a grammar")

    def forced(self) -> Any:
        """Unknown at a gateway. Raises BadValue."""
        raise BadValue("a gateway cannot follow a grammar")

    def accept(self, token: int) -> None:
        """Raise BadValue: unknown at a gateway."""
        raise BadValue("a gateway cannot follow a grammar")


@dataclass(eq=False)
class Assignment:
    """Samples of a prompt that were sent to a replica."""

    flow: int
    work: Work
    link: Link
    samples: set[int]  # those that have neither ended nor moved
    expectation: Expectation
    placement: Placement
    span: CallSpan | None  # None without tracing
    replaced: dict[int, Assignment]  # previous assignments of these samples, by sample
    sent: float = field(default_factory=time.monotonic)  # s
    is_placed: bool = False  # the replica has accepted it
    is_seen: bool = False  # the replica's state counts it
    is_moving: bool = False  # it is being moved to another replica
    heard: set[int] = field(default_factory=set)  # samples with a new token from this replica


@dataclass(eq=False)
class Work:
    """One prompt of a job."""

    job: GenerationJob
    output: RequestOutput
    requests: Sequence[Request]
    context: Context | None = None  # parent of the trace spans; None without tracing
    fingerprint: str | None = None  # of the replicas that may continue it; None: it has not begun
    wanted_fingerprint: str | None = None  # of the replicas that may begin it; None: any
    is_admitted: bool = False  # a replica has accepted it
    assigned: dict[int, Assignment] = field(default_factory=dict)  # by sample
    began: float = field(default_factory=time.monotonic)  # s
    num_lost: int = 0  # replicas that were lost with it since its last new token
    last_tokens: dict[int, float] = field(default_factory=dict)  # s of time.monotonic(), of each sample's last token

    def __post_init__(self) -> None:
        self._digests: dict[tuple[str, int, int, int], list[int]] = {}  # cache of the latest result
        first = self.requests[0].sampling
        # The answer must depend neither on the replica nor on the gateway, so the seed follows from the request's name.
        seed = seed_of(self.output.request_id) if first.seed is None else first.seed
        self.sampling = replace(first, seed=seed)
        self.ledgers = [Ledger(one, first.logprobs is not None) for one in self.output.outputs]
        for one in self.output.outputs:
            one.seed = seed
        if first.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]

    @property
    def open_samples(self) -> list[int]:
        """The samples that have not ended."""
        return [one.index for one in self.output.outputs if not one.finished]

    @property
    def needed_fingerprint(self) -> str | None:
        """The fingerprint of the replicas that may compute it; None: any."""
        # Until another replica accepts it, the one that drains continues to report logprobs of the prompt.
        is_reported = bool(self.assigned) and self.output.prompt_logprobs is not None
        return self.wanted_fingerprint if self.is_untouched and not is_reported else self.fingerprint

    @property
    def is_untouched(self) -> bool:
        """True if it has no token yet, so that one call can request all samples."""
        return all(not ledger.tokens and not ledger.output.finished for ledger in self.ledgers)

    def is_one_call(self, samples: Sequence[int]) -> bool:
        """Return whether one call can request these samples: a single one, or all of them before the first token."""
        return len(samples) == 1 or (self.is_untouched and len(samples) == len(self.ledgers))

    def tokens(self, samples: Sequence[int]) -> array[int]:
        """Return the common tokens that must be computed before these samples can continue."""
        prompt = self.requests[0].tokens[: len(self.output.prompt_token_ids)]  # with the ids of image rows
        return prompt + array("i", self.ledgers[samples[0]].tokens) if len(samples) == 1 else prompt

    def digests(self, samples: Sequence[int], hello: Hello, secret: bytes) -> list[int]:
        """Return the digests of the full blocks of `tokens` as in the replica's events."""
        tokens = self.tokens(samples)
        kind = (hello.salt, hello.block_size, len(tokens) if len(samples) == 1 else -1, samples[0])
        if kind not in self._digests:
            first = self.requests[0]
            self._digests = {kind: wire_digests(tokens, first.cache_salt, first.lora, hello, secret, first.images)}
        return self._digests[kind]

    def begin(self, fingerprint: str) -> None:
        """Assign it to replicas with that fingerprint from now on, and drop reports of others about the prompt."""
        if self.fingerprint not in (None, fingerprint):
            self.output.prefix_report = None
            if self.output.prompt_logprobs is not None:
                self.output.prompt_logprobs = [None]
        self.fingerprint = self.output.fingerprint = fingerprint

    def call(self, flow: int, samples: Sequence[int], *, is_strict: bool, trace: str | None = None) -> Call:
        """Return the call that requests these samples from a replica."""
        request = self.requests[0]
        guide = request.guide
        call = Call(
            flow=flow,
            name=self.output.request_id,
            prompt=self.output.prompt_token_ids,
            sampling=self.sampling,
            task=request.task,
            priority=request.priority,
            salt=request.cache_salt,
            lora=request.lora,
            retention=request.retention,
            grammar=(guide.spec.kind, guide.spec.text) if isinstance(guide, FarGuide) else None,
            trace=trace,
            images=None if request.images is None else request.images.values,
        )
        if self.is_untouched and len(samples) == len(self.ledgers):
            return call
        [sample] = samples
        known = len(self.output.prompt_logprobs or [None]) - 1
        asks_prompt = sample == 0 and known < request.num_prompt - 1
        return replace(
            call,
            sampling=self.sampling if asks_prompt else replace(self.sampling, prompt_logprobs=None),
            sample=sample,
            delivered=list(self.ledgers[sample].tokens),
            first_prompt_logprob=known if asks_prompt else 0,
            num_checked=NUM_CHECKED,
            is_strict=is_strict,
        )

    def enter(self, frame: Frame) -> bool:
        """Take in a frame. Return False if it has nothing new. Raises WireError, entering nothing, if it is invalid."""
        of_prompt = self._unknown_of_prompt(frame)
        is_new = self.ledgers[frame.sample].enter(frame)
        more = frame.more
        if more is None:
            return is_new
        if "cached" in more and self.output.prefix_report is None:
            self.output.prefix_report = PrefixReport(len(self.output.prompt_token_ids), more["cached"], 1)
        if self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs += of_prompt
        if "hidden_state" in more:
            self.output.hidden_state = np.array(more["hidden_state"], np.float32)
        return is_new

    def _unknown_of_prompt(self, frame: Frame) -> list[dict[int, Logprob]]:
        """Return the prompt logprobs of a frame that are not known yet. Raises WireError."""
        known = self.output.prompt_logprobs
        if known is None or frame.more is None or "prompt_logprobs" not in frame.more:
            return []
        at, found = frame.more["prompt_logprobs"]
        if at > len(known):
            raise WireError(f"prompt logprobs from position {at} on come after {len(known)}")
        return [position(one, frame) for one in found[len(known) - at :]]

    def end(self, reason: FinishReason) -> None:
        """End all open samples."""
        for one in self.output.outputs:
            if not one.finished:
                one.finish_reason = reason.value


def wire_digests(
    tokens: array[int], salt: str, lora: str | None, hello: Hello, secret: bytes, images: ImageRows | None = None
) -> list[int]:
    """Return the digests of the full blocks of these tokens as in the replica's events.

    salt, lora, images: the request's.
    """
    lora_digest = "" if lora is None else hello.loras.get(lora, "")
    size, parent, found = hello.block_size, root_digest(root_salt(hello.salt, salt, lora_digest)), []
    for start in range(0, len(tokens) - size + 1, size):
        begun = b"" if images is None else images.begun_in(start, start + size)
        parent = block_digest(parent, tokens[start : start + size].tobytes() + begun)
        found.append(wire_digest(parent, secret))
    return found
