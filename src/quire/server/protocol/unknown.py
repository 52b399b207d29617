"""Unknown fields of request bodies: they are refused, dropped, or dropped and reported."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from starlette.requests import Request as HttpRequest

from quire.server.http.access import IGNORED
from quire.server.http.api_error import MAX_SHOWN, ApiError, cut
from quire.server.protocol.body import Body
from quire.server.protocol.sampling import Sampling

log = logging.getLogger("quire.server")

MAX_NAMES = 16  # reported names of one request
MAX_NAME = 64  # characters of a reported name
PLACE = re.compile(r"\[[0-9]+\]")
MAX_LOGGED = 256  # names that are remembered as logged; later ones are not logged
# The smallest similarity of names, without case and underscores. With less, "cache_prompt" would match "prompt".
NEAR = 0.8

# Fields that clients use for their own notes or for a proxy, and fields that request the default behavior.
BOOKKEEPING = frozenset(
    "background_tasks cache_prompt call_id chat_id client_id conversation_id id id_slot keep_alive litellm_call_id "
    "litellm_metadata litellm_session_id litellm_trace_id message_id model_item prompt_cache_key request_id "
    "safety_identifier session_id slot_id span_id tags thread_id trace_id user_id".split()
)
# Fields of a way of sampling that another field requests, which is refused: alone they have no effect.
DEPENDENT = frozenset(
    "dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent mirostat_eta mirostat_tau "
    "smoothing_curve xtc_threshold".split()
)
# Names that other servers or routes use for a field that changes the text, and the name of that field here.
ALSO_CALLED = {
    "beam_width": "n, with use_beam_search",
    "do_sample": "temperature (0 is greedy)",
    "ebnf": "grammar",
    "format": "response_format",
    "json_schema": "response_format",
    "lora": "model, by the adapter's name",
    "max_completion_tokens": "max_tokens",
    "max_gen_len": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_beams": "n, with use_beam_search",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_tokens": "stop_token_ids",
    "stop_words": "stop",
    "stopping_strings": "stop",
    "temp": "temperature",
}
# Fields of other servers that have no counterpart here, and the reasons.
NOT_HERE = (
    dict.fromkeys(
        "dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff guidance_scale min_keep mirostat penalty_alpha "
        "samplers smoothing_factor temperature_last tfs tfs_z top_a top_n_sigma typical typical_p "
        "xtc_probability".split(),
        "this way of drawing tokens is not served; temperature, top_p, top_k and min_p are",
    )
    | dict.fromkeys(
        "dry_penalty last_n_tokens no_repeat_ngram_size penalize_nl penalize_newline penalty_prompt repeat_last_n "
        "repetition_penalty_range".split(),
        "penalties are repetition_penalty, presence_penalty and frequency_penalty, over the whole text",
    )
    | dict.fromkeys(
        ("early_stopping", "length_normalization", "diversity_penalty", "num_beam_groups"),
        "a beam search has n, max_tokens and length_penalty",
    )
    | dict.fromkeys(
        ("context", "raw", "template"),
        "it belongs to Ollama's own routes; give the whole prompt or all of the messages",
    )
    | dict.fromkeys(
        ("image_data", "image_url", "images", "multi_modal_data"),
        "an image is a part of a chat's message, of type 'image_url'",
    )
    | dict.fromkeys(
        ("audio_url", "videos"),
        "models read text and images alone",
    )
    | dict.fromkeys(("logits_processors", "logits_processor"), "no code of a request is run")
    | {
        "documents": "documents are not put into prompts here; write them into a message",
        "input_prefix": "/v1/completions fills in, between prompt and suffix",
        "input_suffix": "/v1/completions fills in, between prompt and suffix",
        "n_keep": "no part of a prompt is dropped; one that is too long is an error",
        "negative_prompt": "the text is not steered away from another one here",
        "options": "it belongs to Ollama's own routes; give temperature, top_p, seed and the others in the body itself",
        "prompt_embeds": "a prompt is a text or token ids",
        "structural_tag": "the text can follow a schema, a regex or a grammar",
        "system": "give a message with the role 'system'",
        "truncation_side": "truncate_prompt_tokens keeps the end of a prompt",
        "transforms": "no part of a prompt is dropped; one that is too long is an error",
    }
)
# Values that request the behavior here, by the fields of the two tables above. So do null and empty values.
NEUTRAL: dict[str, tuple[Any, ...]] = (
    dict.fromkeys(("guidance_scale", "num_beam_groups", "num_beams", "tfs", "tfs_z", "typical", "typical_p"), (1,))
    | dict.fromkeys(
        "diversity_penalty dry_multiplier dry_penalty dynatemp_range epsilon_cutoff eta_cutoff mirostat "
        "no_repeat_ngram_size penalty_alpha smoothing_factor top_a xtc_probability".split(),
        (0,),
    )
    | dict.fromkeys(("last_n_tokens", "repeat_last_n"), (64, -1))  # the default elsewhere, and the whole text
    | dict.fromkeys(("early_stopping", "raw", "temperature_last"), (False,))
    | {
        "do_sample": (True,),
        "min_keep": (0, 1),
        "n_keep": (0, -1),
        "penalize_newline": (True,),
        "penalize_nl": (True,),
        "repetition_penalty_range": (0, -1),
        "top_n_sigma": (0, -1),
        "truncation_side": ("left",),
    }
)
NOTHING: tuple[Any, ...] = (None, "", [], {})


class UnknownField(ApiError):
    """A body has a field that its route does not accept; `param` is the field's name in the body."""


class UnknownFields:
    """The policy for unknown fields. It belongs to the event loop."""

    def __init__(self, policy: str) -> None:
        """Set the policy: "report" drops unknown fields and reports them; "refuse" answers them with an error."""
        self._refuses = policy == "refuse"
        self._logged: set[str] = set()

    def settle(self, request: HttpRequest, body: Body) -> None:
        """Remove unknown fields from a body, and store the names to report in the request's state.

        Raises UnknownField for a field that is misspelt or known to change the text.
        """
        dropped: dict[str, None] = {}
        for path, owner, name, value in _unknown(body, ""):
            if not path and (name in BOOKKEEPING or _asks_nothing(owner, name, value)):
                continue
            why = _why_not(owner, path, name)
            if why is not None or self._refuses:
                field = path.partition("[")[0].partition(".")[0] or name
                raise UnknownField(sentence(path + name, why), param=cut(field))
            dropped[_written(path + name)] = None
        if dropped:
            self._report(request, list(dropped))

    def _report(self, request: HttpRequest, names: list[str]) -> None:
        more = f", and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        setattr(request.state, IGNORED, ", ".join(names[:MAX_NAMES]) + more)
        for name in names[:MAX_NAMES]:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                log.warning("%s has the field %s, which has no effect here", request.url.path, name)


def sentence(name: str, why: str | None) -> str:
    """Return the error message for a refused field. `name` includes the path to the field."""
    return f"there is no field {cut(name)!r}" + ("" if why is None else f"; {why}")


def near_miss(owner: type[Body], name: str) -> str | None:
    """Return a question that suggests a similar field of the object, or None."""
    known = {_plain(f.alias or n): f.alias or n for n, f in owner.model_fields.items() if n not in owner.REFUSED}
    close = difflib.get_close_matches(_plain(name[:MAX_SHOWN]), known, n=1, cutoff=NEAR)
    return f"did you mean {known[close[0]]!r}?" if close else None


def _why_not(owner: type[Body], path: str, name: str) -> str | None:
    """Return the reason why a field is refused under every policy, or None if it is not."""
    if not path and name in owner.ALSO_CALLED:
        return f"use {owner.ALSO_CALLED[name]}"
    if not path and issubclass(owner, Sampling):
        if name in ALSO_CALLED:
            return f"use {ALSO_CALLED[name]}"
        if name in NOT_HERE:
            return NOT_HERE[name]
    return near_miss(owner, name)


def _asks_nothing(owner: type[Body], name: str, value: Any) -> bool:
    """Return whether a known field of other servers has a value that requests the behavior here."""
    is_sampling = issubclass(owner, Sampling)
    is_known = name in owner.ALSO_CALLED or (is_sampling and (name in ALSO_CALLED or name in NOT_HERE))
    is_neutral = value in NOTHING or value in NEUTRAL.get(name, ())
    return (is_known and is_neutral) or (is_sampling and name in DEPENDENT)


def _unknown(body: Body, path: str) -> Iterator[tuple[str, type[Body], str, Any]]:
    """Remove the unknown fields of an object and of those in it. Yield path, owner's class, name and value of each."""
    extra = body.__pydantic_extra__
    if extra:
        found = list(extra.items())
        extra.clear()
        for name, value in found:
            yield path, type(body), name, value
    for field in _fields_of_objects(type(body)):
        found = getattr(body, field)
        if isinstance(found, Body):
            yield from _unknown(found, f"{path}{field}.")
        elif isinstance(found, list):
            for i, one in enumerate(found):
                if isinstance(one, Body):
                    yield from _unknown(one, f"{path}{field}[{i}].")


@cache
def _fields_of_objects(kind: type[Body]) -> tuple[str, ...]:
    """Return the names of the fields that may contain `Body` objects."""
    return tuple(name for name, field in kind.model_fields.items() if model_in(field.annotation) is not None)


def model_in(annotation: Any) -> type[Body] | None:
    """Return the `Body` class in a field's annotation, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return annotation
    return next((model for part in get_args(annotation) if (model := model_in(part)) is not None), None)


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").casefold()


def _written(name: str) -> str:
    """Escape a name for a header. All indices of a list become one name."""
    return json.dumps(PLACE.sub("[]", name[:MAX_NAME]))[1:-1].replace("\x7f", "\\u007f")
