"""Ollama's routes: /api/chat and /api/generate continue a conversation or a prompt, /api/embed embeds texts.

The others describe the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from hashlib import sha256
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.server.api.blocks import Block, BlockEvents, Ending, read_whole
from quire.server.api.embeddings import embedded, unit_vector
from quire.server.api.service import Service, counted, offload_if_large, with_fingerprint
from quire.server.api.streamed import StreamedAnswer
from quire.server.api.turn import Turn
from quire.server.http.api_error import OLLAMA_PATHS, ApiError
from quire.server.http.sse import JsonBody, dumps
from quire.server.protocol.ollama import EmbedRequest, GenerateRequest, OllamaChatRequest, ShowRequest
from quire.server.tools.parser import Kind

VERSION = "0.12.6"  # the version of Ollama whose API this is: clients check it before they use newer fields
FAR = "2318-01-01T00:00:00Z"  # the expiry of a model that is never unloaded


class LinesAnswer(StreamedAnswer):
    """A stream whose events are lines of JSON."""

    media_type = "application/x-ndjson"


async def ollama_chat(service: Service, request: HttpRequest, body: OllamaChatRequest) -> Response:
    """Answer a conversation."""
    return await _answer(service, request, body, has_prompt=bool(body.messages), field="message")


async def ollama_generate(service: Service, request: HttpRequest, body: GenerateRequest) -> Response:
    """Answer a prompt. Continue it instead if that is requested (raw) or the model has no template."""
    return await _answer(service, request, body, has_prompt=bool(body.prompt), field="response")


async def _answer(
    service: Service,
    request: HttpRequest,
    body: OllamaChatRequest | GenerateRequest,
    *,
    has_prompt: bool,
    field: str,
) -> Response:
    began = time.perf_counter_ns()
    if not has_prompt:  # in Ollama, a request to load the model
        model = (body.model or "").removesuffix(":latest")
        service.check_model(model)
        head = {"model": body.model or service.answering(None), "created_at": _now()}
        return JsonBody(head | _said(field, "", "") | {"done": True, "done_reason": "load"})
    chat, prompt = body.chat(), None
    if isinstance(body, GenerateRequest) and (body.raw or service.model.template is None):
        service.check_model(chat.model)
        if body.system:
            why = "raw is true" if body.raw else "the model has no chat template"
            raise ApiError(f"system cannot be used, because {why}; write it into the prompt", param="system")
        text = body.prompt or ""
        service.check_text(text)
        prompt = await service.encode(request, text)
    turn = await Turn.of(service, request, chat, "ollama", prompt)
    script = _Script(body.model or turn.model, field, began)
    if chat.stream:
        job = await turn.stream()
        # Lines of JSON allow no comments, so none keep the stream alive.
        lines = LinesAnswer(service.worker, job, BlockEvents(turn, job, script), keep_alive=0)
        return with_fingerprint(lines, turn.system_fingerprint)
    blocks, ending = await read_whole(turn)
    texts = {kind: "".join(one.text for one in blocks if one.kind is kind) for kind in Kind}
    calls = [_call(one, i) for i, one in enumerate(one for one in blocks if one.kind is Kind.CALL)]
    found = _said(field, texts[Kind.CONTENT], texts[Kind.REASONING], calls)
    logprobs = [entry for one in blocks for entry in one.logprobs]
    answer = JsonBody(script.last(ending) | found | ({"logprobs": logprobs} if chat.logprobs else {}))
    return with_fingerprint(answer, turn.system_fingerprint)


async def ollama_embed(service: Service, request: HttpRequest, body: EmbedRequest) -> Response:
    """Embed texts. Without a text, the request only asks to load the model."""
    began, asked = time.perf_counter_ns(), body.embedding()
    service.check_model(asked.model)
    outputs = await embedded(service, request, asked) if body.input else []
    num_prompt = counted(outputs)[0]

    def answered() -> Response:
        vectors = [unit_vector(one, f"input {i}", asked.dimensions).tolist() for i, one in enumerate(outputs)]
        head = {"model": body.model or service.answering(None), "embeddings": vectors}
        spent = {"total_duration": time.perf_counter_ns() - began, "load_duration": 0}
        return JsonBody(head | spent | {"prompt_eval_count": num_prompt})

    answer = await offload_if_large(len(outputs) * service.model.hidden_size, answered)
    return with_fingerprint(answer, await service.system_fingerprint(outputs))


def tags(service: Service) -> dict[str, Any]:
    """Return the answer of /api/tags."""
    return {"models": [_model(service, name) for name in (*service.model.names, *service.model.loras)]}


def running(service: Service) -> dict[str, Any]:
    """Return the answer of /api/ps: all models are loaded."""
    more = {"expires_at": FAR, "size_vram": 0, "context_length": service.model.max_model_len}
    return {"models": [one | more for one in tags(service)["models"]]}


def show(service: Service, body: ShowRequest) -> dict[str, Any]:
    """Return the answer of /api/show. Raises ApiError (404) for a model that is not served here."""
    name = (body.model or body.name or "").removesuffix(":latest")
    service.check_model(name)
    model = service.model
    able = {
        "completion": True,
        "tools": model.dialect.syntax is not None,
        "thinking": model.dialect.thoughts is not None,
    }
    about = {"context_length": model.max_model_len, "embedding_length": model.hidden_size}
    shown = _model(service, name or model.names[0])
    return {
        "modelfile": "",
        "parameters": "",
        "license": "",
        "template": "" if model.template is None else model.template.source,
        "details": shown["details"],
        "model_info": {"general.architecture": "quire"} | {f"quire.{key}": value for key, value in about.items()},
        "capabilities": [what for what, is_able in able.items() if is_able],
        "modified_at": shown["modified_at"],
    }


def _model(service: Service, name: str) -> dict[str, Any]:
    """Return the description of a model. Properties that are unknown here are empty or 0."""
    details = {"parent_model": "", "format": "", "family": "", "families": None}
    return {
        "name": name,
        "model": name,
        "modified_at": _written(service.created),
        "size": 0,
        "digest": sha256(name.encode(errors="surrogatepass")).hexdigest(),
        "details": details | {"parameter_size": "", "quantization_level": ""},
    }


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def _now() -> str:
    return _written(time.time())


def _said(field: str, text: str, thoughts: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the fields of a message or of a response, as `field` selects."""
    thinking = {"thinking": thoughts} if thoughts else {}
    if field == "response":
        return {"response": text} | thinking
    message = {"role": "assistant", "content": text} | thinking
    return {"message": message | ({"tool_calls": list(calls)} if calls else {})}


def _call(block: Block, number: int) -> dict[str, Any]:
    """Return a call. number: its index in the answer. Incomplete arguments are shown as text."""
    given = block.arguments()
    arguments = {"": block.text} if given is None else given
    return {"id": block.call_id, "function": {"index": number, "name": block.name, "arguments": arguments}}


class _Script:
    """Writes the lines of a stream: a line for each delta. A call is one line, when it is complete."""

    def __init__(self, model: str, field: str, began: int) -> None:
        """Create it. began: time.perf_counter_ns() when the request arrived."""
        self._model = model
        self._field = field
        self._began = began
        self._num_calls = 0
        self._first: int | None = None  # time of the first delta

    def begin(self) -> bytes:
        """Return nothing."""
        return b""

    def open(self, block: Block) -> bytes:
        """Return nothing."""
        return b""

    def grow(self, block: Block, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Return a line with text or reasoning."""
        self._first = self._first or time.perf_counter_ns()
        if block.kind is Kind.CALL:
            return b""
        is_said = block.kind is Kind.CONTENT
        said = _said(self._field, text if is_said else "", "" if is_said else text)
        return self._line(said | ({"logprobs": logprobs} if logprobs else {}))

    def close(self, block: Block) -> bytes:
        """Return the line of a complete call."""
        if block.kind is not Kind.CALL:
            return b""
        self._num_calls += 1
        return self._line(_said(self._field, "", "", [_call(block, self._num_calls - 1)]))

    def end(self, blocks: Sequence[Block], ending: Ending) -> bytes:
        """Return the last line."""
        return dumps(self.last(ending) | _said(self._field, "", "")) + b"\n"

    def last(self, ending: Ending) -> dict[str, Any]:
        """Return the fields of the last line, except the text. Durations are in nanoseconds.

        Without a stream, eval_duration covers the whole answer, since no first delta is known.
        """
        now = time.perf_counter_ns()
        first = self._first or self._began
        numbers = {
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": ending.num_prompt,
            "prompt_eval_duration": first - self._began,
            "eval_count": ending.num_generated,
            "eval_duration": now - first,
        }
        reason = "length" if ending.reason == "length" else "stop"
        return {"model": self._model, "created_at": _now(), "done": True, "done_reason": reason} | numbers

    def fail(self, blocks: Sequence[Block], error: ApiError) -> bytes:
        """Return the line of an error."""
        return dumps(error.body_for(OLLAMA_PATHS)) + b"\n"

    def _line(self, said: dict[str, Any]) -> bytes:
        return dumps({"model": self._model, "created_at": _now()} | said | {"done": False}) + b"\n"
