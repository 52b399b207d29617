"""What it costs to import torch and all that is built on it, and to read a model's weights, cut."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector, if it is on.

    An import makes hundreds of thousands of objects and no garbage, and reading a model hardly any. Looking through all
    objects again and again takes a tenth of an import's time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
