"""Reading the chat templates of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import QuireError

MAX_SOURCE = 2**20  # bytes


def default_template(settings: Mapping[str, Any]) -> str | None:
    """Return the template of a tokenizer_config.json: a string, or the one named "default" in a list."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = (entry for entry in found if isinstance(entry, Mapping) and entry.get("name") == "default")
        found = next((entry.get("template") for entry in named), None)
    return found if isinstance(found, str) else None


def read_template(path: Path, error: type[QuireError]) -> str:
    """Read a chat template from a file. Raises `error` if it is unreadable or longer than MAX_SOURCE."""
    try:
        data = path.read_bytes()
        if len(data) > MAX_SOURCE:
            raise error(f"chat_template {path} has {len(data)} bytes; the most is {MAX_SOURCE}")
        return data.decode()
    except (OSError, UnicodeDecodeError) as bad:
        raise error(f"chat_template {path} cannot be read: {bad}") from bad
