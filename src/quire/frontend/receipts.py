"""Receipts: a line of JSON for each answer, from which `quire verify` computes it again.

A receipt has the request, its seed included, the tokens, a digest of their logprobs, and the parts of the fingerprint
of the system. Embeddings, log-likelihoods and beam searches have none.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from quire.errors import ConfigError
from quire.fingerprint.fingerprint import DIGEST_SIZE, Fingerprint
from quire.frontend.outputs import CompletionOutput
from quire.request import Request, SamplingParams
from quire.sandbox.grammar import GrammarGuide
from quire.sandbox.thinking import ThinkingGuide

log = logging.getLogger("quire")

FORMAT = 1  # raised when a reader of older receipts would misread newer ones
SHORT = 4  # hexadecimal digits of a position in `logprobs_digest`
# Fields of SamplingParams that are left out: they are stored elsewhere in the receipt, or change no token.
NOT_STORED = {"n", "seed", "logprobs", "prompt_logprobs", "structured_outputs", "truncate_prompt_tokens", "output_kind"}
DEFAULTS = {one.name: one.default for one in fields(SamplingParams) if one.name not in NOT_STORED}


class Receipts:
    """Appends receipts to a file. If the file cannot be written, that is logged once, and answers are served.

    Args:
        path: the file. Lines that it has already are kept.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.fingerprint = Fingerprint({})  # of the system; set by LLM
        self.path = path
        self._num_lost = 0  # receipts since the last one that was written
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._is_torn = _ends_within_a_line(path, os.fstat(self._file))  # by a process that was killed
        except OSError as error:
            message = f"receipts is {path!r}, which cannot be opened: {error.strerror}; give a file that can be written"
            raise ConfigError(message) from error

    def write(self, request: Request, sample: CompletionOutput, prompt: list[int], logprobs: Collection[float]) -> None:
        """Append the receipt of a sample that has ended. logprobs: of its last tokens, those computed here."""
        asked = described(request, prompt)
        digest = request_digest(asked)
        receipt = {
            "receipt": FORMAT,
            "id": request.id,
            "time": round(time.time(), 3),
            "request": asked,
            "request_digest": digest,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "logprobs_from": len(sample.token_ids) - len(logprobs),
            "logprobs_digest": logprobs_digest(digest, logprobs),
            "fingerprint": dict(self.fingerprint.parts),
        }
        if len(sample.weights_versions) > 1:
            receipt["weights_versions"] = sample.weights_versions
        self._append(json.dumps(receipt, default=_plain, separators=(",", ":")).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        line = b"\n" * self._is_torn + line
        try:
            written = os.write(self._file, line)
        except OSError as error:
            self._lose(error.strerror)
            return
        self._is_torn = written < len(line)
        if self._is_torn:
            self._lose("the disk is full")
        elif self._num_lost:
            log.warning("receipts are written to %s again; %d answers have none", self.path, self._num_lost)
            self._num_lost = 0

    def _lose(self, why: str | None) -> None:
        if not self._num_lost:
            log.error("receipts cannot be written to %s: %s; answers are served without receipts", self.path, why)
        self._num_lost += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def described(request: Request, prompt: list[int]) -> dict[str, Any]:
    """Return the part of a receipt from which the answer can be computed again."""
    sampling = request.sampling
    stored = {name: value for name, default in DEFAULTS.items() if (value := getattr(sampling, name)) != default}
    if sampling.logit_bias:
        stored["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    found = {"prompt_token_ids": prompt, "sampling": stored, "seed": request.seed, "sample": request.sample_index}
    if request.lora is not None:
        found["lora"] = [request.lora, request.lora_digest]
    if isinstance(request.guide, (GrammarGuide, ThinkingGuide)):
        found["grammar"] = list(request.guide.source)
    if request.cache_salt:
        found["cache_salt"] = request.cache_salt
    return found


def request_digest(described: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits for the request of a receipt."""
    text = json.dumps(described, default=_plain, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=DIGEST_SIZE).hexdigest()


def logprobs_digest(request: str, logprobs: Iterable[float]) -> str:
    """Return a digest of the fp32 bits of an answer's logprobs, which shows the position of a difference.

    Each position has a digest of 8 bytes, which depends on the one before it, the first one on the digest of the
    request. The text has the first two bytes of each, and all of the last one; without logprobs, the request's digest.
    """
    digest, found = bytes.fromhex(request), []
    for logprob in logprobs:
        digest = blake2b(digest + struct.pack("<f", logprob), digest_size=DIGEST_SIZE).digest()
        found.append(digest.hex())
    return "".join(one[:SHORT] for one in found[:-1]) + digest.hex()


def _ends_within_a_line(path: str, status: os.stat_result) -> bool:
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _plain(value: Any) -> Any:
    """Return a value of SamplingParams as plain data: a set, a mapping, or a number of numpy's."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Collection) else value.item()
