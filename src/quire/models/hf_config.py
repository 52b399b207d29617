"""Reading a Hugging Face config.json so that no key that matters is overlooked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError

# Keys that say nothing about what the model computes at inference: bookkeeping, training, generation defaults.
IMMATERIAL = frozenset(
    """
    _name_or_path _attn_implementation_autoset architectures attention_dropout auto_map bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id dtype embd_pdrop eos_token_id
    finetuning_task hidden_dropout id2label initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference
    label2id model_type output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp
    problem_type resid_pdrop return_dict sep_token_id task_specific_params tokenizer_class torch_dtype torchscript
    transformers_version use_bfloat16 use_cache
    """.split()
)


class ConfigReader:
    """Hands out the keys of a config and remembers which; `finish` complains about those that nobody asked for."""

    def __init__(self, raw: Mapping[str, Any], family: str) -> None:
        self._raw = raw
        self._family = family
        self._understood: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is missing or null."""
        self._understood.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError where it is missing without a default, or something else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {key} is {value!r}; it must be a positive integer")
        return value

    def only(self, key: str, *allowed: object) -> None:
        """Raise ModelError unless the key is missing, null, or one of these values."""
        value = self.get(key)
        if value is not None and value not in allowed:
            served = ", ".join(map(repr, allowed))
            raise ModelError(f"config.json: {key} is {value!r}; family {self._family!r} serves {served} only")

    def finish(self) -> None:
        """Raise ModelError if a key was set that nobody asked for: it may change what the model computes."""
        unknown = {
            key: value
            for key, value in self._raw.items()
            if value is not None and key not in self._understood and key not in IMMATERIAL
        }
        if unknown:
            listed = ", ".join(f"{key}={value!r}" for key, value in sorted(unknown.items()))
            raise ModelError(
                f"config.json has keys that family {self._family!r} does not understand: {listed}. It understands "
                f"{', '.join(sorted(self._understood))}"
            )
