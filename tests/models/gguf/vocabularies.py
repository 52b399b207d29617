"""Tokenizers as published ones are built, small ones, and the metadata that llama.cpp's converter writes of them.

`python -m tests.models.gguf.vocabularies N` compares them with what is rebuilt, on N lines for each kind.
"""

from __future__ import annotations

import json
import random
import sys
import time
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from quire.models.gguf.vocabulary import Vocabulary

MARK = "\u2581"
SPECIAL = ("<|bos|>", "<|eos|>", "<|im_end|>")
ADDED = ("<think>", "</think>")  # that are shown
SCRIPTS = (
    (0x20, 0x7E), (0xA1, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x589), (0x5D0, 0x5EA),
    (0x600, 0x6FF), (0x900, 0x97F), (0xE01, 0xE5B), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1E00, 0x1FFF),
    (0x2000, 0x206F), (0x20A0, 0x2BFF), (0x2460, 0x24FF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0xF900, 0xFAFF), (0xFB00, 0xFB06), (0xFF00, 0xFFEF), (0x10400, 0x1044F), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF),
)  # fmt: skip
ODD = ("  ", "\t", "\r\n", "\n\n", "\u00a0", "\u3000", "\ufeff", "\u200d", "'S", "'ll", "'RE", "12345", "\u00bd",
       "\u0661\u0662\u0663\u0664", "e\u0301", "\u1100\u1161\u11a8", "<think>", "<|im_end|>", MARK, "...", "?!", "//",
       "a_b", "CamelCase", "<|bos|>")  # fmt: skip


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def digits(individual: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": individual}


NFC = {"type": "NFC"}
PUNCTUATION = {"type": "Punctuation", "behavior": "Contiguous"}
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = split("[一-龥ࠀ-一가-퟿]+")
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
# tokenizer.ggml.pre -> the normalizer and pre_tokenizer of the published tokenizer.json, and its ignore_merges.
WORDS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], bool]] = {
    "gpt-2": (None, byte_level(True), False),
    "olmo": (NFC, byte_level(True), False),
    "starcoder": (None, sequence(digits(True), byte_level(True)), False),
    "command-r": (NFC, sequence(digits(True), byte_level(True)), False),
    "llama-bpe": (None, sequence(split(CL100K), byte_level(False)), True),
    "dbrx": (None, sequence(split(CL100K), byte_level(False)), False),
    "qwen2": (NFC, sequence(split(QWEN2), byte_level(False)), False),
    "qwen35": (NFC, sequence(split(QWEN35), byte_level(False)), False),
    "tekken": (None, sequence(split(TEKKEN), byte_level(False)), True),
    "gpt-4o": (None, sequence(split(O200K), byte_level(False)), True),
    "falcon": (
        None,
        sequence(PUNCTUATION, byte_level(True), digits(False), split("[0-9][0-9][0-9]")),
        False,
    ),
    "falcon3": (None, sequence(PUNCTUATION, byte_level(True), digits(True)), False),
    "bloom": (None, sequence(split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), byte_level(False)), False),
    "deepseek-coder": (
        None,
        sequence(split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), CJK, digits(True), byte_level(False)),
        False,
    ),
    "deepseek-llm": (
        None,
        sequence(
            split("[\r\n]"),
            split(f"\\s?[{CASED}]+"),
            split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            split(r"\s+$"),
            CJK,
            digits(True),
            byte_level(False),
        ),
        False,
    ),
    "deepseek-v3": (
        None,
        sequence(
            split(r"\p{N}{1,3}"),
            split("[一-龥぀-ゟ゠-ヿ]+"),
            split(
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            byte_level(False),
        ),
        False,
    ),
}
SAME = {  # words that stand for what another one does
    "mpt": "olmo", "phi-2": "gpt-2", "granite-docling": "gpt-2", "refact": "starcoder", "smollm": "starcoder",
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "lfm2": "llama-bpe", "glm4": "llama-bpe", "smaug-bpe": "llama-bpe",
    "chatglm-bpe": "llama-bpe", "deepseek-r1-qwen": "qwen2", "llama4": "gpt-4o",
}  # fmt: skip
PIECES = ("llama", "mistral", "phi3", "gemma2", "gemma4", "t5")
KINDS = (*WORDS, *PIECES)
SCORES: dict[str, dict[str, float]] = {}  # of the pieces that were made


# ---------------------------------------------------------------------------------------------------- lines


def lines(count: int, seed: int = 0) -> Iterator[str]:
    """Lines of the standard library and, every other one, of letters of all scripts."""
    chance = random.Random(seed)
    source = _library()
    for i in range(count):
        yield next(source) if i % 2 == 0 else _mixed(chance)


@lru_cache(None)
def _modules() -> list[Path]:
    """Those of the standard library."""
    found = sorted(Path(random.__file__).parent.rglob("*.py"))
    return [path for path in found if "site-packages" not in path.parts and "dist-packages" not in path.parts]


def _library() -> Iterator[str]:
    while True:
        for path in _modules():
            yield from path.read_text("utf-8", errors="replace").splitlines()


def _mixed(chance: random.Random) -> str:
    words = []
    for _ in range(chance.randrange(1, 9)):
        if chance.random() < 0.3:
            words.append(chance.choice(ODD))
            continue
        low, high = chance.choice(SCRIPTS)
        letters = (chr(chance.randrange(low, high + 1)) for _ in range(chance.randrange(1, 7)))
        words.append("".join(letter for letter in letters if unicodedata.category(letter) != "Cn"))
    return chance.choice(("", " ")).join(words)


# ------------------------------------------------------------------------------------------------ originals


@lru_cache(None)
def original(kind: str) -> Tokenizer:
    """A small tokenizer as the published one of that kind is built."""
    return _of_pieces(kind) if kind in PIECES else _of_words(kind)


@lru_cache(None)
def _trained_on_words() -> str:
    """What all tokenizers of words have in common, as JSON."""
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        lines(1500, seed=1), trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    )
    return trained.to_str()


@lru_cache(None)
def _trained_on_pieces() -> str:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", MARK)
    trained.pre_tokenizer = pre_tokenizers.Split(MARK, "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, limit_alphabet=400)
    trained.train_from_iterator(lines(1500, seed=1), trainer)
    return trained.to_str()


def _of_words(kind: str) -> Tokenizer:
    normalizer, pre_tokenizer, ignore_merges = WORDS[kind]
    state = json.loads(_trained_on_words())
    vocab = state["model"]["vocab"]
    if ignore_merges:  # words that the merges do not make
        for word in ("\u0120import", "\u0120return", "\u0120self", "print", "xyz"):
            vocab.setdefault(word, len(vocab))
    added = [_added(len(vocab) + i, text, text in SPECIAL) for i, text in enumerate((*SPECIAL, *ADDED))]
    state |= {
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": byte_level(True),
        "model": state["model"] | {"ignore_merges": ignore_merges},
    }
    if kind in ("llama-bpe", "tekken"):
        state["post_processor"] = _around(SPECIAL[0], len(vocab), first=True)
    return Tokenizer.from_str(json.dumps(state))


def _of_pieces(kind: str) -> Tokenizer:
    if kind == "t5":
        return _unigram()
    from transformers.tokenization_utils_base import generate_merges

    gemma = kind.startswith("gemma")
    model = json.loads(_trained_on_pieces())["model"]
    joined = ["".join(pair) for pair in model["merges"]]
    first = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    if kind == "mistral":
        first += ["[INST]", "[/INST]"]
    runs = ["\n\n", "\n\n\n", *(MARK * n for n in range(2, 9))] if gemma else []
    shown = [*ADDED, *runs] if gemma else []
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [piece for piece in model["vocab"] if piece not in joined]
    pieces = list(dict.fromkeys([*first, *shown, *bytes_, *joined, *letters]))
    vocab = {piece: token for token, piece in enumerate(pieces)}
    scores = dict.fromkeys(pieces, 0.0) | {
        piece: -1.0 - i for i, piece in enumerate([*joined, *letters]) if piece not in shown
    }
    merges = generate_merges(vocab, scores, skip_tokens=[*first, *ADDED])
    extra = [] if gemma else [*SPECIAL[2:], *ADDED]
    added = [_added(vocab[text], text, True) for text in first]
    added += [_added(vocab[text], text, False) for text in (ADDED if kind == "gemma4" else shown)]
    added += [_added(len(vocab) + i, text, text in SPECIAL) for i, text in enumerate(extra)]
    if kind == "phi3":
        for token in added:
            token["rstrip"] = token["content"] not in ("<unk>", "<s>")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, spaces]}
    metaspace = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False}
    whole = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    text = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
    decoders = [text, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if not gemma:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    bos = first[2] if gemma else first[1]
    state = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": spaces if gemma else None if kind == "mistral" else prepend,
        "pre_tokenizer": whole if gemma else metaspace if kind == "mistral" else None,
        "post_processor": _around(bos, vocab[bos], first=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges], "unk_token": "<unk>",
            "fuse_unk": True, "byte_fallback": True,
        },
    }  # fmt: skip
    SCORES[kind] = scores
    return Tokenizer.from_str(json.dumps(state))


def _unigram() -> Tokenizer:
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=900, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(islice(_library(), 1500), trainer)
    state = json.loads(trained.to_str())
    metaspace = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True}
    # Sentencepiece's scores, and a file's, are of 32 bits.
    state["model"]["vocab"] = [(piece, float(np.float32(score))) for piece, score in state["model"]["vocab"]]
    state |= {"decoder": metaspace, "post_processor": _around("</s>", 1, first=False)}
    return Tokenizer.from_str(json.dumps(state))


def _added(token: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, "special": special, **flags}


def _around(text: str, token: int, first: bool) -> dict[str, Any]:
    special, whole = {"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    order = [special, whole] if first else [whole, special]
    known = {text: {"id": text, "ids": [token], "tokens": [text]}}
    return {"type": "TemplateProcessing", "single": order, "pair": order, "special_tokens": known}


# ------------------------------------------------------------------------------------------------- metadata


def metadata_of(kind: str, pads: int = 5) -> dict[str, Any]:
    """What the converter writes of an original, with rows that the model has more."""
    state = json.loads(original(kind).to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    own = state["model"]["vocab"]
    texts = {i: piece for i, (piece, _) in enumerate(own)} if kind == "t5" else {i: text for text, i in own.items()}
    texts |= {i: token["content"] for i, token in added.items()}
    tokens, types = [], []
    for i in range(max(texts) + 1 + pads):
        text = texts.get(i, f"[PAD{i}]")
        kind_of = 5 if i not in texts else 1
        if i in added:
            kind_of = 3 if added[i]["special"] else 4
            text = text if added[i]["special"] else text.replace(MARK, " ")
        elif text.startswith("<0x"):
            kind_of = 6
        tokens.append(text)
        types.append(2 if text == "<unk>" and kind != "gemma4" else kind_of)
    found: dict[str, Any] = {"tokens": tokens, "token_type": np.array(types, np.int32)}
    ids = {text: i for i, text in enumerate(tokens)}
    if kind in PIECES:
        found |= {"model": {"gemma4": kind, "t5": kind}.get(kind, "llama"), "pre": "default"}
        found["unknown_token_id"] = ids["<unk>"]
        if kind == "t5":
            scores = [score for _, score in own]
        else:
            scores = [
                SCORES[kind][text] if text in SCORES[kind] and type_ != 4 else -1000.0
                for text, type_ in zip(tokens, types, strict=True)
            ]
        found["scores"] = np.array(scores + [-1000.0] * (len(tokens) - len(scores)), np.float32)
        found["bos_token_id"] = ids.get("<bos>", ids.get("<s>"))
        found["eos_token_id"] = ids.get("<eos>", ids.get("</s>"))
        if kind.startswith("gemma"):
            found["add_space_prefix"] = False
    else:
        found |= {"model": "gpt2", "pre": kind, "bos_token_id": ids["<|bos|>"], "eos_token_id": ids["<|eos|>"]}
    if kind == "gemma4" or kind not in PIECES:
        found["merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
    if kind == "gemma4":
        del found["pre"]
    architecture = {"gemma2": "gemma2", "phi3": "phi3"}.get(kind, "llama")
    given = {key: value for key, value in found.items() if value is not None}
    return {"general.architecture": architecture} | {f"tokenizer.ggml.{key}": value for key, value in given.items()}


def rebuilt(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file with that metadata."""
    return Vocabulary(Path("model.gguf"), metadata).tokenizer()


def first_difference(one: Tokenizer, other: Tokenizer, texts: Iterator[str]) -> str | None:
    """The first text of which the tokens, or their text, differ, and how they do."""
    while batch := list(islice(texts, 2000)):
        ids, others = ([e.ids for e in made.encode_batch_fast(batch)] for made in (one, other))
        for shown in (True, False):
            decoded = [made.decode_batch(ids, skip_special_tokens=not shown) for made in (one, other)]
            for text, mine, theirs, back, their_back in zip(batch, ids, others, *decoded, strict=True):
                if (mine, back) != (theirs, their_back):
                    return f"{text!r}: {mine} {back!r} and {theirs} {their_back!r}"
    return None


def main() -> None:
    """Compare all kinds."""
    count = int(sys.argv[1])
    for kind in KINDS:
        begin = time.perf_counter()
        found = first_difference(original(kind), rebuilt(metadata_of(kind)), lines(count, seed=7))
        print(f"{kind:16} {count} lines in {time.perf_counter() - begin:.0f} s: {found or 'equal'}", flush=True)


if __name__ == "__main__":
    main()
