"""Programs that no one has read, grammars and chat templates, in child processes with limits."""

from __future__ import annotations

from quire.errors import check_installed

check_installed("quire.sandbox", "jinja2", "transformers")
