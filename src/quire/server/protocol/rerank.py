"""The bodies of /v1/rerank and /v1/score, and their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired

from quire.server.http.api_error import Answer, ApiError
from quire.server.protocol.answers import SystemFingerprint, Usage
from quire.server.protocol.body import MAX_PROMPTS, MAX_TOKEN, On, Refused, StrictItem, Text
from quire.server.protocol.embeddings import Embedding


class Document(StrictItem):
    """A document that is an object."""

    text: Text


Some = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class RerankRequest(Embedding):
    """The body of /v1/rerank, as in Jina, Cohere and vLLM."""

    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    top_n: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None  # None or 0: all
    return_documents: On = True
    instruction: Text | None = None  # the criterion, for a model that answers yes or no
    max_tokens_per_doc: Annotated[Any, Refused("documents are not cut here; one that is too long is an error")] = None
    rank_fields: Annotated[list[Any] | None, Refused("documents are texts here")] = None

    def texts(self) -> list[str]:
        """Return the texts of the documents."""
        return [one if isinstance(one, str) else one["text"] for one in self.documents]


class ScoreRequest(Embedding):
    """The body of /v1/score, as in vLLM: each side of the pairs has two names."""

    text_1: Text | Some | None = None
    text_2: Text | Some | None = None
    queries: Text | Some | None = None
    documents: Text | Some | None = None
    instruction: Text | None = None

    def pairs(self) -> tuple[list[str], list[str]]:
        """Return the first and the second texts of the pairs: equally many, or a single first text. Raises ApiError."""
        named = ("queries", "documents") if self.text_1 is None and self.text_2 is None else ("text_1", "text_2")
        given = [getattr(self, name) for name in named]
        if None in given or (named[0] == "text_1" and not self.queries is self.documents is None):
            raise ApiError("give text_1 and text_2, or queries and documents", param="text_1")
        firsts, seconds = ([one] if isinstance(one, str) else one for one in given)
        if len(firsts) not in (1, len(seconds)):
            message = (
                f"{named[0]} has {len(firsts)} texts and {named[1]} has {len(seconds)}; give equally many, or one as "
                f"{named[0]}"
            )
            raise ApiError(message, param=named[0])
        return firsts, seconds


class RankedText(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document and its score for the query."""

    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Numbers(Answer):
    """The token counts, and the system that computed the scores."""

    usage: Usage
    system_fingerprint: SystemFingerprint


class Reranked(Numbers):
    """The answer of /v1/rerank."""

    id: str
    model: str
    results: list[Ranked]


class Score(Answer):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class Scored(Numbers):
    """The answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
