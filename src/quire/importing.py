"""Faster imports and model loading: a context without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's garbage collector within the context, if it is enabled.

    Importing torch and its dependents creates hundreds of thousands of objects and no garbage, and reading a model
    creates hardly any. The collector's repeated scans of all objects take a tenth of an import's time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
