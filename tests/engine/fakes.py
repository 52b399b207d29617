"""A runner without a model, whose memory of the past is the paged cache alone."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from quire.cache.groups import NO_STATES, AnyGroup, CacheGroup, StateGroup, StatePools
from quire.cache.manager import BlockManager
from quire.engine.engine import Engine
from quire.engine.flatten import Buffers
from quire.engine.loops import Loop
from quire.engine.plan import Launched, StepOutput
from quire.engine.policy import Order, first_come_first_served
from quire.engine.scheduler import Scheduler
from quire.engine.speculation import Speculation
from quire.models.batch import Batch
from quire.request import Request, SampleGroup, SamplingParams, TokenLogprobs

VOCAB = 251
CIRCLE = 6  # tokens
EMPTY = -1
MAX_STATE = 2048  # tokens that a state of the fake model can hold


def digest(context: list[int]) -> int:
    """A number that depends on each of these tokens and on their order."""
    value = 7
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def next_token(context: list[int]) -> int:
    """What the fake model says after these tokens: depends on each of them and on their order."""
    return digest(context) % VOCAB


def circling(context: list[int]) -> int:
    """The same of a model that mostly goes in a circle of a few tokens, so that much can be guessed, but not all."""
    value = digest(context)
    return value % VOCAB if value % 8 == 0 else (context[-1] + 1) % CIRCLE


def logprobs_after(context: list[int], token: int) -> TokenLogprobs:
    """What the fake model reports of that token: depends on each token of the context, as the token may not."""
    return TokenLogprobs(token, -1.0 - digest(context), 1, ())


def continuation(
    prompt: list[int], count: int, window: int = 0, model: Callable[[list[int]], int] = next_token
) -> list[int]:
    """What a request must generate, computed without any cache; with a window the model sees the last tokens only."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(tokens[-window:]))
    return tokens[len(prompt) :]


class FakeRunner:
    """Writes each token to its slot and reads a sequence's whole past back through its block table."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[AnyGroup, ...],
        num_host_blocks: int = 0,
        model: Callable[[list[int]], int] = next_token,
        state_pools: StatePools = NO_STATES,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.groups = groups
        self.windows = [group.window for group in groups if isinstance(group, CacheGroup)]
        self.spans = [group.piece or block_size for group in groups]
        # Of each group, a row for each block: a token in each slot; in a state's, all tokens that went into it.
        self.memory, self.host = [], []
        for group, span in zip(groups, self.spans, strict=True):
            width = MAX_STATE if isinstance(group, StateGroup) else span
            attends = isinstance(group, CacheGroup)
            self.memory.append(np.full((num_blocks if attends else state_pools.of(group), width), EMPTY))
            self.host.append(np.full((num_host_blocks if attends else state_pools.hosts, width), EMPTY))
        self.batches: list[Batch] = []
        self.fail_next = False
        self.lost = False
        self.drawn: dict[str, int] = {}  # by the last step, which the next one may take

    def is_lost(self) -> bool:
        return self.lost

    def launch(self, batch: Batch) -> Launched:
        output = self.run(batch)
        return lambda: output

    def run(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        if self.fail_next:
            self.fail_next = False
            for memory, group in zip(self.attention(), batch.groups, strict=True):
                memory[group.slots.numpy()[group.slots.numpy() >= 0]] = EMPTY  # who trusts these will be found out
            self.keep(batch, lambda start, stop: [EMPTY] * (stop - start))
            raise RuntimeError("injected")
        for row, request_id in zip(batch.drawn.rows.tolist(), batch.drawn.request_ids, strict=True):
            batch.token_ids[row] = max(0, self.drawn[request_id])
        self.move(batch)
        starts = batch.query_starts.tolist()
        assert starts[-1] == len(batch.token_ids) == len(batch.positions)
        pasts = []  # of each sequence, all that its rows see, or more
        for memory, group in zip(self.attention(), batch.groups, strict=True):
            slots, token_ids = group.slots.numpy(), batch.token_ids.numpy()
            written = slots >= 0
            assert len(np.unique(slots[written])) == written.sum()
            memory[slots[written]] = token_ids[written]
        for s, length in enumerate(batch.context_lens.tolist()):
            positions = batch.positions[starts[s] : starts[s + 1]].tolist()
            assert positions == list(range(length - len(positions), length))
            seen = []
            for memory, group, window in zip(self.attention(), batch.groups, self.windows, strict=True):
                table = group.block_tables[s].numpy()
                at = np.arange(0 if window is None else max(0, positions[0] - window + 1), length)  # all that is seen
                seen.append(memory[table[at // self.block_size] * self.block_size + at % self.block_size].tolist())
            seen += self.kept(batch, s)
            pasts.append(max(seen, key=len))
            assert all(pasts[-1][len(pasts[-1]) - len(past) :] == past for past in seen)
        flat = batch.token_ids.tolist()
        self.keep(batch, lambda start, stop: flat[start:stop])
        output = StepOutput({})
        window = 0 if None in self.windows or batch.recurrent else max(self.windows)

        def context_of(row: int) -> list[int]:
            s = bisect_right(starts, row) - 1
            return pasts[s][: len(pasts[s]) - (starts[s + 1] - 1 - row)][-window:]

        for request_id, row in zip(batch.embed.request_ids, batch.embed.rows.tolist(), strict=True):
            output.hidden_states[request_id] = np.array([digest(context_of(row))], np.float32)
        prompt = batch.prompt
        for request_id, row, token in zip(
            prompt.request_ids, prompt.rows.tolist(), prompt.tokens.tolist(), strict=True
        ):
            shown = output.prompt_logprobs.get(request_id, ())
            output.prompt_logprobs[request_id] = (*shown, logprobs_after(context_of(row), token))
        drawn = zip(batch.logit_ids, batch.logit_rows.tolist(), batch.sampling.num_logprobs.tolist(), strict=True)
        for request_id, row, num_logprobs in drawn:
            context = context_of(row)
            token = self.model(context)
            logprobs = logprobs_after(context, token)
            if request_id not in output.tokens:
                output.tokens[request_id] = token
                if num_logprobs >= 0:
                    output.logprobs[request_id] = logprobs
            else:
                output.tokens_after_drafts.setdefault(request_id, []).append(token)
                if num_logprobs >= 0:
                    output.logprobs_after_drafts.setdefault(request_id, []).append(logprobs)
        self.drawn = dict(output.tokens)
        return output

    def do(self, action: Callable[[], object]) -> None:
        """What is done to the memory besides computing."""
        action()

    def attention(self) -> list[np.ndarray]:
        """The memory of groups of attention, slot by slot."""
        pairs = zip(self.groups, self.memory, strict=True)
        return [memory.reshape(-1) for group, memory in pairs if isinstance(group, CacheGroup)]

    def kept(self, batch: Batch, s: int) -> list[list[int]]:
        """All tokens of a sequence, as each group of states has them with its rows and those of this step."""
        start, stop = batch.query_starts[s : s + 2].tolist()
        first = int(batch.context_lens[s]) - (stop - start)
        found, at = [], 0
        for g, group in enumerate(self.groups):
            if isinstance(group, StateGroup):
                tables, piece, past = batch.recurrent[at], first // group.piece, []
                at += 1
                if piece:
                    state = int(tables.state_tables[s, 0])
                    assert state >= 0
                    past += self.memory[g][state][: piece * group.piece].tolist()
                    assert (self.memory[g][state][piece * group.piece :] == EMPTY).all()
                if first % group.piece:
                    rows = int(tables.row_tables[s, 0])
                    assert rows >= 0
                    past += self.memory[g + 1][rows][: first % group.piece].tolist()
                found.append(past + batch.token_ids[start:stop].tolist())
        return found

    def keep(self, batch: Batch, tokens: Callable[[int, int], list[int]]) -> None:
        """Write the states and the rows of a step. tokens: of its rows from start to stop."""
        pasts = [self.kept(batch, s) for s in range(len(batch.context_lens))]
        written: set[tuple[int, int]] = set()
        for s, length in enumerate(batch.context_lens.tolist()):
            start, stop = batch.query_starts[s : s + 2].tolist()
            first, at = length - (stop - start), 0
            for g, group in enumerate(self.groups):
                if not isinstance(group, StateGroup):
                    continue
                past = pasts[s][at][:first] + tokens(start, stop)
                states, rows = batch.recurrent[at].state_tables[s].tolist(), batch.recurrent[at].row_tables[s].tolist()
                at += 1
                c0, size = first // group.piece, group.piece
                for j in range(length // size - c0 + 1):
                    begin = (c0 + j) * size
                    if j and states[j] >= 0:
                        assert (g, states[j]) not in written
                        written.add((g, states[j]))
                        self.memory[g][states[j]] = EMPTY
                        self.memory[g][states[j]][:begin] = past[:begin]
                    if rows[j] >= 0:
                        assert (g + 1, rows[j]) not in written
                        written.add((g + 1, rows[j]))
                        self.memory[g + 1][rows[j]] = EMPTY
                        self.memory[g + 1][rows[j]][: len(past[begin : begin + size])] = past[begin : begin + size]
                assert length % size == 0 or rows[length // size - c0] >= 0

    def move(self, batch: Batch) -> None:
        """Swap out, swap in, copy."""
        for blocks, host_blocks, group in zip(self.memory, self.host, batch.moves, strict=True):
            host_blocks[group.swap_out.dst] = blocks[group.swap_out.src]
            blocks[group.swap_in.dst] = host_blocks[group.swap_in.src]
            for copied in group.copies:
                assert not set(copied.src) & set(copied.dst)
                assert len(set(copied.dst)) == len(copied.dst)
                blocks[copied.dst] = blocks[copied.src]


class LaterRunner(FakeRunner):
    """A device that computes by itself, and as late as can be: each step when somebody waits for it or for a later one.

    By then the host's buffers hold another step.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log: list[str] = []  # what was launched and computed, by the number of the step
        self.queue: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self.count = 0

    def run(self, batch: Batch) -> StepOutput:
        return self.launch(batch)()

    def launch(self, batch: Batch) -> Launched:
        mine, number = own(batch), self.count
        self.count += 1
        self.log.append(f"launch {number}")
        return self.later(lambda: self.compute(mine, number))

    def later(self, action: Callable[[], Any]) -> Callable[[], Any]:
        """Do this after all that has been queued. What is returned waits for it."""
        future: Future[object] = Future()
        self.queue.append((future, action))

        def wait() -> object:
            while not future.done():
                self.next()
            return future.result()

        return wait

    def next(self) -> None:
        """Do what is first in the queue."""
        future, action = self.queue.popleft()
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    def compute(self, batch: Batch, number: int) -> StepOutput:
        """A step, on the device."""
        self.log.append(f"compute {number}")
        return super().run(batch)

    def do(self, action: Callable[[], object]) -> None:
        self.later(action)


def own(batch: Batch) -> Batch:
    """The batch in memory of its own, as a device has it."""
    groups = tuple(
        replace(group, slots=group.slots.clone(), block_tables=group.block_tables.clone()) for group in batch.groups
    )
    # Tables of states are made anew for each step.
    names = ("token_ids", "positions", "query_starts", "context_lens")
    sampling = replace(batch.sampling, uniforms=batch.sampling.uniforms.clone())
    copies = {name: torch.clone(getattr(batch, name)) for name in names}
    return replace(batch, groups=groups, sampling=sampling, **copies)


def assert_same_batches(one: Batch, other: Batch) -> None:
    """All fields are equal, except the number of rows that merely decode."""

    def assert_same(one: Any, other: Any, name: str) -> None:
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), (name, one, other)
        elif is_dataclass(one):
            for field in fields(one):
                if field.name != "num_decoding":
                    assert_same(getattr(one, field.name), getattr(other, field.name), f"{name}.{field.name}")
        elif isinstance(one, (tuple, list)):
            assert len(one) == len(other), name
            for i, pair in enumerate(zip(one, other, strict=True)):
                assert_same(*pair, f"{name}[{i}]")
        else:
            assert one == other, (name, one, other)

    assert_same(one, other, "batch")


def fake_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    groups: tuple[AnyGroup, ...] = (CacheGroup((0,)),),
    max_model_len: int = 200,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    eos: frozenset[int] = frozenset(),
    num_host_blocks: int = 0,
    enable_prefix_caching: bool = True,
    order: Order = first_come_first_served,
    speculation: Speculation | None = None,
    model: Callable[[list[int]], int] = next_token,
    runner: type[FakeRunner] = FakeRunner,
    loop: Loop | None = None,
    state_pools: StatePools = NO_STATES,
    state_snapshot_interval: int = 16,
) -> Engine:
    manager = BlockManager(
        groups,
        num_blocks,
        block_size,
        max_num_batched_tokens,
        num_host_blocks=num_host_blocks,
        state_pools=state_pools,
        state_snapshot_interval=state_snapshot_interval,
        enable_prefix_caching=enable_prefix_caching,
    )
    scheduler = Scheduler(
        manager,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        order=order,
        speculation=speculation,
    )
    max_blocks = -(-max_model_len // block_size)
    buffers = Buffers(groups, block_size, max_num_batched_tokens, max_num_seqs, max_blocks)
    device = runner(num_blocks, block_size, groups, num_host_blocks, model, state_pools)
    return Engine(scheduler, device, buffers, VOCAB, eos, loop=loop)


def request(name: str, prompt: list[int], **sampling: object) -> Request:
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | sampling))
    return Request(name, array("i", prompt), len(prompt), params)


def siblings(name: str, prompt: list[int], count: int, **sampling: object) -> list[Request]:
    """The samples of one prompt."""
    group = SampleGroup()
    group.members = [request(f"{name}-{i}", prompt, **sampling) for i in range(count)]
    for i, member in enumerate(group.members):
        member.group, member.sample_index = group, i
    return group.members


def forget_free_blocks(engine: Engine) -> None:
    """Empty every slot that nobody owns or may reuse: who reads one is found out, even if it was given to nobody."""
    manager, runner = engine.scheduler.manager, engine.runner
    frees = [np.array(pool.ref_counts) == 0 for pool in manager.pools]
    for free, index in zip(frees, manager.indexes, strict=True):
        free[list(index.by_block)] = False
    host_frees = [np.array(pool.ref_counts) == 0 for pool in manager.host_pools]

    def forget() -> None:
        for memory, free in zip(runner.memory, frees, strict=True):
            memory[free] = EMPTY
        for host, free in zip(runner.host, host_frees, strict=True):
            host[free] = EMPTY

    runner.do(forget)


def run(engine: Engine, limit: int = 100_000) -> dict[str, tuple[list[int], str]]:
    """Step until nothing is left, auditing after every step: request id -> tokens, reason."""
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for _ in range(limit):
        if not engine.has_work:
            engine.scheduler.audit()
            return {name: (tokens.get(name, []), reason) for name, reason in reasons.items()}
        for event in engine.step():
            if event.token is not None:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason is not None:
                assert event.error in (None, "RuntimeError: injected"), event.error
                assert event.request_id not in reasons
                reasons[event.request_id] = event.finish_reason.value
        engine.scheduler.audit()
        forget_free_blocks(engine)
    raise AssertionError(f"the engine did not come to an end in {limit} steps")
