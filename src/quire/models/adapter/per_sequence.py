"""One sequence at a time: models that compute attention themselves, or do not accept a row of several sequences.

Each sequence of a step runs through the model alone, with transformers' eager attention, positions and masks. The cache
is ours: it stores the new keys and values in the sequence's blocks and returns all of them, gathered.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from quire.errors import Unsupported
from quire.models.adapter.attention import AttentionStep, LayerCall
from quire.ops import AttentionPlan, AttentionSpec, Backend, PagedKV

PROBE = 2  # tokens


class Apart:
    """A way to run a step through a backbone: each sequence alone, with transformers' attention."""

    implementation = "eager"  # of attention
    note = ", one sequence at a time"
    rows_depend: str | None = "its attention is computed by transformers"

    def __init__(self, backbone: Any, backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
        """Run the backbone with two tokens and record which layers store keys and values.

        dtype: of keys and values. device: of the model, which may have no tensor left that shows it.

        Raises Unsupported if a layer stores anything but keys and values of each token.
        """
        self._backbone, self._backend, self._dtype = backbone, backend, dtype
        found = DynamicCache()
        tokens = torch.zeros(1, PROBE, dtype=torch.int64, device=device)
        with torch.inference_mode():
            self.output = backbone(input_ids=tokens, past_key_values=found, use_cache=True)
        self._stored: dict[int, int] = {}  # index of a layer in the model -> in the cache
        layers: list[LayerCall] = []
        for index, layer in enumerate(found.layers):
            if not layer.is_initialized:
                continue
            k, v = layer.keys, layer.values
            if k.dim() != 4 or v.dim() != 4 or not k.shape[2] == v.shape[2] == PROBE:
                raise Unsupported(
                    f"its layer {index} stores {tuple(k.shape)} and {tuple(v.shape)} of {PROBE} tokens, which are not "
                    "the keys and values of each"
                )
            self._stored[index] = len(layers)
            layers.append(LayerCall(k.shape[1], k.shape[1], k.shape[3], v.shape[3], None))
        if not layers:
            raise Unsupported("it keeps no keys and values in transformers' cache")
        self.layers = tuple(layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """None for each layer: all keys are stored, and the model's own masks apply windows."""
        return (None,) * len(self.layers)

    def hidden(self, step: AttentionStep) -> Tensor:
        """Return the hidden states of all rows: [T, H]. The model derives positions from the length of its cache."""
        first, parts = step.plans[0], []
        starts = first.query_starts[: first.num_seqs + 1].tolist()
        for s, (start, stop) in enumerate(pairwise(starts)):
            if start == stop:
                continue
            own = {plan: self._alone(plan, s, start, stop) for plan in set(step.plans)}
            length = int(first.context_lens[s])
            layers: list[_Nothing] = []
            for index in range(max(self._stored) + 1):
                if (stored := self._stored.get(index)) is None:
                    layers.append(_Nothing(length - (stop - start)))
                else:
                    plan = own[step.plans[stored]]
                    kv = step.cache.kv(stored)
                    layers.append(_Layer(self._backend, self._dtype, kv, plan, length - (stop - start)))
            ids = step.token_ids[None, start:stop]
            rows = None if step.lora_rows is None else step.lora_rows.part(slice(start, stop))
            with step.current_lora.of(rows):
                parts.append(self._backbone(input_ids=ids, past_key_values=Cache(layers=layers), use_cache=True)[0][0])
            for layer in layers:
                if isinstance(layer, _Layer) and layer.length != length:
                    raise Unsupported(f"a layer stored {layer.length} tokens of a sequence of {length}")
            for plan, alone in own.items():
                plan.nonfinite[start:stop] |= alone.nonfinite
        return torch.cat(parts)

    def _alone(self, plan: AttentionPlan, s: int, start: int, stop: int) -> AttentionPlan:
        """Return a plan for sequence s alone, which has the rows start..stop."""
        return self._backend.plan(
            plan.spec,
            torch.tensor([0, stop - start], dtype=torch.int32),
            plan.context_lens[s : s + 1].cpu(),
            plan.block_tables[s : s + 1].cpu(),
            plan.slots[start:stop].cpu().long(),
        )


class _Nothing(CacheLayerMixin):  # type: ignore[misc]
    """A layer that stores nothing."""

    is_sliding = False

    def __init__(self, length: int) -> None:
        """Start a step. length: tokens of the sequence that were computed before."""
        super().__init__()
        self.length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing."""

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Raise Unsupported."""
        raise Unsupported("a layer stores keys and values that stored none when the model was loaded")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys in the next step, and the position of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1, which means no limit."""
        return -1


class _Layer(_Nothing):
    """One layer's keys and values of one sequence."""

    def __init__(self, backend: Backend, dtype: torch.dtype, kv: PagedKV, plan: AttentionPlan, length: int) -> None:
        """Start a step. dtype: of stored keys and values. plan: of this sequence alone."""
        super().__init__(length)
        self.backend, self.dtype, self.kv, self.plan = backend, dtype, kv, plan
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values of the new tokens, [1, Hkv, n, D]. Return all: [1, Hkv, context length, D]."""
        new = (key_states, value_states)
        width = self.kv.k.shape[3]
        k, v = (F.pad(x[0].transpose(0, 1).to(self.dtype), (0, width - x.shape[3])).contiguous() for x in new)
        self.backend.write_kv(k, v, self.kv, self.plan)
        self.length += key_states.shape[2]
        spec: AttentionSpec = self.plan.spec
        blocks = self.plan.block_tables[0, : -(-self.length // spec.block_size)].long()
        sides = ((self.kv.k, self.kv.k_scale), (self.kv.v, self.kv.v_scale))
        self.keys, self.values = (
            _gathered(stored, scale, blocks, self.length, like)
            for (stored, scale), like in zip(sides, new, strict=True)
        )
        return self.keys, self.values


def _gathered(
    stored: Tensor,  # [N, Hkv, B, D]
    scale: Tensor | None,  # fp32 [N, Hkv, B], of integers
    blocks: Tensor,  # int64 [n]
    length: int,
    like: Tensor,  # [1, Hkv, _, size]
) -> Tensor:
    """Gather the first `length` rows of these blocks: [1, Hkv, length, size]."""
    blocks = blocks.to(stored.device)
    found = stored[blocks][..., : like.shape[3]]
    if scale is not None:
        found = found.float() * scale[blocks][..., None]
    return found.transpose(0, 1).flatten(1, 2)[None, :, :length].to(like.dtype)
