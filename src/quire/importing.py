"""What importing torch and all that is built on it costs, cut."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector, if it is on.

    An import makes hundreds of thousands of objects and no garbage. Looking through them again and again takes a tenth
    of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
