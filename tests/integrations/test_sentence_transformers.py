"""The methods of sentence-transformers, and `quire embed`: the numbers of LLM."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from quire import LLM
from quire.cli import app
from quire.errors import RequestError, Unsupported
from quire.integrations.sentence_transformers import CrossEncoder, SentenceTransformer
from tests.models.encoders import save_embedder, save_tokenizer, saved

TEXTS = ["a cat sat", "what, no dog?", "cat " * 60, "0 1 2"]


def test_the_methods_of_an_embedding_model(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    with LLM(str(tmp_path)) as llm:
        cut = {"truncate_prompt_tokens": -1, "use_tqdm": False}
        expected = [one.outputs.embedding for one in llm.embed(TEXTS, **cut)]
        asked = [one.outputs.embedding for one in llm.embed(TEXTS, prompt_name="query", **cut)]
        scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS, **cut)]
    with SentenceTransformer(str(tmp_path)) as model:
        assert (model.max_seq_length, model.get_sentence_embedding_dimension()) == (96, 48)
        found = np.asarray(model.encode(TEXTS))
        assert found.tolist() == expected
        assert np.asarray(model.encode(TEXTS[0])).tolist() == expected[0]
        assert np.asarray(model.encode(TEXTS, convert_to_tensor=True, truncate_dim=5)).tolist() == found[:, :5].tolist()
        assert np.asarray(model.encode_query(TEXTS)).tolist() == asked
        assert np.asarray(model.encode(TEXTS, prompt="find ")).tolist() == asked
        assert np.asarray(model.encode_document(TEXTS)).tolist() == expected
        lengths = np.linalg.norm(np.asarray(model.encode(TEXTS, normalize_embeddings=True)), axis=1)
        assert lengths == pytest.approx(np.ones(4))
        assert model.similarity(found[0], found)[0].tolist() == pytest.approx(scores, abs=1e-6)
        with pytest.raises(RequestError, match="prompt_name is 'x'; this model's prompts are 'query', 'document'"):
            model.encode(TEXTS, prompt_name="x")
    with pytest.raises(Unsupported, match="embeds texts; a CrossEncoder is a classifier with one label"):
        CrossEncoder(str(tmp_path))


def test_the_methods_of_a_cross_encoder(tmp_path: Path) -> None:
    saved(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    save_tokenizer(tmp_path)
    with CrossEncoder(str(tmp_path)) as model:
        scores = model.predict([(TEXTS[0], text) for text in TEXTS])
        assert model.predict((TEXTS[0], TEXTS[1])) == scores[1]
        ranked = model.rank(TEXTS[0], TEXTS, top_k=2, return_documents=True)
    order = np.argsort(-scores)[:2]
    assert [one["corpus_id"] for one in ranked] == order.tolist()
    assert [np.float32(one["score"]) for one in ranked] == scores[order].tolist()
    assert [one["text"] for one in ranked] == [TEXTS[i] for i in order]


def test_lines_are_embedded_by_a_command(tmp_path: Path) -> None:
    directory, lines, out = tmp_path / "model", tmp_path / "lines.txt", tmp_path / "out.npy"
    save_embedder(directory)
    lines.write_text("\n".join(TEXTS))
    with LLM(str(directory)) as llm:
        outputs = llm.embed(TEXTS, prompt_name="query", truncate_prompt_tokens=-1, use_tqdm=False)
    expected = [one.outputs.embedding for one in outputs]
    given = ["embed", "--model", str(directory), "--prompt-name", "query"]
    assert CliRunner().invoke(app, [*given, str(lines), "--out", str(out)]).exit_code == 0
    assert np.load(out).dtype == np.float32
    assert np.load(out).tolist() == expected
    printed = CliRunner().invoke(app, given, input=lines.read_text())
    records = [json.loads(line) for line in printed.stdout.splitlines()]
    assert records == [{"text": text, "embedding": one} for text, one in zip(TEXTS, expected, strict=True)]
    failed = CliRunner().invoke(app, [*given, "--no-truncate", str(lines)])
    assert failed.exit_code == 1
    assert "the request of prompt 2 has a prompt of" in failed.stderr
    assert "there is no line; give files" in CliRunner().invoke(app, given, input="").stderr
