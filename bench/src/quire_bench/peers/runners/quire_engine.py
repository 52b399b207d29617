"""Quire, with its defaults but for speculation, which random weights would flatter: they soon go in circles."""

from __future__ import annotations

import sys

from quire_bench.peers.runners.protocol import Generate, Settings, serve


def start(settings: Settings) -> tuple[str, Generate]:
    """Return the version and the function that generates. An argument names the code that computes the model."""
    from quire import LLM, SamplingParams, __version__

    llm = LLM(
        settings.model,
        model_impl=sys.argv[1] if len(sys.argv) > 1 else "auto",
        max_model_len=settings.max_model_len,
        enable_prefix_caching=settings.prefix_caching,
        kv_cache_memory=f"{settings.kv_cache_gib}GiB",
        num_speculative_tokens=0,
        quantization=settings.quantization,
    )

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> list[int]:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in new_tokens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return __version__, generate


if __name__ == "__main__":
    serve(start)
