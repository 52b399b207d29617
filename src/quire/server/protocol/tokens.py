"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quire.server.protocol.body import MAX_PROMPT, Body, Name, Off, Text, Token
from quire.server.protocol.chat import Messages, Rendering


class TokenizeRequest(Rendering):
    """The body of /tokenize: a prompt, or messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # None: only for a prompt; the chat template adds its own
    return_token_strs: Off = False


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[Token], Field(max_length=MAX_PROMPT, fail_fast=True)]
