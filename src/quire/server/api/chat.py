"""/v1/chat/completions: the next message of a conversation, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

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
from quire.server.api.streamed import StreamedAnswer
from quire.server.api.turn import Turn
from quire.server.http.api_error import ApiError, request_failed
from quire.server.http.sse import DONE, data
from quire.server.protocol.chat import ChatRequest


async def chat(service: Service, request: HttpRequest, body: ChatRequest) -> Response:
    """Answer a request.

    If one of its samples fails, the whole answer is that error. A stream has an error event in place of that sample,
    and the others continue to their ends.
    """
    turn = await Turn.of(service, request, body, "chatcmpl")
    name, created = turn.identity
    head = {"id": name, "object": "chat.completion", "created": created, "model": turn.model}
    reading, count = turn.reading, body.top_logprobs or 0

    def answer(output: RequestOutput) -> Response:
        choices, num_reasoning = [], 0
        for sample in output.outputs:
            written = AnswerWriter(reading, sample.index)
            message, reason = written.message(sample.text), written.reason(sample.finish_reason)
            num_reasoning += reading.num_reasoning(sample.token_ids, written.reasoning)
            logprobs = chat_logprobs(service.tokenizer, sample.token_ids, sample.logprobs, count)
            tokens = {"token_ids": sample.token_ids} if body.return_token_ids else {}
            choices.append(_choice(sample.index, message, logprobs, reason, sample.stop_reason) | tokens)
        asked: dict[str, Any] = {}
        if body.prompt_logprobs is not None:
            asked["prompt_logprobs"] = prompt_logprobs(output)
        if body.return_token_ids:
            asked["prompt_token_ids"] = output.prompt_token_ids
        return whole(head, choices, {"usage": usage(*counted([output]), reading.counted(num_reasoning))} | asked)

    if body.use_beam_search:
        beams = Beams(service, [turn.prompt], name, body.n or 1)
        await beams.begin(request, body, turn.max_tokens, count if body.logprobs else None)
        if body.stream:
            head["object"] = "chat.completion.chunk"
            head["system_fingerprint"] = await service.system_fingerprint(beams.outputs)
            job = Stream([(one, []) for one in beams.outputs])
            return beams.streamed(request, _Events(service, body, head, job, reading))
        [output] = await beams.ended(request)
        head["system_fingerprint"] = await service.system_fingerprint([output])
        return answer(output)
    if body.stream:
        job = await turn.stream()
        head |= {"object": "chat.completion.chunk", "system_fingerprint": turn.system_fingerprint}
        events = _Events(service, body, head, job, reading)
        return StreamedAnswer(service.worker, job, events, service.config.sse_keep_alive)
    output = await turn.run()
    head["system_fingerprint"] = turn.system_fingerprint
    size = num_logprobs([output]) + sum(len(sample.text) for sample in output.outputs)
    return await offload_if_large(size, partial(answer, output))


def _choice(
    index: int,
    message: dict[str, Any],
    logprobs: dict[str, Any] | None,
    reason: str | None,
    stop_reason: int | str | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": stop_reason,
    }


class _Events:
    """Writes the events of a streamed answer: an `EventWriter`.

    The first event of each choice has the role, the last one the finish reason.
    """

    def __init__(
        self, service: Service, body: ChatRequest, head: dict[str, Any], job: Stream, reading: Reading
    ) -> None:
        self._service = service
        self._body = body
        self._chunks = Chunks(head, body.stream_options)
        self._job = job
        [self._output] = job.outputs
        self._generated = 0
        self._reading = reading
        self._writers = [AnswerWriter(reading, i) for i in range(body.n or 1)]

    def begin(self) -> bytes:
        """Return the role of each choice."""
        if self._job.is_continued:
            return b""
        speaks = {"role": "assistant", "content": ""}
        prompt = {"prompt_token_ids": self._output.prompt_token_ids} if self._body.return_token_ids else {}
        return b"".join(self._piece(index, speaks, **prompt) for index in range(self._body.n or 1))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Return the chunks of the deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            self._generated += len(delta.token_ids)
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

    def fail(self, error: ApiError) -> bytes:
        """Return an event with an error, and the end mark."""
        return data(error.body()) + DONE

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
        tokens = {"token_ids": delta.token_ids} if body.return_token_ids else {}
        events = []
        if found or ((logprobs or tokens) and delta.token_ids):
            events.append(self._piece(delta.sample, found or {"content": ""}, logprobs, **tokens))
        if is_last:
            end = {"finish_reason": writer.reason(delta.finish_reason), "stop_reason": delta.stop_reason}
            events.append(self._piece(delta.sample, {}, **end))
        return events

    def _piece(self, index: int, delta: dict[str, Any], logprobs: Any = None, **end: Any) -> bytes:
        choice = _said(index, "") | {"delta": delta, "logprobs": logprobs} | end
        return self._chunks.choice(choice, len(self._output.prompt_token_ids), self._generated)


def _said(index: int, text: str) -> dict[str, Any]:
    """Return a part of a choice that has only text."""
    return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None, count: int
) -> dict[str, Any] | None:
    """Return the logprobs of tokens, each with the `count` most probable tokens at its position."""
    if logprobs is None:
        return None

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": finite(found.logprob), "bytes": list(raw)}

    def best(found: dict[int, Logprob]) -> list[dict[str, Any]]:
        ranked = sorted(found.items(), key=lambda candidate: candidate[1].rank)
        return [entry(token, candidate) for token, candidate in ranked if candidate.rank <= count]

    content = [
        entry(token, found[token]) | {"top_logprobs": best(found)}
        for token, found in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
