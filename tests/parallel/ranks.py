"""A model computed by several ranks, which are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from quire.config import engine_config
from quire.engine.engine import Engine, build_engine
from quire.engine.ranks import end
from quire.frontend.draft_model import find_draft_model, load_draft_model
from quire.models import load_model
from quire.models.files import files_of
from quire.ops import load
from quire.parallel.worker import follower

T = TypeVar("T")


def on_ranks(directory: Path, size: int, use: Callable[[Engine], T], **options: Any) -> T:
    """What `use` makes of the engine of rank 0; of one rank, of that of the whole model."""
    config = engine_config(**({"num_blocks": 64, "num_speculative_tokens": 0} | options))
    backend = load("cpu")
    draft = load_draft_model(find_draft_model(config, files_of(directory), None, backend), config, backend)
    if size == 1:
        return use(build_engine(load_model(directory, config, backend), backend, config, draft))
    memory = torch.zeros(backend.exchange_bytes(size), dtype=torch.uint8)
    exchanges = [backend.exchange(memory, rank, size) for rank in range(size)]
    errors: list[BaseException] = []

    def other(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            follower(files_of(directory), config, backend, exchanges[rank]).follow()
        except BaseException as error:
            errors.append(error)
            exchanges[rank].lose(rank)

    threads = [threading.Thread(target=other, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    try:
        engine = build_engine(load_model(directory, config, backend, exchanges[0]), backend, config, draft)
        found = use(engine)
        end(exchanges[0])
    except BaseException:
        exchanges[0].lose(0)
        raise
    finally:
        for thread in threads:
            thread.join(30)
    assert not errors, errors
    return found
