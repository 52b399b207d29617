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
    from quire.config import AsyncEngineArgs, EngineArgs
    from quire.engine.beam import BeamSearchParams
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.embedding import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from quire.frontend.llm import LLM
    from quire.frontend.outputs import CompletionOutput, RequestOutput
    from quire.inputs import TextPrompt, TokensPrompt
    from quire.request import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "ops",
]


_MODULES = {
    "LLM": "quire.frontend.llm",
    "AsyncEngineArgs": "quire.config",
    "AsyncLLM": "quire.frontend.async_llm",
    "BeamSearchParams": "quire.engine.beam",
    "ClassificationRequestOutput": "quire.frontend.embedding",
    "CompletionOutput": "quire.frontend.outputs",
    "EmbeddingRequestOutput": "quire.frontend.embedding",
    "EngineArgs": "quire.config",
    "PoolingRequestOutput": "quire.frontend.embedding",
    "RequestOutput": "quire.frontend.outputs",
    "SamplingParams": "quire.request",
    "ScoringRequestOutput": "quire.frontend.embedding",
    "StructuredOutputsParams": "quire.request",
    "TextPrompt": "quire.inputs",
    "TokensPrompt": "quire.inputs",
}


def __getattr__(name: str) -> Any:
    if name not in (*_MODULES, "ops"):
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module

    from quire.importing import uncollected

    with uncollected():
        return import_module("quire.ops") if name == "ops" else getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
