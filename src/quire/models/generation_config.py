"""generation_config.json: how a checkpoint's authors want tokens chosen where a request does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelError, RequestError
from quire.models.weights import read_json
from quire.request import SamplingParams

FILE = "generation_config.json"
NOTHING = ("none", "vllm")  # the second is vLLM's word for it
# Theirs -> ours. The rest of such a file, do_sample included, is left to transformers, as vLLM leaves it.
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_default_sampling(source: str, directory: Path) -> dict[str, Any]:
    """Fields of SamplingParams that a request has where it does not give them.

    source: "auto" (the file in the checkpoint's directory, if there is one), "none", or a directory with such a file.
    Raises ConfigError for a directory without one, ModelError for a value that no request could have.
    """
    if source in NOTHING:
        return {}
    path = (directory if source == "auto" else Path(source)) / FILE
    if not path.is_file():
        if source == "auto":
            return {}
        raise ConfigError(f"generation_config is {source!r}; it must be auto, none, or a directory with a {FILE}")
    given = read_json(path)
    found = {ours: given[theirs] for theirs, ours in FIELDS.items() if given.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{path}: {error}; --generation-config none leaves the file out") from error
    return found
