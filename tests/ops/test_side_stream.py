"""Swapping beside the computation, on streams that run in a random order wherever nothing makes them wait."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.cache.groups import CacheGroup, Heads
from quire.cache.storage import KVCache
from quire.errors import ConfigError
from quire.ops.side_stream import SideStream, Swapper
from tests.marks import quick

GROUPS = (CacheGroup((0, 2, 3), heads=Heads(2, 1, 4)), CacheGroup((1, 4), 8, Heads(4, 2, 8)))


class Event:
    def __init__(self) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        self.done = False

        def mark() -> None:
            self.done = True

        stream.queue.append((None, mark))


class Stream:
    """Does what is queued, in order, some time later."""

    def __init__(self, device: object = None) -> None:
        self.queue: deque[tuple[Event | None, Callable[[], object]]] = deque()

    def wait_event(self, event: Event) -> None:
        self.queue.append((event, lambda: None))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        assert not self.queue


class Device:
    """Two streams, and who is current."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.main = self.current = Stream()
        self.streams = [self.main]
        self.copies = 0

    def new_stream(self, device: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def advance(self, most: int) -> None:
        """Do up to so many things, of any stream that does not wait."""
        for _ in range(most):
            ready = [s for s in self.streams if s.queue and (s.queue[0][0] is None or s.queue[0][0].done)]
            if not ready:
                return
            self.rng.choice(ready).queue.popleft()[1]()

    def finish(self) -> None:
        self.advance(10**9)
        assert not any(stream.queue for stream in self.streams), "streams wait for each other"


def deferred(device: Device) -> Swapper:
    """Queues copies on the current stream, one for each block."""

    def swapper(src: Sequence[int], dst: Sequence[int], _: torch.device) -> Callable[[Tensor, Tensor], None]:
        def swap(source: Tensor, target: Tensor) -> None:
            for a, b in zip(src, dst, strict=True):
                device.copies += 1
                device.current.queue.append((None, partial(target[b].copy_, source[a])))

        return swap

    return swapper


class Runtime:
    """Pins as many pieces of memory as it is told to."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.registered) == self.most:
            return 2
        self.registered.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device(request.param)
    monkeypatch.setattr(torch.cuda, "Stream", simulated.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: simulated.current)
    monkeypatch.setattr(torch.cuda, "stream", simulated.stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return simulated


def filled_cache() -> KVCache:
    cache = KVCache(GROUPS, 12, 2, torch.float32, num_host_blocks=9)
    for by_layer in (*cache._memory, *cache._host):
        for layer, memory in by_layer.items():
            memory.copy_(torch.arange(memory.numel()).view(memory.shape) + 1_000 * layer)
    return cache


def host_pools(cache: KVCache) -> list[torch.Tensor]:
    """That of each layer."""
    return [memory for by_layer in cache._host for memory in by_layer.values()]


def steps(
    cache: KVCache, queue: Callable[[Callable[[], object]], object], between: Callable[[], object]
) -> list[float]:
    """Steps that swap, copy, and read and write blocks of the layers; some end before all layers had their turn."""
    rng, read = random.Random(7), list[float]()

    def compute(layer: int, out: int, into: int, value: float) -> Callable[[], object]:
        k = cache._layers[layer].k
        return lambda: (read.append(float(k[out].sum())), k[into].fill_(value))

    for step in range(60):
        for g in range(len(GROUPS)):
            for swap, ends in ((cache.swap_out, (12, 9)), (cache.swap_in, (9, 12))):
                count, (a, b) = rng.choice([0, 0, 1, 3, 6]), ends
                start = rng.randint(0, 3)
                src = rng.choice([list(range(start, start + count)), rng.sample(range(a), count)])
                swap(g, src, rng.sample(range(b), count))
        between()
        if rng.random() < 0.3:
            group = rng.randrange(len(GROUPS))
            cache.layers(group)
            for layer in GROUPS[group].layers:
                queue(compute(layer, rng.randrange(12), rng.randrange(12), step - 0.5))
        if rng.random() < 0.2:
            cache.settle()
        for layer in range(rng.choice([5, 5, 2])):
            cache.layer(layer)
            queue(compute(layer, rng.randrange(12), rng.randrange(12), float(step)))
            between()
    cache.settle()
    return read


@pytest.mark.parametrize("device", quick(range(40), 5, usual=20), indirect=True)
def test_whatever_order_streams_run_in_the_results_are_those_of_one_after_the_other(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run together with a cache without a stream, of whose blocks nothing is ever late."""
    plain, cache = filled_cache(), filled_cache()
    expected = steps(plain, lambda call: call(), lambda: None)
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    cache._swap = SideStream(torch.device("cuda"), host_pools(cache), deferred(device))
    assert runtime.registered == [memory.data_ptr() for memory in host_pools(cache)]
    found = steps(
        cache,
        lambda call: device.main.queue.append((None, call)),
        lambda: device.advance(device.rng.choice([0, 1, 5, 30])),
    )
    device.finish()
    assert device.copies > 100
    assert found == expected
    for by_layer, wanted in zip((*cache._memory, *cache._host), (*plain._memory, *plain._host), strict=True):
        for layer, memory in by_layer.items():
            assert torch.equal(memory, wanted[layer])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """Blocks go to the host and come back while the current stream is busy, and the pool is not pinned for ever."""
    groups = [replace(group, heads=Heads(8, 8, 128)) for group in GROUPS]
    cache = KVCache(groups, 64, 16, torch.bfloat16, "cuda", num_host_blocks=32)
    host = cache._host[0][0]
    assert host.is_pinned()
    work = torch.randn(4_096, 4_096, device="cuda")
    for layer in range(5):
        cache.layer(layer).k.copy_(torch.arange(64, device="cuda")[:, None, None, None] + layer)
    for _ in range(50):
        work = work @ work / 64
    for g in range(2):
        cache.swap_out(g, range(32), range(32))
    for layer in range(5):
        cache.layer(layer).k[:32] = -1  # who writes now must not be seen on the host
    for g in range(2):
        cache.swap_in(g, range(32), range(31, -1, -1))
    for layer in range(5):
        expected = torch.cat([torch.arange(31, -1, -1), torch.arange(32, 64)]) + layer
        assert cache.layer(layer).k[:, 0, 0, 0].tolist() == expected.tolist()
    del cache
    assert not host.is_pinned()


@pytest.mark.parametrize("device", [0], indirect=True)
def test_a_pool_that_cannot_be_pinned(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pinned before is freed."""
    cache, runtime = filled_cache(), Runtime(most=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(ConfigError, match=r"pool of [\d,]+ bytes cannot be pinned \(CUDA error 2\).*swap_space"):
        SideStream(torch.device("cuda"), host_pools(cache), deferred(device))
    assert runtime.registered == []
