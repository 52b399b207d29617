"""GraphRunner: replay steps of one token per sequence from CUDA graphs, at the cost of one launch.

A graph repeats launches with the addresses and the sizes of its capture. So a batch is padded to one of a few sizes,
its inputs are copied to the graph's input buffers, and an attention plan of that size is updated in place before every
replay. Padding rows are sequences of one row without context: by the operators' contract they attend to nothing, write
nothing and give zeros.

A step with adapters (LoRA) runs eagerly, because the rows of each adapter change from step to step.

A graph ends at the hidden states. Logits are one product, which the host queues while the graph runs: storing them for
every size would take gigabytes. Sampling depends on the requests' parameters.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from weakref import WeakSet

import torch
from torch import Tensor

from quire.cache.storage import KVCache
from quire.engine.plan import Launched, StepOutput
from quire.engine.runner import Runner, device_context
from quire.engine.transfer import staging
from quire.errors import Unsupported
from quire.models.batch import Batch
from quire.models.model import Model
from quire.ops import AttentionPlan

log = logging.getLogger("quire")

LARGEST = 512  # rows; beyond, kernels take longer than their launches
WARM_UPS = 2  # runs before a capture: the first compiles kernels and lets libraries allocate workspaces

# Runs a function such that the returned function repeats it: the same kernels on the same memory, with the result in
# the same tensor.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows that graphs are captured for, up to max_num_seqs or LARGEST.

    A padding row costs a row of each product and of each small operator, and nothing in attention. Steps are fine where
    a few rows are a large share (1, 2, 4, then 8 by 8 to 64), and at most an eighth of the rows where products become
    bound by arithmetic (16 by 16 to 256, then 32 by 32): each size costs a capture and its memory.
    """
    largest = min(max_num_seqs, LARGEST)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, LARGEST, 32)]
    return [*(size for size in sizes if size < largest), largest]


@dataclass
class Bucket:
    """The buffers and the graph for batches of up to `size` sequences. Its tensors and plans keep their addresses."""

    size: int
    inputs: Tensor  # int64 [2, size], on the device: token ids, positions
    plans: tuple[AttentionPlan, ...]  # one per cache group; models with stateful layers are not captured
    replay: Callable[[], Tensor] | None = None  # set when the bucket is captured; returns the hidden states, [size, H]


class GraphRunner:
    """A runner that replays steps in which every sequence has one new token; the others run eagerly.

    `capture_all` captures all buckets, which takes some seconds; without it, each is captured when it is first needed.
    The largest one is captured first: the others can reuse its memory, while the memory of a smaller one would not
    suffice for a larger one. If a capture fails, this step and all later ones without a captured bucket run eagerly:
    the cause is the model or the memory, and would be the same for other sizes. Blocks that are being swapped in arrive
    before a replay begins.
    """

    def __init__(self, runner: Runner, max_seqs: int, max_blocks: int, capture: Capture) -> None:
        self.runner = runner
        self.sizes = bucket_sizes(max_seqs)
        self._max_blocks = max_blocks
        self._capture = capture
        self._can_capture = True
        self._buckets: dict[int, Bucket] = {}
        # A batch's metadata with its padding, on the host.
        largest, num_groups = self.sizes[-1], len(runner.specs)
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32)
        self._context_lens = torch.zeros(largest, dtype=torch.int32)
        self._slots = torch.zeros(num_groups, largest, dtype=torch.int64)
        self._block_tables = torch.zeros(num_groups, largest, max_blocks, dtype=torch.int32)

    @torch.inference_mode()
    def capture_all(
        self,
        batch: Batch,  # of any step; its tensors are not read
    ) -> None:
        """Capture a graph for each number of rows, on padding alone."""
        with device_context(self.runner.device):
            for size in reversed(self.sizes):
                self._capture_padding(size, batch)

    @property
    def cache(self) -> KVCache:
        """The memory of the blocks."""
        return self.runner.cache

    def use(self, model: Model) -> None:
        """Run this model from now on, see `Runner.use`. Graphs are captured again when they are needed."""
        self.runner.use(model)
        for bucket in self._buckets.values():
            bucket.replay = None

    def is_lost(self) -> bool:
        """Return whether the device has failed for good, see `Runner.is_lost`."""
        return self.runner.is_lost()

    def run(self, batch: Batch) -> StepOutput:
        """Run one step, see `Runner.run`."""
        return self.launch(batch)()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Launch one step, see `Runner.launch`."""
        with device_context(self.runner.device):
            bucket = self._prepared(batch)
            if bucket is None:
                return self.runner.launch(batch)
            try:
                return self._replayed(bucket, batch)
            except BaseException:
                self.runner.abandon()
                raise

    def _replayed(self, bucket: Bucket, batch: Batch) -> Launched:
        """Launch a step from its bucket's graph, or eagerly if it has no graph."""
        self.runner.move(batch)
        self.runner.cache.settle()  # a graph does not wait for events outside of it
        if bucket.replay is None and bucket.size < self.sizes[-1]:
            self._capture_padding(self.sizes[-1], batch)
        if bucket.replay is None and self._can_capture:
            self._capture_bucket(bucket, batch)
        if bucket.replay is None:
            return self.runner.compute(batch)
        return self.runner.finish(batch, bucket.replay()[: len(batch.token_ids)], bucket.plans)

    def _prepared(self, batch: Batch) -> Bucket | None:
        """Return the bucket for a batch, with plans updated and inputs filled; None if the batch has to run eagerly."""
        count = len(batch.token_ids)
        if count != len(batch.context_lens) or not 0 < count <= self.sizes[-1]:
            return None
        if batch.lora_slots is not None or batch.turns is not None:
            return None
        bucket = self._bucket(self.sizes[bisect_left(self.sizes, count)])
        if bucket is None:
            return None
        try:
            self._update(bucket, batch, count)
        except Unsupported:  # more work than a plan of this size has room for
            if self.runner.in_group:
                raise
            return None
        inputs = staging(2 * bucket.size, torch.int64, self.runner.device).view(2, bucket.size).zero_()
        inputs[0, :count], inputs[1, :count] = batch.token_ids, batch.positions
        bucket.inputs.copy_(inputs, non_blocking=True)
        self.runner.fill_in(batch, bucket.inputs[0])
        return bucket

    def _bucket(self, size: int) -> Bucket | None:
        """Return the bucket of that size, or None if it does not exist and cannot be created."""
        if size not in self._buckets and self._can_capture:
            try:
                plans = self.runner.make_plans(size, size, self._max_blocks)
                for plan in plans:
                    plan.covers_all = True  # so that warming up launches everything that a replay may
                inputs = torch.zeros(2, size, dtype=torch.int64, device=self.runner.device)
            except Exception:
                self._give_up(size)
            else:
                self._buckets[size] = Bucket(size, inputs, plans)
        return self._buckets.get(size)

    def _update(self, bucket: Bucket, batch: Batch, count: int) -> None:
        """Update the bucket's plans with the first `count` sequences of the batch, and padding after them."""
        size = bucket.size
        lens = self._context_lens[:size]
        lens[:count], lens[count:] = batch.context_lens[:count], 0
        for plan, group, slots, tables in zip(bucket.plans, batch.groups, self._slots, self._block_tables, strict=True):
            width = group.block_tables.shape[1]
            slots[:count], slots[count:size] = group.slots[:count], -1
            tables[:count, :width] = group.block_tables[:count]
            plan.update_trusted(self._query_starts[: size + 1], lens, tables[:size, :width], slots[:size])

    def _capture_padding(self, size: int, batch: Batch) -> None:
        """Capture the bucket of that size, if not yet done, on padding alone."""
        bucket = self._bucket(size)
        if bucket is not None and bucket.replay is None and self._can_capture:
            try:
                self._update(bucket, batch, 0)
            except Exception:
                self._give_up(size)
            else:
                self._capture_bucket(bucket, batch)

    def _capture_bucket(self, bucket: Bucket, batch: Batch) -> None:
        """Capture the bucket with the current contents of its plans and inputs.

        Warming up computes that step, and so does the replay after it: each writes the same K and V to the same slots.
        """
        model, cache = self.runner.model, self.runner.cache
        static = replace(batch, token_ids=bucket.inputs[0], positions=bucket.inputs[1])
        began = perf_counter()
        try:
            bucket.replay = self._capture(lambda: model.forward(static, cache, bucket.plans))
        except Exception:
            self._give_up(bucket.size)
        else:
            log.info("captured a graph for %d sequences in %.2f s", bucket.size, perf_counter() - began)

    def _give_up(self, size: int) -> None:
        """Stop capturing. Called in an except block.

        In a group it raises: ranks that replay exchange numbers of other sizes than those that do not.
        """
        if self.runner.in_group:
            raise  # noqa: PLE0704
        log.warning("no graph for %d sequences, nor any further one: such steps run eagerly", size, exc_info=True)
        self._can_capture = False
        self._buckets.pop(size, None)


class CudaCapture:
    """Captures CUDA graphs that share one pool of memory, since no two of them run at the same time.

    Any result of a graph may be overwritten by another one: use it before another graph is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        with device_context(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run the function a few times on a side stream, capture it, and return the function that replays it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    function()
        finally:
            current.wait_stream(self._stream)  # queued work reads memory that may be freed now
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()  # torch refuses a pool whose graphs were all dropped
        graph = torch.cuda.CUDAGraph()
        try:
            # Relaxed: other threads may use the GPU meanwhile, and a kernel may still be loaded that this step did not
            # need but a later one will. Code that waits for a captured kernel raises anyway.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"):
                result = function()
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # torch (2.11) considers the old one in use for ever
            raise
        finally:
            torch.cuda.set_stream(current)  # a failed capture does not restore it

        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
