"""Where checkpoints keep their chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import QuireError

MAX_SOURCE = 2**20  # bytes


def default_template(settings: Mapping[str, Any]) -> str | None:
    """A tokenizer_config.json's template: a text, or of a list of named ones the one called "default"."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = (entry for entry in found if isinstance(entry, Mapping) and entry.get("name") == "default")
        found = next((entry.get("template") for entry in named), None)
    return found if isinstance(found, str) else None


def read_template(path: Path, error: type[QuireError]) -> str:
    """A file's chat template. Raises that error where it is unreadable or too long."""
    try:
        data = path.read_bytes()
        if len(data) > MAX_SOURCE:
            raise error(f"chat_template {path} has {len(data)} bytes; the most is {MAX_SOURCE}")
        return data.decode()
    except (OSError, UnicodeDecodeError) as bad:
        raise error(f"chat_template {path} cannot be read: {bad}") from bad
