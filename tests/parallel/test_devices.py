"""Which GPU each rank has. No GPU is needed."""

from __future__ import annotations

import pytest
import torch

from quire.config import EngineConfig, engine_config
from quire.engine import engine
from quire.errors import ConfigError, Unsupported
from quire.frontend.llm import LLM
from quire.models import EMBEDDED, check_parallel
from quire.ops import load
from quire.parallel import devices


def config(device: str, size: int = 2) -> EngineConfig:
    return engine_config(device=device, tensor_parallel_size=size)


@pytest.mark.parametrize(("count", "has"), [(0, "no GPUs"), (1, "1 GPU;")])
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, count: int, has: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is 2, and this machine has {has}"):
        devices.check_count(config("cuda"))
    devices.check_count(config("cuda:0"))  # all on that one, as asked for
    devices.check_count(config("cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices.check_count(config("cuda"))


def test_each_rank_of_a_host_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [devices.device_of("cuda", index) for index in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert devices.device_of("cuda:1", 3) == "cuda:1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of those that the launcher shows to each process
    assert devices.device_of("cuda", 3) == "cuda:0"


def test_ranks_share_a_gpu_only_if_the_config_names_it() -> None:
    assert devices.have_own(config("cuda"), ["a", "b"])
    assert not devices.have_own(config("cuda:0"), ["a", "a"])
    with pytest.raises(ConfigError, match="ranks 1 and 2 of the tensor-parallel group have the same GPU, b; each"):
        devices.have_own(config("cuda", 4), ["a", "b", "b", "c"])


def test_a_machine_without_gpus_refuses() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Unsupported, match="device is 'cuda'; this machine has no CUDA devices"):
        LLM(device="cuda", tensor_parallel_size=2)


def test_the_backend_is_that_of_the_device() -> None:
    for device, name in (("cuda", "reference"), ("cpu", "reference")):
        with pytest.raises(ConfigError, match="and attention_backend is 'reference'; several processes compute"):
            check_parallel(EMBEDDED, config(device), load(name))


def test_a_group_captures_graphs_only_if_it_is_asked_and_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        exchange: object = None

    class Exchange:
        device: object = None

    monkeypatch.setattr(engine, "is_queued", lambda *_: True)
    model, backend = Model(), load("reference")

    def uses(enforce_eager: bool | None) -> bool:
        return engine.uses_graphs(model, backend, engine_config(enforce_eager=enforce_eager))  # type: ignore[arg-type]

    assert [uses(eager) for eager in (None, False, True)] == [True, True, False]
    model.exchange = Exchange()
    assert [uses(eager) for eager in (None, True)] == [False, False]
    with pytest.raises(ConfigError, match="enforce_eager is False; ranks that share a GPU exchange numbers through"):
        uses(False)
    model.exchange.device = torch.device("cuda:0")
    assert [uses(eager) for eager in (None, False, True)] == [False, True, False]
