"""Tokenizers of GGUF files against the originals that their metadata were written of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.errors import ConfigError, ModelError
from quire.models.gguf.pretokenizers import KINDS
from quire.models.gguf.vocabulary import Vocabulary
from quire.sandbox import process
from tests import warm
from tests.marks import quick
from tests.models.gguf import vocabularies
from tests.models.gguf.vocabularies import SAME, SPECIAL, WORDS, first_difference, lines, metadata_of, original
from tests.models.gguf.vocabularies import rebuilt as build


def changed(kind: str, **values: Any) -> dict[str, Any]:
    """The metadata with these values instead; None: without the key."""
    metadata = metadata_of(kind) | {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize("kind", quick(vocabularies.KINDS, 2))
def test_the_rebuilt_one_cuts_texts_as_the_original(kind: str, long: bool) -> None:
    made = build(metadata_of(kind))
    assert first_difference(original(kind), made, lines(1200 if long else 200, seed=len(kind))) is None
    added = {token: made_of.content for token, made_of in original(kind).get_added_tokens_decoder().items()}
    assert {token: one.content for token, one in made.get_added_tokens_decoder().items()} == added
    assert made.get_vocab() == original(kind).get_vocab()  # no rows that are the model's alone


def test_every_word_for_a_kind_has_an_original() -> None:
    assert set(KINDS) == {*WORDS, *SAME}
    for word, other in SAME.items():
        one, two = KINDS[word], KINDS[other]
        assert one.pre_tokenizer.__getstate__() == two.pre_tokenizer.__getstate__(), word
        assert (one.normalizer is None, one.takes_whole_words) == (two.normalizer is None, two.takes_whole_words), word


def test_the_file_says_what_stands_around_a_prompt() -> None:
    bos, eos = (metadata_of("qwen2")[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
    plain = original("qwen2").encode("a b").ids
    for first in (False, True):
        for last in (False, True):
            made = build(changed("qwen2", add_bos_token=first, add_eos_token=last))
            assert made.encode("a b").ids == [bos] * first + plain + [eos] * last
            assert made.encode("a b", add_special_tokens=False).ids == plain
    with pytest.raises(ModelError, match="bos_token_id is not there"):
        build(changed("qwen2", add_bos_token=True, bos_token_id=None))


def test_rows_that_converters_of_old_took_for_added_tokens() -> None:
    metadata = metadata_of("dbrx")
    types = np.where(metadata["tokenizer.ggml.token_type"] == 5, 4, metadata["tokenizer.ggml.token_type"])
    made = build(changed("dbrx", token_type=types.astype(np.int32)))
    assert made.to_str() == build(metadata).to_str()


def test_settings_and_ends() -> None:
    metadata = metadata_of("llama-bpe")
    ids = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    metadata |= {"tokenizer.ggml.eot_token_id": ids["print"], "tokenizer.ggml.padding_token_id": ids["xyz"]}
    metadata |= {"tokenizer.chat_template": "{{ a }}", "tokenizer.chat_template.tool_use": "{{ b }}"}
    found = Vocabulary(Path("x.gguf"), metadata)
    assert found.settings() == {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "xyz",
        "chat_template": [{"name": "default", "template": "{{ a }}"}, {"name": "tool_use", "template": "{{ b }}"}],
    }
    # The file's, then what ends turns by its name: <|im_end|>.
    assert found.end_tokens() == (ids["<|eos|>"], ids["print"], ids[SPECIAL[2]])


def test_where_an_answer_goes_on_after_an_end_of_a_message() -> None:
    tokens = ["<|end|>", "<|return|>", "<|call|>", "a"]
    for texts, ends in ((tokens, (1, 2)), (["<|end|>", "x", "y", "a"], (0,))):
        values = {"model": "gpt2", "tokens": texts, "token_type": np.array([3, 3, 3, 1], np.int32)}
        metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
        assert Vocabulary(Path("x.gguf"), metadata).end_tokens() == ends


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        ("dbrx", {"pre": "viking"}, r"pre is 'viking'.*known are bloom, .*directory or repository as --tokenizer"),
        ("dbrx", {"pre": None}, "pre is ''.*--tokenizer"),
        ("dbrx", {"pre": "default"}, "pre is 'default'.*--tokenizer"),
        ("dbrx", {"pre": 3}, "pre is 3; it must be of type str"),
        ("dbrx", {"model": "rwkv"}, "model is 'rwkv'; served are gpt2, llama, gemma4, t5 and bert; .*--tokenizer"),
        ("dbrx", {"model": None}, "model is None; it must be of type str"),
        ("dbrx", {"merges": ["a b c", "ab"]}, "vocabulary is invalid"),
        ("dbrx", {"merges": ["qq zz"]}, "vocabulary is invalid"),
        ("dbrx", {"merges": None}, "merges is no array of texts"),
        ("dbrx", {"tokens": np.arange(4)}, "tokens is no array of texts"),
        ("dbrx", {"token_type": np.ones(3, np.int32)}, "token_type has 3 numbers; there are"),
        ("dbrx", {"token_type": np.ones(3, np.float32)}, "token_type is no array of such numbers"),
        ("dbrx", {"bos_token_id": 10**6, "add_bos_token": True}, "bos_token_id is 1000000; there are"),
        ("dbrx", {"bos_token_id": -7, "add_bos_token": True}, "bos_token_id is -7; there are"),
        ("dbrx", {"add_bos_token": 1}, "add_bos_token is 1; it must be of type bool"),
        ("llama", {"pre": "chatglm-spm"}, "pre is 'chatglm-spm'.*--tokenizer"),
        ("llama", {"scores": None}, "scores is no array of such numbers"),
        ("t5", {"add_space_prefix": False}, "add_space_prefix is False.*--tokenizer"),
        ("t5", {"precompiled_charsmap": np.ones(7, np.uint8)}, "vocabulary is invalid"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_with_a_sentence(kind: str, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=f"^model.gguf: .*{sentence}"):
        build(changed(kind, **values))


def test_texts_of_tokens_differ() -> None:
    metadata = metadata_of("gpt-2")
    tokens = [*metadata["tokenizer.ggml.tokens"]]
    tokens[300] = tokens[301]
    with pytest.raises(ModelError, match=r"token 300 is .*texts of tokens must differ"):
        build(changed("gpt-2", tokens=tokens))


def test_larger_vocabularies_of_lfm2_cut_otherwise() -> None:
    tokens = [f"x{i}" for i in range(70_000)]
    with pytest.raises(ModelError, match="pre is 'lfm2', of a vocabulary of 70000"):
        build(changed("llama-bpe", pre="lfm2", tokens=tokens, token_type=np.ones(70_000, np.int32)))


@pytest.mark.slow
def test_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an option: its texts, its template, the model's weights."""
    monkeypatch.setattr(process, "subprocess", warm.Warm())
    original("gpt-2").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    with LLM(tokenizer=str(tmp_path)) as llm:
        assert llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"
        [output] = llm.generate("import")
        assert output.prompt_token_ids == original("gpt-2").encode("import").ids
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="there is no tokenizer in"):
        LLM(tokenizer=str(tmp_path))
