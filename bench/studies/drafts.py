"""Count the requests whose tokens differ with drafts, for a model of each kind.

    python bench/studies/drafts.py --requests 1000
    python bench/studies/drafts.py --requests 100 --kind latent --weights int4 --isa amx_emulated
    python bench/studies/drafts.py --requests 100 --processes 2

The models are small and random, with the embedded model's tokenizer, and some have a random head. The requests are
those of `quire bench drafts --check`. Run it in a clone: the models are those of the tests. Status 1 if one differs.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from quire.models import EMBEDDED
from quire.ops import native
from quire_bench.engine.drafts import check, source

VOCAB_SIZE = 2048  # of the embedded model


class Kind(NamedTuple):
    """A family of models with a kind of layer."""

    family: str
    head: int | None = None  # the layer that the head's is like; None: no head
    changes: Mapping[str, Any] = {}


KINDS = {
    "attention": Kind("Llama", 2),
    "window": Kind("Mistral", changes={"sliding_window": 40}),
    "latent": Kind("DeepseekV3", 2, {"q_lora_rank": 24}),
    "experts": Kind("Glm4Moe", 2),
    "delta": Kind("Qwen3_5", 3),
    "mamba2": Kind("Bamba"),
    "convolution": Kind("Lfm2"),
}
WEIGHTS: dict[str, dict[str, Any]] = {"bf16": {}, "int4": {"quantization": "int4"}}


def checkpoint(directory: Path, kind: Kind) -> None:
    """Save a random model of that kind, with the embedded model's tokenizer."""
    sys.path.insert(0, str(Path(__file__).parents[2]))  # the clone, for its tests
    save = importlib.import_module("tests.models.checkpoints").save  # which is not typed
    model = save(directory, kind.family, torch.bfloat16, vocab_size=VOCAB_SIZE, **kind.changes)
    if kind.head is not None:
        add_head = importlib.import_module("tests.models.heads").add_head
        add_head(directory, kind.family, kind.head, model.config.num_hidden_layers)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, directory)


def checks(kind: str, weights: str, isa: str, processes: int, requests: int) -> Iterator[dict[str, Any]]:
    """Yield the counts of each source of drafts."""
    with tempfile.TemporaryDirectory() as directory, native.using(None if isa == "best" else isa):
        checkpoint(Path(directory), KINDS[kind])
        options = {"model": directory, "num_speculative_tokens": 3, "tensor_parallel_size": processes}
        options |= WEIGHTS[weights]
        drafts = ["lookup"] if KINDS[kind].head is None or processes > 1 else ["lookup", "head"]
        for draft in drafts:
            where = {"kind": kind, "weights": weights, "isa": isa, "processes": processes, "draft": draft}
            totals: dict[str, Any] = {}
            for part in check(source(options, draft), requests):
                totals = {name: count + totals.get(name, 0) for name, count in part._asdict().items()}
            yield where | totals


def main(
    requests: Annotated[int, typer.Option(min=2, help="Of each model, kind of weights and source of drafts.")] = 1000,
    kind: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KINDS)}; default: all.")] = None,
    weights: Annotated[list[str] | None, typer.Option(help=f"{', '.join(WEIGHTS)}; default: all.")] = None,
    isa: Annotated[list[str] | None, typer.Option(help="Of those built; default: the best.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That the model is divided among.")] = 1,
) -> None:
    """Print a line of JSON for each, and end with status 1 if a request differs."""
    different = 0
    for each_isa in isa or ["best"]:
        for name in kind or KINDS:
            for form in weights or WEIGHTS:
                for row in checks(name, form, each_isa, processes, requests):
                    print(json.dumps(row), flush=True)
                    different += row["different"]
    raise typer.Exit(int(different > 0))


if __name__ == "__main__":
    typer.run(main)
