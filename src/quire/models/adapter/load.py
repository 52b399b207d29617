"""From a checkpoint to an `AdaptedModel`: the model's class, whether it can be served, its trial, its weights."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from quire import ops as ops_room
from quire.errors import ModelError, Unsupported
from quire.integrations.gate import refusal
from quire.models.adapter.attention import NAME
from quire.models.adapter.model import AdaptedModel
from quire.models.adapter.trial import check
from quire.ops import Backend

BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.inv_freq$")  # of old checkpoints; their models make them
UNKNOWN_LENGTH = 2048  # of the longest sequence, where a config does not say


class Found(NamedTuple):
    """What transformers has for a checkpoint."""

    model: Any  # the class of its causal language model
    config: Any


def find(directory: Path, raw: Mapping[str, Any]) -> Found:
    """The class and the config of a checkpoint, or of a directory with its config.json alone, after its trial.

    raw: the config.json.

    Raises Unsupported, with the reason, where transformers has none, or has one that cannot be served.
    """
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise Unsupported(f"transformers {transformers.__version__} knows no model of type {kind!r}")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # a config's ways to be wrong are many
        raise Unsupported(f"transformers cannot read its config.json: {' '.join(str(error).split())[:200]}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unsupported(f"transformers has no causal language model of type {config.model_type!r}")
    models = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = models[0] if isinstance(models, tuple) else models
    reason = refusal(model, config)
    if reason is not None:
        raise Unsupported(reason)
    check(model, config, ops_room.load("auto", "cpu"))
    return Found(model, config)


def longest_sequence(config: Any) -> int:
    """Tokens of the longest sequence that a config was made for."""
    text = config.get_text_config()
    for key in ("max_position_embeddings", "max_seq_len", "seq_length"):
        if isinstance(length := getattr(text, key, None), int) and length > 0:
            return length
    return UNKNOWN_LENGTH


def load(
    directory: Path,
    found: Found,
    backend: Backend,
    dtype: torch.dtype,
    device: str,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    reproducible: bool,
) -> AdaptedModel:
    """The model with its weights.

    Raises Unsupported, with the reason, where it cannot be served; ModelError for weights that are missing or too many.
    """
    with _silence():
        try:
            model, report = found.model.from_pretrained(
                directory,
                config=found.config,
                dtype=dtype,
                attn_implementation=NAME,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{directory}: transformers cannot load its weights: {reason}") from error
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        names = sorted(name for name in map(str, report.get(what) or ()) if not BUFFERS.search(name))
        if names:
            raise ModelError(
                f"{directory} has {len(names)} {what.replace('_', ' ')}, among them {', '.join(names[:3])}; running "
                "with them would be a different model"
            )
    model.eval()
    return AdaptedModel(model.to(device), backend, max_model_len, eos_token_ids, reproducible)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """No progress bars of transformers."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
