"""quire generate: continue texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.options import ENGINE, OF_MANY, AsJson, fail, sampling_of, with_options, with_sampling
from quire.config import parse_loras
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire import LLM, SamplingParams
    from quire.frontend.outputs import RequestOutput

OWN: dict[str, Any] = {"max_tokens": 128, "temperature": 0.7}  # where neither the user nor the model sets them


@with_options(*ENGINE, without=(*OF_MANY, "seed"))
@with_sampling(**OWN)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue; - reads one from stdin.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A file whose text is a prompt; may be repeated.")] = None,
    lora: Annotated[str | None, typer.Option(help="NAME=PATH of a LoRA adapter that continues them.")] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Continue one or several texts. The output is printed during generation, prompt after prompt."""
    from quire import LLM, SamplingParams

    texts = _read_prompts(prompts or [], file or [])
    given = sampling_of(options)
    loras = parse_loras([] if lora is None else [lora])
    llm = LLM(lora=loras, **options)
    llm.engine.pooling.check_writes()
    params = SamplingParams(**OWN | dict(llm.default_sampling) | given)
    show = _print_json if as_json else _print_text
    outputs = show(llm, texts, params, next(iter(loras), None))
    for sample in (sample for output in outputs for sample in output.outputs):
        if sample.error is not None:
            fail(sample.error)


def _read_prompts(prompts: list[str], files: list[Path]) -> list[str]:
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    for path in files:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            fail(f"{path} cannot be read as text: {error}")
    if not texts and not sys.stdin.isatty():
        texts = [sys.stdin.read()]
    if not any(texts):
        fail('no prompt; give one, as in: quire generate "def fibonacci("')
    return texts


def _print_json(llm: LLM, texts: list[str], params: SamplingParams, lora: str | None) -> list[RequestOutput]:
    outputs = llm.generate(texts, params, lora=lora)
    for output in outputs:
        for sample in output.outputs:
            record: dict[str, Any] = {
                "prompt": output.prompt,
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "seed": sample.seed,
            }
            print(json.dumps(record))
    return outputs


def _print_text(llm: LLM, texts: list[str], params: SamplingParams, lora: str | None) -> list[RequestOutput]:
    """Print the texts in the order of prompts and samples, each while it grows. Later ones wait for earlier ones."""
    if llm.tokenizer is None:
        raise QuireError("this model has no tokenizer, so it cannot continue a text; use quire.LLM with token ids")
    outputs: dict[str, RequestOutput] = {}
    count = len(texts) * params.n
    current, shown = 0, 0  # the current sample of all, and the number of its characters that are printed
    _write(texts[0])
    for output in llm.stream(texts, params, lora=lora):
        outputs[output.request_id] = output
        while current < count and (now := outputs.get(str(current // params.n))) is not None:
            sample = now.outputs[current % params.n]
            _write(sample.text[shown:])
            shown = len(sample.text)
            if sample.finish_reason is None:
                break
            current, shown = current + 1, 0
            _write("\n" if current == count else f"\n\n{texts[current // params.n]}")
    return list(outputs.values())


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
