"""OpenVINO GenAI's continuous batching, on a model that optimum-cli exported.

Its environment: `pip install torch==2.13.0 optimum-intel openvino openvino-genai nncf`, without torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version

from quire_bench.peers.runners.protocol import Generate, Settings, serve


def starter(properties: Mapping[str, str]) -> Callable[[Settings], tuple[str, Generate]]:
    """What starts it with these properties of its own."""
    return lambda settings: start(settings, properties)


def start(settings: Settings, properties: Mapping[str, str]) -> tuple[str, Generate]:
    """The version and what generates."""
    import numpy as np
    import openvino
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    scheduler = SchedulerConfig()
    scheduler.cache_size = settings.kv_cache_gib
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = settings.prefix_caching
    about = {"INFERENCE_NUM_THREADS": settings.threads, **properties}
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
    serve(starter({}))
