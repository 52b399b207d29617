"""Processes of sandboxes start here as they do for users: see tests/warm.py."""

import subprocess
from collections.abc import Iterator

import pytest

from quire.sandbox import process


@pytest.fixture(scope="package", autouse=True)
def _cold() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", subprocess)
        yield
