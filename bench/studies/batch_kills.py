"""Kill `quire batch` again and again, and compare its results with those of an undisturbed run.

    python bench/studies/batch_kills.py --kills 200 --lines 1000

The file has chats, completions, embeddings, scores and lines that fail, most of them drawn without a seed. Each process
is killed by SIGKILL while it loads, or when its results have a random size, and started again with the same arguments;
once it ends by itself, the results are compared and the next round begins. Prints the sums after each round; the status
is 1 if a line was lost, doubled or different.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.progress import progress_bar

LOADING = 0.2  # share of kills that come in the first seconds, most of them while the model is loaded
FIRST = 4.0  # of these seconds
NAMES = ("rounds", "kills", "lost", "doubled", "different")


def main(
    kills: Annotated[int, typer.Option(min=1, help="Of processes.")] = 200,
    lines: Annotated[int, typer.Option(min=1, help="Of the file.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 0,
) -> None:
    """Print how many lines were lost, doubled or different."""
    rng, found = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name, progress_bar("kills", kills) as advance:
        directory = Path(name)
        (directory / "in.jsonl").write_text("\n".join(json.dumps(request(i)) for i in range(lines)))
        whole = directory / "whole"
        command(directory, whole).wait()
        while found["kills"] < kills:
            out = directory / f"round-{found['rounds']}"
            found["rounds"] += 1
            while not ended(command(directory, out), out, rng, size(whole)):
                found["kills"] += 1
                advance(1)
            compare(found, results(whole), results(out))
            print(", ".join(f"{found[name]} {name}" for name in NAMES), flush=True)
    raise typer.Exit(1 if found["lost"] or found["doubled"] or found["different"] else 0)


def request(number: int) -> dict[str, Any]:
    """Return one line; one in ten fails."""
    text = f"def function_{number % 97}(a, b):\n"
    url, body = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 4 + number % 29}),
        ("/v1/completions", {"prompt": [text, "import "], "max_tokens": 2 + number % 13, "n": 2}),
        ("/v1/embeddings", {"input": text, "dimensions": 8}),
        ("/v1/score", {"text_1": text, "text_2": ["a queue", "a list"]}),
    )[number % 4]
    return {"custom_id": f"r{number}", "method": "POST" if number % 10 else "GET", "url": url, "body": body}


def command(directory: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start a run whose results are in two files of this name."""
    files = (directory / "in.jsonl", out.with_suffix(".jsonl"))
    return subprocess.Popen([sys.executable, "-m", "quire", "batch", *files], stdout=subprocess.DEVNULL)


def paths(out: Path) -> tuple[Path, Path]:
    """Return the files of answers and errors."""
    return out.with_suffix(".jsonl"), out.with_suffix(".errors.jsonl")


def size(out: Path) -> int:
    """Return the bytes of all results."""
    return sum(path.stat().st_size for path in paths(out) if path.exists())


def results(out: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of both files."""
    found = [path.read_bytes().splitlines(keepends=True) if path.exists() else [] for path in paths(out)]
    return found[0], found[1]


def ended(process: subprocess.Popen[bytes], out: Path, rng: random.Random, whole: int) -> bool:
    """Kill a process at a random moment. Return True if it has ended before. whole: bytes of all results."""
    is_loading, begun = rng.random() < LOADING, time.monotonic()
    until, target = begun + FIRST * rng.random(), size(out) + rng.randrange(max(1, whole // 4))
    while process.poll() is None:
        if time.monotonic() > until if is_loading else size(out) > target:
            process.kill()
            process.wait()
            return False
        time.sleep(0.001)
    if process.returncode:
        raise RuntimeError(f"a run has ended with the status {process.returncode}")
    return True


def compare(
    found: Counter[str], whole: tuple[list[bytes], list[bytes]], other: tuple[list[bytes], list[bytes]]
) -> None:
    """Count the lines that are lost, doubled, or others than in the whole."""
    for expected, given in zip(whole, other, strict=True):
        ids = Counter(json.loads(line)["id"] for line in given)
        missing = {json.loads(line)["id"] for line in expected} - ids.keys()
        found["lost"] += len(missing)
        found["doubled"] += sum(count - 1 for count in ids.values())
        if not missing and len(expected) == len(given):
            found["different"] += sum(one != two for one, two in zip(expected, given, strict=True))


if __name__ == "__main__":
    typer.run(main)
