"""Tokenizer of a model and incremental detokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Literal

from quire.errors import ModelError, RequestError
from quire.models.files import Where, files_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

REPLACEMENT = "\ufffd"  # the decoded form of an incomplete character
MAX_CHARACTER_TOKENS = 4  # a character has at most 4 bytes, and a token has at least one
MAX_HELD_TOKENS = 16  # longer runs without a complete character are invalid, so they are not held back
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# GPT-2's letters for bytes: the byte itself if it is printable, else the next letter from U+0100 on.
BYTE_LETTERS = {chr(byte): bytes([byte]) for byte in PRINTABLE} | {
    chr(0x100 + i): bytes([byte]) for i, byte in enumerate(sorted({*range(0x100)}.difference(PRINTABLE)))
}
BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # sentencepiece's token of a single byte
WORD_MARK = "\u2581"  # sentencepiece's mark for a space


class Tokenizer:
    """A model's tokenizer. It is thread-safe."""

    def __init__(self, where: Where) -> None:
        """Read the tokenizer. Raises ModelError if it is missing or unreadable."""
        files = files_of(where)
        found = files.tokenizer()
        if found is None:
            raise ModelError(f"{files.path} has no tokenizer")
        self._fast = found
        self._fast.no_truncation()  # a tokenizer saved after training may still cut and pad
        self._fast.no_padding()
        self._single: dict[tuple[int, bool], str] = {}  # the text of tokens alone, which every new token needs
        self._pieces: dict[tuple[int, bool], str | None] = {}  # see `piece`
        self._decoders = _decoders(self._fast)
        self._joins_bytes = self._decoders == {"ByteLevel"}  # a text is the bytes of its tokens, one after the other
        self._marks_words = not {"ByteFallback", "Metaspace"}.isdisjoint(self._decoders)
        self._added = {
            token: added.content.replace(WORD_MARK, " ") if self._marks_words and not added.special else added.content
            for token, added in self._fast.get_added_tokens_decoder().items()
        }
        self.special_tokens = frozenset(t for t, one in self._fast.get_added_tokens_decoder().items() if one.special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included. A model's own vocabulary may be larger."""
        return int(self._fast.get_vocab_size())

    @cached_property
    def max_token_length(self) -> int:
        """Upper bound of the characters of a token. It may be a few too large, since bytes are written as letters."""
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=1)

    @property
    def tokens(self) -> dict[int, str]:
        """The tokens as the vocabulary spells them, by their ids."""
        return {token: text for text, token in self._fast.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """The ids of tokens that were added to the vocabulary, special ones included, by their texts."""
        return {text: token for token, text in self._added.items()}

    @property
    def leading_tokens(self) -> list[int]:
        """The special tokens that the model expects before a prompt."""
        return self._around[0]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the model expects before and after a prompt."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
        return ([], []) if at is None else (whole[:at], whole[at + len(plain) :])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text.

        Args:
            text: the text.
            add_special_tokens: add the special tokens that the model expects around a prompt.

        Returns:
            The token ids.

        Raises:
            RequestError: the text cannot be encoded, for example because it contains half of a surrogate pair.
        """
        try:
            # As a batch, since the library lets other threads run only during batches.
            [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except Exception as error:  # the library raises bare Exceptions
            self._check_whole(text)
            raise RequestError(f"the text cannot be encoded: {error}", "prompt") from error

    def encode_pair(self, first: str, second: str, offset: int, longest: int | None = None) -> list[int]:
        """Tokenize two texts that a model reads together.

        Args:
            first: the first text.
            second: the second text.
            offset: added to the token ids of the second text's type, see `PoolingConfig`.
            longest: cut the longer text, then both, so that with special tokens there are no more; None: cut nothing.

        Returns:
            The token ids.

        Raises:
            RequestError: see `encode`.
        """
        for text in (first, second):
            self._check_whole(text)
        one, other = (self._fast.encode(text, add_special_tokens=False) for text in (first, second))
        if longest is not None:
            room = max(0, longest - self._fast.num_special_tokens_to_add(is_pair=True))
            if len(one) + len(other) > room:
                less = min(len(one), len(other), room // 2)
                kept = less if len(one) <= len(other) else room - less
                one.truncate(kept)
                other.truncate(room - kept)
        encoding = self._fast.post_process(one, other)
        return [token + offset * kind for token, kind in zip(encoding.ids, encoding.type_ids, strict=True)]

    def _check_whole(self, text: str) -> None:
        """Raise RequestError for a text with half of a surrogate pair, which cannot be encoded."""
        half = next((i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
        if half is not None:
            code = f"U+{ord(text[half]):04X}"
            raise RequestError(f"the text has {code}, half of a character, at position {half}", "prompt")

    def cut(self, tokens: list[int], longest: int, side: Literal["start", "end"]) -> list[int]:
        """Return the tokens of a text without those at one side that are too many. Special tokens around it are kept.

        Args:
            tokens: the result of `encode`.
            longest: the most tokens of the result.
            side: the side at which tokens are left out.

        Returns:
            The token ids.
        """
        if len(tokens) <= longest:
            return tokens
        before, after = self._around
        first = len(before) if tokens[: len(before)] == before else 0
        last = len(tokens) - (len(after) if after and tokens[-len(after) :] == after else 0)
        room = max(0, longest - first - (len(tokens) - last))
        kept = tokens[first : first + room] if side == "end" else tokens[last - room : last]
        return [*tokens[:first], *kept, *tokens[last:]][:longest]

    def encode_form(self, form: Sequence[str], texts: Sequence[str]) -> list[int]:
        """Tokenize a form with texts inserted, one after each of its parts except the last.

        Only the form itself can contain added tokens: text that looks like one and overlaps with an inserted text is
        split after its first character. Raises RequestError for a text that cannot be encoded.
        """
        whole, inside = form[0], []
        for text, after in zip(texts, form[1:], strict=True):
            inside.append((len(whole), len(whole) + len(text)))
            whole += text + after
        found = ((one.start(), one.start() + len(one[1])) for one in self._added_text.finditer(whole))
        cuts = [begin + 1 for begin, end in found if any(begin < last and end > first for first, last in inside)]
        pieces = (whole[begin:end] for begin, end in pairwise([0, *cuts, len(whole)]))
        return [token for piece in pieces for token in self.encode(piece, add_special_tokens=False)]

    @cached_property
    def _added_text(self) -> re.Pattern[str]:
        """Pattern of the longest added token at each position, except white space, which is plain text."""
        texts = sorted((one for one in self.added_tokens if len(one) > 1 and one.strip()), key=len, reverse=True)
        return re.compile(f"(?=({'|'.join(map(re.escape, texts))}))" if texts else "(?!)")

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens.

        Args:
            tokens: token ids.
            skip_special_tokens: leave special tokens out of the text.

        Returns:
            The text. Incomplete characters become U+FFFD.
        """
        if len(tokens) != 1:
            return str(self._fast.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        [token] = tokens
        text = self._single.get((token, skip_special_tokens))
        if text is None:
            text = str(self._fast.decode([token], skip_special_tokens=skip_special_tokens))
            self._single[token, skip_special_tokens] = text
        return text

    def piece(self, token: int, skip_special_tokens: bool) -> str | None:
        """Return the text that a token adds to a text of complete characters, or None if that depends on the text.

        The text must not be empty: some tokenizers drop a leading space.
        """
        key = token, skip_special_tokens
        if key not in self._pieces:
            text = None
            if self._joins_bytes:
                text = self.decode((token,), skip_special_tokens)
            elif self._anchor is not None:
                known = self.decode((self._anchor,), skip_special_tokens)
                text = self.decode((self._anchor, token), skip_special_tokens).removeprefix(known)
            self._pieces[key] = None if not text or REPLACEMENT in text else text
        return self._pieces[key]

    @cached_property
    def _anchor(self) -> int | None:
        """A token after which sentencepiece's decoding steps give a token the text that it has in any text, or None."""
        if not self._decoders or not self._decoders <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            return None
        return next((token for letter in "ae1." if (token := self.token_id(letter)) is not None), None)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which need not be complete characters; empty for an id without a token."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            return b"".join(BYTE_LETTERS.get(letter) or letter.encode() for letter in piece)
        if "ByteFallback" in self._decoders and (match := BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        if self._marks_words:
            return piece.replace(WORD_MARK, " ").encode()
        return self.decode([token], skip_special_tokens=False).encode()

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text, special or not, or None without such a token."""
        found = self._fast.token_to_id(text)
        return None if found is None else int(found)

    def json(self) -> str:
        """Return the contents of a `tokenizer.json`."""
        return str(self._fast.to_str())


def _decoders(tokenizer: FastTokenizer) -> frozenset[str]:
    """Return the names of a tokenizer's decoding steps."""
    if tokenizer.decoder is None:
        return frozenset()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(step["type"] for step in decoder.get("decoders", [decoder]))


def find_tokenizer(where: Where) -> Tokenizer | None:
    """Return a model's tokenizer, or None if it has none: such a model takes and returns token ids."""
    files = files_of(where)
    return Tokenizer(files) if files.has_tokenizer else None


class Detokenizer:
    """Converts one sequence's tokens into text as they arrive, without splitting a character.

    The text of a token depends on the tokens before it (a leading space, the first bytes of a character). So a short
    window is decoded with and without the new tokens, and the difference is the new text. An incomplete character at
    its end is held back until it is complete. The text of the prompt is never part of the new text, except for a last
    character that the prompt leaves incomplete and the new tokens complete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._left_out = tokenizer.special_tokens if skip_special_tokens else frozenset()
        # Context, then tokens whose text is still held back. If the prompt ends within a character, its last tokens
        # are held back too, since the new ones may complete that character.
        tail = prompt[-4 * MAX_HELD_TOKENS :]  # decoding a whole long prompt would be slow, for each sample
        kept = [token for token in tail if token not in self._left_out]
        whole = kept[-MAX_HELD_TOKENS:]
        start, end = self._clean_cut(whole, is_cut_off=len(prompt) > len(tail) or len(kept) > len(whole))
        self._window = whole[start:]
        self._num_prompt = len(self._window)  # tokens of the window that belong to the prompt
        self._num_told = self._num_prompt - end  # tokens of the window whose text was returned or is the prompt's
        self._has_context = bool(self._decode(self._window[: self._num_told]))  # the window begins with some text

    def _clean_cut(self, whole: Sequence[int], is_cut_off: bool) -> tuple[int, int]:
        """Return the tokens to drop at the start and at the end, so that the others decode to complete characters."""
        if is_cut_off:
            # Context cut within a character would decode wrongly, and so would all text after it with tokenizers that
            # decode runs of bytes together.
            for end in range(MAX_CHARACTER_TOKENS):
                for start in range(MAX_CHARACTER_TOKENS):
                    text = self._decode(whole[start : len(whole) - end])
                    if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                        return start, end
        ends = (end for end in range(len(whole)) if not self._decode(whole[: len(whole) - end]).endswith(REPLACEMENT))
        return 0, next(ends, len(whole))

    def add(self, token: int) -> str:
        """Append a token. Return the text that is now certain."""
        if token in self._left_out:
            return ""
        # No text is held back, and there is some before it.
        if self._has_context and self._num_told == len(self._window) >= self._num_prompt:
            piece = self._tokenizer.piece(token, self._skip)
            if piece is not None:
                self._window, self._num_told, self._num_prompt = [token], 1, 0
                return piece
        self._window.append(token)
        certain, decoded = len(self._window), self._decode(self._window)
        if decoded.endswith(REPLACEMENT):
            if certain - self._num_told < MAX_HELD_TOKENS:
                return ""
            certain -= MAX_CHARACTER_TOKENS - 1  # the rest stays invalid; only these may still become a character
            decoded = self._decode(self._window[:certain])
        text = self._new_text(decoded)
        self._has_context = bool(text)
        # The context must not grow without text either, as with ids that the tokenizer does not know.
        surplus = max(self._num_told if text else 0, certain - MAX_HELD_TOKENS)
        self._window, self._num_told = self._window[surplus:], certain - surplus
        self._num_prompt = max(0, self._num_prompt - surplus)
        return text

    def finish(self, tokens: Sequence[int] = ()) -> str:
        """Append the last tokens. Return their text and the text that was held back."""
        window = [*self._window, *(token for token in tokens if token not in self._left_out)]
        decoded = self._decode(window)
        if tokens and REPLACEMENT in decoded:  # the length of an incomplete character that is held back is limited
            return "".join([*map(self.add, tokens), self.finish()])
        return self._new_text(decoded)

    def _new_text(self, decoded: str) -> str:
        """Return the new part of the window's text."""
        known = len(self._decode(self._window[: self._num_told]))
        if self._num_prompt > self._num_told:  # the prompt's incomplete character may be complete now
            known = max(known, _num_common(self._decode(self._window[: self._num_prompt]), decoded))
        return decoded[known:]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip)


def _num_common(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
