"""/v1/completions: continuations of prompts, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.frontend.jobs import Delta, GenerationJob
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.frontend.request_factory import TokenizedPrompt
from quire.frontend.tokenizer import Tokenizer
from quire.request import SamplingParams
from quire.server.api.beams import Beams
from quire.server.api.chunks import Chunks, usage
from quire.server.api.infill import infill
from quire.server.api.jobs import Stream
from quire.server.api.service import (
    MAX_LOGPROBS,
    Service,
    counted,
    finite,
    listed,
    num_logprobs,
    num_prompt_logprobs,
    offload_if_large,
)
from quire.server.api.streamed import EventWriter, StreamedAnswer
from quire.server.http.api_error import ApiError, request_failed
from quire.server.http.sse import JsonBody, data, dumps
from quire.server.protocol.answers import PromptLogprobs
from quire.server.protocol.completions import CompletionChoice, CompletionHead, CompletionLogprobs, CompletionRequest

Candidates = dict[int, Logprob]


async def complete(service: Service, request: HttpRequest, body: CompletionRequest) -> Response:
    """Answer a request.

    If one of its samples fails, the whole answer is that error. A stream has an error event in place of that sample,
    and the others continue to their ends.
    """
    service.check_model(body.model)
    body.check_together()
    given = listed(body.prompt)
    size = sum(map(len, given))
    prompts = await service.run_tokenization(
        request, size, lambda: [service.truncate(_prompt(service, one, body), body, body.max_tokens) for one in given]
    )
    prompts, ends = await _filled_in(service, request, body, prompts)
    # Without a new token nothing would run, so one is sampled and not reported.
    max_tokens = service.room_for(prompts, body, "max_tokens") or (1 if body.max_tokens == 0 else None)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError("max_tokens is 0 without echo, so there would be nothing to answer", param="max_tokens")
    identity = service.identity(request, "cmpl")
    name, created = identity
    head = CompletionHead(
        id=name,
        object="text_completion",
        created=created,
        model=service.answering(body.model),
        system_fingerprint=None,  # set when it is known which system computes the answer
    )
    writer = _Writer(service, body, prompts)

    def answer(outputs: list[RequestOutput]) -> Response:
        num_prompt, num_generated, num_cached = counted(outputs)
        choices = (choice for i, output in enumerate(outputs) for choice in writer.choices(i, output))
        numbers = usage(num_prompt, 0 if body.max_tokens == 0 else num_generated, num_cached)
        return whole(head, choices, {"usage": numbers})

    if body.use_beam_search:
        service.check_logprobs("logprobs", body.logprobs)
        beams = Beams(service, prompts, name, body.n or 1)
        await beams.begin(request, body, max_tokens, body.logprobs)
        if body.stream:
            head["system_fingerprint"] = await service.system_fingerprint(beams.outputs)
            return beams.streamed(request, _Events(body, head, writer, Stream([(one, []) for one in beams.outputs])))
        outputs = await beams.ended(request)
        head["system_fingerprint"] = await service.system_fingerprint(outputs)
        return answer(outputs)
    params = _params(service, body, max_tokens, ends)
    check_num_logprobs(service, prompts, params, "best_of" if body.logprobs is None else "logprobs")
    made = await service.requests(request, body, name, prompts, params, await service.guide(request, body))
    if body.stream:
        job = service.stream(request, identity, made)
        await service.engine_client.submit(job)
        head["system_fingerprint"] = await service.system_fingerprint(job.outputs)
        events, size = _Events(body, head, writer, job), num_prompt_logprobs(prompts, params)
        return StreamedAnswer(service.engine_client, job, events, service.config.sse_keep_alive, size)
    outputs = await service.run(request, GenerationJob(made), body.grammar_field())
    head["system_fingerprint"] = await service.system_fingerprint(outputs)
    return await offload_if_large(num_logprobs(outputs), partial(answer, outputs))


def check_num_logprobs(service: Service, prompts: Sequence[TokenizedPrompt], params: SamplingParams, name: str) -> None:
    """Raise ApiError, naming a field, for more logprobs of generated tokens than one answer may have."""
    if params.logprobs is None:
        return
    rooms = [service.model.max_model_len - len(prompt.tokens) for prompt in prompts]
    num_tokens = sum(rooms if params.max_tokens is None else (min(room, params.max_tokens) for room in rooms))
    if (count := (params.logprobs + 1) * params.n * num_tokens) > MAX_LOGPROBS:
        message = (
            f"the request asks for up to {count} logprobs of generated tokens, {params.logprobs + 1} of each in "
            f"{params.n} samples of up to {num_tokens} tokens; this server gives {MAX_LOGPROBS} at a time, so "
            f"ask for fewer, or set max_tokens"
        )
        raise ApiError(message, param=name)


def whole(head: Mapping[str, Any], choices: Iterable[Mapping[str, Any]], end: Mapping[str, Any]) -> Response:
    """Return an answer, encoded choice by choice: the encoder blocks all other threads until it returns."""
    encoded = b",".join(map(dumps, choices))
    content = dumps(head)[:-1] + b',"choices":[' + encoded + b"]," + dumps(end)[1:]
    return Response(content, media_type=JsonBody.media_type)


def _prompt(service: Service, given: str | list[int], body: CompletionRequest) -> TokenizedPrompt:
    if isinstance(given, str):
        service.check_text(given)
        return TokenizedPrompt(given, service.tokenizer.encode(given, body.add_special_tokens))
    text = None
    if body.echo and service.model.tokenizer is not None:
        text = service.model.tokenizer.decode(given, skip_special_tokens=False)
    return TokenizedPrompt(text, given)


async def _filled_in(
    service: Service, request: HttpRequest, body: CompletionRequest, prompts: list[TokenizedPrompt]
) -> tuple[list[TokenizedPrompt], list[int]]:
    """Return infill prompts for the body's suffix and the tokens that end the text; without a suffix, the prompts."""
    if not body.suffix:
        return prompts, []
    service.check_text(body.suffix, "suffix")
    size = len(body.suffix) + sum(len(prompt.tokens) for prompt in prompts)
    make = [partial(infill, service.tokenizer, prompt.tokens, body.suffix) for prompt in prompts]
    found = await service.run_tokenization(request, size, lambda: [one() for one in make])
    return [TokenizedPrompt(prompt.text, one.tokens) for prompt, one in zip(prompts, found, strict=True)], found[0].ends


def _params(service: Service, body: CompletionRequest, max_tokens: int | None, ends: list[int]) -> SamplingParams:
    """Return the sampling parameters. ends: tokens that end the text in addition to those of the body."""
    num_choices = body.n or 1
    own: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": body.logprobs}
    if ends:
        own["stop_token_ids"] = [*(body.stop_token_ids or ()), *ends]
    if body.best_of is not None:
        if body.best_of < num_choices:
            raise ApiError(f"best_of is {body.best_of}; it must be at least n, which is {num_choices}", param="best_of")
        if body.stream and body.best_of > num_choices:
            raise ApiError("best_of does not go with stream: the best are known only at the end", param="best_of")
        own["n"] = body.best_of
        if body.best_of > num_choices and body.logprobs is None:
            own["logprobs"] = 0
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        own["prompt_logprobs"] = body.logprobs
    return service.sampling(body, **own)


class _Events(EventWriter):
    """Writes the events of a streamed answer."""

    def __init__(self, body: CompletionRequest, head: CompletionHead, writer: _Writer, job: Stream) -> None:
        self._body = body
        self._chunks = Chunks(head, body.stream_options)
        self._writer = writer
        self._job = job
        self._numbers = {output.request_id: i for i, output in enumerate(job.outputs)}
        self._generated = [0] * len(job.outputs)

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Return a chunk of a choice for each delta that has something to send."""
        parts: list[bytes] = []
        for delta in deltas:
            number = self._numbers[delta.output.request_id]
            self._chunks.note(delta.output)
            if self._body.max_tokens != 0:
                self._generated[number] += len(delta.token_ids)
            events = []
            if delta.error is not None:
                events.append(data(request_failed(delta.error, self._body.grammar_field()).body()))
            elif self._writer.is_plain(number, delta):
                if delta.text:
                    index = self._writer.index(number, delta)
                    counts = len(delta.output.prompt_token_ids), self._generated[number]
                    events.append(self._chunks.text(index, delta.text, _plain, *counts))
            elif (choice := self._writer.piece(number, delta)) is not None and not delta.is_known:
                num_prompt = len(delta.output.prompt_token_ids)
                events.append(self._chunks.choice(choice, num_prompt, self._generated[number]))
            parts += self._job.marked(delta, events)
        return b"".join(parts)

    def end(self) -> bytes:
        """Return the token counts, if requested, and the end mark."""
        num_prompt, _, num_cached = counted(self._job.outputs)
        return self._chunks.end(num_prompt, sum(self._generated), num_cached)


class _Writer:
    """Writes choices."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: Sequence[TokenizedPrompt]) -> None:
        self._tokenizer = service.model.tokenizer
        self._body = body
        self._prompts = prompts
        self._samples = body.best_of or body.n or 1
        self._offsets: dict[tuple[int, int], int] = {}  # the text offset of the next token of a streamed choice

    def choices(self, number: int, output: RequestOutput) -> list[CompletionChoice]:
        """Return the choices of a finished prompt, the n best ones."""
        num_choices = self._body.n or 1
        best = output.outputs
        if num_choices < len(best):
            best = sorted(best, key=_goodness, reverse=True)[:num_choices]
        return [self._choice(number * num_choices + i, number, output, sample) for i, sample in enumerate(best)]

    def _choice(self, index: int, number: int, output: RequestOutput, sample: CompletionOutput) -> CompletionChoice:
        shown = self._body.max_tokens != 0
        text = sample.text if shown else ""
        positions: list[tuple[int, Candidates | None]] = []
        if self._body.logprobs is not None and sample.logprobs is not None and shown:
            positions += zip(sample.token_ids, sample.logprobs, strict=True)
        if self._body.echo:
            text = (self._prompts[number].text or "") + text
            positions = self._echoed(output) + positions
        logprobs = None if self._body.logprobs is None else self._logprobs(positions, 0)
        choice: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason if shown else "length",
            "stop_reason": sample.stop_reason if shown else None,
        }
        self._add_prompt(choice, output)
        self._add_tokens(choice, sample.token_ids)
        return choice

    def index(self, number: int, delta: Delta) -> int:
        """Return the index of a delta's choice."""
        return number * self._samples + delta.sample

    def is_plain(self, number: int, delta: Delta) -> bool:
        """Return whether a delta adds only text to its choice, so that its chunk needs no other fields."""
        if delta.logprobs is not None or delta.finish_reason is not None or delta.is_known:
            return False
        if self._body.return_token_ids:
            return False
        return (number, delta.sample) in self._offsets and self._body.max_tokens != 0

    def piece(self, number: int, delta: Delta) -> CompletionChoice | None:
        """Return the part of a choice that a stream sends for a delta, or None if there is nothing to send yet."""
        shown = self._body.max_tokens != 0
        key = (number, delta.sample)
        is_first = key not in self._offsets
        text = delta.text if shown else ""
        positions: list[tuple[int, Candidates | None]] = []
        if self._body.logprobs is not None and delta.logprobs is not None and shown:
            positions += zip(delta.token_ids, delta.logprobs, strict=True)
        if is_first and self._body.echo:
            text = (self._prompts[number].text or "") + text
            positions = self._echoed(delta.output) + positions
        if not (text or positions or delta.finish_reason or is_first or self._body.return_token_ids):
            return None
        offset = self._offsets.setdefault(key, 0)
        logprobs = None if self._body.logprobs is None else self._logprobs(positions, offset)
        if logprobs is not None:
            self._offsets[key] += sum(map(len, logprobs["tokens"]))
        choice: CompletionChoice = {
            "index": self.index(number, delta),
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason if shown or delta.finish_reason is None else "length",
            "stop_reason": delta.stop_reason if shown else None,
        }
        if is_first:
            self._add_prompt(choice, delta.output)
        self._add_tokens(choice, delta.token_ids)
        return choice

    def _add_prompt(self, choice: CompletionChoice, output: RequestOutput) -> None:
        """Add the prompt's logprobs and token ids if they were requested."""
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids

    def _add_tokens(self, choice: CompletionChoice, tokens: list[int]) -> None:
        if self._body.return_token_ids:
            choice["token_ids"] = [] if self._body.max_tokens == 0 else tokens

    def _echoed(self, output: RequestOutput) -> list[tuple[int, Candidates | None]]:
        if self._body.logprobs is None or output.prompt_logprobs is None:
            return []
        # There are fewer logprobs than tokens if the request was aborted within its prompt.
        return list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=False))

    def _logprobs(self, positions: Sequence[tuple[int, Candidates | None]], offset: int) -> CompletionLogprobs:
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, candidates in positions:
            text = token_text(self._tokenizer, token)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            if candidates is None:
                chosen.append(None)
                top.append(None)
            else:
                chosen.append(finite(candidates[token].logprob))
                top.append({token_text(self._tokenizer, t): finite(found.logprob) for t, found in candidates.items()})
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": top}


def _plain(index: int, text: str) -> CompletionChoice:
    """Return a part of a choice that has only text."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _goodness(sample: CompletionOutput) -> float:
    """Return the mean logprob of a sample's tokens."""
    return finite((sample.cumulative_logprob or 0.0) / max(1, len(sample.token_ids)))


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return a token's text, or its bytes in OpenAI's notation if they are not complete characters."""
    if tokenizer is None:
        return f"token_id:{token}"
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(output: RequestOutput) -> PromptLogprobs:
    """Return the prompt's logprobs in vLLM's format."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if candidates is None
        else {
            str(token): {"logprob": finite(found.logprob), "rank": found.rank, "decoded_token": found.decoded_token}
            for token, found in candidates.items()
        }
        for candidates in output.prompt_logprobs
    ]
