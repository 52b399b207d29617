"""Models that have no family here: transformers' own modelling code, with paged attention in place of its own.

The batch comes flattened, as one row of tokens with their positions. No masks are built, transformers keeps no cache,
linears are those of Quire's decoder, and logits are made only of the rows that are asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from quire.batch import Batch
from quire.cache.groups import CacheGroup, Heads, plans_of_layers
from quire.cache.storage import KVCache
from quire.errors import Unsupported
from quire.models.adapter.attention import NAME, LayerCall, PagedPass, Pass, Passes, Recorder, attention
from quire.models.adapter.modules import (
    Packing,
    leave_files,
    replace_activations,
    replace_linears,
    replace_rope,
    replace_tied_embedding,
    rows_depend,
)
from quire.models.model import WeightBytes, attention_width, cache_groups, mlp_width
from quire.models.quantisation.policy import Quantisation
from quire.ops import AttentionPlan, Backend
from quire.ops.program import Plan


class AdaptedModel:
    """A causal language model of transformers with the interface of `Decoder`."""

    def __init__(
        self,
        model: Any,  # a PreTrainedModel that was made with attn_implementation=NAME
        backend: Backend,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        reproducible: bool = False,
        quantisation: Quantisation = Quantisation(),  # noqa: B008  # frozen
    ) -> None:
        """Take the model over: its linears are replaced by ours.

        Raises Unsupported, with the reason, where a trial with two tokens shows a model that cannot be served.
        """
        self.backend, self.max_model_len, self.eos_token_ids = backend, max_model_len, eos_token_ids
        self.dtype, self.device = model.dtype, model.device
        self._lock = Lock()
        self._passes = Passes()
        linears = backend.linears(str(model.device), reproducible)
        packing = Packing(linears, quantisation, self.dtype, str(self.device))
        replace_tied_embedding(model, packing)
        replace_linears(model, packing)
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
            self.quantisation = f"{self.quantisation}; experts not quantised"  # transformers multiplies these
        # The decoder within an OPT, say; some call their output projection a decoder.
        inner = model.get_decoder()
        self._backbone = inner if isinstance(inner, PreTrainedModel) and inner is not model else model.base_model
        if self._backbone is model:
            raise Unsupported(f"{type(model).__name__} has no part that ends before its logits")
        for module in model.modules():
            module.quire_passes = self._passes
        self._layers, output = self._tried(model)
        self._head = _Head(model, self._backbone, output)
        self.config = _shape(model, self._layers, output[0].shape[-1])
        self._group_of_layer = plans_of_layers(self.config.groups)
        self.rows_depend = rows_depend(model)  # why a row's bits may depend on the rows beside it

    @property
    def rows_keep_bits(self) -> bool:
        """Whether what transformers computes here gives a row the same bits in every batch."""
        return self.rows_depend is None

    capturable = False  # transformers' code may ask the host
    origin = "adapter"  # whoever chose it adds why

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[Plan], rows: Tensor | None = None) -> Tensor:
        """Hidden states as the model hands them to its output projection: [T, H], or [R, H] of the rows int64 [R]."""
        own = [plan for plan in plans if isinstance(plan, AttentionPlan)]  # it has no layers that keep a state
        hidden = self.run(batch.token_ids.to(self.device), batch.positions.to(self.device), cache, own)
        return hidden if rows is None else hidden[rows]

    def run(
        self,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
        cache: KVCache,
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        """Hidden states of all rows: [T, H]."""
        step = PagedPass(self.backend, cache, plans, self._group_of_layer, self._layers, self.dtype)
        with self._during(step):
            hidden: Tensor = _called(self._backbone, token_ids, positions)[0][0]
        if step.done != len(self._layers):
            raise Unsupported(f"the model called attention {step.done} times; when it was loaded {len(self._layers)}")
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [R, H]
    ) -> Tensor:
        """Logits over the vocabulary: fp32 [R, V]."""
        with self._lock:
            return self._head.of(hidden)

    @contextmanager
    def _during(self, step: Pass) -> Iterator[None]:
        with self._lock:  # engines on several threads may share the model
            self._passes.current = step
            try:
                yield
            finally:
                self._passes.current = None

    def _tried(self, model: Any) -> tuple[tuple[LayerCall, ...], Any]:
        """What each layer asks for, and what the backbone returns, from a run with two tokens."""
        recorder = Recorder()
        tokens = torch.zeros(2, dtype=torch.int64, device=self.device)
        with torch.inference_mode(), self._during(recorder):
            output = _called(self._backbone, tokens, torch.arange(2, device=self.device))
        layers = tuple(recorder.calls)
        depth = model.config.get_text_config().num_hidden_layers
        if len(layers) != depth:
            raise Unsupported(f"its {depth} layers called attention {len(layers)} times; each must call it once")
        return layers, output


@dataclass(frozen=True)
class AdaptedShape:
    """The sizes of a model of transformers that decide about memory and about the attention plans."""

    vocab_size: int  # V
    hidden_size: int  # H
    layer_width: int  # numbers that a layer computes of a row at most, besides the residual, its norm and a branch
    groups: tuple[CacheGroup, ...]


class _Head:
    """What a causal language model does after its backbone: projection, scaling, caps."""

    def __init__(self, model: Any, backbone: nn.Module, output: Any) -> None:
        """output: what the backbone returned once; its hidden states come first."""
        self._stub = _Stub(output)
        path = next(name for name, module in model.named_modules() if module is backbone).split(".")
        self._model = _with(model, path, self._stub)

    def of(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [R, H]: fp32 [R, V]."""
        self._stub.hidden = hidden[None]
        token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        return logits.float()


def _with(module: Any, path: Sequence[str], replacement: nn.Module) -> Any:
    """A module with the same parts but one, the one at `path`."""
    if not path:
        return replacement
    changed = copy.copy(module)
    part = _with(module._modules[path[0]], path[1:], replacement)
    changed.__dict__["_modules"] = {**module._modules, path[0]: part}
    return changed


class _Stub(nn.Module):
    """Stands for the backbone, and returns what it is given."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._kind = type(output)
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._kind(last_hidden_state=self.hidden)


def _called(backbone: Any, token_ids: Tensor, positions: Tensor) -> Any:
    return backbone(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)


def _shape(model: Any, layers: tuple[LayerCall, ...], hidden_size: int) -> AdaptedShape:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    windows = []
    for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        window = layer.window
        if kind == "sliding_attention" and window is None:
            window = getattr(config, "sliding_window", None)
        if kind == "full_attention" and window is not None:
            raise Unsupported(f"layer {i} is of full attention and asks for a window of {window}")
        windows.append(window)
    heads = [Heads(layer.num_heads, layer.num_kv_heads, layer.width) for layer in layers]
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = max(inner) if isinstance(inner, list) else inner
    chosen = getattr(config, "num_experts_per_tok", None) or 0  # each computes rows of their own
    return AdaptedShape(
        config.vocab_size,
        hidden_size,
        max(map(attention_width, heads)) + mlp_width(max(inner, chosen * 2 * config.hidden_size)),
        cache_groups(list(zip(heads, windows, strict=True))),
    )


AttentionInterface.register(NAME, attention)
