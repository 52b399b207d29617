"""The option kv_disk: stores an engine's blocks in a directory and reads them from it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from quire.cache.disk.directory import make_root, take
from quire.cache.disk.store import FORMAT, DiskStore
from quire.cache.disk.tier import DiskTier
from quire.cache.groups import AnyGroup, CacheGroup, RowGroup, StateGroup
from quire.cache.incoming import Arrivals, BlockMemory
from quire.cache.manager import BlockManager
from quire.cache.scores import ScoredMemory
from quire.config import CacheConfig, EngineConfig, parse_memory
from quire.engine.cost import assumed_prompt_token, cost_of
from quire.engine.engine import Engine
from quire.engine.prefetch import Prefetch
from quire.engine.runner import Runner
from quire.errors import ConfigError
from quire.fingerprint.components import bits_parts
from quire.fingerprint.fingerprint import Fingerprint
from quire.models.files import Files
from quire.models.model import Model
from quire.ops import Backend

DEFAULT_SPACE = "10GiB"


def check_disk(config: EngineConfig, backend: Backend) -> None:
    """Create the directory of the option kv_disk, if the option is set. Called before weights are read.

    Raises ConfigError if blocks cannot be stored there, or not with these options.
    """
    path = config.cache.kv_disk
    if path is None:
        return
    if config.device != "cpu":
        raise ConfigError(
            f"kv_disk is {path!r}; blocks are stored only with the device 'cpu', not with {config.device!r}"
        )
    if not backend.batch_invariant(config.device):
        raise ConfigError(
            f"kv_disk is {path!r} and attention_backend {backend.name!r}, which is not batch-invariant; blocks are "
            f"stored only if computing them again gives the same bits, as with the backend 'cpu'"
        )
    make_root(Path(path))


def attach_disk(engine: Engine, model: Model, files: Files, backend: Backend, config: EngineConfig) -> None:
    """Make an engine store blocks in the directory of its option kv_disk, if the option is set.

    Raises ConfigError if a process already uses the directory, if it is not writable, or if the disk space is too small
    for one block.
    """
    options = config.cache
    if options.kv_disk is None:
        return
    runner = engine.runner
    if not model.rows_are_batch_invariant or not isinstance(runner, Runner):
        raise ConfigError(
            f"kv_disk is {options.kv_disk!r}; parts of this model that transformers computes may not be "
            f"batch-invariant, and blocks are stored only if computing them again gives the same bits"
        )
    root, manager = Path(options.kv_disk), engine.scheduler.manager
    memory = block_memory(runner, manager)
    widths = memory.widths()
    counts = capacities(manager.groups, widths, options)
    parts = bits_parts(model, files, backend, config, manager) | {"format": str(FORMAT)}
    key = Fingerprint(parts).digest
    about = {
        "model": config.model or "embedded",
        "block_size": options.block_size,
        "block_bytes": widths,
        "parts": parts,
    }
    place = take(root, make_root(root), key, about)
    try:
        store = DiskStore(place.path, place.secret, widths, counts)
    except OSError as error:
        os.close(place.lock)
        raise ConfigError(f"kv_disk is {options.kv_disk!r}: {error}; it must be a writable directory") from error
    prefetch = prefetch_of(engine, model, memory)
    manager.disk = tier = DiskTier(store, memory, prefetch.arrivals, release=lambda: os.close(place.lock))
    prefetch.sources.append(tier.reader)
    tier.start()
    weakref.finalize(engine, tier.close)


def block_memory(runner: Runner, manager: BlockManager) -> ScoredMemory:
    """Return the memory of an engine's blocks, with the logprobs that are stored with them."""
    return ScoredMemory(runner.cache, runner.cache.widths(), manager.scores)


def prefetch_of(engine: Engine, model: Model, memory: BlockMemory) -> Prefetch:
    """Return the object that reads blocks from other places into the engine's memory. Create it at the first call."""
    scheduler = engine.scheduler
    if scheduler.prefetch is None:
        scheduler.manager.memory = memory
        a_token = assumed_prompt_token(cost_of(model))
        scheduler.prefetch = Prefetch(scheduler.manager, Arrivals(), a_token, scheduler.clock)
    return scheduler.prefetch


def capacities(groups: tuple[AnyGroup, ...], widths: list[int], options: CacheConfig) -> list[int]:
    """Return the number of slots of each group within the disk space of the options.

    Each attention group gets the same number, and for the tokens of one snapshot interval there are two states. Rows of
    pieces are not stored. Raises ConfigError if the space is too small for one slot of each.
    """
    asked = DEFAULT_SPACE if options.kv_disk_space is None else options.kv_disk_space
    space = parse_memory(asked, free=None, name="kv_disk_space")
    blocks = max(1, options.state_snapshot_interval // options.block_size)
    kinds = {CacheGroup: blocks, StateGroup: 2, RowGroup: 0}
    shares = [kinds[type(group)] for group in groups]
    unit = sum(share * width for share, width in zip(shares, widths, strict=True))
    least = sum(width for share, width in zip(shares, widths, strict=True) if share)
    if space < least:
        raise ConfigError(f"kv_disk_space is {asked!r}, {space:,} bytes; one block of every kind takes {least:,}")
    return [max(1, space * share // unit) if share else 0 for share in shares]
