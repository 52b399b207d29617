"""quire info: the features of this machine, or the needs of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire import __version__
from quire.cli.options import complete_model, field_option, row
from quire.config import EngineConfig
from quire.errors import QuireError

ISA_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_bf16"),
    *("asimd", "asimddp", "bf16", "i8mm"),
)


def info(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Directory, GGUF file or hub name of a model: show its implementation and its memory, or why it "
            "cannot be served. Weights are not downloaded, except in a GGUF file.",
            autocompletion=complete_model,
        ),
    ] = None,
    gguf_file: Annotated[str | None, field_option(EngineConfig, "gguf_file")] = None,
) -> None:
    """Show the version, the CPU's features, the backends, and the memory for the cache."""
    if model is None:
        _show_machine()
        return
    show(model, gguf_file)


def show(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As in --model of info.", autocompletion=complete_model)
    ],
    gguf_file: Annotated[str | None, field_option(EngineConfig, "gguf_file")] = None,
) -> None:
    """Show the implementation, the memory and the expected speed of a model: the same as quire info --model MODEL."""
    import math

    from quire.cache.sizing import free_memory
    from quire.engine.cost import measured_read_rate, model_cost
    from quire.models import Own, choose, expected_weight_bytes
    from quire.models.decoder_config import weight_shapes
    from quire.models.files import files_of
    from quire.models.hub import locate_description

    files = files_of(locate_description(model, gguf_file))
    choice = choose(files)
    row(model, str(choice))
    dtype = choice.dtype
    paths = files.weight_files(choice.part)
    size = sum(path.stat().st_size for path in paths) if all(path.exists() for path in paths) else 0
    scheme = "not quantised" if choice.scheme is None else choice.scheme.description
    if not isinstance(choice, Own):
        row("weights", scheme if size == 0 else f"{scheme}, {memory_of(size)}")
        row("KV cache", f"{str(dtype).removeprefix('torch.')}, {8 * dtype.itemsize} bits a number")
        return
    config = choice.config
    expected = expected_weight_bytes(files)
    cost = model_cost(config, dtype, expected)
    row("parameters", _count(sum(math.prod(shape) for shape in weight_shapes(config).values())))
    row("weights", f"{scheme}, {memory_of(size or expected.total)}{'' if size else '; they are not here yet'}")
    if not config.causal:
        row("KV cache", "none; a text is computed in one step")
        row("longest", f"{cost.max_model_len:,} tokens")
        return
    row(
        "KV cache",
        f"{str(dtype).removeprefix('torch.')}, {8 * dtype.itemsize} bits a number, {cost.sequence_bytes(1):,} bytes a "
        "token",
    )
    longest = cost.max_model_len
    sequence = cost.sequence_bytes(longest)
    row("longest", f"{longest:,} tokens, whose cache takes {memory_of(sequence)}")
    free = free_memory()
    here = "" if free is None else f"; {memory_of(free)} are free here"
    row("memory", f"{memory_of(expected.total + sequence)} with one such sequence{here}")
    rate, read = measured_read_rate(), cost.weight_bytes(1)
    row(
        "speed",
        f"about {cost.decode_rate(rate):,.0f} tokens a second for one request on this CPU, an estimate: "
        f"{memory_of(read)} of weights are read for each, at {rate / 1e9:,.0f} GB/s as just measured",
    )


def memory_of(size: float) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number < 1e9 else f"{number / 1e9:,.2f} billion"


def _show_machine() -> None:
    import platform

    import torch

    from quire import ops
    from quire.cache.sizing import free_memory
    from quire.ops import native

    config = EngineConfig()
    free = free_memory()
    row("quire", f"{__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    row("CPU", f"{torch.get_num_threads()} threads, {', '.join(_cpu_features()) or 'no vector extension known'}")
    if native.unavailable() is None:
        path = native.library_path()
        has, runs = (", ".join(sets) for sets in (native.built(path), native.runnable(path)))
        row("native kernels", f"{native.default().isa}; the library has {has}, of which this machine runs {runs}")
        if "avx2" in native.runnable(path) and (reason := native.amx_refusal()):
            row("AMX", f"not used: {reason}")
        row("prefetch", str(native.default().fetching))
    row("CUDA", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    for name in ops.BACKENDS:
        reason = ops.unavailable(name, "cpu")
        row(f"backend {name}", "available" if reason is None else f"not available: {reason}")
    row("backend auto", ops.load("auto").name)
    row("free memory", "unknown" if free is None else f"{free / 2**30:.1f} GiB")
    row("KV cache", _cache_size(config, free))


def _cache_size(config: EngineConfig, free: int | None) -> str:
    """Describe the size of the embedded model's KV cache with these options."""
    from quire.cache.sizing import choose_num_blocks
    from quire.cache.storage import bytes_per_block, cache_dtype
    from quire.models import EMBEDDED, read_config

    cache = config.cache
    model, dtype = read_config(EMBEDDED)
    kv_dtype = cache_dtype(cache, dtype)
    block_bytes = bytes_per_block(model.groups, cache.block_size, kv_dtype)
    try:
        blocks = choose_num_blocks(cache, block_bytes, model.max_position_embeddings, config.max_num_seqs, free)
    except QuireError as error:
        return str(error)
    of = str(kv_dtype).removeprefix("torch.")
    return (
        f"at most {cache.kv_cache_memory:.0%} of the free memory by default; for the embedded model {blocks} blocks of "
        f"{cache.block_size} tokens, {block_bytes / 2**10:.0f} KiB each, {blocks * block_bytes / 2**20:.0f} MiB of "
        f"{of} in all"
    )


def _cpu_features() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return [flag for flag in ISA_FLAGS if flag in flags]
