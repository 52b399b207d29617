"""Beam searches of a request's prompts. Answers look like those of samples, and are sent when all searches end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from quire.engine.beam import BeamSearchParams, Hypothesis
from quire.frontend.outputs import CompletionOutput, RequestOutput, beam_logprobs
from quire.frontend.request_factory import TokenizedPrompt
from quire.frontend.tokenizer import Detokenizer, Tokenizer
from quire.request import OPENAI, SamplingParams, served_in
from quire.server.api.jobs import SearchJob, Stream
from quire.server.api.service import Service
from quire.server.api.streamed import EventWriter
from quire.server.http.api_error import ApiError, api_error, request_failed
from quire.server.http.sse import EventStream
from quire.server.protocol.sampling import Sampling

# Fields that a beam search does not support, with the values that request nothing.
NOT_IN_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {
    name: (None, SamplingParams.__dataclass_fields__[name].default, "", [])
    for name in served_in(OPENAI)
    if name not in ("n", "ignore_eos")
} | {
    "best_of": (None,),
    "echo": (None, False),
    "logit_bias": (None, {}),
    "priority": (None, 0),
    "temperature": (None, 0, 1),
    "top_k": (None, 0, -1),
}


class Beams:
    """The beam searches of several prompts, with one job each."""

    def __init__(self, service: Service, prompts: Sequence[TokenizedPrompt], name: str, width: int) -> None:
        """Create the outputs. name: of the answer. width: beams of each prompt."""
        self.outputs = [  # filled when all searches have ended
            RequestOutput(f"{name}-{i}", one.text, one.tokens, [CompletionOutput(j) for j in range(width)])
            for i, one in enumerate(prompts)
        ]
        self._service = service
        self._width = width
        self._jobs: list[SearchJob] = []

    async def begin(self, request: HttpRequest, body: Sampling, max_tokens: int | None, logprobs: int | None) -> None:
        """Submit the searches. Raises ApiError or RequestError, in which case all of them are aborted."""
        asked = (one for one, neutral in NOT_IN_BEAM_SEARCH.items() if getattr(body, one, None) not in neutral)
        if option := next(asked, body.grammar_field()):
            raise ApiError(f"{option} does not go with use_beam_search; leave one of them out", param=option)
        service = self._service
        service.engine_client.check_room(len(self.outputs) * self._width)
        service.note_outputs(request, self.outputs)
        whose = service.salt(request, body), service.lora_of(body.model)
        for output in self.outputs:
            tokens = output.prompt_token_ids
            room = service.check_length(TokenizedPrompt(output.prompt, tokens))
            params = BeamSearchParams(
                beam_width=self._width,
                max_tokens=min(max_tokens or room, room),
                ignore_eos=body.ignore_eos,
                length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
                logprobs=logprobs,
            )
            make = partial(service.engine_client.search, output.request_id, tokens, params, *whose)
            self._jobs.append(await service.run_tokenization(request, len(tokens), make, self._width))
        try:
            for job in self._jobs:
                await service.engine_client.submit(job)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Abort the searches."""
        for job in self._jobs:
            self._service.engine_client.abort(job)

    async def ended(self, request: HttpRequest) -> list[RequestOutput]:
        """Wait for all searches, and return their outputs. They are aborted if the client disconnects.

        Raises the error with which one of them has failed.
        """
        try:
            for job in self._jobs:
                await self._service.wait(request, job)
            return await self._read(request)
        except BaseException:
            self.abort()
            raise

    def streamed(self, request: HttpRequest, writer: EventWriter) -> EventStream:
        """Return the outputs as events. All are sent at the end, because no token is final before."""
        return EventStream(self._parts(request, writer), self.abort)

    async def _parts(self, request: HttpRequest, writer: EventWriter) -> AsyncIterator[bytes]:
        if start := writer.begin():
            yield start
        try:
            for job in self._jobs:
                await job.ended.wait()
                if job.error is not None:
                    raise api_error(job.error)
            outputs = await self._read(request)
        except ApiError as error:
            self.abort()
            yield writer.fail(error)
            return
        news = Stream([(output, []) for output in outputs]).news
        for output in outputs:
            yield writer.events(news(output))
        yield writer.end()

    async def _read(self, request: HttpRequest) -> list[RequestOutput]:
        """Fill the outputs with the searches' results. Raises ApiError for a search that has failed."""
        for output, job in zip(self.outputs, self._jobs, strict=True):
            if job.failure is not None:
                raise request_failed(job.failure)
            output.fingerprint = job.fingerprint
            fill = partial(_samples, self._service.model.tokenizer, output.prompt_token_ids, job.results())
            output.outputs = await self._service.run_tokenization(
                request, len(output.prompt_token_ids), fill, self._width
            )
        return self.outputs


def _samples(tokenizer: Tokenizer | None, prompt: list[int], found: Sequence[Hypothesis]) -> list[CompletionOutput]:
    """Convert hypotheses to samples, the best first."""
    return [
        CompletionOutput(
            index,
            _text_after(tokenizer, prompt, one.tokens),
            list(one.tokens),
            one.cumulative_logprob,
            beam_logprobs(one, tokenizer),
            one.finish_reason.value,
        )
        for index, one in enumerate(found)
    ]


def _text_after(tokenizer: Tokenizer | None, prompt: list[int], tokens: Sequence[int]) -> str:
    """Return the text that tokens add to a prompt, whose text may end within a character."""
    if tokenizer is None:
        return ""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    return "".join([*(detokenizer.add(token) for token in tokens), detokenizer.finish()])
