"""The command line: `quire generate`, `quire bench`, `quire info`.

Everything heavy is imported inside the commands, so that `quire --help` answers at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from quire import __version__
from quire.bench.workloads import WORKLOADS
from quire.errors import QuireError
from quire.progress import progress_bar

if TYPE_CHECKING:
    from quire import LLM, SamplingParams
    from quire.config import EngineConfig
    from quire.text import RequestOutput

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Paged attention for Python: serve language models.")

ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_bf16", "asimd", "bf16")


Model = Annotated[str | None, typer.Option(help="Directory or hub name. Default: the embedded model.")]
Backend = Annotated[str, typer.Option("--attention-backend", "--attention", help="auto or a name from `quire info`.")]
Device = Annotated[str, typer.Option(help="cpu, or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence in tokens.")]
BlockSize = Annotated[int, typer.Option(help="Tokens a KV block.")]
NumBlocks = Annotated[int | None, typer.Option(help="KV blocks; overrides --kv-cache-memory.")]
CacheMemory = Annotated[str, typer.Option(help="Bytes (2GiB) or a share of the free memory (50%).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue; - reads one from stdin.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A file whose text is a prompt; may be repeated.")] = None,
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token each time.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Of the engine; the same seed gives the same text.")] = 0,
    attention_backend: Backend = "auto",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_memory: CacheMemory = "50%",
    as_json: AsJson = False,
) -> None:
    """Continue one or several texts. The text is printed as it comes, prompt after prompt."""
    from quire import LLM, SamplingParams

    try:
        texts = _read_prompts(prompts or [], file or [])
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            seed=seed,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
        )
        outputs = _print_json(llm, texts, params) if as_json else _print_text(llm, texts, params)
    except QuireError as error:
        _fail(error)
    for output in outputs:
        if output.outputs[0].error is not None:
            _fail(output.outputs[0].error)


def _read_prompts(prompts: list[str], files: list[Path]) -> list[str]:
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    for path in files:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            _fail(f"{path} cannot be read as text: {error}")
    if not texts and not sys.stdin.isatty():
        texts = [sys.stdin.read()]
    if not any(texts):
        _fail('no prompt; give one, as in: quire generate "def fibonacci("')
    return texts


def _print_json(llm: LLM, texts: list[str], params: SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate(texts, params)
    for output in outputs:
        sample = output.outputs[0]
        record: dict[str, Any] = {
            "prompt": output.prompt,
            "text": sample.text,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "seed": sample.seed,
        }
        print(json.dumps(record))
    return outputs


def _print_text(llm: LLM, texts: list[str], params: SamplingParams) -> list[RequestOutput]:
    """Print the prompts' texts in their order, each as it grows; later ones wait until those before have ended."""
    if llm.tokenizer is None:
        raise QuireError("this model has no tokenizer, so it cannot continue a text; use quire.LLM with token ids")
    outputs: dict[str, RequestOutput] = {}
    current, shown = 0, 0  # the prompt that is being printed, and how much of its text is
    _write(texts[0])
    for output in llm.stream(texts, params):
        outputs[output.request_id] = output
        while (now := outputs.get(str(current))) is not None:
            _write(now.outputs[0].text[shown:])
            shown = len(now.outputs[0].text)
            if not now.finished:
                break
            current, shown = current + 1, 0
            _write("\n" if current == len(texts) else f"\n\n{texts[current]}")
    return list(outputs.values())


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


bench = typer.Typer(no_args_is_help=True, help="Measure speed, start-up and memory on this machine.")
app.add_typer(bench, name="bench")


@bench.command()
def throughput(
    workloads: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(WORKLOADS)}.")] = None,
    model: Model = None,
    attention_backend: Backend = "auto",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at the same time.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Query tokens a step.")] = 2048,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_memory: CacheMemory = "50%",
    warmup: Annotated[int, typer.Option(min=0, help="Runs before those that count.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Runs that count; their median is told.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Tokens a second of whole workloads, greedily, without stopping early. Default: decode."""
    from quire import LLM
    from quire.bench.throughput import measure
    from quire.bench.workloads import workload

    try:
        chosen = [workload(name) for name in workloads or ["decode"]]
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
        )
        for work in chosen:
            with progress_bar(work.name, work.num_new_tokens * (warmup + runs)) as advance:
                figures = measure(llm, work, warmup, runs, advance).as_dict()
            if as_json:
                print(json.dumps(figures))
            else:
                new, total = figures["new_tokens_per_second"], figures["total_tokens_per_second"]
                told = f"{new:10.1f} new tok/s {total:10.1f} total tok/s {figures['most_blocks'] or '?':>7} blocks"
                print(f"{work.name:12s} {figures['median_seconds']:9.2f} s {told}", flush=True)
    except QuireError as error:
        _fail(error)


@bench.command()
def attention(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            help="peers, groups, dims, blocks, scatter, contexts, batches, long, dtypes, or all. Default: peers."
        ),
    ] = None,
    attention_backend: Backend = "auto",
    isa: Annotated[str | None, typer.Option(help="Of the native kernels, as in avx2. Default: the best here.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Calls that count; their median is told.")] = 9,
    sdpa_runs: Annotated[int, typer.Option(min=0, help="Calls of torch's attention to compare with.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Draw the shares of the ceilings into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attention alone: GB/s of KV or GFLOP/s, and the share of what the machine reads or multiplies meanwhile."""
    from quire import ops
    from quire.bench import attention as bench_attention

    try:
        shapes = bench_attention.chosen(sets or ["peers"])
        figures = []
        with bench_attention.instruction_set(isa) as name:
            backend = ops.load(attention_backend)
            for shape in shapes:
                figure = bench_attention.measure(backend, shape, runs, sdpa_runs)
                figures.append(figure)
                if as_json:
                    print(json.dumps({"backend": backend.NAME, "isa": name} | figure.as_dict()), flush=True)
                else:
                    unit = "GB/s" if shape.query_len == 1 else "GFLOP/s"
                    told = "" if figure.speedup is None else f"{figure.speedup:7.1f} x torch SDPA"
                    print(f"{shape.name:52s} {figure.rate:7.1f} {unit:7s} {figure.fraction:5.0%}{told}", flush=True)
            beside = bench_attention.overhead(backend)
        if as_json:
            print(json.dumps({"backend": backend.NAME, "isa": name, "name": "smallest call", "seconds": beside}))
        else:
            _row("kernels", f"{backend.NAME}, {name}")
            _row("smallest call", f"{1e6 * beside:.1f} us on one thread")
        if plot is not None:
            bench_attention.plot(figures, plot)
    except QuireError as error:
        _fail(error)


@bench.command()
def startup(
    model: Model = None,
    runs: Annotated[int, typer.Option(min=1, help="Fresh processes; their median is told.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Seconds from the start of a process to the first token, with a warm page cache."""
    from quire.bench.startup import measure, median

    try:
        figures = measure(model, runs)
    except subprocess.CalledProcessError as error:
        _fail(error.stderr.strip().splitlines()[-1])
    for name, seconds in figures.items():
        if as_json:
            print(json.dumps({"what": name, "seconds": seconds, "median_seconds": median(seconds)}))
        else:
            print(f"{name:36s} {median(seconds):6.2f} s   ({seconds[0]:.2f} to {seconds[-1]:.2f})")


@bench.command()
def memory(
    model: Model = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences side by side.")] = 32,
    mean_length: Annotated[int, typer.Option(min=2, help="Mean of their final lengths, in tokens.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each of them generates.")] = 32,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    as_json: AsJson = False,
) -> None:
    """KV slots that are reserved, used and wasted over a run."""
    from quire import LLM
    from quire.bench.memory import measure
    from quire.bench.memory import sequences as workload

    try:
        llm = LLM(model, block_size=block_size, num_blocks=num_blocks, max_num_seqs=sequences)
        figures = measure(llm, workload(sequences, mean_length, new_tokens)).as_dict()
    except QuireError as error:
        _fail(error)
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        _row(name.replace("_", " "), f"{value:.2%}" if name == "waste" else f"{value:,.0f}")


@app.command()
def info() -> None:
    """Show the version, the CPU's features, the backends, and the memory for the cache."""
    import platform

    import torch

    from quire import ops
    from quire.cache.storage import free_memory
    from quire.config import EngineConfig
    from quire.ops.cpu import native

    config = EngineConfig()
    free = free_memory()
    _row("quire", f"{__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    _row("CPU", f"{torch.get_num_threads()} threads, {', '.join(_cpu_features()) or 'no vector extension known'}")
    if native.unavailable() is None:
        _row("native kernels", f"{native.default().isa}, of {', '.join(native.runnable(native.library_path()))}")
    _row("CUDA", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    for name in ops.BACKENDS:
        reason = ops.unavailable(name, "cpu")
        _row(f"backend {name}", "available" if reason is None else f"not available: {reason}")
    _row("backend auto", ops.load("auto").NAME)
    _row("free memory", "unknown" if free is None else f"{free / 2**30:.1f} GiB")
    _row("KV cache", _cache_size(config, free))


def _cache_size(config: EngineConfig, free: int | None) -> str:
    """What the KV cache of the embedded model would be with these options."""
    from quire.cache.storage import bytes_per_block, choose_num_blocks
    from quire.models import EMBEDDED, read_config

    cache = config.cache
    model, dtype = read_config(EMBEDDED)
    block_bytes = bytes_per_block(model.groups, cache.block_size, model.num_kv_heads, model.head_dim, dtype)
    try:
        blocks = choose_num_blocks(cache, block_bytes, model.max_position_embeddings, config.max_num_seqs, free)
    except QuireError as error:
        return str(error)
    return (
        f"at most {cache.kv_cache_memory:.0%} of the free memory by default; for the embedded model {blocks} blocks of "
        f"{cache.block_size} tokens, {block_bytes / 2**10:.0f} KiB each, {blocks * block_bytes / 2**20:.0f} MiB in all"
    )


def _row(name: str, value: str) -> None:
    print(f"{name:18s} {value}")


def _cpu_features() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return [flag for flag in ISA_FLAGS if flag in flags]


def _fail(reason: object) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    """Entry point of the `quire` command."""
    app()
