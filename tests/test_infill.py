"""Filling in: each family's tokens in their places, and a sentence where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast

from quire.errors import RequestError
from quire.frontend.tokenizer import Tokenizer
from quire.server.api.infill import FORMS, Form, infill


def words(kind: str, form: Form | None, directory: Path) -> Tokenizer:
    """A tokenizer of single letters, with a leading special token, as byte-level ones are or as sentencepiece's."""
    letters = [*"abcdefghijklmnopqrstuvwxyz☺", "▁", "Ġ", "â", "ĺ", "º"]
    fast = Fast(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="always")
        if kind == "metaspace"
        else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    fast.decoder = decoders.Metaspace() if kind == "metaspace" else decoders.ByteLevel()
    special = ["<s>"] if form is None else ["<s>", *form[:3], *form.ends]
    fast.add_special_tokens([AddedToken(text, special=True) for text in special])
    fast.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", fast.token_to_id("<s>"))])
    directory.mkdir()
    fast.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def test_each_family_s_tokens_stand_in_their_places(tmp_path: Path) -> None:
    for number, form in enumerate(FORMS):
        for kind in ("bytes", "metaspace"):
            tokenizer = words(kind, form, tmp_path / f"{number}{kind}")
            ids = {text: tokenizer.token_id(text) for text in (*form[:3], *form.ends, "<s>", "▁", *"abcd")}
            space = [ids["▁"]] if kind == "metaspace" else []
            found = infill(tokenizer, tokenizer.encode("ab"), "cd")
            before = [ids["<s>"], ids[form.prefix], *space, ids["a"], ids["b"]]
            # No space is put before the text after.
            assert found.tokens == [*before, ids[form.suffix], ids["c"], ids["d"], ids[form.middle]]
            assert found.ends == [ids[text] for text in form.ends]
            assert infill(tokenizer, [5, 6], "c").tokens[:3] == [ids[form.prefix], 5, 6]


def test_a_tokenizer_without_them_is_refused(tmp_path: Path) -> None:
    tokenizer = words("bytes", None, tmp_path / "none")
    with pytest.raises(RequestError, match=r"no token for the middle .*<\|fim_middle\|>") as raised:
        infill(tokenizer, [5], "c")
    assert raised.value.field == "suffix"
