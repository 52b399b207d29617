"""Processes that can be interrupted, also where whoever started the tests in the background made SIGINT be ignored."""

import signal


def obey() -> None:
    """For a process that is about to begin: an interrupt means what it usually does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
