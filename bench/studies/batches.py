"""Compare a batch with LLM.generate of the same requests, and cached logprobs of a prompt with computing them.

    python -m quire_bench.peers.make_models models smol135
    python bench/studies/batches.py --model models/smol135

Both are measured in alternation on one model: the lines of a file by the code of `quire batch`, with its parsing,
answers and files, and the same prompts by `LLM.generate`, each with an empty prefix cache. Then `prompt_logprobs` of
a prompt, with an empty prefix cache and with that of the request before. Prints medians and both ratios.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from quire import LLM, SamplingParams
from quire.server.batch.answering import Answerer
from quire.server.batch.results import Results
from quire.server.batch.runner import BatchRun, prepared
from quire.server.run import ServerParts, build_parts
from quire.server.server_config import ServerConfig
from quire_bench.cli.options import Model

WORDS = "def return self value for in range index list open path if not None else name key data line import".split()


def main(
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="Lines of the batch.")] = 384,
    words: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 48,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 24,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of the prompt whose logprobs are asked for.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Of each measurement.")] = 5,
) -> None:
    """Print both comparisons."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=words)) for _ in range(requests)]
    asyncio.run(compare(model, texts, new_tokens, [rng.randrange(2, 900) for _ in range(prompt)], rounds))


async def compare(model: str | None, texts: list[str], new_tokens: int, prompt: list[int], rounds: int) -> None:
    """Measure and print."""
    config = ServerConfig(served_model_name=("model",))
    parts = build_parts({"model": model, "generation_config": "none", "kv_cache_memory": "1GiB"}, config)
    llm = LLM(model, generation_config="none", kv_cache_memory="1GiB")
    parts.engine_client.llm.observers.remove(parts.inspector.observe_step)  # as in `quire batch`
    parts.service.engine_client.start()
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    body = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    lines = "\n".join(
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | {"prompt": text}})
        for i, text in enumerate(texts)
    ).encode()
    generate = partial(llm.generate, texts, params, use_tqdm=False)
    times = dict[str, list[float]](batch=[], generate=[])
    for number in range(rounds + 1):
        for name in sorted(times, reverse=bool(number % 2)):
            if name == "batch":
                seconds = await batch(parts, lines, len(texts))
            else:
                llm.reset_prefix_cache()
                seconds = timed(generate)
            if number:  # the first round warms up
                times[name].append(seconds)
    await parts.service.engine_client.stop()
    middle = {name: statistics.median(found) for name, found in times.items()}
    print(f"{len(texts)} requests of {new_tokens} new tokens, median of {rounds} rounds:")
    print(f"  batch {middle['batch']:.3f} s, LLM.generate {middle['generate']:.3f} s")
    print(f"  throughput of the batch: {middle['generate'] / middle['batch']:.3f} x that of LLM.generate")
    prompt = prompt[: llm.engine.scheduler.max_model_len - 1]
    ask = partial(
        llm.generate, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False
    )
    computed, cached = list[float](), list[float]()
    for _ in range(rounds):
        llm.reset_prefix_cache()
        computed.append(timed(ask))
        cached.append(timed(ask))
    slow, fast = statistics.median(computed), statistics.median(cached)
    print(f"prompt_logprobs of {len(prompt):,} tokens, median of {rounds} rounds:")
    print(f"  computed {1e3 * slow:.1f} ms, cached {1e3 * fast:.1f} ms: {slow / fast:.1f} x")


async def batch(parts: ServerParts, lines: bytes, count: int) -> float:
    """Return the seconds that a batch takes, with the files of its results."""
    service, engine = parts.service, parts.engine_client.llm
    await engine.call(engine.llm.reset_prefix_cache)
    with TemporaryDirectory() as directory:
        paths = Path(directory, "answers"), Path(directory, "errors")
        begun, results = time.perf_counter(), Results(*paths)
        answerer, source = Answerer(service), io.BytesIO(lines)
        parser, _ = await prepared(answerer, source, results)
        await BatchRun(answerer, source, parser, results, lambda: 2 * service.engine_client.num_slots()[0]).run()
        seconds, answered = time.perf_counter() - begun, results.num_answers
        results.close()
    if answered != count:
        raise RuntimeError(f"{count - answered} of {count} lines have failed")
    return seconds


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    typer.run(main)
