"""/v1/chat/completions: a conversation goes on, as OpenAI answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.api.chunks import Chunks, usage
from quire.server.api.completions import check_num_logprobs, prompt_logprobs, whole
from quire.server.api.jobs import Delta, Generation, Stream
from quire.server.api.service import Prompt, Service, aside, counted, finite, num_logprobs
from quire.server.api.streamed import StreamedAnswer
from quire.server.http.api_error import ApiError, request_failed
from quire.server.http.sse import JsonBody, data
from quire.server.protocol.chat import ChatRequest, Message
from quire.text import Logprob, Tokenizer


async def chat(service: Service, request: HttpRequest, body: ChatRequest) -> Response:
    """Answer a request.

    Where one of its samples fails, the whole answer is that error. A stream has an error event in that sample's place,
    and the others go on to their ends.
    """
    service.check_model(body.model)
    body.check_together()
    prompt = await conversation(service, request, body.messages, body.add_generation_prompt)
    body.messages.clear()  # many small parts take many times the memory of the text that they make
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = service.room_for([prompt], body, field)
    identity = service.identity(request, "chatcmpl")
    name, created = identity
    head = {"id": name, "object": "chat.completion", "created": created, "model": service.model.names[0]}
    if body.use_beam_search:
        found = await service.search(request, body, name, prompt, max_tokens)
        choices = [_choice(i, text, None, reason, None) for i, (text, reason, _) in enumerate(found)]
        generated = sum(count for _, _, count in found)
        return JsonBody(head | {"choices": choices, "usage": usage(len(prompt.tokens), generated, 0)})
    service.check_logprobs("top_logprobs", body.top_logprobs)
    count = body.top_logprobs or 0
    params = service.sampling(body, max_tokens=max_tokens, logprobs=count if body.logprobs else None)
    check_num_logprobs(service, [prompt], params, "top_logprobs" if count else "logprobs")
    made = await service.requests(request, body, name, [prompt], params, await service.guide(request, body))
    if body.stream:
        job = service.stream(request, identity, made)
        await service.worker.submit(job)
        head["object"] = "chat.completion.chunk"
        events, abort = _Events(service, body, head, job), lambda: service.worker.abort(job)
        return StreamedAnswer(job, events, abort, service.config.sse_keep_alive)
    outputs = await service.run(request, Generation(made), body.grammar_field())

    def answer() -> Response:
        choices = (
            _choice(
                sample.index,
                sample.text,
                _logprobs(service.tokenizer, sample.token_ids, sample.logprobs, count),
                sample.finish_reason,
                sample.stop_reason,
            )
            for sample in outputs[0].outputs
        )
        asked = {} if body.prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs(outputs[0])}
        return whole(head, choices, {"usage": usage(*counted(outputs))} | asked)

    return await aside(num_logprobs(outputs), answer)


async def conversation(
    service: Service, request: HttpRequest, messages: Sequence[Message], add_generation_prompt: bool
) -> Prompt:
    """The prompt that a conversation makes. Raises ApiError without a template, and where it refuses."""
    if service.model.template is None:
        message = (
            f"{service.model.names[0]} has no chat template, so it continues prompts only (/v1/completions); the "
            f"server takes a template as --chat-template FILE"
        )
        raise ApiError(message, param="messages")
    plain = [_plain(message) for message in messages]
    try:
        text = await service.render(request, service.model.template, plain, add_generation_prompt)
        service.check_text(text, "messages")
        return await service.encode(request, text, add_special_tokens=False)  # the template writes those itself
    except RequestError as error:
        raise ApiError(str(error), param="messages") from error


def _plain(message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content or ""} | named


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None, stop_reason: int | str | None
) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": stop_reason,
    }


class _Events:
    """Writes the events of a streamed answer: an `EventWriter`.

    Each choice's first says who speaks, its last why it ends.
    """

    def __init__(self, service: Service, body: ChatRequest, head: dict[str, Any], job: Stream) -> None:
        self._service = service
        self._body = body
        self._chunks = Chunks(head, body.stream_options)
        self._job = job
        [self._output] = job.outputs
        self._generated = 0

    def begin(self) -> bytes:
        """Who speaks."""
        if self._job.is_continued:
            return b""
        speaks = {"role": "assistant", "content": ""}
        return b"".join(self._piece(index, speaks) for index in range(self._body.n or 1))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The pieces of the deltas' choices."""
        parts: list[bytes] = []
        for delta in deltas:
            self._generated += len(delta.token_ids)
            if not delta.is_known:
                parts += self._job.marked(delta, self._events(delta))
        return b"".join(parts)

    def end(self) -> bytes:
        """The numbers of tokens, if they were asked for, and the mark of the end."""
        num_prompt, num_cached = len(self._output.prompt_token_ids), self._output.num_cached_tokens or 0
        return self._chunks.end(num_prompt, self._generated, num_cached)

    def _events(self, delta: Delta) -> list[bytes]:
        if delta.error is not None:
            return [data(request_failed(delta.error, self._body.grammar_field()).body())]
        if delta.logprobs is None and delta.finish_reason is None:
            counts = len(self._output.prompt_token_ids), self._generated
            return [self._chunks.text(delta.sample, delta.text, _said, *counts)] if delta.text else []
        events, count = [], self._body.top_logprobs or 0
        logprobs = _logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, count)
        if delta.text or (logprobs and delta.token_ids):
            events.append(self._piece(delta.sample, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            events.append(self._piece(delta.sample, {}, **end))
        return events

    def _piece(self, index: int, delta: dict[str, Any], logprobs: Any = None, **end: Any) -> bytes:
        choice = _said(index, "") | {"delta": delta, "logprobs": logprobs} | end
        return self._chunks.choice(choice, len(self._output.prompt_token_ids), self._generated)


def _said(index: int, text: str) -> dict[str, Any]:
    """A piece of a choice that is but a text."""
    return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}


def _logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None, count: int
) -> dict[str, Any] | None:
    """The tokens, each with the `count` most probable ones in its place."""
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
