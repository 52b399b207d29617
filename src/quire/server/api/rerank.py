"""/v1/rerank and /v1/score: scores of documents for a query, in the format of Jina, Cohere and vLLM.

An embedding model scores a pair by the cosine of the two embeddings. A cross-encoder reads both texts together. A model
that was trained to answer yes or no to a query and a document, such as Qwen3-Reranker, scores it by the probability of
its yes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.errors import RequestError
from quire.frontend.embedding import cosine, scores_of
from quire.frontend.jobs import GenerationJob
from quire.frontend.outputs import RequestOutput
from quire.frontend.request_factory import TokenizedPrompt
from quire.frontend.requests import Made
from quire.frontend.yes_no import ANSWERS, INSTRUCTION, QUESTION, answer_token, drawn, logprob, probability
from quire.server.api.embeddings import check_input, finite, hidden_states, pooled, prompt_usage, unit_vector
from quire.server.api.service import Service, offload_if_large
from quire.server.http.api_error import ApiError, request_failed
from quire.server.http.sse import JsonBody
from quire.server.protocol.rerank import Numbers, Ranked, Reranked, RerankRequest, Score, Scored, ScoreRequest


class Scores(NamedTuple):
    """A score for each pair."""

    scores: list[float]
    numbers: Numbers


async def rerank(service: Service, request: HttpRequest, body: RerankRequest) -> Response:
    """Return the best documents of a query, best first; equal ones keep their order."""
    service.check_model(body.model)
    documents = body.texts()
    found = await _scores(service, request, body, [body.query], documents, ("query", "documents"))
    order = sorted(range(len(documents)), key=lambda i: -found.scores[i])[: body.top_n or None]
    results: list[Ranked] = [{"index": i, "relevance_score": found.scores[i]} for i in order]
    if body.return_documents:
        for one in results:
            one["document"] = {"text": documents[one["index"]]}
    name = service.identity(request, "rerank").name
    return JsonBody(Reranked(id=name, model=service.answering(body.model), **found.numbers, results=results))


async def score(service: Service, request: HttpRequest, body: ScoreRequest) -> Response:
    """Return a score for each pair of texts."""
    service.check_model(body.model)
    firsts, seconds = body.pairs()
    fields = ("text_1", "text_2") if body.text_1 is not None else ("queries", "documents")
    found = await _scores(service, request, body, firsts, seconds, fields)
    name, created = service.identity(request, "score")
    data: list[Score] = [{"index": i, "object": "score", "score": one} for i, one in enumerate(found.scores)]
    model = service.answering(body.model)
    return JsonBody(Scored(id=name, object="list", created=created, model=model, data=data, **found.numbers))


async def _scores(
    service: Service,
    request: HttpRequest,
    body: RerankRequest | ScoreRequest,
    firsts: Sequence[str],
    seconds: Sequence[str],
    fields: tuple[str, str],
) -> Scores:
    """Return the scores of pairs of a first and a second text. fields: the names of the texts' fields."""
    if service.says_yes_or_no():
        pairs = [(firsts[0] if len(firsts) == 1 else firsts[i], second) for i, second in enumerate(seconds)]
        return await _by_answers(service, request, body, pairs, fields[1])
    if body.instruction:
        message = "this model takes no instruction; write it into the query"
        raise ApiError(message, param="instruction")
    if service.model.pooling.labels:
        pairs = [(firsts[0] if len(firsts) == 1 else firsts[i], second) for i, second in enumerate(seconds)]
        return await _read_together(service, request, body, pairs, fields[1])
    outputs = [
        output
        for field, texts in zip(fields, (firsts, seconds), strict=True)
        for output in await hidden_states(service, request, body, texts, field)
    ]

    def read() -> list[float]:
        vectors = [unit_vector(output, f"text {i}").tolist() for i, output in enumerate(outputs)]
        first, second = vectors[: len(firsts)], vectors[len(firsts) :]
        pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
        return [cosine(one, other) for one, other in pairs]

    scores = await offload_if_large(len(outputs) * service.model.hidden_size, read)
    return Scores(scores, await _numbers(service, outputs))


async def _read_together(
    service: Service,
    request: HttpRequest,
    body: RerankRequest | ScoreRequest,
    pairs: Sequence[tuple[str, str]],
    field: str,
) -> Scores:
    """Score pairs by a cross-encoder, which reads both texts of a pair together."""
    pooling = service.model.pooling
    pooling.check_pairs()
    if not body.add_special_tokens:
        message = "this model needs the special tokens between two texts; leave it out"
        raise ApiError(message, param="add_special_tokens")
    service.engine_client.check_room(len(pairs), field)

    def encode() -> list[TokenizedPrompt]:
        return [service.factory.tokenize_pair(*pair, body.truncate_prompt_tokens) for pair in pairs]

    size = sum(len(text) for pair in pairs for text in pair)
    prompts = await service.run_tokenization(request, size, encode)
    for i, prompt in enumerate(prompts):
        check_input(service, f"pair {i}", field, len(prompt.tokens))
    outputs = await pooled(service, request, body, prompts, size)
    scores = [scores_of(finite(output, f"pair {i}"), pooling.activation)[0] for i, output in enumerate(outputs)]
    return Scores(scores, await _numbers(service, outputs))


async def _by_answers(
    service: Service,
    request: HttpRequest,
    body: RerankRequest | ScoreRequest,
    pairs: Sequence[tuple[str, str]],
    field: str,
) -> Scores:
    """Score pairs by the probability of yes, given that the answer is yes or no."""
    if body.truncate_prompt_tokens is not None:
        message = "the question of this model cannot be cut; leave it out, and send shorter texts"
        raise ApiError(message, param="truncate_prompt_tokens")
    if not body.add_special_tokens:
        message = "the question of this model needs the special tokens of its training; leave it out"
        raise ApiError(message, param="add_special_tokens")
    service.engine_client.check_room(len(pairs), field)
    tokens = [_answer_token(service, answer) for answer in ANSWERS]
    instruction = body.instruction or INSTRUCTION
    questions = [QUESTION.format(instruction, *pair) for pair in pairs]
    for question in questions:
        service.check_text(question, field)

    def encode() -> list[TokenizedPrompt]:
        encoded = (service.tokenizer.encode_form(QUESTION.split("{}"), (instruction, *pair)) for pair in pairs)
        return [TokenizedPrompt(question, tokens) for question, tokens in zip(questions, encoded, strict=True)]

    prompts = await service.run_tokenization(request, sum(map(len, questions)), encode)
    for prompt in prompts:
        service.check_length(prompt)
    yes = await _drawn(service, request, body, prompts, tokens[0])
    no = await _drawn(service, request, body, prompts, tokens[1])  # finds the prompts in the prefix cache
    pairs_of = zip(yes, no, strict=True)
    return Scores(
        [probability(_logprob(one), _logprob(other)) for one, other in pairs_of], await _numbers(service, yes)
    )


async def _numbers(service: Service, outputs: Sequence[RequestOutput]) -> Numbers:
    return {"usage": prompt_usage(outputs), "system_fingerprint": await service.system_fingerprint(outputs)}


def _answer_token(service: Service, answer: str) -> int:
    try:
        return answer_token(service.tokenizer, answer)
    except RequestError as error:
        raise ApiError(f"{error}; start the server with --reranker similarity") from error


async def _drawn(
    service: Service,
    request: HttpRequest,
    body: RerankRequest | ScoreRequest,
    prompts: Sequence[TokenizedPrompt],
    token: int,
) -> list[RequestOutput]:
    """Generate the given token after each prompt, and return the outputs with its logprob from the raw logits."""
    params = drawn(token)
    name = service.identity(request, "rerank").name
    options, constraints = service.options(request, body), service.factory.constraints(params)

    def make() -> Iterator[Made]:
        for i, prompt in enumerate(prompts):
            yield service.factory.generation(f"{name}-{token}-{i}", prompt, params, options, constraints)

    size = sum(len(prompt.tokens) for prompt in prompts)
    return await service.run(request, GenerationJob(await service.checked(request, make, size)))


def _logprob(output: RequestOutput) -> float:
    if not output.outputs[0].logprobs:  # the request was aborted
        raise ApiError("the client has gone")
    found = logprob(output)
    if not math.isfinite(found):
        raise request_failed(f"the model gave numbers that are not finite for {output.request_id}")
    return found
