"""The bodies of /tokenize and /detokenize, and the answers about the tokenizer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import NotRequired

from quire.server.http.api_error import Answer
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


class Tokens(Answer):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class DetokenizedText(Answer):
    """The answer of /detokenize."""

    prompt: str


class TokenizerInfo(Answer):
    """The answer of /tokenizer_info."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None
    chat_template: str | None
