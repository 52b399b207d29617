"""Causal rerankers such as Qwen3-Reranker, which answer yes or no to a query and a document."""

from __future__ import annotations

import math

from quire.errors import RequestError
from quire.frontend.embedding import ScoringOutput, ScoringRequestOutput
from quire.frontend.outputs import RequestOutput
from quire.frontend.tokenizer import Tokenizer
from quire.request import SamplingParams

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt that Qwen3-Reranker was trained with, word for word.
QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
ANSWERS = ("yes", "no")


def is_named_reranker(model: str) -> bool:
    """Return whether a model's name is one of a reranker, as `--reranker auto` decides."""
    return "reranker" in model.casefold()


def answer_token(tokenizer: Tokenizer, answer: str) -> int:
    """Return the token of an answer. Raises RequestError if it is several tokens."""
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    if len(tokens) != 1:
        raise RequestError(
            f"{answer!r} is {len(tokens)} tokens of this model, so it was not trained to answer yes or no"
        )
    return tokens[0]


def drawn(token: int) -> SamplingParams:
    """Return the parameters that generate this token, with its logprob from the raw logits."""
    return SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=[token], logprobs=0)


def logprob(output: RequestOutput) -> float:
    """Return the logprob of the answer that was drawn; NaN if the step failed."""
    [sample] = output.outputs
    return sample.logprobs[0][sample.token_ids[0]].logprob if sample.logprobs else math.nan


def probability(yes: float, no: float) -> float:
    """Return the probability of yes, given that the answer is yes or no, by their logprobs."""
    return 1 / (1 + math.exp(-max(-700.0, yes - no)))


def asked_output(yes: RequestOutput, no: RequestOutput) -> ScoringRequestOutput:
    """Return the caller's form of the two outputs of a pair."""
    error = yes.outputs[0].error or no.outputs[0].error
    score = math.nan if error is not None else probability(logprob(yes), logprob(no))
    tokens, num_cached = yes.prompt_token_ids, yes.num_cached_tokens or 0
    return ScoringRequestOutput(f"{yes.request_id}_{no.request_id}", ScoringOutput(score), tokens, num_cached, error)
