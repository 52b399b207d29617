"""Terminal interfaces: a chat, and a monitor of a running server."""

from __future__ import annotations

from quire.errors import check_installed

check_installed("quire.terminal", "prometheus_client", "rich")
