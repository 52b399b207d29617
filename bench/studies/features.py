"""Measure the time that LoRA adapters, or JSON schemas, add to the decode steps of a batch.

    python bench/studies/features.py lora --model DIR --adapters 16 --rank 16
    python bench/studies/features.py schemas --model DIR --constrained 32

Steps with the feature are timed in alternation with steps without it, so that a drift of the machine's speed is in
both. The adapters are random and of all linears of the layers; the time of a step does not depend on their numbers.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer

from quire import LLM
from quire.cli.options import fail
from quire.errors import QuireError
from quire.models.lora.slots import Loras, Prepared
from quire.ops.weights.lora import LoraPart, LoraTable
from quire.request import Request, SamplingParams, StructuredOutputsParams
from quire.sandbox.grammar import Grammars, Spec
from quire_bench.cli.options import CacheMemory, Model
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY, greedy

CONTEXT = 64  # tokens of a sequence before its first step that counts
WARM_UP = 4  # steps after the prompts that do not count
SCALE = 0.02  # of random matrices
# Records as programs ask for them: texts, numbers, a choice, a list, one in another; more than any answer can hold.
ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "kind": {"enum": ["plain", "shared", "none"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "place": {
            "type": "object",
            "properties": {"line": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["line", "text"],
        },
    },
    "required": ["name", "count", "share", "kind", "tags", "place"],
}
SCHEMA = {"type": "array", "items": ENTRY, "minItems": 10_000}

Make: TypeAlias = "Callable[[int, array[int]], Request]"  # the request of a number with a prompt
Streams = Annotated[int, typer.Option(min=1, help="Sequences in the batch.")]
Steps = Annotated[int, typer.Option(min=1, help="Decode steps that count, of each kind in each round.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; the median of their ratios is reported.")]
app = typer.Typer(add_completion=False, help=(__doc__ or "").partition("\n")[0])


@app.command()
def lora(
    model: Model = None,
    quantization: Annotated[str | None, typer.Option(help="int8 or int4, as the weights are loaded.")] = None,
    kv_cache_memory: CacheMemory = "1GiB",
    adapters: Annotated[int, typer.Option(min=1, max=4096, help="Adapters in the batch.")] = 16,
    rank: Annotated[int, typer.Option(min=1, max=1024, help="Rank of each.")] = 16,
    streams: Streams = 64,
    steps: Steps = 16,
    rounds: Rounds = 3,
) -> None:
    """Compare steps whose rows have adapters in turn with steps of the model alone."""
    try:
        llm = LLM(
            model,
            quantization=quantization,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=streams,
            num_speculative_tokens=0,
            enable_lora=True,
            max_loras=adapters,
            max_lora_rank=rank,
        )
        loras = llm.decoder.loras
        assert loras is not None
        for i in range(adapters):
            llm.engine.load_lora(f"random-{i}", prepared := random_adapter(loras, rank, i))

        def request(i: int, prompt: array[int], name: str | None) -> Request:
            return Request(f"lora-{i}", prompt, CONTEXT, greedy(steps + WARM_UP + 8), lora=name)

        size = sum(part.a.nbytes + part.b.nbytes for _, parts in prepared.parts for part in parts)
        print(f"{adapters} adapters of rank {rank}, {size / 2**20:.1f} MiB each, {streams} sequences")
        compare(
            llm,
            lambda i, prompt: request(i, prompt, None),
            lambda i, prompt: request(i, prompt, f"random-{i % adapters}"),
            streams,
            steps,
            rounds,
        )
    except QuireError as error:
        fail(error)


@app.command()
def schemas(
    model: Model = None,
    kv_cache_memory: CacheMemory = "1GiB",
    constrained: Annotated[int, typer.Option(min=1, help="Sequences that keep to a JSON schema.")] = 32,
    streams: Streams = 64,
    steps: Steps = 64,
    rounds: Rounds = 5,
) -> None:
    """Compare steps, some of whose rows keep to a JSON schema, with steps without a schema."""
    try:
        llm = LLM(model, kv_cache_memory=kv_cache_memory, max_num_seqs=streams, num_speculative_tokens=0)
        if llm.tokenizer is None:
            fail("this model has no tokenizer, so no schema can be kept to")
        grammars = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids)
        spec = Spec.of(StructuredOutputsParams(json=SCHEMA))

        def plain(i: int, prompt: array[int]) -> Request:
            sampling = SamplingParams(max_tokens=steps + WARM_UP + 8, seed=i, ignore_eos=True)
            return Request(f"schemas-{i}", prompt, CONTEXT, sampling)

        def guided(i: int, prompt: array[int]) -> Request:
            request = plain(i, prompt)
            request.guide = grammars.compile(spec) if i < constrained else None
            return request

        print(f"{streams} sequences, {min(constrained, streams)} of them with a JSON schema")
        try:
            compare(llm, plain, guided, streams, steps, rounds)
        finally:
            grammars.close()
    except QuireError as error:
        fail(error)


def random_adapter(loras: Loras, rank: int, seed: int) -> Prepared:
    """Return an adapter of every linear that may have one."""
    generator = torch.Generator().manual_seed(seed)
    by_table: dict[int, tuple[LoraTable, list[LoraPart]]] = {}
    for target in loras.targets.values():
        if target.table is None:
            continue
        shapes = (rank, target.table.in_size), (target.size, rank)
        a, b = (torch.randn(shape, generator=generator).mul_(SCALE).to(loras.device, loras.dtype) for shape in shapes)
        by_table.setdefault(id(target.table), (target.table, []))[1].append(LoraPart(a, b, 1.0, target.first))
    return Prepared(Path("random"), f"random {seed}", rank, list(by_table.values()))


def compare(llm: LLM, plain: Make, featured: Make, streams: int, steps: int, rounds: int) -> None:
    """Time both kinds of steps in turn, and print medians."""
    found = [(decoded(llm, plain, streams, steps), decoded(llm, featured, streams, steps)) for _ in range(rounds)]
    ratio = statistics.median(own / alone for alone, own in found)
    alone, own = (statistics.median(column) for column in zip(*found, strict=True))
    for name, seconds in (("without", alone), ("with them", own)):
        print(f"  {name:10s}{1e3 * seconds:9.2f} ms a step {streams / seconds:9.0f} tokens/s")
    print(f"  {ratio:.3f} times as long")


def decoded(llm: LLM, make: Make, streams: int, steps: int) -> float:
    """Return the median seconds of a decode step."""
    rng, engine = random.Random(1), llm.engine
    prompts = [array("i", [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(CONTEXT)]) for _ in range(streams)]
    requests = [make(i, prompt) for i, prompt in enumerate(prompts)]
    llm.reset_prefix_cache()
    try:
        for request in requests:
            engine.add(request)
        while any(request.num_generated == 0 for request in requests):
            engine.step()
        times = []
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            events = engine.step()
            times.append(time.perf_counter() - start)
            if failed := [event.error for event in events if event.error is not None]:
                raise QuireError(f"a step failed: {failed[0]}")
        return statistics.median(times[WARM_UP:])
    finally:
        for request in requests:
            engine.abort(request.id)
        while engine.has_work:
            engine.step()


if __name__ == "__main__":
    app()
