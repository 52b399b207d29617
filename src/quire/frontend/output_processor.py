"""OutputProcessor: the only loop from an engine's events to outputs with text, and the search for stop strings."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from quire.engine.engine import Engine
from quire.engine.step_events import Drawn, StepEvents
from quire.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput, candidates
from quire.frontend.receipts import Receipts
from quire.frontend.tokenizer import Detokenizer, Tokenizer
from quire.request import (
    Event,
    FinishReason,
    Request,
    SamplingParams,
    Task,
)

log = logging.getLogger("quire")


@dataclass
class _Sample:
    """A running request and the sample of its output."""

    source: Request
    request: RequestOutput
    output: CompletionOutput
    sampling: SamplingParams
    detokenizer: Detokenizer | None
    ended: deque[RequestOutput]
    is_quiet: bool  # nothing but its tokens is needed before it ends
    logprobs: array[float] | None  # of its tokens, for its receipt; None: it gets none
    text: str = ""  # the full text; callers see the part in which no stop string can have begun
    searched: int = 0  # length of that part
    decoded: int = 0  # tokens whose text is in it, or held back by the detokenizer


class OutputProcessor:
    """Queues requests in an engine and converts their events into outputs with text. Stop strings end requests."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, receipts: Receipts | None = None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._receipts = receipts
        self._samples: dict[str, _Sample] = {}
        self._decoded: dict[int, str] = {}  # the text of each token that was a candidate, at most the vocabulary

    def add(
        self, request: Request, output: RequestOutput, ended: deque[RequestOutput], *, is_streamed: bool = True
    ) -> None:
        """Queue a request and collect its events in the output's sample of the same index.

        When all samples have ended, the output is appended to `ended`. is_streamed: `process` yields each new token,
        with the text so far; otherwise, unless stop strings need it before, the text is decoded once at the end.
        Raises RequestError, queueing nothing, as Engine.add does.
        """
        first = output.outputs[0]  # of a resumed request, the only one
        # Siblings share its seed; their index distinguishes them.
        if request.sample_index > first.index and request.sampling.seed is None:
            request.sampling = replace(request.sampling, seed=first.seed)
        sampling, sample = request.sampling, output.outputs[request.sample_index - first.index]
        detokenizer = (
            Detokenizer(self._tokenizer, output.prompt_token_ids, sampling.skip_special_tokens)
            if self._tokenizer and request.task is Task.GENERATE and sampling.detokenize
            else None
        )
        has_receipt = self._receipts is not None and request.task is Task.GENERATE
        if has_receipt and sampling.logprobs is None:  # computed for the receipt alone: the caller sees none
            request.sampling = replace(sampling, logprobs=0)
        self._engine.add(request)
        sample.seed = request.seed
        sample.weights_versions = [(len(sample.token_ids), self._engine.weights_version)]
        if output.metrics is None:
            output.metrics = RequestMetrics(time.time(), time.monotonic())
        if sampling.logprobs is not None:
            sample.logprobs, sample.cumulative_logprob = [], 0.0
        if sampling.prompt_logprobs is not None and request.sample_index == 0:
            output.prompt_logprobs = [None]
        is_quiet = not is_streamed and not sampling.stop_strings
        logprobs = array("f") if has_receipt else None
        place = _Sample(request, output, sample, sampling, detokenizer, ended, is_quiet, logprobs)
        self._samples[request.id] = place
        if request.num_generated or request.to_check:
            _restore(place)

    def process(self, events: Sequence[Event]) -> Iterator[tuple[Event, RequestOutput]]:
        """Process a step's events. Yield each event with the output that it changed.

        If the text ended a sample, for example at a stop string, the event gets its finish reason, and later events of
        the sample are dropped. Of a request that is not streamed, an event that is only a token may not be yielded.
        """
        for part in events.parts if isinstance(events, StepEvents) else [list(events)]:
            if isinstance(part, Drawn):
                yield from self._process_drawn(part)
            else:
                yield from self._process_events(part)

    def replace_weights(self, version: str) -> None:
        """Record that new weights compute all further tokens. Logprobs of a prompt that is not finished are dropped.

        All events of earlier steps must have been processed.
        """
        for sample in self._samples.values():
            versions, count = sample.output.weights_versions, len(sample.output.token_ids)
            if versions[-1][0] == count:
                versions.pop()
            versions.append((count, version))
            unfinished = sample.source.next_prompt_logprob < sample.source.num_prompt - 1
            if sample.request.prompt_logprobs is not None and unfinished:
                sample.request.prompt_logprobs = [None]

    def _process_drawn(self, drawn: Drawn) -> Iterator[tuple[Event, RequestOutput]]:
        get, odd = self._samples.get, drawn.odd
        for place, (request_id, token) in enumerate(zip(drawn.ids, drawn.tokens, strict=True)):
            if place in odd:
                yield from self._process_events(odd[place])
            elif (sample := get(request_id)) is None:
                continue
            elif sample.is_quiet:
                sample.output.token_ids.append(token)
            else:
                process = self._process_event if sample.sampling.stop_strings else _add_token
                yield self._processed(sample, Event(request_id, token), process), sample.request

    def _process_events(self, events: Sequence[Event]) -> Iterator[tuple[Event, RequestOutput]]:
        for event in events:
            sample = self._samples.get(event.request_id)
            if sample is not None:  # else a stop string has ended it
                if sample.request.prefix_report is None:
                    sample.request.prefix_report = sample.source.cache.prefix_report
                yield self._processed(sample, event, self._process_event), sample.request

    def _processed(self, sample: _Sample, event: Event, process: Callable[[_Sample, Event], None]) -> Event:
        """Process an event. Return it, with a finish reason if its text ended the sample."""
        try:
            process(sample, event)
        except Exception as error:  # of a tokenizer; the other requests continue
            log.exception("request %s cannot be detokenized; it ends with an error", event.request_id)
            sample.output.finish_reason = FinishReason.ERROR.value
            sample.output.error = f"{type(error).__name__}: {error}"
            self._engine.finish(event.request_id, FinishReason.ERROR)
        if not sample.output.finished:
            return event
        del self._samples[event.request_id]
        sample.request.num_running -= 1
        if (metrics := sample.request.metrics) is not None:
            metrics.num_draft_tokens += sample.source.schedule.num_drafted
            metrics.num_accepted_tokens += sample.source.schedule.num_accepted
        self._give_receipt(sample)
        if sample.request.finished:
            if (metrics := sample.request.metrics) is not None:
                metrics.last_token_ts = time.monotonic()
                metrics.num_generation_tokens = sum(len(one.token_ids) for one in sample.request.outputs)
            sample.ended.append(sample.request)
        return event._replace(finish_reason=FinishReason(sample.output.finish_reason), error=sample.output.error)

    def _give_receipt(self, sample: _Sample) -> None:
        """Write the receipt of a sample that has ended."""
        if self._receipts is None or sample.logprobs is None:
            return
        try:
            self._receipts.write(sample.source, sample.output, sample.request.prompt_token_ids, sample.logprobs)
        except Exception:  # the answer does not depend on it
            log.exception("request %s has no receipt", sample.source.id)

    def _process_event(self, sample: _Sample, event: Event) -> None:
        output = sample.output
        if sample.request.prompt_logprobs is not None and output.index == 0:
            sample.request.prompt_logprobs += [candidates(position, self._decode) for position in event.prompt_logprobs]
        if event.hidden_state is not None:
            sample.request.hidden_state = event.hidden_state
        if event.drawn is not None:
            output.num_differences += event.drawn != event.token
        elif event.token is not None:
            if not output.token_ids and (metrics := sample.request.metrics) is not None:
                metrics.first_token_ts = metrics.first_token_ts or time.monotonic()
            output.token_ids.append(event.token)
            if event.logprobs is not None and sample.logprobs is not None:
                sample.logprobs.append(event.logprobs.logprob)
            if event.logprobs is not None and output.logprobs is not None:
                output.logprobs.append(candidates(event.logprobs, self._decode))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + event.logprobs.logprob
        if event.finish_reason is not None:
            output.finish_reason = event.finish_reason.value
            output.stop_reason, output.error = event.stop_token, event.error
        if sample.detokenizer is not None:
            # The text of a token that ends the request is left out, like that of a stop string.
            shown = event.finish_reason is not FinishReason.STOP or sample.sampling.include_stop_str_in_output
            is_hidden = event.token is not None and event.drawn is None and not shown
            if output.finished:
                last = len(output.token_ids) - is_hidden
                sample.text += sample.detokenizer.finish(output.token_ids[sample.decoded : last])
            elif not sample.is_quiet:
                sample.text += "".join(map(sample.detokenizer.add, output.token_ids[sample.decoded :]))
                sample.decoded = len(output.token_ids)
            else:
                return
            self._look_for_stop(sample, event.request_id)
            output.text = sample.text if output.finished else sample.text[: sample.searched]

    def _look_for_stop(self, sample: _Sample, request_id: str) -> None:
        """End the sample at the first stop string in its text."""
        output, stops = sample.output, sample.sampling.stop_strings
        if len(output.token_ids) > sample.sampling.min_tokens:
            found = [(at, stop) for stop in stops if (at := sample.text.find(stop, sample.searched)) >= 0]
            if found:
                at, stop = min(found)
                kept = at + len(stop) if sample.sampling.include_stop_str_in_output else at
                sample.text = sample.text[:kept]
                output.finish_reason, output.stop_reason = FinishReason.STOP.value, stop
                self._engine.finish(request_id, FinishReason.STOP)
        sample.searched = _certain(sample.text, sample.searched, stops)

    def _decode(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._decoded.get(token)
        if text is None:
            text = self._decoded[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def _add_token(sample: _Sample, event: Event) -> None:
    """Process an event that is only a token, of a sample without stop strings."""
    token = cast(int, event.token)
    sample.output.token_ids.append(token)
    sample.decoded += 1
    if sample.detokenizer is not None:
        sample.text += sample.detokenizer.add(token)
        sample.searched, sample.output.text = len(sample.text), sample.text


def _restore(sample: _Sample) -> None:
    """Restore a resumed request's output to its state at the interruption. Only the caller has its logprobs."""
    request = sample.source
    delivered = [*request.tokens[request.num_prompt :], *request.to_check]
    sample.output.token_ids += delivered
    if sample.detokenizer is not None:
        sample.text = "".join(map(sample.detokenizer.add, delivered))
        sample.decoded = len(sample.output.token_ids)
        sample.searched = _certain(sample.text, 0, sample.sampling.stop_strings)
        sample.output.text = sample.text[: sample.searched]


def _certain(text: str, searched: int, stops: Sequence[str]) -> int:
    """Return the length of the part of a text in which no stop string can have begun.

    `searched` is that length of a shorter text. Each position is examined once as the text grows, so long stop strings
    cost no more than short ones.
    """
    longest = max((len(stop) for stop in stops), default=1) - 1
    for at in range(max(searched, len(text) - longest), len(text)):
        end = text[at:]
        if any(stop.startswith(end) and stop != end for stop in stops):
            return at
    return len(text)
