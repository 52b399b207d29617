"""Engine: add requests, step, read events."""

from __future__ import annotations

import secrets
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from quire.cache.events import Listener
from quire.cache.groups import NEVER, NO_STATES, AnyGroup, CacheGroup, StateGroup, check_pieces, has_states
from quire.cache.manager import BlockManager
from quire.cache.sizing import BlockBytes, choose_host_pools, choose_pools, free_memory
from quire.cache.storage import KVCache, bytes_of_states, bytes_per_block, cache_dtype, group_spec, recurrent_spec
from quire.config import EngineConfig
from quire.engine.decode_rows import DecodeRows
from quire.engine.flatten import Buffers, flatten
from quire.engine.graphs import CudaCapture, GraphRunner
from quire.engine.head_drafter import STEPS_KEPT
from quire.engine.interrupts import deferred_interrupts
from quire.engine.loops import Loop, OverlappedLoop, SequentialLoop, StepRunner
from quire.engine.model_drafter import ModelDrafter
from quire.engine.plan import Plan
from quire.engine.plan_codec import Pools, pack
from quire.engine.policy import ORDERS
from quire.engine.ranks import LeadingRunner
from quire.engine.runner import MAX_LOGIT_ROWS, Runner
from quire.engine.scheduler import Scheduler
from quire.engine.shutdown_guard import StepGuard
from quire.engine.speculation import NUM_FROM_HEAD, NUM_GUESSES, Drafter, PromptLookup, Speculation
from quire.engine.step_events import StepEvents
from quire.engine.trace import TraceRecorder
from quire.errors import ConfigError, EngineAsleep, ModelError, RequestError, Unsupported
from quire.models.batch import Batch
from quire.models.lora.slots import Lora, Loras, Prepared
from quire.models.model import Model, ModelShape
from quire.models.pooling_config import PoolingConfig
from quire.ops import Backend
from quire.ops.collectives import least
from quire.ops.spec import check_supported
from quire.request import MAX_SEED, FinishReason, Request, Task

AnyRunner = TypeVar("AnyRunner", bound=Runner)

if TYPE_CHECKING:
    from numpy.typing import NDArray

# GPU memory for compiled kernels, libraries' workspaces, CUDA graphs, attention plans, and fragmentation.
FIXED_RESERVE = 512 * 2**20
FIRST_VERSION = "0"  # of the weights
ROW_PADDING = 1024  # bytes per token, over all tensors, that keep the rows of activations apart in the caches
NO_LORAS = "adapters are not served here; enable_lora=True (--enable-lora) changes that"
CLOSE_WITHIN = 1.0  # s: time limit for each thread that reads blocks to end
DRAFTED_SEQUENCES = 16  # sequences of full length in the cache of a draft model
DRAFT_SHARE = 8  # its cache takes at most this part of the free memory
LOGIT_BYTES = 48  # upper limit per logit: model dtype, fp32, a copy, its logprob, its place in a sorted row


class Engine:
    """Serves the requests of one model step by step. Single-threaded: its owner calls all of its methods.

    Interrupts leave it usable: on the main thread, signal handlers written in Python are deferred to the end of any
    method that changes state.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        buffers: Buffers,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        loop: Loop | None = None,
        loras: Loras | None = None,
        *,
        pooling: PoolingConfig = PoolingConfig(),  # noqa: B008  # frozen
    ) -> None:
        """Create an engine.

        loop: runs the steps; None: a SequentialLoop.
        loras: the model's adapters; None: adapters are not enabled.
        pooling: how a prompt becomes a vector.
        """
        self.scheduler = scheduler
        scheduler.rows = DecodeRows(scheduler.manager, scheduler.longest)
        self.runner = runner
        self.buffers = buffers
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.loop = loop or SequentialLoop()
        self.loras = loras
        self.pooling = pooling
        self.weights_version = FIRST_VERSION
        self.is_asleep = False
        self.under_way: Plan | None = None  # the plan that the runner is computing; any thread may read its sizes
        self.recorder: TraceRecorder | None = None  # if set, records every added request
        self._guard = StepGuard()
        self._events = StepEvents()  # not yet returned to a caller of `step`

    @property
    def has_work(self) -> bool:
        """True if any request has not ended, or the next step has events to return."""
        return self.scheduler.has_work or bool(self._events)

    @property
    def can_step(self) -> bool:
        """True if there is work, and the engine does not sleep."""
        return self.has_work and not self.is_asleep

    @deferred_interrupts()
    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and queues nothing, if it is invalid or could never run."""
        self.check(request)
        self.bind_lora(request)
        self.scheduler.add(request)
        if self.recorder is not None:
            self.recorder.add(request)
        sampling = request.sampling
        request.seed = self._derived_seed(request) if sampling.seed is None else sampling.seed
        goes_on = sampling.ignore_eos and request.guide is None  # a guide allows the end token where its text may end
        own = frozenset() if goes_on else self.eos_token_ids
        request.ending_tokens = own | frozenset(sampling.stop_tokens)
        if request.guide is not None and request.guide.done:
            self.finish(request.id, FinishReason.STOP)

    def check(self, request: Request) -> None:
        """Raise RequestError if `add` would. A request is checked once, and the prompt that siblings share, too.

        Raises EngineAsleep while the engine sleeps.
        """
        if self.is_asleep:
            raise EngineAsleep
        if request.is_checked:
            return
        first = request.group.members[0] if request.group else request
        if first is request or not first.is_checked:
            prompt = np.asarray(first.tokens)[: first.num_prompt]
            if first.images is not None:
                prompt = np.delete(prompt, first.images.positions)
            self._check_tokens(request, "prompt", prompt)
        if request.num_generated or request.to_check:
            delivered = np.array([*request.tokens[request.num_prompt :], *request.to_check])
            self._check_tokens(request, "delivered", delivered)
        self._check_tokens(request, "stop_token_ids", np.array(request.sampling.stop_tokens, object))
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(request.sampling, name)
            if count is not None and count > self.vocab_size:
                raise RequestError(
                    f"request {request.id}: {name} is {count}; the vocabulary has {self.vocab_size} tokens", name
                )
        self._lora_of(request)
        if request.driven and request.guide is not None:
            raise RequestError(f"request {request.id} has a guide; a beam search does not support grammars")
        if request.task is Task.EMBED:
            request.pooled, request.is_whole = self.pooling.rows, self.pooling.takes_whole
        else:
            self.pooling.check_writes()
        self.scheduler.check(request)
        request.is_checked = True

    def bind_lora(self, request: Request) -> None:
        """Set the slot and the digest of a new request's adapter. Raises RequestError if that is not loaded."""
        lora = self._lora_of(request)
        if lora is not None:
            request.lora_slot, request.lora_digest = lora.slot, lora.digest

    def _lora_of(self, request: Request) -> Lora | None:
        if request.lora is None:
            return None
        if self.loras is None:
            raise RequestError(f"request {request.id}: lora is {request.lora!r}; {NO_LORAS}", "lora")
        return self.loras[request.lora]

    @deferred_interrupts()
    def load_lora(self, name: str, prepared: Prepared, *, replace: bool = False) -> Lora:
        """Load an adapter that requests can then name. replace: replace the adapter of this name.

        Raises ConfigError if the name is taken, or max_loras are loaded.
        """
        return self.known_loras().put(name, prepared, self._lora_slots(), replace=replace)

    @deferred_interrupts()
    def unload_lora(self, name: str) -> None:
        """Unload an adapter. Requests that use it keep it to their end; then its memory is freed.

        Raises RequestError if there is no adapter of that name.
        """
        self.known_loras().remove(name, self._lora_slots())

    def known_loras(self) -> Loras:
        """Return the model's adapters. Raises ConfigError if adapters are not enabled."""
        if self.loras is None:
            raise ConfigError(NO_LORAS)
        return self.loras

    def _lora_slots(self) -> set[int]:
        return {request.lora_slot for request in self.scheduler.requests.values()}

    def abort(self, request_id: str) -> None:
        """Cancel a request; the next step frees its blocks and reports it. A request that has ended is left alone."""
        self.finish(request_id, FinishReason.ABORT)

    @deferred_interrupts()
    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request for a reason that the engine cannot see, such as a stop string; otherwise like `abort`."""
        self.scheduler.finish(request_id, reason)

    @deferred_interrupts()
    def extend(self, request: Request, token: int) -> None:
        """Append the next token to a driven request."""
        self.scheduler.extend(request, token)

    @deferred_interrupts()
    def fork(self, parent: Request, child: Request) -> None:
        """Make the driven child, a new request or a sibling that drops its own state, continue from the parent.

        The child's tokens begin with the parent's. They share all blocks until one of them writes. The child also
        inherits everything that determines the parent's numbers, such as its adapter.
        """
        self.scheduler.fork(parent, child)

    @deferred_interrupts()
    def reset_prefix_cache(self) -> None:
        """Drop all reusable blocks; running requests keep theirs."""
        if self.scheduler.prefetch is not None:
            self.scheduler.prefetch.reset()
        self.scheduler.manager.reset_prefix_cache()
        for drafter in self._model_drafters():
            drafter.reset()

    def _model_drafters(self) -> list[ModelDrafter]:
        found = [] if self.scheduler.speculation is None else self.scheduler.speculation.drafters
        return [one for one in found if isinstance(one, ModelDrafter)]

    def check_replacement(self, model: Model) -> None:
        """Raise ModelError unless the engine's cache suits a model."""
        if groups_of(model) != self.scheduler.manager.groups:
            raise ModelError("the weights have other layers than the model, such as no draft head; give all of them")

    @deferred_interrupts()
    def replace_weights(self, model: Model, version: str) -> None:
        """Compute with this model, the same one with other weights, from the next step on. Call `settle` before.

        Requests continue, but all of their tokens are computed again. No K or V of the old weights can be found.
        """
        self.scheduler.restart_all()
        for request in self.scheduler.requests.values():
            if request.next_prompt_logprob < request.num_prompt - 1:  # else all logprobs of its prompt are reported
                request.schedule.num_prompt_logprobs = 0
        # No other replacement has this text, even one of the same version in another process with the same disk.
        self.scheduler.manager.lookup.weights = f"\0{version}\0{secrets.token_hex(8)}"
        self.reset_prefix_cache()
        self.runner.use(model)
        self.weights_version = version

    @deferred_interrupts()
    def sleep(self, model: Model | None) -> None:
        """Free the memory of the blocks, except on the disk, and compute nothing until `wake_up`. Call `settle` before.

        model: the engine's; None: drop it. Requests wait, and continue afterwards with the same results.
        """
        manager = self.scheduler.manager
        self.scheduler.restart_all()
        if manager.disk is not None:
            manager.disk.leave_memory()
        if self.scheduler.prefetch is not None:
            self.scheduler.prefetch.reset()
        manager.reset_prefix_cache(keeps_disk=True)
        self.runner.use(cast(Model, _Dropped()) if model is None else model)
        self.runner.cache.free()
        for drafter in self._model_drafters():
            drafter.sleep()
        self.is_asleep = True

    @deferred_interrupts()
    def wake_up(self, model: Model) -> None:
        """Allocate the memory of the blocks, and compute again. model: that of `sleep`, or the same one loaded."""
        self.runner.cache.allocate()
        for drafter in self._model_drafters():
            drafter.wake_up()
        self.runner.use(model)
        self.is_asleep = False

    def close(self) -> None:
        """Write pending blocks to the disk and release its directory; stop reading blocks from other sources."""
        if self.scheduler.manager.disk is not None:
            self.scheduler.manager.disk.close()
        if self.scheduler.prefetch is not None:
            for source in self.scheduler.prefetch.sources:
                source.close(CLOSE_WITHIN)

    def listen(self, listener: Listener) -> None:
        """Call this function for every future cache event."""
        self.scheduler.manager.listeners.append(listener)

    def step(self) -> StepEvents:
        """Run the next step with as many requests as fit, and return its events.

        An exception in a step ends the requests of that step only. It is re-raised if it is not an Exception or the
        device is unusable.

        An interrupt during a step is raised at its end and changes nothing of the step: the next step returns its
        events as well. The interpreter's exit waits for a step of a daemon thread, too.

        Raises EngineAsleep while the engine sleeps.
        """
        if self.is_asleep:
            raise EngineAsleep
        with deferred_interrupts(), self._guard:
            self._events.extend(self.loop.step(self))
            if not self.scheduler.has_work:
                self._forget_requests()
            if self.loras is not None and self.loras.left:
                self.loras.settle(self._lora_slots())
        taken: StepEvents | None = None
        try:
            return (taken := self._events)
        finally:  # in this order an interrupt between the two statements, or before them, loses no events
            if taken is not None:
                self._events = StepEvents()

    def _forget_requests(self) -> None:
        """Drop the references to requests that have ended, which the next step would drop."""
        if self.scheduler.rows is not None:
            self.scheduler.rows.settle()
        self.buffers.forget_requests()

    @deferred_interrupts()
    def settle(self) -> StepEvents:
        """Finish a step that was launched ahead, and return all events. The caller defers interrupts."""
        with self._guard:
            self._events.extend(self.loop.settle(self))
        taken, self._events = self._events, StepEvents()
        return taken

    def flatten(self, plan: Plan) -> Batch:
        """Return the plan as tensors, which are views of buffers that the next plan overwrites."""
        return flatten(plan, self.buffers, self.scheduler.rows)

    def _check_tokens(self, request: Request, name: str, tokens: NDArray[Any]) -> None:
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(wrong):
            i = int(wrong[0])
            message = f"request {request.id}: {name}[{i}] is {tokens[i]}"
            raise RequestError(f"{message}; token ids of this model lie in 0..{self.vocab_size - 1}", name)

    def _derived_seed(self, request: Request) -> int:
        digest = blake2b(f"{self.seed}:{request.schedule.ordinal}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & MAX_SEED


class _Dropped:
    """Placeholder for a model that was dropped."""

    draft_head = None

    def __getattr__(self, name: str) -> Any:
        raise EngineAsleep


def build_engine(model: Model, backend: Backend, config: EngineConfig, draft: Model | None = None) -> Engine:
    """Build an engine for a loaded model, with a cache sized for this machine.

    draft: a loaded draft model, which gets a separate cache.

    Raises ConfigError if the cache could not hold one sequence of the maximum length, and Unsupported if the backend
    does not support the cache's dtype.
    """
    if not model.config.causal:
        config = encoder_config(config, model)
    decoder, cache_config = model.config, config.cache
    if config.reproducible and not model.rows_are_batch_invariant:
        raise Unsupported("reproducible is True; a row's bits may depend on the batch in transformers' layers")
    groups, block_size = groups_of(model), cache_config.block_size
    kv_dtype = cache_dtype(cache_config, model.dtype)
    attention = [group for group in groups if isinstance(group, CacheGroup)]
    specs = [  # with one block until their number is known
        group_spec(group, block_size, 1, model.dtype, kv_dtype, config.device, config.reproducible)
        for group in attention
    ]
    check_pieces(groups, block_size, cache_config.state_snapshot_interval)
    if kv_dtype != model.dtype and any(group.heads.index_dim for group in attention):
        raise Unsupported(
            f"kv_cache_dtype is {cache_config.kv_cache_dtype!r}; this model's cache also has the keys of an "
            "indexer, which are stored in the model's dtype, so it must be 'auto'"
        )
    if cache_config.kv_cache_dtype != "auto":  # checked before memory is allocated; a plan would report it afterwards
        for spec in specs:
            check_supported(spec, backend.name, backend.limits)
    ranks = 1 if model.exchange is None else model.exchange.size_here  # ranks that share this device's memory
    # The ranks other than this one have no draft head.
    here, others = (bytes_per_block(of, block_size, kv_dtype) for of in (groups, decoder.groups))
    states = (ranks * size for size in bytes_of_states(groups, model.dtype))
    sizes = BlockBytes(here + (ranks - 1) * others, *states)
    growth = config.most_tokens
    a_sequence = max((group.most(model.max_model_len, growth, block_size) for group in attention), default=0)
    device = torch.device(config.device)
    # The ranks of a group get a step's tokens from this one's host.
    loop = _loop(config, is_queued(model, backend, config) and model.exchange is None)
    reserve = ranks * working_memory(decoder, model.dtype.itemsize, config.most_tokens)
    if model.loras is not None:
        reserve += config.most_tokens * model.loras.row_bytes
    if model.draft_head is not None:  # whose ring has up to three hidden states of a row
        reserve += 3 * STEPS_KEPT * config.most_tokens * decoder.hidden_size * model.dtype.itemsize
    if device.type == "cuda":
        torch.cuda.empty_cache()  # temporaries of loading
        reserve += FIXED_RESERVE
    free = free_memory(config.device)
    if model.exchange is not None and free is not None:  # after all ranks have loaded their weights
        free = ranks * least(model.exchange, free // ranks)
    drafter = None
    if draft is not None:
        drafter, taken = _model_drafter(draft, decoder.vocab_size, backend, config, free)
        reserve += taken
    try:
        num_blocks, state_pools = choose_pools(
            cache_config,
            sizes,
            model.max_model_len,
            config.max_num_seqs,
            None if free is None else max(0, free - reserve),
            a_sequence,
        )
    except ConfigError as error:
        raise ConfigError(
            f"{error}. Of the free memory on {config.device}, {reserve / 2**20:,.0f} MiB are kept for activations and "
            f"logits; a smaller max_num_batched_tokens than {config.most_tokens} needs less"
        ) from None
    left = free_memory()
    if left is not None and config.device == "cpu":  # the cache will be allocated from the same memory
        taken = num_blocks * sizes.attention + state_pools.states * sizes.state + state_pools.rows * sizes.rows
        left = max(0, left - reserve - taken)
    most = a_sequence * config.max_num_seqs
    num_host_blocks, hosts = choose_host_pools(cache_config, sizes, most, config.max_num_seqs, left)
    state_pools = state_pools._replace(hosts=hosts)
    scheduler = Scheduler(
        BlockManager(
            groups,
            num_blocks,
            block_size,
            config.most_tokens,
            num_host_blocks=num_host_blocks,
            state_pools=state_pools,
            state_snapshot_interval=cache_config.state_snapshot_interval,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            salt=str(model.dtype) if kv_dtype == model.dtype else f"{model.dtype} in {kv_dtype}",
            retained_share=cache_config.prompt_cache_share,
        ),
        max_model_len=model.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.most_tokens,
        order=ORDERS[config.scheduling_policy],
    )
    pools = Pools(num_blocks, num_host_blocks, state_pools, model.draft_head is not None)
    if model.exchange is not None:
        model.exchange.send(pack(pools))
    eager = make_runner(Runner if model.exchange is None else LeadingRunner, model, backend, config, pools)
    runner: StepRunner = eager
    scheduler.speculation = _speculation(config, backend, model, eager, drafter)
    limits = runner_limits(model, config)
    buffers = Buffers(groups, block_size, *limits)
    if uses_graphs(model, backend, config):
        runner = captured(eager, model, config, buffers)
    seed, loras = config.seed, model.loras
    return Engine(
        scheduler,
        runner,
        buffers,
        decoder.num_token_ids,
        model.eos_token_ids,
        seed,
        loop,
        loras,
        pooling=model.pooler.config,
    )


def is_queued(model: Model, backend: Backend, config: EngineConfig) -> bool:
    """Return True if the device computes a step without the host once it is queued.

    Such a step consists of kernels alone, and of attention layers: graphs have no tables of states.
    """
    on_gpu = torch.device(config.device).type == "cuda"
    return on_gpu and backend.graphable and model.capturable and not has_states(groups_of(model))


def uses_graphs(model: Model, backend: Backend, config: EngineConfig) -> bool:
    """Return True if steps are replayed from graphs. Those of a group are if the config asks for it.

    Raises ConfigError if a graph cannot repeat the exchanges of its ranks.
    """
    if not is_queued(model, backend, config):
        return False
    if model.exchange is None:
        return not config.enforce_eager
    if config.enforce_eager is False and getattr(model.exchange, "device", None) is None:
        raise ConfigError(
            "enforce_eager is False; ranks that share a GPU exchange numbers through the host, which a graph cannot "
            "repeat: leave it out"
        )
    return config.enforce_eager is False


def captured(eager: Runner, model: Model, config: EngineConfig, buffers: Buffers | None = None) -> GraphRunner:
    """Return the runner that replays the steps of an eager one, with all of its graphs. buffers: of its batches."""
    limits = runner_limits(model, config)
    graphs = GraphRunner(eager, config.max_num_seqs, limits[2], CudaCapture(torch.device(config.device)))
    if buffers is None:
        buffers = Buffers(groups_of(model), config.cache.block_size, *limits)
    graphs.capture_all(flatten(Plan(), buffers))
    return graphs


def encoder_config(config: EngineConfig, model: Model) -> EngineConfig:
    """Return the options of an encoder's engine, which keeps the K and V of one layer and one step.

    Raises ConfigError for options of a cache, and for a step that is too small for a text.
    """
    cache = config.cache
    refused = {
        f"kv_disk is {cache.kv_disk!r}": cache.kv_disk is not None,
        f"kv_cache_dtype is {cache.kv_cache_dtype!r}": cache.kv_cache_dtype != "auto",
        "enable_lora is True": config.enable_lora,
        "preemption is 'swap'": cache.preemption == "swap",
        f"draft is {config.draft!r}": config.draft not in ("auto", "off"),
    }
    for option, holds in refused.items():
        if holds:
            raise ConfigError(f"{option}; an encoder keeps no cache, has no adapters and writes nothing: leave it out")
    most = config.max_num_batched_tokens or max(config.most_tokens, model.max_model_len)
    if most < model.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {most}; an encoder computes a text in one step, so it must be at least "
            f"max_model_len={model.max_model_len}"
        )
    blocks = -(-most // cache.block_size) + config.max_num_seqs
    cache = replace(cache, num_blocks=blocks, enable_prefix_caching=False, preemption="recompute")
    return replace(config, max_num_batched_tokens=most, cache=cache)


def runner_limits(model: Model, config: EngineConfig) -> tuple[int, int, int]:
    """Return the maximum numbers of tokens and sequences of a step, and of blocks of a sequence."""
    return config.most_tokens, config.max_num_seqs, -(-model.max_model_len // config.cache.block_size)


def make_runner(kind: type[AnyRunner], model: Model, backend: Backend, config: EngineConfig, pools: Pools) -> AnyRunner:
    """Create a runner of that kind, with a cache of the given numbers of blocks."""
    groups, block_size = groups_of(model), config.cache.block_size
    kv_dtype = cache_dtype(config.cache, model.dtype)
    num_blocks, hosts, states, all_rows = pools
    specs = [
        group_spec(group, block_size, num_blocks, model.dtype, kv_dtype, config.device, config.reproducible)
        for group in groups
        if isinstance(group, CacheGroup)
    ]
    recurrent = [
        recurrent_spec(group, states, model.dtype, config.device) for group in groups if isinstance(group, StateGroup)
    ]
    cache = KVCache(groups, num_blocks, block_size, kv_dtype, config.device, hosts, backend, states, model.dtype)
    runner = kind(model, cache, backend, specs, *runner_limits(model, config), recurrent)
    runner.all_rows = all_rows
    return runner


def _loop(config: EngineConfig, is_queued: bool) -> Loop:
    """Return the loop. is_queued: the device computes a step without the host once it is queued."""
    if config.async_scheduling and not is_queued:
        raise ConfigError(
            f"async_scheduling is True; with this model and backend the host takes part in computing a step on "
            f"{config.device!r}, so it cannot plan the next one meanwhile. It is for GPUs, with the backend 'triton' "
            f"and Quire's own decoders without experts"
        )
    wanted = is_queued if config.async_scheduling is None else config.async_scheduling
    return OverlappedLoop() if wanted else SequentialLoop()


def _model_drafter(
    draft: Model, vocab_size: int, backend: Backend, config: EngineConfig, free: int | None
) -> tuple[ModelDrafter, int]:
    """Return the drafter of a draft model, and the bytes of its cache and its steps.

    The cache has room for a few sequences of full length, if those fit into a part of the free memory, and not for
    more than the model's. Raises ConfigError if they do not fit.
    """
    own = replace(config, cache=replace(config.cache, kv_cache_dtype="auto", kv_disk=None, kv_disk_space=None))
    groups, size = groups_of(draft), config.cache.block_size
    each = bytes_per_block(groups, size, draft.dtype)
    a_sequence = -(-draft.max_model_len // size)
    count = min(a_sequence * min(config.max_num_seqs, DRAFTED_SEQUENCES), config.cache.num_blocks or NEVER)
    if free is not None:
        count = min(count, free // DRAFT_SHARE // each)
    working = working_memory(draft.config, draft.dtype.itemsize, config.most_tokens)
    if free is not None and (count == 0 or count * each + working > free):
        raise ConfigError(
            f"draft_model is {config.draft_model!r}; a block of its cache takes {each:,} bytes and its steps "
            f"{working / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free after the weights. Leave it out, or "
            "give a smaller max_num_batched_tokens"
        )
    manager = BlockManager(
        groups,
        count,
        size,
        config.most_tokens,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        salt=str(draft.dtype),
    )
    runner = make_runner(Runner, draft, backend, own, Pools(count, 0, NO_STATES))
    buffers = Buffers(groups, size, *runner_limits(draft, config))
    return ModelDrafter(runner, manager, buffers, vocab_size), count * each + working


def _speculation(
    config: EngineConfig, backend: Backend, model: Model, runner: Runner, of_model: ModelDrafter | None
) -> Speculation | None:
    """Return the source of draft tokens, or None unless accepting them leaves every output unchanged."""
    wanted = 0 if config.draft == "off" else config.num_speculative_tokens
    batch_invariant = backend.batch_invariant(config.device) and model.rows_are_batch_invariant
    if not batch_invariant and (wanted or (wanted is None and config.draft in ("head", "model"))):
        asked = f"num_speculative_tokens is {wanted}" if wanted else f"draft is {config.draft!r}"
        raise ConfigError(
            f"{asked}; speculative decoding needs batch-invariant results: "
            f"the backend 'cpu' on a CPU and products that are all Quire's, not {backend.name!r} on "
            f"{config.device!r} and this model's products"
        )
    if wanted is None:
        usual = NUM_GUESSES if runner.drafter is None and of_model is None else NUM_FROM_HEAD
        wanted = usual if batch_invariant else 0
    drafters: list[Drafter] = [] if config.draft in ("head", "model") else [PromptLookup()]
    drafters += [one for one in (runner.drafter, of_model) if one is not None]
    return Speculation(drafters, wanted) if wanted else None


def groups_of(model: Model) -> tuple[AnyGroup, ...]:
    """Return the cache groups of a model, its draft head included."""
    return model.config.groups if model.draft_head is None else model.draft_head.groups


def working_memory(decoder: ModelShape, itemsize: int, max_tokens: int) -> int:
    """Return the bytes that a step needs in addition to weights and cache, by a rule: nothing is run to measure them.

    They are the activations of one layer for each of max_tokens tokens, then the logits of MAX_LOGIT_ROWS rows with the
    tensors that are derived from them.
    """
    width = 3 * decoder.hidden_size + decoder.layer_width  # first the residual, its norm and the branch
    return max_tokens * (width * itemsize + ROW_PADDING) + MAX_LOGIT_ROWS * decoder.vocab_size * LOGIT_BYTES
