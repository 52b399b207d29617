"""Write embeddings of the library sentence-transformers. tools/check_encoders.py starts this program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer


def main() -> None:
    """Read texts and write their embeddings: MODEL TEXTS.json OUT.npy LONGEST."""
    directory, texts, out, longest = sys.argv[1:]
    model = SentenceTransformer(directory, device="cpu")
    model.max_seq_length = int(longest)
    np.save(out, model.encode(json.loads(Path(texts).read_text(encoding="utf-8")), batch_size=16))


if __name__ == "__main__":
    main()
