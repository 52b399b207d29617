"""Environment variables of options: QUIRE_ and the option's name in capitals. The command line takes precedence."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator
from typing import Any

PREFIX = "QUIRE_"
OF_RANKS = "QUIRE_RANK"  # is no option: rank 0 passes it to the other processes of a model

log = logging.getLogger("quire")


def variable_of(name: str) -> str:
    """Return the variable of an option, which is named as in a config or with dashes."""
    return PREFIX + name.replace("-", "_").upper()


def default_url() -> str:
    """Return the URL of the server that QUIRE_PORT names on this machine, by default that of port 8000."""
    return f"http://127.0.0.1:{os.environ.get(variable_of('port'), '8000')}"


def warn_of_unknown_variables(context: Any) -> None:
    """Log a warning for each variable that begins as those of options do and is not one of any command."""
    known = {OF_RANKS, *_variables(context.find_root().command)}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "quire serve --help lists the variables"
            log.warning("the environment has %s, which is not the variable of an option; %s", name, hint)


def _variables(command: Any) -> Iterator[str]:
    yield from (one.envvar for one in command.params if isinstance(one.envvar, str))
    for below in getattr(command, "commands", {}).values():
        yield from _variables(below)
