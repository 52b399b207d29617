"""The forms of a prompt as dictionaries, with vLLM's names. `LLM.generate` also takes plain texts and token ids."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["TextPrompt", "TokensPrompt"]


class _Salted(TypedDict, total=False):
    cache_salt: str  # prompts with different salts share no cached blocks


class TextPrompt(_Salted):
    """A prompt as a text: `{"prompt": text}`."""

    prompt: str


class TokensPrompt(_Salted):
    """A prompt as token ids: `{"prompt_token_ids": ids}`."""

    prompt_token_ids: list[int]
