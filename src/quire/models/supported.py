"""The list of supported models: the result of the test suite's sweep over transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).parent / "supported.json"

HOW = ("own decoder", "adapter", "adapter, one sequence at a time", "refused")


class Supported(NamedTuple):
    """The support of a model type."""

    name: str  # its model_type
    how: str  # the implementation, in HOW
    reason: str  # why it is refused


class Repository(NamedTuple):
    """The support of a published checkpoint."""

    maker: str
    name: str  # of the repository
    how: str  # the implementation, in HOW, and whether only the text part is served
    forms: str  # the supported quantised formats of its weights
    reason: str  # why it is refused


class Sweep(NamedTuple):
    """Published checkpoints, and all model types of one release of transformers."""

    transformers: str  # the release
    repositories: list[Repository]
    types: list[Supported]


def read() -> Sweep:
    """Read the file that the sweep wrote."""
    content = json.loads(PATH.read_text(encoding="utf-8"))
    repositories = [Repository(*row) for row in content["repositories"]]
    return Sweep(content["transformers"], repositories, [Supported(*row) for row in content["types"]])
