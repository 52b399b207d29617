"""/v1/rerank and /v1/score."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire import LLM
from quire.frontend import pooled
from quire.server.api import rerank
from tests.server.serving import SMALL, Serving, serving

QUERY = "import os"
DOCUMENTS = ["import os\n", "def f(): pass", "class Stack:\n", "def f(): pass"]


def ask(server: Serving, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, **body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def test_texts_are_compared_as_llm_score_compares_them(server: Serving) -> None:
    llm = LLM(**SMALL)
    expected = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS)]
    found = ask(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in found["data"]] == expected
    assert found["usage"]["total_tokens"] > 0
    for path, body in (
        ("/score", {"queries": [QUERY], "documents": DOCUMENTS}),
        ("/v1/score", {"text_1": [QUERY] * 4, "text_2": DOCUMENTS, "truncate_prompt_tokens": -1}),
    ):
        assert [one["score"] for one in ask(server, path, **body)["data"]] == expected
    order = sorted(range(4), key=lambda i: -expected[i])
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
        found = ask(server, path, query=QUERY, documents=documents)
        assert found["results"] == [
            {"index": i, "relevance_score": expected[i], "document": {"text": DOCUMENTS[i]}} for i in order
        ]
    best = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)
    assert best["results"] == [{"index": order[0], "relevance_score": expected[order[0]]}]
    cut = ask(server, "/v1/score", text_1=QUERY, text_2="x = 1; import os", truncate_prompt_tokens=1)
    ends = [llm.embed([llm.tokenizer.encode(one)[-1:]])[0].outputs.embedding for one in (QUERY, "x = 1; import os")]
    assert cut["data"][0]["score"] == pytest.approx(math.fsum(a * b for a, b in zip(*ends, strict=True)))


@pytest.mark.slow
def test_a_model_that_says_yes_or_no_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model knows other words, which stand for yes and no here."""
    monkeypatch.setattr(rerank, "QUESTION", "# {} | {} | {}\n")
    monkeypatch.setattr(rerank, "ANSWERS", ("def", "import"))
    llm = LLM(**SMALL)
    questions = [f"# Look. | {QUERY} | {document}\n" for document in DOCUMENTS]
    encode = llm.tokenizer.encode
    logprobs = [
        [
            one.cumulative_logprob
            for one in llm.loglikelihood([encode(q, False) for q in questions], [encode(w, False)] * 4)
        ]
        for w in rerank.ANSWERS
    ]
    expected = [1 / (1 + math.exp(no - yes)) for yes, no in zip(*logprobs, strict=True)]
    monkeypatch.setattr(pooled, "QUESTION", "# {} | {} | {}\n")
    monkeypatch.setattr(pooled, "ANSWERS", ("def", "import"))
    monkeypatch.setattr(pooled, "INSTRUCTION", "Look.")
    llm.factory.asks = True  # as for a model that is named a reranker
    assert [one.outputs.score for one in llm.score(QUERY, DOCUMENTS)] == pytest.approx(expected, abs=1e-6)
    assert [one.index for one in llm.rerank(QUERY, DOCUMENTS)] == sorted(range(4), key=lambda i: -expected[i])
    with serving(reranker="yes-no") as server:
        found = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, instruction="Look.")
        for one in found["results"]:
            assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-6)
        pairs = ask(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, instruction="Look.")
        assert [one["score"] for one in pairs["data"]] == pytest.approx(expected, abs=1e-6)
        for field, value in (("truncate_prompt_tokens", 4), ("add_special_tokens", False)):
            answer = server.post("/rerank", query="a", documents=["b"], **{field: value})
            assert (answer.status, answer.error()["param"]) == (400, field)
        monkeypatch.setattr(rerank, "ANSWERS", ("yes", "no"))
        error = server.post("/rerank", query="a", documents=["b"]).error()
        assert "'yes' is 2 tokens" in error["message"]
        assert server.is_idle()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "b", "title": "c"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 30_000]}, "documents"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction"),
        ("/v1/score", {"text_1": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
    ],
)
def test_what_cannot_be_compared_is_named(server: Serving, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.post(path, **body)
    assert answer.status == 400
    assert answer.error()["param"] == param
