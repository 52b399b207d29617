"""The simulator: the real scheduler, router and autoscaler on a virtual clock, with steps that are not computed."""

from __future__ import annotations

from quire.errors import check_installed

check_installed("quire.simulate", "yaml")
