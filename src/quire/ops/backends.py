"""Which backends there are, and which of them serves a device."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import cast

from quire.errors import Unsupported
from quire.ops.interface import Ops

# Name -> module, the preferred first: "auto" takes the first one that is available.
BACKENDS = {
    "cpu": "quire.ops.cpu",
    "triton": "quire.ops.triton",
    "reference": "quire.ops.reference",
    "gather": "quire.ops.gather",
}

NEEDS = {"triton": "triton"}  # name -> the package without which the module cannot be imported


def load(name: str = "auto", device: str = "cpu") -> Ops:
    """The backend of that name, or with "auto" the fastest one that serves the device.

    Raises Unsupported where there is no such backend, or it cannot run here; the message says why.
    """
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        reason = unavailable(candidate, device)
        if reason is None:
            return _module(candidate)
        reasons.append(f"{candidate}: {reason}")
    raise Unsupported(f"no attention backend for device {device!r} ({'; '.join(reasons)})")


def unavailable(name: str, device: str = "cpu") -> str | None:
    """Why the backend of that name cannot serve the device on this machine, or None where it can.

    Raises Unsupported where there is no such backend.
    """
    if name not in BACKENDS:
        raise Unsupported(f"there is no attention backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        return f"the package {NEEDS[name]!r} is not installed"
    return _module(name).unavailable(device)


def _module(name: str) -> Ops:
    return cast(Ops, importlib.import_module(BACKENDS[name]))
