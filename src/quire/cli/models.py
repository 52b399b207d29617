"""quire models: the lists of supported and of recommended models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.hub import size_of
from quire.cli.info import memory_of
from quire.cli.options import AsJson, print_table

if TYPE_CHECKING:
    from quire.engine.cost import ModelCost
    from quire.models.recommended import Recommended

CONTEXT = 4_096  # tokens of a usual conversation
HEAD = ("NAME", "REPOSITORY", "FORMAT", "DOWNLOAD", "MEMORY")


def models(
    as_json: AsJson = False,
    fits: Annotated[
        bool, typer.Option("--fits", help="List models to begin with: their sizes, and whether they fit here.")
    ] = False,
) -> None:
    """List published models and types: on Quire's own decoder, through transformers' code, or refused with a reason."""
    from quire.models.supported import Repository, Supported, read

    if fits:
        _show_recommended(as_json)
        return
    sweep = read()
    if as_json:
        listed = {name: [one._asdict() for one in getattr(sweep, name)] for name in ("repositories", "types")}
        print(json.dumps({"transformers": sweep.transformers} | listed))
        return
    served: list[Repository | Supported] = [*sweep.repositories, *sweep.types]
    print_table([(one.name, f"{one.how}: {one.reason}" if one.reason else one.how) for one in served])
    counts = Counter(found.how for found in sweep.types)
    shown = ", ".join(f"{count} {how}" for how, count in counts.items())
    print(f"\n{len(sweep.types)} types: {shown}; tried with transformers {sweep.transformers}.")
    print("quire models --fits lists models to begin with, and whether they fit into the memory of this machine.")


def _show_recommended(as_json: bool) -> None:
    from quire.cache.sizing import free_memory
    from quire.engine.cost import measured_read_rate

    free, rate = free_memory(), measured_read_rate()
    rows: list[Sequence[str]] = [(*HEAD, "FITS", "TOKENS/S")]
    records = []
    for model, cost in recommended_costs():
        memory, speed = needed_memory(cost), cost.decode_rate(rate)
        is_enough = None if free is None else memory <= free
        fit = {None: "?", True: "yes", False: "no"}[is_enough]
        rows.append((*described(model, cost), fit, f"{speed:,.0f}" if speed >= 9.5 else f"{speed:.1f}"))
        records.append({
            **{name: value for name, value in model._asdict().items() if name != "config"},
            "memory": memory, "fits": is_enough, "tokens_per_second": speed,
        })  # fmt: skip
    if as_json:
        print(json.dumps(records))
        return
    print_table(rows)
    here = "" if free is None else f"; {memory_of(free)} are free here"
    print(f"\nMEMORY: the weights and a KV cache of {CONTEXT:,} tokens{here}.")
    print(f"TOKENS/S: an estimate for one request on this CPU, which reads {rate / 1e9:,.0f} GB/s.")
    print("quire chat NAME downloads a model and talks to it.")


def recommended_costs() -> list[tuple[Recommended, ModelCost]]:
    """Return the recommended models with their costs, by the memory that they need."""
    from quire.models.recommended import recommended

    return sorted(((model, cost_of(model)) for model in recommended()), key=lambda pair: needed_memory(pair[1]))


def described(model: Recommended, cost: ModelCost) -> tuple[str, ...]:
    """Return the columns of a model that are the same on every machine, see HEAD."""
    if model.file is not None:
        form = model.file.removesuffix(".gguf").rpartition("-")[2]
    else:
        form = model.config.get("quantization_config", {}).get("quant_method", "bf16").upper()
    return model.name, model.repository, form, size_of(model.download), memory_of(needed_memory(cost))


def needed_memory(cost: ModelCost) -> int:
    """Return the bytes of a model's weights and of the KV cache of a usual conversation."""
    return cost.weights.total + cost.sequence_bytes(CONTEXT)


def cost_of(model: Recommended) -> ModelCost:
    """Return the cost of a recommended model, computed from its configuration and the size of its GGUF file."""
    import math
    from collections import Counter

    from quire.engine.cost import model_cost
    from quire.models import expected_weight_bytes, read_config
    from quire.models.decoder_config import weight_shapes, weight_use
    from quire.models.files import Described
    from quire.models.model import WeightBytes

    files = Described(model.name, model.config)
    config, dtype = read_config(files)
    if model.file is None:
        return model_cost(config, dtype, expected_weight_bytes(files))
    params = Counter[str]()
    for name, shape in weight_shapes(config).items():
        params[weight_use(config, name)] += math.prod(shape)
    share = model.download / params.total()  # bytes a number; kinds of blocks hardly differ between uses
    return model_cost(config, dtype, WeightBytes(**{use: int(count * share) for use, count in params.items()}))
