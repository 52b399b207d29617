"""A rank of a group that a launcher has started: python -m tests.parallel.group_rank [WHAT]. Rank 0 prints an answer.

apart: the ranks cannot open the same memory, as on several hosts. device: they exchange as GPUs do, whose library is
gloo's twin of NCCL here. load, step: rank 1 fails there. weights: it has
others than rank 0. Rank 0 ends once there is a file at $UNTIL, if that is set: the ranks meet in it, and a fork ends
faster than others can read why.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.ranks import FollowingRunner
from quire.errors import ModelError
from quire.parallel import group, worker

_mapped = group.mapped


def _apart(descriptor: int, size: int) -> torch.Tensor:
    if os.environ["RANK"] == "0":
        return _mapped(descriptor, size)
    os.close(descriptor)
    raise FileNotFoundError


def _as_gpus_do() -> None:
    group.devices.identity = lambda device: f"{device} of rank {os.environ['RANK']}"
    torch.cuda.set_device = lambda device: None
    group.DeviceCommunicator = partial(group.DeviceCommunicator, kind="gloo")  # type: ignore[misc]
    exchange = group.ProcessGroup._device_exchange
    group.ProcessGroup._host_exchange = lambda self, _, here: exchange(self, EngineConfig(), here)  # type: ignore


def _fail(*_: object) -> NoReturn:
    raise ModelError("this rank is broken")


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "apart":
        group.mapped = _apart
    if what == "device":
        _as_gpus_do()
    if what == "load" and os.environ["RANK"] == "1":
        worker.follower = _fail
    if what == "weights" and os.environ["RANK"] == "1":
        worker.model_parts = lambda *_: {"weights": "others"}
    if what == "step" and os.environ["RANK"] == "1":
        FollowingRunner.compute = _fail  # type: ignore[assignment]
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    with LLM(tensor_parallel_size=2, num_blocks=100, **options) as llm:
        assert llm.group is not None
        exchange = type(llm.group.exchange).__name__
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
        [found] = llm.generate([[7 * i % 97 for i in range(40)]], params, use_tqdm=False)
        print(json.dumps([exchange, list(found.outputs[0].token_ids), found.outputs[0].cumulative_logprob]))


if __name__ == "__main__":
    try:
        main()
    finally:
        while os.environ["RANK"] == "0" and "UNTIL" in os.environ and not Path(os.environ["UNTIL"]).exists():
            time.sleep(0.01)
