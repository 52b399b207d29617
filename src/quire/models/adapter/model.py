"""Models without a family here: transformers' modelling code over a paged KV cache.

Linears are those of Quire's decoder, and logits are computed only for the requested rows. There are two ways to run
the rows of a step through the layers: all together, with paged attention, or one sequence at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.cache.groups import CacheGroup, plans_of_layers
from quire.cache.storage import KVCache
from quire.errors import Unsupported
from quire.models.adapter.attention import AttentionStep
from quire.models.adapter.lora import CurrentLora
from quire.models.adapter.modules import (
    Packing,
    leave_files,
    replace_activations,
    replace_linears,
    replace_rope,
    replace_tied_embedding,
    rows_depend,
)
from quire.models.adapter.per_sequence import Apart
from quire.models.adapter.ragged import Together
from quire.models.batch import Batch
from quire.models.lora.slots import LoraLimits, Loras, LoraTables, Target
from quire.models.model import Head, WeightBytes, attention_width, cache_groups, mlp_width
from quire.models.pooling import Pooler
from quire.models.pooling_config import PoolingConfig
from quire.models.quantisation.policy import Quantisation
from quire.ops import AttentionPlan, Backend
from quire.ops.collectives import Communicator
from quire.ops.program import Plan
from quire.ops.weights.lora import LoraRows


class AdaptedModel:
    """A causal language model of transformers with the interface of `Decoder`."""

    def __init__(
        self,
        model: Any,  # a PreTrainedModel that was created with the attention implementation of `way`
        backend: Backend,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        reproducible: bool = False,
        quantisation: Quantisation = Quantisation(),  # noqa: B008  # frozen
        way: type[Together | Apart] = Together,
        lora: LoraLimits | None = None,
    ) -> None:
        """Take over a model and replace its linears by ours.

        way: runs a step through the model. lora: limits of LoRA adapters; None: no adapters.

        Raises Unsupported, with the reason, if a trial with two tokens shows that the model cannot be served.
        """
        self.backend, self.max_model_len, self.eos_token_ids = backend, max_model_len, eos_token_ids
        self.dtype, self.device = model.dtype, model.device
        self._lock = Lock()
        linears = backend.linears(str(model.device), reproducible)
        packing = Packing(linears, quantisation, self.dtype, str(self.device))
        replace_tied_embedding(model, packing)
        lora_tables = None if lora is None else LoraTables(linears, self.dtype, lora)
        self._current_lora = CurrentLora()
        replace_linears(model, packing, self._current_lora, lora_tables)
        self.exchange: Communicator | None = None
        self.draft_head: Head | None = None
        self.loras: Loras | None = None
        if lora is not None and lora_tables is not None:
            own = lora_tables.by_name.items()
            targets = {name: Target(table, "", 0, table.out_size) for name, table in own}
            self.loras = Loras(targets, lora, self.dtype, self.device)
        replace_activations(model, backend)
        replace_rope(model, max_model_len)
        leave_files(model)
        left = [weight for weight in model.parameters() if not weight.is_meta]
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        looked_up = sum(weight.nbytes for weight in left if id(weight) in tables)
        multiplied = packing.layer_bytes + sum(weight.nbytes for weight in left) - looked_up
        self.weight_bytes = WeightBytes(layers=multiplied, head=packing.head_bytes, looked_up=looked_up)
        self.quantisation = quantisation.description
        if quantisation.linears is not None and any(weight.dim() == 3 for weight in left):
            self.quantisation = f"{self.quantisation}; experts not quantised"  # transformers computes these
        # For example the decoder within OPT. Some models name their output projection "decoder", or rename their base.
        parts = [model.get_decoder(), model.base_model, *model.children()]
        found = [part for part in parts if isinstance(part, PreTrainedModel) and part is not model]
        if not found:
            raise Unsupported(f"{type(model).__name__} has no part that ends before its logits")
        self._backbone = found[0]
        self._way = way(self._backbone, backend, self.dtype, self.device)
        output = self._way.output
        self._head = _Head(model, self._backbone, output)
        self.pooler = Pooler(PoolingConfig(size=output[0].shape[-1]))
        self.config = self.whole = _shape(model, self._way, output[0].shape[-1])
        groups = plans_of_layers(self.config.groups)
        self._group_of_layer = [groups[layer] for layer in range(len(groups))]
        self.rows_depend = way.rows_depend or rows_depend(model)  # reason why the model is not batch-invariant, or None

    @property
    def rows_are_batch_invariant(self) -> bool:
        """True if transformers' part of the computation is batch-invariant."""
        return self.rows_depend is None

    capturable = False  # transformers' code may synchronise with the host
    origin = "adapter"  # `load_model` adds the reason

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[Plan], rows: Tensor | None = None) -> Tensor:
        """Return the input of the output projection: [T, H], or [R, H] for the rows int64 [R]."""
        own = [plan for plan in plans if isinstance(plan, AttentionPlan)]  # these models have no recurrent layers
        tokens, positions = batch.token_ids.to(self.device), batch.positions.to(self.device)
        hidden = self.run(tokens, positions, cache, own, batch.lora_slots)
        return hidden if rows is None else hidden[rows]

    def run(
        self,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
        cache: KVCache,
        plans: Sequence[AttentionPlan],
        lora_slots: Tensor | None = None,  # int32 [T]
    ) -> Tensor:
        """Return the hidden states of all rows: [T, H]."""
        with self._lock:  # engines on several threads may share the model
            by_layer = [plans[g] for g in self._group_of_layer]
            rows = None if lora_slots is None else LoraRows(lora_slots)
            return self._way.hidden(AttentionStep(token_ids, positions, cache, by_layer, self._current_lora, rows))

    def logits(
        self,
        hidden: Tensor,  # [R, H]
    ) -> Tensor:
        """Return logits over the vocabulary: fp32 [R, V]."""
        with self._lock:
            return self._head.of(hidden)


@dataclass(frozen=True)
class AdaptedShape:
    """The sizes of a transformers model that determine memory use and attention plans."""

    vocab_size: int  # V
    hidden_size: int  # H
    layer_width: int  # most numbers that a layer computes per row, in addition to the residual, its norm and a branch
    groups: tuple[CacheGroup, ...]
    causal = True
    has_head = True

    @property
    def num_token_ids(self) -> int:
        """V."""
        return self.vocab_size


class _Head:
    """The part of a causal language model after its backbone: projection, scaling, caps."""

    def __init__(self, model: Any, backbone: nn.Module, output: Any) -> None:
        """Split off the head. output: a result of the backbone, whose first entry is the hidden states."""
        self._stub = _Stub(output)
        path = next(name for name, module in model.named_modules() if module is backbone).split(".")
        self._model = _with(model, path, self._stub)

    def of(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states [R, H]: fp32 [R, V]."""
        self._stub.hidden = hidden[None]
        token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        return logits.float()


def _with(module: Any, path: Sequence[str], replacement: nn.Module) -> Any:
    """Return a copy of a module with the part at `path` replaced. All other parts are shared."""
    if not path:
        return replacement
    changed = copy.copy(module)
    part = _with(module._modules[path[0]], path[1:], replacement)
    changed.__dict__["_modules"] = {**module._modules, path[0]: part}
    return changed


class _Stub(nn.Module):
    """A replacement of the backbone that returns given hidden states."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._kind = type(output)
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._kind(last_hidden_state=self.hidden)


def _shape(model: Any, way: Together | Apart, hidden_size: int) -> AdaptedShape:
    config = model.config.get_text_config()
    heads = [layer.heads for layer in way.layers]
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = max(inner) if isinstance(inner, list) else inner
    chosen = getattr(config, "num_experts_per_tok", None) or 0  # each chosen expert computes separate rows
    return AdaptedShape(
        config.vocab_size,
        hidden_size,
        max(map(attention_width, heads)) + mlp_width(max(inner, chosen * 2 * config.hidden_size)),
        cache_groups(list(zip(heads, way.windows, strict=True))),
    )
