"""transformers' continuous batching over its own paged cache.

Its environment: `pip install torch==2.13.0 transformers`.
"""

from __future__ import annotations

from quire_bench.peers.runners.protocol import Generate, Settings, serve

BATCH_TOKENS = 2048  # query tokens a step, as Quire has by default
PAGE = 256  # tokens, its default


def start(settings: Settings) -> tuple[str, Generate]:
    """The version and what generates."""
    from transformers import AutoModelForCausalLM, GenerationConfig, __version__
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=settings.dtype, attn_implementation="sdpa"
    ).eval()
    pages = -(-settings.max_tokens // PAGE) + settings.max_requests  # all of the workload's tokens at once

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> list[int]:
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=pages,
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=settings.max_requests,
                allow_block_sharing=settings.prefix_caching,
            ),
        )
        manager.start()
        try:
            names = [
                manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)
                for prompt, count in zip(prompts, new_tokens, strict=True)
            ]
            found: dict[str, int] = {}
            while len(found) < len(names):
                if not manager.is_running():
                    raise RuntimeError("its thread has ended")
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = len(result.generated_tokens)
        finally:
            manager.stop(block=True)
        return [found[name] for name in names]

    return __version__, generate


if __name__ == "__main__":
    serve(start)
