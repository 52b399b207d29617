"""Which models are served how: what the test suite's sweep over transformers found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).parent / "supported.json"

HOW = ("own decoder", "adapter", "adapter, one sequence at a time", "refused")


class Supported(NamedTuple):
    """What became of a type of model."""

    name: str  # its model_type
    how: str  # who computes it, in HOW
    reason: str  # why it is refused


class Repository(NamedTuple):
    """What becomes of a published checkpoint."""

    maker: str
    name: str  # of the repository
    how: str  # who computes it, in HOW, and whether it is the text part of more
    forms: str  # in which its weights may be quantised
    reason: str  # why it is refused


class Sweep(NamedTuple):
    """Published checkpoints, and all types of one release."""

    transformers: str  # the release
    repositories: list[Repository]
    types: list[Supported]


def read() -> Sweep:
    """What the sweep wrote."""
    content = json.loads(PATH.read_text(encoding="utf-8"))
    repositories = [Repository(*row) for row in content["repositories"]]
    return Sweep(content["transformers"], repositories, [Supported(*row) for row in content["types"]])
