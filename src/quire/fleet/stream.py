"""NumberedStream: a stream that another gateway can continue for a client."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.frontend.jobs import Delta
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests import Made
from quire.request import FinishReason
from quire.server.api.jobs import Stream
from quire.server.api.service import Identity
from quire.server.http.api_error import ApiError

# name/created/fingerprint/sample,sample,...: each sample is characters:tokens, followed by an e if it has ended
LAST_EVENT = re.compile(
    r"([a-z]{1,16}-[0-9a-f]{32})/([0-9]{1,12})/([0-9a-f]{16})/"
    r"([0-9]{1,9}:[0-9]{1,9}e?(?:,[0-9]{1,9}:[0-9]{1,9}e?)*)"
)
ANOTHER = "RequestError: the header Last-Event-ID belongs to another request: its answer is longer than this one's"


class Known(NamedTuple):
    """The part of a sample that a client has received."""

    characters: int
    tokens: int
    is_whole: bool


NOTHING = Known(0, 0, False)


@dataclass(frozen=True)
class LastEvent:
    """The part of a stream that a client has received, parsed from the id of its last event."""

    name: str
    created: int  # seconds since 1970
    fingerprint: str  # of the replicas that continue with the same bits
    samples: tuple[Known, ...]


def last_event(header: str | None) -> LastEvent | None:
    """Parse a Last-Event-ID; None without one. Raises ApiError for one that no gateway has written."""
    if header is None:
        return None
    found = LAST_EVENT.fullmatch(header)
    if found is None:
        raise ApiError(f"the header Last-Event-ID is {header[:80]!r}; it must be the id of an event of this server's")
    samples = [(*map(int, one.removesuffix("e").split(":")), one.endswith("e")) for one in found[4].split(",")]
    known = tuple(Known(int(characters), int(tokens), bool(end)) for characters, tokens, end in samples)
    return LastEvent(found[1], int(found[2]), found[3], known)


class NumberedStream(Stream):
    """A stream whose event ids have the position of each sample, so that another gateway can send the rest."""

    def __init__(self, identity: Identity, prompts: Sequence[Made], last: LastEvent | None) -> None:
        """last: the client's last event; None for a new stream. Raises ApiError if the number of samples differs."""
        super().__init__(prompts)
        self.wanted_fingerprint = None if last is None else last.fingerprint
        self.fingerprint = ""  # of the replicas that compute it
        self._identity = identity
        self._places = {
            (output.request_id, sample.index): place
            for place, (output, sample) in enumerate((output, one) for output in self.outputs for one in output.outputs)
        }
        known = () if last is None else last.samples
        if known and len(known) != len(self._places):
            raise ApiError(f"the header Last-Event-ID names {len(known)} samples; this request has {len(self._places)}")
        self.is_continued = bool(known)
        self._delivered = list(known) or [NOTHING] * len(self._places)
        self._shown = [_shown(one) for one in self._delivered]
        # A client that has nothing of a sample has not received its echo either.
        begun = zip(self._places, self._delivered, strict=True)
        self._known = {place: one for place, one in begun if one != NOTHING}

    def news(self, output: RequestOutput) -> list[Any]:
        """Return the deltas of an output. The part that the client already has is one delta, which is not sent again.

        Until all logprobs of the prompt are known, return no delta, since the first event of each sample contains them.
        """
        of_prompt = output.prompt_logprobs
        if of_prompt is not None and len(of_prompt) < len(output.prompt_token_ids) and not output.outputs[0].finished:
            return []
        if not self._known:
            return super().news(output)
        found = []
        for sample in output.outputs:
            known = self._known.get((output.request_id, sample.index))
            if known is None:
                continue
            whole = sample.finished if known.is_whole else len(sample.token_ids) >= known.tokens
            if not whole and not sample.finished:
                continue
            if len(sample.token_ids) < known.tokens:  # the header belongs to another request
                del self._known[output.request_id, sample.index]
                found.append(Delta(output, sample.index, "", [], None, FinishReason.ERROR.value, None, ANOTHER))
                self.mark_reported(output, sample.index, 0, 0, is_whole=True)
                continue
            del self._known[output.request_id, sample.index]
            logprobs = None if sample.logprobs is None else sample.logprobs[: known.tokens]
            end = (sample.finish_reason, sample.stop_reason) if known.is_whole else (None, None)
            text, tokens = sample.text[: known.characters], sample.token_ids[: known.tokens]
            found.append(Delta(output, sample.index, text, tokens, logprobs, *end, None, is_known=True))
            self.mark_reported(output, sample.index, known.characters, known.tokens, is_whole=known.is_whole)
        if any((output.request_id, sample.index) in self._known for sample in output.outputs):
            return found
        return found + super().news(output)

    def marked(self, delta: Delta, events: list[bytes]) -> list[bytes]:
        """Return the events of a delta, each after an id line with the position that the client reaches with it."""
        if delta.is_known:
            return events
        place = self._places[delta.output.request_id, delta.sample]
        characters, tokens, _ = self._delivered[place]
        now = Known(characters + len(delta.text), tokens + len(delta.token_ids), delta.finish_reason is not None)
        self._delivered[place] = now
        before_last = [self._mark(place, now._replace(is_whole=False)) + event for event in events[:-1]]
        return before_last + [self._mark(place, now) + event for event in events[-1:]]

    def _mark(self, place: int, now: Known) -> bytes:
        """Return the id line of an event after which the client has `now` of the sample."""
        self._shown[place] = _shown(now)
        places = ",".join(self._shown)
        return f"id: {self._identity.name}/{self._identity.created}/{self.fingerprint}/{places}\n".encode("ascii")


def _shown(known: Known) -> str:
    """Return a sample's position as it appears in an event's id."""
    return f"{known.characters}:{known.tokens}{'e' if known.is_whole else ''}"
