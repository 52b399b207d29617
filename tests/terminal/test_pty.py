"""quire chat and quire top as a user types them, at a terminal."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.forks import QUIRE, SLOWLY, Process, Spawner
from tests.marks import of_long_runs

pytestmark = pytest.mark.slow

# `quire` at the terminal that is the last argument.
AT_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
terminal = os.open(sys.argv.pop(), os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for number in (0, 1, 2):
    os.dup2(terminal, number)
os.environ["TERM"] = {term!r}
sys.stdin = open(0)
sys.stdout = open(1, "w", buffering=1, closefd=False)
sys.stderr = open(2, "w", buffering=1, closefd=False)
from quire.cli import main
main()
"""
LIMIT = 60.0  # s
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """A terminal that a process writes to."""

    def __init__(self, number: int) -> None:
        self.process: Process
        self._number = number
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._number, text.encode())

    def shows(self, pattern: str) -> str:
        """What it shows up to a match of this, once there is one; later calls look at what follows it."""
        end = time.monotonic() + LIMIT
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < end, f"it does not show {pattern!r}: {self.text}"
            self._read()
        before = self.text[: found.end()]
        self._shown = self.text[found.end() :]
        return before

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self._shown)

    def _read(self) -> None:
        try:
            self._shown += os.read(self._number, 65536).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # the process has ended
            time.sleep(0.05)

    def status(self) -> int:
        """That of the process, when it has ended."""
        end = time.monotonic() + LIMIT
        while self.process.is_alive and time.monotonic() < end:
            self._read()
        status = self.process.wait()
        assert "Traceback" not in self.text
        return status


@contextmanager
def terminal(forks: Spawner, *arguments: str, term: str = "xterm-256color") -> Iterator[Terminal]:
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    found = Terminal(ours)
    found.process = forks.start(*arguments, os.ttyname(theirs), program=SLOWLY + AT_A_TERMINAL.format(term=term))
    try:
        yield found
    finally:
        found.process.kill()
        os.close(theirs)
        os.close(ours)


@pytest.mark.parametrize("term", ["xterm-256color", of_long_runs("dumb")])
def test_a_chat(forks: Spawner, term: str) -> None:
    with terminal(forks, "run", "--num-blocks", "64", term=term) as at:
        at.shows("No model was named, so this is the small one")
        at.shows("quire-embedded, ")
        at.shows(">>> ")
        at.type("a stack\n")
        at.shows(r"\n.*\w+.*\n")
        at.type("\x03")
        at.shows(r"\(stopped\)")
        at.shows(">>> ")
        at.type('"""first\n')
        at.shows(r"\.\.\. ")
        at.type('second"""\n')
        at.shows(r"\n.*\w+.*\n")
        at.type("\x03")
        at.shows(">>> ")
        at.type("/stats\n")
        at.shows(r"last answer +\d+ prompt tokens \(\d+ from the prefix cache\)")
        at.shows(">>> ")
        at.type("/statz x\n")
        at.shows(r"error: there is no command /statz; did you mean /stats\?")
        at.shows(">>> ")
        at.type("\x03")
        at.shows(r"Ctrl-C again, Ctrl-D or /exit ends the chat\.")
        at.shows(">>> ")
        at.type("\x03")
        assert at.status() == 0


def test_ctrl_d_ends_a_chat_and_lines_pasted_at_once_are_one_message(forks: Spawner) -> None:
    with terminal(forks, "chat", "--num-blocks", "64", "--max-tokens", "8", "--no-markdown") as at:
        at.shows(">>> ")
        at.type("/system be brief\n")
        at.shows(">>> ")
        at.type("\x1b[200~one\ntwo\nthree\x1b[201~\n")
        at.shows("may have no more tokens")
        at.shows(">>> ")
        at.type("/stats\n")
        at.shows("the conversation has 2 messages")
        at.shows(">>> ")
        at.type("\x04")
        assert at.status() == 0


def test_a_server_that_dies_is_a_sentence_and_the_chat_goes_on(forks: Spawner) -> None:
    serve = ("serve", "--port", "0", "--num-blocks", "64")
    with forks.running(*serve, program=SLOWLY + QUIRE) as server, terminal(forks, "chat", "--url", server.url) as at:
        at.shows("quire-embedded\n")
        at.shows(">>> ")
        at.type("a stack\n")
        at.shows(r"\n.*\w+.*\n")
        server.kill()
        at.shows("error: the server at .* ended in the")
        at.shows(">>> ")
        at.type("again\n")
        at.shows(r"error: no server answers at .* \(Connection refused\)")
        at.shows(">>> ")
        at.type("/exit\n")
        assert at.status() == 0


def test_top_is_ended_by_q_and_by_ctrl_c(forks: Spawner) -> None:
    with forks.running("serve", "--port", "0", "--num-blocks", "64") as server:
        for key in ("q", "\x03"):
            with terminal(forks, "top", "--url", server.url, "--interval", "0.2") as at:
                at.shows("quire-embedded at http")
                at.shows("every 0.2 s; q ends")
                at.type(key)
                assert at.status() == 0
        with terminal(forks, "top", "--url", server.url, "--interval", "0.2") as at:
            at.shows("every 0.2 s; q ends")
            server.kill()
            at.shows("error: .*no server answers at|error: the server at")
            assert at.status() == 1
