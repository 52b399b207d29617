"""The GPU of each rank: the one of its number among the ranks of its host, or the one that the config names for all."""

from __future__ import annotations

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError


def check_count(config: EngineConfig) -> None:
    """Raise ConfigError if ranks of this host would need more GPUs than it has."""
    size, count = config.tensor_parallel_size, torch.cuda.device_count()
    if config.device == "cuda" and size > count:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and this machine has {count or 'no'} GPU{'s' * (count != 1)}; each "
            "process needs its own (with device='cuda:0' all share that one, which is slow and meant for tests)"
        )


def device_of(device: str, index: int) -> str:
    """Return the device of a rank. index: its place among the ranks of its host."""
    return f"cuda:{index % max(1, torch.cuda.device_count())}" if device == "cuda" else device


def identity(device: str) -> str:
    """Return a name of a GPU that no other GPU of any host has."""
    return str(torch.cuda.get_device_properties(device).uuid)


def have_own(config: EngineConfig, names: list[str]) -> bool:
    """Return True if each rank has its own GPU. names: the identities of the ranks' GPUs.

    Raises ConfigError if some share one although the config names none.
    """
    shared = [rank for rank, name in enumerate(names) if names.index(name) < rank]
    if shared and config.device == "cuda":
        rank = shared[0]
        raise ConfigError(
            f"ranks {names.index(names[rank])} and {rank} of the tensor-parallel group have the same GPU, "
            f"{names[rank]}; each needs its own: start as many processes on a host as it has GPUs"
        )
    return not shared
