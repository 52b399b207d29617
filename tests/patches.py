"""Replacing a function of the standard library where other threads of the process must not notice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


def set_in_this_thread(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, replacement: Callable[..., Any]
) -> None:
    """Servers of other tests' fixtures may still run in threads of their own, which keep the real function."""
    real, own = getattr(module, name), threading.get_ident()

    def chosen(*arguments: Any, **options: Any) -> Any:
        return (replacement if threading.get_ident() == own else real)(*arguments, **options)

    monkeypatch.setattr(module, name, chosen)
