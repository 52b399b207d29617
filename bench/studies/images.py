"""Time from an image to the first token of its answer, in Quire and in transformers.

    python bench/studies/images.py
    python bench/studies/images.py --side 1024 --runs 5

The model has the shape of SmolVLM-256M and random weights in bf16; an image of 512 x 512 becomes 17 tiles and 1,088
rows of the prompt. Each image is a new one. Engines take turns, each in a fresh process. Quire is asked a second time
about the last image, too. Run it in a clone: the processor's files are those of the tests.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image

TEXT = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9} | {
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12} | {
    "image_size": 512,
    "patch_size": 16,
}
PIXELS = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
QUESTION = "What is this?"


def save(directory: Path) -> None:
    """Save a random model of that shape, with the files of its processor."""
    sys.path.insert(0, str(Path(__file__).parents[2]))  # the clone, for its tests
    checkpoints = importlib.import_module("tests.models.image_checkpoints")  # which is not typed
    mark, others, text, *_ = checkpoints.FAMILIES["idefics3"]
    checkpoints.TEXT.update(TEXT)
    own = {"scale_factor": 4, "vision_config": VISION}
    checkpoints.FAMILIES["idefics3"] = (mark, others, text, own, PIXELS, {"image_seq_len": 64})
    checkpoints.save_images_model(directory, "idefics3")


def asker(engine: str, directory: Path) -> Callable[[Image.Image], int]:
    """Return a function that computes the first token of an answer, and returns the tokens found in a cache."""
    if engine == "quire":
        from quire import LLM, SamplingParams

        llm, params = LLM(str(directory), dtype="bfloat16", num_blocks=1024), SamplingParams(max_tokens=1)

        def ask(image: Image.Image) -> int:
            question = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": QUESTION}]
            [output] = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
            return output.num_cached_tokens or 0

        return ask
    import transformers

    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.bfloat16).eval()
    processor: Any = transformers.AutoProcessor.from_pretrained(directory)

    def generate(image: Image.Image) -> int:
        given = processor(text=["<image>" + QUESTION], images=[[image]], return_tensors="pt")
        given = {name: x.bfloat16() if x.is_floating_point() else x for name, x in given.items()}
        with torch.inference_mode():
            model.generate(**given, max_new_tokens=1, do_sample=False)
        return 0

    return generate


def measure(engine: str, directory: Path, side: int, count: int) -> dict[str, Any]:
    """Return the seconds of each image, and of the last one again, with the tokens that were found in a cache."""
    ask, random = asker(engine, directory), np.random.default_rng()
    images = [Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(count + 1)]
    seconds, found = list[float](), 0
    for image in (*images, images[-1]):
        start = time.perf_counter()
        found = ask(image)
        seconds.append(time.perf_counter() - start)
    return {"first": seconds[1:-1], "again": seconds[-1], "found": found}  # the first image warms up


def main(
    side: Annotated[int, typer.Option(min=16, help="Of an image, in pixels.")] = 512,
    count: Annotated[int, typer.Option(min=1, help="Images in each process.")] = 3,
    runs: Annotated[int, typer.Option(min=1, help="Processes of each engine.")] = 2,
) -> None:
    """Print a line for each engine."""
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory))
        found: dict[str, list[dict[str, Any]]] = {"quire": [], "transformers": []}
        for _ in range(runs):
            for engine, own in found.items():
                command = [sys.executable, __file__, "--one", engine, directory, str(side), str(count)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                own.append(json.loads(done.stdout.splitlines()[-1]))
    for engine, own in found.items():
        first = statistics.median(seconds for one in own for seconds in one["first"])
        again, cached = statistics.median(one["again"] for one in own), own[-1]["found"]
        print(f"{engine:13s} {first:.2f} s, again {again:.2f} s with {cached} tokens of a cache")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))))
        raise SystemExit
    typer.run(main)
