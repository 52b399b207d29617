"""Policy gradient: sampler and trainer give each token the same log-probability, to the bit.

The engine samples, and scores the samples again in another batch. The trainer's log-probabilities have the engine's
values, and the gradients of transformers' computation of the same weights. So the importance ratio is exactly 1 before
an update, without a correction. After it, `update_weights` replaces the engine's weights between two steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

from quire import LLM, SamplingParams

PROMPT = "class "
RATE = 2e-4
CLIP = 1.0  # the largest norm of the gradient


class ValuesOf(torch.autograd.Function):
    """Values of one computation with the gradients of another computation of the same numbers."""

    @staticmethod
    def forward(ctx: Any, with_gradients: Tensor, values: Tensor) -> Tensor:  # noqa: ARG004
        """Return the values."""
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        """Pass the gradient on to the other computation."""
        return gradients[0], None


def reward(text: str) -> float:
    """Return the share of capital letters."""
    return sum(letter.isupper() for letter in text) / max(1, len(text))


def engine_logprobs(llm: LLM, prompt: list[int], samples: Sequence[Sequence[int]]) -> Tensor:
    """Return the engine's log-probabilities of the samples' tokens: fp32 [samples, tokens]."""
    scored = llm.loglikelihood([prompt] * len(samples), samples, use_tqdm=False)
    return torch.tensor([one.token_logprobs for one in scored])


def trainer_logprobs(model: LlamaForCausalLM, prompt: list[int], samples: Sequence[Sequence[int]]) -> Tensor:
    """Return transformers' log-probabilities, with gradients: fp32 [samples, tokens]."""
    ids = torch.tensor([[*prompt, *sample] for sample in samples])
    logits: Tensor = model(ids).logits[:, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, len(prompt) :, None]).squeeze(-1)


def step(
    llm: LLM, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, number: int, count: int, length: int
) -> float:
    """Sample, train on the samples, and replace the engine's weights. Return the samples' mean reward."""
    prompt = llm.get_tokenizer().encode(PROMPT)
    params = SamplingParams(n=count, max_tokens=length, temperature=1.0, logprobs=0, seed=number, ignore_eos=True)
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    samples = [sample.token_ids for sample in output.outputs]
    sampled = torch.tensor(
        [
            [found[token].logprob for found, token in zip(sample.logprobs or (), sample.token_ids, strict=True)]
            for sample in output.outputs
        ]
    )
    rewards = torch.tensor([reward(sample.text) for sample in output.outputs])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    recomputed = trainer_logprobs(model, prompt, samples)
    logprobs: Tensor = ValuesOf.apply(  # type: ignore[no-untyped-call]
        recomputed, engine_logprobs(llm, prompt, samples)
    )
    ratio = (logprobs - sampled).exp()
    apart = float((recomputed.detach() - sampled).abs().max())
    optimizer.zero_grad()
    torch.autograd.backward(-(ratio * advantages[:, None]).mean())
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()

    version = llm.update_weights(model.named_parameters(), version=f"step-{number}")
    after = (engine_logprobs(llm, prompt, samples) - sampled).exp()
    print(
        f"weights {output.weights_version:>7}: reward {rewards.mean():.3f}; "
        f"ratio exactly 1: {bool((ratio == 1).all())}, with transformers' values off by {apart:.0e}; "
        f"with weights {version}: {after.min():.2f} to {after.max():.2f}"
    )
    return float(rewards.mean())


def main() -> None:
    """Train for some steps, and compare the rewards of the first and the last ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32, help="of each step")
    parser.add_argument("--tokens", type=int, default=12, help="of each sample")
    given = parser.parse_args()
    logging.set_verbosity_error()  # transformers does not know the draft head of the checkpoint
    logging.disable_progress_bar()
    with LLM(dtype="float32", num_blocks=512) as llm:
        model = LlamaForCausalLM.from_pretrained(llm.files.path, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        rewards = [step(llm, model, optimizer, i + 1, given.samples, given.tokens) for i in range(given.steps)]
    print(f"the reward rose from {rewards[0]:.3f} to {rewards[-1]:.3f}: {rewards[-1] > 1.5 * rewards[0]}")


if __name__ == "__main__":
    main()
