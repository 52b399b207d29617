"""What of a test's many runs belongs to the inner loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], count: int) -> list[Any]:
    """Parameters of which the first `count` run in `make test-fast`, and the others are slow."""
    return [pytest.param(value, marks=pytest.mark.slow if i >= count else ()) for i, value in enumerate(values)]
