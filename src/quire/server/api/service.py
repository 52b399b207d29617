"""Service: the shared parts of the routes, from a body's fields to a job and from a job to token counts."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.errors import BadValue, RequestError
from quire.frontend.images import check_count
from quire.frontend.jobs import GenerationJob, Job
from quire.frontend.outputs import RequestOutput
from quire.frontend.request_factory import RequestFactory, RequestOptions, TokenizedPrompt
from quire.frontend.requests import Made, seed_of
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.yes_no import is_named_reranker
from quire.models.pooling_config import PoolingConfig
from quire.request import BACKGROUND_PRIORITY, MAX_SEED, Guide, Retention, SamplingParams
from quire.sandbox.chat_template import MAX_TEMPLATES, ChatTemplate, special_tokens
from quire.sandbox.grammar import Spec, num_trials
from quire.sandbox.thinking import Thinking
from quire.server.api.derived import Derived, DerivedModels
from quire.server.api.engine_client import EngineClient
from quire.server.api.jobs import Stream
from quire.server.api.pull import Puller
from quire.server.http.access import ID, TOKENS
from quire.server.http.api_error import ApiError, api_error, deadline_passed, request_failed, shown
from quire.server.http.body import MAX_HELD_BODIES
from quire.server.http.bounded_executor import BoundedExecutor, Lane
from quire.server.http.guard import client_of
from quire.server.http.image_fetcher import ImageFetcher
from quire.server.http.sse import noticing_disconnect
from quire.server.protocol.answers import FINGERPRINT_SIZE, LOWEST_LOGPROB
from quire.server.protocol.body import Body
from quire.server.protocol.embeddings import Embedding
from quire.server.protocol.sampling import Sampling
from quire.server.protocol.tokens import TokenizerInfo
from quire.server.server_config import HttpConfig
from quire.server.tools.dialect import Dialect

if TYPE_CHECKING:  # needs the packages of an extra
    from quire.server.observability.traces import Traces

log = logging.getLogger("quire.server")

T = TypeVar("T")
MAX_LOGPROBS = 2**19  # in one request: about a hundred bytes each in memory, and the same in the answer
MAX_GRAMMARS = 64  # of one client that wait to be compiled
MAX_FETCHING = 8  # prompts whose images are fetched at a time
MAX_QUICK_GRAMMARS = 2  # threads that parse grammars and compile quick ones
MAX_LONG_TEXTS = 2  # threads that tokenize long texts
LONG_TEXT = 4096  # characters or tokens above which a text is tokenized on another thread
LINE = "batch_line"  # name, in a request's state, of the digest of the line of a batch that it answers
FINGERPRINT_HEADER = "X-System-Fingerprint"  # for protocols whose bodies have no field for it


class Identity(NamedTuple):
    """The id and the time of an answer."""

    name: str
    created: int  # seconds since 1970


@dataclass
class ServedModel:
    """The routes' view of a model, whether it runs in this process or elsewhere."""

    names: tuple[str, ...]  # for clients; answers have the first one
    tokenizer: Tokenizer | None
    tokenizer_settings: Mapping[str, Any]  # its tokenizer_config.json
    template: ChatTemplate | None
    dialect: Dialect  # the syntax of its tool calls and reasoning
    max_model_len: int  # tokens of the longest sequence
    vocab_size: int
    eos_token_ids: frozenset[int]
    hidden_size: int  # dimensions of an embedding
    root: str  # the checkpoint: a directory, or a repository's name
    default_sampling: Mapping[str, Any]  # defaults of SamplingParams for fields that a body does not set
    pooling: PoolingConfig = PoolingConfig()  # noqa: RUF009  # frozen; how a text becomes a vector
    loras: dict[str, str] = field(default_factory=dict)  # directories of adapters by name; clients see them as models


@dataclass
class Service:
    """A model, the client of its engine, and the server's resources for requests."""

    model: ServedModel
    engine_client: EngineClient
    config: HttpConfig
    traces: Traces | None = None
    puller: Puller | None = None  # None: clients may not download models
    derived: DerivedModels | None = None  # None: there is no data directory to keep them in
    fetcher: ImageFetcher | None = None  # None: clients may not give addresses of images
    draining: bool = False  # running requests are finished, further ones are not wanted
    ready_asked: float = -math.inf  # time.monotonic() of the last request of /ready
    created: int = field(default_factory=lambda: int(time.time()))
    factory: RequestFactory = field(init=False)
    compilers: BoundedExecutor = field(init=False)  # for grammars that are new or known to be slow
    _quick_grammars: BoundedExecutor = field(init=False)  # parses all grammars, and compiles those known to be quick
    _texts: BoundedExecutor = field(init=False)
    _templates: BoundedExecutor = field(init=False)
    _images: BoundedExecutor = field(init=False)
    _image_files: Lane = field(init=False)

    def __post_init__(self) -> None:
        model = self.model
        limits = (model.vocab_size, model.max_model_len, model.eos_token_ids)
        self.factory = RequestFactory(model.tokenizer, *limits, model.default_sampling, model.pooling)
        most = MAX_HELD_BODIES * self.config.max_body_size  # characters of one client that wait in each executor
        self.compilers = BoundedExecutor("grammar", num_trials(), MAX_GRAMMARS)
        self._quick_grammars = BoundedExecutor("grammar", MAX_QUICK_GRAMMARS, MAX_GRAMMARS)
        self._texts = BoundedExecutor("text", MAX_LONG_TEXTS, most)
        self._templates = BoundedExecutor("template", MAX_TEMPLATES, most)
        self._images = BoundedExecutor("image", 1, most)  # the encoder takes one after the other
        self._image_files = Lane("image files", MAX_FETCHING, most)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError if it has none."""
        if self.model.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it takes and gives token ids only", "prompt")
        return self.model.tokenizer

    def why_no_images(self) -> str | None:
        """Return the reason why no images are read; None: they are."""
        return self.factory.images if isinstance(self.factory.images, str) else None

    def tokenizer_info(self) -> TokenizerInfo:
        """Return the tokenizer's properties that a client needs to process texts as this server does, as in vLLM.

        Raises ApiError if the model has no tokenizer.
        """
        if self.model.tokenizer is None:
            raise ApiError("this model has no tokenizer, so it takes and gives token ids only", HTTPStatus.NOT_FOUND)
        shown = self.model.tokenizer_settings.get("tokenizer_class")
        found = {
            "tokenizer_class": shown if isinstance(shown, str) else "PreTrainedTokenizerFast",
            "model_max_length": self.model.max_model_len,
            **special_tokens(self.model.tokenizer_settings),
            "chat_template": None if self.model.template is None else self.model.template.source,
        }
        return cast(TokenizerInfo, found)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not served here."""
        if name and name not in self.model.names and name not in self.model.loras:
            known = ", ".join(map(repr, (*self.model.names, *self.model.loras)))
            message = f"there is no model {shown(name)} here; this server has {known}"
            raise ApiError(message, 404, param="model", code="model_not_found")

    def derived_from(self, request: HttpRequest, name: str | None) -> Derived | None:
        """Return the derived model that a client means, or None if it means one that is served."""
        if line_of(request) is not None:  # the bytes of a batch must not depend on a model that a client can replace
            return None
        if self.derived is None or not name or name in self.model.names or name in self.model.loras:
            return None
        return self.derived.find(client_of(request), name.removesuffix(":latest"))

    async def system_fingerprint(self, outputs: Sequence[RequestOutput]) -> str | None:
        """Return the fingerprint, in OpenAI's format, of the system that computed these outputs.

        Return None if it is unknown, or if several systems computed them whose bits may differ.
        """
        if any(output.is_mixed for output in outputs):
            return None
        found = {
            output.fingerprint or await self.engine_client.fingerprint(output.weights_version) for output in outputs
        }
        found = found or {await self.engine_client.fingerprint()}
        digest = found.pop() if len(found) == 1 else None
        return None if digest is None else f"fp_{digest[:FINGERPRINT_SIZE]}"

    def check_ready(self) -> None:
        """Raise ApiError (503) while the server drains or cannot serve requests."""
        self.ready_asked = time.monotonic()
        if self.draining:
            raise ApiError("the server is stopping", HTTPStatus.SERVICE_UNAVAILABLE, code="draining")
        self.engine_client.check_health()

    def says_yes_or_no(self) -> bool:
        """Return whether pairs of texts are scored by the model's yes or no, not by the cosine of embeddings."""
        how = self.config.reranker
        if self.model.pooling.labels or self.model.pooling.encodes:  # a cross-encoder, or an encoder that embeds
            return False
        return how == "yes-no" or (how == "auto" and is_named_reranker(self.model.root))

    def lora_of(self, name: str | None) -> str | None:
        """Return the adapter that a model name in a request refers to, or None for the model itself."""
        return name if name in self.model.loras and name not in self.model.names else None

    def answering(self, name: str | None) -> str:
        """Return the model's name in answers to a request with this model name."""
        return self.lora_of(name) or self.model.names[0]

    def take_in(self, request: HttpRequest, body: Body) -> None:
        """Log a body if configured, then drop its fields without effect, which would be held until the answer ends."""
        if self.config.enable_log_requests:
            # As ASCII, so that no character begins a line or controls a terminal.
            shown_body = json.dumps(body.model_dump(exclude_unset=True))
            log.info("%s %s %s", getattr(request.state, ID), request.url.path, shown_body)
        body.drop_ignored()

    # ------------------------------------------------------------------------------------------------- prompts

    async def encode(self, request: HttpRequest, text: str, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Tokenize a text."""
        function = partial(self.tokenizer.encode, text, add_special_tokens)
        return TokenizedPrompt(text, await self.run_tokenization(request, len(text), function))

    async def encode_images(self, request: HttpRequest, text: str, urls: Sequence[str]) -> TokenizedPrompt:
        """Tokenize a rendered text with a mark for each image. Raises RequestError for one that is invalid.

        urls: data URLs, and those that the fetcher's `check` accepts.
        """
        check_count(len(urls))
        client, size, files = client_of(request), len(text) + sum(map(len, urls)), dict[str, bytes]()
        if self.fetcher is not None and (addresses := [url for url in urls if not url.startswith("data:")]):
            async with self._image_files.slot(client, size):
                files = await self.fetcher.fetch(addresses)
        function = partial(self.factory.with_images, text, [files.get(url, url) for url in urls])
        return await self._images.run(client, function, size + sum(map(len, files.values())))

    async def render(self, request: HttpRequest, render: Callable[[], str], size: int) -> str:
        """Render a conversation of `size` characters. Raises RequestError if the template refuses it."""
        return await self._templates.run(client_of(request), render, size)

    def check_text(self, text: str, name: str = "prompt") -> None:
        """Raise ApiError for a text that is too long whatever its tokens are, before it is tokenized.

        Tokenizers of encoders drop spaces and read a long word as one token, so no length is too long for them.
        """
        if not self.model.pooling.writes:
            return
        longest = self.model.max_model_len * self.tokenizer.max_token_length
        if len(text) > longest:
            message = (
                f"{name} has {len(text)} characters; this model's maximum context length is "
                f"{self.model.max_model_len} tokens, which are {longest} characters at most"
            )
            raise ApiError(message, param=name, code="context_length_exceeded")

    async def run_tokenization(self, request: HttpRequest, size: int, function: Callable[[], T], copies: int = 1) -> T:
        """Run a function that processes texts or tokens: inline for short inputs, on a bounded pool for long ones.

        size: characters or tokens. copies: how often each is processed. Raises ApiError if too much work waits.
        """
        if size * copies <= LONG_TEXT:
            return function()
        return await self._texts.run(client_of(request), function, size)

    def truncate(self, prompt: TokenizedPrompt, body: Sampling, max_tokens: int | None) -> TokenizedPrompt:
        """Return the prompt, cut to its end if the body asks for truncation."""
        tokens = self.factory.truncate(prompt.tokens, body.truncate_prompt_tokens, max_tokens)
        if len(tokens) == len(prompt.tokens):
            return prompt
        if prompt.images is not None:
            message = f"truncate_prompt_tokens is {body.truncate_prompt_tokens}, and the prompt has images"
            raise ApiError(message, param="truncate_prompt_tokens")
        text = None if prompt.text is None else self.tokenizer.decode(tokens)
        return TokenizedPrompt(text, tokens)

    def check_length(self, prompt: TokenizedPrompt) -> int:
        """Return the number of tokens that fit after a prompt. Raises ApiError if none does."""
        room = self.model.max_model_len - len(prompt.tokens)
        if room < 1:
            message = (
                f"the prompt has {len(prompt.tokens)} tokens; this model's maximum context length is "
                f"{self.model.max_model_len} tokens, of which at least one must be new"
            )
            raise ApiError(message, param="prompt", code="context_length_exceeded")
        return room

    def room_for(self, prompts: Sequence[TokenizedPrompt], body: Sampling, name: str) -> int | None:
        """Return the maximum number of new tokens per prompt, from a field or the default. None: as many as fit.

        A number above the room is not an error: the text ends at the end of the context. Raises ApiError for a prompt
        without room for a single token.
        """
        for prompt in prompts:
            self.check_length(prompt)
        asked: int | None = getattr(body, name)
        if asked is not None and name in body.model_fields_set:
            return asked
        default: int | None = self.model.default_sampling.get("max_tokens", asked)
        return default

    # ------------------------------------------------------------------------------------------------- jobs

    def sampling(self, body: Sampling, **own: Any) -> SamplingParams:
        """Return the sampling parameters of a body. Raises ApiError for conflicting fields."""
        seed = None if body.seed is None else body.seed & MAX_SEED  # OpenAI's may be negative
        for name, count in (("logprobs", own.get("logprobs")), ("prompt_logprobs", body.prompt_logprobs)):
            self.check_logprobs(name, count)
        if (most := own["max_tokens"]) is not None and (body.min_tokens or 0) > most:
            message = (
                f"min_tokens is {body.min_tokens}; at most {most} tokens were asked for, so it must be in 0..{most}"
            )
            raise ApiError(message, param="min_tokens")
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        return SamplingParams(**{**self.model.default_sampling, **body.sampled(), **own}, seed=seed, logit_bias=bias)

    def check_logprobs(self, name: str, count: int | None) -> None:
        """Raise ApiError if `count` is more candidates than this server reports."""
        if count is not None and count > self.config.max_logprobs:
            message = f"{name} is {count}; this server reports at most {self.config.max_logprobs} (--max-logprobs)"
            raise ApiError(message, param=name)

    async def guide(
        self,
        request: HttpRequest,
        body: Sampling,
        tools: Callable[[], Spec] | None = None,
        thinking: Thinking | None = None,
    ) -> Guide | None:
        """Compile the grammar that the text must follow, on another thread. Raises ApiError.

        tools: makes the grammar of tool calls, if any. thinking: the reasoning that precedes the grammar's text. If the
        client disconnects meanwhile, compilation is cancelled.
        """
        name = body.grammar_field()
        if name is None:
            return None
        has_left = False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            compiling.cancel()

        compiling = asyncio.create_task(self._guide(client_of(request), body, name, tools, thinking))
        try:
            async with noticing_disconnect(request.receive, leave):
                try:
                    return await asyncio.wait_for(compiling, self.config.request_timeout)
                except asyncio.CancelledError:
                    if has_left:
                        raise ApiError("the client has gone") from None
                    raise  # this task was cancelled: a line of a batch
        except RequestError as error:
            raise ApiError(str(error), param=name) from error
        except asyncio.TimeoutError:
            raise deadline_passed(self.config.request_timeout or 0.0) from None

    async def _guide(
        self,
        client: str,
        body: Sampling,
        name: str,
        tools: Callable[[], Spec] | None,
        thinking: Thinking | None,
    ) -> Guide:
        spec, asked, is_closed = None, body.structure(), name != "response_format"
        if tools is not None:
            spec = await self._quick_grammars.run(client, tools)
        elif asked is not None and isinstance(asked.json, Mapping):  # on a thread: it may be as large as a body
            spec = await self._quick_grammars.run(client, partial(Spec.of, asked, is_closed=is_closed))
        elif asked is not None:
            spec = Spec.of(asked)
        if thinking is not None:
            spec = Spec.of_reasoning(thinking, spec)
        if spec is None:
            raise BadValue(f"{name} asks for no grammar")
        return await self.compiled(client, spec, name)

    async def compiled(self, client: str, spec: Spec, field: str) -> Guide:
        """Return the guide for a grammar from a field of the client's body.

        Raises RequestError for a grammar that cannot be followed, SandboxFailed, and ApiError (429).
        """
        grammars = self.factory.grammars()
        guide = await self._quick_grammars.run(client, partial(grammars.compile_if_quick, spec))
        if guide is not None:
            return guide
        return await self.compilers.run(client, partial(grammars.compile, spec))

    def close(self) -> None:
        """End the threads and processes that work for the routes."""
        for executor in (self.compilers, self._quick_grammars, self._texts, self._templates, self._images):
            executor.close()
        self.factory.close()
        if self.fetcher is not None:
            self.fetcher.close()
        if self.model.template is not None:
            self.model.template.close()
        if self.puller is not None:
            self.puller.close()
        if self.traces is not None:
            self.traces.close()

    def identity(self, request: HttpRequest, kind: str) -> Identity:
        """Return an unpredictable id for a request's answer, and the current time.

        Those of a line of a batch depend on the line alone, so that a batch that is resumed has the same bytes.
        """
        if (digest := line_of(request)) is not None:
            return Identity(f"{kind}-{digest}", 0)
        return Identity(new_name(kind), int(time.time()))

    def stream(self, request: HttpRequest, identity: Identity, prompts: Sequence[Made]) -> Stream:
        """Create a job that reports deltas of its prompts."""
        return Stream(prompts)

    async def requests(
        self,
        request: HttpRequest,
        body: Sampling,
        name: str,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams,
        guide: Guide | None,
        retention: Retention | None = None,
    ) -> list[Made]:
        """Return an output and the requests of its samples for each prompt. Raises ApiError if there is no room."""
        # Checked before the requests are created, since there can be very many.
        self.engine_client.check_room(len(prompts) * params.n, "prompt" if params.n == 1 else _samples_field(body))
        if (count := num_prompt_logprobs(prompts, params)) > MAX_LOGPROBS:
            message = (
                f"the request asks for {count} logprobs of its prompts; this server gives {MAX_LOGPROBS} at a "
                f"time, so ask for fewer at each position, or in several requests"
            )
            raise ApiError(message, param="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs")

        def make() -> Iterator[Made]:
            options, constraints = self.options(request, body, retention), self.factory.constraints(params)
            for i, prompt in enumerate(prompts):
                own, its = f"{name}-{i}", params
                if params.seed is None and line_of(request) is not None:
                    its = replace(params, seed=seed_of(own))
                yield self.factory.generation(own, prompt, its, options, constraints, guide)

        size = sum(len(prompt.tokens) for prompt in prompts) + sum(map(len, params.bad_words or ()))
        made = await self.checked(request, make, size + len(params.allowed_tokens), params.n)
        self.note_outputs(request, [output for output, _ in made])
        return made

    async def checked(
        self, request: HttpRequest, make: Callable[[], Iterator[Made]], size: int, copies: int = 1
    ) -> list[Made]:
        """Make requests, on another thread for long prompts. Raises RequestError at the first that could never run.

        Args:
            request: the client's request.
            make: yields the requests.
            size: number of tokens and characters that it goes through.
            copies: how often it does so.
        """

        def make_all() -> list[Made]:
            found = []
            for made in make():
                self.engine_client.check(made[1][0])  # its siblings are alike
                found.append(made)
            return found

        return await self.run_tokenization(request, size, make_all, copies)

    def options(
        self, request: HttpRequest, body: Sampling | Embedding, retention: Retention | None = None
    ) -> RequestOptions:
        """Return the options of a body's requests. Raises ApiError for a priority within a batch."""
        priority = body.priority or 0
        if line_of(request) is not None:
            if priority:
                message = f"priority is {priority}; all lines of a batch have the lowest, so leave it out"
                raise ApiError(message, param="priority")
            priority = BACKGROUND_PRIORITY
        return RequestOptions(priority, self.salt(request, body), self.lora_of(body.model), retention)

    def salt(self, request: HttpRequest, body: Sampling | Embedding) -> str:
        """Return the salt that separates this client's blocks from those of others: its key and its cache_salt."""
        client = client_of(request)
        return f"{client}:{body.cache_salt or ''}" if client or body.cache_salt else ""

    def note_outputs(self, request: HttpRequest, outputs: Sequence[RequestOutput]) -> None:
        """Register outputs whose tokens the request's access log line counts."""
        setattr(request.state, TOKENS, lambda: counted(outputs)[:2])

    async def run(self, request: HttpRequest, job: GenerationJob, grammar: str | None = None) -> list[RequestOutput]:
        """Run a job to its end. Raises the error that it ended with. grammar: the field with a grammar."""
        self.note_outputs(request, job.outputs)
        await self.engine_client.submit(job)
        await self.wait(request, job)
        for output in job.outputs:
            if line_of(request) is not None:
                output.prefix_report = None  # depends on the requests before it, and answers of batches must not
            for sample in output.outputs:
                if sample.error is not None:
                    raise request_failed(sample.error, grammar)
        return job.outputs

    async def wait(self, request: HttpRequest, job: Job) -> None:
        """Wait for the end of a job, and abort it if the client disconnects. Raises the error that it ended with."""
        async with noticing_disconnect(request.receive, lambda: self.engine_client.abort(job)):
            await job.ended.wait()
        if job.error is not None:
            raise api_error(job.error)


def _samples_field(body: Sampling) -> str:
    """Return the name of the field with the number of samples of a prompt."""
    return "n" if getattr(body, "best_of", None) is None else "best_of"


def line_of(request: HttpRequest) -> str | None:
    """Return the digest of the line of a batch that a request answers; None for a request of a client."""
    return getattr(request.state, LINE, None)


async def offload_if_large(size: int, function: Callable[[], T]) -> T:
    """Run a function, on another thread if its input is long, so that the event loop is not blocked."""
    return await asyncio.to_thread(function) if size > LONG_TEXT else function()


def with_fingerprint(answer: Response, fingerprint: str | None) -> Response:
    """Add a header with the fingerprint of the computing system, if known, and return the answer."""
    if fingerprint is not None:
        answer.headers[FINGERPRINT_HEADER] = fingerprint
    return answer


def listed(given: Any) -> list[str | list[int]]:
    """Return texts and lists of token ids as a list, also if a single one was given."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def new_name(kind: str) -> str:
    """Return an unpredictable id for an answer."""
    return f"{kind}-{uuid.uuid4().hex}"


def counted(outputs: Sequence[RequestOutput]) -> tuple[int, int, int]:
    """Return the token counts of finished outputs: of their prompts, generated, and found in the cache."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return prompt, generated, sum(output.num_cached_tokens or 0 for output in outputs)


def num_prompt_logprobs(prompts: Sequence[TokenizedPrompt], params: SamplingParams) -> int:
    """Return the number of logprobs that prompts will have."""
    count = params.prompt_logprobs
    return 0 if count is None else (count + 1) * sum(len(prompt.tokens) for prompt in prompts)


def num_logprobs(outputs: Sequence[RequestOutput]) -> int:
    """Return the number of logprobs that finished outputs have."""
    prompts = (found for output in outputs for found in output.prompt_logprobs or ())
    samples = (found for output in outputs for sample in output.outputs for found in sample.logprobs or ())
    return sum(len(found or ()) for found in prompts) + sum(map(len, samples))


def finite(logprob: float) -> float:
    """Return a logprob that JSON can represent: minus infinity, and NaN after an overflow, become LOWEST_LOGPROB."""
    return logprob if LOWEST_LOGPROB < logprob < math.inf else LOWEST_LOGPROB
