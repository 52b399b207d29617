"""Embeddings: find the texts that are nearest to a query.

The embedded model has learned Python's standard library; `LLM("Qwen/Qwen3-Embedding-0.6B")` is made for this.
"""

from __future__ import annotations

import numpy as np

from quire import LLM

TEXTS = [
    "import os\nimport sys\n",
    "class Queue:\n    def put(self, item):\n",
    "for key, value in table.items():\n",
    "class Stack:\n    def push(self, item):\n",
]
QUERY = "class Deque:\n    def append(self, item):\n"


def main() -> None:
    """Rank the texts by the cosine of their embeddings and the query's."""
    llm = LLM()
    query, *vectors = (np.array(output.outputs.embedding) for output in llm.embed([QUERY, *TEXTS]))
    cosines = np.stack(vectors) @ query  # each vector has length 1
    for place in np.argsort(-cosines):
        print(f"{cosines[place]:.3f}  {TEXTS[place].splitlines()[0]}")

    [pair] = llm.score(QUERY, TEXTS[1])  # the same number in one call
    print(f"score agrees: {abs(pair.outputs.score - cosines[1]) < 1e-5}")


if __name__ == "__main__":
    main()
