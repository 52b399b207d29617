"""The messages between gateways and replicas, as JSON, which transfers numbers and texts exactly.

A gateway posts calls. It reads the results from one stream per replica, the session: one JSON object a line, with
frames (new output of samples), events (of blocks) and the replica's state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from quire.errors import QuireError, RequestError, check_integer
from quire.models.pooling_config import PoolingConfig
from quire.request import FinishReason, Holder, ImageRows, Retention, SamplingParams, Task

PROTOCOL = 5  # both ends must have the same version
BEAT = 0.25  # s, the longest time between two lines of a replica
SILENCE = 1.5  # s without a line after which a replica counts as hung
# Kinds of block events: stored, removed, all removed; stored on the disk, removed from it.
EVENTS = ("+", "-", "0", "d+", "d-")
ENDS = tuple(reason.value for reason in FinishReason)
DIGEST_SIZE = 8  # bytes of a block's digest on the wire
T = TypeVar("T")


class WireError(QuireError):
    """A message of the other end is invalid, or contradicts an earlier one."""


class Frame(NamedTuple):
    """New output of one sample. It has positions, so that no part is lost or taken twice."""

    flow: int  # the number of the call
    sample: int  # the index of the sample
    at: int  # number of tokens before these
    tokens: list[int]
    characters: int  # number of characters of the sample's text before this one
    text: str
    logprobs: list[list[list[Any]]] | None = None  # for each token: [id, logprob, rank, text] of each candidate
    end: list[Any] | None = None  # finish_reason, stop_reason, error
    # Rare fields: "cached", prompt tokens found in the cache; "prompt_logprobs", a position and the logprobs from it
    # on; "hidden_state"; "differences", number of tokens that were drawn differently than delivered.
    more: dict[str, Any] | None = None

    @staticmethod
    def parse(found: Any) -> Frame:
        """Return a frame from JSON. Raises WireError for an invalid one."""
        if not isinstance(found, list) or len(found) != len(Frame._fields) or not isinstance(found[3], list):
            raise WireError(f"a frame is {shown(found)}; it must be a list of {len(Frame._fields)} fields")
        frame = Frame(*found)
        numbers = (frame.flow, frame.sample, frame.at, frame.characters, *frame.tokens)
        if {*map(type, numbers)} != {int} or min(numbers) < 0 or not isinstance(frame.text, str):
            raise WireError(f"a frame is {shown(found)}; its positions and tokens must be integers, its text a text")
        end = frame.end
        if end is not None and not (isinstance(end, list) and len(end) == 3 and end[0] in ENDS):
            raise WireError(f"a frame's end is {shown(end)}; it must be a finish reason, a stop reason and an error")
        if frame.logprobs is not None and len(frame.logprobs) != len(frame.tokens):
            raise WireError(f"a frame has {len(frame.tokens)} tokens and logprobs of {len(frame.logprobs)}")
        if frame.more is not None:
            _check_more(frame.more)
        return frame


def _check_more(more: Any) -> None:
    """Raise WireError for invalid rare fields of a frame."""
    if not isinstance(more, dict):
        raise WireError(f"the field more of a frame is {shown(more)}; it must be an object")
    for name in more.keys() & {"cached", "differences"}:
        check_integer(WireError, f"{name} of a frame", more[name], 0)
    if "prompt_logprobs" in more:
        found = more["prompt_logprobs"]
        if not isinstance(found, list) or [*map(type, found)] != [int, list] or found[0] < 0:
            raise WireError(f"prompt_logprobs of a frame is {shown(found)}; it must be a position and a list")
    if "hidden_state" in more:
        found = more["hidden_state"]
        if not isinstance(found, list) or {*map(type, found)} != {float}:
            raise WireError(f"hidden_state of a frame is {shown(found)}; it must be a list of numbers")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A prompt to be continued or embedded: all its samples, or the rest of one of them."""

    flow: int  # number that frames refer to; a new one for each call of a session
    name: str  # of the request, for errors
    prompt: list[int]
    sampling: SamplingParams  # with a seed
    task: Task = Task.GENERATE
    priority: int = 0
    salt: str = ""
    lora: str | None = None  # the adapter's name
    grammar: tuple[str, str] | None = None  # kind and text, see Spec
    uncached: int | None = None  # tokens that the gateway expects to be computed before a new one; None: all
    sample: int | None = None  # the sample to continue after `delivered`; None: all n samples
    delivered: list[int] = field(default_factory=list)  # tokens
    first_prompt_logprob: int = 0  # logprobs of earlier prompt positions were already sent
    num_checked: int = 0  # number of last delivered tokens that are drawn again and compared
    is_strict: bool = True  # whether the sample ends with an error if one of these differs
    trace: str | None = None  # the gateway's span, as a W3C traceparent
    holder: Holder | None = None  # another replica that has the first blocks, with the same fingerprint
    retention: Retention | None = None  # see Request
    images: Images | None = None  # of the prompt; None: it has none


class Images(NamedTuple):
    """A rendered text with a mark for each image, and the images, from which a replica makes tokens and rows."""

    text: str
    urls: list[str]  # data URLs


def _images(found: Any) -> Images:
    """Return images from JSON. Raises WireError unless they are a text and data URLs: a path would name a file here."""
    is_pair = isinstance(found, list) and [*map(type, found)] == [str, list] and found[1]
    if not is_pair or not all(isinstance(url, str) and url.startswith("data:") for url in found[1]):
        raise WireError(f"images is {shown(found)}; it must be a text and a list of data URLs")
    return Images(*found)


@dataclass(frozen=True, kw_only=True)
class MatchCall(Call):
    """A prompt whose blocks are looked up, for which no image needs to be read."""

    encoded: EncodedPrompt | dict[str, Any] | None = None  # in place of images; when sent, see `encoded_to_json`


@dataclass(frozen=True, kw_only=True)
class EncodeCall:
    """A prompt with images whose tokens are wanted."""

    images: Images


class EncodedPrompt(NamedTuple):
    """The tokens of a prompt with images, as a replica reports them."""

    tokens: list[int]
    placeholder: int  # the token that each row of an image has
    starts: list[tuple[int, bytes]]  # see ImageRows


def encoded_to_json(tokens: list[int], rows: ImageRows) -> dict[str, Any]:
    """Return the tokens of a prompt with images in the form that `read_encoded` reads."""
    starts = [(at, digest.hex()) for at, digest in rows.starts]
    return {"tokens": tokens, "placeholder": rows.placeholder, "starts": starts}


def read_encoded(answer: Mapping[str, Any]) -> EncodedPrompt:
    """Return the tokens of a prompt with images from JSON. Raises WireError for invalid ones."""
    try:
        found = EncodedPrompt([*answer["tokens"]], answer["placeholder"], [])
        found.starts.extend((at, bytes.fromhex(digest)) for at, digest in answer["starts"])
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a prompt with images is {shown(answer)}; it must have tokens and starts of images") from error
    numbers, places = [*found.tokens, found.placeholder], [at for at, _ in found.starts]
    if {*map(type, [*numbers, *places])} != {int} or min(numbers) < 0 or places != sorted({*places}):
        raise WireError(f"a prompt with images is {shown(answer)}; its tokens and starts must be ascending integers")
    if not places or places[0] < 0 or any(found.tokens[at : at + 1] != [found.placeholder] for at in places):
        raise WireError(f"a prompt with images is {shown(answer)}; an image must start at a placeholder")
    return found


def _holder(found: Any) -> Holder:
    """Return a holder from JSON. Raises WireError unless it is a URL and a number of blocks."""
    if not isinstance(found, list) or [*map(type, found)] != [str, int] or found[1] < 1 or not _is_url(found[0]):
        raise WireError(f"holder is {shown(found)}; it must be the URL of a replica and a number of blocks")
    return Holder(*found)


def _retention(found: Any) -> Retention:
    """Return a retention from JSON. Raises WireError unless it is a key and a number of seconds."""
    if not isinstance(found, list) or [*map(type, found)] != [str, float] or not 0 <= found[1] < float("inf"):
        raise WireError(f"retention is {shown(found)}; it must be a key and a number of seconds")
    return Retention(*found)


def _is_url(text: str) -> bool:
    """Return whether a text is a URL http://host:port."""
    try:
        parts = urlsplit(text)
        return parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    except ValueError:  # an invalid port
        return False


def _sampling(found: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters. Raises WireError for an unknown field, RequestError for an error of the client."""
    if unknown := sorted(set(found) - {one.name for one in fields(SamplingParams)}):
        raise WireError(f"sampling has the field {unknown[0]!r}, which is unknown here")
    bias = found.get("logit_bias")
    tokens = None if bias is None else {int(token): value for token, value in bias.items()}  # JSON's keys are strings
    return SamplingParams(**dict(found) | {"logit_bias": tokens})


# Fields of messages that have no JSON type.
MADE_OF: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "sampling": _sampling,
        "task": Task,
        "grammar": tuple,
        "holder": _holder,
        "retention": _retention,
        "images": _images,
        "encoded": read_encoded,
    }
)


@dataclass(frozen=True, kw_only=True)
class SearchCall:
    """A prompt for a beam search."""

    name: str
    prompt: list[int]
    salt: str
    beam_width: int
    max_tokens: int
    ignore_eos: bool
    length_penalty: float
    logprobs: int | None  # of each token
    lora: str | None = None  # see Call
    trace: str | None = None  # see Call


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The greeting of a replica, the first line of a session. Raises WireError, with the name of an invalid field."""

    protocol: int
    session: str
    incarnation: str  # differs after each start
    fingerprint: dict[str, Any]  # see Fingerprint.to_json
    names: list[str]  # of the model, for clients
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    hidden_size: int
    root: str  # the checkpoint
    default_sampling: dict[str, Any]  # fields of SamplingParams that apply if a client's body omits them
    max_samples: int  # samples that may run or wait at a time
    block_size: int
    salt: str  # of the cache: digests depend on it in addition to a request's own salt
    has_windows: bool  # if true, only the replica knows how much of a prompt is cached
    loras: dict[str, str] = field(default_factory=dict)  # digests of the adapters' weights, by name
    pooling: dict[str, Any] = field(default_factory=dict)  # see PoolingConfig
    no_images: str | None = "this model is served for text alone"  # why it reads no images; None: it does

    def __post_init__(self) -> None:
        for name in ("max_model_len", "vocab_size", "hidden_size", "max_samples", "block_size"):
            check_integer(WireError, name, getattr(self, name), 1)
        for name in ("session", "incarnation", "salt", "root"):
            if not isinstance(found := getattr(self, name), str):
                raise WireError(f"{name} is {shown(found)}; it must be a text")
        if not isinstance(self.names, list) or {*map(type, self.names)} != {str}:
            raise WireError(f"names is {shown(self.names)}; it must be a list of one text or more")
        if not isinstance(self.eos_token_ids, list) or not {*map(type, self.eos_token_ids)} <= {int}:
            raise WireError(f"eos_token_ids is {shown(self.eos_token_ids)}; it must be a list of integers")
        try:
            PoolingConfig.of_json(self.pooling)
        except (TypeError, ValueError) as error:
            raise WireError(f"pooling is {shown(self.pooling)}; {error}") from error
        try:
            SamplingParams(**self.default_sampling)
        except (TypeError, RequestError) as error:
            raise WireError(f"default_sampling is {shown(self.default_sampling)}; {error}") from error
        if not isinstance(self.loras, dict) or not {*map(type, (*self.loras, *self.loras.values()))} <= {str}:
            raise WireError(f"loras is {shown(self.loras)}; it must be an object of names and digests")
        if self.no_images is not None and not isinstance(self.no_images, str):
            raise WireError(f"no_images is {shown(self.no_images)}; it must be a text, or null")
        if not isinstance(self.has_windows, bool):
            raise WireError(f"has_windows is {self.has_windows!r}; it must be true or false")


def check_blocks(snapshot: Any, events: Any) -> None:
    """Raise WireError unless these are a list of digests (or None) and a list of block events: a kind and digests."""
    if snapshot is not None and not (isinstance(snapshot, list) and {*map(type, snapshot)} <= {int}):
        raise WireError(f"a snapshot of blocks is {shown(snapshot)}; it must be a list of digests")
    if not isinstance(events, list):
        raise WireError(f"block events are {shown(events)}; they must be a list")
    for event in events:
        if not (isinstance(event, list) and event and event[0] in EVENTS and {*map(type, event[1:])} <= {int}):
            raise WireError(f"a block event is {shown(event)}; it must be a kind ({', '.join(EVENTS)}) and digests")


class Matched(NamedTuple):
    """The numbers of a prompt's tokens that a replica has."""

    cached: int  # in memory
    stored: int  # in memory or on its disk


def read_matched(num_tokens: int, answer: Mapping[str, Any]) -> Matched:
    """Return the numbers of tokens that a replica reports for a prompt. Raises WireError for invalid ones."""
    cached, stored = answer.get("cached"), answer.get("stored")
    check_integer(WireError, "cached", cached, 0, num_tokens)
    check_integer(WireError, "stored", stored, cached, num_tokens)  # type: ignore[arg-type]  # checked above
    return Matched(cached, stored)  # type: ignore[arg-type]


def dumps(message: Any) -> bytes:
    """Return a message as a line. NaN and infinities are preserved."""
    if not isinstance(message, Mapping):
        message = asdict(message)
    return json.dumps(message, separators=(",", ":"), default=asdict).encode("ascii") + b"\n"


def loads(line: bytes) -> dict[str, Any]:
    """Parse a line. Raises WireError unless it is a JSON object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{shown(line)} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise WireError(f"a message is {shown(found)}; it must be an object")
    return found


def read(kind: type[T], found: Mapping[str, Any]) -> T:
    """Return a message of that class.

    Raises WireError for missing or unknown fields, and RequestError for invalid sampling parameters.
    """
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(found) - known):
        raise WireError(f"a {kind.__name__} has the field {unknown[0]!r}, which is unknown here")
    given = dict(found)
    try:
        for name, make in MADE_OF.items():
            if given.get(name) is not None:
                given[name] = make(given[name])
        return kind(**given)
    except RequestError:
        raise
    except (TypeError, ValueError) as error:
        raise WireError(f"a {kind.__name__} cannot be read: {error}") from error


def wire_digest(digest: bytes, secret: bytes) -> int:
    """Return the digest that is sent for a block. It is keyed: testing prompts against it requires the secret."""
    return int.from_bytes(blake2b(digest, key=secret[:64], digest_size=DIGEST_SIZE).digest(), "little")


def shown(found: Any) -> str:
    """Return the representation of a value for errors, at most about 100 characters."""
    text = repr(found)
    return text if len(text) <= 100 else text[:100] + "..."
