"""Text: tokenizer, incremental detokenizer, and the outputs that callers see. No other module handles text."""

from __future__ import annotations

import json
import logging
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from quire.engine.beam import Hypothesis
from quire.engine.constraints import constraints_of
from quire.engine.engine import Engine
from quire.errors import ModelError, RequestError
from quire.models.files import Where, files_of
from quire.request import (
    Constraints,
    Event,
    FinishReason,
    Group,
    PrefixReport,
    Request,
    SamplingParams,
    Task,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer as FastTokenizer

log = logging.getLogger("quire")

REPLACEMENT = "\ufffd"  # the decoded form of an incomplete character
MAX_CHARACTER_TOKENS = 4  # a character has at most 4 bytes, and a token has at least one
MAX_HELD_TOKENS = 16  # longer runs without a complete character are invalid, so they are not held back

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# GPT-2's letters for bytes: the byte itself if it is printable, else the next letter from U+0100 on.
BYTE_LETTERS = {chr(byte): bytes([byte]) for byte in PRINTABLE} | {
    chr(0x100 + i): bytes([byte]) for i, byte in enumerate(sorted({*range(0x100)}.difference(PRINTABLE)))
}
BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # sentencepiece's token of a single byte
WORD_MARK = "\u2581"  # sentencepiece's mark for a space


class Tokenizer:
    """A model's tokenizer. It is thread-safe."""

    def __init__(self, where: Where) -> None:
        """Read the tokenizer. Raises ModelError if it is missing or unreadable."""
        files = files_of(where)
        found = files.tokenizer()
        if found is None:
            raise ModelError(f"{files.path} has no tokenizer")
        self._fast = found
        self._fast.no_truncation()  # a tokenizer saved after training may still cut and pad
        self._fast.no_padding()
        self._single: dict[tuple[int, bool], str] = {}  # the text of tokens alone, which every new token needs
        self._decoders = _decoders(self._fast)
        self._marks_words = not {"ByteFallback", "Metaspace"}.isdisjoint(self._decoders)
        self._added = {
            token: added.content.replace(WORD_MARK, " ") if self._marks_words and not added.special else added.content
            for token, added in self._fast.get_added_tokens_decoder().items()
        }
        self.special_tokens = frozenset(t for t, one in self._fast.get_added_tokens_decoder().items() if one.special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included. A model's own vocabulary may be larger."""
        return int(self._fast.get_vocab_size())

    @cached_property
    def max_token_length(self) -> int:
        """Upper bound of the characters of a token. It may be a few too large, since bytes are written as letters."""
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """The ids of tokens that were added to the vocabulary, special ones included, by their texts."""
        return {text: token for token, text in self._added.items()}

    @cached_property
    def leading_tokens(self) -> list[int]:
        """The special tokens that the model expects before a prompt."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text.

        Args:
            text: the text.
            add_special_tokens: add the special tokens that the model expects around a prompt.

        Returns:
            The token ids.

        Raises:
            RequestError: the text cannot be encoded, for example because it contains half of a surrogate pair.
        """
        try:
            # As a batch, since the library lets other threads run only during batches.
            [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except Exception as error:  # the library raises bare Exceptions
            half = next((i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
            if half is None:
                raise RequestError(f"the text cannot be encoded: {error}", "prompt") from error
            code = f"U+{ord(text[half]):04X}"
            raise RequestError(f"the text has {code}, half of a character, at position {half}", "prompt") from error

    def encode_form(self, form: Sequence[str], texts: Sequence[str]) -> list[int]:
        """Tokenize a form with texts inserted, one after each of its parts except the last.

        Only the form itself can contain added tokens: text that looks like one and overlaps with an inserted text is
        split after its first character. Raises RequestError for a text that cannot be encoded.
        """
        whole, inside = form[0], []
        for text, after in zip(texts, form[1:], strict=True):
            inside.append((len(whole), len(whole) + len(text)))
            whole += text + after
        found = ((one.start(), one.start() + len(one[1])) for one in self._added_text.finditer(whole))
        cuts = [begin + 1 for begin, end in found if any(begin < last and end > first for first, last in inside)]
        pieces = (whole[begin:end] for begin, end in pairwise([0, *cuts, len(whole)]))
        return [token for piece in pieces for token in self.encode(piece, add_special_tokens=False)]

    @cached_property
    def _added_text(self) -> re.Pattern[str]:
        """Pattern of the longest added token at each position, except white space, which is plain text."""
        texts = sorted((one for one in self.added_tokens if len(one) > 1 and one.strip()), key=len, reverse=True)
        return re.compile(f"(?=({'|'.join(map(re.escape, texts))}))" if texts else "(?!)")

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens.

        Args:
            tokens: token ids.
            skip_special_tokens: leave special tokens out of the text.

        Returns:
            The text. Incomplete characters become U+FFFD.
        """
        if len(tokens) != 1:
            return str(self._fast.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        [token] = tokens
        text = self._single.get((token, skip_special_tokens))
        if text is None:
            text = str(self._fast.decode([token], skip_special_tokens=skip_special_tokens))
            self._single[token, skip_special_tokens] = text
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which need not be complete characters; empty for an id without a token."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            return b"".join(BYTE_LETTERS.get(letter) or letter.encode() for letter in piece)
        if "ByteFallback" in self._decoders and (match := BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        if self._marks_words:
            return piece.replace(WORD_MARK, " ").encode()
        return self.decode([token], skip_special_tokens=False).encode()

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text, special or not, or None without such a token."""
        found = self._fast.token_to_id(text)
        return None if found is None else int(found)

    def json(self) -> str:
        """Return the contents of a `tokenizer.json`."""
        return str(self._fast.to_str())


def _decoders(tokenizer: FastTokenizer) -> frozenset[str]:
    """Return the names of a tokenizer's decoding steps."""
    if tokenizer.decoder is None:
        return frozenset()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(step["type"] for step in decoder.get("decoders", [decoder]))


def find_tokenizer(where: Where) -> Tokenizer | None:
    """Return a model's tokenizer, or None if it has none: such a model takes and returns token ids."""
    files = files_of(where)
    return Tokenizer(files) if files.has_tokenizer else None


class Detokenizer:
    """Converts one sequence's tokens into text as they arrive, without splitting a character.

    The text of a token depends on the tokens before it (a leading space, the first bytes of a character). So a short
    window is decoded with and without the new tokens, and the difference is the new text. An incomplete character at
    its end is held back until it is complete. The text of the prompt is never part of the new text, except for a last
    character that the prompt leaves incomplete and the new tokens complete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._left_out = tokenizer.special_tokens if skip_special_tokens else frozenset()
        # Context, then tokens whose text is still held back. If the prompt ends within a character, its last tokens
        # are held back too, since the new ones may complete that character.
        tail = prompt[-4 * MAX_HELD_TOKENS :]  # decoding a whole long prompt would be slow, for each sample
        kept = [token for token in tail if token not in self._left_out]
        whole = kept[-MAX_HELD_TOKENS:]
        start, end = self._clean_cut(whole, is_cut_off=len(prompt) > len(tail) or len(kept) > len(whole))
        self._window = whole[start:]
        self._num_prompt = len(self._window)  # tokens of the window that belong to the prompt
        self._num_told = self._num_prompt - end  # tokens of the window whose text was returned or is the prompt's

    def _clean_cut(self, whole: Sequence[int], is_cut_off: bool) -> tuple[int, int]:
        """Return the tokens to drop at the start and at the end, so that the others decode to complete characters."""
        if is_cut_off:
            # Context cut within a character would decode wrongly, and so would all text after it with tokenizers that
            # decode runs of bytes together.
            for end in range(MAX_CHARACTER_TOKENS):
                for start in range(MAX_CHARACTER_TOKENS):
                    text = self._decode(whole[start : len(whole) - end])
                    if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                        return start, end
        ends = (end for end in range(len(whole)) if not self._decode(whole[: len(whole) - end]).endswith(REPLACEMENT))
        return 0, next(ends, len(whole))

    def add(self, token: int) -> str:
        """Append a token. Return the text that is now certain."""
        if token in self._left_out:
            return ""
        self._window.append(token)
        certain, decoded = len(self._window), self._decode(self._window)
        if decoded.endswith(REPLACEMENT):
            if certain - self._num_told < MAX_HELD_TOKENS:
                return ""
            certain -= MAX_CHARACTER_TOKENS - 1  # the rest stays invalid; only these may still become a character
            decoded = self._decode(self._window[:certain])
        text = self._new_text(decoded)
        # The context must not grow without text either, as with ids that the tokenizer does not know.
        surplus = max(self._num_told if text else 0, certain - MAX_HELD_TOKENS)
        self._window, self._num_told = self._window[surplus:], certain - surplus
        self._num_prompt = max(0, self._num_prompt - surplus)
        return text

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._new_text(self._decode(self._window))

    def _new_text(self, decoded: str) -> str:
        """Return the new part of the window's text."""
        known = len(self._decode(self._window[: self._num_told]))
        if self._num_prompt > self._num_told:  # the prompt's incomplete character may be complete now
            known = max(known, _num_common(self._decode(self._window[: self._num_prompt]), decoded))
        return decoded[known:]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip)


def _num_common(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# ------------------------------------------------------------------------------------------------- outputs


@dataclass(frozen=True)
class Logprob:
    """One candidate token at a position."""

    logprob: float  # natural logarithm, of the raw logits' softmax
    rank: int  # 1: the most probable token
    decoded_token: str | None  # None without a tokenizer


@dataclass
class CompletionOutput:
    """One sample of a prompt. It grows as tokens arrive."""

    index: int  # index of the sample, 0..n-1
    text: str = ""  # the generated text; empty without a tokenizer
    token_ids: list[int] = field(default_factory=list)  # the generated tokens
    cumulative_logprob: float | None = None  # sum over token_ids; None without logprobs
    logprobs: list[dict[int, Logprob]] | None = None  # for each position: token id -> Logprob
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | str | None = None  # the stop token or string that ended it
    error: str | None = None  # the reason of a failure, if finish_reason is "error"
    num_differences: int = field(default=0, repr=False)  # delivered tokens that differed when drawn again
    seed: int | None = None  # key of the prompt's random numbers; as SamplingParams.seed it repeats the samples

    @property
    def finished(self) -> bool:
        """True if the sample has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt and its samples."""

    request_id: str  # the id of the request
    prompt: str | None  # the prompt's text; None if token ids were given
    prompt_token_ids: list[int]  # the prompt's tokens
    outputs: list[CompletionOutput]  # the samples, in the order of their index
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # for each token; None for the first one
    prefix_report: PrefixReport | None = None  # result of the prefix cache; None until the prompt runs
    # [H], of the prompt's last token, for a request that is embedded.
    hidden_state: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    # The digest of the replica that computes it, if that is not this process, see Fingerprint.
    fingerprint: str | None = field(default=None, repr=False, compare=False)
    num_running: int = field(init=False, repr=False)  # samples that have not ended

    def __post_init__(self) -> None:
        self.num_running = sum(not output.finished for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens whose K and V were in the prefix cache; None until the prompt runs."""
        return None if self.prefix_report is None else self.prefix_report.num_cached

    @property
    def finished(self) -> bool:
        """True if all samples have ended."""
        return self.num_running == 0


def bad_sequences(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, alone and after a space. Raises RequestError without a tokenizer."""
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError("bad_words are texts, and this model has no tokenizer; logit_bias takes tokens", "bad_words")
    written = (lead + word.lstrip() for word in words for lead in ("", " "))
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in written)
    return tuple(dict.fromkeys(tokens for tokens in found if tokens))


def constraints_for(sampling: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> Constraints | None:
    """Return the constraints of sampling parameters, which all their requests may share. None: every token is allowed.

    Raises RequestError for token ids outside the vocabulary, and for bad words without a tokenizer.
    """
    return constraints_of(sampling, bad_sequences(sampling.bad_words or (), tokenizer), vocab_size)


def truncated(tokens: list[int], count: int | None, max_tokens: int | None, max_model_len: int) -> list[int]:
    """Return the prompt's last tokens, see SamplingParams.truncate_prompt_tokens.

    `max_model_len` is the limit of prompt and answer together, in tokens.
    """
    if count is None:
        return tokens
    return tokens[-(max(1, max_model_len - (max_tokens or 1)) if count == -1 else count) :]


def make_requests(
    name: str,
    text: str | None,
    tokens: list[int],
    sampling: SamplingParams,
    priority: int = 0,
    cache_salt: str = "",
    lora: str | None = None,
    constraints: Constraints | None = None,
) -> tuple[RequestOutput, list[Request]]:
    """Return a prompt's output, still empty, and the requests of its samples.

    `constraints` is the result of `constraints_for`.
    """
    output = RequestOutput(name, text, tokens, [CompletionOutput(i) for i in range(sampling.n)])
    group = Group() if sampling.n > 1 else None
    prompt = array("i", tokens)
    requests = []
    other = sampling if sampling.prompt_logprobs is None else replace(sampling, prompt_logprobs=None)
    for i in range(sampling.n):
        own = sampling if i == 0 else other  # prompt_logprobs are reported once
        request = Request(f"{name}-{i}", prompt[:], len(prompt), own, i, priority, cache_salt, group, lora=lora)
        request.constraints = constraints
        requests.append(request)
    if group is not None:
        group.members += requests
    return output, requests


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that a beam search found."""

    tokens: list[int]  # the prompt's and the generated tokens
    text: str | None  # the text of all tokens; None without a tokenizer
    cum_logprob: float  # sum over the generated tokens, natural logarithm
    score: float  # cum_logprob / number of generated tokens ** length_penalty
    finish_reason: str  # "stop" or "length"
    logprobs: list[dict[int, Logprob]] | None = None  # of each generated token, if requested


@dataclass(frozen=True)
class BeamSearchOutput:
    """One prompt and the sequences that a beam search found."""

    prompt: str | None  # the prompt's text; None if token ids were given
    prompt_token_ids: list[int]  # the prompt's tokens
    sequences: list[BeamSearchSequence]  # best first
    error: str | None = None  # the reason of a failure; then there may be no sequence


def candidates(logprobs: TokenLogprobs, decode: Callable[[int], str | None]) -> dict[int, Logprob]:
    """Return the token at a position and the most probable ones: token id -> Logprob. `decode` returns the texts."""
    chosen = {logprobs.token: Logprob(logprobs.logprob, logprobs.rank, decode(logprobs.token))}
    top = {token: Logprob(logprob, rank, decode(token)) for rank, (token, logprob) in enumerate(logprobs.top, start=1)}
    return chosen | top


def beam_logprobs(found: Hypothesis, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]] | None:
    """Return the logprobs of a hypothesis's tokens, or None if they were not requested."""

    def decode(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    return [candidates(one, decode) for one in found.logprobs] if found.logprobs else None


def beam_sequences(
    prompt: Sequence[int], found: Sequence[Hypothesis], tokenizer: Tokenizer | None
) -> list[BeamSearchSequence]:
    """Return the hypotheses as sequences with prompt and text."""
    return [
        BeamSearchSequence(
            tokens := [*prompt, *hypothesis.tokens],
            None if tokenizer is None else tokenizer.decode(tokens),
            hypothesis.cumulative_logprob,
            hypothesis.score,
            hypothesis.finish_reason.value,
            beam_logprobs(hypothesis, tokenizer),
        )
        for hypothesis in found
    ]


@dataclass
class _Sample:
    """A running request and the sample of its output."""

    source: Request
    request: RequestOutput
    output: CompletionOutput
    sampling: SamplingParams
    detokenizer: Detokenizer | None
    ended: deque[RequestOutput]
    text: str = ""  # the full text; callers see the part in which no stop string can have begun
    searched: int = 0  # length of that part


class TextEngine:
    """Queues requests in an engine and converts their events into outputs with text. Stop strings end requests."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._samples: dict[str, _Sample] = {}
        self._decoded: dict[int, str] = {}  # the text of each token that was a candidate, at most the vocabulary

    def add(self, request: Request, output: RequestOutput, ended: deque[RequestOutput]) -> None:
        """Queue a request and collect its events in the output's sample of the same index.

        When all samples have ended, the output is appended to `ended`. Raises RequestError, queueing nothing, as
        Engine.add does.
        """
        first = output.outputs[0]  # of a resumed request, the only one
        # Siblings share its seed; their index distinguishes them.
        if request.sample_index > first.index and request.sampling.seed is None:
            request.sampling = replace(request.sampling, seed=first.seed)
        sampling, sample = request.sampling, output.outputs[request.sample_index - first.index]
        detokenizer = (
            Detokenizer(self._tokenizer, output.prompt_token_ids, sampling.skip_special_tokens)
            if self._tokenizer and request.task is Task.GENERATE and sampling.detokenize
            else None
        )
        self._engine.add(request)
        sample.seed = request.seed
        if sampling.logprobs is not None:
            sample.logprobs, sample.cumulative_logprob = [], 0.0
        if sampling.prompt_logprobs is not None and request.sample_index == 0:
            output.prompt_logprobs = [None]
        self._samples[request.id] = place = _Sample(request, output, sample, sampling, detokenizer, ended)
        if request.num_generated or request.to_check:
            _restore(place)

    def process(self, events: Sequence[Event]) -> Iterator[tuple[Event, RequestOutput]]:
        """Process a step's events. Yield each event with the output that it changed.

        If the text ended a sample, for example at a stop string, the event gets its finish reason, and later events of
        the sample are dropped.
        """
        for event in events:
            sample = self._samples.get(event.request_id)
            if sample is not None:  # else a stop string has ended it
                if sample.request.prefix_report is None:
                    sample.request.prefix_report = sample.source.cache.prefix_report
                try:
                    self._process_event(sample, event)
                except Exception as error:  # of a tokenizer; the other requests continue
                    log.exception("request %s cannot be detokenized; it ends with an error", event.request_id)
                    sample.output.finish_reason = FinishReason.ERROR.value
                    sample.output.error = f"{type(error).__name__}: {error}"
                    self._engine.finish(event.request_id, FinishReason.ERROR)
                if sample.output.finished:
                    event = event._replace(
                        finish_reason=FinishReason(sample.output.finish_reason), error=sample.output.error
                    )
                    del self._samples[event.request_id]
                    sample.request.num_running -= 1
                    if sample.request.finished:
                        sample.ended.append(sample.request)
                yield event, sample.request

    def _process_event(self, sample: _Sample, event: Event) -> None:
        output = sample.output
        if sample.request.prompt_logprobs is not None and output.index == 0:
            sample.request.prompt_logprobs += [candidates(position, self._decode) for position in event.prompt_logprobs]
        if event.hidden_state is not None:
            sample.request.hidden_state = event.hidden_state
        if event.drawn is not None:
            output.num_differences += event.drawn != event.token
        elif event.token is not None:
            output.token_ids.append(event.token)
            if event.logprobs is not None and output.logprobs is not None:
                output.logprobs.append(candidates(event.logprobs, self._decode))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + event.logprobs.logprob
        if event.finish_reason is not None:
            output.finish_reason = event.finish_reason.value
            output.stop_reason, output.error = event.stop_token, event.error
        if sample.detokenizer is not None:
            # The text of a token that ends the request is left out, like that of a stop string.
            shown = event.finish_reason is not FinishReason.STOP or sample.sampling.include_stop_str_in_output
            if event.token is not None and event.drawn is None and shown:
                sample.text += sample.detokenizer.add(event.token)
            if output.finished:
                sample.text += sample.detokenizer.finish()
            self._look_for_stop(sample, event.request_id)
            output.text = sample.text if output.finished else sample.text[: sample.searched]

    def _look_for_stop(self, sample: _Sample, request_id: str) -> None:
        """End the sample at the first stop string in its text."""
        output, stops = sample.output, sample.sampling.stop_strings
        if len(output.token_ids) > sample.sampling.min_tokens:
            found = [(at, stop) for stop in stops if (at := sample.text.find(stop, sample.searched)) >= 0]
            if found:
                at, stop = min(found)
                kept = at + len(stop) if sample.sampling.include_stop_str_in_output else at
                sample.text = sample.text[:kept]
                output.finish_reason, output.stop_reason = FinishReason.STOP.value, stop
                self._engine.finish(request_id, FinishReason.STOP)
        sample.searched = _certain(sample.text, sample.searched, stops)

    def _decode(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._decoded.get(token)
        if text is None:
            text = self._decoded[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def _restore(sample: _Sample) -> None:
    """Restore a resumed request's output to its state at the interruption. Only the caller has its logprobs."""
    request = sample.source
    delivered = [*request.tokens[request.num_prompt :], *request.to_check]
    sample.output.token_ids += delivered
    if sample.detokenizer is not None:
        sample.text = "".join([sample.detokenizer.add(token) for token in delivered])
        sample.searched = _certain(sample.text, 0, sample.sampling.stop_strings)
        sample.output.text = sample.text[: sample.searched]


def _certain(text: str, searched: int, stops: Sequence[str]) -> int:
    """Return the length of the part of a text in which no stop string can have begun.

    `searched` is that length of a shorter text. Each position is examined once as the text grows, so long stop strings
    cost no more than short ones.
    """
    longest = max((len(stop) for stop in stops), default=1) - 1
    for at in range(max(searched, len(text) - longest), len(text)):
        end = text[at:]
        if any(stop.startswith(end) and stop != end for stop in stops):
            return at
    return len(text)
