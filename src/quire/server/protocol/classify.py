"""The body of /v1/classify, and its answer."""

from __future__ import annotations

from typing import Literal

from quire.server.http.api_error import Answer
from quire.server.protocol.answers import SystemFingerprint, Usage
from quire.server.protocol.body import Inputs
from quire.server.protocol.embeddings import Embedding


class ClassifyRequest(Embedding):
    """The body of /v1/classify, as in vLLM."""

    input: Inputs


class Class(Answer):
    """The scores of all labels for one input."""

    index: int
    label: str | None  # the one with the highest score; null if there is only one
    probs: list[float]
    num_classes: int


class Classified(Answer):
    """The answer of /v1/classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: Usage
    system_fingerprint: SystemFingerprint
