"""What a caller asks for and what he gets back: sampling parameters, requests, events."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.errors import RequestError, check_integer, check_number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NoneType = type(None)
MAX_N = 16_384  # samples of one prompt; a bound, so that one request cannot exhaust the host
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 2**31 - 1
SMALLEST, LARGEST = 1e-6, 1e6  # of factors: both far inside the range of fp32


class FinishReason(str, Enum):
    """Why a request ended. The first two are OpenAI's."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_tokens or the longest sequence that the engine serves; or no token was asked for
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # a step failed


class Task(str, Enum):
    """What a request is to bring. Where that is no new token, it ends when its prompt is computed."""

    GENERATE = "generate"  # tokens after the prompt
    SCORE = "score"  # logprobs of the prompt's tokens, as prompt_logprobs asks for them
    EMBED = "embed"  # the hidden state of the prompt's last token


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Names and defaults are vLLM's. Validated on construction: RequestError names the field."""

    n: int = 1  # samples of each prompt
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most probable tokens; 0 or -1 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability
    min_p: float = 0.0  # drop tokens less probable than this share of the most probable one
    repetition_penalty: float = 1.0  # divides the positive logits of seen tokens, multiplies the negative ones
    presence_penalty: float = 0.0  # subtracted once from each generated token's logit
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the generated tokens
    max_tokens: int | None = 16  # None: up to the longest sequence that the engine serves
    min_tokens: int = 0  # no stop token or string ends the request before that many
    stop: str | Sequence[str] | None = None  # texts that end the request
    stop_token_ids: Sequence[int] | None = None  # tokens that end the request, besides the model's own
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # go on past the model's end-of-sequence tokens
    seed: int | None = None  # None: derived from the engine's seed and the request's ordinal
    logprobs: int | None = None  # report that many most probable tokens at each position; 0: the chosen one only
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_integer(RequestError, "n", self.n, 1, MAX_N)
        check_number(RequestError, "temperature", self.temperature, 0.0, LARGEST)
        check_integer(RequestError, "top_k", self.top_k, -1, 2**31 - 1)
        check_number(RequestError, "top_p", self.top_p, SMALLEST, 1.0)
        check_number(RequestError, "min_p", self.min_p, 0.0, 1.0)
        check_number(RequestError, "repetition_penalty", self.repetition_penalty, SMALLEST, LARGEST)
        check_number(RequestError, "presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number(RequestError, "frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            check_integer(RequestError, "max_tokens", self.max_tokens, 1)
        check_integer(RequestError, "min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("seed", "logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_integer(RequestError, name, value, 0, MAX_SEED)
        for name, kind in (("stop", "texts"), ("stop_token_ids", "token ids")):
            if not isinstance(getattr(self, name), (Iterable, NoneType)):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be a list of {kind}")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop contains {text!r}; each entry must be a text of at least one character")
        for i, token in enumerate(self.stop_tokens):
            check_integer(RequestError, f"stop_token_ids[{i}]", token, 0)

    @property
    def has_penalty(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, also where one text or None was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple, also where None was given."""
        return () if self.stop_token_ids is None else tuple(self.stop_token_ids)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the raw logits: before penalties and temperature."""

    token: int  # the token that stands there
    logprob: float
    rank: int  # 1: the most probable one
    top: tuple[tuple[int, float], ...]  # the most probable tokens and their logprobs, best first


class Miss(str, Enum):
    """Why a prompt, or the rest of it, was not found in the prefix cache."""

    SHORT = "short"  # it is shorter than a block, and only full blocks are shared
    UNSEEN = "unseen"  # no cached sequence goes on from here
    DIFFERS = "differs"  # the nearest cached sequence goes on with another token
    EVICTED = "evicted"  # it was there, and its memory was needed
    STATE = "state"  # its keys and values are there, but not the state of the layers that keep one
    SALT = "salt"  # it is there, under another cache_salt
    PROMPT_LOGPROBS = "prompt_logprobs"  # these need their positions computed
    DISABLED = "disabled"  # there is no prefix cache


@dataclass(frozen=True)
class PrefixReport:
    """What the prefix cache had for a request when it first ran, and why not more."""

    num_prompt: int  # tokens of the prompt
    num_cached: int  # of these, tokens that need not be computed
    block_size: int  # tokens; a prefix is found as far as a multiple of it
    miss: Miss | None = None  # None: all full blocks of the prompt were there
    first_difference: int | None = None  # DIFFERS: position of the first token that the nearest sequence has not
    seconds_ago: float | None = None  # EVICTED, STATE: since when; None: the state was not kept
    reach: int = 0  # tokens whose K and V were there, if a state was not
    window: int | None = None  # EVICTED: of the layers that lost the block; None: those that attend to all tokens

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
            Miss.UNSEEN: f"no cached sequence goes on after token {reach}",
            Miss.DIFFERS: f"the nearest cached sequence differs from token {self.first_difference} on",
            Miss.EVICTED: f"the block that begins at token {reach} {was}{of_layers}",
            Miss.STATE: f"the state at token {reach // self.block_size * self.block_size:,} {was}",
            Miss.SALT: "its first block is cached under another cache_salt",
            Miss.PROMPT_LOGPROBS: "logprobs of the prompt's tokens need the positions before these computed",
            Miss.DISABLED: "the prefix cache is off",
        }[self.miss]
        return f"{message}, of {full} in full blocks: {reason}"


class Guide(Protocol):
    """Which tokens may come next: a grammar as the engine sees it. Whatever it raises ends its own request alone."""

    def allowed(self) -> NDArray[np.int32]:
        """A bit a token, 32 of them in each word, the lowest first: 1 if it may be drawn. No later token may be.

        The array is never changed afterwards.
        """

    def accept(self, token: int) -> None:
        """Take over the token that was drawn. Tokens that end the request are not reported."""

    @property
    def done(self) -> bool:
        """Whether nothing may follow: the request ends, with FinishReason.STOP."""

    def copy(self) -> Guide:
        """Another one in the same state, for a sibling of the request."""


def _no_tokens() -> array[int]:
    return array("i")


@dataclass(eq=False)
class Group:
    """The requests that began as one prompt: the n samples of a prompt, or the beams of a search.

    They share the prompt's blocks: the first one computes it, the others fork from it.
    """

    members: list[Request] = field(default_factory=list)
    num_born: int = 0  # of these, from the first on, that need not be forked any more; set by sharing.unforked


@dataclass(eq=False)
class CacheState:
    """What a request owns in the cache. BlockManager alone writes it."""

    num_computed: int = 0  # tokens that need not be computed any more
    num_cached: int = 0  # tokens whose K and V it found in the cache, and must not write
    block_ids: list[array[int]] = field(default_factory=list)  # a block table per cache group: array('i')
    num_freed: list[int] = field(default_factory=list)  # blocks at the front of each table that it needs no more
    room: int = 0  # tokens that the tables have blocks for, of which none is shared that is still to be written
    reach: int = 0  # tokens whose K and V it found: num_cached, or more where a state was missing
    host_block_ids: list[array[int]] = field(default_factory=list)  # while it is swapped out
    digests: list[bytes] = field(default_factory=list)  # its root's, then its full blocks'
    num_published: int = 0  # full blocks that were offered for reuse
    nonfinite_at: int | None = None  # the first computed position whose K or V is not finite
    prefix_report: PrefixReport | None = None  # what the prefix cache had for it


@dataclass(eq=False)
class ScheduleState:
    """Where a request stands among the others. Scheduler alone writes it."""

    ordinal: int = -1  # order of arrival
    rank: tuple[float, int, int] = (0, -1, -1)  # in the order of service, siblings side by side; the lowest comes first
    num_prompt_logprobs: int = 0  # prompt positions whose logprobs were reported
    allowed: NDArray[np.int32] | None = None  # what its guide allows next


@dataclass(eq=False)
class Request:
    """One sequence: what was asked for, and how far it is.

    `tokens` is array('i'), so that laying out a step is a copy of memory.
    """

    id: str
    tokens: array[int]  # the prompt, then what was generated
    num_prompt: int
    sampling: SamplingParams
    sample_index: int = 0  # which of the n samples of its prompt
    priority: int = 0  # lower comes first, where the scheduling policy asks for it
    cache_salt: str = ""  # only requests with the same one share blocks: a tenant's secret
    group: Group | None = None  # its siblings and itself
    driven: bool = False  # a driver chooses its tokens: the engine reports logprobs, and waits for Engine.extend
    guide: Guide | None = None  # which tokens it may draw, where not all of them; its own, not a sibling's
    task: Task = Task.GENERATE
    lora: str | None = None  # the name of its adapter; None: the model alone computes it
    first_prompt_logprob: int = 0  # prompt positions before it are not asked for, whatever prompt_logprobs says
    to_check: array[int] = field(default_factory=_no_tokens)  # that its caller has: drawn again, and compared
    is_strict: bool = True  # it ends with an error where another token than the one to check is drawn
    seed: int = 0  # key of its random numbers, as given or derived; set by Engine.add
    ending_tokens: frozenset[int] = frozenset()  # stop tokens and the model's own end tokens; set by Engine.add
    lora_slot: int = -1  # its adapter's; set by Engine.add
    lora_digest: str = ""  # of its adapter's weights; set by Engine.add
    tokens_checked: bool = False  # the prompt's ids are the vocabulary's, and so its siblings' are; set by Engine.check
    finish_reason: FinishReason | None = None  # set by Scheduler, at the end or when Engine.finish asks for it
    cache: CacheState = field(default_factory=CacheState)
    schedule: ScheduleState = field(default_factory=ScheduleState)

    def resume(self, delivered: Sequence[int], num_checked: int) -> None:
        """Go on after tokens that were generated and delivered before an interruption, here or elsewhere.

        It must be new. The last num_checked of them are drawn once more and compared, which shows whether what goes on
        here is what was interrupted. Its guide must be at its start. Whatever that raises is raised.
        """
        trusted = max(0, len(delivered) - num_checked)
        self.tokens.extend(delivered[:trusted])
        self.to_check.extend(delivered[trusted:])
        if self.guide is not None:
            for token in delivered[:trusted]:
                self.guide.accept(token)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_new(self) -> bool:
        """Whether it never owned a block."""
        return self.cache.prefix_report is None and self.num_generated == 0

    @property
    def num_missing(self) -> int:
        """Tokens whose K and V are still to be computed: what every step chases."""
        return len(self.tokens) - self.cache.num_computed

    @property
    def next_prompt_logprob(self) -> int:
        """The first prompt position whose logprob is asked for and was not reported."""
        return self.first_prompt_logprob + self.schedule.num_prompt_logprobs


class Event(NamedTuple):
    """What the engine reports about one request after a step: a token, prompt logprobs, its end, or several of them."""

    request_id: str
    token: int | None = None  # the token generated in this step
    logprobs: TokenLogprobs | None = None  # of that token, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt positions computed in this step, where asked for
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop token that ended the request, where one other than EOS did
    error: str | None = None  # what failed, with FinishReason.ERROR
    hidden_state: NDArray[np.float32] | None = None  # [H], of the prompt's last token, where asked for
    drawn: int | None = None  # where the caller had the token already: what was drawn now, the same unless bits differ
