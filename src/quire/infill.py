"""Filling in: the prompt by which a model is asked for what stands between two texts, where it was taught that."""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import RequestError
from quire.text import Tokenizer


class Form(NamedTuple):
    """Tokens that a family's models were taught with: one, the text before, one, the text after, one."""

    prefix: str  # before the text before
    suffix: str  # before the text after
    middle: str  # after it, and the model goes on
    ends: tuple[str, ...]  # what ends the middle besides the model's own end


FORMS = (
    # Qwen2.5-Coder, CodeGemma, Granite 4
    Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>")),
    # StarCoder, StarCoder 2, Granite Code, Granite 3
    Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<|endoftext|>")),
    # SantaCoder
    Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    # DeepSeek Coder
    Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>",)),
    # Code Llama
    Form("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
)
ANCHOR = "☺"  # a letter that no token has together with others


class Infill(NamedTuple):
    """A prompt that asks for a middle."""

    tokens: list[int]
    ends: list[int]  # tokens that end the middle


def infill(tokenizer: Tokenizer, before: list[int], after: str) -> Infill:
    """The prompt for what stands between tokens and a text. Raises RequestError where the tokenizer has no such tokens.

    before: may begin with the special tokens that the model expects before a prompt.
    """
    form = next((one for one in FORMS if all(tokenizer.token_id(text) is not None for text in one[:3])), None)
    if form is None:
        known = ", ".join(one.middle for one in FORMS)
        raise RequestError(
            f"suffix is given, and this model was not taught to fill in: its tokenizer has no token for the middle "
            f"({known}); leave suffix out",
            "suffix",
        )
    [*marks] = (tokenizer.token_id(text) for text in form[:3])
    prefix, suffix, middle = (mark for mark in marks if mark is not None)
    leading = tokenizer.leading_tokens
    own = before[len(leading) :] if before[: len(leading)] == leading else before
    ends = [token for text in form.ends if (token := tokenizer.token_id(text)) is not None]
    return Infill([*before[: len(before) - len(own)], prefix, *own, suffix, *_inner(tokenizer, after), middle], ends)


def _inner(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that does not stand at the beginning, where some tokenizers put a space before it."""
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False)
    whole = tokenizer.encode(ANCHOR + text, add_special_tokens=False)
    if whole[: len(anchor)] == anchor:
        return whole[len(anchor) :]
    return tokenizer.encode(text, add_special_tokens=False)
