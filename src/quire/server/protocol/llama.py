"""The bodies of llama-server's own routes, and their answers. Ollama has the same names of sampling options."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, RootModel, with_config
from typing_extensions import TypedDict

from quire.request import OLLAMA, served_in
from quire.server.http.api_error import Answer, ApiError
from quire.server.http.body import model_of
from quire.server.protocol.answers import ChatLogprob, TopLogprob
from quire.server.protocol.body import (
    MAX_TOKEN,
    Body,
    Grammar,
    Ignored,
    Name,
    Number,
    Off,
    Refused,
    Text,
    Tokens,
)
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.sampling import MAX_BIASED, numbers_of

# Their names of options, and the names of the same fields in OpenAI's bodies.
CALLED = served_in(OLLAMA)
OTHER_SAMPLING = "this way of drawing tokens is not served; temperature, top_k, top_p and min_p are"
RANDOM_SEEDS = (-1, 2**32 - 1)  # request any seed
BANNED = -100.0  # the bias of a token that is never drawn
MAX_EXTRA = 1024  # texts before those to fill in


@numbers_of(OLLAMA)
class LlamaOptions(Body):
    """Sampling options that Ollama and llama-server share."""

    stop: Text | list[Text] | None = None
    seed: int | None = None

    mirostat: Annotated[int | None, Refused(OTHER_SAMPLING)] = None
    mirostat_eta: Ignored[Number] = None  # without effect while mirostat is 0
    mirostat_tau: Ignored[Number] = None
    # 64 is the default there, -1 the whole text. 0, no penalties at all, is honoured.
    repeat_last_n: Annotated[int | None, Refused("penalties are over the whole text", 64, -1)] = None
    tfs_z: Annotated[Number | None, Refused(OTHER_SAMPLING, 1)] = None
    typical_p: Annotated[Number | None, Refused(OTHER_SAMPLING, 1)] = None

    def drawn(self) -> dict[str, Any]:
        """Return the options by their names in OpenAI's bodies."""
        found = {own: one for name, own in CALLED.items() if (one := getattr(self, name, None)) is not None}
        if found.get("seed") in RANDOM_SEEDS:
            del found["seed"]
        if self.repeat_last_n == 0:
            found |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return found


class LlamaRequest(LlamaOptions):
    """The body of /completion, without its prompt."""

    model: Name | None = None
    n_predict: Annotated[int, Field(ge=-2, le=MAX_TOKEN)] | None = None  # below 0: as many as there is room for
    stream: Off = False
    ignore_eos: Off = False
    grammar: Grammar | None = None
    json_schema: dict[str, Any] | None = None
    # pairs of a token and its bias; false instead of a number: never
    logit_bias: (
        Annotated[list[Annotated[list[Any], Field(min_length=2, max_length=2)]], Field(max_length=MAX_BIASED)]
        | dict[Name, Number]
        | None
    ) = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    return_tokens: Off = False
    timings_per_token: Off = False
    response_fields: Annotated[list[Name], Field(max_length=64)] | None = None  # keep only these; "a/b" is b in a

    cache_prompt: Ignored[bool] = None  # the prefix cache belongs to all requests
    id_slot: Ignored[int] = None
    n_cache_reuse: Ignored[int] = None
    n_discard: Ignored[int] = None
    n_indent: Ignored[int] = None
    n_keep: Ignored[int] = None  # no part of a prompt is dropped
    return_progress: Ignored[bool] = None
    samplers: Ignored[list[Any]] = None  # the order is always the same
    sse_ping_interval: Ignored[int] = None
    t_max_predict_ms: Ignored[int] = None
    t_max_prompt_ms: Ignored[int] = None
    dry_allowed_length: Ignored[int] = None  # without effect while dry_multiplier is 0; so are the next ones
    dry_base: Ignored[Number] = None
    dry_penalty_last_n: Ignored[int] = None
    dry_sequence_breakers: Ignored[list[Any]] = None
    dynatemp_exponent: Ignored[Number] = None
    xtc_threshold: Ignored[Number] = None

    dry_multiplier: Annotated[Number | None, Refused(OTHER_SAMPLING)] = None
    dynatemp_range: Annotated[Number | None, Refused(OTHER_SAMPLING)] = None
    image_data: Annotated[list[Any] | None, Refused("an image is a part of a chat's message, of type 'image_url'")] = (
        None
    )
    lora: Annotated[list[Any] | None, Refused("an adapter is chosen by model, by its name")] = None
    min_keep: Annotated[int | None, Refused(OTHER_SAMPLING, 1)] = None
    n_cmpl: Annotated[int | None, Refused("/v1/completions takes n", 1)] = None
    post_sampling_probs: Annotated[bool | None, Refused("logprobs are those before sampling")] = None
    top_n_sigma: Annotated[Number | None, Refused(OTHER_SAMPLING, -1)] = None
    xtc_probability: Annotated[Number | None, Refused(OTHER_SAMPLING)] = None

    ALSO_CALLED: ClassVar[dict[str, str]] = {
        "max_tokens": "n_predict",
        "repetition_penalty": "repeat_penalty",
        "response_format": "json_schema",
        "suffix": "input_suffix of /infill",
        "system_prompt": "/v1/chat/completions, or write it into the prompt",
    }

    def completion(self) -> CompletionRequest:
        """Return the equivalent completion, without its prompt. Raises RequestValidationError, with its names."""
        asked = {
            "model": self.model,
            "prompt": "",
            "max_tokens": None if (self.n_predict or 0) < 0 else self.n_predict,
            "ignore_eos": self.ignore_eos,
            "grammar": self.grammar,
            "guided_json": self.json_schema,
            "logit_bias": _bias(self.logit_bias),
            "logprobs": self.n_probs or None,
        }
        return model_of(asked | self.drawn(), CompletionRequest)


def _bias(given: list[list[Any]] | dict[str, float] | None) -> dict[str, Any] | None:
    """Return biases by token id, as OpenAI has them. Raises ApiError for a token that is given by its text."""
    found: dict[str, Any] = {}
    for token, bias in given.items() if isinstance(given, dict) else given or ():
        if isinstance(token, str) and not isinstance(given, dict):
            message = f"logit_bias has the token {token!r}; give its id, which /tokenize returns"
            raise ApiError(message, param="logit_bias")
        found[str(token)] = BANNED if bias is False else bias
    return found or None


def _check_one_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt):
        raise ValueError("/completion continues one prompt, a text or token ids; /v1/completions continues several")
    return prompt


class LlamaCompletionRequest(LlamaRequest):
    """The body of /completion."""

    prompt: Annotated[Text | Tokens, BeforeValidator(_check_one_prompt)]


class ExtraText(Body):
    """A text of another file, as context."""

    filename: Name | None = None
    text: Text


class InfillRequest(LlamaRequest):
    """The body of /infill."""

    input_prefix: Text | None = None
    input_suffix: Text | None = None
    input_extra: Annotated[list[ExtraText], Field(max_length=MAX_EXTRA, fail_fast=True)] | None = None
    prompt: Text | None = None  # continues the prefix


class TopProbability(TopLogprob):
    """A candidate token, with its id."""

    id: int


class TokenProbability(ChatLogprob):
    """A generated token, with the most probable tokens at its position."""

    id: int


class Timings(Answer):
    """Token counts and durations."""

    cache_n: int  # prompt tokens that were cached
    prompt_n: int  # prompt tokens that were computed
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


@with_config(ConfigDict(extra="allow"))  # response_fields: "a/b" is a field of that name
class LlamaCompletion(TypedDict, total=False):
    """The answer of /completion and /infill, or the last event of a stream; `response_fields` selects its fields."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["none", "eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[TokenProbability]


class Prompt(Answer):
    """The answer of /apply-template."""

    prompt: str


class DefaultSettings(Answer):
    """The settings of a request that sets none."""

    n_ctx: int
    params: dict[str, Any]


class Modalities(Answer):
    """Inputs in addition to text."""

    vision: bool
    audio: bool


class Properties(Answer):
    """The answer of /props."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str
    is_sleeping: bool


class Slot(Answer):
    """A place for a sequence. One is like another, so those that run have the lowest numbers."""

    id: int
    id_task: int  # -1: none
    n_ctx: int
    is_processing: bool


class Slots(RootModel[list[Slot]]):
    """The answer of /slots."""
