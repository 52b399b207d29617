"""Quire: paged attention for Python.

    from quire import LLM, BeamSearchParams, SamplingParams, ops

Names are imported when they are first used, so that `import quire` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire import ops
    from quire.engine.beam import BeamSearchParams
    from quire.llm import LLM
    from quire.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "__version__", "ops"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from quire.llm import LLM

        return LLM
    if name == "BeamSearchParams":
        from quire.engine.beam import BeamSearchParams

        return BeamSearchParams
    if name == "SamplingParams":
        from quire.request import SamplingParams

        return SamplingParams
    if name == "ops":
        import importlib

        return importlib.import_module("quire.ops")
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
