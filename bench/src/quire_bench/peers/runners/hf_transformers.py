"""transformers' generate: requests of the same lengths side by side, as many as fit in a batch of 2,048 tokens.

Its environment: `pip install torch==2.13.0 transformers`.
"""

from __future__ import annotations

from itertools import groupby

from quire_bench.peers.runners.protocol import Generate, Settings, serve

BATCH = 2048  # prompt tokens


def start(settings: Settings) -> tuple[str, Generate]:
    """The version and what generates."""
    import torch
    from transformers import AutoModelForCausalLM, __version__

    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=settings.dtype, attn_implementation="sdpa"
    ).eval()

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> list[int]:
        counts: list[int] = []
        for (length, count), group in groupby(zip(prompts, new_tokens, strict=True), lambda one: (len(one[0]), one[1])):
            same = [prompt for prompt, _ in group]
            size = max(1, BATCH // length)
            for at in range(0, len(same), size):
                ids = torch.tensor(same[at : at + size])
                options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 1}
                out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
                counts += [out.shape[1] - length] * len(out)
        return counts

    return __version__, generate


if __name__ == "__main__":
    serve(start)
