"""Turn: the next answer of a conversation, from a chat's body to a job. All routes with messages share it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest

from quire.frontend.jobs import GenerationJob
from quire.frontend.outputs import RequestOutput
from quire.frontend.request_factory import TokenizedPrompt
from quire.frontend.requests import Made
from quire.request import Miss, Retention, SamplingParams
from quire.server.api.answers import Reading
from quire.server.api.completions import check_num_logprobs
from quire.server.api.conversation import conversation, said
from quire.server.api.derived import apply
from quire.server.api.jobs import Stream
from quire.server.api.service import Identity, Service
from quire.server.protocol.chat import ChatRequest


async def prompt_of(service: Service, request: HttpRequest, body: ChatRequest) -> TokenizedPrompt:
    """Render and tokenize a body's messages. Raises ApiError."""
    if not body.may_call():
        body.tools = None  # the prompt must not show tools that the model may not call
    return await conversation(service, request, body.messages, body, _variables(body))


def _variables(body: ChatRequest) -> dict[str, Any]:
    """Return the template variables that follow from the request's own fields."""
    if not body.reasoning_effort:
        return {}
    quiet = {"enable_thinking": False} if body.reasoning_effort == "none" else {}
    return {"reasoning_effort": body.reasoning_effort} | quiet


@dataclass
class Turn:
    """The answers of one request, before they are computed."""

    service: Service
    request: HttpRequest
    body: ChatRequest
    identity: Identity
    prompt: TokenizedPrompt
    max_tokens: int | None
    reading: Reading
    retention: Retention | None
    named: str | None = None  # the derived model that was asked for
    system_fingerprint: str | None = None  # set when the job is submitted (stream) or has ended (run)

    @classmethod
    async def of(
        cls, service: Service, request: HttpRequest, body: ChatRequest, kind: str, prompt: TokenizedPrompt | None = None
    ) -> Turn:
        """Create the turn of a chat's body. kind: prefix of its name. prompt: replaces the rendered messages.

        Raises ApiError if it cannot be served.
        """
        if (derived := service.derived_from(request, body.model)) is not None:
            apply(derived, body)
        service.check_model(body.model)
        service.model.pooling.check_writes()
        body.check_together()
        retention = body.retention()
        prompt = prompt or await prompt_of(service, request, body)
        continued = said(body.messages[-1]) if body.continue_final_message else None
        body.messages.clear()  # many small parts take several times the memory of the rendered text
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        prompt = service.truncate(prompt, body, body.max_completion_tokens or body.max_tokens)
        max_tokens = service.room_for([prompt], body, field)
        identity = service.identity(request, kind)
        service.check_logprobs("top_logprobs", body.top_logprobs)
        reading = Reading(service, body, identity.name, prompt, continued)
        named = None if derived is None else derived["name"]
        return cls(service, request, body, identity, prompt, max_tokens, reading, retention, named)

    @property
    def model(self) -> str:
        """The name of the model in the answer."""
        return self.named or self.service.answering(self.body.model)

    async def stream(self) -> Stream:
        """Submit a job that reports deltas, and return it."""
        job = self.service.stream(self.request, self.identity, await self._requests())
        await self.service.engine_client.submit(job)
        self.system_fingerprint = await self.service.system_fingerprint(job.outputs)
        return job

    async def run(self) -> RequestOutput:
        """Compute the answers to their ends. Raises ApiError if one of them fails."""
        made = await self._requests()
        [output] = await self.service.run(self.request, GenerationJob(made), self.body.grammar_field())
        self.system_fingerprint = await self.service.system_fingerprint([output])
        return output

    def num_kept(self, output: RequestOutput) -> int:
        """Return the number of prompt tokens that were computed, and are kept in the cache as the request asks."""
        report = output.prefix_report
        if self.retention is None or report is None or report.miss is Miss.DISABLED:
            return 0
        return report.num_prompt // report.block_size * report.block_size - report.num_cached

    async def _requests(self) -> list[Made]:
        params, body = self._params(), self.body
        if self.reading.is_plain:
            guide = await self.service.guide(self.request, body)
        else:  # the syntax of calls and reasoning may consist of special tokens
            params = replace(params, skip_special_tokens=False)
            guide = await self.service.guide(self.request, body, self.reading.tools, self.reading.thinking)
        return await self.service.requests(
            self.request, body, self.identity.name, [self.prompt], params, guide, self.retention
        )

    def _params(self) -> SamplingParams:
        body, service = self.body, self.service
        count = body.top_logprobs or 0
        params = service.sampling(body, max_tokens=self.max_tokens, logprobs=count if body.logprobs else None)
        check_num_logprobs(service, [self.prompt], params, "top_logprobs" if count else "logprobs")
        return params
