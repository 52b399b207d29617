"""Fitting an adapter to a model: mapping its modules to the columns of our linears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ConfigError, ModelError
from quire.models.decoder_config import DecoderConfig
from quire.models.lora.peft import LowRank, read_adapter
from quire.models.lora.slots import Loras, LoraTables, Prepared, Target
from quire.models.weights import Sources
from quire.ops.weights.lora import LoraPart, LoraTable

SHOWN = 3  # modules in an error


def prepare(loras: Loras, directory: Path) -> Prepared:
    """Read an adapter and check it against this model. It does not change the model, so any thread may call it.

    Raises ModelError if it does not fit the model, ConfigError for a rank above the limit.
    """
    adapter = read_adapter(directory)
    if adapter.rank > loras.limits.max_rank:
        raise ConfigError(
            f"{directory} has rank {adapter.rank}; max_lora_rank is {loras.limits.max_rank}, so give at least that"
        )
    by_table: dict[int, tuple[LoraTable, list[LoraPart]]] = {}
    meant = {name for name, target in loras.targets.items() if target.table is not None}
    meant = {name for name in meant if adapter.is_meant_for(name)}
    for module, low_rank in adapter.modules.items():
        name, target, table = _target(loras, directory, module)
        if not adapter.is_meant_for(module):
            raise ModelError(f"{directory} has an adapter of {module}, which its target_modules do not name")
        meant.discard(name)
        part = _part(loras, directory, module, low_rank, target, table)
        by_table.setdefault(id(table), (table, []))[1].append(part)
    if meant:
        raise ModelError(
            f"{directory} lacks the tensors of {len(meant)} modules that its target_modules name, among them "
            f"{', '.join(sorted(meant)[:SHOWN])}"
        )
    return Prepared(directory, adapter.digest, adapter.rank, list(by_table.values()))


def _target(loras: Loras, directory: Path, module: str) -> tuple[str, Target, LoraTable]:
    """Return the model's module of that name, ignoring a prefix of either name, and its table. Raises ModelError."""
    targets, name = loras.targets, loras.module(module)
    if loras.part is not None:
        own = loras.part.name(f"{module}.weight")
        if own is None:
            raise ModelError(f"{directory} has an adapter of {module}, which is not of the model's text part")
        name = own.removesuffix(".weight")
    found = [name] if name in targets else []
    found = found or [one for one in targets if f".{name}".endswith(f".{one}") or one.endswith(f".{name}")]
    if len(found) != 1:
        known = ", ".join(sorted({one.rpartition(".")[2] for one, target in targets.items() if target.table}))
        raise ModelError(
            f"{directory} has an adapter of {module}, which this model does not have; its linears are {known}"
        )
    target = targets[found[0]]
    if target.table is None:
        raise ModelError(f"{directory} has an adapter of {module}: {target.why}, so it is not served")
    return found[0], target, target.table


def _part(loras: Loras, directory: Path, module: str, low_rank: LowRank, target: Target, table: LoraTable) -> LoraPart:
    """Convert a module's adapter to a part of the table. Raises ModelError if its sizes are wrong."""
    a, b = low_rank.a, low_rank.b
    if a.shape[1] != table.in_size or len(b) != target.size:
        raise ModelError(
            f"{directory} is of another model: its adapter of {module} is from {a.shape[1]} to {len(b)} numbers, and "
            f"here the module is from {table.in_size} to {target.size}"
        )
    if target.order is not None:
        b = b[target.order]
    a, b = (one.to(loras.device, loras.dtype) for one in (a, b))
    return LoraPart(a, b, low_rank.scale, target.first)


def decoder_targets(config: DecoderConfig, sources: Sources, tables: LoraTables) -> dict[str, Target]:
    """Return the modules of a checkpoint that runs on our decoder."""
    found: dict[str, Target] = {}
    for name, (shape, rows) in config.weights.items():
        if len(shape) != 2:
            continue
        parts = sources.of(name)
        table = tables.by_name.get(name.removesuffix(".weight"))
        first = 0
        for part, size in zip(parts, rows if len(parts) > 1 else shape[:1], strict=True):
            module = sources.module(_module(part))
            if table is None or not part.endswith(".weight"):  # a parameter is no module
                found[module] = Target(None, _refusal(name, config.holder(name) is not None))
            else:
                order = _order(sources.adapt, name, part, size)
                found[module] = Target(table, "", first, size, order)
            first += size
    for theirs in sources.ends.values():  # includes a tied output projection
        found.setdefault(sources.module(_module(theirs)), Target(None, _refusal("")))
    return found


def _module(tensor: str) -> str:
    return tensor.partition("[")[0].rpartition(".")[0]


def _order(adapt: Callable[[str, str, Tensor], Tensor] | None, name: str, part: str, size: int) -> Tensor | None:
    """Return the order in which our linear has a module's outputs, which is that of its rows; None: the same."""
    usual = torch.arange(size)
    if adapt is None:
        return None
    moved = adapt(name, part, usual[:, None]).flatten()
    return None if torch.equal(moved, usual) else moved


def _refusal(name: str, is_shared: bool = False) -> str:
    if is_shared:
        return "several layers use it"
    if ".experts." in name:
        return "it is of experts, whose rows are gathered by expert"
    if ".router." in name:
        return "it chooses experts"
    if name.endswith(".index_weights.weight"):
        return "it weights the heads of an indexer"
    if name.endswith(".kv.weight"):
        return "it is folded into the query and the output of a latent attention"
    if name.endswith("_up.weight"):
        return "it is the second matrix of a product that is added to another linear's"
    return "it is no linear of a layer"
