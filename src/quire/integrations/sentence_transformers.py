"""sentence-transformers' SentenceTransformer and CrossEncoder with Quire's engine: the methods that compute.

    from quire.integrations.sentence_transformers import SentenceTransformer

A text that is too long is cut, as there. Options that Quire does not have are not accepted: passing one is a TypeError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire import LLM
from quire.errors import Unsupported

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class SentenceTransformer:
    """An embedding model with the methods encode, encode_query, encode_document and similarity.

    Args:
        model_name_or_path: see `LLM`.
        **options: see `LLM`.

    Example:
        >>> with SentenceTransformer(None, num_blocks=128) as model:
        ...     model.encode(["import os", "import sys"]).shape
        (2, 64)
    """

    def __init__(self, model_name_or_path: str | None = None, **options: Any) -> None:
        self.llm = LLM(model_name_or_path, **options)

    def __enter__(self) -> SentenceTransformer:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    @property
    def max_seq_length(self) -> int:
        """The number of tokens at which a text is cut."""
        return self.llm.engine.scheduler.max_model_len

    @property
    def prompts(self) -> Mapping[str, str]:
        """The prompts of the checkpoint, by name."""
        return self.llm.factory.pooling.prompts

    def get_sentence_embedding_dimension(self) -> int:
        """Return the number of values of an embedding."""
        return self.llm.hidden_size

    def encode(
        self,
        sentences: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        show_progress_bar: bool = False,
        convert_to_tensor: bool = False,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
    ) -> NDArray[np.float32] | Tensor:
        """Embed one text or several.

        Args:
            sentences: a text or a list of texts.
            prompt_name: the name of a prompt of the checkpoint that precedes each text.
            prompt: a text that precedes each text instead.
            show_progress_bar: show a progress bar if standard error is a terminal.
            convert_to_tensor: return a tensor instead of an array.
            normalize_embeddings: scale the vectors to length 1 also if the checkpoint's files do without.
            truncate_dim: number of leading values to keep.

        Returns:
            fp32 [texts, dimensions], or [dimensions] for one text.

        Raises:
            RequestError: the prompt's name is unknown, or truncate_dim is out of range.
        """
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        if prompt is not None:
            texts = [prompt + text for text in texts]
        outputs = self.llm.embed(
            texts,
            dimensions=truncate_dim,
            prompt_name=None if prompt is not None else prompt_name,
            truncate_prompt_tokens=-1,
            use_tqdm=show_progress_bar,
        )
        found = np.array([output.outputs.embedding for output in outputs], np.float32).reshape(len(texts), -1)
        if normalize_embeddings:
            found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        result = found[0] if isinstance(sentences, str) else found
        if not convert_to_tensor:
            return result
        import torch

        return torch.from_numpy(result)

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> NDArray[np.float32] | Tensor:
        """Embed queries: `encode` with the prompt "query", if the checkpoint has it."""
        return self.encode(sentences, **({"prompt_name": self._named("query")} | options))

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> NDArray[np.float32] | Tensor:
        """Embed documents: `encode` with the prompt "document" or "passage", if the checkpoint has one."""
        return self.encode(sentences, **({"prompt_name": self._named("document", "passage", "corpus")} | options))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines of two lists of embeddings: a tensor [a, b]."""
        import torch

        one, other = (torch.as_tensor(np.atleast_2d(x), dtype=torch.float32) for x in (embeddings1, embeddings2))
        return torch.nn.functional.normalize(one, dim=1) @ torch.nn.functional.normalize(other, dim=1).T

    def _named(self, *names: str) -> str | None:
        return next((name for name in names if name in self.prompts), None)


class CrossEncoder:
    """A model that reads two texts together, with the methods predict and rank.

    Args:
        model_name_or_path: see `LLM`.
        **options: see `LLM`.
    """

    def __init__(self, model_name_or_path: str, **options: Any) -> None:
        self.llm = LLM(model_name_or_path, **options)
        if not self.llm.factory.pooling.labels:
            self.llm.close()
            raise Unsupported(f"{model_name_or_path} embeds texts; a CrossEncoder is a classifier with one label")

    def __enter__(self) -> CrossEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def predict(
        self, sentences: tuple[str, str] | Sequence[tuple[str, str]], *, show_progress_bar: bool = False
    ) -> NDArray[np.float32] | np.float32:
        """Return the score of one pair of texts, or of several: fp32 [pairs]."""
        alone = len(sentences) == 2 and isinstance(sentences[0], str)
        pairs: Any = [sentences] if alone else sentences
        firsts, seconds = ([pair[i] for pair in pairs] for i in (0, 1))
        scored = self.llm.score(firsts, seconds, truncate_prompt_tokens=-1, use_tqdm=show_progress_bar)
        found = np.array([one.outputs.score for one in scored], np.float32)
        return found[0] if alone else found

    def rank(
        self, query: str, documents: Sequence[str], *, top_k: int | None = None, return_documents: bool = False
    ) -> list[dict[str, Any]]:
        """Return the best documents of a query, best first: dictionaries of corpus_id, score and maybe text."""
        found = self.llm.rerank(query, documents, top_n=top_k, truncate_prompt_tokens=-1, use_tqdm=False)
        return [
            {"corpus_id": one.index, "score": one.score} | ({"text": one.document} if return_documents else {})
            for one in found
        ]
