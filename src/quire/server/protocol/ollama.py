"""The bodies of Ollama's routes, their conversion to OpenAI's, and the answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import NotRequired

from quire.sandbox.grammar import closed
from quire.server.http.api_error import Answer
from quire.server.http.body import model_of
from quire.server.protocol.answers import ChatLogprob
from quire.server.protocol.body import (
    IGNORED,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOKEN,
    Body,
    GivenName,
    Ignored,
    ImageData,
    Name,
    Number,
    Off,
    On,
    Refused,
    Role,
    Text,
)
from quire.server.protocol.chat import MAX_CALLS, MAX_TOOLS, NO_TEMPLATE, ChatRequest, FunctionTool, image_part
from quire.server.protocol.embeddings import EmbeddingRequest
from quire.server.protocol.llama import CALLED, LlamaOptions

NO_WEIGHTS = "a created model is a name with a system prompt and parameters, and has the weights of a served one"


class Options(LlamaOptions):
    """Sampling options. Options for loading and computing the model in Ollama are ignored."""

    num_predict: int | None = None  # below 0: as many as there is room for

    num_ctx: Ignored[int] = None  # each sequence gets the memory that it needs
    num_batch: Ignored[int] = None
    num_gpu: Ignored[int] = None
    num_gqa: Ignored[int] = None
    num_keep: Ignored[int] = None
    num_thread: Ignored[int] = None
    main_gpu: Ignored[int] = None
    draft_num_predict: Ignored[int] = None
    embedding_only: Ignored[bool] = None
    f16_kv: Ignored[bool] = None
    logits_all: Ignored[bool] = None
    low_vram: Ignored[bool] = None
    numa: Ignored[bool] = None
    rope_frequency_base: Ignored[Number] = None
    rope_frequency_scale: Ignored[Number] = None
    use_mlock: Ignored[bool] = None
    use_mmap: Ignored[bool] = None
    vocab_only: Ignored[bool] = None

    penalize_newline: Annotated[
        bool | None, Refused("penalties are for all tokens alike", True, refuses_empty=True)
    ] = None

    def drawn(self) -> dict[str, Any]:
        """Return the options by their names in a chat request."""
        found = super().drawn()
        if found.get("max_tokens", 1) < 0:
            del found["max_tokens"]
        return found


class Shared(Body):
    """The fields shared by /api/chat and /api/generate."""

    model: Name | None = None
    stream: On = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: Off = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    keep_alive: float | Name | None = None  # 0 without a prompt is a request to unload the model
    truncate: Ignored[bool] = None  # a prompt that is too long is an error
    shift: Ignored[bool] = None

    ALSO_CALLED: ClassVar[dict[str, str]] = {name: f"options.{name}" for name in CALLED} | {
        "max_tokens": "options.num_predict",
        "response_format": "format",
    }

    def chat_of(self, messages: list[dict[str, Any]], **more: Any) -> ChatRequest:
        """Build a chat request from messages and the shared fields.

        Raises RequestValidationError, with a chat's names.
        """
        asked: dict[str, Any] = {
            "model": None if self.model is None else self.model.removesuffix(":latest"),
            "messages": messages,
            "stream": self.stream,
            "logprobs": self.logprobs or bool(self.top_logprobs),
            "top_logprobs": self.top_logprobs,
        }
        if self.format == "json":
            asked["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):  # an empty schema counts: it allows any JSON
            schema = closed(self.format)
            asked["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        if isinstance(self.think, str):
            asked["reasoning_effort"] = self.think
        elif self.think is not None:
            asked["chat_template_kwargs"] = {"enable_thinking": self.think}
        asked |= more | (self.options or Options()).drawn()
        return model_of({name: one for name, one in asked.items() if one is not None}, ChatRequest)


class PastFunction(Body):
    """The function that a past message called."""

    name: GivenName
    arguments: dict[str, Any]
    description: Ignored[Text] = None
    index: Ignored[int] = None


class PastCall(Body):
    """A call in an assistant's message."""

    id: Name | None = None
    type: Literal["function"] | None = None
    function: PastFunction


Images = Annotated[list[ImageData], Field(max_length=MAX_MESSAGES, fail_fast=True)]  # in base64


class PastMessage(Body):
    """A message of a conversation."""

    role: Role
    content: Text | None = None
    thinking: Text | None = None
    images: Images | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None


class OfferedTool(Body):
    """A tool. Functions are the only kind."""

    type: Literal["function"] | None = None
    function: FunctionTool


class OllamaChatRequest(Shared):
    """The body of /api/chat."""

    messages: Annotated[list[PastMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request."""
        tools = [{"type": "function", "function": tool.function.model_dump()} for tool in self.tools or ()]
        return self.chat_of(_named(self.messages or []), tools=tools or None)


class GenerateRequest(Shared):
    """The body of /api/generate."""

    prompt: Text | None = None
    system: Text | None = None
    raw: Off = False  # True: the model continues the prompt itself, without a chat template
    context: Annotated[
        list[Any] | None, Refused("nothing is stored here; send the whole conversation to /api/chat")
    ] = None
    images: Images | None = None
    suffix: Annotated[str | None, Refused("/v1/completions fills in text before a suffix")] = None
    template: Annotated[str | None, NO_TEMPLATE] = None

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat_of([*system, {"role": "user", "content": _content(self.prompt, self.images)}])


class EmbedRequest(Body):
    """The body of /api/embed."""

    model: Name | None = None
    input: Text | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    truncate: On = True  # cut the end of a text that is too long
    dimensions: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None  # 0: all
    options: Ignored[Options] = None  # nothing is sampled
    keep_alive: Annotated[Any, IGNORED] = None

    ALSO_CALLED: ClassVar[dict[str, str]] = {"prompt": "input"}

    def embedding(self) -> EmbeddingRequest:
        """Return the equivalent request for embeddings."""
        asked = {
            "model": None if self.model is None else self.model.removesuffix(":latest"),
            "input": self.input,
            "truncate": "END" if self.truncate else None,
            "dimensions": self.dimensions or None,
        }
        return model_of(asked, EmbeddingRequest)


class PullRequest(Body):
    """The body of /api/pull."""

    model: Name | None = None
    name: Name | None = None  # an older name of `model`
    stream: On = True
    insecure: Ignored[bool] = None


class CreateRequest(Body):
    """The body of /api/create."""

    model: Name | None = None
    name: Name | None = None  # an older name of `model`
    from_: Annotated[Name | None, Field(alias="from")] = None
    system: Text | None = None
    parameters: Options | None = None
    license: Text | list[Text] | None = None
    messages: Annotated[list[PastMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    stream: On = True
    template: Annotated[str | None, NO_TEMPLATE] = None
    quantize: Annotated[str | None, Refused(NO_WEIGHTS)] = None
    files: Annotated[dict[str, Any] | None, Refused(NO_WEIGHTS)] = None
    adapters: Annotated[dict[str, Any] | None, Refused(NO_WEIGHTS)] = None
    modelfile: Annotated[str | None, Refused("give its parts: from, system, parameters, messages")] = None
    path: Annotated[str | None, Refused("give the parts of the Modelfile: from, system, parameters, messages")] = None

    def options(self) -> dict[str, Any]:
        """Return the parameters that were given, by Ollama's names."""
        return {} if self.parameters is None else self.parameters.model_dump(exclude_none=True)


class CopyRequest(Body):
    """The body of /api/copy."""

    source: GivenName
    destination: GivenName


class DeleteRequest(Body):
    """The body of /api/delete."""

    model: Name | None = None
    name: Name | None = None  # an older name of `model`


class ShowRequest(Body):
    """The body of /api/show."""

    model: Name | None = None
    name: Name | None = None  # an older name of `model`
    verbose: Ignored[bool] = None
    system: Ignored[Text] = None


def _content(text: str | None, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Return the content of a chat's message: the images, and the text after them."""
    if not images:
        return text or ""
    return [*(image_part(f"data:;base64,{image}") for image in images), {"type": "text", "text": text or ""}]


def _named(messages: list[PastMessage]) -> list[dict[str, Any]]:
    """Convert messages to those of a chat request, where calls have ids and results name their call.

    In Ollama's messages, results come in the order of the calls.
    """
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # ids and names
    for i, message in enumerate(messages):
        one: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call_{i}_{j}" for j, call in enumerate(message.tool_calls)]
            open_calls = [(name, call.function.name) for name, call in zip(ids, message.tool_calls, strict=True)]
            functions = [call.function.model_dump(include={"name", "arguments"}) for call in message.tool_calls]
            calls = zip(ids, functions, strict=True)
            one["tool_calls"] = [{"id": name, "type": "function", "function": function} for name, function in calls]
        if message.role == "tool":
            one["tool_call_id"] = _answered(open_calls, message, i)
        if message.tool_name:
            one["name"] = message.tool_name
        found.append(one)
    return found


def _answered(open_calls: list[tuple[str, str]], result: PastMessage, place: int) -> str:
    """Return the id of a result's call: the id it names, else the first open call of its function, or of any.

    The call is removed from the open calls.
    """
    given, name = result.tool_call_id, result.tool_name
    found = next((call for call in open_calls if (call[0] == given if given else name in (None, call[1]))), None)
    if found is not None:
        open_calls.remove(found)
    return given or (f"call_{place}" if found is None else found[0])


class OllamaFunction(Answer):
    """The called function and its arguments."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Answer):
    """A tool call."""

    id: str
    function: OllamaFunction


class OllamaMessage(Answer):
    """A message of the model: its text, reasoning and calls."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class OllamaAnswer(Answer):
    """The answer of /api/chat, with a message, or of /api/generate, with a response; or a line of a stream."""

    model: str
    created_at: str
    message: NotRequired[OllamaMessage]
    response: NotRequired[str]
    thinking: NotRequired[str]  # of a response
    logprobs: NotRequired[list[ChatLogprob]]
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]  # nanoseconds
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaEmbeddings(Answer):
    """The answer of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class OllamaDetails(Answer):
    """Details of a model that are unknown here."""

    parent_model: str
    format: str
    family: str
    families: list[str] | None
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    """A model that is served."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: NotRequired[str]
    size_vram: NotRequired[int]
    context_length: NotRequired[int]


class OllamaModels(Answer):
    """The answer of /api/tags and /api/ps."""

    models: list[OllamaModel]


class PullLine(Answer):
    """The state of a download, in bytes."""

    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]


class OllamaShown(Answer):
    """The answer of /api/show."""

    modelfile: str
    parameters: str
    license: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    system: NotRequired[str]
    messages: NotRequired[list[dict[str, Any]]]
    capabilities: list[Literal["completion", "embedding", "tools", "thinking"]]
    modified_at: str
