"""The body and the answers of the routes that replace weights, as in SGLang, and of sleep, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from quire.server.http.api_error import Answer
from quire.server.protocol.answers import SystemFingerprint
from quire.server.protocol.body import Body, GivenName, Ignored
from quire.server.protocol.lora import MAX_PATH


class UpdateWeightsRequest(Body):
    """The body of /update_weights_from_disk."""

    model_path: Annotated[str, StringConstraints(min_length=1, max_length=MAX_PATH)]  # a directory of the server
    weight_version: GivenName | None = None  # None: the number of replacements so far
    flush_cache: Ignored[bool] = None  # no later request finds blocks of the old weights


class ReplacedWeights(Answer):
    """The answer of /update_weights_from_disk."""

    success: bool
    message: str
    weight_version: str
    system_fingerprint: SystemFingerprint


class Sleeping(Answer):
    """The answer of /is_sleeping."""

    is_sleeping: bool
