"""Quire's replacements for modules of transformers models: linears, activations, and tables of RoPE angles.

They are faster, and batch-invariant. Torch's SiLU, for example, is not: it computes the end of an array, and of each
thread's part of it, differently than the rest.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.pytorch_utils import Conv1D

from quire.errors import Unsupported
from quire.models.adapter.lora import CurrentLora
from quire.models.lora.slots import LoraTables
from quire.models.quantisation.policy import Quantisation
from quire.ops import Backend
from quire.ops.activation import Activation
from quire.ops.weights.gguf_blocks import BlockWeight
from quire.ops.weights.linear import Embedding, Linear, Linears, LinearWeight, PlainEmbedding
from quire.ops.weights.lora import LoraTable
from quire.ops.weights.narrow import NarrowWeight
from quire.ops.weights.quantised import QuantisedWeight

GELUS: dict[type, Literal["none", "tanh"]] = {
    activations.ACT2CLS["gelu"]: "none",
    activations.ACT2CLS["gelu_pytorch_tanh"]: "tanh",
    nn.GELU: "none",
}
QUICK_GELU = activations.ACT2CLS["quick_gelu"]
SILUS = (activations.ACT2CLS["silu"], nn.SiLU)
# Functions of torch whose bits depend on a number's position in its array.
BY_PLACE = re.compile(r"\b(sigmoid|silu|softplus|mish|gelu|elu|celu|selu)(?=\b[ ,()\n])|\b(approximate)=")
BY_NUMBER = (nn.ReLU, nn.Tanh)  # activations of torch whose bits do not
CHUNK = 4096  # positions
ROUTERS = ("gate", "router", "shared_expert_gate")  # linears that choose experts, by the last part of their names


class Unread(nn.Module):
    """A placeholder for a linear whose weight is quantised in the checkpoint, so that transformers does not read it."""

    def __init__(self, theirs: Any, read: Callable[[], QuantisedWeight | BlockWeight | NarrowWeight]) -> None:
        """Replace a linear. theirs: an nn.Linear or a Conv1D. read: reads its weight."""
        super().__init__()
        self.read = read
        self.weight = torch.empty_like(theirs.weight, device="meta")  # some models initialise it
        self.bias: nn.Parameter | None = theirs.bias  # [out]


class Packing:
    """A packer of the weights of a model's linears, which quantises them if requested and counts their bytes."""

    def __init__(self, linears: Linears, quantisation: Quantisation, dtype: torch.dtype, device: str) -> None:
        """Start with no weights. dtype: of x."""
        self.linears = linears
        self.layer_bytes = self.head_bytes = 0  # of the weights packed so far
        self._quantisation, self._dtype, self._device = quantisation, dtype, device

    def weight(self, theirs: Any, name: str, is_head: bool) -> LinearWeight:
        """Return the weight [out, in] of an nn.Linear, a Conv1D, which stores [in, out], or an Unread."""
        if isinstance(theirs, Unread):
            read = theirs.read()
            weight: LinearWeight = read if isinstance(read, NarrowWeight) else self._quantisation.multiplied(read)
        else:
            plain = theirs.weight.detach().T if type(theirs) is Conv1D else theirs.weight.detach()
            rounded = is_head or name.rpartition(".")[2] not in ROUTERS
            weight = self._quantisation.linear(plain, self._dtype, name, is_head) if rounded else plain
        if is_head:
            self.head_bytes += weight.nbytes
        else:
            self.layer_bytes += weight.nbytes
        return weight.to(self._device)


def replace_tied_embedding(model: Any, packing: Packing) -> None:
    """Replace the embedding and an output projection that is tied to it by modules that share one packed weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear or head.weight is not embedding.weight:
        return
    # Some embeddings scale the rows that they look up. Compare a few rows to see that they do nothing else.
    scale = getattr(embedding, "embed_scale", None)
    tokens = torch.arange(min(8, len(head.weight)), device=head.weight.device)
    ours = _Embedding(PlainEmbedding(head.weight.detach(), head.weight.dtype), scale, head.weight)
    if not torch.equal(embedding(tokens), ours(tokens)):
        return
    ours.rows, linear = packing.linears.tied(packing.weight(head, "the embedding", is_head=True))
    ours_head = _PackedModule(linear, head.weight, None if head.bias is None else head.bias.detach())
    for old, new in ((embedding, ours), (head, ours_head)):
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if child is old:
                    setattr(module, name, new)


def replace_linears(model: Any, packing: Packing, current_lora: CurrentLora, tables: LoraTables | None = None) -> None:
    """Replace all plain linears by packed ones of ours.

    tables: a LoRA table is added for each linear except the output projection; None: no adapters.
    current_lora: holds the adapter of each row during a step.
    """
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) in (nn.Linear, Conv1D, Unread) and not _reads_weight(module, name):
                packed = _packed(child, packing, f"{path}.{name}", child is head)
                if tables is not None and child is not head and ".experts." not in f"{path}.{name}":
                    out_size, in_size = packed.weight.shape
                    packed.current_lora = current_lora
                    packed.table = tables.made(f"{path}.{name}".removeprefix("."), in_size, out_size)
                setattr(module, name, packed)


def _reads_weight(module: nn.Module, name: str) -> bool:
    """Return whether a module's code multiplies by the weight of its linear itself, without calling the linear.

    Raises Unsupported if that weight is quantised.
    """
    kind: Any = type(module)
    if not _names(kind, f"linear(hidden_states.type(torch.float32), self.{name}.weight"):
        return False
    if isinstance(getattr(module, name), Unread):
        raise Unsupported(f"its {kind.__name__} reads the weight of {name}, which is quantised in the checkpoint")
    return True


@cache
def _names(kind: type, code: str) -> bool:
    return not kind.__module__.startswith("torch.") and code in inspect.getsource(kind)


def replace_activations(model: nn.Module, backend: Backend) -> None:
    """Replace SiLU, GELU and its approximation by a sigmoid by ours."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in SILUS:
                setattr(module, name, _Activation(_silu))
            elif type(child) is QUICK_GELU:
                setattr(module, name, _Activation(partial(_quick_gelu, backend)))
            elif type(child) in GELUS and getattr(child, "approximate", "none") == "none":
                setattr(module, name, _Activation(_Gelu(backend, GELUS[type(child)])))


def replace_rope(model: nn.Module, max_model_len: int) -> None:
    """Replace modules that compute RoPE angles by tables."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            parameters = list(inspect.signature(child.forward).parameters)
            if type(child).__name__.endswith("RotaryEmbedding") and parameters[:2] == ["x", "position_ids"]:
                setattr(module, name, _RopeTable(child, max_model_len))


def leave_files(model: nn.Module) -> None:
    """Copy the remaining tensors out of the mapped files, as copies are aligned and stay resident."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_cpu:
            tensor.data = tensor.data.clone()


def rows_depend(model: nn.Module) -> str | None:
    """Return the reason why a model is not batch-invariant after all replacements; None: it is batch-invariant."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    others = [name for name, weight in model.named_parameters() if weight.dim() > 1 and id(weight) not in tables]
    if others:
        return f"{others[0]} is multiplied by transformers"
    kinds = {type(module) for module in model.modules() if not type(module).__module__.startswith(__name__)}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        if kind.__module__ == nn.ReLU.__module__:
            if kind not in BY_NUMBER:
                return f"it has torch's {kind.__name__}"
        elif not kind.__module__.startswith("torch.") and (found := BY_PLACE.search(inspect.getsource(kind))):
            return f"its {kind.__name__} uses torch's {found[1] or found[2]}"
    if found := BY_PLACE.search(inspect.getsource(sys.modules[type(model).__module__])):
        return f"its code uses torch's {found[1] or found[2]}"
    return None


class _Embedding(nn.Module):
    """An embedding that shares its weight with the output projection."""

    def __init__(self, rows: Embedding, scale: Any, weight: Tensor) -> None:
        super().__init__()
        self.rows, self._scale = rows, scale
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, token_ids: Tensor) -> Tensor:
        found = self.rows(token_ids.flatten()).view(*token_ids.shape, -1)
        if self._scale is None:
            return found
        return found * (self._scale.to(found.dtype) if isinstance(self._scale, Tensor) else self._scale)


class _PackedModule(nn.Module):
    """A module with one of our linears."""

    def __init__(self, linear: Linear, weight: LinearWeight, added: Tensor | None = None) -> None:
        """Wrap a linear. added: a bias that the linear itself does not add, [out]."""
        super().__init__()
        self.linear, self._added = linear, added
        self.current_lora = CurrentLora()
        self.table: LoraTable | None = None
        # Some models read its dtype or shape. The values are in the linear.
        shape = weight.shape if isinstance(weight, Tensor) else (weight.out_size, weight.in_size)
        self.weight = torch.empty(shape, dtype=weight.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = self.linear(rows)
        if self.table is not None and self.current_lora.rows is not None:
            self.table.add(rows, out, self.current_lora.rows)
        out = out.view(*x.shape[:-1], len(self.weight))
        return out if self._added is None else out + self._added


def _packed(theirs: Any, packing: Packing, name: str, is_head: bool) -> _PackedModule:
    """Pack a linear. theirs: an nn.Linear, a Conv1D, or an Unread."""
    weight, linears = packing.weight(theirs, name, is_head), packing.linears
    bias = None if theirs.bias is None else theirs.bias.detach()
    if is_head and bias is None:
        return _PackedModule(linears.head(weight), weight)
    return _PackedModule(linears.linear(weight.contiguous() if isinstance(weight, Tensor) else weight, bias), weight)


class _Activation(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def _silu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def _quick_gelu(backend: Backend, x: Tensor) -> Tensor:
    return backend.activate(x.reshape(-1, x.shape[-1]), Activation("silu", gated=False, slope=1.702)).view(x.shape)


class _Gelu:
    def __init__(self, backend: Backend, approximate: Literal["none", "tanh"]) -> None:
        self._backend, self._approximate = backend, approximate

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._backend.gelu(rows, self._approximate).view(x.shape)


class _RopeTable(nn.Module):
    """A table of angles by position, which transformers would compute again in each step.

    The bits of its cosines depend on their position in the array, and with some kinds of RoPE the angles depend on the
    longest sequence of the batch. The table has the angles of a sequence of max_model_len tokens.
    """

    def __init__(self, rope: nn.Module, max_model_len: int) -> None:
        super().__init__()
        self.rope, self._length = rope, max_model_len
        self._tables: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # an attribute of the replaced module
            return getattr(super().__getattr__("rope"), name)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        key = (x.dtype, x.device, args, tuple(kwargs.items()))
        if key not in self._tables:
            self._tables[key] = self._made(x, *args, **kwargs)
        table, positions = self._tables[key], position_ids.flatten(0, -2)[0]  # in text, those of all axes are equal
        return table[:, positions] if isinstance(table, Tensor) else tuple(part[:, positions] for part in table)

    def _made(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the angles of all positions in chunks, as they need much temporary memory.

        Each chunk includes the last position, so that the module sees a sequence of the full length.
        """
        last = torch.tensor([self._length - 1], device=x.device)
        chunks = []
        for start in range(0, self._length, CHUNK):
            some = torch.arange(start, min(start + CHUNK, self._length), device=x.device)
            found = self.rope(x, torch.cat([some, last])[None], *args, **kwargs)
            chunks.append([found[:, :-1]] if isinstance(found, Tensor) else [part[:, :-1] for part in found])
        tables = [torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True)]
        return tables[0] if isinstance(found, Tensor) else tuple(tables)
