"""Encoders behind a server and a fleet: the numbers of LLM, and the errors of bodies."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quire import LLM, AsyncLLM
from quire.cli import app
from quire.errors import ConfigError
from quire.outputs import ClassificationRequestOutput
from quire.server.run import build_parts
from quire.server.server_config import ServerConfig
from tests.fleet.gateways import fronting
from tests.fleet.serving import SECRET
from tests.models.encoders import save_embedder, save_tokenizer, saved
from tests.server.serving import Serving, serving

TEXTS = ["a cat sat on the mat.", "", "what, no dog?", "0 1 2 3 4 5", "the cat"]


def posted(server: Any, path: str, **body: Any) -> Any:
    answer = server.post(path, **body)
    assert answer.status == 200, answer.body
    return answer.json()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedder")
    save_embedder(directory)
    return directory


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("classifier")
    saved(directory, "bert", "ForSequenceClassification", num_labels=1)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def served(embedder: Path) -> Iterator[Serving]:
    with serving({"model": str(embedder)}, ollama=True) as server:
        yield server


def test_embeddings_are_those_of_llm_and_of_a_fleet(embedder: Path, served: Serving) -> None:
    with LLM(str(embedder)) as llm:
        expected = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
        asked = [one.outputs.embedding for one in llm.embed(TEXTS, prompt_name="query", use_tqdm=False)]
        tokens = [one.prompt_token_ids for one in llm.embed(TEXTS, use_tqdm=False)]
        scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        best = llm.rerank(TEXTS[0], TEXTS, top_n=2, use_tqdm=False)
    assert [one.index for one in best] == sorted(range(5), key=lambda i: -scores[i])[:2]
    assert (best[0].document, best[0].score) == (TEXTS[0], scores[0])
    assert abs(np.linalg.norm(expected[0]) - 1) > 0.1  # there is no Normalize
    with serving({"model": str(embedder)}, fleet_secret=SECRET) as replica, fronting(replica.url, ollama=True) as front:
        for server in (served, front):
            found = posted(server, "/v1/embeddings", input=TEXTS)
            assert [one["embedding"] for one in found["data"]] == expected
            assert found["usage"]["prompt_tokens"] == sum(map(len, tokens))
            encoded = posted(server, "/v1/embeddings", input=tokens, encoding_format="base64", dimensions=7)
            for one, vector in zip(encoded["data"], expected, strict=True):
                assert np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() == vector[:7]
            found = posted(server, "/v1/embeddings", input=TEXTS, prompt_name="query")
            assert [one["embedding"] for one in found["data"]] == asked
            found = posted(server, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
            assert [one["score"] for one in found["data"]] == scores
            unit = posted(server, "/api/embed", input=TEXTS[0])["embeddings"][0]
            assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)


def test_a_text_that_is_too_long_is_cut_within_its_special_tokens(embedder: Path, served: Serving) -> None:
    long = "cat " * 60  # 180 pieces, of 96 positions
    answer = served.post("/v1/embeddings", input=long)
    assert answer.status == 400
    assert answer.error()["code"] == "context_length_exceeded"
    assert "input 0 has 182 tokens; this model serves sequences of up to 96" in answer.error()["message"]
    with LLM(str(embedder)) as llm:
        [cut] = llm.embed(long, truncate_prompt_tokens=-1, use_tqdm=False)
        whole = llm.get_tokenizer().encode(long)
    assert cut.prompt_token_ids == [*whole[:95], whole[-1]]
    for body in ({"truncate_prompt_tokens": -1}, {"truncate": "END"}):
        found = posted(served, "/v1/embeddings", input=long, **body)
        assert found["data"][0]["embedding"] == cut.outputs.embedding
    assert len(posted(served, "/api/embed", input=long)["embeddings"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "a"}, "this model writes no text; it embeds or classifies texts"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "this model writes no text"),
        ("/v1/classify", {"input": "a"}, "this model embeds texts and has no classifier"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "this model's prompts are 'query', 'document'"),
        ("/v1/embeddings", {"input": [[5]], "prompt_name": "query"}, "so no prompt can precede it"),
        ("/v1/embeddings", {"input": [[97]]}, "token ids of this model lie in 0..96"),
        ("/v1/embeddings", {"input": "a", "dimensions": 49}, "dimensions is 49"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1 cannot be read; it must be a text, or a list of texts"),
    ],
)
def test_what_is_refused(served: Serving, path: str, body: dict[str, Any], message: str) -> None:
    answer = served.post(path, **body)
    assert answer.status == 400
    assert message in answer.error()["message"]


def test_long_texts_are_cut_if_the_body_asks(served: Serving) -> None:
    """And a text of many characters that are few tokens is not too long."""
    long = "the cat sat " * 500
    whole = posted(served, "/v1/embeddings", input=long, truncate="END")["data"][0]["embedding"]
    assert posted(served, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)["data"][0]["embedding"] == whole
    [unit] = posted(served, "/api/embed", model="", input=long)["embeddings"]
    np.testing.assert_allclose(unit, np.array(whole) / np.linalg.norm(whole), atol=1e-6)
    assert len(posted(served, "/v1/rerank", query=long, documents=[long], truncate_prompt_tokens=-1)["results"]) == 1
    answer = served.post("/v1/embeddings", input=long)
    assert (answer.status, answer.error()["code"]) == (400, "context_length_exceeded")
    spaced = posted(served, "/v1/embeddings", input=["cat" + " " * 5000, "cat"])["data"]
    assert spaced[0]["embedding"] == spaced[1]["embedding"]
    counted = served.ask("GET", "/metrics").body.decode()
    assert re.search(r"(?m)^\S*prefix_cache_queries_total\{.*\} 0(\.0)?$", counted), "texts that look nothing up count"


def test_no_page_and_no_route_takes_it_for_a_model_that_writes(embedder: Path, served: Serving) -> None:
    page = served.ask("GET", "/", headers={"Accept": "text/html"}).body.decode()
    assert 'data-kind="vectors"' in page
    assert "This server embeds or classifies texts with" in page
    assert "/v1/embeddings" in page
    assert "/v1/completions" not in page
    assert served.post("/api/show", model="").json()["capabilities"] == ["embedding"]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("/apply-template", chat),
        ("/v1/messages/count_tokens", {"model": str(embedder), **chat}),
        ("/v1/embeddings", chat),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        answer = served.post(path, **body)
        assert (answer.status, "this model writes no text" in answer.body.decode()) == (400, True), answer.body


def test_options_and_commands_for_models_that_write(embedder: Path, served: Serving) -> None:
    with pytest.raises(ConfigError, match="reranker is yes-no, which needs a model that writes"):
        build_parts({"model": str(embedder)}, ServerConfig(reranker="yes-no"))
    result = CliRunner().invoke(app, ["generate", "a prompt", "--model", str(embedder)])
    assert (result.exit_code, result.stdout) == (1, "")  # the prompt is not printed
    assert "this model writes no text" in result.stderr


def test_a_cross_encoder(classifier: Path) -> None:
    with LLM(str(classifier), task="classify", convert="classify") as llm:  # as vLLM's scripts say
        pairs = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        swapped = llm.score(TEXTS[2], TEXTS[0], use_tqdm=False)[0].outputs.score
        alone = llm.classify(TEXTS, use_tqdm=False)
        long = llm.score("cat " * 60, "dog " * 40, truncate_prompt_tokens=-1, use_tqdm=False)[0]
        assert len(long.prompt_token_ids) == 96
        assert sum(token >= 97 for token in long.prompt_token_ids) == 93 // 2 + 1  # the second text and its end
    assert swapped != pairs[2]
    assert [(type(one), one.outputs.num_classes) for one in alone] == [(ClassificationRequestOutput, 1)] * len(TEXTS)

    async def ask() -> None:
        async with AsyncLLM(str(classifier)) as twin:
            assert [one.outputs.score for one in await twin.score(TEXTS[0], TEXTS)] == pairs
            assert (await twin.classify(TEXTS[3])).outputs == alone[3].outputs
            best = await twin.rerank(TEXTS[0], TEXTS, top_n=1)
            assert [(one.index, one.score) for one in best] == [(int(np.argmax(pairs)), max(pairs))]

    asyncio.run(ask())
    with serving({"model": str(classifier)}, ollama=True) as server:
        refused = server.post("/detokenize", tokens=[97])  # the id of a second text's token
        assert (refused.status, "lie in 0..96" in refused.error()["message"]) == (400, True)
        found = posted(server, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
        assert [one["score"] for one in found["data"]] == pairs
        found = posted(server, "/v1/rerank", query=TEXTS[0], documents=TEXTS)
        assert [one["relevance_score"] for one in found["results"]] == sorted(pairs, reverse=True)
        found = posted(server, "/v1/classify", input=TEXTS)
        probs = [one.outputs.probs for one in alone]
        expected = [{"index": i, "label": None, "probs": own, "num_classes": 1} for i, own in enumerate(probs)]
        assert found["data"] == expected
        answer = server.post("/v1/rerank", query="cat", documents=["dog", "dog " * 200])
        assert (answer.status, answer.error()["code"], answer.error()["param"]) == (
            400, "context_length_exceeded", "documents")  # fmt: skip
        assert answer.error()["message"].startswith("pair 1 has ")
        assert posted(server, "/v1/rerank", query="cat", documents=["dog " * 200], truncate_prompt_tokens=-1)
        assert "/v1/classify" in server.ask("GET", "/", headers={"Accept": "text/html"}).body.decode()
        assert posted(server, "/api/show", model="")["capabilities"] == []
        answer = server.post("/v1/embeddings", input="a")
        assert "this model classifies texts and has no embeddings; its labels are LABEL_0" in answer.error()["message"]
