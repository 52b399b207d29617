"""Read mutated GGUF files: each is read, or refused by a sentence. python -m tests.models.fuzz_gguf [N] [SEED]"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.models.gguf.hostile import mutated, read, whole

ROOM = 2**30  # bytes that a process may take more than it has when it starts


def fuzz(directory: Path, count: int, seed: int, content: bytes | None = None) -> Counter[str]:
    """How many of so many files were read, and how many refused."""
    draw, outcome = random.Random(seed), Counter[str]()
    content = whole() if content is None else content
    for i in range(count):
        path = directory / "model.gguf"
        path.write_bytes(mutated(content, draw))
        try:
            said = read(path)
        except BaseException:
            print(f"file {i} of seed {seed} is kept as {path.rename(directory / f'{seed}-{i}.gguf')}", file=sys.stderr)
            raise
        path.unlink()
        assert said is None or (len(said) < 2000 and said), said
        outcome["read" if said is None else "refused"] += 1
    return outcome


if __name__ == "__main__":
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * ROOM, -1))
    given = [int(word) for word in sys.argv[1:]]
    print(dict(fuzz(Path(tempfile.mkdtemp()), given[0] if given else 10_000, given[1] if len(given) > 1 else 0)))
