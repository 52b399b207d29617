"""quire serve: an OpenAI-compatible server."""

from __future__ import annotations

import difflib
import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import (
    Backend,
    BlockSize,
    CacheMemory,
    Device,
    Dtype,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    ModelImpl,
    NumBlocks,
    NumSpeculativeTokens,
    Preemption,
    PrefixCaching,
    Reproducible,
    SchedulingPolicy,
    SwapSpace,
    fail,
)
from quire.errors import ConfigError, QuireError


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Let a YAML file's entries stand for the options that are not given."""
    if path is None:
        return None
    try:
        context.default_map = _options_of(path, {option.name for option in context.command.params if option.name})
    except ConfigError as error:
        fail(error)
    return path


def _options_of(path: Path, known: set[str]) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; it must hold options, as in 'max-num-seqs: 64'")
    options = {str(key).replace("-", "_"): value for key, value in found.items()}
    for name, value in options.items():
        if name not in known - {"_config"}:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0].replace('_', '-')!r}?" if close else "see quire serve --help"
            raise ConfigError(f"{path}: there is no option {name.replace('_', '-')!r}; {hint}")
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {name.replace('_', '-')} is {value!r}; it must be a plain value or a list")
    return options


def serve(
    _config: Annotated[
        Path | None,
        typer.Option("--config", help="YAML: these options by name.", is_eager=True, callback=read_config_file),
    ] = None,
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Serve those only who know one of these; better kept in --config.")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Answer requests whose Host header names this, besides localhost; may be repeated; '*' is any. "
            "Default: localhost only where the host is 127.0.0.1 and there is no key, else any."
        ),
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file, instead of the model's own.")] = None,
    attention_backend: Backend = "auto",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    model_impl: ModelImpl = "auto",
    seed: Annotated[int, typer.Option(help="Of the engine; requests without a seed derive theirs from it.")] = 0,
    reproducible: Reproducible = False,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    scheduling_policy: SchedulingPolicy = "fcfs",
    num_speculative_tokens: NumSpeculativeTokens = None,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_memory: CacheMemory = "50%",
    enable_prefix_caching: PrefixCaching = True,
    preemption: Preemption = "recompute",
    swap_space: SwapSpace = None,
    max_num_queued_reqs: Annotated[int, typer.Option(help="Samples that may wait; more get 429.")] = 1024,
    max_body_size: Annotated[int, typer.Option(help="Bytes of a request's body.")] = 4 * 2**20,
    max_logprobs: Annotated[int, typer.Option(help="Candidates at a position that may be asked for.")] = 20,
    stuck_after: Annotated[
        float | None,
        typer.Option(
            help="Seconds in one step after which /health says 503. Default: 16 times what a step of its size takes by "
            "its cost model, and at least 4."
        ),
    ] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds a request may take. Default: any.")] = None,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for running requests when it is stopped.")] = 30.0,
    enable_log_requests: Annotated[bool, typer.Option("--enable-log-requests", help="Log prompts, too.")] = False,
    vllm_metrics: Annotated[
        bool, typer.Option("--vllm-metrics", help="Call the metrics what vLLM calls them.")
    ] = False,
) -> None:
    """Serve a model over HTTP as OpenAI does, with a window into its KV cache at /inspector."""
    began = time.monotonic()
    try:
        from quire.server.server_config import ServerConfig
        from quire.server.signals import obey_as_first_process

        obey_as_first_process()
        server = ServerConfig(
            host=host,
            port=port,
            served_model_name=tuple(served_model_name or ()),
            api_key=tuple(api_key or ()),
            allowed_hosts=tuple(allowed_hosts or ()),
            chat_template=chat_template,
            max_num_queued_reqs=max_num_queued_reqs,
            max_body_size=max_body_size,
            max_logprobs=max_logprobs,
            stuck_after=stuck_after,
            request_timeout=request_timeout,
            shutdown_timeout=shutdown_timeout,
            enable_log_requests=enable_log_requests,
            vllm_metrics=vllm_metrics,
        )
        engine = {
            "model": model,
            "attention_backend": attention_backend,
            "device": device,
            "dtype": dtype,
            "model_impl": model_impl,
            "seed": seed,
            "reproducible": reproducible,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "scheduling_policy": scheduling_policy,
            "num_speculative_tokens": num_speculative_tokens,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "kv_cache_memory": kv_cache_memory,
            "enable_prefix_caching": enable_prefix_caching,
            "preemption": preemption,
            "swap_space": swap_space,
        }
        from quire.server.run import serve as run  # all that is heavy

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        status = run(engine, server, began, lambda line: print(line, file=sys.stderr, flush=True))
    except QuireError as error:
        fail(error)
    raise typer.Exit(status)
