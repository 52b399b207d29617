"""Reading a Hugging Face config.json so that no key that matters is overlooked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from quire.errors import ModelError

Kind = TypeVar("Kind")

# Keys that say nothing about what the model computes at inference: bookkeeping, training, generation defaults.
IMMATERIAL = frozenset(
    """
    _attn_implementation_autoset _name_or_path _num_labels add_cross_attention architectures attention_dropout
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    embd_pdrop encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout id2label initializer_range
    is_decoder is_encoder_decoder is_llama_config keys_to_ignore_at_inference label2id length_penalty max_length
    min_length model_type neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_router_logits output_scores
    pad_token_id predict_special_tokens prefix pretraining_tp problem_type pruned_heads remove_invalid_values
    repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache
    """.split()
)

SCHEMES = ("quantization_config", "compression_config")  # how weights are stored: quire.models.quantisation reads it


class ConfigReader:
    """Hands out the keys of a config and remembers which; `finish` complains about those that nobody asked for."""

    def __init__(self, raw: Mapping[str, Any], family: str, kind: str = "family") -> None:
        """family: who reads it; kind: what errors call that."""
        self._raw = {key: value for key, value in raw.items() if key not in SCHEMES}
        self.family, self._reader = family, f"{kind} {family!r}"
        self._understood: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is missing or null."""
        self._understood.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        """Whether the key is there without a value, which is not the same as a missing one to all."""
        return key in self._raw and self._raw[key] is None

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError where it is missing without a default, or something else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {key} is {value!r}; it must be a positive integer")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer from 0 on. Raises ModelError where it is something else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"config.json: {key} is {value!r}; it must be an integer from 0 on")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number. Raises ModelError where it is something else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelError(f"config.json: {key} is {value!r}; it must be a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A positive number; None where it is missing or null. Raises ModelError where it is something else."""
        return None if self.get(key) is None else self.number(key, 1.0)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false. Raises ModelError where it is something else."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} is {value!r}; it must be true or false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, empty where it is missing. Raises ModelError where it is something else."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {key} is {value!r}; it must be an object")
        return dict(value)

    def window(self, key: str, default: int | None = None) -> int | None:
        """A positive integer; None where the key is null. A missing key means the default."""
        if self.get(key) is None:
            return None if self.is_null(key) else default
        return self.integer(key)

    def heads(self, key: str, hidden_size: int) -> int:
        """A number of heads that divides hidden_size."""
        num_heads = self.integer(key)
        if hidden_size % num_heads:
            raise ModelError(f"config.json: {key} is {num_heads}, which does not divide the hidden size {hidden_size}")
        return num_heads

    def windows(self, layer_types: list[str], window: int | None, num_layers: int) -> tuple[int | None, ...]:
        """Each layer's window, by the names that transformers gives the kinds of layers."""
        return tuple(self.of_layers({"full_attention": None, "sliding_attention": window}, layer_types, num_layers))

    def of_layers(self, kinds: Mapping[str, Kind], layer_types: list[str], num_layers: int) -> list[Kind]:
        """What each layer is, by the names of the kinds of layers. Raises ModelError for any other name."""
        named = isinstance(layer_types, list) and all(isinstance(kind, str) and kind in kinds for kind in layer_types)
        if not named or len(layer_types) != num_layers:
            raise ModelError(
                f"config.json: layer_types is {layer_types!r}; it must name one of {', '.join(kinds)} for each of "
                f"{num_layers} layers"
            )
        return [kinds[kind] for kind in layer_types]

    def only(self, key: str, *allowed: object) -> None:
        """Raise ModelError unless the key is missing, null, or one of these values."""
        value = self.get(key)
        if value is not None and value not in allowed:
            served = ", ".join(map(repr, allowed))
            raise ModelError(f"config.json: {key} is {value!r}; {self._reader} serves {served} only")

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
                f"config.json has keys that {self._reader} does not understand: {listed}. It understands "
                f"{', '.join(sorted(self._understood))}"
            )
