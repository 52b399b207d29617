"""Recommended models: short names for published checkpoints that Quire's own decoder serves.

recommended.json has their repositories, sizes and configurations, so their needs are computed without a download.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import ModelError

PATH = Path(__file__).parent / "recommended.json"
LIST = "`quire models --fits` lists the short names"


class Recommended(NamedTuple):
    """A checkpoint with a short name."""

    name: str  # family:size
    repository: str
    file: str | None  # a GGUF file of the repository; None: the repository's safetensors
    download: int  # bytes
    config: Mapping[str, Any]  # the keys of its config.json, whose dtype is that of the computation

    def __str__(self) -> str:
        return self.repository if self.file is None else f"{self.repository}, {self.file}"


@cache
def recommended() -> tuple[Recommended, ...]:
    """Read the models, smallest first."""
    return tuple(Recommended(**one) for one in json.loads(PATH.read_text(encoding="utf-8")))


def find(name: str) -> Recommended | None:
    """Return the model of a short name; None if a name may be a repository's.

    Raises ModelError for an unknown short name: one with a colon, which no repository's name has, or a family alone.
    """
    models = {model.name: model for model in recommended()}
    if name.lower() in models:
        return models[name.lower()]
    family, colon, _ = name.partition(":")
    if "/" in name or not (colon or any(one.startswith(f"{name}:") for one in models)):
        return None
    near = [one for one in models if one.startswith(f"{family}:")] or difflib.get_close_matches(name, models)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ModelError(f"there is no short name {name!r}; {hint}{LIST}")
