"""Quire: paged attention for Python.

    from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams, ops

Each name is imported at first use, so that `import quire` is fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("Quire does not run on Windows. It runs on Linux, so also in WSL 2")

if TYPE_CHECKING:
    from quire import ops
    from quire.engine.beam import BeamSearchParams
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.llm import LLM
    from quire.request import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "SamplingParams", "StructuredOutputsParams", "__version__", "ops"]


_MODULES = {
    "LLM": "quire.frontend.llm",
    "AsyncLLM": "quire.frontend.async_llm",
    "BeamSearchParams": "quire.engine.beam",
    "SamplingParams": "quire.request",
    "StructuredOutputsParams": "quire.request",
}


def __getattr__(name: str) -> Any:
    if name not in (*_MODULES, "ops"):
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module

    from quire.importing import uncollected

    with uncollected():
        return import_module("quire.ops") if name == "ops" else getattr(import_module(_MODULES[name]), name)
