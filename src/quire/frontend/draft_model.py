"""The option draft_model: a second model that proposes tokens. It is checked before any weight is read."""

from __future__ import annotations

from dataclasses import replace

from quire.cache.groups import has_states
from quire.cache.sizing import free_memory
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.frontend.tokenizer import Tokenizer, find_tokenizer
from quire.models import Adapted, Own, choose, load_model, locate
from quire.models.eagle import is_eagle, read_eagle
from quire.models.files import Files, files_of
from quire.models.model import Model
from quire.ops import Backend

SHOWN = 3  # tokens that an error message names
SHRINKS = {None: 1, "int8": 2, "int4": 4}  # weights that are rounded at load


def find_draft_model(config: EngineConfig, files: Files, tokenizer: Tokenizer | None, backend: Backend) -> Files | None:
    """Return the files of the option draft_model, None without one, and for a draft head in separate files.

    Raises ModelError for a head of another model, or one in a layout that is not known.
    Raises ConfigError if it has another vocabulary than the model, cannot be computed here, or does not fit in memory.
    """
    if config.draft_model is None or config.num_speculative_tokens == 0:
        return None
    asked = f"draft_model is {config.draft_model!r}"
    if not backend.batch_invariant(config.device):
        raise ConfigError(
            f"{asked}; draft tokens need batch-invariant results: the backend 'cpu' on a CPU, not {backend.name!r} on "
            f"{config.device!r}"
        )
    found, model = files_of(locate(config.draft_model)), choose(files, config.model_impl)
    _check_writes(asked, "the model", model)
    if is_eagle(found.config()):
        if isinstance(model, Adapted):
            raise ConfigError(
                f"{asked}, an EAGLE checkpoint; it needs Quire's own decoder, and the model has an {model}"
            )
        read_eagle(found, model.config)
        return None  # a part of the model, which is loaded with it
    choice = choose(found)
    _check_writes(asked, "it", choice)
    if isinstance(choice, Own) and has_states(choice.config.groups):
        raise ConfigError(
            f"{asked}, a {choice.raw['architectures'][0]}; it has layers that keep a state, and a draft model must "
            "consist of attention layers"
        )
    _check_vocabulary(asked, tokenizer, find_tokenizer(found), _vocab_size(model), _vocab_size(choice))
    shrinks = SHRINKS[config.quantization]
    sizes = [
        sum(path.stat().st_size for path in of.weight_files(one.part)) // (1 if one.scheme else shrinks)
        for of, one in ((found, choice), (files, model))
    ]
    free = free_memory(config.device)
    if free is not None and sum(sizes) > free:
        own, others, left = (f"{size / 2**20:,.0f} MiB" for size in (*sizes, free))
        raise ConfigError(f"{asked}; its weights take {own} and the model's {others}, and only {left} are free")
    return found


def load_draft_model(files: Files | None, config: EngineConfig, backend: Backend) -> Model | None:
    """Load the draft model. Its options are those of the model, as far as they suit it."""
    if files is None:
        return None
    given = choose(files).scheme is None  # else its weights are rounded already
    own = replace(
        config,
        draft="off",
        draft_model=None,
        max_model_len=None,
        enable_lora=False,
        model_impl="auto",
        quantization=config.quantization if given else None,
        quantization_head=config.quantization_head if given else None,
        quantization_activations=config.quantization_activations if given else "int8",
    )
    return load_model(files, own, backend)


def _check_writes(asked: str, subject: str, choice: Own | Adapted) -> None:
    if isinstance(choice, Own) and not (choice.config.causal and choice.config.has_head):
        raise ConfigError(f"{asked}; {subject} is an encoder, which writes no tokens. Leave draft_model out")


def _vocab_size(choice: Own | Adapted) -> int:
    if isinstance(choice, Own):
        return choice.config.vocab_size
    return int(choice.found.config.get_text_config().vocab_size)


def _check_vocabulary(asked: str, model: Tokenizer | None, draft: Tokenizer | None, *sizes: int) -> None:
    """Raise ConfigError if a token of both vocabularies is another one in each. sizes: of the models' vocabularies."""
    if model is None or draft is None:
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{asked}; its vocabulary has {sizes[1]:,} tokens, and the model's {sizes[0]:,}")
        return
    own, others = model.tokens, draft.tokens
    different = [token for token in sorted(own.keys() & others.keys()) if own[token] != others[token]]
    if different:
        listed = ", ".join(f"{token} ({own[token]!r}, here {others[token]!r})" for token in different[:SHOWN])
        rest = f", and {len(different) - SHOWN:,} more" if len(different) > SHOWN else ""
        raise ConfigError(f"{asked}, whose vocabulary is not the model's: it differs in token {listed}{rest}")
