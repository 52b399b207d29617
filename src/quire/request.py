"""Sampling parameters, requests and events: the input of the engine and its output."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from quire.errors import RequestError, check_integer, check_number, checked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NoneType = type(None)
MAX_N = 16_384  # samples of one prompt; a limit, so that one request cannot exhaust the host's memory
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 2**31 - 1
BACKGROUND_PRIORITY = MAX_PRIORITY + 1  # of a batch's requests: after all others, by every policy
SMALLEST, LARGEST = 1e-6, 1e6  # limits of factors, both far inside the range of fp32
MAX_BIAS = 100.0  # largest absolute bias of a logit, as in OpenAI's API
MAX_TOP_K = 2**31 - 1
# The protocols that have fields of SamplingParams: routes' bodies, and the file with a model's defaults.
OPENAI, RESPONSES, OLLAMA, MESSAGES, FILE = "openai", "responses", "ollama", "messages", "generation_config"
COMMON = (OPENAI, RESPONSES, OLLAMA)
EVERYWHERE = (*COMMON, MESSAGES, FILE)
# Fields of vLLM's that Quire does not have, each with the reason or the alternative, see `checked`.
NOT_SAMPLING = MappingProxyType(
    {
        "best_of": "ask for n samples, and keep those of the best cumulative_logprob",
        "early_stopping": "LLM.beam_search stops when no live beam can win",
        "extra_args": "no part of Quire reads it",
        "flat_logprobs": "logprobs are a list with a dictionary for each position",
        "guided_decoding": "it is called structured_outputs",
        "length_penalty": "it is a field of BeamSearchParams, for LLM.beam_search",
        "logits_processors": (
            "a function of the caller's would stop every request's step; use logit_bias, allowed_token_ids, bad_words "
            "or structured_outputs to restrict the tokens"
        ),
        "repetition_detection": "a text that repeats itself ends at max_tokens; frequency_penalty works against it",
        "skip_reading_prefix_cache": "a prompt with its own cache_salt finds nothing in the cache",
        "thinking_token_budget": "reasoning is not separated from the rest of the text here; max_tokens limits both",
        "use_beam_search": "call LLM.beam_search instead",
    }
)
NOT_STRUCTURED = MappingProxyType(
    {
        "backend": "llguidance handles all grammars",
        "disable_additional_properties": "further keys are allowed by the schema alone, with additionalProperties",
        "disable_any_whitespace": "JSON has at most one blank, where json.dumps has one",
        "structural_tag": "a structural tag is not served; a grammar in Lark's notation can express the same",
        "whitespace_pattern": 'set "x-guidance" in the schema to control white space',
    }
)


class FinishReason(str, Enum):
    """Reason why a request ended. The first two are OpenAI's."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_tokens or the longest sequence that the engine serves; or no token was requested
    ABORT = "abort"  # the caller aborted it
    ERROR = "error"  # a step failed


class Task(str, Enum):
    """The result that a request asks for. If that is no new token, the request ends when its prompt is computed."""

    GENERATE = "generate"  # tokens after the prompt
    LOGLIKELIHOOD = "loglikelihood"  # logprobs of the prompt's tokens, as prompt_logprobs requests them
    EMBED = "embed"  # the hidden state of the prompt's last token


@checked(RequestError, "structured_outputs has no field", NOT_STRUCTURED)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint on a generated text. Exactly one field must be given. Names are vLLM's.

    Args:
        json: a JSON schema, as a text or an object. Its objects have further keys only if it has additionalProperties.
        regex: a regular expression that the whole text matches.
        choice: the text is one of these.
        grammar: a grammar in llguidance's variant of Lark's notation.
        json_object: True: the text is any JSON object.

    Raises:
        RequestError: no field or more than one is given, a field is unknown, or its value is invalid.

    Example:
        ```python
        from quire import LLM, SamplingParams, StructuredOutputsParams

        color = StructuredOutputsParams(choice=["red", "green"])
        with LLM(num_blocks=128) as llm:
            [output] = llm.generate("color = ", SamplingParams(structured_outputs=color))
        print(output.outputs[0].text)
        ```
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        asked = [one.name for one in fields(self) if getattr(self, one.name) is not None]
        if len(asked) != 1:
            names = ", ".join(one.name for one in fields(self))
            which = " and ".join(asked) or "nothing"
            raise RequestError(f"structured_outputs asks for {which}; give exactly one of {names}")
        kinds = {"json": (str, Mapping), "choice": (list, tuple), "json_object": bool}
        value = getattr(self, asked[0])
        is_empty = not value and not isinstance(value, Mapping)  # an empty schema is valid: any JSON
        if is_empty or not isinstance(value, kinds.get(asked[0], str)):  # type: ignore[arg-type]
            others = {"json": "a schema", "choice": "a list of texts, at least one", "json_object": "True"}
            wanted = others.get(asked[0], "a text that is not empty")
            raise RequestError(f"structured_outputs.{asked[0]} is {value!r}; it must be {wanted}")
        for text in self.choice or ():
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"structured_outputs.choice contains {text!r}; each must be a text that is not empty"
                )


class Served(NamedTuple):
    """The metadata of a field of SamplingParams, from which a server's lists of fields are made."""

    names: Mapping[str, str]  # by protocol; "": its own
    bounds: tuple[float, float] | None  # of a number; of an integer, if they are integers
    http: tuple[float, float] | None  # bounds for clients of a server
    help: str  # of its option in `quire chat` and `generate`; empty: they have none


def _served(
    protocols: Sequence[str],
    lower: float | None = None,
    upper: float = LARGEST,
    *,
    http: tuple[float, float] | None = None,
    help: str = "",
    **renamed: str,
) -> dict[str, Served]:
    """Return the metadata of a field that `protocols` have by its own name, and others by another name."""
    bounds = None if lower is None else (lower, upper)
    return {"served": Served(dict.fromkeys(protocols, "") | renamed, bounds, http or bounds, help)}


class RequestOutputKind(IntEnum):
    """The outputs that `AsyncLLM.generate` yields for a prompt. Names and values are vLLM's."""

    CUMULATIVE = 0  # whenever it has grown, all of it
    DELTA = 1  # whenever it has grown, the new part
    FINAL_ONLY = 2  # once, when it has ended


@checked(RequestError, "SamplingParams has no field", NOT_SAMPLING, {"length_penalty": 1.0, "logits_processors": []})
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling and of the end of a generation. Names and defaults are vLLM's.

    A field's metadata has its names in the server's protocols and in generation_config.json, and its option's help.

    Args:
        n: number of samples of each prompt.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 and -1 keep all.
        top_p: keep the smallest set of most probable tokens with at least this total probability.
        min_p: drop tokens less probable than this fraction of the most probable one.
        repetition_penalty: divides positive logits of tokens seen so far, and multiplies negative ones.
        presence_penalty: subtracted once from each generated token's logit.
        frequency_penalty: subtracted once per occurrence in the generated tokens.
        logit_bias: added to logits before penalties: a number in -100..100 by token id.
        allowed_token_ids: only these tokens are drawn, even if none of them ends the request.
        bad_words: texts whose last token is never drawn after their other tokens.
        structured_outputs: a constraint on the text: StructuredOutputsParams, or a dictionary of one of its fields.
        max_tokens: maximum number of new tokens; None: up to the longest sequence that the engine serves.
        min_tokens: number of tokens before which no stop token or string ends the request.
        stop: texts that end the request.
        stop_token_ids: tokens that end the request, in addition to the model's own.
        include_stop_str_in_output: keep the stop string or the text of the stop token in the text.
        ignore_eos: continue after the model's end-of-sequence tokens.
        seed: key of the random numbers; None: derived from the engine's seed and the request's ordinal.
        logprobs: number of most probable tokens to report at each position; 0: the chosen token only.
        prompt_logprobs: the same number for the prompt's tokens.
        detokenize: False returns tokens only, without text.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: must be True: they are written as the tokenizer writes them.
        truncate_prompt_tokens: number of last prompt tokens to keep; -1: as many as fit.
        output_kind: outputs that `AsyncLLM.generate` yields. `LLM.generate` always returns complete ones.

    Raises:
        RequestError: a field is unknown or its value is invalid. The message names the field.

    Example:
        ```python
        from quire import LLM, SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=16, stop=["class"])
        with LLM(num_blocks=128) as llm:
            [output] = llm.generate("def fibonacci(", greedy)
        print(output.outputs[0].text)
        ```
    """

    n: int = field(default=1, metadata=_served([OPENAI], 1, MAX_N, help="Number of samples of each prompt."))
    temperature: float = field(
        default=1.0,
        metadata=_served(
            EVERYWHERE,
            0.0,
            LARGEST,
            http=(0.0, 100.0),
            help="Divides the logits: higher is more varied, and 0 takes the most probable token each time.",
        ),
    )
    top_k: int = field(
        default=0,
        metadata=_served(EVERYWHERE, -1, MAX_TOP_K, help="Draw from the k most probable tokens; 0: all."),
    )
    top_p: float = field(
        default=1.0,
        metadata=_served(
            EVERYWHERE,
            SMALLEST,
            1.0,
            help="Draw from the smallest set of most probable tokens with at least this total probability.",
        ),
    )
    min_p: float = field(
        default=0.0,
        metadata=_served(
            (*COMMON, FILE), 0.0, 1.0, help="Drop tokens less probable than this fraction of the most probable one."
        ),
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata=_served(
            (OPENAI, RESPONSES, FILE),
            SMALLEST,
            LARGEST,
            http=(0.01, 100.0),
            help="Above 1: tokens of the text so far become less probable.",
            ollama="repeat_penalty",
        ),
    )
    presence_penalty: float = field(
        default=0.0,
        metadata=_served(COMMON, -2.0, 2.0, help="Subtracted once from the logit of each generated token."),
    )
    frequency_penalty: float = field(
        default=0.0,
        metadata=_served(COMMON, -2.0, 2.0, help="Subtracted once per occurrence in the generated tokens."),
    )
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = field(default=None, metadata=_served([OPENAI]))
    bad_words: Sequence[str] | None = field(default=None, metadata=_served([OPENAI]))
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    max_tokens: int | None = field(
        default=16,
        metadata=_served(
            [MESSAGES],
            help="Maximum number of new tokens.",
            ollama="num_predict",
            generation_config="max_new_tokens",
        ),
    )
    min_tokens: int = field(default=0, metadata=_served([OPENAI]))
    stop: str | Sequence[str] | None = field(
        default=None,
        metadata=_served(COMMON, help="Text that ends the answer. May be repeated.", messages="stop_sequences"),
    )
    stop_token_ids: Sequence[int] | None = field(default=None, metadata=_served([OPENAI]))
    include_stop_str_in_output: bool = field(default=False, metadata=_served([OPENAI]))
    ignore_eos: bool = field(default=False, metadata=_served([OPENAI]))
    seed: int | None = field(default=None, metadata=_served(COMMON, help="Seed of the random choices of each request."))
    logprobs: int | None = None
    prompt_logprobs: int | None = field(default=None, metadata=_served([OPENAI]))
    detokenize: bool = True
    skip_special_tokens: bool = field(default=True, metadata=_served([OPENAI]))
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name, lower, upper in _BOUNDED:
            if isinstance(lower, float):
                check_number(RequestError, name, getattr(self, name), lower, upper)
            else:
                check_integer(RequestError, name, getattr(self, name), lower, int(upper))
        if self.max_tokens is not None:
            check_integer(RequestError, "max_tokens", self.max_tokens, 1)
        check_integer(RequestError, "min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("seed", "logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_integer(RequestError, name, value, 0, MAX_SEED)
        try:
            object.__setattr__(self, "output_kind", RequestOutputKind(self.output_kind))  # a replica receives a number
        except ValueError:
            message = f"output_kind is {self.output_kind!r}; it must be a RequestOutputKind"
            raise RequestError(message, "output_kind") from None
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**self.structured_outputs))
        self._check_tokens()
        self._check_texts()

    def _check_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            if not isinstance(given := getattr(self, name), (Collection, NoneType)):
                raise RequestError(f"{name} is {given!r}; it must be a list of token ids", name)
            if given is None or (set(map(type, given)) <= {int} and min(given, default=0) >= 0):
                continue
            for i, token in enumerate(given):
                check_integer(RequestError, f"{name}[{i}]", token, 0)
        if self.allowed_token_ids is not None and not self.allowed_tokens:
            raise RequestError("allowed_token_ids is empty, so no token could be drawn", "allowed_token_ids")
        if not isinstance(self.logit_bias, (Mapping, NoneType)):
            raise RequestError(f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers", "logit_bias")
        for token, bias in (self.logit_bias or {}).items():
            check_integer(RequestError, "a token of logit_bias", token, 0)
            check_number(RequestError, f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
        if (count := self.truncate_prompt_tokens) is not None:
            check_integer(RequestError, "truncate_prompt_tokens", count, -1)
            if count == 0:
                raise RequestError("truncate_prompt_tokens is 0; it must be at least 1, or -1 for as many as fit")

    def _check_texts(self) -> None:
        if not isinstance(self.stop, (Collection, NoneType)):
            raise RequestError(f"stop is {self.stop!r}; it must be a list of texts")
        if isinstance(self.bad_words, str) or not isinstance(self.bad_words, (Collection, NoneType)):
            raise RequestError(f"bad_words is {self.bad_words!r}; it must be a list of texts")
        for name, texts in (("stop", self.stop_strings), ("bad_words", self.bad_words or ())):
            for text in texts:
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name} contains {text!r}; each entry must be a text of at least one character")
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, NoneType)):
            kind = type(self.structured_outputs).__name__
            raise RequestError(
                f"structured_outputs is a {kind}; it must be StructuredOutputsParams, or a dictionary with one field"
            )
        if self.structured_outputs is not None and self.min_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} with structured_outputs, which define the text's end; leave one out"
            )
        if self.stop_strings and not self.detokenize:
            raise RequestError(f"stop is {self.stop!r} with detokenize=False; without text only tokens end a request")
        if self.spaces_between_special_tokens is not True:
            value = self.spaces_between_special_tokens
            raise RequestError(
                f"spaces_between_special_tokens is {value!r}; special tokens are written as the tokenizer writes them, "
                f"so it must be True"
            )

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """`structured_outputs`, also if a dictionary was given."""
        return cast("StructuredOutputsParams | None", self.structured_outputs)

    @property
    def allowed_tokens(self) -> tuple[int, ...]:
        """`allowed_token_ids` as a tuple; empty if all tokens are allowed."""
        return () if self.allowed_token_ids is None else tuple(self.allowed_token_ids)

    def clone(self) -> SamplingParams:
        """Return a deep copy, which shares no list with this one."""
        return deepcopy(self)

    @property
    def has_penalty(self) -> bool:
        """True if a penalty makes a token's logit depend on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if it is not given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple, empty if it is not given."""
        return () if self.stop_token_ids is None else tuple(self.stop_token_ids)


SERVED: Mapping[str, Served] = MappingProxyType(
    {one.name: one.metadata["served"] for one in fields(SamplingParams) if "served" in one.metadata}
)
_BOUNDED = tuple((name, *one.bounds) for name, one in SERVED.items() if one.bounds is not None)


def served_in(protocol: str) -> dict[str, str]:
    """Return the fields of SamplingParams that a protocol has, by the protocol's names."""
    return {one.names[protocol] or name: name for name, one in SERVED.items() if protocol in one.names}


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the raw logits: before penalties and temperature."""

    token: int  # the token at this position
    logprob: float
    rank: int  # 1: the most probable one
    top: tuple[tuple[int, float], ...]  # the most probable tokens and their logprobs, best first


class Miss(str, Enum):
    """Reason why a prompt, or the rest of it, was not found in the prefix cache."""

    SHORT = "short"  # the prompt is shorter than a block, and only full blocks are shared
    UNSEEN = "unseen"  # no cached sequence continues from here
    DIFFERS = "differs"  # the nearest cached sequence continues with another token
    EVICTED = "evicted"  # it was cached, but its memory was needed
    EXPIRED = "expired"  # the same, after the time for which it was kept
    BUDGET = "budget"  # the same, after its key exceeded the share of the cache that a key may keep
    STATE = "state"  # its keys and values are cached, but not the state of the recurrent layers
    SALT = "salt"  # it is cached under another cache_salt or adapter
    PROMPT_LOGPROBS = "prompt_logprobs"  # its K and V are cached, but not the logprobs that it asks for
    DISABLED = "disabled"  # the prefix cache is off


@dataclass(frozen=True)
class PrefixReport:
    """Prompt tokens that the prefix cache had when a request first ran, and the reason why not more."""

    num_prompt: int  # tokens of the prompt
    num_cached: int  # prompt tokens that need not be computed
    block_size: int  # tokens; the length of a cached prefix is a multiple of it
    miss: Miss | None = None  # None: all full blocks of the prompt were cached
    first_difference: int | None = None  # DIFFERS: position of the first token that differs from the nearest sequence
    seconds_ago: float | None = None  # EVICTED to BUDGET, STATE: time since the eviction; None: the state was not kept
    reach: int = 0  # tokens whose K and V were cached, if a state was not
    window: int | None = None  # EVICTED: window of the layers that lost the block; None: they attend to all tokens

    def __str__(self) -> str:
        full = self.num_prompt // self.block_size * self.block_size
        reach = max(self.num_cached, self.reach)
        was = "was not kept" if self.seconds_ago is None else f"was evicted {self.seconds_ago:.1f} s before"
        of_layers = "" if self.window is None else f", in the layers with a window of {self.window:,}"
        message = f"{self.num_cached} of {self.num_prompt} prompt tokens were cached"
        if self.miss is None:
            return f"{message}: every full block"
        reason = {
            Miss.SHORT: f"the prompt is shorter than a block of {self.block_size} tokens",
            Miss.UNSEEN: f"no cached sequence continues after token {reach}",
            Miss.DIFFERS: f"the nearest cached sequence differs from token {self.first_difference} on",
            Miss.EVICTED: f"the block that begins at token {reach} {was}{of_layers}",
            Miss.STATE: f"the state at token {reach // self.block_size * self.block_size:,} {was}",
            Miss.EXPIRED: f"the block that begins at token {reach} was kept until its time, and {was}{of_layers}",
            Miss.BUDGET: f"the block that begins at token {reach} exceeded the budget of its key, and {was}{of_layers}",
            Miss.SALT: "its first block is cached under another cache_salt or adapter",
            Miss.PROMPT_LOGPROBS: "the logprobs of the prompt's tokens that it asks for are not stored from there on",
            Miss.DISABLED: "the prefix cache is off",
        }[self.miss]
        return f"{message}, of {full} in full blocks: {reason}"


@dataclass(frozen=True)
class Constraints:
    """The constraints of sampling parameters on a request's tokens at any time, in the form that steps use."""

    bias_tokens: NDArray[np.int64]  # [B]
    bias: NDArray[np.float32]  # [B], added to the logits of these
    banned: tuple[int, ...]  # tokens that are never drawn
    # By the last token: generated tokens that end with it, and the token that must not follow them.
    endings: Mapping[int, Sequence[tuple[array[int], int]]]
    allowed: NDArray[np.int32] | None  # one bit per token, as a Guide's; None: all tokens


class Guide(Protocol):
    """The tokens that may follow: a grammar as the engine sees it. An exception ends only the guide's own request."""

    def allowed(self) -> NDArray[np.int32]:
        """Return a bit mask: bit t % 32 of word t // 32 is 1 if token t may be drawn. Tokens beyond it may not.

        The array is never changed afterwards.
        """

    def accept(self, token: int) -> None:
        """Advance by the token that was drawn. Tokens that end the request are not reported."""

    @property
    def done(self) -> bool:
        """True if no token may follow: the request ends with FinishReason.STOP."""

    def forced(self) -> Sequence[int]:
        """Return tokens that are likely to come next because the text can continue in one way only; often none."""

    def copy(self) -> Guide:
        """Return another guide in the same state, for a sibling of the request."""

    def for_drafts(self) -> Guide | None:
        """Return another guide in the same state, for draft tokens, whose time is not that of the request.

        None if the guide is too slow at present to be followed along draft tokens.
        """


def _no_tokens() -> array[int]:
    return array("i")


@dataclass(eq=False)
class SampleGroup:
    """The requests that began as one prompt: the n samples of a prompt, or the beams of a search.

    They share the prompt's blocks: the first one computes the prompt, and the others fork from it.
    """

    members: list[Request] = field(default_factory=list)
    num_born: int = 0  # members, from the first on, that need not be forked any more; set by sharing.unforked


@dataclass(eq=False)
class CacheState:
    """The blocks of a request and their accounting. Only BlockManager writes it."""

    num_computed: int = 0  # tokens that need not be computed any more
    num_cached: int = 0  # tokens whose K and V were found in the cache and must not be written
    block_ids: list[array[int]] = field(default_factory=list)  # a block table per cache group: array('i')
    num_freed: list[int] = field(default_factory=list)  # blocks at the front of each table that are not needed any more
    room: int = 0  # tokens for which the tables have blocks; none that is still to be written is shared
    reach: int = 0  # tokens whose K and V were found: num_cached, or more if a state was missing
    host_block_ids: list[array[int]] = field(default_factory=list)  # while the request is swapped out
    digests: list[bytes] = field(default_factory=list)  # of the root, then of its full blocks
    num_published: int = 0  # full blocks that were offered for reuse
    scores: bytearray | None = None  # records of its prompt's tokens, see `quire.cache.scores`; None: none yet
    num_scored: int = 0  # full blocks whose records were stored
    found: tuple[TokenLogprobs, ...] = ()  # logprobs that were stored with its cached blocks and are not reported yet
    nonfinite_at: int | None = None  # the first computed position whose K or V is not finite
    prefix_report: PrefixReport | None = None  # result of the lookup in the prefix cache


@dataclass(eq=False)
class ScheduleState:
    """The place of a request in the schedule. Only Scheduler writes it."""

    ordinal: int = -1  # order of arrival
    sort_key: tuple[float, int, int] = (0, -1, -1)  # order of service, the lowest first; siblings are adjacent
    num_drafted: int = 0  # draft tokens that were computed
    num_accepted: int = 0  # of these
    num_prompt_logprobs: int = 0  # prompt positions whose logprobs were reported
    allowed: NDArray[np.int32] | None = None  # next tokens that its guide allows


class Retention(NamedTuple):
    """A request to keep blocks in the prefix cache, see `quire.cache.retention`."""

    key: str  # a client's name for the prompts that share a budget
    seconds: float  # after the last use


class ImageTurns(NamedTuple):
    """The positions by which q and k are rotated, in a model whose images have two dimensions."""

    of_tokens: NDArray[np.int64]  # [num_prompt], of the rows that are no image's
    of_images: NDArray[np.int64]  # [N, 3], time, height and width of each image row
    shift: int  # the position of a generated token is this much less than its index


class ImageRows(NamedTuple):
    """The rows of a prompt that images give instead of the embedding of tokens.

    The prompt's token ids at these positions are negative: parts of digests of the images' rows and their places. The
    block in which an image begins is named by its whole digest, so that blocks of one name have equal K and V.
    """

    positions: NDArray[np.int64]  # [N], ascending
    ids: NDArray[np.int32]  # [N], the token ids at these positions
    starts: Sequence[tuple[int, bytes]]  # of each image, its first position and the digest of its rows and their places
    values: Any  # a torch.Tensor [N, H], on the host; of some models, rows to add after the first layers follow, H each
    turns: ImageTurns | None = None  # None: rows are rotated by their positions
    # From and to which position rows see one another and are computed in one step; empty: they see those before them.
    runs: Sequence[tuple[int, int]] = ()
    only_windowed: bool = False  # they see one another only in layers with a window

    def begun_in(self, start: int, stop: int) -> bytes:
        """Return the digests of the images that begin at these positions."""
        return b"".join(digest for position, digest in self.starts if start <= position < stop)

    def uncut(self, end: int) -> int:
        """Return the last position up to `end` before which a step may end: it lies within no run."""
        return next((first for first, stop in self.runs if first < end < stop), end)

    @property
    def longest_run(self) -> int:
        """The number of rows of the longest run."""
        return max((stop - first for first, stop in self.runs), default=0)


class Holder(NamedTuple):
    """Another engine that has the first blocks of a request."""

    url: str  # URL of its server
    num_blocks: int


@dataclass(eq=False)
class Request:
    """One sequence: its parameters and its progress.

    `tokens` is array('i'), so that flattening a step is a copy of memory.
    """

    id: str
    tokens: array[int]  # the prompt, then the generated tokens
    num_prompt: int
    sampling: SamplingParams
    sample_index: int = 0  # index among the n samples of its prompt
    priority: int = 0  # lower is first, if the scheduling policy is "priority"
    cache_salt: str = ""  # only requests with the same salt share blocks: a tenant's secret
    group: SampleGroup | None = None  # the request and its siblings
    driven: bool = False  # a driver chooses its tokens: the engine reports logprobs, and waits for Engine.extend
    guide: Guide | None = None  # restricts the tokens that it may draw; not shared with siblings
    constraints: Constraints | None = None  # further restrictions of these tokens
    task: Task = Task.GENERATE
    lora: str | None = None  # the name of its adapter; None: the model without an adapter
    images: ImageRows | None = None  # of its prompt; None: it is text alone
    first_prompt_logprob: int = 0  # no logprobs of prompt positions before it, even with prompt_logprobs
    to_check: array[int] = field(default_factory=_no_tokens)  # tokens that the caller has: drawn again and compared
    is_strict: bool = True  # end with an error if another token than the one to check is drawn
    retention: Retention | None = None  # how long its blocks are kept; None: until their memory is needed
    holder: Holder | None = None  # another engine from which its first blocks may be read
    seed: int = 0  # key of its random numbers, given or derived; set by Engine.add
    ending_tokens: frozenset[int] = frozenset()  # stop tokens and the model's own end tokens; set by Engine.add
    lora_slot: int = -1  # slot of its adapter; set by Engine.add
    lora_digest: str = ""  # digest of its adapter's weights; set by Engine.add
    pooled: Literal["first", "last", "all"] = "last"  # rows that make its vector; set by Engine.check
    is_whole: bool = False  # its prompt is computed in one step; set by Engine.check
    is_checked: bool = False  # Engine.check has accepted it; set there, and cleared by `resume`
    finish_reason: FinishReason | None = None  # set by Scheduler, at the end or when Engine.finish is called
    cache: CacheState = field(default_factory=CacheState)
    schedule: ScheduleState = field(default_factory=ScheduleState)

    def inherit(self, parent: Request) -> None:
        """Copy every field of a sibling except those that each request owns, so that both draw the same numbers."""
        for name in _INHERITED:
            setattr(self, name, getattr(parent, name))

    def resume(self, delivered: Sequence[int], num_checked: int) -> None:
        """Continue after tokens that were generated and delivered before an interruption, here or elsewhere.

        The request must be new, and its guide at its start. The last `num_checked` of the tokens are drawn again and
        compared, which shows whether this engine continues the sequence that was interrupted. Exceptions of the guide
        are passed on.
        """
        trusted = max(0, len(delivered) - num_checked)
        self.tokens.extend(delivered[:trusted])
        self.to_check.extend(delivered[trusted:])
        self.is_checked = False
        if self.guide is not None:
            for token in delivered[:trusted]:
                self.guide.accept(token)

    @property
    def num_generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def looks_back(self) -> bool:
        """True if sampling depends on earlier tokens in other ways than through the logits."""
        has_endings = self.constraints is not None and bool(self.constraints.endings)
        return self.guide is not None or self.sampling.has_penalty or has_endings

    @property
    def is_new(self) -> bool:
        """True if the request never owned a block."""
        return self.cache.prefix_report is None and self.num_generated == 0

    @property
    def num_missing(self) -> int:
        """Number of tokens whose K and V are still to be computed."""
        return len(self.tokens) - self.cache.num_computed

    @property
    def next_prompt_logprob(self) -> int:
        """The first prompt position whose logprob is requested and not yet reported."""
        return self.first_prompt_logprob + self.schedule.num_prompt_logprobs


# Forks inherit every field of Request that is not named here.
_OWN = {"id", "tokens", "sample_index", "guide", "to_check", "finish_reason", "cache", "schedule"}
_INHERITED = tuple(one.name for one in fields(Request) if one.name not in _OWN)


class Event(NamedTuple):
    """The engine's report about one request after a step: a token, prompt logprobs, its end, or several of them."""

    request_id: str
    token: int | None = None  # the token generated in this step
    logprobs: TokenLogprobs | None = None  # of that token, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt positions computed in this step, if requested
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop token that ended the request, if it is not an end-of-sequence token
    error: str | None = None  # the reason of a failure, with FinishReason.ERROR
    hidden_state: NDArray[np.float32] | None = None  # [H], of the prompt's last token, if requested
    drawn: int | None = None  # if the caller had the token already: the token drawn now, the same unless bits differ
