"""Ollama's routes: /api/chat and /api/generate continue a conversation or a prompt, /api/embed embeds texts.

The others describe the model.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.server.api.blocks import Block, BlockEvents, Ending, Script, read_whole
from quire.server.api.derived import Derived, DerivedModels
from quire.server.api.embeddings import embedded, unit_vector
from quire.server.api.pull import Progress
from quire.server.api.service import Service, counted, offload_if_large, with_fingerprint
from quire.server.api.streamed import StreamedAnswer
from quire.server.api.turn import Turn
from quire.server.http.api_error import OLLAMA_PATHS, ApiError, shown
from quire.server.http.guard import client_of
from quire.server.http.sse import EventStream, JsonBody, dumps, noticing_disconnect
from quire.server.protocol.answers import ChatLogprob
from quire.server.protocol.ollama import (
    CopyRequest,
    CreateRequest,
    DeleteRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaAnswer,
    OllamaCall,
    OllamaChatRequest,
    OllamaEmbeddings,
    OllamaMessage,
    OllamaModel,
    OllamaModels,
    OllamaShown,
    PullLine,
    PullRequest,
    ShowRequest,
)
from quire.server.tools.parser import Kind

LINES = "application/x-ndjson"
VERSION = "0.12.6"  # the version of Ollama whose API this is: clients check it before they use newer fields
ZERO = re.compile(r"(-?0*(0\.?|\.0)0*(ns|us|µs|ms|s|m|h)?)+")  # a duration of 0
STAYS = "The model stays loaded: this server has one model, and unloads it when it stops."
FAR = "2318-01-01T00:00:00Z"  # the expiry of a model that is never unloaded


class LinesAnswer(StreamedAnswer):
    """A stream whose events are lines of JSON."""

    media_type = LINES


class PullAnswer(EventStream):
    """The lines of a download."""

    media_type = LINES

    def failure(self, error: ApiError) -> bytes:
        """Return the line of an error."""
        return _error(error)


async def chat(service: Service, request: HttpRequest, body: OllamaChatRequest) -> Response:
    """Answer a conversation."""
    return await _answer(service, request, body, has_prompt=bool(body.messages), field="message")


async def generate(service: Service, request: HttpRequest, body: GenerateRequest) -> Response:
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
    if not has_prompt:  # in Ollama, a request to load the model, or to unload it
        model = (body.model or "").removesuffix(":latest")
        _check_model(service, request, model)
        loaded = _line(body.model or service.answering(None), is_done=True)
        is_kept = body.keep_alive is None or ZERO.fullmatch(str(body.keep_alive)) is None
        loaded["done_reason"] = "load" if is_kept else "unload"
        return JsonBody(_say(loaded, field, "" if is_kept else STAYS, ""))
    asked, prompt = body.chat(), None
    if isinstance(body, GenerateRequest) and (body.raw or service.model.template is None):
        _check_model(service, request, asked.model)
        if body.system:
            why = "raw is true" if body.raw else "the model has no chat template"
            raise ApiError(f"system cannot be used, because {why}; write it into the prompt", param="system")
        if body.images:
            raise ApiError("images need a chat template, and raw is true or the model has none", param="images")
        text = body.prompt or ""
        service.check_text(text)
        prompt = await service.encode(request, text)
    turn = await Turn.of(service, request, asked, "ollama", prompt)
    script = _Script(body.model or turn.model, field, began)
    if asked.stream:
        job = await turn.stream()
        # Lines of JSON allow no comments, so none keep the stream alive.
        lines = LinesAnswer(service.engine_client, job, BlockEvents(turn, job, script), keep_alive=0)
        return with_fingerprint(lines, turn.system_fingerprint)
    blocks, ending = await read_whole(turn)
    texts = {kind: "".join(one.text for one in blocks if one.kind is kind) for kind in Kind}
    calls = [_call(one, i) for i, one in enumerate(one for one in blocks if one.kind is Kind.CALL)]
    answer = _say(script.last(ending), field, texts[Kind.CONTENT], texts[Kind.REASONING], calls)
    if asked.logprobs:
        answer["logprobs"] = [entry for one in blocks for entry in one.logprobs]
    return with_fingerprint(JsonBody(answer), turn.system_fingerprint)


async def embed(service: Service, request: HttpRequest, body: EmbedRequest) -> Response:
    """Embed texts. Without a text, the request only asks to load the model."""
    began, asked = time.perf_counter_ns(), body.embedding()
    if (derived := service.derived_from(request, asked.model)) is not None:
        asked.model = derived["base"]
    service.check_model(asked.model)
    outputs = await embedded(service, request, asked) if body.input else []
    num_prompt = counted(outputs)[0]

    def answered() -> Response:
        vectors = [unit_vector(one, f"input {i}", asked.dimensions).tolist() for i, one in enumerate(outputs)]
        found: OllamaEmbeddings = {
            "model": body.model or service.answering(None),
            "embeddings": vectors,
            "total_duration": time.perf_counter_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": num_prompt,
        }
        return JsonBody(found)

    answer = await offload_if_large(len(outputs) * service.model.hidden_size, answered)
    return with_fingerprint(answer, await service.system_fingerprint(outputs))


async def pull(service: Service, request: HttpRequest, body: PullRequest) -> Response:
    """Download a model into the hub's cache. The server continues to serve its own."""
    if service.puller is None:
        message = (
            "clients may not download models here; a server of one model allows it with --allow-pull, and "
            "`quire pull NAME` downloads on its machine"
        )
        raise ApiError(message, HTTPStatus.FORBIDDEN, code="not_allowed")
    service.check_ready()
    model, progress = body.model or body.name, Progress()
    if not model:
        raise ApiError("model is missing; it is the name of a repository on the hub, OWNER/NAME", param="model")
    lines = service.puller.lines(client_of(request), model, progress, lambda: service.draining)

    async def parts() -> AsyncIterator[bytes]:
        try:
            async for line in lines:
                yield dumps(line) + b"\n"
        except ApiError as error:
            yield _error(error)

    if body.stream:
        return PullAnswer(parts(), progress.end)
    last: PullLine | None = None
    async with noticing_disconnect(request.receive, progress.end):
        async for line in lines:
            last = line
    return JsonBody(last)


async def create(service: Service, request: HttpRequest, body: CreateRequest) -> Response:
    """Derive a model from a served one: a name with a system prompt, first messages and default parameters."""
    derived, name = _derived(service), _own_name(service, body.model or body.name)
    if not body.from_:
        raise ApiError("from is missing; it is the name of a served model, or of a created one", param="from")
    base, parent = _source(service, request, body.from_)
    if service.model.template is None and (body.system or body.messages):
        message = f"{service.model.names[0]} has no chat template, so it takes no system prompt and no messages"
        raise ApiError(message, param="system" if body.system else "messages")
    derived.create(client_of(request), name, base, parent, body)
    last: PullLine = {"status": "success"}
    if not body.stream:
        return JsonBody(last)
    first: PullLine = {"status": "writing manifest"}
    return Response(dumps(first) + b"\n" + dumps(last) + b"\n", media_type=LINES)


def copy(service: Service, request: HttpRequest, body: CopyRequest) -> Response:
    """Give a served or a created model a further name."""
    derived, name = _derived(service), _own_name(service, body.destination)
    derived.copy(client_of(request), *_source(service, request, body.source), name)
    return Response()


def delete(service: Service, request: HttpRequest, body: DeleteRequest) -> Response:
    """Remove a created model."""
    name = (body.model or body.name or "").removesuffix(":latest")
    _derived(service).delete(client_of(request), name)
    return Response()


def _derived(service: Service) -> DerivedModels:
    if service.derived is None:
        message = "models are created in the server's data directory, and it has none; start it with --data-dir DIR"
        raise ApiError(message, HTTPStatus.FORBIDDEN, code="not_allowed")
    return service.derived


def _own_name(service: Service, given: str | None) -> str:
    """Return the name of a created model. Raises ApiError for that of a served one."""
    name = (given or "").removesuffix(":latest")
    if not name:
        raise ApiError("model is missing; it is the name of the created model", param="model")
    if name in service.model.names or name in service.model.loras:
        message = f"model is {shown(name)}, which is served here; created models have other names"
        raise ApiError(message, param="model")
    return name


def _source(service: Service, request: HttpRequest, given: str) -> tuple[str, Derived | None]:
    """Return the served model of a name, and the created one that it means, if any. Raises ApiError (404)."""
    name = given.removesuffix(":latest")
    found = service.derived_from(request, name)
    if found is not None:
        return found["base"], found
    service.check_model(name)
    return name, None


def _check_model(service: Service, request: HttpRequest, name: str | None) -> None:
    if service.derived_from(request, name) is None:
        service.check_model(name)


def tags(service: Service, request: HttpRequest) -> OllamaModels:
    """Return the answer of /api/tags: the served models, and those that the client created."""
    found = [_model(service, name) for name in (*service.model.names, *service.model.loras)]
    return {"models": [*found, *(_created(service, one) for one in _listed(service, request))]}


def _listed(service: Service, request: HttpRequest) -> list[Derived]:
    return [] if service.derived is None else service.derived.listed(client_of(request))


def running(service: Service) -> OllamaModels:
    """Return the answer of /api/ps: all served models are loaded."""
    found: OllamaModels = {"models": [_model(service, name) for name in (*service.model.names, *service.model.loras)]}
    for one in found["models"]:
        one["expires_at"], one["size_vram"], one["context_length"] = FAR, 0, service.model.max_model_len
    return found


def show(service: Service, request: HttpRequest, body: ShowRequest) -> OllamaShown:
    """Return the answer of /api/show. Raises ApiError (404) for a model that is not served here."""
    name = (body.model or body.name or "").removesuffix(":latest")
    _check_model(service, request, name)
    derived, model = service.derived_from(request, name), service.model
    able: list[Literal["completion", "embedding", "tools", "thinking"]] = ["completion"]
    if not model.pooling.writes:
        able = [] if model.pooling.labels else ["embedding"]
    if model.dialect.syntax is not None:
        able.append("tools")
    if model.dialect.reasoning is not None:
        able.append("thinking")
    about = {"context_length": model.max_model_len}
    if not model.pooling.labels:
        about["embedding_length"] = model.hidden_size
    described = _model(service, name or model.names[0]) if derived is None else _created(service, derived)
    found: OllamaShown = {
        "modelfile": "",
        "parameters": "",
        "license": "",
        "template": "" if model.template is None else model.template.source,
        "details": described["details"],
        "model_info": {"general.architecture": "quire"} | {f"quire.{key}": value for key, value in about.items()},
        "capabilities": able,
        "modified_at": described["modified_at"],
    }
    if derived is not None:
        found["parameters"] = "\n".join(_parameters(derived["parameters"]))
        found["license"], found["system"] = derived["license"], derived["system"]
        found["messages"], found["modelfile"] = derived["messages"], _modelfile(derived)
    return found


def _parameters(given: Mapping[str, Any]) -> list[str]:
    """Return parameters as lines of a name and a value; a list has a line for each value."""
    pairs = [(name, one) for name, value in given.items() for one in (value if isinstance(value, list) else [value])]
    return [f"{name} {json.dumps(one)}" for name, one in pairs]


def _modelfile(derived: Derived) -> str:
    """Return the Modelfile of a created model."""
    lines = [f"FROM {derived['base']}", *(f"PARAMETER {one}" for one in _parameters(derived["parameters"]))]
    lines += [f'SYSTEM """{derived["system"]}"""'] if derived["system"] else []
    lines += [f'MESSAGE {one["role"]} """{one.get("content") or ""}"""' for one in derived["messages"]]
    return "\n".join([*lines, ""])


def _created(service: Service, derived: Derived) -> OllamaModel:
    """Return the description of a created model."""
    found = _model(service, f"{derived['name']}:latest" if ":" not in derived["name"] else derived["name"])
    found["modified_at"] = _written(derived["created_at"])
    found["details"]["parent_model"] = derived["base"]
    return found


def _model(service: Service, name: str) -> OllamaModel:
    """Return the description of a model. Properties that are unknown here are empty or 0."""
    return {
        "name": name,
        "model": name,
        "modified_at": _written(service.created),
        "size": 0,
        "digest": sha256(name.encode(errors="surrogatepass")).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "",
            "family": "",
            "families": None,
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _error(error: ApiError) -> bytes:
    """Return the line of an error."""
    return dumps(error.body_for(OLLAMA_PATHS)) + b"\n"


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def _now() -> str:
    return _written(time.time())


def _line(model: str, *, is_done: bool) -> OllamaAnswer:
    return {"model": model, "created_at": _now(), "done": is_done}


def _say(answer: OllamaAnswer, field: str, text: str, reasoning: str, calls: Sequence[OllamaCall] = ()) -> OllamaAnswer:
    """Add a message or a response, as `field` selects, and return the answer."""
    if field == "response":
        answer["response"] = text
        if reasoning:
            answer["thinking"] = reasoning
        return answer
    message: OllamaMessage = {"role": "assistant", "content": text}
    answer["message"] = message
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return answer


def _call(block: Block, number: int) -> OllamaCall:
    """Return a call. number: its index in the answer. Incomplete arguments are shown as text."""
    given = block.arguments()
    arguments = {"": block.text} if given is None else given
    return {"id": block.call_id, "function": {"index": number, "name": block.name, "arguments": arguments}}


class _Script(Script):
    """Writes the lines of a stream: a line for each delta. A call is one line, when it is complete."""

    def __init__(self, model: str, field: str, began: int) -> None:
        """Create it. began: time.perf_counter_ns() when the request arrived."""
        self._model = model
        self._field = field
        self._began = began
        self._num_calls = 0
        self._first: int | None = None  # time of the first delta

    def grow(self, block: Block, text: str, logprobs: list[ChatLogprob]) -> bytes:
        """Return a line with text or reasoning."""
        self._first = self._first or time.perf_counter_ns()
        if block.kind is Kind.CALL:
            return b""
        is_said = block.kind is Kind.CONTENT
        line = self._line(text if is_said else "", "" if is_said else text)
        if logprobs:
            line["logprobs"] = logprobs
        return dumps(line) + b"\n"

    def close(self, block: Block) -> bytes:
        """Return the line of a complete call."""
        if block.kind is not Kind.CALL:
            return b""
        self._num_calls += 1
        return dumps(self._line("", "", [_call(block, self._num_calls - 1)])) + b"\n"

    def end(self, blocks: Sequence[Block], ending: Ending) -> bytes:
        """Return the last line."""
        return dumps(_say(self.last(ending), self._field, "", "")) + b"\n"

    def last(self, ending: Ending) -> OllamaAnswer:
        """Return the last line, without its text. Durations are in nanoseconds.

        Without a stream, eval_duration covers the whole answer, since no first delta is known.
        """
        now = time.perf_counter_ns()
        first = self._first or self._began
        return {
            **_line(self._model, is_done=True),
            "done_reason": "length" if ending.reason == "length" else "stop",
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": ending.num_prompt,
            "prompt_eval_duration": first - self._began,
            "eval_count": ending.num_generated,
            "eval_duration": now - first,
        }

    def fail(self, blocks: Sequence[Block], error: ApiError) -> bytes:
        """Return the line of an error."""
        return _error(error)

    def _line(self, text: str, reasoning: str, calls: Sequence[OllamaCall] = ()) -> OllamaAnswer:
        return _say(_line(self._model, is_done=False), self._field, text, reasoning, calls)
