"""A small random model whose layers alternate between a state and attention, computed operator by operator.

Products are formed row by row, so a row has the same bits in every batch as far as the operators give it them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.cache.groups import AnyGroup, CacheGroup, Heads, StateSizes
from quire.cache.storage import KVCache, state_groups
from quire.config import engine_config
from quire.engine.engine import Engine, build_engine
from quire.models.batch import Batch
from quire.models.model import WeightBytes
from quire.models.pooling import Pooler
from quire.models.pooling_config import PoolingConfig
from quire.ops import AttentionPlan, RecurrentCache, RecurrentPlan, load
from quire.ops.program import Plan

VOCABULARY, WIDTH = 500, 32
HEADS = Heads(4, 2, 16)
SIZES = StateSizes(num_heads=4, num_k_heads=2, dim_k=8, dim_v=16, width=2 * 2 * 8 + 4 * 16, taps=4)


@dataclass(frozen=True)
class Shape:
    """Layers 0 and 2 keep a state, layer 1 attends to all keys and layer 3 to a window."""

    vocab_size: int = VOCABULARY
    num_token_ids: int = VOCABULARY
    causal: bool = True
    has_head: bool = True
    hidden_size: int = WIDTH
    layer_width: int = 8 * WIDTH
    groups: tuple[AnyGroup, ...] = field(
        default_factory=lambda: (
            CacheGroup((1,), None, HEADS),
            CacheGroup((3,), 19, HEADS),
            *state_groups((0, 2), SIZES),
        )
    )


class StatefulModel:
    """As `quire.models.model.Model`."""

    origin, quantisation, weight_bytes, draft_head = "a test", None, WeightBytes(), None
    max_model_len, eos_token_ids = 2_048, frozenset[int]()
    rows_are_batch_invariant, capturable = True, False
    loras = exchange = None
    pooler = Pooler(PoolingConfig(size=WIDTH))

    def __init__(self, dtype: torch.dtype, shape: Shape = Shape()) -> None:
        self.dtype, self.config, self.backend = dtype, shape, load("auto")
        self.whole = self.config
        generator = torch.Generator().manual_seed(4)

        def weight(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5

        self.embedding = weight(VOCABULARY, WIDTH) * WIDTH**0.5
        own, attends = SIZES, HEADS
        self.linears = {
            "qkv": weight(4, own.width, WIDTH),
            "gates": weight(4, 2 * own.num_heads, WIDTH),
            "state out": weight(4, WIDTH, own.num_heads * own.dim_v),
            "attended": weight(4, (attends.num_heads + 2 * attends.num_kv_heads) * attends.head_dim, WIDTH),
            "out": weight(4, WIDTH, attends.num_heads * attends.head_dim),
        }
        self.taps = weight(4, own.width, own.taps)
        self.decay_rate = -torch.rand(own.num_heads, generator=generator) * 0.3
        self.dt_bias = torch.randn(own.num_heads, generator=generator)

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[Plan], rows: Tensor | None = None) -> Tensor:
        """Hidden states: [T, H]."""
        x = self.embedding[batch.token_ids].to(self.dtype)
        for layer in range(4):
            normed = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            kept = cache.layer(layer)
            if isinstance(kept, RecurrentCache):
                x = x + self._recalled(layer, normed, kept, plans[2])
            else:
                x = x + self._attended(layer, normed, cache, plans[layer // 2])
        return x if rows is None else x[rows]

    def _linear(self, name: str, layer: int, x: Tensor) -> Tensor:
        return torch.stack([self.linears[name][layer] @ row for row in x.float()]).to(self.dtype)

    def _recalled(self, layer: int, x: Tensor, cache: RecurrentCache, plan: Plan) -> Tensor:
        assert isinstance(plan, RecurrentPlan)
        qkv = self.backend.convolve(self._linear("qkv", layer, x), self.taps[layer], None, "silu", cache, plan)
        gates = self._linear("gates", layer, x)
        out = self.backend.gated_delta(qkv, gates, self.decay_rate, self.dt_bias, cache, plan)
        return self._linear("state out", layer, out)

    def _attended(self, layer: int, x: Tensor, cache: KVCache, plan: Plan) -> Tensor:
        assert isinstance(plan, AttentionPlan)
        heads = self._linear("attended", layer, x).view(len(x), -1, HEADS.head_dim)
        q, k, v = heads.split([HEADS.num_heads, HEADS.num_kv_heads, HEADS.num_kv_heads], 1)
        self.backend.write_kv(k.contiguous(), v.contiguous(), cache.kv(layer), plan)
        return self._linear("out", layer, self.backend.attention(q.contiguous(), cache.kv(layer), plan).flatten(1))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V]."""
        return torch.stack([self.embedding @ row for row in hidden.float()]) * 0.3


def stateful_engine(dtype: torch.dtype, **options: object) -> Engine:
    """An engine of the model, with any options."""
    model = StatefulModel(dtype)
    asked = {"num_blocks": 64, "num_speculative_tokens": 0, "state_snapshot_interval": 32} | options
    return build_engine(model, model.backend, engine_config(**asked))
