"""/v1/embeddings: a vector for each input, in OpenAI's format."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.errors import RequestError
from quire.frontend.embedding import check_dimensions, vector_of
from quire.frontend.jobs import GenerationJob
from quire.frontend.outputs import RequestOutput
from quire.frontend.request_factory import TokenizedPrompt
from quire.frontend.requests import Made
from quire.models.pooling_config import PoolingConfig
from quire.server.api.chunks import usage
from quire.server.api.conversation import conversation
from quire.server.api.service import Service, counted, listed, offload_if_large
from quire.server.http.api_error import ApiError, request_failed
from quire.server.http.sse import JsonBody, dumps
from quire.server.protocol.answers import Usage
from quire.server.protocol.embeddings import Embedding, EmbeddingRequest, InputVector

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_NUMBERS = 2**22  # in one answer: some 20 bytes each


async def embed(service: Service, request: HttpRequest, body: EmbeddingRequest) -> Response:
    """Answer a request. If one of its inputs fails, the whole answer is that error."""
    outputs = await embedded(service, request, body)
    fingerprint = await service.system_fingerprint(outputs)
    size = _num_numbers(service, body, len(outputs))
    return await offload_if_large(size, lambda: _answer(service, body, outputs, fingerprint))


async def embedded(service: Service, request: HttpRequest, body: EmbeddingRequest) -> list[RequestOutput]:
    """Compute the hidden states of a request's inputs, and return their outputs. Raises ApiError if one fails."""
    service.check_model(body.model)
    service.model.pooling.check("embeds")
    given = body.inputs()
    if given is None:
        prompt = await conversation(service, request, body.messages or (), body)
        if prompt.images is not None:
            raise ApiError("messages have an image; an embedding is of text alone", param="messages")
        return await hidden_states(service, request, body, [prompt.tokens], "messages")
    inputs = listed(given)
    size = _num_numbers(service, body, len(inputs))
    if size > MAX_NUMBERS:
        message = (
            f"input has {len(inputs)} entries, whose vectors are {size} numbers; this server gives {MAX_NUMBERS} at "
            f"a time, so send fewer, or set dimensions"
        )
        raise ApiError(message, param="input")
    return await hidden_states(service, request, body, inputs, "input")


async def hidden_states(
    service: Service, request: HttpRequest, body: Embedding, inputs: Sequence[str | list[int]], field: str
) -> list[RequestOutput]:
    """Compute the hidden states of inputs, and return their outputs. field: the name of the inputs' field.

    Raises ApiError if one fails.
    """
    prompts = (_prompt(service, f"{field} {i}", field, given, body) for i, given in enumerate(inputs))
    service.engine_client.check_room(len(inputs), field)
    return await pooled(service, request, body, prompts, sum(map(len, inputs)))


async def pooled(
    service: Service, request: HttpRequest, body: Embedding, prompts: Iterable[TokenizedPrompt], size: int
) -> list[RequestOutput]:
    """Compute the vectors of prompts, and return their outputs. size: characters or tokens of all prompts.

    Raises ApiError if one fails.
    """
    name, options = service.identity(request, "embd").name, service.options(request, body)

    def make() -> Iterator[Made]:
        for i, prompt in enumerate(prompts):
            yield service.factory.embedding(f"{name}-{i}", prompt, options)

    return await service.run(request, GenerationJob(await service.checked(request, make, size)))


def prompt_usage(outputs: Sequence[RequestOutput]) -> Usage:
    """Return the token counts of prompts after which nothing is generated."""
    num_prompt, _, num_cached = counted(outputs)
    return usage(num_prompt, 0, num_cached)


def unit_vector(
    output: RequestOutput, what: str, dimensions: int | None = None, pooling: PoolingConfig | None = None
) -> NDArray[np.float32]:
    """Return an output's vector, of length 1 unless the model's pooling does without.

    The error message calls the input by the second argument. Raises ApiError for numbers that are not finite.
    """
    return vector_of(finite(output, what), dimensions, pooling or PoolingConfig())


def finite(output: RequestOutput, what: str) -> NDArray[np.float32]:
    """Return an output's vector. Raises ApiError for numbers that are not finite in the input named `what`."""
    if output.hidden_state is None:  # the request was aborted
        raise ApiError("the client has gone")
    if not np.isfinite(output.hidden_state).all():
        raise request_failed(f"the model gave numbers that are not finite for {what}")
    return output.hidden_state


def _num_numbers(service: Service, body: EmbeddingRequest, count: int) -> int:
    """Return the total size of `count` vectors. Raises ApiError if dimensions exceed the model's hidden size."""
    try:
        check_dimensions(body.dimensions, service.model.hidden_size)
    except RequestError as error:
        raise ApiError(str(error), param="dimensions") from error
    return count * (body.dimensions or service.model.hidden_size)


def _prompt(service: Service, name: str, field: str, given: str | list[int], body: Embedding) -> TokenizedPrompt:
    """Return an input as text and token ids. Raises ApiError for one that is too long or has no token."""
    if isinstance(given, str):
        if service.model.tokenizer is None:
            raise ApiError(f"this model has no tokenizer, so {field} takes token ids only", param=field)
        if not body.cuts():
            service.check_text(given, field)
        named = body.prompt_name if isinstance(body, EmbeddingRequest) else None
        text = service.model.pooling.prompt(named) + given
        tokens = service.tokenizer.encode(text, body.add_special_tokens)
    elif isinstance(body, EmbeddingRequest) and body.prompt_name:
        raise ApiError(f"{name} has no text, so no prompt can precede it; leave prompt_name out", param="prompt_name")
    else:
        text, tokens = None, given
    size = service.model.pooling.second_offset or service.model.vocab_size
    for most, side in body.cuts():
        tokens = service.factory.kept(tokens, most, side)
    if (count := len(tokens)) == 0:
        raise ApiError(f"{name} has no token; each input needs at least one", param=field)
    check_input(service, name, field, count)
    if (wrong := next((token for token in tokens if token >= size), None)) is not None:
        raise ApiError(f"{name} has the token {wrong}; token ids of this model lie in 0..{size - 1}", param=field)
    return TokenizedPrompt(text, tokens)


def check_input(service: Service, name: str, field: str, num_tokens: int) -> None:
    """Raise ApiError for an input that is too long for the model."""
    longest = service.model.max_model_len
    if num_tokens > longest:
        message = f"{name} has {num_tokens} tokens; this model serves sequences of up to {longest}"
        raise ApiError(message, param=field, code="context_length_exceeded")


def _answer(
    service: Service, body: EmbeddingRequest, outputs: list[RequestOutput], fingerprint: str | None
) -> Response:
    """Return the vectors, encoded one by one: the encoder blocks all other threads until it returns."""
    encoded = b",".join(dumps(_vector(body, i, output, service.model.pooling)) for i, output in enumerate(outputs))
    end: dict[str, Any] = {"model": service.answering(body.model), "usage": prompt_usage(outputs)}
    end["system_fingerprint"] = fingerprint
    content = b'{"object":"list","data":[' + encoded + b"]," + dumps(end)[1:]
    return Response(content, media_type=JsonBody.media_type)


def _vector(body: EmbeddingRequest, index: int, output: RequestOutput, pooling: PoolingConfig) -> InputVector:
    vector = unit_vector(output, f"input {index}", body.dimensions, pooling)
    shown = b64encode(vector.astype("<f4").tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
    return {"object": "embedding", "index": index, "embedding": shown}
