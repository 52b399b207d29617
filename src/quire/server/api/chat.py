"""/v1/chat/completions: the next message of a conversation, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.frontend.jobs import Delta
from quire.frontend.outputs import Logprob, RequestOutput
from quire.frontend.tokenizer import Tokenizer
from quire.server.api.answers import AnswerWriter, Reading
from quire.server.api.beams import Beams
from quire.server.api.chunks import Chunks, usage
from quire.server.api.completions import prompt_logprobs, whole
from quire.server.api.jobs import Stream
from quire.server.api.service import Service, counted, finite, num_logprobs, offload_if_large
from quire.server.api.streamed import EventWriter, StreamedAnswer
from quire.server.api.turn import Turn
from quire.server.http.api_error import ApiError, request_failed
from quire.server.http.sse import data
from quire.server.protocol.answers import ChatLogprob, TopLogprob
from quire.server.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatChunkHead,
    ChatDelta,
    ChatEnd,
    ChatHead,
    ChatLogprobs,
    ChatRequest,
)


async def chat(service: Service, request: HttpRequest, body: ChatRequest) -> Response:
    """Answer a request.

    If one of its samples fails, the whole answer is that error. A stream has an error event in place of that sample,
    and the others continue to their ends.
    """
    turn = await Turn.of(service, request, body, "chatcmpl")
    name, created = turn.identity
    head = ChatHead(id=name, object="chat.completion", created=created, model=turn.model, system_fingerprint=None)
    reading, count = turn.reading, body.top_logprobs or 0

    def answer(output: RequestOutput) -> Response:
        choices: list[ChatChoice] = []
        num_reasoning = 0
        for sample in output.outputs:
            written = AnswerWriter(reading, sample.index)
            message, reason = written.message(sample.text), written.reason(sample.finish_reason)
            num_reasoning += reading.num_reasoning(sample.token_ids, written.reasoning)
            logprobs = chat_logprobs(service.tokenizer, sample.token_ids, sample.logprobs, count)
            choice = ChatChoice(
                index=sample.index,
                message=message,
                logprobs=logprobs,
                finish_reason=reason,
                stop_reason=sample.stop_reason,
            )
            if body.return_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        end: ChatEnd = {"usage": usage(*counted([output]), reading.counted(num_reasoning))}
        if body.prompt_logprobs is not None:
            end["prompt_logprobs"] = prompt_logprobs(output)
        if body.return_token_ids:
            end["prompt_token_ids"] = output.prompt_token_ids
        return whole(head, choices, end)

    if body.use_beam_search:
        if turn.prompt.images is not None:
            raise ApiError("use_beam_search is true, and the prompt has images", param="use_beam_search")
        beams = Beams(service, [turn.prompt], name, body.n or 1)
        await beams.begin(request, body, turn.max_tokens, count if body.logprobs else None)
        if body.stream:
            head["system_fingerprint"] = await service.system_fingerprint(beams.outputs)
            job = Stream([(one, []) for one in beams.outputs])
            return beams.streamed(request, _Events(service, body, head, job, reading))
        [output] = await beams.ended(request)
        head["system_fingerprint"] = await service.system_fingerprint([output])
        return answer(output)
    if body.stream:
        job = await turn.stream()
        head["system_fingerprint"] = turn.system_fingerprint
        events = _Events(service, body, head, job, reading)
        return StreamedAnswer(service.engine_client, job, events, service.config.sse_keep_alive)
    output = await turn.run()
    head["system_fingerprint"] = turn.system_fingerprint
    size = num_logprobs([output]) + sum(len(sample.text) for sample in output.outputs)
    return await offload_if_large(size, partial(answer, output))


class _Events(EventWriter):
    """Writes the events of a streamed answer.

    The first event of each choice has the role, the last one the finish reason.
    """

    def __init__(self, service: Service, body: ChatRequest, head: ChatHead, job: Stream, reading: Reading) -> None:
        self._service = service
        self._body = body
        own: ChatChunkHead = {**head, "object": "chat.completion.chunk"}
        self._chunks = Chunks(own, body.stream_options)
        self._job = job
        [self._output] = job.outputs
        self._generated = 0
        self._reading = reading
        self._writers = [AnswerWriter(reading, i) for i in range(body.n or 1)]

    def begin(self) -> bytes:
        """Return the role of each choice."""
        if self._job.is_continued:
            return b""
        choices = [_part(index, {"role": "assistant", "content": ""}) for index in range(self._body.n or 1)]
        if self._body.return_token_ids:
            for choice in choices:
                choice["prompt_token_ids"] = self._output.prompt_token_ids
        return b"".join(map(self._chunk, choices))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Return the chunks of the deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            self._generated += len(delta.token_ids)
            self._chunks.note(delta.output)
            events = self._events(delta)
            if not delta.is_known:
                parts += self._job.marked(delta, events)
        return b"".join(parts)

    def end(self) -> bytes:
        """Return the token counts, if requested, and the end mark."""
        num_prompt, num_cached = len(self._output.prompt_token_ids), self._output.num_cached_tokens or 0
        pairs = zip(self._writers, self._output.outputs, strict=False)
        num_reasoning = sum(self._reading.num_reasoning(one.token_ids, writer.reasoning) for writer, one in pairs)
        return self._chunks.end(num_prompt, self._generated, num_cached, self._reading.counted(num_reasoning))

    def _events(self, delta: Delta) -> list[bytes]:
        """Return the events of a delta: a chunk with its content, and another with the end of the choice."""
        body, is_last = self._body, delta.finish_reason is not None
        if delta.error is not None:
            return [data(request_failed(delta.error, body.grammar_field()).body())]
        if self._reading.is_plain and delta.logprobs is None and not is_last and not body.return_token_ids:
            counts = len(self._output.prompt_token_ids), self._generated
            return [self._chunks.text(delta.sample, delta.text, _said, *counts)] if delta.text else []
        writer = self._writers[delta.sample]
        found = writer.delta(delta.text, is_last=is_last)
        logprobs = chat_logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, body.top_logprobs or 0)
        events = []
        if found or ((logprobs or body.return_token_ids) and delta.token_ids):
            choice = _part(delta.sample, found or {"content": ""}, logprobs)
            if body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            events.append(self._chunk(choice))
        if is_last:
            choice = _part(delta.sample, {})
            choice["finish_reason"] = writer.reason(delta.finish_reason)
            choice["stop_reason"] = delta.stop_reason
            events.append(self._chunk(choice))
        return events

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return self._chunks.choice(choice, len(self._output.prompt_token_ids), self._generated)


def _part(index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _said(index: int, text: str) -> ChatChunkChoice:
    """Return a part of a choice that has only text."""
    return _part(index, {"content": text})


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None, count: int
) -> ChatLogprobs | None:
    """Return the logprobs of tokens, each with the `count` most probable tokens at its position."""
    if logprobs is None:
        return None

    def entry(token: int, found: Logprob) -> TopLogprob:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": finite(found.logprob), "bytes": list(raw)}

    def best(found: dict[int, Logprob]) -> list[TopLogprob]:
        ranked = sorted(found.items(), key=lambda candidate: candidate[1].rank)
        return [entry(token, candidate) for token, candidate in ranked if candidate.rank <= count]

    content: list[ChatLogprob] = [
        {**entry(token, found[token]), "top_logprobs": best(found)}
        for token, found in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
