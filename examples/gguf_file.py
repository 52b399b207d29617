"""GGUF: a file of llama.cpp's format is a whole model, with its tokenizer and its chat template.

`python examples/gguf_file.py MODEL.gguf`; `quire pull OWNER/REPOSITORY --gguf-file NAME` downloads one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire import LLM, SamplingParams


def main() -> None:
    """Answer a question with the model of a file."""
    path = Path(sys.argv[1])
    llm = LLM(str(path))  # the weights stay in the file's blocks
    question = [{"role": "user", "content": "Name three rivers of Portugal."}]
    print(f"prompt: {llm.get_tokenizer().apply_chat_template(question, tokenize=False)!r}")
    [output] = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=64))
    sample = output.outputs[0]
    print(f"answer of {path.name}, {len(sample.token_ids)} tokens: {sample.text}")


if __name__ == "__main__":
    main()
