"""A GGUF file's tokenizer, rebuilt from its metadata.

A file has the tokens, their types, and either merges or scores. The missing settings are in `kinds`, or follow from the
construction of such tokenizers. A tokenizer with unknown settings is refused: text that is tokenized differently than
in training makes a model worse without an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

from quire.errors import ModelError
from quire.models.gguf.pretokenizers import KINDS, Kind

T = TypeVar("T")

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # codes of token types in files; 1 and 6 are ordinary
PADDING = re.compile(r"\[PAD[0-9]+\]")  # written by converters if a model has more rows than its tokenizer has tokens
WORD_MARK = "\u2581"  # a space in sentencepiece
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
LLAMA_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # defaults of sentencepiece
# Tokens that end an answer: a file's metadata has at most three, and often only the one that ends a document.
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>",
        "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<|eom|>", "<|return|>", "<|call|>")  # fmt: skip
LFM2_SIZE = 65536  # later, larger vocabularies of the family have the same `pre` but another pre-tokenizer
PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's added tokens that do not strip the spaces after them


class Vocabulary:
    """The tokenizer in a file's metadata."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        """Read the metadata. path: for errors. Raises ModelError for a missing vocabulary or a wrong type."""
        self._path, self._metadata = path, metadata
        self._model: str = self._value("model", str)
        self.tokens: list[str] = self._texts("tokens")
        self._types = self._numbers("token_type", np.integer)
        pads = [token for token in np.flatnonzero(self._types == USER_DEFINED) if PADDING.fullmatch(self.tokens[token])]
        if pads:  # old converters wrote them as added tokens
            self._types = self._types.copy()
            self._types[pads] = UNUSED
        self._pieces = [*self.tokens]  # as in the original: converters write spaces in added tokens, not WORD_MARK
        if self._model != "gpt2":
            for token in np.flatnonzero(self._types == USER_DEFINED):
                self._pieces[token] = self.tokens[token].replace(" ", WORD_MARK)

    def tokenizer(self) -> Tokenizer:
        """Build the original tokenizer. Raises ModelError if it cannot be rebuilt exactly."""
        if self._model == "gpt2":
            kind = self._kind()
            tokenizer, begins = self._byte_level(kind), kind.begins
        elif self._model in ("llama", "gemma4"):
            tokenizer, begins = self._sentencepiece(), True
        elif self._model == "t5":
            tokenizer, begins = self._unigram(), False
        elif self._model == "bert":
            return self._word_pieces()
        else:
            self._refuse(f"tokenizer.ggml.model is {self._model!r}; served are gpt2, llama, gemma4, t5 and bert")
        tokenizer.add_tokens(list(self._added()))
        first = [self._token("bos")] if self._value("add_bos_token", bool, begins) else []
        last = [self._token("eos")] if self._value("add_eos_token", bool, self._model == "t5") else []
        if first or last:
            tokenizer.post_processor = processors.TemplateProcessing(
                [*(self.tokens[token] for token in first), "$A", *(self.tokens[token] for token in last)],
                special_tokens=[(self.tokens[token], token) for token in {*first, *last}],
            )
        return tokenizer

    def settings(self) -> dict[str, Any]:
        """Return the model's tokenizer_config.json: the texts of special tokens, and the chat templates."""
        ids = {name: self._find(key) for name, key in SPECIAL.items()}
        texts = {"default": self._metadata.get("tokenizer.chat_template")}
        texts |= {
            key.removeprefix("tokenizer.chat_template."): text
            for key, text in self._metadata.items()
            if key.startswith("tokenizer.chat_template.")
        }
        templates = [{"name": name, "template": text} for name, text in texts.items() if text is not None]
        return {name: self.tokens[token] for name, token in ids.items() if token is not None} | (
            {"chat_template": templates} if templates else {}
        )

    def end_tokens(self) -> tuple[int, ...]:
        """Return the ids of tokens that end an answer, the file's eos first."""
        named = [self._find(key) for key in ("eos", "eot", "eom")]
        ids = {
            self.tokens[token]: int(token) for token in np.flatnonzero(np.isin(self._types, (CONTROL, USER_DEFINED)))
        }
        # If there is a <|return|>, as in gpt-oss, <|end|> only ends a part of an answer.
        known = [ids.get(text) for text in ENDS if text != "<|end|>" or "<|return|>" not in ids]
        return tuple(dict.fromkeys(token for token in (*named, *known) if token is not None))

    # --------------------------------------------------------------------------------------- tokenizers

    def _kind(self) -> Kind:
        word = self._value("pre", str, "")
        if word not in KINDS or (word == "lfm2" and len(self.tokens) > LFM2_SIZE):
            self._refuse(
                f"tokenizer.ggml.pre is {word!r}, of a vocabulary of {len(self.tokens)}, which is no known way to "
                f"split text into words; known are {', '.join(KINDS)}"
            )
        return KINDS[word]

    def _byte_level(self, kind: Kind) -> Tokenizer:
        """Build a BPE tokenizer over bytes, word by word."""
        tokenizer = self._bpe(self._vocab(), self._merges(), ignore_merges=kind.takes_whole_words)
        if kind.normalizer is not None:
            tokenizer.normalizer = kind.normalizer
        tokenizer.pre_tokenizer = kind.pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        """Build a BPE tokenizer over characters, spaces included; unknown characters become their bytes."""
        if self._value("pre", str, "default") != "default":
            self._refuse(
                f"tokenizer.ggml.pre is {self._metadata['tokenizer.ggml.pre']!r}; for llama it must be default"
            )
        vocab = self._vocab()
        merges = self._merges() if self._model == "gemma4" else self._merges_of_scores(vocab)
        unknown = self.tokens[self._token("unknown")]
        tokenizer = self._bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        marks = normalizers.Replace(" ", WORD_MARK)
        decoding = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        if not self._value("add_space_prefix", bool, True):
            tokenizer.normalizer = marks
        else:
            decoding.append(decoders.Strip(" ", 1, 0))
            if "[INST]" in vocab and self._types[vocab["[INST]"]] == CONTROL:
                # Mistral from v0.3 on: only a text's first word gets a mark, not the word after each control token.
                tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            else:
                tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), marks])
        tokenizer.decoder = decoders.Sequence(decoding)
        return tokenizer

    def _unigram(self) -> Tokenizer:
        """Build a unigram tokenizer: the most likely pieces, word by word."""
        for key in ("add_space_prefix", "remove_extra_whitespaces"):
            if not self._value(key, bool, True):
                self._refuse(f"tokenizer.ggml.{key} is False; served are unigram vocabularies where it is True")
        used = int(np.flatnonzero(self._types != UNUSED).max(initial=-1)) + 1  # a piece's index is its id: no gaps
        pieces = list(zip(self.tokens[:used], self._numbers("scores", np.floating)[:used].tolist(), strict=True))
        unknown = self._token("unknown")
        tokenizer = Tokenizer(self._built(lambda: Unigram(pieces, unknown, byte_fallback=False)))
        charsmap = self._metadata.get("tokenizer.ggml.precompiled_charsmap")
        if charsmap is not None:
            data = np.asarray(charsmap).astype(np.uint8).tobytes()
            tokenizer.normalizer = self._built(lambda: normalizers.Precompiled(data))
        marks = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        return tokenizer

    def _word_pieces(self) -> Tokenizer:
        """Build a tokenizer of words and their pieces, whose first pieces have a mark in the file."""
        words = [text[1:] if text.startswith(WORD_MARK) else f"##{text}" for text in self.tokens]
        words = [
            text if text.startswith("[") and text.endswith("]") else word
            for text, word in zip(self.tokens, words, strict=True)
        ]
        vocab = {word: token for token, word in enumerate(words)}
        unknown, first, last = (self._token(name) for name in ("unknown", "cls", "seperator"))
        tokenizer = Tokenizer(self._built(lambda: WordPiece(vocab, unk_token=words[unknown])))
        is_cased = any(text != text.lower() for text in self.tokens if not text.startswith("["))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.add_tokens(list(self._added()))
        tokenizer.post_processor = processors.BertProcessing((words[last], last), (words[first], first))
        return tokenizer

    def _bpe(self, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
        return Tokenizer(self._built(lambda: BPE(vocab, merges, **options)))

    def _built(self, build: Callable[[], T]) -> T:
        try:
            return build()
        except Exception as error:  # the library raises bare Exceptions
            self._fail(f"its vocabulary is invalid: {error}")

    # ------------------------------------------------------------------------------------------- tokens

    def _vocab(self) -> dict[str, int]:
        """Return the ids of tokens by their texts, without unused tokens."""
        used = np.flatnonzero(self._types != UNUSED).tolist()
        vocab = {text: token for token in used if (text := self._pieces[token])}
        if len(vocab) < len(used):
            first = next(token for token in used if vocab.get(self._pieces[token], -1) != token)
            self._fail(f"token {first} is {self.tokens[first]!r}, as another one is; texts of tokens must differ")
        return vocab

    def _added(self) -> Iterator[AddedToken]:
        """Yield the tokens that are matched in a text before it is split into words."""
        strips = self._model == "llama" and self._metadata.get("general.architecture") == "phi3"
        for token in np.flatnonzero(np.isin(self._types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist():
            text = self._pieces[token]
            rstrip = strips and text not in PHI3_PLAIN
            yield AddedToken(text, rstrip=rstrip, normalized=False, special=self._types[token] != USER_DEFINED)

    def _merges(self) -> list[tuple[str, str]]:
        """Return the pairs that BPE merges, by priority."""
        return [(left, right) for left, _, right in (merge.partition(" ") for merge in self._texts("merges"))]

    def _merges_of_scores(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        """Derive the merges from the pieces' scores, best pieces first, in the order of the original.

        Added pieces come first: sentencepiece gives them the best score, and converters write another one.
        """
        scores = np.where(self._types == USER_DEFINED, np.inf, self._numbers("scores", np.floating))
        scores[np.isin(self._types, (UNKNOWN, CONTROL, UNUSED))] = -np.inf
        order = np.argsort(-scores, kind="stable")[: np.count_nonzero(scores != -np.inf)]
        merges: list[tuple[str, str]] = []
        for _, tokens in groupby(order.tolist(), scores.tolist().__getitem__):
            pieces = [self._pieces[token] for token in tokens]
            pairs = [
                (left, right)
                for piece in pieces
                for i in range(len(piece) - 1, 0, -1)
                if (left := piece[:i]) in vocab and (right := piece[i:]) in vocab
            ]
            if len(pieces) > 1:
                pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
            merges += pairs
        return merges

    # ------------------------------------------------------------------------------------------- values

    def _find(self, name: str) -> int | None:
        """Return the id of a special token, or None."""
        token = self._value(f"{name}_token_id", int, LLAMA_IDS.get(name, -1) if self._model == "llama" else -1)
        if not -1 <= token < len(self.tokens):
            self._fail(f"tokenizer.ggml.{name}_token_id is {token}; there are {len(self.tokens)} tokens")
        return None if token == -1 else token

    def _token(self, name: str) -> int:
        token = self._find(name)
        if token is None:
            self._fail(f"tokenizer.ggml.{name}_token_id is not there; this vocabulary needs it")
        return token

    def _value(self, name: str, wanted: type[T], default: T | None = None) -> T:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            self._fail(f"tokenizer.ggml.{name} is {value!r}; it must be of type {wanted.__name__}")
        return value

    def _texts(self, name: str) -> list[str]:
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            self._fail(f"tokenizer.ggml.{name} is no array of texts; this kind of vocabulary needs one")
        return values

    def _numbers(self, name: str, wanted: type[np.integer[Any]] | type[np.floating[Any]]) -> NDArray[Any]:
        """Return an array with one number per token."""
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, np.ndarray) or not np.issubdtype(values.dtype, wanted):
            self._fail(f"tokenizer.ggml.{name} is no array of such numbers; there must be one for each token")
        if values.shape != (len(self.tokens),):
            self._fail(f"tokenizer.ggml.{name} has {len(values)} numbers; there are {len(self.tokens)} tokens")
        return values

    def _refuse(self, reason: str) -> NoReturn:
        self._fail(f"{reason}; give the original's directory or repository as --tokenizer")

    def _fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self._path}: {reason}")
