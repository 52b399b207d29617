"""Every causal language model of the installed transformers in a small, random form: what Quire makes of it.

`python -m tests.models.sweep` writes what it found into the package, where `quire models` reads it, and docs/models.md.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from quire.errors import ModelError
from quire.models import Own, choose
from quire.models.adapter.tiny import DEPTH, VOCAB, shrink
from quire.models.adapter.trial import randomise
from quire.models.text_part import WHOLES
from quire.models.supported import PATH, Supported, Sweep, read
from tests.models.checkpoints import engine, probed_logits

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SIDED = sorted(WHOLES)
# What a config of that type cannot be without, and its defaults leave out.
DECODERS = "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert".split()
ENCODER_DECODERS = "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet whisper"
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
GIVEN: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in [*DECODERS, "xlm-roberta", "xlm-roberta-xl"]},
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "nemotron": {"num_key_value_heads": 8},
    **{name: {"is_decoder": True, "is_encoder_decoder": False} for name in ENCODER_DECODERS.split()},
    **{name: {"text_config": {"rope_parameters": MROPE}} for name in ("qwen2_vl", "qwen2_5_vl")},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}
LENGTHS = (1, 9, 23)
STEP = 12  # tokens: prompts are cut into chunks, beside single tokens of the others
TOLERANCE = 1e-4  # of the largest logit


class Row(NamedTuple):
    """What became of a type."""

    supported: Supported
    error: float | None  # the largest difference of two logits from eager attention, over the largest logit


def sweep(name: str) -> Row:
    """Save a small model of that type, load it as anybody would, and compare it with eager attention.

    Raises AssertionError where it is served and answers something else.
    """
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = Path(place)
        kind = _class(name)
        try:
            config = CONFIG_MAPPING[name](**GIVEN.get(name, {}))
        except Exception as error:
            return Row(Supported(name, "refused", f"its config has no defaults: {_line(error)}"), None)
        config.architectures = [kind.__name__]
        config.save_pretrained(directory)
        try:
            choice = choose(directory)  # of the config alone: some that are refused take long to make
            model = _saved(kind, config, directory)
            made = engine(directory, max_num_batched_tokens=STEP, block_size=4)
        except ModelError as error:
            return Row(Supported(name, "refused", str(error).rpartition("be served: ")[2]), None)
        how = "own decoder" if isinstance(choice, Own) else f"adapter{choice.found.way.note}"
        return Row(Supported(name, how, ""), _error(made, model))


def _class(name: str) -> Any:
    """Of the whole, where a type is one of several sides."""
    config = CONFIG_MAPPING[name]
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if config in mapping and (name in WHOLES or mapping is MODEL_FOR_CAUSAL_LM_MAPPING):
            kinds = mapping[config]
            return kinds[0] if isinstance(kinds, tuple) else kinds
    raise KeyError(name)


def _saved(kind: Any, config: Any, directory: Path) -> Any:
    """A small model with its files in the directory; None, and the config alone, where none can be made."""
    raw = config.to_dict()
    try:
        small = type(config).from_dict(_small_whole(raw) if "text_config" in raw else shrink(raw))
        model = kind._from_config(small, attn_implementation="eager", dtype=torch.float32).eval()
        randomise(model)
        model.save_pretrained(directory)
    except Exception:
        return None
    return model


def _small_whole(raw: dict[str, Any]) -> dict[str, Any]:
    """A whole with a small text part, and one layer in each of its other sides."""
    small = {key: value % VOCAB if key.endswith(("_token_id", "_token_index")) and value else value
             for key, value in raw.items()}  # fmt: skip
    for key, value in raw.items():
        if key == "text_config":
            small[key] = shrink(value)
        elif key.endswith("_config") and isinstance(value, dict):
            small[key] = value | {depth: 1 for depth in (*DEPTH, "depth") if isinstance(value.get(depth), int)}
    return small


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


@torch.inference_mode()
def _error(made: Any, eager: Any) -> float:
    generator = torch.Generator().manual_seed(3)
    padding = eager.config.get_text_config().pad_token_id  # some count positions without it
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts = [[token if token != padding else 2 + (padding == 2) for token in prompt] for prompt in prompts]
    probe, tokens = probed_logits(made, prompts, max_tokens=4)
    assert {"prefill", "decode"} in probe.steps, "no step had prompts and single tokens"
    worst, largest = 0.0, 0.0
    for i, prompt in enumerate(prompts):
        text = prompt + tokens[f"r{i}"]
        expected = eager(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()
        for end in range(1, len(text)):
            worst = max(worst, float((probe.found[tuple(text[:end])] - expected[end - 1]).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    assert worst <= TOLERANCE * max(1.0, largest), f"logits up to {largest} differ by {worst}"
    return worst / max(1.0, largest)


PAGE = """# Models

Point Quire at a checkpoint. `quire info --model DIRECTORY` says in one line who computes it, or why nobody does:

- **own decoder**: Quire's, the fastest. A family is chosen only if it understands every key of the config.
- **adapter**: transformers' modelling code with Quire's paged attention and linears. Before a checkpoint is served, a
  small random copy of it answers a mixed batch and has to agree with eager attention, to 1e-4 of the largest logit;
  else it is refused.
- **refused**, with the reason.

`LLM(model, model_impl="quire")` or `model_impl="transformers"` asks for one of the two. Products that are not plain
linears (experts, convolutions) stay transformers' own in the adapter: then a row's bits may depend on the batch, and no
tokens are guessed.

Below are the types of causal language models of transformers {release}, each tried with a small random checkpoint of
its default config in a mixed batch of prompts, chunks and single tokens: {own} on Quire's decoder, {adapter} through
the adapter, {refused} refused. A published checkpoint may have more than its type's defaults, such as dynamic
RoPE or layers that differ in heads; then it is refused with the reason. Quantised weights
[are served](quantisation.md).
`python -m tests.models.sweep` writes this page; `quire models` prints the same.

**Own decoder**: {own_names}.

**Adapter**: {adapter_names}.

| refused | because |
|---|---|
{reasons}
"""


def document(found: Sweep) -> str:
    """docs/models.md."""
    kinds = ("own decoder", "adapter", "refused")
    own, adapted, refused = ([row for row in found.types if row.how == how] for how in kinds)
    return PAGE.format(
        release=found.transformers,
        own=len(own),
        adapter=len(adapted),
        refused=len(refused),
        own_names=", ".join(row.name for row in own),
        adapter_names=", ".join(row.name for row in adapted),
        reasons="\n".join(f"| {row.name} | {row.reason.replace('|', '/')} |" for row in refused),
    )


def _hush() -> None:
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def main() -> None:
    """Write what there is."""
    names = sorted({*TYPES, *SIDED})
    rows = []
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_hush, max_tasks_per_child=20) as pool:
        for row in pool.map(sweep, names):
            rows.append(row.supported)
            print(*row.supported, "" if row.error is None else f"{row.error:.1e}", flush=True)
    content = {"transformers": version("transformers"), "types": [list(row) for row in rows]}
    PATH.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")
    DOCS.write_text(document(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
