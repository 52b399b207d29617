"""Ledger: the output of one sample, collected from all replicas that computed it.

A sample's answer is a function of its prompt, seed and options. Each replica computes a part of it, some parts twice,
and a ledger takes each token once, in order. A client receives only tokens that were entered here before.
"""

from __future__ import annotations

from typing import Any

from quire.fleet.wire import Frame, WireError
from quire.frontend.outputs import CompletionOutput, Logprob


class Ledger:
    """The output of one sample, as the client sees it."""

    def __init__(self, output: CompletionOutput, has_logprobs: bool) -> None:
        self.output = output
        if has_logprobs:
            output.logprobs, output.cumulative_logprob = [], 0.0

    @property
    def tokens(self) -> list[int]:
        """The tokens so far."""
        return self.output.token_ids

    def enter(self, frame: Frame) -> bool:
        """Take in a frame. Return False if it has nothing new.

        The part that is already known is compared. Raises WireError, entering nothing, if it differs, if tokens are
        missing before the frame, or if the frame has tokens after the end.
        """
        output = self.output
        is_next = frame.at == len(output.token_ids) and frame.characters == len(output.text)
        if is_next and not output.finished and output.logprobs is None:  # as nearly all are
            tokens, text = frame.tokens, frame.text
        else:
            tokens, text = self._unknown(frame)
        output.token_ids += tokens
        output.text += text
        if frame.end is not None and not output.finished:
            output.finish_reason, output.stop_reason, output.error = frame.end
            return True
        return bool(tokens or text)

    def _unknown(self, frame: Frame) -> tuple[list[int], str]:
        """Return the new tokens and text of a frame, and enter its logprobs. Raises WireError."""
        output = self.output
        known, known_text = len(output.token_ids) - frame.at, len(output.text) - frame.characters
        if known < 0 or known_text < 0:
            message = f"comes after {len(output.token_ids)} tokens and {len(output.text)} characters"
            raise WireError(f"{_place(frame)} {message}")
        if frame.tokens[:known] != output.token_ids[frame.at :][: len(frame.tokens)]:
            raise WireError(f"{_place(frame)} has other tokens than those that are known: {frame.tokens}")
        if frame.text[:known_text] != output.text[frame.characters :][: len(frame.text)]:
            raise WireError(f"{_place(frame)} has another text than the one that is known: {frame.text!r}")
        tokens, text = frame.tokens[known:], frame.text[known_text:]
        if output.finished:
            if tokens or text:
                raise WireError(f"{_place(frame)} has tokens or text after the end")
            return [], ""
        if frame.end is not None and (known > len(frame.tokens) or known_text > len(frame.text)):
            raise WireError(f"{_place(frame)} is an end, and {len(output.token_ids)} tokens are known")
        if output.logprobs is not None and tokens:
            if frame.logprobs is None:
                raise WireError(f"{_place(frame)} has no logprobs, which were asked for")
            total, positions = output.cumulative_logprob or 0.0, []
            for token, candidates in zip(tokens, frame.logprobs[known:], strict=True):
                found = position(candidates, frame)
                if token not in found:
                    raise WireError(f"{_place(frame)} has logprobs of other tokens than {token}: {candidates}")
                positions.append(found)
                total += found[token].logprob
            output.logprobs += positions
            output.cumulative_logprob = total
        return tokens, text


def position(candidates: list[list[Any]], frame: Frame) -> dict[int, Logprob]:
    """Return the logprobs at one position. Raises WireError for invalid ones."""
    try:
        return {token: Logprob(float(logprob), rank, text) for token, logprob, rank, text in candidates}
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{_place(frame)} has logprobs that cannot be read: {candidates}") from error


def _place(frame: Frame) -> str:
    return f"sample {frame.sample}: the frame of tokens {frame.at} to {frame.at + len(frame.tokens)}"
