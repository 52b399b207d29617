"""Pre-tokenizers of published tokenizers, and other settings that a GGUF file does not contain.

A file identifies a published tokenizer by one word, `tokenizer.ggml.pre`. The settings here are those of that
tokenizer's tokenizer.json, normalisation included. llama.cpp has other patterns, some of which give different results.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# A word is capitals followed by small letters; letters that are neither match both classes.
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*|\p{{N}}{_OTHERS}"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{_ENDING}"
    rf"|\p{{N}}{{1,3}}{_OTHERS}"
)
BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_V3 = (
    "\\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
# Cased letters, as the tokenizer's pattern lists them.
_CASED = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = (
    "[\r\n]",
    f"\\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    "\\s+$",
    DEEPSEEK_CJK,
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK)


@dataclass(frozen=True)
class Kind:
    """A byte-level tokenizer without its vocabulary."""

    pre_tokenizer: PreTokenizer
    normalizer: Normalizer | None = None
    takes_whole_words: bool = False  # a word that is a token becomes that token, without applying merges
    begins: bool = False  # default of add_bos_token: a BOS token precedes a text


def _words(*steps: str | PreTokenizer) -> Sequence:
    """Return a pre-tokenizer that splits by each pattern in turn, then maps bytes to letters."""
    cuts = [Split(Regex(step), "isolated") if isinstance(step, str) else step for step in steps]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = ByteLevel(add_prefix_space=False)
_DIGITS = Sequence([Digits(individual_digits=True), _GPT2])
_LLAMA3 = Kind(_words(CL100K), takes_whole_words=True, begins=True)
_QWEN2 = Kind(_words(QWEN2), NFC())
_O200K = Kind(_words(O200K), takes_whole_words=True)
_WHOLE = Kind(_words(CL100K), takes_whole_words=True)
_FALCON = (Punctuation("contiguous"), _GPT2)

KINDS = {
    "bloom": Kind(_words(BLOOM)),
    "chatglm-bpe": _WHOLE,
    "command-r": Kind(_DIGITS, NFC()),
    "dbrx": Kind(_words(CL100K)),
    "deepseek-coder": Kind(_words(*DEEPSEEK_CODER, Digits(individual_digits=True))),
    "deepseek-llm": Kind(_words(*DEEPSEEK_LLM, Digits(individual_digits=True))),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": Kind(_words(*DEEPSEEK_V3)),
    "falcon": Kind(Sequence([*_FALCON, Digits(individual_digits=False), Split(Regex("[0-9][0-9][0-9]"), "isolated")])),
    "falcon3": Kind(Sequence([*_FALCON, Digits(individual_digits=True)])),
    "glm4": _WHOLE,
    "gpt-2": Kind(_GPT2),
    "gpt-4o": _O200K,
    "granite-docling": Kind(_GPT2),
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": _O200K,
    "mpt": Kind(_GPT2, NFC()),
    "olmo": Kind(_GPT2, NFC()),
    "phi-2": Kind(_GPT2),
    "qwen2": _QWEN2,
    "qwen35": Kind(_words(QWEN35), NFC()),
    "refact": Kind(_DIGITS),
    "smaug-bpe": _WHOLE,  # Llama 3's without a BOS token, as in SmolLM3
    "smollm": Kind(_DIGITS),
    "starcoder": Kind(_DIGITS),
    "tekken": Kind(_words(TEKKEN), takes_whole_words=True, begins=True),
}
