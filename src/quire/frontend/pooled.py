"""Embeddings, scores, rankings and classes: the requests of each call, and its answer once they have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from quire.errors import RequestError, check_integer
from quire.frontend.embedding import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RankedDocument,
    ScoringRequestOutput,
    check_dimensions,
    classification_output,
    embedding_output,
    pair_output,
    ranked,
    similarity,
)
from quire.frontend.outputs import RequestOutput
from quire.frontend.request_factory import (
    Prompt,
    RequestFactory,
    TokenizedPrompt,
    each_options,
    list_prompts,
    parse_prompt,
)
from quire.frontend.requests import Made
from quire.frontend.yes_no import ANSWERS, INSTRUCTION, QUESTION, answer_token, asked_output, drawn

T = TypeVar("T")
SEVERAL = 8  # texts that are worth starting threads for
TOKENIZERS = 4  # threads


class Call(NamedTuple, Generic[T]):
    """The requests of a call, and the function that makes its answer of their outputs."""

    made: list[Made]
    finish: Callable[[list[RequestOutput]], T]


class Pooled(NamedTuple):
    """The options of a call that all of its prompts share."""

    factory: RequestFactory
    names: Callable[[], str]  # returns the name of the next request
    truncate: int | None = None  # see `LLM.embed`
    priority: Sequence[int] | int | None = None
    lora: str | Sequence[str | None] | None = None

    def embed(
        self, prompts: Prompt | Sequence[Prompt], dimensions: int | None, prompt_name: str | None
    ) -> Call[list[EmbeddingRequestOutput]]:
        """Make the call of `LLM.embed`."""
        pooling = self.factory.pooling
        pooling.check("embeds")
        check_dimensions(dimensions, self.factory.vector_size)
        made = self._requests(self._texts(list_prompts(prompts), prompt_name))
        return Call(made, lambda outputs: [embedding_output(output, dimensions, pooling) for output in outputs])

    def classify(self, prompts: Prompt | Sequence[Prompt]) -> Call[list[ClassificationRequestOutput]]:
        """Make the call of `LLM.classify`."""
        pooling = self.factory.pooling
        pooling.check("classifies")
        made = self._requests(self._texts(list_prompts(prompts)))
        return Call(made, lambda outputs: [classification_output(output, pooling) for output in outputs])

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        names: tuple[str, str] = ("data_1", "data_2"),
    ) -> Call[list[ScoringRequestOutput]]:
        """Make the call of `LLM.score`. names: of the arguments, for errors."""
        firsts, seconds = list_prompts(data_1, names[0]), list_prompts(data_2, names[1])
        if len(firsts) not in (1, len(seconds)):
            raise RequestError(
                f"{names[0]} has {len(firsts)} prompts and {names[1]} has {len(seconds)}; give equal numbers, or one "
                f"as {names[0]}"
            )
        pooling = self.factory.pooling
        if pooling.labels:
            pooling.check_pairs()
            pairs = zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True)
            made = self._requests([self.factory.tokenize_pair(*pair, self.truncate) for pair in pairs])
            return Call(made, lambda outputs: [pair_output(output, pooling) for output in outputs])
        if self.factory.asks:
            return self._asked([(firsts[0] if len(firsts) == 1 else firsts[i], one) for i, one in enumerate(seconds)])
        unit = replace(pooling, normalized=True)
        made = self._requests(self._texts([*firsts, *seconds]))

        def finish(outputs: list[RequestOutput]) -> list[ScoringRequestOutput]:
            found = [embedding_output(output, None, unit) for output in outputs]
            first, second = found[: len(firsts)], found[len(firsts) :]
            pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
            return [similarity(one, other) for one, other in pairs]

        return Call(made, finish)

    def rerank(self, query: Prompt, documents: Sequence[Prompt], top_n: int | None) -> Call[list[RankedDocument]]:
        """Make the call of `LLM.rerank`."""
        if top_n is not None:
            check_integer(RequestError, "top_n", top_n, 1, 2**31 - 1)
        listed = list_prompts(documents, "documents")
        made, finish = self.score([query], listed, ("query", "documents"))
        shown: Sequence[Any] = listed
        return Call(made, lambda outputs: ranked(shown, finish(outputs), top_n))

    def _asked(self, pairs: Sequence[tuple[Prompt, Prompt]]) -> Call[list[ScoringRequestOutput]]:
        """Score pairs by the probability of yes, given that the answer is yes or no."""
        made: list[Made] = []
        tokenizer = self.factory.tokenizer_for(QUESTION)
        params = [drawn(answer_token(tokenizer, answer)) for answer in ANSWERS]
        for pair in pairs:
            texts = [parse_prompt(one)[0] for one in pair]
            if not all(isinstance(text, str) for text in texts):
                raise RequestError("a pair of token ids is given; this model is asked about two texts, so give texts")
            given = (INSTRUCTION, *map(str, texts))
            prompt = TokenizedPrompt(QUESTION.format(*given), tokenizer.encode_form(QUESTION.split("{}"), given))
            for one in params:
                [options] = each_options([prompt], None, self.lora)
                made.append(self.factory.generation(self.names(), prompt, one, options, self.factory.constraints(one)))
        return Call(made, lambda found: [asked_output(*both) for both in zip(found[::2], found[1::2], strict=True)])

    def _texts(self, prompts: Sequence[Prompt], prompt_name: str | None = None) -> list[TokenizedPrompt]:
        """Tokenize texts, several at a time: meanwhile the library lets other threads run."""

        def tokenize(prompt: Prompt) -> TokenizedPrompt:
            return self.factory.tokenize_text(prompt, prompt_name, self.truncate)

        if len(prompts) < SEVERAL:
            return [tokenize(prompt) for prompt in prompts]
        with ThreadPoolExecutor(TOKENIZERS) as pool:
            return list(pool.map(tokenize, prompts))

    def _requests(self, prompts: Sequence[TokenizedPrompt]) -> list[Made]:
        priority = [self.priority] * len(prompts) if isinstance(self.priority, int) else self.priority
        each = each_options(prompts, priority, self.lora)
        return [
            self.factory.embedding(self.names(), prompt, options) for prompt, options in zip(prompts, each, strict=True)
        ]
