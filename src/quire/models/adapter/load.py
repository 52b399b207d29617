"""Loading an `AdaptedModel` from a checkpoint: find the model's class, try it out, and read its weights."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from quire import ops as ops_room
from quire.errors import ModelError, Unsupported
from quire.integrations.gate import refusal, together_refusal
from quire.models.adapter.model import AdaptedModel
from quire.models.adapter.modules import Unread
from quire.models.adapter.parity_check import check
from quire.models.adapter.per_sequence import Apart
from quire.models.adapter.ragged import Together
from quire.models.hf_config import SCHEMES
from quire.models.lora.slots import LoraLimits
from quire.models.quantisation.module import Form, Module, Scheme, Tensors, form_of
from quire.models.quantisation.policy import Quantisation
from quire.ops import Backend

BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.inv_freq$")  # of old checkpoints; models compute them
UNKNOWN_LENGTH = 2048  # tokens of the longest sequence, if a config does not specify it


class Found(NamedTuple):
    """The transformers model for a checkpoint."""

    model: Any  # the class of its causal language model
    config: Any
    way: type[Together | Apart]  # to run steps through it


def find(raw: Mapping[str, Any]) -> Found:
    """Find and try out the transformers model for a config.json.

    Raises Unsupported, with the reason, if transformers has no such model, or it cannot be served.
    """
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise Unsupported(f"transformers {transformers.__version__} knows no model of type {kind!r}")
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(raw))
    except Exception as error:  # an invalid config raises many types of errors
        raise Unsupported(f"transformers cannot read its config.json: {' '.join(str(error).split())[:200]}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unsupported(f"transformers has no causal language model of type {config.model_type!r}")
    for key in SCHEMES:  # otherwise transformers would look for a reader of quantised weights, which we read
        config.__dict__.pop(key, None)
    models = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = models[0] if isinstance(models, tuple) else models
    reason = refusal(model, config)
    if reason is not None:
        raise Unsupported(reason)
    return Found(model, config, _way(model, config))


def _way(model: Any, config: Any) -> type[Together | Apart]:
    """Return the faster way whose trial succeeds. Raises Unsupported, with the reason, if both fail."""
    reason = together_refusal(model, config)
    backend = ops_room.load("auto", "cpu")
    if reason is None:
        try:
            check(model, config, backend, Together)
            return Together
        except Unsupported as error:
            reason = str(error)
    try:
        check(model, config, backend, Apart)
    except Unsupported as error:
        raise Unsupported(f"{reason}; one sequence at a time, {error}") from error
    return Apart


def longest_sequence(config: Any) -> int:
    """Return the tokens of the longest sequence that a config supports."""
    text = config.get_text_config()
    for key in ("max_position_embeddings", "max_seq_len", "seq_length"):
        if isinstance(length := getattr(text, key, None), int) and length > 0:
            return length
    return UNKNOWN_LENGTH


def load(
    checkpoint: Tensors,
    found: Found,
    backend: Backend,
    dtype: torch.dtype,
    device: str,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    reproducible: bool,
    quantisation: Quantisation,
    lora: LoraLimits | None,
) -> AdaptedModel:
    """Load the model with its weights.

    Raises Unsupported, with the reason, if it cannot be served, ModelError for missing or superfluous weights.
    """
    unread: dict[str, Form] = {}  # by module
    kind = found.model
    if quantisation.scheme is not None:
        kind = _with_unread(kind, quantisation.scheme, checkpoint, dtype, unread)
    with silence():
        try:
            model, report = kind.from_pretrained(
                None,
                config=found.config,
                # Mapped, not read; without a draft head, which no class of transformers has.
                state_dict={name: checkpoint[name] for name in checkpoint.names if not name.startswith("mtp.")},
                dtype=dtype,
                attn_implementation=found.way.implementation,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except ModelError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{checkpoint.path}: transformers cannot load its weights: {reason}") from error
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        names = sorted(name for name in map(str, report.get(what) or ()) if not BUFFERS.search(name))
        if what == "unexpected_keys":
            names = [name for name in names if not _is_of(name, unread, checkpoint)]
        if names:
            raise ModelError(
                f"{checkpoint.path} has {len(names)} {what.replace('_', ' ')}, among them "
                f"{', '.join(names[:3])}; running with them would be a different model"
            )
    model.eval()
    own = (backend, max_model_len, eos_token_ids, reproducible, quantisation, found.way, lora)
    return AdaptedModel(model.to(device), *own)


def _with_unread(kind: Any, scheme: Scheme, checkpoint: Tensors, dtype: torch.dtype, unread: dict[str, Form]) -> Any:
    """Return a subclass of the model with placeholders for the linears that are quantised in the checkpoint.

    unread: their names are added. A subclass is needed because transformers builds the model and then checks for
    missing weights.
    """

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        tied = self.get_output_embeddings() if config.get_text_config().tie_word_embeddings else None
        for path, module in list(self.named_modules()):
            for last, child in list(module.named_children()):
                name = f"{path}.{last}".removeprefix(".")
                if type(child) not in (nn.Linear, Conv1D) or child is tied:
                    continue
                form = form_of(scheme, name, checkpoint.names)
                if form is None:
                    continue
                if missing := [f"{name}.{one}" for one in form.needs if f"{name}.{one}" not in checkpoint.names]:
                    raise ModelError(f"{checkpoint.path} lacks {len(missing)} tensors, among them {missing[0]}")
                shape = child.weight.T.shape if type(child) is Conv1D else child.weight.shape
                stored = Module(checkpoint, name, *shape)
                setattr(module, last, Unread(child, partial(form.read, stored, dtype)))
                unread[name] = form

    # It keeps the model's name, by which transformers and our checks look up the source.
    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def _is_of(tensor: str, unread: Mapping[str, Form], checkpoint: Tensors) -> bool:
    """Return whether a tensor belongs to a linear that we read. Some tools write a bias of zeros for every linear."""
    name, _, kind = tensor.rpartition(".")
    if name not in unread:
        return False
    if kind == "bias":
        return not bool(checkpoint[tensor].any())
    return kind in (*unread[name].needs, *unread[name].takes)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Disable transformers' progress bars and reports within this context: its callers read the reports."""
    shown, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()
