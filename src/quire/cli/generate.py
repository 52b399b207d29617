"""quire generate: continue texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.options import ENGINE, OF_MANY, AsJson, fail, with_options
from quire.config import parse_loras
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire import LLM, SamplingParams
    from quire.frontend.outputs import RequestOutput


@with_options(*ENGINE, without=OF_MANY)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue; - reads one from stdin.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A file whose text is a prompt; may be repeated.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="New tokens at most. Default: the checkpoint's own, else 128.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most probable token each time. Default: the checkpoint's own, else 0.7."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1: tokens of the text so far become less probable. Default: the checkpoint's own, else 1."
        ),
    ] = None,
    lora: Annotated[str | None, typer.Option(help="NAME=PATH of a LoRA adapter that continues them.")] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Continue one or several texts. The output is printed during generation, prompt after prompt."""
    from quire import LLM, SamplingParams

    texts = _read_prompts(prompts or [], file or [])
    asked: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "repetition_penalty": repetition_penalty,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    SamplingParams(**given)  # check the options before the model is loaded
    loras = parse_loras([] if lora is None else [lora])
    llm = LLM(lora=loras, **options)
    params = SamplingParams(**{"max_tokens": 128, "temperature": 0.7} | dict(llm.default_sampling) | given)
    show = _print_json if as_json else _print_text
    outputs = show(llm, texts, params, next(iter(loras), None))
    for output in outputs:
        if output.outputs[0].error is not None:
            fail(output.outputs[0].error)


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
        sample = output.outputs[0]
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
    """Print the texts in the order of the prompts, each while it grows. Later ones wait for the earlier ones."""
    if llm.tokenizer is None:
        raise QuireError("this model has no tokenizer, so it cannot continue a text; use quire.LLM with token ids")
    outputs: dict[str, RequestOutput] = {}
    current, shown = 0, 0  # the current prompt, and the number of its characters that are printed
    _write(texts[0])
    for output in llm.stream(texts, params, lora=lora):
        outputs[output.request_id] = output
        while (now := outputs.get(str(current))) is not None:
            _write(now.outputs[0].text[shown:])
            shown = len(now.outputs[0].text)
            if not now.finished:
                break
            current, shown = current + 1, 0
            _write("\n" if current == len(texts) else f"\n\n{texts[current]}")
    return list(outputs.values())


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
