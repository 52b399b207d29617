"""Fill-in-the-middle: the prompt that asks a model for the text between two others, if it was trained for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.errors import RequestError
from quire.frontend.tokenizer import Tokenizer


class Form(NamedTuple):
    """The special tokens that a family's models were trained with: prefix, text, suffix, text, middle."""

    prefix: str  # precedes the text before the gap
    suffix: str  # precedes the text after the gap
    middle: str  # ends the prompt; the model continues with the missing text
    ends: tuple[str, ...]  # tokens that end the middle, in addition to the model's own end-of-sequence tokens
    repository: str = ""  # precedes the name of a repository, if the models were trained with texts of other files
    file: str = ""  # precedes the name and the text of each file


FORMS = (
    # Qwen2.5-Coder, CodeGemma, Granite 4
    Form(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>"),
        "<|repo_name|>",
        "<|file_sep|>",
    ),
    # StarCoder, StarCoder 2, Granite Code, Granite 3
    Form(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<file_sep>", "<|endoftext|>"),
        "<repo_name>",
        "<file_sep>",
    ),
    # SantaCoder
    Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    # DeepSeek Coder
    Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>",)),
    # Code Llama
    Form("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
)
# Names that a client does not give: of the repository, and of the file with the gap.
REPOSITORY_NAME, FILE_NAME = "project", "file"
ANCHOR = "☺"  # a character that no token contains together with others


class Infill(NamedTuple):
    """A prompt that asks for a middle."""

    tokens: list[int]
    ends: list[int]  # tokens that end the middle


def infill(
    tokenizer: Tokenizer, before: list[int], after: str, extra: Sequence[tuple[str, str]] = (), room: int = 0
) -> Infill:
    """Return the prompt that asks for the text between `before` and `after`.

    `before` may begin with the special tokens that the model expects before a prompt. extra: names and texts of other
    files, the most relevant last. Their last tokens precede the prompt, as many as there is room for in `room` tokens.
    Raises RequestError if the tokenizer has no tokens for infilling.
    """
    form = next((one for one in FORMS if all(tokenizer.token_id(text) is not None for text in one[:3])), None)
    if form is None:
        known = ", ".join(one.middle for one in FORMS)
        raise RequestError(
            f"this model was not trained to fill in text before a suffix: its tokenizer has no token for the middle "
            f"({known}); without a suffix, /v1/completions continues a prompt",
            "suffix",
        )
    [*marks] = (tokenizer.token_id(text) for text in form[:3])
    prefix, suffix, middle = (mark for mark in marks if mark is not None)
    leading = tokenizer.leading_tokens
    own = before[len(leading) :] if before[: len(leading)] == leading else before
    ends = [token for text in form.ends if (token := tokenizer.token_id(text)) is not None]
    first, gap = before[: len(before) - len(own)], [prefix, *own, suffix, *_inner(tokenizer, after), middle]
    context = _context(tokenizer, form, extra) if extra else []
    context = context[max(0, len(context) - max(0, room - len(first) - len(gap))) :]
    return Infill([*first, *context, *gap], ends)


def _context(tokenizer: Tokenizer, form: Form, extra: Sequence[tuple[str, str]]) -> list[int]:
    """Return the tokens of other files, in the form of a repository if the model knows one."""
    repository, file = tokenizer.token_id(form.repository), tokenizer.token_id(form.file)
    if repository is None or file is None:
        return [token for _, text in extra for token in _inner(tokenizer, f"{text}\n")]
    texts = [*(f"{name}\n{text}\n" for name, text in extra), f"{FILE_NAME}\n"]
    files = [token for text in texts for token in (file, *_inner(tokenizer, text))]
    return [repository, *_inner(tokenizer, f"{REPOSITORY_NAME}\n"), *files]


def _inner(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize a text that is not at the beginning of a prompt, where some tokenizers would add a space before it."""
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False)
    whole = tokenizer.encode(ANCHOR + text, add_special_tokens=False)
    if whole[: len(anchor)] == anchor:
        return whole[len(anchor) :]
    return tokenizer.encode(text, add_special_tokens=False)
