"""Input of messages: a line, several lines between triple quotes, or all lines of a paste."""

from __future__ import annotations

import select
import sys
from collections.abc import Sequence

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
PASTED = 0.02  # seconds within which the next line of a paste arrives


class Reader:
    """Reads messages from the terminal, with line editing and history where Python has readline."""

    def __init__(self, commands: Sequence[str]) -> None:
        """commands: words that the tab key completes at the beginning of a line."""
        self._commands = tuple(commands)
        try:
            import readline
        except ImportError:  # a Python without it
            return
        readline.set_completer_delims("")
        readline.set_completer(self._completed)
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def read(self) -> str:
        """Read a message. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        line = input(PROMPT)
        if line.lstrip().startswith(QUOTES):
            return self._quoted(line.lstrip().removeprefix(QUOTES))
        lines = [line]
        while not line.startswith("/") and _is_waiting():
            lines.append(input())
        return "\n".join(lines)

    def _quoted(self, line: str) -> str:
        lines = []
        while QUOTES not in line:
            lines.append(line)
            line = input(MORE)
        lines.append(line.partition(QUOTES)[0])
        return "\n".join(lines).strip("\n")

    def _completed(self, text: str, number: int) -> str | None:
        """Return the command of that number among those that begin with `text`: the interface of readline."""
        found = [command for command in self._commands if text.startswith("/") and command.startswith(text)]
        return found[number] if number < len(found) else None


def _is_waiting() -> bool:
    """Return whether further input is waiting."""
    return bool(select.select([sys.stdin], [], [], PASTED)[0])
