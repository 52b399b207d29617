"""mistral.rs, one request after the other, with weights that it rounds while it loads them: Q8_0 and Q4K.

Its environment: `pip install mistralrs`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from importlib.metadata import version
from pathlib import Path

from quire_bench.peers.runners.protocol import Generate, Settings, serve

KINDS = {None: None, "int8": "Q8_0", "int4": "Q4K"}


def start(settings: Settings) -> tuple[str, Generate]:
    """The version and what generates."""
    os.environ["RAYON_NUM_THREADS"] = str(settings.threads)

    from mistralrs import Architecture, CompletionRequest, Runner, Which

    if settings.model is None:
        raise SystemExit("mistral.rs needs a checkpoint")
    runner = Runner(
        which=Which.Plain(model_id=str(readable(Path(settings.model))), arch=Architecture.Llama),
        max_seqs=settings.max_requests,
        in_situ_quant=KINDS[settings.quantization],
        prefix_cache_n=settings.max_requests if settings.prefix_caching else 0,
    )
    # It takes texts only. A text of words that are tokens has as many tokens as words.
    texts = [runner.detokenize_text([token], False) for token in range(2, 2000)]
    words = [text for text in texts if re.fullmatch(" [a-z]+", text)]

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> list[int]:
        counts = []
        for prompt, count in zip(prompts, new_tokens, strict=True):
            text = "".join(words[token % len(words)] for token in prompt)
            options = {"max_tokens": count, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
            request = CompletionRequest(model="default", prompt=text, **options)
            usage = runner.send_completion_request(request).usage
            if usage.prompt_tokens != len(prompt):
                raise SystemExit(f"mistral.rs reads {usage.prompt_tokens} tokens in a prompt of {len(prompt)}")
            counts.append(usage.completion_tokens)
        return counts

    return version("mistralrs"), generate


def readable(checkpoint: Path) -> Path:
    """The checkpoint as it wants it, under the working directory: it looks for rope_theta where it used to stand."""
    copy = Path(tempfile.mkdtemp(dir="."))
    for path in checkpoint.iterdir():
        (copy / path.name).symlink_to(path)
    config = json.loads((checkpoint / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps((config.get("rope_parameters") or {}) | config))
    return copy.absolute()


if __name__ == "__main__":
    serve(start)
