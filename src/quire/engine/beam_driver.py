"""Beam search on an engine: each beam is a request whose tokens the search chooses, and its forks share its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire.engine.beam import BeamSearch, BeamSearchParams, Hypothesis
from quire.engine.engine import Engine
from quire.errors import RequestError
from quire.request import Event, FinishReason, Request, SampleGroup, SamplingParams


class BeamDriver:
    """Runs one prompt's search on an engine: pass it the events of its requests until it is `done`.

    The search has at most beam_width requests, siblings that each carry one live beam. A beam with several
    continuations keeps the first and is forked for the others. A beam without one gives its request to one of those.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        prompt: Sequence[int],
        params: BeamSearchParams,
        cache_salt: str = "",
        lora: str | None = None,
    ) -> None:
        """Prepare the search; `start` queues it. Raises RequestError if the prompt leaves no room for a token."""
        self.error: str | None = None
        self._engine = engine
        room = engine.scheduler.max_model_len - len(prompt)
        if room < 1:
            raise RequestError(
                f"beam search {name} has a prompt of {len(prompt)} tokens; with max_model_len="
                f"{engine.scheduler.max_model_len} a prompt may have at most {engine.scheduler.max_model_len - 1}",
                "prompt",
            )
        self._search = BeamSearch(params, min(params.max_tokens, room), engine.eos_token_ids)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=min(params.max_tokens, room),
            ignore_eos=True,
            logprobs=max(min(self._search.num_candidates, engine.vocab_size), params.logprobs or 0),
        )
        group, tokens = SampleGroup(), array("i", prompt)
        group.members = [
            Request(f"{name}-{i}", tokens[:], len(tokens), sampling, i, 0, cache_salt, group, driven=True, lora=lora)
            for i in range(params.beam_width)
        ]
        self.request = group.members[0]  # the one that computes the prompt
        self._beams, self._spare = group.members[:1], group.members[1:]  # one request per live beam, and the unused
        self._found: dict[str, Sequence[tuple[int, float]]] = {}  # the candidates for each beam's next token

    @property
    def done(self) -> bool:
        """True if the search has ended, or failed with an `error`."""
        return self._search.done or self.error is not None

    @property
    def request_ids(self) -> list[str]:
        """The ids of the requests whose events the search takes."""
        return [request.id for request in (*self._beams, *self._spare)]

    def results(self) -> list[Hypothesis]:
        """Return the finished hypotheses, best first."""
        return self._search.results()

    def check(self) -> None:
        """Raise RequestError if the search could never run on this engine."""
        self._engine.check(self._beams[0])

    def start(self) -> None:
        """Queue the prompt. Raises RequestError, and queues nothing, if it could never run."""
        self._engine.add(self._beams[0])

    def take(self, event: Event) -> None:
        """Process an event of one of the search's requests. When the last beam has reported, all beams advance.

        A search that is done, or has failed, frees all blocks in the engine's next step.
        """
        if self.done:
            return
        if event.finish_reason is not None:
            self.error = event.error or f"the search was ended: {event.finish_reason.value}"
        elif event.logprobs is not None and event.request_id in {request.id for request in self._beams}:
            self._found[event.request_id] = event.logprobs.top
            if len(self._found) == len(self._beams):
                self._advance()
        if self.done:
            self.stop()

    def stop(self) -> None:
        """Free all blocks in the engine's next step."""
        for request_id in self.request_ids:
            self._engine.finish(request_id, FinishReason.ABORT)

    def _advance(self) -> None:
        chosen = self._search.advance([self._found[request.id] for request in self._beams])
        self._found.clear()
        parents = {parent for parent, _ in chosen}
        self._spare += [request for i, request in enumerate(self._beams) if i not in parents]
        beams: list[Request] = []
        kept: list[tuple[Request, int]] = []
        for parent, token in chosen:
            heir = self._beams[parent]
            if heir in beams:  # the first continuation keeps it
                heir = self._spare.pop()
                heir.tokens = self._beams[parent].tokens + array("i", [token])
                self._engine.fork(self._beams[parent], heir)
            else:
                kept.append((heir, token))
            beams.append(heir)
        for heir, token in kept:  # only now: until here they were parents of forks
            self._engine.extend(heir, token)
        self._beams = beams
