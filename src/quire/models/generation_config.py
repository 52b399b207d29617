"""generation_config.json: the default sampling parameters of a checkpoint's authors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelError, RequestError
from quire.models.files import GENERATION, Where, files_of
from quire.models.weights import read_json
from quire.request import FILE, SamplingParams, served_in

NOTHING = ("none", "vllm")  # the second is vLLM's name for it
# Theirs -> ours. Like vLLM, Quire ignores the other keys of the file, do_sample included.
FIELDS = served_in(FILE)


def read_default_sampling(source: str, where: Where) -> dict[str, Any]:
    """Return the default values of the fields of SamplingParams that a request does not set.

    source: "auto" (from the model's files, if present), "none", or a directory with a generation_config.json.
    Raises ConfigError for a directory without one, ModelError for a value that SamplingParams rejects.
    """
    if source in NOTHING:
        return {}
    if source == "auto":
        files = files_of(where)
        place, given = files.path, files.generation()
    else:
        place = Path(source) / GENERATION
        if not place.is_file():
            raise ConfigError(
                f"generation_config is {source!r}; it must be auto, none, or a directory with {GENERATION}"
            )
        given = read_json(place)
    found = {ours: given[theirs] for theirs, ours in FIELDS.items() if given.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{place}: {error}; --generation-config none leaves the file out") from error
    return found
