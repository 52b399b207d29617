"""The bodies of /tokenize and /detokenize, and the answers about the tokenizer, in vLLM's and llama-server's form."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import NotRequired

from quire.server.http.api_error import Answer
from quire.server.protocol.body import MAX_PROMPT, Body, Name, Off, On, Text, Token
from quire.server.protocol.chat import Messages, Rendering


class TokenizeRequest(Rendering):
    """The body of /tokenize: a prompt, messages, or llama-server's content."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # None: only for a prompt; the chat template adds its own
    return_token_strs: Off = False

    content: Text | None = None  # the next fields belong to it
    add_special: Off = False
    parse_special: On = True  # False: the text of a special token is plain text
    with_pieces: Off = False


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[Token], Field(max_length=MAX_PROMPT, fail_fast=True)]


class Piece(Answer):
    """A token and its text, or its bytes if they are not complete characters."""

    id: int
    piece: str | list[int]


class Tokens(Answer):
    """The answer of /tokenize. For llama-server's content it has only the tokens."""

    count: NotRequired[int]
    max_model_len: NotRequired[int]
    tokens: list[int] | list[Piece]
    token_strs: NotRequired[list[str]]


class DetokenizedText(Answer):
    """The answer of /detokenize: the text, by vLLM's name and by llama-server's."""

    prompt: str
    content: str


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
