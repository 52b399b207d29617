"""The list of backends, and the choice of one for a device."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import cast

from quire.errors import Unsupported
from quire.ops.backend import Backend

BACKENDS = {  # name -> the module with its BACKEND, by preference: "auto" takes the first one that is available
    "cpu": "quire.ops.cpu",
    "triton": "quire.ops.triton",
    "hopper": "quire.ops.triton.hopper",  # only by name: "triton" serves every device that it serves
    "reference": "quire.ops.backends.reference",
    "gather": "quire.ops.backends.gather",
}

NEEDS = {"triton": "triton", "hopper": "triton"}  # name -> the package that the module imports


def load(name: str = "auto", device: str = "cpu") -> Backend:
    """Return a backend by name, or with "auto" the fastest one that serves the device.

    Args:
        name: a key of BACKENDS, or "auto".
        device: a device of torch, for example "cpu" or "cuda".

    Raises:
        Unsupported: if there is no such backend or it cannot run here. The message has the reason.

    Example:
        >>> ops.load("reference").name
        'reference'
    """
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        reason = unavailable(candidate, device)
        if reason is None:
            return _backend(candidate)
        reasons.append(f"{candidate}: {reason}")
    raise Unsupported(f"no attention backend for device {device!r} ({'; '.join(reasons)})")


def unavailable(name: str, device: str = "cpu") -> str | None:
    """Return the reason why a backend cannot serve the device on this machine, or None if it can.

    Args:
        name: a key of BACKENDS.
        device: a device of torch, for example "cpu" or "cuda".

    Raises:
        Unsupported: if there is no such backend.

    Example:
        >>> print(ops.unavailable("reference"))
        None
    """
    if name not in BACKENDS:
        raise Unsupported(f"there is no attention backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        return f"the package {NEEDS[name]!r} is not installed"
    return _backend(name).unavailable(device)


def _backend(name: str) -> Backend:
    return cast(Backend, importlib.import_module(BACKENDS[name]).BACKEND)
