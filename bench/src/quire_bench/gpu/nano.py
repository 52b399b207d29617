"""nano-vllm's own benchmark: 256 requests of 100 to 1,024 tokens, and as many new ones each, at temperature 0.6.

Its model has the shape of Qwen3-0.6B, with random weights. nano-vllm runs on FlashAttention 3 in a process of its own:
`python -m quire_bench.gpu.nano CHECKPOINT FA3_LIBRARY NANO_SOURCE`, which prints tokens a second.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

from quire.models import EMBEDDED
from quire_bench.gpu.common import Bench, shortened

CASE = "256 requests of Qwen3-0.6B's shape"
RUNS = 2  # of which the second counts
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "rope_scaling": None, "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TINY = {"vocab_size": 10240, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


def requests(tiny: bool) -> tuple[list[list[int]], list[int]]:
    """The prompts and the numbers of new tokens, drawn as nano-vllm's benchmark draws them."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    counts = [draw.randint(100, 1024) for _ in range(256)]
    return ([prompt[:20] for prompt in prompts[:3]], [4] * 3) if tiny else (prompts, counts)


def write(directory: Path, device: str, tiny: bool) -> None:
    """A checkpoint with random weights and the embedded model's tokenizer."""
    config: dict[str, Any] = QWEN3 | (TINY if tiny else {})
    (directory / "config.json").write_text(json.dumps(config))
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows, kv_rows = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = {
        "self_attn.q_proj": (rows, hidden), "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden), "self_attn.o_proj": (hidden, rows),
        "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    weights = {
        f"{name}.weight": (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device=device) * 0.02)
        .bfloat16()
        .cpu()
        for name, shape in shapes.items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (Path(EMBEDDED) / name).exists():
            shutil.copy(Path(EMBEDDED) / name, directory / name)


def ours(bench: Bench) -> None:
    """Stage: the requests by `quire.LLM`, with each backend."""
    if find_spec("llguidance") is None:  # only grammars need it
        stub: Any = ModuleType("llguidance")
        stub.LLMatcher = stub.LLParserLimits = stub.LLTokenizer = object
        sys.modules["llguidance"] = stub
    from quire import ops
    from quire.frontend.llm import LLM
    from quire.request import SamplingParams

    prompts, counts = requests(bench.settings.tiny)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for count in counts]
    backends = {"quire": bench.settings.backend}
    if ops.unavailable("hopper", bench.device) is None:
        backends["hopper"] = "hopper"
    with TemporaryDirectory() as folder:
        write(Path(folder), bench.device, bench.settings.tiny)
        for who, backend in backends.items():
            if bench.seconds_left < 5:
                bench.failed(CASE, who, "the stage's time was up")
                continue
            memory = "64MiB" if bench.settings.tiny else "24GiB"
            start = time.perf_counter()
            llm = LLM(
                folder, dtype="bfloat16", device=bench.device, attention_backend=backend, max_model_len=4096,
                kv_cache_memory=memory,
            )  # fmt: skip
            ready, rates = time.perf_counter() - start, []
            for run in range(RUNS):
                shifted = [{"prompt_token_ids": [(x + 7 * run) % 10000 for x in prompt]} for prompt in prompts]
                start = time.perf_counter()
                outs = llm.generate(shifted, params, use_tqdm=False)
                rates.append(sum(len(one.outputs[0].token_ids) for one in outs) / (time.perf_counter() - start))
                bench.row(CASE, f"{who}, run {run}", value=rates[-1], unit="tok/s")
            bench.row(CASE, who, value=rates[-1], unit="tok/s", first=rates[0], ready_s=round(ready, 1))
            del llm
            bench.forget()


def theirs(bench: Bench) -> None:
    """Stage: the same by nano-vllm, where its source and FlashAttention 3's library are given."""
    if bench.settings.nano is None or bench.settings.fa3 is None:
        bench.row(CASE, "nano-vllm", skipped="its source and FlashAttention 3's library were not given: --nano, --fa3")
        return
    with TemporaryDirectory() as folder:
        write(Path(folder), bench.device, bench.settings.tiny)
        command = [sys.executable, "-m", "quire_bench.gpu.nano", folder, bench.settings.fa3, bench.settings.nano]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    rates = [float(rate) for rate in re.findall(r"rate ([\d.]+)", done.stdout)]
    if len(rates) < RUNS:
        bench.failed(CASE, "nano-vllm", f"ended with {done.returncode}: {shortened(done.stderr)}")
        return
    bench.row(CASE, "nano-vllm", value=rates[-1], unit="tok/s", first=rates[0])


def _flash_attention(path: str) -> ModuleType:
    """Return a module `flash_attn` of the two functions that nano-vllm calls, by FlashAttention 3's library."""
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    forward = torch.ops._vllm_fa3_C.fwd
    names = [argument.name for argument in forward.default._schema.arguments]
    usual = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True,
             "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}  # fmt: skip

    def call(q: torch.Tensor, **given: Any) -> torch.Tensor:
        given |= {"q": q, "out": torch.empty_like(q)} | {k: v for k, v in usual.items() if k not in given}
        found: torch.Tensor = forward(*(given.get(name) for name in names))[0]
        return found

    def ragged(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
        block_table: torch.Tensor | None = None, causal: bool = False, softmax_scale: float | None = None, **sizes: Any,
    ) -> torch.Tensor:  # fmt: skip
        lens: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k}
        if block_table is not None:
            lens = {"seqused_k": cu_seqlens_k.diff().contiguous(), "page_table": block_table}
        return call(
            q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, softmax_scale=softmax_scale, is_causal=causal, **lens, **sizes
        )

    def cached(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cache_seqlens: torch.Tensor, block_table: torch.Tensor,
        softmax_scale: float | None = None, causal: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        longest = block_table.shape[1] * k.shape[1]
        return call(
            q, k=k, v=v, seqused_k=cache_seqlens, page_table=block_table, softmax_scale=softmax_scale,
            is_causal=causal, max_seqlen_q=1, max_seqlen_k=longest,
        )  # fmt: skip

    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = ragged, cached
    made: ModuleType = module
    return made


def main(checkpoint: str, library: str, source: str) -> None:
    """Run nano-vllm."""
    sys.modules["flash_attn"] = _flash_attention(library)
    sys.path.insert(0, source)
    from nanovllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(checkpoint, enforce_eager=False, max_model_len=4096)
    prompts, counts = requests(tiny=False)
    llm.generate([prompts[0]], SamplingParams(), use_tqdm=False)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for count in counts]
    for run in range(RUNS):
        shifted = [[(x + 7 * run) % 10000 for x in prompt] for prompt in prompts]
        start = time.perf_counter()
        llm.generate(shifted, params, use_tqdm=False)
        sys.stdout.write(f"rate {sum(counts) / (time.perf_counter() - start)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
