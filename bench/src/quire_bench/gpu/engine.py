"""The engine on a GPU: the seed's workload paged, gathered and one by one; transformers beside it; a step of decoding.

Weights are random, since speed does not depend on them. GPT-2 small goes through a checkpoint, which transformers
loads too; a model of 8 billion parameters is made where it runs.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from quire.cache.storage import bytes_per_block
from quire.config import engine_config
from quire.engine.engine import build_engine
from quire.errors import QuireError
from quire.frontend.llm import LLM
from quire.models.decoder import Decoder
from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig, weight_shapes
from quire.models.families import gpt2
from quire.request import Request
from quire_bench.engine.throughput import measure
from quire_bench.gpu.common import Bench, copy, race
from quire_bench.workloads import Workload, greedy, workload

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def llama_layer(*, num_heads: int, num_kv_heads: int, head_dim: int, inner: int) -> LayerConfig:
    """A layer of Llama 3."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    attention = AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=rope)
    return LayerConfig(mixer=attention, mlp=MlpConfig(size=inner))


EIGHT_B = DecoderConfig(  # Llama 3's shape
    vocab_size=128256,
    hidden_size=4096,
    max_position_embeddings=8192,
    tied_embeddings=False,
    layers=(llama_layer(num_heads=32, num_kv_heads=8, head_dim=128, inner=14336),) * 32,
)
STEPS_TIMED = 50  # together, since a step is queued before the one before it has ended
ONE_BY_ONE = 16  # requests of the 64; each takes as long as the others
TINY_CONFIG = {"vocab_size": 2048, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}


def gpt2_config(bench: Bench) -> dict[str, Any]:
    """The config.json."""
    return GPT2 | (TINY_CONFIG | {"dtype": "float32"} if bench.settings.tiny else {})


def write_gpt2(bench: Bench, directory: Path) -> None:
    """A checkpoint of GPT-2's shape with random weights."""
    raw = gpt2_config(bench)
    (directory / "config.json").write_text(json.dumps(raw))
    config = gpt2.decoder_config(raw)
    sources = gpt2.weight_sources(config, frozenset({"transformer."}))
    tensors = {}
    for name, shape in weight_shapes(config).items():
        [theirs] = sources.of(name)
        weight = _random_weight(name, shape, "cpu", getattr(torch, raw["dtype"]))
        tensors[theirs] = (weight.T if weight.dim() == 2 and name.startswith("layers.") else weight).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _random_weight(name: str, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(shape, device=device, dtype=dtype).mul_(0.02)
    return weight.add_(1) if "norm" in name and name.endswith(".weight") else weight


def work_of(bench: Bench, name: str) -> Workload:
    """The workload, or with --tiny its first requests, cut short."""
    whole = workload(name)
    if not bench.settings.tiny:
        return whole
    return Workload(name, [prompt[:40] for prompt in whole.prompts[:3]], [3] * 3)


def load(bench: Bench, directory: Path, **options: Any) -> LLM:
    """The engine on that checkpoint."""
    longest = gpt2_config(bench)["n_positions"]
    blocks = {"num_blocks": 64} if bench.settings.tiny else {"kv_cache_memory": "8GiB"}
    defaults: dict[str, Any] = {"device": bench.device, "attention_backend": bench.settings.backend, **blocks}
    return LLM(str(directory), max_model_len=longest, **(defaults | {"max_num_batched_tokens": 8192} | options))


def engine(bench: Bench) -> None:
    """Stage: the seed's 64 requests of 856 and 16 tokens, one prompt each and one for all."""
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        write_gpt2(bench, directory)
        kinds: dict[str, Callable[[], LLM]] = {
            "paged": lambda: load(bench, directory),
            "paged, reproducible": lambda: load(bench, directory, reproducible=True),
            "gathered": lambda: load(bench, directory, attention_backend="gather"),
            "gathered, one by one": lambda: load(bench, directory, attention_backend="gather", max_num_seqs=1),
        }
        for who, make in kinds.items():
            try:
                _engine(bench, who, make())
            except Exception as error:  # the others still run
                bench.failed("rose", who, error)
            bench.forget()


def _engine(bench: Bench, who: str, llm: LLM) -> None:
    rose, shared = work_of(bench, "rose"), work_of(bench, "rose_shared")
    if "one by one" in who:  # slow, so some of them, once, after one that warms it up
        some = Workload(shared.name, shared.prompts[:ONE_BY_ONE], shared.new_tokens[:ONE_BY_ONE])
        measure(llm, Workload("first", shared.prompts[:1], shared.new_tokens[:1]), warmup=0, runs=1)
        _report(bench, shared.name, who, some, measure(llm, some, warmup=0, runs=1).median)
        return
    runs = 1 if bench.settings.tiny else 3
    for work in (rose, shared):
        _report(bench, work.name, who, work, measure(llm, work, warmup=1, runs=runs).median)
    arrive_in_turn(llm, shared)
    seconds = statistics.median(bench.seconds_of(lambda: arrive_in_turn(llm, shared)) for _ in range(runs))
    _report(bench, shared.name, f"{who}, online", shared, seconds)


def _report(bench: Bench, case: str, who: str, work: Workload, seconds: float) -> None:
    total = work.num_prompt_tokens + work.num_new_tokens
    new = work.num_new_tokens / seconds
    bench.row(case, who, us=1e6 * seconds, value=total / seconds, unit="tok/s", new_tokens_per_second=new)


def arrive_in_turn(llm: LLM, work: Workload) -> None:
    """One request comes with each step, as the seed's online scheduler has it."""
    llm.reset_prefix_cache()
    waiting = list(zip(work.prompts, work.new_tokens, strict=True))
    for i, (prompt, count) in enumerate(waiting):
        llm.engine.add(Request(f"online-{i}", array("i", prompt), len(prompt), greedy(count)))
        llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()


def transformers_batching(bench: Bench) -> None:
    """Stage: transformers' continuous batching on the same checkpoint and workload."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with TemporaryDirectory() as folder:
        write_gpt2(bench, Path(folder))
        work = work_of(bench, "rose")
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=gpt2_config(bench)["dtype"]
        )
        model = model.to(bench.device).eval()
        config = GenerationConfig(
            max_new_tokens=work.new_tokens[0], do_sample=False, eos_token_id=-1, pad_token_id=1, bos_token_id=0
        )
        for attention in ("sdpa", "paged|sdpa", "paged|eager"):  # the first two are the same, by release
            try:
                model.set_attn_implementation(attention)
                seconds = _transformers(bench, model, config, work)
            except Exception as error:  # others' code fails in all sorts of ways
                bench.failed("rose", f"transformers, {attention}", error)
                continue
            _report(bench, "rose", f"transformers, {attention}", work, seconds)
            break


def _transformers(bench: Bench, model: Any, config: Any, work: Workload) -> float:
    """Seconds of the fastest run after one that warms it up; the prompts are others each time, so none is cached."""
    from transformers import ContinuousBatchingConfig

    tiny = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    sizes = {"continuous_batching_config": tiny} if bench.settings.tiny else {}  # else it takes the whole memory
    seconds: list[float] = []
    try:
        for run in range(2 if bench.settings.tiny else 4):
            prompts = work.shifted(7 * run).prompts
            if len(seconds) > 1 and bench.seconds_left < 2 * seconds[-1]:
                break
            start = time.perf_counter()
            outs = model.generate_batch(
                inputs=prompts, generation_config=config, progress_bar=False, persistent_manager=True, **sizes
            )
            bench.synchronize()
            seconds.append(time.perf_counter() - start)
            new = sum(len(out.generated_tokens) for out in outs.values())
            if new != work.num_new_tokens:
                raise QuireError(f"{new} new tokens; expected {work.num_new_tokens}")
    finally:
        model.destroy_cached_continuous_batching_manager()
    return min(seconds[1:])


# ---------------------------------------------------------------------------------------------- decode steps


SERVED = (("gpt2, batch 64", 64, 900), ("8B, batch 32", 32, 2048), ("8B, batch 1", 1, 2048))  # sequences, tokens


def steps(bench: Bench, served: Sequence[tuple[str, int, int]] = SERVED) -> None:
    """Stage: a step of decoding as it is served, against the time to read the weights and the KV once."""
    tiny = bench.settings.tiny
    small = gpt2.decoder_config(gpt2_config(bench))
    few = (llama_layer(num_heads=4, num_kv_heads=2, head_dim=16, inner=96),) * 2
    large = replace(EIGHT_B, vocab_size=256, hidden_size=64, layers=few) if tiny else EIGHT_B
    bandwidth = copy(bench).work / race(bench, "memory", {"copy": copy(bench)})["copy"]
    for reproducible in (False, True):
        for name, batch, context in served:
            config = small if name.startswith("gpt2") else large
            size = (2, 40) if tiny else (batch, context)
            try:
                _steps(bench, name, config, *size, bandwidth, reproducible=reproducible)
            except Exception as error:  # the next shape may work
                bench.failed(name, "step, reproducible" if reproducible else "step", error)
            bench.forget()


def _steps(
    bench: Bench,
    name: str,
    config: DecoderConfig,
    batch: int,
    context: int,
    bandwidth: float,  # bytes a second
    *,
    reproducible: bool,
) -> None:
    steps = 3 if bench.settings.tiny else STEPS_TIMED
    count = steps + 12  # tokens of each sequence: some are drawn while others' prompts are computed
    dtype = torch.float32 if bench.settings.tiny else torch.bfloat16
    model = random_model(bench, config, dtype, reproducible)
    per_token = bytes_per_block(config.groups, 1, dtype)
    weight_bytes = sum(
        math.prod(shape) * (4 if "norm." in key else dtype.itemsize)
        for key, shape in weight_shapes(config).items()
        if key != "positions" and (config.tied_embeddings or key != "embedding")  # of these a step reads some rows
    )
    options = engine_config(
        device=bench.device,
        attention_backend=bench.settings.backend,
        max_num_seqs=batch,
        max_num_batched_tokens=16384,
        num_blocks=batch * (-(-(context + count + 2) // 16) + 1),
        enable_prefix_caching=False,
        reproducible=reproducible,
    )
    engine = build_engine(model, bench.backend, options)
    params = greedy(count)
    for i in range(batch):
        prompt = array("i", [(17 * i + 31 * j) % config.vocab_size for j in range(context)])
        engine.add(Request(f"{i}", prompt, context, params))
    while any(request.cache.num_computed < request.num_prompt for request in engine.scheduler.requests.values()):
        engine.step()
    for _ in range(2):
        engine.step()
    took = bench.seconds_of(lambda: [engine.step() for _ in range(steps)]) / steps
    if len(engine.scheduler.requests) != batch:
        raise QuireError(f"{len(engine.scheduler.requests)} sequences decoded in the last step, not {batch}")
    floor = (weight_bytes + batch * (context + count // 2) * per_token) / bandwidth
    figures = {"us": 1e6 * took, "value": took / floor, "unit": "x floor", "floor_us": 1e6 * floor}
    who = "step, reproducible" if reproducible else "step"
    bench.row(name, who, **figures, steps=steps, runner=type(engine.runner).__name__)


def random_model(bench: Bench, config: DecoderConfig, dtype: torch.dtype, reproducible: bool) -> Decoder:
    """A decoder whose weights are made on the device."""
    weights = {
        name: _random_weight(name, shape, bench.device, torch.float32 if "norm." in name else dtype)
        for name, shape in weight_shapes(config).items()
    }
    return Decoder(config, weights, bench.backend, config.max_position_embeddings, reproducible=reproducible)
