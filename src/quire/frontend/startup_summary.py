"""Startup summary: the settings chosen for a loaded model, and why. Commands print it at their start."""

from __future__ import annotations

import torch

from quire.cache.groups import CacheGroup
from quire.cache.storage import bytes_of_states, bytes_per_block, cache_dtype
from quire.frontend.llm import LLM
from quire.ops.collectives import DeviceCommunicator, TorchCommunicator


def chosen(llm: LLM) -> dict[str, str]:
    """Return a description of each setting that was chosen, by its name."""
    return {
        "decoder": llm.decoder.origin,
        "backend": _backend(llm),
        "threads": _threads(llm),
        "dtype": _dtype(llm),
        "weights": f"{llm.decoder.weight_bytes.total / 2**20:,.0f} MiB, {llm.decoder.quantisation or 'not quantised'}",
        "cache": _cache(llm),
        "longest": _longest(llm),
    } | ({} if llm.decoder.config.has_head else {"vectors": str(llm.decoder.pooler.config)})


def _backend(llm: LLM) -> str:
    config, backend = llm.config, llm.backend
    isa = "" if backend.instruction_set is None else f", {backend.instruction_set} kernels"
    why = "the fastest that runs here" if config.attention_backend == "auto" else "as asked for"
    return f"{backend.name} on {config.device}{isa} ({why})"


def _threads(llm: LLM) -> str:
    if llm.group is None:
        return str(torch.get_num_threads())
    exchange = llm.group.exchange
    way = "gloo" if isinstance(exchange, TorchCommunicator) else "shared memory"
    if isinstance(exchange, DeviceCommunicator) and exchange.device is not None:
        way = "NCCL"
    return f"{torch.get_num_threads()} in each of {llm.group.size} processes, which exchange numbers through {way}"


def _dtype(llm: LLM) -> str:
    why = "the checkpoint's" if llm.config.dtype == "auto" else "as asked for"
    return f"{str(llm.decoder.dtype).removeprefix('torch.')} ({why})"


def _cache(llm: LLM) -> str:
    decoder, config, manager = llm.decoder, llm.config, llm.engine.scheduler.manager
    groups, dtype = manager.groups, cache_dtype(config.cache, decoder.dtype)
    size = bytes_per_block(groups, manager.block_size, dtype)
    growth = config.most_tokens
    attention = [group for group in groups if isinstance(group, CacheGroup)]
    a_sequence = max((group.most(decoder.max_model_len, growth, manager.block_size) for group in attention), default=0)
    if not decoder.config.causal:
        why = "for one layer and one step: an encoder keeps no cache"
    elif config.cache.num_blocks is not None:
        why = "as asked for"
    elif manager.num_blocks == a_sequence * config.max_num_seqs:
        who = "one sequence" if config.max_num_seqs == 1 else f"{config.max_num_seqs} sequences"
        why = f"all that {who} could use"
    else:
        why = f"kv_cache_memory={config.cache.kv_cache_memory!r}"
    memory = manager.num_blocks * size / 2**20
    held = "" if dtype == decoder.dtype else f" in {str(dtype).removeprefix('torch.')}"
    blocks = f"{manager.num_blocks:,} blocks of {manager.block_size} tokens{held}, {memory:,.0f} MiB ({why})"
    if manager.num_blocks < a_sequence:
        blocks += (
            f"; too few for {decoder.max_model_len:,} tokens, which take {a_sequence:,}: longer requests are refused"
        )
    if not manager.state_groups:
        return blocks
    pools = manager.state_pools
    state, rows = bytes_of_states(groups, decoder.dtype)
    memory = (pools.states * state + pools.rows * rows) / 2**20
    return f"{blocks}; {pools.states:,} states, {pools.rows:,} pieces in progress, {memory:,.0f} MiB"


def _longest(llm: LLM) -> str:
    why = "the model's own limit" if llm.config.max_model_len is None else "as asked for"
    return f"{llm.engine.scheduler.max_model_len:,} tokens ({why})"
