"""Reading a Hugging Face config.json without overlooking any key that matters."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from quire.errors import ModelError

Kind = TypeVar("Kind")

# Keys that do not affect the model's computation at inference: bookkeeping, training, generation defaults.
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
    repetition_penalty resid_pdrop return_dict return_dict_in_generate sbert_ce_default_activation_function
    sentence_transformers sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache
    """.split()
)

SCHEMES = ("quantization_config", "compression_config")  # weight formats: quire.models.quantisation reads them

LARGEST = 2**31 - 1  # of an integer: products of three do not overflow where they are computed
SMALLEST_NUMBER, LARGEST_NUMBER = 2.0**-126, 2.0**127  # normal numbers of fp32
# Limits of counts for which Quire or transformers creates that number of objects when a config is read.
MOST = {"layer": 2**12, "head": 2**16, "expert": 2**16}
COUNTS = re.compile(r"(?:\w*_)?(layer|head|expert)s?")

SHOWN_KEYS = 32  # unknown keys that an error lists
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxlist, _SHOWN.maxdict, _SHOWN.maxstring, _SHOWN.maxlong = 4, 32, 32, 200, 50


def shown(value: object) -> str:
    """Return the `repr` of a value for an error message, shortened if the value is large."""
    return _SHOWN.repr(value)


def check_counts(raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a config.json with more layers, heads or experts than MOST, at any depth."""
    found: list[Any] = [raw]
    while found:
        part = found.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, (dict, list)):
                found.append(value)
            elif isinstance(value, int) and (match := COUNTS.fullmatch(str(key))) and value > MOST[match[1]]:
                raise ModelError(f"config.json: {key} is {shown(value)}; it must be at most {MOST[match[1]]}")


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """Return a config.json's architectures; may be empty. Raises ModelError if it is not a list of strings."""
    return ConfigReader(raw, "").texts("architectures")


def model_type(raw: Mapping[str, Any]) -> str | None:
    """Return a config.json's model_type; None if it is missing. Raises ModelError if it is not a string."""
    found = raw.get("model_type")
    if found is not None and not isinstance(found, str):
        raise ModelError(f"config.json: model_type is {shown(found)}; it must be a text")
    return found


def num_labels(raw: Mapping[str, Any]) -> int:
    """Return the number of a classifier's labels."""
    labels = raw.get("id2label")
    return len(labels) if isinstance(labels, dict) else ConfigReader(raw, "classifier").integer("num_labels", 2)


NUMBER = f"a positive number in {SMALLEST_NUMBER:.3g}..{LARGEST_NUMBER:.3g}"


def is_number(value: object, least: float = SMALLEST_NUMBER, most: float = LARGEST_NUMBER) -> bool:
    """Return whether a value is a number in least..most. By default, fp32 arithmetic with a few of them is safe."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


class ConfigReader:
    """A reader of a config that records which keys were read; `finish` rejects the others."""

    def __init__(self, raw: Mapping[str, Any], family: str, kind: str = "family", place: str = "config.json") -> None:
        """Read a config. family: the reader's name; kind, place: names of the reader and the config in errors."""
        self._raw = {key: value for key, value in raw.items() if key not in SCHEMES}
        self.family, self._reader, self._place = family, f"{kind} {family!r}", place
        self._understood: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or the default if the key is missing or null."""
        self._understood.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Return whether the key is there, with or without a value."""
        return key in self._raw

    def is_null(self, key: str) -> bool:
        """Return whether the key is present and null. Some families distinguish that from a missing key."""
        return key in self._raw and self._raw[key] is None

    def error(self, key: str, wanted: str, value: object) -> ModelError:
        """Return the error for an invalid value. wanted: the valid values."""
        return ModelError(f"{self._place}: {key} is {shown(value)}; it must be {wanted}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Raises ModelError for any other value, or a missing one without a default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise self.error(key, f"a positive integer, at most {LARGEST}", value)
        return value

    def count(self, key: str, default: int) -> int:
        """Return an integer from 0 on. Raises ModelError for any other value."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise self.error(key, f"an integer from 0 on, at most {LARGEST}", value)
        return value

    def number(self, key: str, default: float) -> float:
        """Return a positive number. Raises ModelError for any other value."""
        value = self.get(key, default)
        if not is_number(value):
            raise self.error(key, NUMBER, value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a positive number; None if it is missing or null. Raises ModelError for any other value."""
        return None if self.get(key) is None else self.number(key, 1.0)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a bool; null is False, as in transformers. Raises ModelError for any other value."""
        value = self.get(key, False if self.is_null(key) else default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object, empty if it is missing. Raises ModelError for any other value."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return dict(value)

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """Return a list of strings, by default an empty one. Raises ModelError for any other value."""
        value = self.get(key, default or [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(key, "a list of texts", value)
        return value

    def layers(self, key: str, default: list[int]) -> list[int]:
        """Return layer indices. Some may not exist, as in a truncated model. Raises ModelError for any other value."""
        value = self.get(key, default)
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise self.error(key, "a list of layers' numbers", value)
        return value

    def window(self, key: str, default: int | None = None) -> int | None:
        """Return a positive integer; None if the key is null, the default if it is missing."""
        if self.get(key) is None:
            return None if self.is_null(key) else default
        return self.integer(key)

    def heads(self, key: str, hidden_size: int) -> int:
        """Return a number of heads. Raises ModelError if it does not divide hidden_size."""
        num_heads = self.integer(key)
        if hidden_size % num_heads:
            raise ModelError(
                f"{self._place}: {key} is {num_heads}, which does not divide the hidden size {hidden_size}"
            )
        return num_heads

    def windows(self, layer_types: list[str], window: int | None, num_layers: int) -> tuple[int | None, ...]:
        """Return each layer's window, by transformers' names of the layer types."""
        return tuple(self.of_layers({"full_attention": None, "sliding_attention": window}, layer_types, num_layers))

    def of_layers(self, kinds: Mapping[str, Kind], layer_types: list[str], num_layers: int) -> list[Kind]:
        """Return the kind of each layer, by the names in `layer_types`. Raises ModelError for any other name."""
        if len(layer_types) != num_layers or not all(kind in kinds for kind in layer_types):
            wanted = f"a list with {' or '.join(kinds)} for each of {num_layers} layers"
            raise self.error("layer_types", wanted, layer_types)
        return [kinds[kind] for kind in layer_types]

    def only(self, key: str, *allowed: object) -> None:
        """Raise ModelError unless the key is missing, null, or one of these values."""
        value = self.get(key)
        if value is not None and value not in allowed:
            served = ", ".join(map(repr, allowed)) or "null"
            raise ModelError(f"{self._place}: {key} is {shown(value)}; {self._reader} serves {served} only")

    def finish(self) -> None:
        """Raise ModelError if the config sets a key that was never read: it may change the model's output."""
        unknown = {
            key: value
            for key, value in self._raw.items()
            if value is not None and key not in self._understood and key not in IMMATERIAL
        }
        if unknown:
            listed = ", ".join(f"{key}={shown(value)}" for key, value in sorted(unknown.items())[:SHOWN_KEYS])
            raise ModelError(
                f"{self._place} has keys that {self._reader} does not understand: {listed}. It understands "
                f"{', '.join(sorted(self._understood))}"
            )


def reads(
    family: str, **defaults: Any
) -> Callable[[Callable[[ConfigReader], Kind]], Callable[[Mapping[str, Any]], Kind]]:
    """Return a decorator of a function that reads a family's config.json. It then takes the JSON object.

    ModelError is raised if the object sets a key that was never read. defaults: values of keys that are missing.
    """

    def decorated(read: Callable[[ConfigReader], Kind]) -> Callable[[Mapping[str, Any]], Kind]:
        @wraps(read)
        def whole(raw: Mapping[str, Any]) -> Kind:
            config = ConfigReader({**defaults, **raw}, family)
            found = read(config)
            config.finish()
            return found

        return whole

    return decorated
