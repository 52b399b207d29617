"""What commands show in a terminal: a chat, and what a running server does."""

from __future__ import annotations

from quire.errors import check_installed

check_installed("quire.terminal", "prometheus_client", "rich")
