"""OpenVINO GenAI's continuous batching, on a model that optimum-cli exported.

With the argument dynamic it rounds activations to 8 bits, which is not its default where the CPU multiplies bf16.

Its environment: `pip install torch==2.13.0 optimum-intel openvino openvino-genai nncf`, without torchvision.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from quire_bench.peers.runners.protocol import Generate, Settings, serve

DYNAMIC = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "32", "INFERENCE_PRECISION_HINT": "f32"}


def start(settings: Settings) -> tuple[str, Generate]:
    """Return the version and the function that generates."""
    import numpy as np
    import openvino
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    scheduler = SchedulerConfig()
    scheduler.cache_size = settings.kv_cache_gib
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = settings.prefix_caching
    about = {"INFERENCE_NUM_THREADS": settings.threads, **(DYNAMIC if "dynamic" in sys.argv else {})}
    pipeline = ContinuousBatchingPipeline(settings.model, scheduler, "CPU", about)

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> list[int]:
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        configs = [
            GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False)
            for count in new_tokens
        ]
        return [len(result.m_generation_ids[0]) for result in pipeline.generate(inputs, configs)]

    return version("openvino-genai"), generate


if __name__ == "__main__":
    serve(start)
