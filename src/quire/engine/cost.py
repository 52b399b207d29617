"""What a step of the engine would cost a model on a device: bytes and operations over the device's rates."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.cache.groups import AnyGroup, CacheGroup, RowGroup, StateGroup
from quire.cache.manager import Move
from quire.engine.plan import Plan, PlanItem
from quire.models import longest_sequence
from quire.models.decoder_config import DecoderConfig, weight_shapes, weight_use
from quire.models.model import Model, WeightBytes


@dataclass(frozen=True)
class Device:
    """What a machine does in a second, as far as a model can have it."""

    name: str
    bytes_per_second: float  # read from the memory where weights and cache lie
    flops_per_second: float
    link_bytes_per_second: float  # between that memory and the host's


# The CPU is two Zen 5 cores as measured, with bfloat16; of the GPU's data sheet, 90 % and 70 % are within reach.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "cpu": Device("cpu", 42e9, 0.8e12, 21e9),  # a swap there reads and writes the same memory
        "h200": Device("h200", 0.9 * 4.8e12, 0.7 * 989e12, 54e9),
    }
)


MANY = 24  # steps: from here on it is faster to compute them at once
STATE_BYTES = 4  # of a number of a state, which is fp32


@dataclass(frozen=True)
class ModelCost:
    """What a model has to read and to multiply."""

    groups: tuple[AnyGroup, ...]
    max_model_len: int  # tokens of the longest sequence
    layer_params: int  # every token is multiplied by each of them; those of experts are apart
    head_params: int  # of the output projection: only rows that draw a token are
    number_bytes: int  # of an element of K and V, and of what a convolution keeps
    weights: WeightBytes
    expert_params: int = 0  # of all experts of all layers
    expert_share: float = 0.0  # of a layer's experts, those that a token goes through

    def weight_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads, which choose their experts as if by chance."""
        read = 1 - (1 - self.expert_share) ** num_tokens
        return self.weights.layers + self.weights.head + self.weights.experts * read

    def linear_flops(self, num_tokens: int, num_drawn: int) -> float:
        """Operations of a step's linears, so many of its tokens drawing the next one."""
        a_token = self.layer_params + self.expert_params * self.expert_share
        return 2 * (num_tokens * a_token + num_drawn * self.head_params)

    def kv_bytes(self, group: CacheGroup) -> int:
        """Bytes of one token's K and V in the group's layers."""
        heads = group.heads
        stored = (2 if heads.latent is None else 1) * heads.num_kv_heads * heads.head_dim
        return len(group.layers) * stored * self.number_bytes

    def state_bytes(self, group: StateGroup | RowGroup) -> int:
        """Bytes of one block of the group's layers: of a state, or of the rows of a piece."""
        of = group.sizes
        if isinstance(group, StateGroup):
            numbers, inputs = of.num_heads * of.dim_k * of.dim_v, (of.taps - 1) * of.width
        else:
            numbers = group.piece * (of.num_k_heads * of.dim_k + of.num_heads * (of.dim_v + 1))
            inputs = group.piece * of.width
        return len(group.layers) * (numbers * STATE_BYTES + inputs * self.number_bytes)

    def state_flops(self, group: StateGroup) -> int:
        """Operations of one token in the group's layers.

        Its key and query on the state and on the piece's rows, half of them on average, and its share of the next
        state.
        """
        of = group.sizes
        a_head = 6 * of.dim_k * of.dim_v + 2 * group.piece * (of.dim_k + of.dim_v)
        return len(group.layers) * (of.num_heads * a_head + 2 * of.width * of.taps)

    def block_bytes(self, group: AnyGroup, block_size: int) -> int:
        """Bytes of one block of the group's layers."""
        return block_size * self.kv_bytes(group) if isinstance(group, CacheGroup) else self.state_bytes(group)

    def attention_flops(self, group: CacheGroup) -> int:
        """Operations of one query token and one key in the group's layers: a dot product and a weighted sum."""
        return 4 * len(group.layers) * group.heads.num_heads * group.heads.head_dim


def model_cost(config: DecoderConfig, dtype: torch.dtype, weights: WeightBytes | None = None) -> ModelCost:
    """What a model of that config has to read and to multiply, with a cache of that dtype.

    weights: None: all are of that dtype.
    """
    params: Counter[str] = Counter()
    for name, shape in weight_shapes(config).items():
        params[weight_use(config, name)] += math.prod(shape)
    if weights is None:
        weights = WeightBytes(**{use: count * dtype.itemsize for use, count in params.items()})
    chosen = sum(of.per_token * of.mlp.size for of in config.experts)
    return ModelCost(
        groups=config.groups,
        max_model_len=longest_sequence(config),
        layer_params=params["layers"],
        head_params=params["head"],
        number_bytes=dtype.itemsize,
        weights=weights,
        expert_params=params["experts"],
        expert_share=chosen / sum(of.count * of.mlp.size for of in config.experts) if chosen else 0.0,
    )


def cost_of(model: Model) -> ModelCost:
    """What a loaded model has to read and to multiply; of one whose layers are not ours, as if none were quantised."""
    shape = model.config
    if isinstance(shape, DecoderConfig):
        return model_cost(shape, model.dtype, model.weight_bytes)
    return ModelCost(
        groups=shape.groups,
        max_model_len=model.max_model_len,
        layer_params=model.weight_bytes.layers // model.dtype.itemsize,
        head_params=shape.vocab_size * shape.hidden_size,
        number_bytes=model.dtype.itemsize,
        weights=model.weight_bytes,
    )


def assumed_prompt_token(model: ModelCost) -> float:
    """Seconds that a token of a prompt takes, until steps have shown it."""
    return model.linear_flops(1, 0) / DEVICES["cpu"].flops_per_second


class StepWork(NamedTuple):
    """What a step reads and multiplies."""

    num_tokens: int  # rows of the linears
    num_drawn: int  # of these, rows that draw a token
    num_sequences: int
    weight_bytes: float
    cache_bytes: float  # keys, values and states, read and written
    linear_flops: float
    attention_flops: float
    moved_bytes: float  # to the host and back
    num_begun: int = 0  # requests whose first tokens it computes
    context_flops: float = 0.0  # of those of attention, the ones with keys that earlier steps computed
    num_decoding: int = 0  # sequences that get one token after another


class CostModel:
    """Seconds of a step: what it reads over the memory's rate, or what it multiplies over the arithmetic units'.

    Every step reads all weights, of experts those that somebody chose; every request its keys and values. Left out is
    what is the same for every plan, such as launching kernels, and what sharing could save, such as reading a common
    prefix once.
    """

    def __init__(self, model: ModelCost, device: Device, block_size: int) -> None:
        self.model = model
        self.device = device
        self.block_bytes = [model.block_bytes(group, block_size) for group in model.groups]
        attention = [group for group in model.groups if isinstance(group, CacheGroup)]
        self.kv_bytes = sum(map(model.kv_bytes, attention))
        self.pair_flops = sum(map(model.attention_flops, attention))
        self._decode: dict[int, tuple[float, float]] = {}  # by sequences: bytes of weights and operations of linears

    def seconds(self, plan: Plan, num_drawn: int, num_decoding: int = 0, keys: int = 0) -> float:
        """How long a step takes in which that many requests draw a token. To be asked before its commit.

        num_decoding: of these, the ones that get a token besides the plan's items. keys: that those see.
        """
        return self.time_of(self.work_of(plan, num_drawn, num_decoding, keys))

    def time_of(self, work: StepWork) -> float:
        """Seconds of a step with that much work."""
        size, flops = work.weight_bytes + work.cache_bytes, work.linear_flops + work.attention_flops
        seconds = max(size / self.device.bytes_per_second, flops / self.device.flops_per_second)
        return seconds + work.moved_bytes / self.device.link_bytes_per_second

    def work_of(self, plan: Plan, num_drawn: int, num_decoding: int = 0, keys: int = 0) -> StepWork:
        """What a step reads and multiplies; as `seconds`. With num_decoding, for layers that attend to all tokens."""
        model, num_tokens = self.model, plan.num_tokens + num_decoding
        size: float = 2 * self._moved(plan.copies)
        flops = with_context = 0
        for group, block_bytes in zip(model.groups, self.block_bytes, strict=True):
            if isinstance(group, CacheGroup):
                seen, pairs = attended(plan.items, group.window)
                size += (seen + keys + num_tokens) * model.kv_bytes(group)
                flops += (pairs + keys) * model.attention_flops(group)
                earlier = with_earlier(plan.items, group.window) + keys - num_decoding
                with_context += earlier * model.attention_flops(group)
            else:
                size += recalled(plan.items, group) * block_bytes
                flops += num_tokens * model.state_flops(group) if isinstance(group, StateGroup) else 0
        return StepWork(
            num_tokens,
            num_drawn,
            len(plan.items) + num_decoding,
            model.weight_bytes(num_tokens) if num_tokens else 0,
            size,
            model.linear_flops(num_tokens, num_drawn) if num_tokens else 0,
            flops,
            self._moved(plan.swap_out) + self._moved(plan.swap_in),
            sum([_begins(item) for item in plan.items]),
            with_context,
            num_decoding + sum([item.start >= item.request.num_prompt for item in plan.items]),
        )

    def decode_seconds(self, num_sequences: int, keys: int) -> float:
        """How long a step takes in which so many sequences decode, which see so many keys; as `seconds` of its plan.

        Only for models all of whose layers attend to all tokens.
        """
        return float(self.decoder(num_sequences)(keys))

    def decoder(self, num_sequences: int, *, many: bool = False) -> Callable[[Any], Any]:
        """The same for each number of keys. many: for arrays of such numbers instead, with the same results."""
        weight_bytes, linear_flops = self.decode_work(num_sequences)
        kv_bytes, pair_flops, device = self.kv_bytes, self.pair_flops, self.device
        longer = np.maximum if many else max

        def seconds(keys: Any) -> Any:
            size, flops = weight_bytes + (keys + num_sequences) * kv_bytes, linear_flops + keys * pair_flops
            return longer(size / device.bytes_per_second, flops / device.flops_per_second)

        return seconds

    def decode_ends(self, num_sequences: int, keys: int, now: float, steps: int) -> list[float]:
        """When steps end that begin now, in each of which so many sequences decode. keys: that they see before."""
        if steps < MANY:
            seconds, ends = self.decoder(num_sequences), []
            for _ in range(steps):
                keys += num_sequences
                now += seconds(keys)
                ends.append(now)
            return ends
        durations = self.decoder(num_sequences, many=True)(keys + num_sequences * np.arange(1, steps + 1))
        durations[0] += now
        return np.add.accumulate(durations).tolist()  # type: ignore[no-any-return]

    def decode_work(self, num_sequences: int) -> tuple[float, float]:
        """Bytes of weights and operations of linears of a step in which so many sequences decode."""
        if num_sequences not in self._decode:
            self._decode[num_sequences] = (
                self.model.weight_bytes(num_sequences),
                self.model.linear_flops(num_sequences, num_sequences),
            )
        return self._decode[num_sequences]

    @property
    def seconds_a_prompt_token(self) -> float:
        """Of a long prompt, its attention left out."""
        return self.model.linear_flops(1, 0) / self.device.flops_per_second

    def _moved(self, moves: Sequence[Move]) -> int:
        return sum(self.block_bytes[move.group] for move in moves)


def measured_read_rate(size: int = 2**28) -> float:
    """Bytes a second that this machine's cores read from memory: the best of a few sums over that many bytes."""
    numbers, seconds = torch.ones(size // 4), []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return size / min(seconds)


def _begins(item: PlanItem) -> bool:
    """Whether a request's first tokens are computed. Of a prompt that is cached, that is the last one."""
    request = item.request
    return not request.num_generated and item.start <= min(request.cache.num_cached, request.num_prompt - 1)


def attended(items: Sequence[PlanItem], window: int | None) -> tuple[int, int]:
    """Keys that a step reads, each once for every request, and pairs of a query token and a key that it sees."""
    keys = pairs = 0
    if window is None:
        for item in items:
            num_new, context = item.num_rows, item.start + item.num_rows
            keys += context
            pairs += num_new * context - num_new * (num_new - 1) // 2
    else:
        for item in items:
            num_new, context = item.num_rows, item.start + item.num_rows
            keys += min(context, window - 1 + num_new)
            pairs += _seen(context, window) - _seen(item.start, window)
    return keys, pairs


def with_earlier(items: Sequence[PlanItem], window: int | None) -> int:
    """Pairs of a query token and a key that an earlier step computed. Those of a sliding window are not counted."""
    return 0 if window is not None else sum([item.num_rows * item.start for item in items])


def recalled(items: Sequence[PlanItem], group: StateGroup | RowGroup) -> float:
    """Blocks of the group that a step reads and writes.

    A state where a request begins and one where it ends another piece, and the rows of the piece in between.
    """
    piece, blocks = group.piece, 0.0
    for item in items:
        end = item.start + item.num_rows
        if isinstance(group, StateGroup):
            blocks += (item.start >= piece) + (end // piece > item.start // piece)
        else:
            blocks += (item.start % piece + min(item.num_rows, end % piece)) / piece
    return blocks


def _seen(num_tokens: int, window: int) -> int:
    """Keys that the first tokens of a sequence see, all together."""
    whole = min(num_tokens, window)
    return whole * (whole + 1) // 2 + (num_tokens - whole) * window
