"""Cost model of a step: its bytes and operations over the device's rates."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.cache.groups import AnyGroup, CacheGroup, RowGroup, StateGroup
from quire.cache.manager import Move
from quire.engine.plan import Plan, PlanItem
from quire.models import longest_sequence
from quire.models.decoder_config import DecoderConfig, IndexConfig, LatentConfig, weight_shapes, weight_use
from quire.models.model import Model, WeightBytes


@dataclass(frozen=True)
class Device:
    """The rates of a machine, as far as a model can achieve them."""

    name: str
    bytes_per_second: float  # read from the memory of the weights and the cache
    flops_per_second: float
    link_bytes_per_second: float  # between that memory and the host's


# The CPU: two Zen 5 cores, measured with bfloat16. The GPU: 90 % and 70 % of its data sheet, which are achievable.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "cpu": Device("cpu", 42e9, 0.8e12, 21e9),  # a swap there reads and writes the same memory
        "h200": Device("h200", 0.9 * 4.8e12, 0.7 * 989e12, 54e9),
    }
)


MANY = 24  # steps: from here on, computing them all at once is faster
STATE_BYTES = 4  # of one number of a state, in fp32


@dataclass(frozen=True)
class ModelCost:
    """The bytes that a model has to read and the operations that it has to do."""

    groups: tuple[AnyGroup, ...]
    max_model_len: int  # tokens of the longest sequence
    layer_params: int  # multiplied with every token; without those of experts
    head_params: int  # of the output projection: only for rows that draw a token
    number_bytes: int  # of an element of K and V, and of a convolution's inputs
    weights: WeightBytes
    expert_params: int = 0  # of all experts of all layers
    expert_share: float = 0.0  # share of a layer's experts that a token uses
    layer_reads: float = 1.0  # times that a step reads the layers' weights: several layers may use the same
    indexes: Mapping[int, IndexConfig] = field(default_factory=dict)  # by the number of a group of sparse attention

    def weight_bytes(self, num_tokens: int) -> float:
        """Return the bytes of weights read by a step of `num_tokens` tokens, if they choose their experts at random."""
        read = 1 - (1 - self.expert_share) ** num_tokens
        return self.weights.layers * self.layer_reads + self.weights.head + self.weights.experts * read

    def linear_flops(self, num_tokens: int, num_drawn: int) -> float:
        """Return the operations of a step's linears if `num_drawn` of its tokens draw the next one."""
        a_token = self.layer_params + self.expert_params * self.expert_share
        return 2 * (num_tokens * a_token + num_drawn * self.head_params)

    def kv_bytes(self, group: CacheGroup) -> int:
        """Return the bytes of one token's K and V in the group's layers, with its keys of indexers."""
        return len(group.layers) * group.heads.numbers * self.number_bytes

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the KV cache of one sequence."""
        attention = [group for group in self.groups if isinstance(group, CacheGroup)]
        return sum(self.kv_bytes(group) * min(num_tokens, group.window or num_tokens) for group in attention)

    def decode_rate(self, bytes_per_second: float) -> float:
        """Return the tokens per second of one sequence on a machine that reads weights at this rate."""
        return bytes_per_second / max(self.weight_bytes(1), 1)

    def state_bytes(self, group: StateGroup | RowGroup) -> int:
        """Return the bytes of one block of the group's layers: of a state, or of the rows of a piece."""
        of = group.sizes
        if isinstance(group, StateGroup):
            numbers, inputs = of.num_heads * of.dim_k * of.dim_v, (of.taps - 1) * of.width
        else:
            numbers = group.piece * (of.num_k_heads * of.dim_k + of.num_heads * (of.dim_v + 1))
            inputs = group.piece * of.width
        return len(group.layers) * (numbers * STATE_BYTES + inputs * self.number_bytes)

    def state_flops(self, group: StateGroup) -> int:
        """Return the operations of one token in the group's layers.

        They are its key and query with the state and with the piece's rows, half of them on average, and its share of
        the next state.
        """
        of = group.sizes
        a_head = 6 * of.dim_k * of.dim_v + 2 * group.piece * (of.dim_k + of.dim_v)
        return len(group.layers) * (of.num_heads * a_head + 2 * of.width * of.taps)

    def block_bytes(self, group: AnyGroup, block_size: int) -> int:
        """Return the bytes of one block of the group's layers."""
        return block_size * self.kv_bytes(group) if isinstance(group, CacheGroup) else self.state_bytes(group)

    def attention_flops(self, group: CacheGroup) -> int:
        """Return the operations of a query token and a key in the group's layers: a dot product and a weighted sum."""
        return 4 * len(group.layers) * group.heads.num_heads * group.heads.head_dim


def model_cost(config: DecoderConfig, dtype: torch.dtype, weights: WeightBytes | None = None) -> ModelCost:
    """Return the cost of a model of that config, with a cache of that dtype. weights: None: all have that dtype."""
    params: Counter[str] = Counter()
    uses, shared = Counter(layer.aside.weights_of for layer in config.layers if layer.aside is not None), 0
    for name, shape in weight_shapes(config).items():
        params[weight_use(config, name)] += math.prod(shape)
        if (holder := config.holder(name)) is not None:
            shared += (uses[holder] - 1) * math.prod(shape)
    if weights is None:
        weights = WeightBytes(**{use: count * dtype.itemsize for use, count in params.items()})
    chosen = sum(of.per_token * of.mlp.size for of in config.experts)
    return ModelCost(
        groups=config.groups,
        max_model_len=longest_sequence(config),
        layer_params=params["layers"] + shared,
        head_params=params["head"],
        number_bytes=dtype.itemsize,
        weights=weights,
        expert_params=params["experts"],
        expert_share=chosen / sum(of.count * of.mlp.size for of in config.experts) if chosen else 0.0,
        layer_reads=1.0 + shared / params["layers"],
        indexes={
            number: mixer.index
            for number, group in enumerate(config.groups)
            if isinstance(mixer := config.layers[group.layers[0]].mixer, LatentConfig) and mixer.index is not None
        },
    )


def cost_of(model: Model) -> ModelCost:
    """Return the cost of a loaded model. Weights of layers that are not Quire's count as not quantized."""
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
    """Return the assumed seconds per prompt token, used until steps have been measured."""
    return model.linear_flops(1, 0) / DEVICES["cpu"].flops_per_second


class StepWork(NamedTuple):
    """The reads and operations of a step."""

    num_tokens: int  # rows of the linears
    num_drawn: int  # of these, rows that draw a token
    num_sequences: int
    weight_bytes: float
    cache_bytes: float  # keys, values and states, read and written
    linear_flops: float
    attention_flops: float
    moved_bytes: float  # to and from the host
    num_begun: int = 0  # requests whose first tokens this step computes
    context_flops: float = 0.0  # part of attention_flops with keys that earlier steps computed
    num_decoding: int = 0  # sequences that decode, one token per step


class CostModel:
    """Predicts the seconds of a step: bytes read over the memory's rate, or operations over the arithmetic units' rate.

    Every step reads all weights, of experts those that a token chose; every request reads its keys and values, with
    sparse attention those that its tokens choose. Costs that are the same for every plan, such as kernel launches, and
    savings by sharing, such as reading a common prefix once, are left out.
    """

    def __init__(self, model: ModelCost, device: Device, block_size: int) -> None:
        self.model = model
        self.device = device
        self.block_bytes = [model.block_bytes(group, block_size) for group in model.groups]
        attention = [group for group in model.groups if isinstance(group, CacheGroup)]
        self.kv_bytes = sum(map(model.kv_bytes, attention))
        self.pair_flops = sum(map(model.attention_flops, attention))
        self._decode: dict[int, tuple[float, float]] = {}  # by num_sequences: weight bytes, operations of linears

    def seconds(self, plan: Plan, num_drawn: int, num_decoding: int = 0, keys: int = 0) -> float:
        """Return the seconds of a step in which `num_drawn` requests draw a token. Must be called before its commit.

        num_decoding: those of them that get a token in addition to the plan's items. keys: the keys that these attend
        to.
        """
        return self.time_of(self.work_of(plan, num_drawn, num_decoding, keys))

    def time_of(self, work: StepWork) -> float:
        """Return the seconds of a step with that much work."""
        size, flops = work.weight_bytes + work.cache_bytes, work.linear_flops + work.attention_flops
        seconds = max(size / self.device.bytes_per_second, flops / self.device.flops_per_second)
        return seconds + work.moved_bytes / self.device.link_bytes_per_second

    def work_of(self, plan: Plan, num_drawn: int, num_decoding: int = 0, keys: int = 0) -> StepWork:
        """Return the work of a step, see `seconds`. num_decoding: only if the layers attend to all tokens."""
        model, num_tokens = self.model, plan.num_tokens + num_decoding
        size: float = 2 * self._moved(plan.copies)
        flops = with_context = 0
        for number, (group, block_bytes) in enumerate(zip(model.groups, self.block_bytes, strict=True)):
            if isinstance(group, CacheGroup):
                read, both, earlier = self._attention(number, group, plan.items, num_decoding, keys)
                size += read + num_tokens * model.kv_bytes(group)
                flops, with_context = flops + both, with_context + earlier
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

    def _attention(
        self, number: int, group: CacheGroup, items: Sequence[PlanItem], num_decoding: int, keys: int
    ) -> tuple[int, int, int]:
        """Return the bytes that a group's attention reads, its operations, and those with keys of earlier steps."""
        seen, pairs = (found + keys for found in attended(items, group.window))
        earlier = with_earlier(items, group.window) + keys - num_decoding
        token_bytes, pair_flops = self.model.kv_bytes(group), self.model.attention_flops(group)
        if (index := self.model.indexes.get(number)) is None:
            return seen * token_bytes, pairs * pair_flops, earlier * pair_flops
        # The indexer reads its keys of all tokens; attention reads the chosen ones.
        index_bytes = token_bytes * group.heads.index_dim // group.heads.numbers
        index_flops = 2 * len(group.layers) * index.q_size if index_bytes else 0
        most = min(keys, num_decoding * index.top_k)
        chosen, chosen_pairs = (found + most for found in attended(items, None, index.top_k))
        size = seen * index_bytes + chosen * (token_bytes - index_bytes)
        return size, pairs * index_flops + chosen_pairs * pair_flops, earlier * index_flops

    def decode_seconds(self, num_sequences: int, keys: int) -> float:
        """Return the seconds of a step in which `num_sequences` sequences decode and attend to `keys` keys in total.

        Equals `seconds` of its plan. Only for models whose layers all attend to all tokens.
        """
        return float(self.decoder(num_sequences)(keys))

    def decoder(self, num_sequences: int, *, many: bool = False) -> Callable[[Any], Any]:
        """Return `decode_seconds` as a function of keys. many: of an array of them, with the same results."""
        weight_bytes, linear_flops = self.decode_work(num_sequences)
        kv_bytes, pair_flops, device = self.kv_bytes, self.pair_flops, self.device
        longer = np.maximum if many else max

        def seconds(keys: Any) -> Any:
            size, flops = weight_bytes + (keys + num_sequences) * kv_bytes, linear_flops + keys * pair_flops
            return longer(size / device.bytes_per_second, flops / device.flops_per_second)

        return seconds

    def decode_ends(self, num_sequences: int, keys: int, now: float, steps: int) -> list[float]:
        """Return the end times of `steps` decode steps that begin at `now`. keys: attended to before them."""
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
        """Return the weight bytes and the linears' operations of a step that decodes `num_sequences` sequences."""
        if num_sequences not in self._decode:
            self._decode[num_sequences] = (
                self.model.weight_bytes(num_sequences),
                self.model.linear_flops(num_sequences, num_sequences),
            )
        return self._decode[num_sequences]

    @property
    def seconds_a_prompt_token(self) -> float:
        """Seconds per token of a long prompt, without attention."""
        return self.model.linear_flops(1, 0) / self.device.flops_per_second

    def _moved(self, moves: Sequence[Move]) -> int:
        return sum(self.block_bytes[move.group] for move in moves)


def measured_read_rate(size: int = 2**28) -> float:
    """Measure the bytes per second that this machine reads from memory: the best of a few sums over `size` bytes."""
    numbers, seconds = torch.ones(size // 4), []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return size / min(seconds)


def _begins(item: PlanItem) -> bool:
    """Return whether the item computes a request's first tokens; of a fully cached prompt, that is its last one."""
    request = item.request
    return not request.num_generated and item.start <= min(request.cache.num_cached, request.num_prompt - 1)


def attended(items: Sequence[PlanItem], window: int | None, top_k: int | None = None) -> tuple[int, int]:
    """Return the keys that a step reads, once per request, and its pairs of a query token and an attended key.

    top_k: keys that each token chooses, different ones if there are as many; None: they are not chosen.
    """
    keys = pairs = 0
    most = window if top_k is None else top_k
    for item in items:
        num_new, context = item.num_rows, item.start + item.num_rows
        if most is None:
            keys += context
            pairs += num_new * context - num_new * (num_new - 1) // 2
        else:
            keys += min(context, most - 1 + num_new if top_k is None else most * num_new)
            pairs += _seen(context, most) - _seen(item.start, most)
    return keys, pairs


def with_earlier(items: Sequence[PlanItem], window: int | None) -> int:
    """Return the pairs of a query token and a key that an earlier step computed; 0 for a sliding window."""
    return 0 if window is not None else sum([item.num_rows * item.start for item in items])


def recalled(items: Sequence[PlanItem], group: StateGroup | RowGroup) -> float:
    """Return the number of the group's blocks that a step reads and writes.

    A state is read where a request's tokens begin and written where they complete a piece; the piece's rows between
    count too.
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
    """Return the number of keys that the first `num_tokens` tokens of a sequence attend to, summed over the tokens."""
    whole = min(num_tokens, window)
    return whole * (whole + 1) // 2 + (num_tokens - whole) * window
