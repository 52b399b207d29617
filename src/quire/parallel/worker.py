"""Ranks other than the first: they load their shard of a model, and follow rank 0."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

import torch

from quire import ops
from quire.cache.sizing import free_memory
from quire.config import EngineConfig
from quire.engine.engine import captured, make_runner, uses_graphs
from quire.engine.plan_codec import Pools, unpack
from quire.engine.ranks import FollowingRunner
from quire.errors import QuireError
from quire.fingerprint.components import model_parts
from quire.models import find_files, load_model
from quire.models.files import Files
from quire.models.model import Model
from quire.ops import Backend, native
from quire.ops.collectives import Communicator, least
from quire.parallel import launch
from quire.parallel.group import LOAD_WITHIN, ProcessGroup, join_started


def follow(group: ProcessGroup, files: Files, config: EngineConfig, backend: Backend) -> None:
    """Run as a rank of the group until rank 0 ends it.

    Raises GroupLost if another rank dies or hangs, ConfigError if the ranks disagree, and the exceptions of
    `load_model`.
    """
    with suppress(ValueError):  # not in the main thread
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 handles these, and ends the others when it has ended
            signal.signal(number, signal.SIG_IGN)
    config = group.placed(config)
    try:
        runner = follower(files, config, backend, group.exchange)
        agree_on_model(group, runner.model, files, config, backend)
        runner.follow()
    except BaseException as error:
        group.fail(error)
        raise
    group.close()


def agree_on_model(group: ProcessGroup, model: Model, files: Files, config: EngineConfig, backend: Backend) -> None:
    """Raise ConfigError unless all ranks have loaded shards of the same model that give the same bits."""
    parts = model_parts(model, files, backend, config)
    parts.pop("cache groups", None)  # among them those of a draft head, which rank 0 has alone
    group.agree("fingerprint", parts, LOAD_WITHIN)


def follower(files: Files, config: EngineConfig, backend: Backend, exchange: Communicator) -> FollowingRunner:
    """Create the runner of a rank, with its shard of the model and of the cache."""
    model = load_model(files, config, backend, exchange)
    if config.device != "cpu":
        torch.cuda.empty_cache()  # temporaries of loading
    if (free := free_memory(config.device)) is not None:
        least(exchange, free // exchange.size_here)  # for rank 0, which chooses the size of the cache
    pools: Pools = unpack(exchange.receive())
    runner = make_runner(FollowingRunner, model, backend, config, pools)
    if uses_graphs(model, backend, config):
        runner.graphs = captured(runner, model, config)
    return runner


def main() -> None:
    """Run a process that rank 0 has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to rank 0, too
    given = launch.given()
    config = given.config
    torch.set_num_threads(given.threads)
    try:
        with native.using(given.isa):
            backend = ops.load(config.attention_backend, config.device)
            group = join_started(given, backend)
            follow(group, find_files(config), config, backend)
    except QuireError:  # rank 0 reports it
        sys.exit(1)


if __name__ == "__main__":
    main()
