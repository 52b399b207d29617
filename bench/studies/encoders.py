"""Compare the speed of an embedding model in Quire and in sentence-transformers, with each of its backends.

    python bench/studies/encoders.py MODEL --peer torch=ENV/bin/python --peer openvino=ENV/bin/python

MODEL is a directory that sentence-transformers reads; a cross-encoder scores the texts for a query. A peer is one of
its backends (torch, onnx, openvino) and a Python that has it; optimum exports the model for the last two. Engines take
turns, each in a fresh process, in float32 and in the dtypes that are named after a colon, as in torch:bfloat16;
onnx:int8 reads what sentence-transformers' export_dynamic_quantized_onnx_model wrote for avx512_vnni. The medians are
of the texts per second of all texts at once, and of the seconds of one text at a time.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

WORDS = "the of and to in is you that it he was for on are as with his they at be this have from or one had by".split()

QUERY = "which of the words are in the text"


def texts(count: int, shortest: int = 8, longest: int = 256) -> list[str]:
    """Return random texts of between `shortest` and `longest` words, about as many tokens."""
    chosen = random.Random(0)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(shortest, longest) - 2)) for _ in range(count)]


def encoder(engine: str, model: str) -> Callable[[list[str]], Any]:
    """Return a function that embeds texts, or scores them for a query if the model is a cross-encoder.

    engine: quire or a backend, with a dtype after a colon.
    """
    name, _, dtype = engine.partition(":")
    scores = "SequenceClassification" in json.loads(Path(model, "config.json").read_text())["architectures"][0]
    if name == "quire":
        from quire import LLM

        quantized: dict[str, Any] = (
            {"quantization": dtype} if dtype in ("int8", "int4") else {"dtype": dtype or "float32"}
        )
        llm = LLM(model, **quantized)
        if scores:
            return lambda given: llm.score(QUERY, given, truncate_prompt_tokens=-1, use_tqdm=False)
        return lambda given: llm.embed(given, truncate_prompt_tokens=-1, use_tqdm=False)
    from sentence_transformers import CrossEncoder, SentenceTransformer

    kwargs = {"torch_dtype": dtype} if dtype else {}
    if engine == "onnx:int8":
        kwargs = {"file_name": "onnx/model_qint8_avx512_vnni.onnx"}
    if scores:
        ranker = CrossEncoder(model, device="cpu", backend=name, model_kwargs=kwargs)
        return lambda given: ranker.predict([(QUERY, text) for text in given], batch_size=32)
    peer = SentenceTransformer(model, device="cpu", backend=name, model_kwargs=kwargs)
    return lambda given: peer.encode(given, batch_size=32)


def measure(engine: str, model: str, count: int) -> dict[str, float]:
    """Return the texts per second of all texts, and the median seconds of one text alone."""
    encode, given = encoder(engine, model), texts(count)
    encode(given[:8])
    start = time.perf_counter()
    encode(given)
    all_seconds, alone = time.perf_counter() - start, []
    for text in given[:50]:
        start = time.perf_counter()
        encode([text])
        alone.append(time.perf_counter() - start)
    return {"texts per second": count / all_seconds, "seconds alone": statistics.median(alone)}


def run(python: str, engine: str, model: str, count: int) -> dict[str, float]:
    """Measure an engine in a fresh process."""
    command = [python, __file__, "--one", engine, model, str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(peers: list[str], engines: list[str], model: str, count: int, runs: int) -> dict[str, dict[str, float]]:
    """Return the medians of each engine, which take turns."""
    pythons = dict.fromkeys(engines, sys.executable) | dict(peer.rsplit("=", 1) for peer in peers)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for _ in range(runs):
        for name, python in pythons.items():
            found[name].append(run(python, name, model, count))
    return {name: {key: statistics.median(one[key] for one in own) for key in own[0]} for name, own in found.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:  # in a peer's environment, which need not have typer
        print(json.dumps(measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
        raise SystemExit

    import typer

    def main(
        model: Path,
        peer: Annotated[list[str] | None, typer.Option(help="BACKEND=PYTHON; may be repeated.")] = None,
        engine: Annotated[list[str] | None, typer.Option(help="quire, or quire:DTYPE; may be repeated.")] = None,
        count: Annotated[int, typer.Option(min=1, help="Texts.")] = 1000,
        runs: Annotated[int, typer.Option(min=1, help="Runs; their median is reported.")] = 5,
    ) -> None:
        """Print a line for each engine."""
        for name, figures in compare(peer or [], engine or ["quire"], str(model), count, runs).items():
            print(
                f"{name:20s} {figures['texts per second']:8.1f} texts/s, {1e3 * figures['seconds alone']:6.1f} ms alone"
            )

    typer.run(main)
