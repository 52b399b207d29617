"""llama-server's own routes: /completion and /infill continue a prompt, the others show prompts, settings and slots."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire import __version__
from quire.frontend.jobs import Delta
from quire.frontend.outputs import CompletionOutput, Logprob
from quire.frontend.request_factory import TokenizedPrompt
from quire.frontend.tokenizer import Tokenizer
from quire.request import SamplingParams
from quire.sandbox.chat_template import special_tokens
from quire.server.api.completions import check_num_logprobs
from quire.server.api.infill import Infill, infill
from quire.server.api.jobs import Stream
from quire.server.api.service import Service, finite, with_fingerprint
from quire.server.api.streamed import EventWriter, StreamedAnswer
from quire.server.api.turn import prompt_of
from quire.server.http.api_error import ApiError, api_error, request_failed
from quire.server.http.sse import JsonBody, data, noticing_disconnect
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.llama import (
    CALLED,
    RANDOM_SEEDS,
    InfillRequest,
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaRequest,
    Prompt,
    Properties,
    Slot,
    Timings,
    TokenProbability,
    TopProbability,
)
from quire.server.protocol.tokens import Piece, TokenizeRequest, Tokens

MS, SECOND = 1e6, 1e9  # nanoseconds
# Ways of sampling that are off.
OFF = {"typical_p": 1.0, "mirostat": 0, "dynatemp_range": 0.0, "dry_multiplier": 0.0, "xtc_probability": 0.0}


async def complete(service: Service, request: HttpRequest, body: LlamaCompletionRequest) -> Response:
    """Continue a prompt."""
    if isinstance(body.prompt, str):
        service.check_text(body.prompt)
        return await _answer(service, request, body, await service.encode(request, body.prompt), [])
    tokens = body.prompt
    text = await service.run_tokenization(request, len(tokens), partial(_text, service, tokens))
    return await _answer(service, request, body, TokenizedPrompt(text, tokens), [])


async def fill_in(service: Service, request: HttpRequest, body: InfillRequest) -> Response:
    """Generate the text between a prefix and a suffix."""
    service.model.pooling.check_writes()
    if body.input_suffix is None:
        message = "input_suffix is missing; /infill fills in before it, and /completion continues a prompt without one"
        raise ApiError(message, param="input_suffix")
    before, after = (body.input_prefix or "") + (body.prompt or ""), body.input_suffix or ""
    service.check_text(before, "input_prefix")
    service.check_text(after, "input_suffix")
    extra = [(one.filename or "", one.text) for one in body.input_extra or ()]
    room = service.model.max_model_len - max(1, body.n_predict or 0)

    def make() -> tuple[Infill, str]:
        found = infill(service.tokenizer, service.tokenizer.encode(before), after, extra, room)
        return found, _text(service, found.tokens)

    size = len(before) + len(after) + sum(len(text) for _, text in extra)
    found, text = await service.run_tokenization(request, size, make)
    return await _answer(service, request, body, TokenizedPrompt(text, found.tokens), found.ends)


async def apply_template(service: Service, request: HttpRequest, body: ChatRequest) -> Response:
    """Return the prompt of a chat's body."""
    service.check_model(body.model)
    prompt = await prompt_of(service, request, body)
    return JsonBody(Prompt(prompt=prompt.text or ""))


async def tokenized(service: Service, request: HttpRequest, body: TokenizeRequest, text: str) -> Tokens:
    """Return the answer of /tokenize for llama-server's `content`."""
    tokenizer = service.tokenizer

    def make() -> Tokens:
        if body.parse_special:
            tokens = tokenizer.encode(text, body.add_special)
        else:
            tokens = [*tokenizer.leading_tokens] if body.add_special else []
            tokens += tokenizer.encode_form(("", ""), (text,))
        return {"tokens": [_piece(tokenizer, one) for one in tokens] if body.with_pieces else tokens}

    return await service.run_tokenization(request, len(text), make)


def _piece(tokenizer: Tokenizer, token: int) -> Piece:
    raw = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}


def properties(service: Service) -> Properties:
    """Return the answer of /props."""
    model = service.model
    special = special_tokens(model.tokenizer_settings)
    defaults = SamplingParams(**{"max_tokens": None, **model.default_sampling})
    return {
        "default_generation_settings": {"n_ctx": model.max_model_len, "params": _settings(defaults, LlamaRequest())},
        "total_slots": service.engine_client.num_slots()[0],
        "model_alias": model.names[0],
        "model_path": model.root,
        "chat_template": "" if model.template is None else model.template.source,
        "bos_token": special["bos_token"] or "",
        "eos_token": special["eos_token"] or "",
        "modalities": {"vision": service.why_no_images() is None, "audio": False},
        "build_info": f"quire {__version__}",
        "is_sleeping": service.engine_client.is_sleeping,
    }


def slots(service: Service, *, fails_if_full: bool) -> list[Slot]:
    """Return the answer of /slots. Raises ApiError (503) if none is free and `fails_if_full` is set."""
    total, num_running = service.engine_client.num_slots()
    if fails_if_full and num_running >= total:
        message = f"all {total} slots are in use; further requests wait"
        raise ApiError(message, HTTPStatus.SERVICE_UNAVAILABLE, code="no_slot")
    n_ctx = service.model.max_model_len
    return [
        {"id": i, "id_task": i if i < num_running else -1, "n_ctx": n_ctx, "is_processing": i < num_running}
        for i in range(total)
    ]


def _text(service: Service, tokens: Sequence[int]) -> str:
    tokenizer = service.model.tokenizer
    return "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)


async def _answer(
    service: Service, request: HttpRequest, body: LlamaRequest, prompt: TokenizedPrompt, ends: list[int]
) -> Response:
    """Answer with a continuation. ends: tokens that end it in addition to the model's own."""
    began, asked = time.perf_counter_ns(), body.completion()
    service.check_model(asked.model)
    asked.check_together()
    service.check_logprobs("n_probs", asked.logprobs)
    # Without a new token nothing would run, so one is sampled and not reported.
    max_tokens = service.room_for([prompt], asked, "max_tokens") or (1 if asked.max_tokens == 0 else None)
    params = service.sampling(asked, max_tokens=max_tokens, logprobs=asked.logprobs, stop_token_ids=ends)
    check_num_logprobs(service, [prompt], params, "n_probs")
    identity = service.identity(request, "llama")
    guide = await service.guide(request, asked)
    job = service.stream(
        request, identity, await service.requests(request, asked, identity.name, [prompt], params, guide)
    )
    writer = _Writer(service, body, params, prompt, job, began)
    await service.engine_client.submit(job)
    answer: Response = StreamedAnswer(service.engine_client, job, writer, service.config.sse_keep_alive)
    if not body.stream:
        async with noticing_disconnect(request.receive, partial(service.engine_client.abort, job)):
            while deltas := await job.deltas():
                writer.events(deltas)
        if (error := writer.error or job.error) is not None:
            raise api_error(error)
        answer = JsonBody(writer.whole())
    return with_fingerprint(answer, await service.system_fingerprint(job.outputs))


class _Writer(EventWriter):
    """Writes an answer, complete or as events."""

    def __init__(
        self,
        service: Service,
        body: LlamaRequest,
        params: SamplingParams,
        prompt: TokenizedPrompt,
        job: Stream,
        began: int,
    ) -> None:
        """Create it. began: time.perf_counter_ns() when the request arrived."""
        self.error: ApiError | None = None
        self._service = service
        self._body = body
        self._params = params
        self._prompt = prompt
        [self._output] = job.outputs
        self._began = began
        self._first: int | None = None  # time of the first token
        self._num_generated = 0
        self._is_silent = body.n_predict == 0

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Return a chunk for each delta."""
        self._first = self._first or time.perf_counter_ns()
        return b"".join(map(self._event, deltas))

    def end(self) -> bytes:
        """Return the last event; empty if the answer has failed."""
        return b"" if self.error is not None else data(self._last("", []))

    def fail(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        self.error = error
        return data(error.body())

    def whole(self) -> Mapping[str, Any]:
        """Return the complete answer."""
        [sample] = self._output.outputs
        text, tokens = ("", []) if self._is_silent else (sample.text, sample.token_ids)
        answer = self._last(text, tokens if self._body.return_tokens else [])
        if self._body.n_probs:
            answer["completion_probabilities"] = self._probabilities(tokens, sample.logprobs)
        names = self._body.response_fields
        return answer if names is None else _chosen(answer, names)

    def _event(self, delta: Delta) -> bytes:
        if delta.error is not None:
            return self.fail(request_failed(delta.error, "grammar" if self._body.grammar else "json_schema"))
        self._num_generated += len(delta.token_ids)
        if self._is_silent or not (delta.text or delta.token_ids):
            return b""
        chunk: LlamaCompletion = {
            "index": 0,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._num_generated,
            "tokens_evaluated": len(self._prompt.tokens),
        }
        if self._body.n_probs:
            chunk["completion_probabilities"] = self._probabilities(delta.token_ids, delta.logprobs)
        if self._body.timings_per_token:
            chunk["timings"] = self._timings(self._num_generated, 0)
        return data(chunk)

    def _last(self, text: str, tokens: list[int]) -> LlamaCompletion:
        [sample] = self._output.outputs
        num_generated = 0 if self._is_silent else len(sample.token_ids)
        word = sample.stop_reason if isinstance(sample.stop_reason, str) else ""
        return {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "id_slot": 0,
            "stop": True,
            "model": self._service.answering(self._body.model),
            "tokens_predicted": num_generated,
            "tokens_evaluated": len(self._prompt.tokens),
            "generation_settings": _settings(self._params, self._body),
            "prompt": self._prompt.text or "",
            "has_new_line": "\n" in sample.text and not self._is_silent,
            "truncated": False,
            "stop_type": "limit" if _is_cut(sample) or self._is_silent else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": self._output.num_cached_tokens or 0,
            "timings": self._timings(num_generated, self._output.num_cached_tokens or 0),
        }

    def _timings(self, num_generated: int, num_cached: int) -> Timings:
        now = time.perf_counter_ns()
        first = self._first or now
        num_computed = len(self._prompt.tokens) - num_cached
        before, after = first - self._began, now - first
        return {
            "cache_n": num_cached,
            "prompt_n": num_computed,
            "prompt_ms": before / MS,
            "prompt_per_token_ms": before / MS / max(1, num_computed),
            "prompt_per_second": num_computed * SECOND / max(1, before),
            "predicted_n": num_generated,
            "predicted_ms": after / MS,
            "predicted_per_token_ms": after / MS / max(1, num_generated),
            "predicted_per_second": num_generated * SECOND / max(1, after),
        }

    def _probabilities(
        self, tokens: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None
    ) -> list[TokenProbability]:
        tokenizer, count = self._service.tokenizer, self._body.n_probs or 0

        def entry(token: int, found: Logprob) -> TopProbability:
            raw = tokenizer.token_bytes(token)
            logprob = finite(found.logprob)
            return {"id": token, "token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": logprob}

        pairs = zip(tokens, logprobs or (), strict=False)
        return [
            {
                **entry(token, found[token]),
                "top_logprobs": [entry(one, about) for one, about in found.items() if about.rank <= count],
            }
            for token, found in pairs
        ]


def _is_cut(sample: CompletionOutput) -> bool:
    return sample.finish_reason == "length"


def _settings(params: SamplingParams, body: LlamaRequest) -> dict[str, Any]:
    """Return sampling parameters by llama-server's names."""
    found = {name: getattr(params, own) for name, own in CALLED.items()} | OFF
    most = found.pop("num_predict")
    return found | {
        "n_predict": 0 if body.n_predict == 0 else -1 if most is None else most,
        "seed": RANDOM_SEEDS[1] if params.seed is None else params.seed,
        "stop": list(params.stop_strings),
        "repeat_last_n": -1,
        "n_keep": -1,
        "n_probs": params.logprobs or 0,
        "ignore_eos": params.ignore_eos,
        "stream": body.stream,
        "grammar": body.grammar or "",
    }


def _chosen(answer: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the named fields of an answer. "a/b" is the field b of the object a, and keeps that name."""
    found = {}
    for name in names:
        value: Any = answer
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            found[name] = value
    return found
