"""Compute the answers of receipts again, and find the first token or logprob that differs."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

from quire.errors import ConfigError, QuireError, RequestError, check_installed

check_installed("quire.frontend.verification", "pydantic")

from pydantic import BaseModel, Field, ValidationError

from quire.fingerprint.fingerprint import DIGEST, Fingerprint
from quire.frontend.llm import LLM
from quire.frontend.model_fingerprint import receipts_fingerprint
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.receipts import DEFAULTS, SHORT, logprobs_digest, request_digest
from quire.frontend.request_factory import RequestOptions, TokenizedPrompt
from quire.frontend.requests import Made
from quire.request import MAX_N, MAX_SEED, FinishReason, SamplingParams
from quire.sandbox.grammar import Spec

ANOTHER_MODEL = ("weights", "config")  # parts that make a receipt that of another model
# The parts of a fingerprint by the kind of cause that they are; operators' bits are arithmetic.
CAUSES = {
    "weights": ("adapters", "config", "dtype", "quantization", "weights"),
    "template": ("end tokens", "template", "tokenizer"),
    "arithmetic": ("backend", "cache groups", "instruction set", "kv_cache_dtype", "layers"),
    "version": ("bits version", "llguidance", "quire", "tokenizers", "torch", "transformers"),
}
WHOLE = (FinishReason.STOP.value, FinishReason.LENGTH.value)  # ends that are reached again


class _Request(BaseModel):
    prompt_token_ids: list[int] = Field(min_length=1)
    sampling: dict[str, Any]
    seed: int = Field(ge=0, le=MAX_SEED)
    sample: int = Field(ge=0, lt=MAX_N)
    lora: list[str] | None = Field(None, min_length=2, max_length=2)
    grammar: list[str] | None = Field(None, min_length=2, max_length=2)
    cache_salt: str = ""


class _Receipt(BaseModel):
    receipt: Literal[1]
    id: str
    request: _Request
    request_digest: str = Field(pattern=f"^{DIGEST.pattern}$")
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs_from: int = Field(ge=0)
    logprobs_digest: str
    fingerprint: dict[str, str]
    weights_versions: list[list[Any]] = []  # if its weights were replaced meanwhile: first token and version of each


@dataclass(frozen=True)
class Difference:
    """An answer that was computed again, with another result."""

    line: int  # of the file, from 1
    id: str  # of the request
    field: str  # the first part of the receipt that differs
    position: int | None  # the first generated token that differs; None: no single one
    recorded: int | str | None  # its token, or the other value in the receipt; None: the answer has ended
    computed: int | str | None  # the same now
    reason: str  # why that can be

    def __str__(self) -> str:
        at = "" if self.position is None else f", from token {self.position} on"
        values = f": {_shown(self.recorded)}, and here {_shown(self.computed)}"
        return f"line {self.line}, request {self.id}: {self.field} differs{at}{values}; {self.reason}"


@dataclass(frozen=True)
class Unverified:
    """A line from which no answer could be computed."""

    line: int
    field: str | None  # the invalid field; None: the line is no receipt
    error: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.error}"


@dataclass
class Report:
    """The result of a verification."""

    num_lines: int = 0  # lines of the file
    num_same: int = 0  # answers with the same tokens and logprobs
    different: list[Difference] = field(default_factory=list)
    unverified: list[Unverified] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """True if every answer was the same."""
        return not self.different and not self.unverified

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class _Wrong(QuireError):
    """A receipt cannot be computed again, for the reason of one field."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass
class _Open:
    """A receipt whose answer is being computed."""

    line: int
    receipt: _Receipt
    output: RequestOutput
    digest: str  # of the request that is in the receipt


def verify(
    llm: LLM,
    path: Path,
    sample: int | None = None,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Report:
    """Compute the answers of a file's receipts again and compare tokens and logprobs.

    Args:
        llm: the model. No other caller may use it meanwhile.
        path: the file.
        sample: number of lines to verify, chosen at random; None verifies all.
        seed: seed of that choice.
        advance: called for each line that is done.

    Raises:
        ConfigError: the file cannot be read, or the model is not batch-invariant.
    """
    own, report = receipts_fingerprint(llm), Report(count_lines(path))
    chosen = None
    if sample is not None and sample < report.num_lines:
        chosen = set(random.Random(seed).sample(range(1, report.num_lines + 1), sample))
    pending, ended = _begun(llm, own, path, chosen, report, advance), deque[RequestOutput]()
    room, running = 4 * llm.config.max_num_seqs, dict[str, _Open]()
    while True:
        for one, made in islice(pending, room - len(running)):
            running[one.output.request_id] = one
            llm.processor.add(made[1][0], one.output, ended, is_streamed=False)
        if not running:
            return report
        deque(llm.processor.process(llm.engine.step()), 0)
        while ended:
            one = running.pop(ended.popleft().request_id)
            _judge(one, own, report)
            advance()


def count_lines(path: Path) -> int:
    """Return the number of a file's lines. Raises ConfigError if it cannot be read."""
    return sum(1 for _ in _lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}; give a file that --receipts has written"
        raise ConfigError(message) from error


def _begun(
    llm: LLM,
    own: Fingerprint,
    path: Path,
    chosen: Collection[int] | None,
    report: Report,
    advance: Callable[[], None],
) -> Iterator[tuple[_Open, Made]]:
    """Yield the receipts to compute. Report those that cannot be computed, or have no token."""
    for number, line in enumerate(_lines(path), 1):
        if chosen is not None and number not in chosen:
            continue
        try:
            receipt, digest = _read(line)
            if receipt.token_ids or receipt.finish_reason in WHOLE:
                made = _made(llm, own, receipt)
                yield _Open(number, receipt, made[0], digest), made
                continue
            _judge(_Open(number, receipt, RequestOutput("", None, [], [CompletionOutput(0)]), digest), own, report)
        except QuireError as error:
            found = error.field if isinstance(error, (_Wrong, RequestError)) else None
            report.unverified.append(Unverified(number, found, str(error)))
        advance()


def _read(line: bytes) -> tuple[_Receipt, str]:
    """Return the receipt of a line, and the digest of its request."""
    try:
        receipt = _Receipt.model_validate_json(line, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        name = ".".join(map(str, found["loc"]))
        if found["type"] == "json_invalid" and not line.endswith(b"\n"):
            message = f"it is cut off after {len(line)} bytes, as by the end of the process that wrote it"
            raise _Wrong(None, message) from error
        if not name:
            raise _Wrong(None, f"it is no receipt: {found['msg']}") from error
        if found["type"] == "missing":
            raise _Wrong(name, f"the field {name} is missing") from error
        raise _Wrong(name, f"{name} is {_shown(found['input'])}; {found['msg']}") from error
    return receipt, request_digest(json.loads(line)["request"])


def _made(llm: LLM, own: Fingerprint, receipt: _Receipt) -> Made:
    """Return the request that computes an answer again. Raises QuireError if it cannot be computed."""
    if receipt.weights_versions:
        message = f"weights_versions is {receipt.weights_versions}: the weights were replaced before the answer ended"
        raise _Wrong("weights_versions", message)
    for part in ANOTHER_MODEL:
        recorded, here = receipt.fingerprint.get(part), own.parts[part]
        if recorded != here:
            message = f"fingerprint.{part} is {recorded}, and that of this model {here}: it is of another model"
            raise _Wrong(f"fingerprint.{part}", message)
    asked, count = receipt.request, max(1, len(receipt.token_ids) + (receipt.finish_reason in WHOLE))
    if unknown := asked.sampling.keys() - DEFAULTS.keys():
        name = f"request.sampling.{min(unknown)}"
        raise _Wrong(name, f"there is no field {name}; it must be one of SamplingParams")
    given = dict(asked.sampling)
    if isinstance(bias := given.get("logit_bias"), Mapping):
        given["logit_bias"] = {int(token) if token.isdecimal() else token: value for token, value in bias.items()}
    most = given.get("max_tokens", DEFAULTS["max_tokens"])
    try:
        SamplingParams(**given)
        most = count if most is None else min(most, count)
        given |= {"max_tokens": most, "min_tokens": min(given.get("min_tokens", 0), most)}
        sampling = SamplingParams(**given, seed=asked.seed, logprobs=0)
        guide = None if asked.grammar is None else llm.factory.grammars().compile(Spec(*asked.grammar))
        options = RequestOptions(0, asked.cache_salt, _adapter(llm, asked.lora))
        prompt = TokenizedPrompt(None, asked.prompt_token_ids)
        constraints = llm.factory.constraints(sampling)
        output, [request] = llm.factory.generation(
            llm.factory.next_name(), prompt, sampling, options, constraints, guide
        )
        output.outputs[0].index = request.sample_index = asked.sample
        llm.engine.check(request)
    except RequestError as error:
        name = "request" if error.field is None else f"request.sampling.{error.field}"
        raise _Wrong(name, f"{name} cannot be computed here: {error}") from error
    return output, [request]


def _adapter(llm: LLM, recorded: list[str] | None) -> str | None:
    """Return the name here of an adapter, given its name and the digest of its weights."""
    if recorded is None:
        return None
    loaded = {} if llm.engine.loras is None else llm.engine.loras.by_name
    for name, lora in loaded.items():
        if lora.digest == recorded[1]:
            return name
    name, digest = recorded
    message = f"request.lora is {name!r} with weights {digest}, which no loaded adapter has; give --lora {name}=PATH"
    raise _Wrong("request.lora", message)


def _judge(one: _Open, own: Fingerprint, report: Report) -> None:
    """Compare an answer with its receipt."""
    receipt, sample = one.receipt, one.output.outputs[0]
    if sample.error is not None and len(sample.token_ids) < len(receipt.token_ids):
        report.unverified.append(Unverified(one.line, None, f"it cannot be computed here: {sample.error}"))
        return
    difference = _difference(receipt, sample, one.digest)
    if difference is None:
        report.num_same += 1
        return
    reason = explained(receipt.fingerprint, own)
    if one.digest != receipt.request_digest:
        reason = f"request_digest is {receipt.request_digest}, and that of this request {one.digest}: it was changed"
    report.different.append(Difference(one.line, receipt.id, *difference, reason))


def _difference(
    receipt: _Receipt, sample: CompletionOutput, digest: str
) -> tuple[str, int | None, int | str | None, int | str | None] | None:
    """Return the field, the position and both values of the first difference. digest: of the receipt's request."""
    tokens, is_whole = receipt.token_ids, receipt.finish_reason in WHOLE
    computed = sample.token_ids if is_whole else sample.token_ids[: len(tokens)]
    for position, (was, now) in enumerate(zip_longest(tokens, computed)):
        if was != now:
            return "token_ids", position, was, now
    if digest != receipt.request_digest:
        return "request", None, receipt.request_digest, digest
    first = receipt.logprobs_from
    each = zip((sample.logprobs or [])[first : len(tokens)], tokens[first:], strict=True)
    found = [by_token[token].logprob for by_token, token in each]
    was_digest, now_digest = receipt.logprobs_digest, logprobs_digest(digest, found)
    if was_digest != now_digest:
        at = next(i for i, (was, now) in enumerate(zip_longest(was_digest, now_digest)) if was != now)
        where = first + min(at // SHORT, len(found) - 1) if found else None
        return "logprobs_digest", where, was_digest[at : at + SHORT], now_digest[at : at + SHORT]
    for name in ("finish_reason", "stop_reason") if is_whole else ():
        if (was := getattr(receipt, name)) != (now := getattr(sample, name)):
            return name, None, was, now
    return None


def explained(recorded: Mapping[str, str], own: Fingerprint) -> str:
    """Return why the numbers of a system may differ from those of this one, by the parts of their fingerprints."""
    by_cause: dict[str, list[str]] = {}
    for part in own.difference(Fingerprint(recorded)):
        cause = next((cause for cause, parts in CAUSES.items() if part in parts), None)
        cause = cause or ("arithmetic" if part.startswith("bits of ") else "options")
        was, here = recorded.get(part, "missing"), own.parts.get(part, "missing")
        shown = "" if DIGEST.fullmatch(was) or DIGEST.fullmatch(here) else f" ({was}, here {here})"
        by_cause.setdefault(cause, []).append(part + shown)
    if not by_cause:
        return "both fingerprints are the same, so the receipt was changed, or one of the machines is faulty"
    return "the systems differ in " + "; ".join(f"{cause}: {', '.join(parts)}" for cause, parts in by_cause.items())


def _shown(value: object) -> str:
    text = "nothing" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
