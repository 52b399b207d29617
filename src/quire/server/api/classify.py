"""/v1/classify: the scores of a classifier's labels for each input, in vLLM's format."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.frontend.embedding import classification_output
from quire.server.api.embeddings import finite, hidden_states, prompt_usage
from quire.server.api.service import Service, listed
from quire.server.http.sse import JsonBody
from quire.server.protocol.classify import Class, Classified, ClassifyRequest


async def classify(service: Service, request: HttpRequest, body: ClassifyRequest) -> Response:
    """Answer a request. If one of its inputs fails, the whole answer is that error."""
    service.check_model(body.model)
    pooling = service.model.pooling
    pooling.check("classifies")
    outputs = await hidden_states(service, request, body, listed(body.input), "input")
    data: list[Class] = []
    for i, output in enumerate(outputs):
        finite(output, f"input {i}")
        found = classification_output(output, pooling).outputs
        data.append({"index": i, "label": found.label, "probs": found.probs, "num_classes": len(found.probs)})
    name, created = service.identity(request, "classify")
    answer = Classified(
        id=name,
        object="list",
        created=created,
        model=service.answering(body.model),
        data=data,
        usage=prompt_usage(outputs),
        system_fingerprint=await service.system_fingerprint(outputs),
    )
    return JsonBody(answer)
