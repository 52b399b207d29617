"""The trace of transformers' eager run of a checkpoint: the hidden states after its layers, and the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quire.diff.side import Side
from quire.diff.trace import About, Output, Prompt, Trace
from quire.errors import ConfigError, ModelError
from quire.models import DTYPES, locate


@torch.inference_mode()
def trace_transformers(side: Side, prompts: Sequence[Sequence[int]], num_greedy: int, most_bytes: int) -> Trace:
    """Run prompts on transformers' code with its own attention. Those are kept whole that fit into `most_bytes`.

    Raises ConfigError for a GGUF file or a dtype that does not exist, and ModelError for a checkpoint that transformers
    cannot run.
    """
    model, layers, head = _load(side)
    most = model.config.get_text_config().vocab_size
    if (largest := max(max(tokens) for tokens in prompts)) >= most or min(min(tokens) for tokens in prompts) < 0:
        raise ConfigError(f"a prompt has the token {largest}; {side.name} has tokens from 0 to {most - 1}")
    found: dict[str, Tensor] = {}
    runs, left = [], most_bytes
    for tokens in prompts:
        with _recorded(layers, head, found):
            logits = _logits(model, tokens)
        found["logits"] = logits
        size = sum(value.nbytes for value in found.values())
        is_whole = size <= left
        left -= size * is_whole
        outputs = {name: Output(value.clone()) for name, value in found.items()}
        if not is_whole:
            outputs = {name: output.reduced() for name, output in outputs.items()}
        greedy = [int(logits[-1].argmax())]
        while len(greedy) < num_greedy:
            greedy.append(int(_logits(model, [*tokens, *greedy])[-1].argmax()))
        runs.append(Prompt(list(tokens), outputs, logits.argmax(-1).tolist(), greedy))
    return Trace(_about(side, model, {name: value.shape[1] for name, value in found.items()}), runs)


def _load(side: Side) -> tuple[Any, Any, Any]:
    """Return the model, its layers and its output projection."""
    path = locate(side.name)
    if path.is_file():
        raise ConfigError(f"{side.name} is a GGUF file; run=transformers takes a directory or a repository's name")
    dtype = side.options.get("dtype", "auto")
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be auto or one of {', '.join(DTYPES)}")
    import transformers

    try:
        with _silence():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=DTYPES.get(dtype, "auto"), attn_implementation="eager", local_files_only=True
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be run by transformers: {str(error).splitlines()[0]}") from error
    count = model.config.get_text_config().num_hidden_layers
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == count]
    head = model.get_output_embeddings()
    if not lists or head is None:
        raise ModelError(f"transformers' {type(model).__name__} has no list of {count} layers and an output projection")
    return model.eval(), lists[0], head


@contextmanager
def _silence() -> Iterator[None]:
    """Disable transformers' progress bars and warnings within this context."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits of all rows: fp32 [T, V]."""
    return torch.as_tensor(model(torch.tensor([tokens]), use_cache=False).logits[0]).float()


@contextmanager
def _recorded(layers: Any, head: Any, found: dict[str, Tensor]) -> Iterator[None]:
    """Store the input of the first layer, the output of each layer, and the input of the output projection."""

    def keep(name: str, value: Any) -> None:
        found[name] = (value[0] if isinstance(value, tuple) else value)[0]  # of the only sequence

    def input_of(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _, given, named: keep(name, given[0] if given else named["hidden_states"])

    def output_of(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda _, given, value: keep(name, value)  # noqa: ARG005

    hooks = [
        layers[0].register_forward_pre_hook(input_of("embedding"), with_kwargs=True),
        *(layer.register_forward_hook(output_of(f"layers.{i}")) for i, layer in enumerate(layers)),
        head.register_forward_pre_hook(input_of("final_norm"), with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _about(side: Side, model: Any, widths: dict[str, int]) -> About:
    names = {name: name for name in widths}
    dtype = str(model.dtype).removeprefix("torch.")
    return About(
        model=side.name or "the embedded model",
        settings=f"{dtype}, transformers {type(model).__name__}",
        formats=f"{dtype} in transformers",
        widths=widths,
        ends=names,
        operators=names,
        unit=torch.finfo(model.dtype).eps / 2,
    )
