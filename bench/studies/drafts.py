"""Count the requests whose tokens differ with drafts, for a model of each kind.

    python bench/studies/drafts.py --requests 1000
    python bench/studies/drafts.py --requests 100 --kind latent --weights int4 --isa amx_emulated
    python bench/studies/drafts.py --requests 100 --processes 2

The models are small and random, with the embedded model's tokenizer. So are their heads and EAGLE-3 checkpoints, whose
tokens are replaced by right ones with a probability of SHARE. The draft model is the model itself. Models with Q4_K
weights are GGUF files, whose format has no Mistral with windows, and no head of a Llama. The requests are those of
`quire bench drafts --check`. Run it in a clone: the models are those of the tests. Status 1 if one differs.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import typer

from quire.models import EMBEDDED
from quire.models.eagle import LAYERS
from quire.ops import native
from quire.parallel import launch
from quire_bench.engine.drafts import check

CLONE = str(Path(__file__).parents[2])
VOCAB_SIZE = 2048  # of the embedded model


class Kind(NamedTuple):
    """A family of models with a kind of layer."""

    family: str
    head: int | None = None  # the layer that the head's is like; None: no head
    changes: Mapping[str, Any] = {}
    wide: Mapping[str, Any] | None = {}  # further ones for Q4_K, in addition to WIDE; None: GGUF has no such model
    attention: bool = True  # it has no other layers, so that it can be a draft model


SHARE = 0.6
# Q4_K has blocks of 256 inputs.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
EAGLE = {"vocab_size": VOCAB_SIZE, "draft_vocab_size": 500, "eagle_config": {LAYERS: [0, 1, 2]}}
KINDS = {
    "attention": Kind("Llama", 2, wide={"head_dim": 64}),
    "window": Kind("Mistral", changes={"sliding_window": 40}, wide=None),
    "windows": Kind("Gemma3", changes={"sliding_window": 40, "num_hidden_layers": 6}, wide={"head_dim": 64}),
    "latent": Kind("DeepseekV3", 2, {"q_lora_rank": 24}, {
        "num_key_value_heads": 4, "moe_intermediate_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256,
        "v_head_dim": 64,
    }),
    "experts": Kind("Glm4Moe", 2, wide={"head_dim": 64, "moe_intermediate_size": 256}),
    "delta": Kind("Qwen3_5", 3, wide={"head_dim": 64, "linear_value_head_dim": 64}, attention=False),
    "mamba2": Kind("GraniteMoeHybrid", wide={"shared_intermediate_size": 256}, attention=False),
    "convolution": Kind("Lfm2", wide={"block_auto_adjust_ff_dim": False}, attention=False),
}  # fmt: skip
WEIGHTS: dict[str, dict[str, Any]] = {"bf16": {}, "int4": {"quantization": "int4"}, "q4_k": {}}


class Checkpoint(NamedTuple):
    """A random model, with the options of its sources of drafts."""

    path: Path
    sources: Mapping[str, dict[str, Any]]


def of_tests(name: str) -> Any:
    """Import a module of the clone's tests, which are not typed."""
    if CLONE not in sys.path:
        sys.path.insert(0, CLONE)
    return importlib.import_module(f"tests.{name}")


@contextmanager
def quick_ranks() -> Iterator[None]:
    """Start ranks as forks of one process that has imported their modules."""
    with (
        tempfile.TemporaryDirectory() as logs,
        of_tests("forks").Spawner(Path(logs)) as forks,
        mock.patch.object(launch, "Popen", of_tests("parallel.forked").Forks(forks)),
    ):
        yield
        gc.collect()  # ends the ranks of engines that are not used any more


def checkpoint(directory: Path, name: str, weights: str) -> Checkpoint | None:
    """Save a random model of that kind. None if the format of the weights has no such model."""
    checkpoints, heads, writer = (of_tests(f"models.{one}") for one in ("checkpoints", "heads", "gguf.writer"))
    kind, path, changes = KINDS[name], directory, dict(KINDS[name].changes)
    if weights == "q4_k":
        if kind.wide is None:
            return None
        path, changes = directory / "model.gguf", {**changes, **WIDE, **kind.wide}
    model = checkpoints.save(directory, kind.family, torch.bfloat16, vocab_size=VOCAB_SIZE, **changes)
    sources: dict[str, dict[str, Any]] = {"lookup": {"draft": "lookup"}}
    if kind.head is not None and (weights, kind.family) != ("q4_k", "Llama"):
        heads.add_head(directory, kind.family, kind.head, model.config.num_hidden_layers)
        sources["head"] = {"draft": "head"}
    heads.save_eagle(directory / "eagle", **EAGLE, hidden_size=model.config.hidden_size)
    sources["eagle"] = {"draft": "model", "draft_model": str(directory / "eagle")}
    if kind.attention:
        sources["model"] = {"draft": "model", "draft_model": str(path)}
    if weights == "q4_k":
        writer.write_gguf(directory, path, kind.family, lambda _: writer.Kind.Q4_K)
    return Checkpoint(path, sources)


def checks(kind: str, weights: str, isa: str, processes: int, requests: int) -> Iterator[dict[str, Any]]:
    """Yield the counts of each source of drafts."""
    with tempfile.TemporaryDirectory() as directory, native.using(None if isa == "best" else isa):
        saved = checkpoint(Path(directory), kind, weights)
        if saved is None:
            return
        options = {"model": str(saved.path), "tokenizer": str(EMBEDDED), "tensor_parallel_size": processes}
        for draft, own in saved.sources.items():
            where = {"kind": kind, "weights": weights, "isa": isa, "processes": processes, "draft": draft}
            totals: dict[str, Any] = {}
            given = options | {"num_speculative_tokens": 3} | WEIGHTS[weights] | own
            for part in check(given, requests, share=SHARE):
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
    with quick_ranks() if processes > 1 else nullcontext():
        for each_isa, name, form in product(isa or ["best"], kind or KINDS, weights or WEIGHTS):
            for row in checks(name, form, each_isa, processes, requests):
                print(json.dumps(row), flush=True)
                different += row["different"]
    raise typer.Exit(int(different > 0))


if __name__ == "__main__":
    typer.run(main)
